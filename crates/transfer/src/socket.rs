//! Sockets as a migration needs them: unix or TCP, with a stall timeout, shut down from outside.

use std::{
    fs,
    io::{self, IoSlice, Read, Write},
    net::{self, TcpListener, TcpStream, ToSocketAddrs},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::PathBuf,
    time::Duration,
};

use rustix::net::sockopt;
use thiserror::Error;
use vm_memory::VolatileSlice;

use crate::{
    Address,
    memory::{self, Left},
};

/// One connection, unix or TCP. Reads and writes go through a shared reference, so that one thread
/// may read while another writes and a third one shuts the connection down.
#[derive(Debug)]
pub enum Stream {
    /// A TCP connection.
    Tcp(TcpStream),
    /// A unix stream socket.
    Unix(UnixStream),
}

/// A socket could not be opened.
#[derive(Debug, Error)]
pub enum SocketError {
    /// Dialling failed.
    #[error("cannot connect to {address}: {source}")]
    Dial {
        /// Where to.
        address: Address,
        /// Why not.
        source: io::Error,
    },
    /// Listening failed.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// Where.
        address: Address,
        /// Why not.
        source: io::Error,
    },
    /// Accepting a connection failed.
    #[error("cannot accept a connection on {address}: {source}")]
    Accept {
        /// Where.
        address: Address,
        /// Why not.
        source: io::Error,
    },
}

/// Connects to `address` within `timeout`; the same time is the connection's stall timeout.
///
/// # Errors
/// When nobody listens there, or no answer comes in time.
pub fn dial(address: &Address, timeout: Duration) -> Result<Stream, SocketError> {
    connect(address, timeout).map_err(|source| SocketError::Dial {
        address: address.clone(),
        source,
    })
}

impl Stream {
    /// Bytes that have been written and that the peer's kernel has not acknowledged; `None` where nobody counts them.
    pub(crate) fn queued(&self) -> Option<usize> {
        match self {
            Self::Tcp(stream) => memory::queued(stream.as_fd()),
            Self::Unix(_) => None,
        }
    }

    /// Ends both directions: whoever reads or writes this connection returns at once.
    pub fn shut_down(&self) {
        self.shut(net::Shutdown::Both);
    }

    /// Says that no more bytes will come; what has been written still arrives.
    pub fn finish(&self) {
        self.shut(net::Shutdown::Write);
    }

