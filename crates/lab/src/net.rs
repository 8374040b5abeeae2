//! Two hosts and the wires between them: network namespaces joined by virtual cables of given rates, which can be pulled. Needs
//! root.

mod lan;

use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::AsFd as _;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

pub use self::lan::Lan;
use crate::{run, skipped};

/// Two namespaces and their wires. Dropping it removes them; end their processes first.
#[derive(Debug)]
pub struct Link {
    /// One end.
    pub source: Namespace,
    /// The other end.
    pub destination: Namespace,
    /// At least one. The addresses of the namespaces are those of the first.
    ///
    /// At the source, the address that a socket is bound to decides the wire, whichever address of the destination it connects to.
    /// For an unbound socket the destination's address decides. Answers return on the same wire.
    pub wires: Vec<Wire>,
}

/// A network namespace with loopback and one end of each wire.
#[derive(Debug)]
pub struct Namespace {
    name: String,
    address: Ipv4Addr,
}

/// A virtual cable between the namespaces.
#[derive(Debug)]
pub struct Wire {
    /// From 0.
    number: u8,
    /// The names of the namespaces.
    namespaces: [String; 2],
    /// Whether the link has other wires.
    is_one_of_many: bool,
    shape: Mutex<Shape>,
}

/// One end of a link or wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// In the namespace of the source.
    Source,
    /// In that of the destination.
    Destination,
}

/// Bytes through one end of a wire, including the headers of Ethernet, IP and TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traffic {
    /// Sent from here.
    pub sent: u64,
    /// Received here.
    pub received: u64,
}

/// Checks that links can be made here.
pub fn available() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!("network namespaces need root");
    }
    for program in ["ip", "tc"] {
        let found = Command::new(program).arg("-V").output();
        found.with_context(|| format!("there is no {program}: install iproute2"))?;
    }
    // Only a try shows whether the kernel has namespaces, veth and tbf, and a container allows them.
    Link::new(Some(1_000_000_000)).map(drop)
}

/// Makes a link like [`Link::new`]. Where that is impossible, reports the test as skipped and returns `None`.
pub fn link_or_skip(rate: Option<u64>) -> Result<Option<Link>> {
    link_of_wires_or_skip(&[rate])
}

/// Makes a link like [`Link::of_wires`]. Where that is impossible, reports the test as skipped and returns `None`.
pub fn link_of_wires_or_skip(rates: &[Option<u64>]) -> Result<Option<Link>> {
    match available().and_then(|()| Link::of_wires(rates)) {
        Ok(link) => Ok(Some(link)),
        Err(error) => skipped(&format!("no network namespaces: {error:#}")).map(|()| None),
    }
}

impl Link {
    /// Makes a link of one wire that carries `rate` bits per second in each direction, or as much as the CPU can.
    pub fn new(rate: Option<u64>) -> Result<Self> {
        Self::of_wires(&[rate])
    }

    /// No link: both ends are this host, on its loopback device. Needs no privileges.
    pub fn loopback() -> Self {
        let host = || Namespace {
            name: String::new(),
            address: Ipv4Addr::LOCALHOST,
        };
        Self {
            source: host(),
            destination: host(),
            wires: Vec::new(),
        }
    }

    /// Makes a link of several wires, each with its own rate.
    pub fn of_wires(rates: &[Option<u64>]) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("vm{}-{count}", std::process::id());
        // From here on, drop cleans up.
        let mut link = Self {
            source: Namespace::new(format!("{name}a"), address(0, End::Source))?,
            destination: Namespace::new(format!("{name}b"), address(0, End::Destination))?,
            wires: Vec::new(),
        };
        let ends = [&link.source, &link.destination];
        let names = ends.map(|namespace| namespace.name.clone());
        for (number, rate) in (0..).zip(rates) {
            let wire = Wire {
                number,
                namespaces: names.clone(),
                is_one_of_many: rates.len() > 1,
                shape: Mutex::default(),
            };
            wire.lay()?;
            rate.map_or(Ok(()), |rate| wire.set_rate(rate))?;
            link.wires.push(wire);
        }
        Ok(link)
    }

    /// Sets the rate of all wires, in bits per second.
    pub fn set_rate(&self, rate: u64) -> Result<()> {
        self.wires.iter().try_for_each(|wire| wire.set_rate(rate))
    }
}

