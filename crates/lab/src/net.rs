//! Two hosts and the wire between them: network namespaces joined by a virtual link of a given rate. Needs root.

use std::net::Ipv4Addr;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, bail};

use crate::{run, skipped};

/// Two namespaces and their link. Dropping it removes all; end what runs in them first.
#[derive(Debug)]
pub struct Link {
    /// One end.
    pub source: Namespace,
    /// The other end.
    pub destination: Namespace,
}

/// A network namespace with loopback and one end of the link.
#[derive(Debug)]
pub struct Namespace {
    /// Its name, and that of its end of the link.
    name: String,
    address: Ipv4Addr,
}

/// What has gone through one end of the link, in bytes, with the headers of Ethernet, IP and TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traffic {
    /// Sent from here.
    pub sent: u64,
    /// Received here.
    pub received: u64,
}

/// Whether links can be made here.
pub fn available() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("network namespaces need root");
    }
    for program in ["ip", "tc"] {
        let found = Command::new(program).arg("-V").output();
        found.with_context(|| format!("there is no {program}: install iproute2"))?;
    }
    // Kernels without namespaces, veth or tbf, and containers that forbid them, show only when one tries.
    Link::new(Some(1_000_000_000)).map(drop)
}

/// Makes a link as [`Link::new`]. Where that is not possible, says loudly that the test is skipped, and gives `None`.
pub fn link_or_skip(rate: Option<u64>) -> Result<Option<Link>> {
    match available().and_then(|()| Link::new(rate)) {
        Ok(link) => Ok(Some(link)),
        Err(error) => skipped(&format!("no network namespaces: {error:#}")).map(|()| None),
    }
}

impl Link {
    /// Makes a link that carries `rate` bits a second in each direction, or as much as the CPU can.
    pub fn new(rate: Option<u64>) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        // Names of devices have at most 15 characters; process ids have 7 digits.
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("vm{}-{count}", std::process::id());
        // From here on drop cleans up, however far this gets.
        let link = Self {
            source: Namespace::new(format!("{name}a"), Ipv4Addr::new(10, 77, 0, 1))?,
            destination: Namespace::new(format!("{name}b"), Ipv4Addr::new(10, 77, 0, 2))?,
        };
        let (a, b) = (&link.source, &link.destination);
        let ends = [
            "add", &a.name, "netns", &a.name, "type", "veth", "peer", "name", &b.name, "netns",
            &b.name,
        ];
        run(Command::new("ip").arg("link").args(ends))?;
        a.configure(rate)?;
        b.configure(rate)?;
        Ok(link)
    }

    /// Makes the link carry `rate` bits a second from now on, whatever it carried before.
    pub fn set_rate(&self, rate: u64) -> Result<()> {
        self.source.shape(rate)?;
        self.destination.shape(rate)
    }
}

impl Namespace {
    /// The name, as for `ip netns exec`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The address of this end; the other one reaches it there.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// A command that will run in this namespace. Its process is the program itself, no wrapper.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name]).arg(program);
        command
    }

    /// What has gone through this end since the link was made.
    pub fn traffic(&self) -> Result<Traffic> {
        let counter = |name: &str| -> Result<u64> {
            let path = format!("/sys/class/net/{}/statistics/{name}", self.name);
            let text = run(self.command("cat").arg(path))?;
            text.trim().parse().context("not a number")
        };
        Ok(Traffic {
            sent: counter("tx_bytes")?,
            received: counter("rx_bytes")?,
        })
    }

    fn new(name: String, address: Ipv4Addr) -> Result<Self> {
        run(Command::new("ip").args(["netns", "add", &name]))?;
        Ok(Self { name, address })
    }

    fn configure(&self, rate: Option<u64>) -> Result<()> {
        let Self { name, address } = self;
        let ip = || {
            let mut ip = Command::new("ip");
            ip.args(["-n", name]);
            ip
        };
        let address = format!("{address}/24");
        run(ip().args(["address", "add", &address, "dev", name]))?;
        for device in ["lo", name] {
            run(ip().args(["link", "set", device, "up"]))?;
        }
        rate.map_or(Ok(()), |rate| self.shape(rate))
    }

    fn shape(&self, rate: u64) -> Result<()> {
        let name = &self.name;
        // 4 ms of the rate, as the kernel's timer is not finer everywhere, and never less than one offloaded segment.
        let burst = (rate / 8 / 250).max(128 << 10).to_string();
        let queue = ["-n", name, "qdisc", "replace", "dev", name, "root", "tbf"];
        let rate = format!("{rate}bit");
        let shape = ["rate", &rate, "burst", &burst, "latency", "50ms"];
        run(Command::new("tc").args(queue).args(shape))?;
        Ok(())
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // The device goes with it. Errors are ignored.
        let _ = run(Command::new("ip").args(["netns", "delete", &self.name]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::time::{Duration, Instant};

    use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

    /// Runs something on a thread in the namespace; what it opens stays there.
    fn inside<T: Send>(namespace: &Namespace, what: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let run = || {
                let file = std::fs::File::open(format!("/run/netns/{}", namespace.name())).unwrap();
                move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
                what()
            };
            scope.spawn(run).join().unwrap()
        })
    }

    #[test]
    fn a_link_carries_its_rate_and_counts() {
        const BYTES: usize = 4 << 20;
        let Some(link) = link_or_skip(Some(100_000_000)).unwrap() else {
            return;
        };
        let address = link.destination.address();
        let listener = inside(&link.destination, || {
            TcpListener::bind((address, 0)).unwrap()
        });
        let target = listener.local_addr().unwrap();
        let mut sender = inside(&link.source, || TcpStream::connect(target).unwrap());
        let start = Instant::now();
        let writer = std::thread::spawn(move || sender.write_all(&vec![1; BYTES]).unwrap());
        let (mut receiver, _) = listener.accept().unwrap();
        let received = receiver.read_to_end(&mut Vec::new()).unwrap();
        let elapsed = start.elapsed();
        writer.join().unwrap();
        assert_eq!(received, BYTES);
        let bytes = BYTES as u64;
        // 4 MiB at 100 Mbit/s are 336 ms, less the burst. A slow machine may take any longer.
        assert!(elapsed > Duration::from_millis(250), "{elapsed:?}");
        let (sent, got) = (
            link.source.traffic().unwrap(),
            link.destination.traffic().unwrap(),
        );
        assert!(sent.sent > bytes && sent.sent < bytes * 11 / 10, "{sent:?}");
        assert!(got.received > bytes, "{got:?}");
    }

    #[test]
    fn nothing_is_left_behind() {
        let Some(link) = link_or_skip(None).unwrap() else {
            return;
        };
        let path = format!("/run/netns/{}", link.source.name());
        assert!(std::fs::exists(&path).unwrap());
        drop(link);
        assert!(!std::fs::exists(&path).unwrap());
    }
}