    /// Reads until `buffer` is full, or the peer has closed the connection. Returns the bytes read.
    ///
    /// # Errors
    /// As the system says; `WouldBlock` when nothing came for the stall timeout.
    pub fn read_full(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut read = 0;
        while read < buffer.len() {
            match (&mut &*self).read(&mut buffer[read..]) {
                Ok(0) => break,
                Ok(bytes) => read += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(read)
    }

    /// Writes `head` and then `tail`, in one system call where the socket takes it.
    ///
    /// # Errors
    /// As the system says; [`is_stall`] tells when the peer took nothing for the stall timeout.
    pub fn write_both(&self, head: &[u8], tail: &[u8]) -> io::Result<()> {
        let mut slices = [IoSlice::new(head), IoSlice::new(tail)];
        let mut left = &mut slices[..];
        IoSlice::advance_slices(&mut left, 0);
        while !left.is_empty() {
            match (&mut &*self).write_vectored(left) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(bytes) => IoSlice::advance_slices(&mut left, bytes),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Writes `header` and then `pages`, straight from guest memory, in one system call where the socket
    /// takes it. The guest may go on writing them: what arrives is then a mixture of old and new.
    ///
    /// # Errors
    /// As [`Stream::write_both`].
    pub fn send_memory(&self, header: &[u8], pages: &[VolatileSlice<'_>]) -> io::Result<()> {
        let mut left = Left::new(header, pages);
        while left.bytes() > 0 {
            match memory::send(self.as_fd(), &left, 0) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(bytes) => left.advance(bytes),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads straight into guest memory until `pages` are full, or the peer has closed the connection.
    /// Returns the bytes read.
    ///
    /// # Errors
    /// As [`Stream::read_full`].
    pub fn receive_memory(&self, pages: &[VolatileSlice<'_>]) -> io::Result<usize> {
        let mut left = Left::new(&[], pages);
        let wanted = left.bytes();
        while left.bytes() > 0 {
            match memory::receive(self.as_fd(), &left) {
                Ok(0) => break,
                Ok(bytes) => left.advance(bytes),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(wanted - left.bytes())
    }

    /// Bounds how long a peer may neither send nor take a byte while one is awaited.
    ///
    /// # Errors
    /// When `timeout` is zero.
    pub fn set_stall_timeout(&self, timeout: Duration) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => {
                stream.set_read_timeout(Some(timeout))?;
                stream.set_write_timeout(Some(timeout))?;
                // Bytes that the peer's kernel never acknowledges end the connection too.
                let millis = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
                sockopt::set_tcp_user_timeout(stream, millis)?;
            }
            Self::Unix(stream) => {
                stream.set_read_timeout(Some(timeout))?;
                stream.set_write_timeout(Some(timeout))?;
            }
        }
        Ok(())
    }

    fn shut(&self, how: net::Shutdown) {
        // Fails only when the peer has gone already, and then there is nothing left to end.
        let _ = match self {
            Self::Tcp(stream) => stream.shutdown(how),
            Self::Unix(stream) => stream.shutdown(how),
        };
    }

    fn tcp(stream: TcpStream, timeout: Duration) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        // A host that vanished while nothing was under way is noticed within half a minute.
        sockopt::set_socket_keepalive(&stream, true)?;
        sockopt::set_tcp_keepidle(&stream, Duration::from_secs(10))?;
        sockopt::set_tcp_keepintvl(&stream, Duration::from_secs(5))?;
        sockopt::set_tcp_keepcnt(&stream, 4)?;
        let stream = Self::Tcp(stream);
        stream.set_stall_timeout(timeout)?;
        Ok(stream)
    }

    fn unix(stream: UnixStream, timeout: Duration) -> io::Result<Self> {
        let stream = Self::Unix(stream);
        stream.set_stall_timeout(timeout)?;
        Ok(stream)
    }
}

impl Read for &Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => (&mut &*stream).read(buffer),
            Stream::Unix(stream) => (&mut &*stream).read(buffer),
        }
    }
}

impl Write for &Stream {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => (&mut &*stream).write(buffer),
            Stream::Unix(stream) => (&mut &*stream).write(buffer),
        }
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => (&mut &*stream).write_vectored(slices),
            Stream::Unix(stream) => (&mut &*stream).write_vectored(slices),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

/// Whether `error` of a read or write means that the peer neither sent nor took a byte for the stall
/// timeout: by its process (`WouldBlock`), or by its host (`TimedOut`).
pub fn is_stall(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}

/// Listens on one address. A unix socket's file is removed when the listener is dropped.
#[derive(Debug)]
pub struct Listener {
    kind: Kind,
    address: Address,
    stall_timeout: Duration,
}

#[derive(Debug)]
enum Kind {
    Tcp(TcpListener),
    Unix(UnixListener, PathBuf),
}

impl Listener {
    /// Listens on `address`. A unix socket left behind by a process that is gone is replaced; one
    /// that somebody listens on is not. Connections get `stall_timeout`.
    ///
    /// # Errors
    /// When the address is taken or not this host's.
    pub fn bind(address: &Address, stall_timeout: Duration) -> Result<Self, SocketError> {
        let listen_error = |source| SocketError::Listen {
            address: address.clone(),
            source,
        };
        let (kind, address) = match address {
            Address::Tcp { host, port } => {
                let host = if host.is_empty() { "::" } else { host };
                let listener = TcpListener::bind((host, *port)).map_err(listen_error)?;
                listener.set_nonblocking(true).map_err(listen_error)?;
                let bound = listener.local_addr().map_err(listen_error)?;
                let address = Address::Tcp {
                    host: host.to_owned(),
                    port: bound.port(),
                };
                (Kind::Tcp(listener), address)
            }
            Address::Unix(path) => {
                let listener = UnixListener::bind(path)
                    .or_else(|error| {
                        let stale = error.kind() == io::ErrorKind::AddrInUse
                            && UnixStream::connect(path)
                                .is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused);
                        if !stale {
                            return Err(error);
                        }
                        fs::remove_file(path)?;
                        UnixListener::bind(path)
                    })
                    .map_err(listen_error)?;
                listener.set_nonblocking(true).map_err(listen_error)?;
                (Kind::Unix(listener, path.clone()), address.clone())
            }
        };
        Ok(Self {
            kind,
            address,
            stall_timeout,
        })
    }

    /// Where this listens, with the port that the system chose.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Takes a connection that is waiting; `None` when there is none. Poll the listener's file
    /// descriptor to wait for one.
    ///
    /// # Errors
    /// As the system says, for example when out of file descriptors.
    pub fn try_accept(&self) -> Result<Option<Stream>, SocketError> {
        match self.accept() {
            Ok(stream) => Ok(Some(stream)),
            Err(error)
                if matches!(
                    error.kind(),
                    // The last two: the peer gave up while it was waiting.
                    io::ErrorKind::WouldBlock
                        | io::ErrorKind::Interrupted
                        | io::ErrorKind::ConnectionAborted
                ) =>
            {
                Ok(None)
            }
            Err(source) => Err(SocketError::Accept {
                address: self.address.clone(),
                source,
            }),
        }
    }

    fn accept(&self) -> io::Result<Stream> {
        match &self.kind {
            Kind::Tcp(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(false)?;
                Stream::tcp(stream, self.stall_timeout)
            }
            Kind::Unix(listener, _) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(false)?;
                Stream::unix(stream, self.stall_timeout)
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.kind {
            Kind::Tcp(listener) => listener.as_fd(),
            Kind::Unix(listener, _) => listener.as_fd(),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Kind::Unix(_, path) = &self.kind {
            // Somebody else may have removed it first.
            let _ = fs::remove_file(path);
        }
    }
}

fn connect(address: &Address, timeout: Duration) -> io::Result<Stream> {
    match address {
        Address::Unix(path) => Stream::unix(UnixStream::connect(path)?, timeout),
        Address::Tcp { host, port } => {
            let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
            for address in (host.as_str(), *port).to_socket_addrs()? {
                match TcpStream::connect_timeout(&address, timeout) {
                    Ok(stream) => return Stream::tcp(stream, timeout),
                    Err(error) => last = error,
                }
            }
            Err(last)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn a_tcp_socket_tells_what_it_holds_and_a_unix_socket_does_not() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        near.set_nonblocking(true).unwrap();
        let near = Stream::Tcp(near);
        assert_eq!(near.queued(), Some(0));
        // Nobody reads, so both buffers fill.
        let bytes = vec![7; 1 << 20];
        let mut written = 0;
        while let Ok(count) = (&near).write(&bytes) {
            written += count;
        }
        assert!(near.queued().is_some_and(|held| held > 0 && held < written));

        let mut rest = vec![0; written];
        far.read_exact(&mut rest).unwrap();
        // The last acknowledgement may be on its way.
        while near.queued() != Some(0) {
            thread::yield_now();
        }

        let (unix, _peer) = UnixStream::pair().unwrap();
        assert_eq!(Stream::Unix(unix).queued(), None);
    }
}