impl Namespace {
    /// The name for `ip netns exec`; empty for this host's own, see [`Link::loopback`].
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The address of this end of the first wire.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// A command to run in this namespace. Its process is the program itself, not a wrapper.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        command_in(&self.name, program)
    }

    /// Moves the calling thread into this namespace, where it opens its sockets from now on.
    pub fn enter(&self) -> Result<()> {
        if self.name.is_empty() {
            return Ok(());
        }
        let file = File::open(format!("/run/netns/{}", self.name));
        let file = file.context("opening the network namespace")?;
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
            .context("entering the network namespace")
    }

    /// The traffic of this end of the first wire since the link was made.
    pub fn traffic(&self) -> Result<Traffic> {
        traffic(&self.name, 0)
    }

    fn new(name: String, address: Ipv4Addr) -> Result<Self> {
        run(Command::new("ip").args(["netns", "add", &name]))?;
        let namespace = Self { name, address };
        namespace.ip("link set lo up")?;
        Ok(namespace)
    }

    fn ip(&self, command: &str) -> Result<()> {
        ip(&self.name, command)
    }
}

impl Wire {
    /// The address of an end.
    pub fn address(&self, end: End) -> Ipv4Addr {
        address(self.number, end)
    }

    /// Takes the device of an end down, as if its cable was pulled: its routes are gone and sending fails; the other end has no
    /// carrier, and what it sends is lost.
    pub fn pull(&self, end: End) -> Result<()> {
        self.ip(end, &format!("link set {} down", self.device()))
    }

    /// Undoes [`Wire::pull`] at both ends. The first packets may still be lost.
    pub fn plug(&self) -> Result<()> {
        for end in End::BOTH {
            self.bring_up(end)?;
        }
        Ok(())
    }

    /// Silently loses everything that an end sends. What the other end sends passes.
    pub fn lose(&self, end: End) -> Result<()> {
        self.reshape(|shape| shape.loses[end as usize] = true)
    }

    /// Undoes [`Wire::lose`].
    pub fn deliver(&self) -> Result<()> {
        self.reshape(|shape| shape.loses = [false; 2])
    }

    /// Sets the rate, in bits per second.
    pub fn set_rate(&self, rate: u64) -> Result<()> {
        self.reshape(|shape| shape.rate = Some(rate))
    }

    /// The traffic of an end since the wire was made.
    pub fn traffic(&self, end: End) -> Result<Traffic> {
        traffic(self.namespace(end), self.number)
    }

    /// Joins the namespaces.
    fn lay(&self) -> Result<()> {
        let device = self.device();
        let [a, b] = End::BOTH.map(|end| self.hardware_address(end));
        let [source, destination] = &self.namespaces;
        let mut ip = Command::new("ip");
        ip.args(["link", "add", &device, "address", &a, "netns", source]);
        ip.args(["type", "veth", "peer", "name", &device]);
        ip.args(["address", &b, "netns", destination]);
        run(&mut ip)?;
        for end in End::BOTH {
            let address = self.address(end);
            self.ip(end, &format!("address add {address}/24 dev {device}"))?;
            self.bring_up(end)?;
        }
        if self.is_one_of_many {
            let (address, table) = (self.address(End::Source), self.table());
            self.ip(
                End::Source,
                &format!("rule add from {address} table {table}"),
            )?;
            // Also applies while the wire is pulled, when its device is gone.
            self.ip(
                End::Source,
                &format!("route add unreachable default table {table}"),
            )?;
        }
        Ok(())
    }

    /// Brings the device up, with the settings that it loses when it is down.
    fn bring_up(&self, end: End) -> Result<()> {
        let (device, peer) = (self.device(), self.address(end.other()));
        let mut commands = vec![
            format!("link set {device} up"),
            // Otherwise the loss of one direction would break both, when ARP asks for the neighbour.
            format!(
                "neighbour replace {peer} lladdr {} nud permanent dev {device}",
                self.hardware_address(end.other())
            ),
        ];
        if end == End::Source && self.is_one_of_many {
            for route in [format!("{peer}"), format!("{NETWORK} via {peer}")] {
                let table = self.table();
                commands.push(format!("route replace {route} dev {device} table {table}"));
            }
        }
        commands
            .iter()
            .try_for_each(|command| self.ip(end, command))
    }

