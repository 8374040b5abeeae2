//! A gateway as a service of systemd: passed sockets, and notifications.

use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    net::{Ipv4Addr, TcpListener, TcpStream},
    os::{
        fd::OwnedFd,
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixDatagram},
    },
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use lab::process::Child;
use rustix::process::Signal;
use tempfile::TempDir;

use super::{PORT, PORTS, addresses};
use crate::common::{LIMIT, vamoose};

/// Passes its own input and output on as systemd passes sockets: from descriptor 3 on.
const PASS: &str = "export LISTEN_FDS=2 LISTEN_PID=${OTHER_PID:-$$}; \
     exec \"$0\" \"$@\" 3<&0 4<&1 0</dev/null 1>/dev/null";

/// Set-up of a gateway.
struct Service {
    folder: TempDir,
    own: Ipv4Addr,
    door: Ipv4Addr,
}

impl Service {
    fn new() -> Result<Self> {
        let folder = TempDir::new()?;
        let [own, door, other, _] = addresses();
        let ports = format!("ports = \"{}-{}\"", PORTS[0], PORTS[1]);
        let text = format!(
            "insecure = true\nlisten = [\"{own}:4440\"]\nalias = \"{own}\"\n{ports}\n\
             peers.other = {{ alias = \"{door}\", {ports}, to = [\"{other}:4440\"] }}\n",
        );
        fs::write(folder.path().join("gateway.toml"), text)?;
        Ok(Self { folder, own, door })
    }

    /// Its listening sockets: for other gateways, and for this host's QEMUs.
    fn sockets(&self) -> Result<[TcpListener; 2]> {
        let bind = |at, port| TcpListener::bind((at, port)).context("no socket to pass");
        Ok([bind(self.own, 4440)?, bind(self.door, PORT)?])
    }

    /// Starts it with two descriptors, and with further variables that systemd would set.
    fn start(&self, passed: [OwnedFd; 2], environment: &[(&str, &str)]) -> Result<Child> {
        let [first, second] = passed;
        let mut command = Command::new("sh");
        command.args(["-c", PASS]).arg(vamoose());
        command.args(["gateway", "--config", "gateway.toml"]);
        command
            .current_dir(self.folder.path())
            .envs(environment.iter().copied())
            .stdin(Stdio::from(first))
            .stdout(Stdio::from(second))
            .stderr(Stdio::piped());
        Child::start(&mut command)
    }
}

/// The output of a gateway that has ended with an error.
fn failed(mut gateway: Child) -> Result<String> {
    let mut said = String::new();
    let mut stderr = gateway.pipes.stderr.take().context("no stderr")?;
    stderr.read_to_string(&mut said)?;
    let (status, _) = gateway.finish(LIMIT)?;
    ensure!(!status.success(), "{said}");
    Ok(said)
}

/// The next message to systemd.
fn told(systemd: &UnixDatagram) -> Result<String> {
    let mut bytes = [0; 256];
    let length = systemd.recv(&mut bytes).context("nothing was told")?;
    Ok(String::from_utf8(bytes[..length].to_vec())?)
}

/// Checks that a stranger's connection is accepted and closed.
fn expect_taken(mut stranger: TcpStream) -> Result<()> {
    stranger.set_read_timeout(Some(LIMIT))?;
    // The gateway may send a reason, and may not have read the data.
    let read = stranger.read_to_end(&mut Vec::new());
    let is_late = |error: &std::io::Error| error.kind() == std::io::ErrorKind::WouldBlock;
    ensure!(!read.as_ref().is_err_and(is_late), "{read:?}");
    Ok(())
}

#[test]
fn it_takes_connections_that_came_before_it_and_tells_when_it_is_ready_and_ends() -> Result<()> {
    let service = Service::new()?;
    let path = service.folder.path().join("notify");
    let name = format!("vamoose-test-{}", service.own);
    let in_abstract = SocketAddr::from_abstract_name(&name)?;
    for (systemd, notify) in [
        (
            UnixDatagram::bind(&path)?,
            path.to_str().context("a path")?.to_owned(),
        ),
        (UnixDatagram::bind_addr(&in_abstract)?, format!("@{name}")),
    ] {
        systemd.set_read_timeout(Some(LIMIT))?;
        let sockets = service.sockets()?;
        // Only the gateway accepts them.
        let strangers = sockets.each_ref().map(|socket| -> Result<_> {
            let mut stranger = TcpStream::connect(socket.local_addr()?)?;
            stranger.write_all(b"GET / HTTP/1.1\r\n\r\n")?;
            Ok(stranger)
        });
        let passed = sockets.map(OwnedFd::from);
        let mut gateway = service.start(passed, &[("NOTIFY_SOCKET", &notify)])?;
        ensure!(told(&systemd)? == "READY=1");
        for stranger in strangers {
            expect_taken(stranger?)?;
        }
        gateway.process().signal(Signal::TERM);
        ensure!(told(&systemd)? == "STOPPING=1");
        let (status, _) = gateway.finish(LIMIT)?;
        ensure!(status.success(), "{status}");
    }
    Ok(())
}

/// The variables are inherited by all processes that a service starts.
#[test]
fn sockets_for_another_process_are_not_used() -> Result<()> {
    let service = Service::new()?;
    let passed = service.sockets()?.map(OwnedFd::from);
    let said = failed(service.start(passed, &[("OTHER_PID", "1")])?)?;
    ensure!(said.contains("cannot listen on tcp:"), "{said}");
    Ok(())
}

#[test]
fn a_passed_descriptor_that_is_no_socket_is_an_error() -> Result<()> {
    let service = Service::new()?;
    let [first, _] = service.sockets()?;
    let passed = [first.into(), File::open("/dev/null")?.into()];
    let said = failed(service.start(passed, &[])?)?;
    let error = "descriptor 4 of LISTEN_FDS is no listening TCP socket";
    ensure!(said.contains(error), "{said}");
    Ok(())
}
