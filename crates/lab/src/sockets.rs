//! A port that can refuse connections for a while, and resets of connections.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fd::OwnedFd;
use rustix::net::{
    AddressFamily, Shutdown, SocketFlags, SocketType, bind, connect_unspec, getsockname, listen,
    shutdown, socket_with, sockopt,
};

/// A port of 127.0.0.1 that stays reserved while it refuses connections.
#[derive(Debug)]
pub struct Port {
    address: SocketAddr,
    listener: TcpListener,
    /// Reserves the port. A socket whose port the system chose would lose it when it stops listening; the listener does not.
    _held: OwnedFd,
}

impl Port {
    /// A free port, which refuses connections.
    pub fn new() -> io::Result<Self> {
        let held = bound(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
        let address = SocketAddr::try_from(getsockname(&held)?)?;
        let listener = TcpListener::from(bound(address)?);
        listener.set_nonblocking(true)?;
        Ok(Self {
            address,
            listener,
            _held: held,
        })
    }

    /// The address to connect to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Accepts connections from now on.
    pub fn listen(&self) -> io::Result<()> {
        Ok(listen(&self.listener, BACKLOG)?)
    }

    /// Refuses connections from now on: the kernel answers with RST. Connections not yet accepted are reset.
    pub fn refuse(&self) -> io::Result<()> {
        if sockopt::socket_acceptconn(&self.listener)? {
            shutdown(&self.listener, Shutdown::Read)?;
        }
        Ok(())
    }

    /// Accepts a connection that has arrived, without waiting.
    pub fn accept(&self) -> io::Result<TcpStream> {
        self.listener.accept().map(|(stream, _)| stream)
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        // A process that is being started may have inherited the socket. Errors are ignored.
        let _ = self.refuse();
    }
}

/// Readable when a connection has arrived, and always while the port refuses connections.
impl AsFd for Port {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// Resets a connection now, whichever threads use it. Unsent bytes are dropped.
pub fn reset(stream: &TcpStream) {
    // The connection may have ended already.
    let _ = connect_unspec(stream);
}

/// More than any test opens at once.
const BACKLOG: i32 = 128;

fn bound(address: SocketAddr) -> io::Result<OwnedFd> {
    let (family, kind) = (AddressFamily::INET, SocketType::STREAM);
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    // Two sockets may share a port while at most one of them listens.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &address)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn a_port_refuses_and_comes_back() {
        let port = Port::new().unwrap();
        for _ in 0..3 {
            let error = TcpStream::connect(port.address()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
            port.refuse().unwrap();
            port.listen().unwrap();
            let mut waiting = TcpStream::connect(port.address()).unwrap();
            port.refuse().unwrap();
            let error = waiting.read(&mut [0]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        }
    }

    /// A listener that is shut down while it does not listen hands its shutdown on to connections that it accepts later.
    #[test]
    fn a_port_that_was_told_twice_to_refuse_takes_connections_that_work() {
        let port = Port::new().unwrap();
        port.listen().unwrap();
        port.refuse().unwrap();
        port.refuse().unwrap();
        port.listen().unwrap();
        let _near = TcpStream::connect(port.address()).unwrap();
        let mut far = port.accept().unwrap();
        far.set_nonblocking(true).unwrap();
        let nothing_yet = far.read(&mut [0]).unwrap_err();
        assert_eq!(nothing_yet.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn a_port_that_is_dropped_refuses_though_another_process_has_its_socket() {
        let port = Port::new().unwrap();
        port.listen().unwrap();
        let _inherited = port.as_fd().try_clone_to_owned().unwrap();
        let address = port.address();
        drop(port);
        let error = TcpStream::connect(address).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
}
