//! What it costs to get pages to an encoder and out of this host, beside encoding.
//!
//! ```text
//!  QEMU ──unix socket──> vamoose ──TCP──> …
//!        writes and reads         sends; over loopback the same thread mostly receives, too
//! ```
//! Method none is no more than that, and it is far more than a copy in memory.

use std::{
    fmt,
    io::{self, Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    os::unix::net::UnixStream,
    thread,
};

use multifd::PACKET_BYTES;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

/// CPU seconds for a GiB through a socket; `None` where that could not be measured.
#[derive(Clone, Copy, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Hops {
    /// From QEMU: writing to a unix socket, and reading from it.
    pub(super) from_qemu: Option<f64>,
    /// To the other host: half of what TCP over loopback takes, where this host is both ends.
    pub(super) sending: Option<f64>,
}

/// Enough for a tenth of a second.
const PACKETS: usize = 128;

impl Hops {
    pub(super) fn measure() -> Self {
        let unix = UnixStream::pair().and_then(|(near, far)| hop(near, far));
        let tcp = tcp_pair().and_then(|(near, far)| hop(near, far));
        Self {
            from_qemu: unix.ok(),
            sending: tcp.ok().map(|both_ends| both_ends / 2.0),
        }
    }

    /// For pages that become so many times smaller on the way.
    pub(super) fn seconds_per_gib(&self, ratio: f64) -> f64 {
        self.from_qemu.unwrap_or(0.0) + self.sending.unwrap_or(0.0) / ratio
    }
}

impl fmt::Display for Hops {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |seconds: Option<f64>| match seconds {
            Some(seconds) => format!("{seconds:.2} CPU-s per GiB"),
            None => "not measured".to_owned(),
        };
        let (from_qemu, sending) = (text(self.from_qemu), text(self.sending));
        write!(f, "QEMU to vamoose {from_qemu}, sending {sending}")
    }
}

fn tcp_pair() -> io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let near = TcpStream::connect(listener.local_addr()?)?;
    let (far, _) = listener.accept()?;
    Ok((near, far))
}

/// CPU seconds of both ends for a GiB in packets.
fn hop(mut near: impl Write + Send, mut far: impl Read) -> io::Result<f64> {
    let mut buffer = packet();
    thread::scope(|scope| {
        let writes = scope.spawn(move || {
            let packet = packet();
            let start = cpu_seconds();
            for _ in 0..PACKETS {
                near.write_all(&packet)?;
            }
            io::Result::Ok(cpu_seconds() - start)
        });
        let start = cpu_seconds();
        let read = (0..PACKETS).try_for_each(|_| far.read_exact(&mut buffer));
        let reading = cpu_seconds() - start;
        // A writer that is not read from must not wait for ever.
        drop(far);
        let writing = writes.join().map_err(|_| io::ErrorKind::Other)??;
        read?;
        let bytes = PACKETS as f64 * f64::from(PACKET_BYTES);
        Ok((reading + writing) * f64::from(1 << 30) / bytes)
    })
}

fn packet() -> Vec<u8> {
    vec![0xa5; PACKET_BYTES as usize]
}

/// Of this thread.
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sockets_cost_something() {
        let hops = Hops::measure();
        assert!(hops.from_qemu.is_some_and(|seconds| seconds > 0.0));
        assert!(hops.sending.is_some_and(|seconds| seconds > 0.0));
        assert!(hops.seconds_per_gib(1.0) > hops.seconds_per_gib(4.0));
    }

    #[test]
    fn a_reader_that_fails_ends_the_measurement() {
        struct Broken;
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::ErrorKind::ConnectionReset.into())
            }
        }
        assert!(hop(io::sink(), Broken).is_err());
    }
}