    fn reshape(&self, change: impl FnOnce(&mut Shape)) -> Result<()> {
        let mut shape = self.shape.lock().unwrap_or_else(PoisonError::into_inner);
        let before = *shape;
        change(&mut shape);
        for end in End::BOTH {
            let queue = shape.queue(end);
            if before.queue(end) != queue {
                self.set_queue(end, queue.as_deref())?;
            }
        }
        Ok(())
    }

    fn set_queue(&self, end: End, queue: Option<&str>) -> Result<()> {
        let (namespace, device) = (self.namespace(end), self.device());
        let verb = if queue.is_some() { "replace" } else { "delete" };
        let mut tc = Command::new("tc");
        tc.args(["-n", namespace, "qdisc", verb, "dev", &device, "root"]);
        run(tc.args(queue.unwrap_or_default().split_whitespace())).map(drop)
    }

    fn ip(&self, end: End, command: &str) -> Result<()> {
        ip(self.namespace(end), command)
    }

    fn namespace(&self, end: End) -> &str {
        &self.namespaces[end as usize]
    }

    /// The device's name in both namespaces.
    fn device(&self) -> String {
        device(self.number)
    }

    fn hardware_address(&self, end: End) -> String {
        // A locally administered address.
        format!("02:00:00:00:{:02x}:{:02x}", self.number, end.host())
    }

    /// The routing table of sockets that are bound to its address.
    fn table(&self) -> String {
        format!("{}", 100 + u16::from(self.number))
    }
}

impl End {
    /// Both.
    pub const BOTH: [Self; 2] = [Self::Source, Self::Destination];

    /// The other one.
    pub fn other(self) -> Self {
        match self {
            Self::Source => Self::Destination,
            Self::Destination => Self::Source,
        }
    }

    /// The last byte of its addresses.
    fn host(self) -> u8 {
        match self {
            Self::Source => 1,
            Self::Destination => 2,
        }
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if !self.name.is_empty() {
            // This removes the devices, too. Errors are ignored.
            let _ = run(Command::new("ip").args(["netns", "delete", &self.name]));
        }
    }
}

/// How the packets of a wire are queued.
#[derive(Clone, Copy, Debug, Default)]
struct Shape {
    rate: Option<u64>,
    /// Which ends' packets are lost.
    loses: [bool; 2],
}

impl Shape {
    /// How the packets that an end sends are queued, in the terms of `tc`, unless in the default way.
    fn queue(&self, end: End) -> Option<String> {
        if self.loses[end as usize] {
            return Some("blackhole".to_owned());
        }
        self.rate.map(|rate| {
            // 4 ms of the rate, the resolution of some kernels' timers, and at least one offloaded segment.
            let burst = (rate / 8 / 250).max(128 << 10);
            format!("tbf rate {rate}bit burst {burst} latency 50ms")
        })
    }
}

/// The network of all wires.
const NETWORK: &str = "10.77.0.0/16";

fn address(wire: u8, end: End) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, wire, end.host())
}

fn device(wire: u8) -> String {
    format!("wire{wire}")
}

fn ip(namespace: &str, command: &str) -> Result<()> {
    let mut ip = Command::new("ip");
    run(ip.args(["-n", namespace]).args(command.split_whitespace())).map(drop)
}

pub(crate) fn command_in(namespace: &str, program: impl AsRef<std::ffi::OsStr>) -> Command {
    if namespace.is_empty() {
        return Command::new(program);
    }
    let mut command = Command::new("ip");
    command.args(["netns", "exec", namespace]).arg(program);
    command
}

fn traffic(namespace: &str, wire: u8) -> Result<Traffic> {
    let counter = |name: &str| -> Result<u64> {
        let path = format!("/sys/class/net/{}/statistics/{name}", device(wire));
        let text = run(command_in(namespace, "cat").arg(path))?;
        text.trim().parse().context("not a number")
    };
    Ok(Traffic {
        sent: counter("tx_bytes")?,
        received: counter("rx_bytes")?,
    })
}

#[cfg(test)]
pub(crate) mod tests;
