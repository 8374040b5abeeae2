//! Unix and TCP sockets with a stall timeout, which another thread can shut down.

use std::{
    fs,
    io::{self, IoSlice, Read, Write},
    net::{self, IpAddr, TcpListener, TcpStream},
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd, RawFd},
        unix::{
            fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _},
            net::UnixStream,
        },
    },
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags},
    fs::{AtFlags, Mode, OFlags, Uid, chownat, fchmod, open},
    io::Errno,
    net::{
        AddressFamily, SendAncillaryBuffer, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
        accept_with, bind, connect as connect_to, connect_unspec, listen, send, sendmsg,
        socket_with, sockopt,
    },
    process::geteuid,
};
use thiserror::Error;
use tracing::{debug, warn};
use vm_memory::VolatileSlice;

use crate::{
    Address, Peers, left,
    memory::{self, Left},
    peer::{Peer, peer_of},
    timeouts, wait_until,
};

/// One connection, unix or TCP. Reads and writes go through a shared reference, so that one thread
/// may read while another writes and a third one shuts the connection down.
#[derive(Debug)]
pub enum Socket {
    /// A TCP connection.
    Tcp(TcpStream),
    /// A unix stream socket.
    Unix(UnixStream),
}

/// A socket could not be opened.
#[derive(Debug, Error)]
#[error("cannot {action} {address}")]
pub struct SocketError {
    action: &'static str,
    /// The address.
    pub address: Address,
    /// The system's error.
    pub source: io::Error,
}

impl SocketError {
    /// Connecting to `address` failed.
    pub fn dial(address: &Address, source: io::Error) -> Self {
        Self::of("connect to", address, source)
    }

    fn of(action: &'static str, address: &Address, source: io::Error) -> Self {
        let address = address.clone();
        Self {
            action,
            address,
            source,
        }
    }

    /// Whether the name of a host has no address.
    pub fn is_unknown_name(&self) -> bool {
        let is_tcp = matches!(self.address, Address::Tcp { .. });
        is_tcp && self.source.kind() == io::ErrorKind::NotFound
    }

    /// Whether the system is out of file descriptors or memory, which may pass.
    pub fn is_exhaustion(&self) -> bool {
        matches!(
            Errno::from_io_error(&self.source),
            Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)
        )
    }
}

impl Socket {
    /// Round-trip time of a TCP connection, if known.
    pub(crate) fn round_trip(&self) -> Option<Duration> {
        let Self::Tcp(stream) = self else { return None };
        memory::tcp_progress(stream.as_fd()).map(|progress| progress.round_trip)
    }

    /// The peer's address; `None` for a process of this host that uses a unix socket.
    pub(crate) fn peer_ip(&self) -> Option<IpAddr> {
        let Self::Tcp(stream) = self else { return None };
        stream.peer_addr().ok().map(|peer| peer.ip())
    }

    /// The process at the other end of a unix socket: the one that called `connect` or `listen`. `None` if it is unknown or in
    /// another pid namespace.
    pub fn peer_pid(&self) -> Option<u32> {
        let Self::Unix(stream) = self else {
            return None;
        };
        let peer = memory::peer_credentials(stream.as_fd()).ok()?;
        u32::try_from(peer.pid).ok().filter(|pid| *pid != 0)
    }

    /// Ends both directions: calls that read or write this connection return at once.
    pub fn shut_down(&self) {
        match self {
            Self::Tcp(stream) if self.resets_at_end() => {
                if connect_unspec(stream).is_err() {
                    // Some kernels refuse while a thread reads. This wakes the thread; closing the socket resets the connection.
                    self.shut(net::Shutdown::Read);
                }
            }
            _ => self.shut(net::Shutdown::Both),
        }
    }

    /// Lets a TCP connection end with a reset, when it is [shut down](Self::shut_down), dropped, or its process is killed: the peer
    /// must not take that for the end of the bytes. `false` takes it back, when both directions have ended.
    pub(crate) fn reset_at_end(&self, resets: bool) {
        if let Self::Tcp(stream) = self {
            // Fails for no connection.
            let _ = sockopt::set_socket_linger(stream, resets.then_some(Duration::ZERO));
        }
    }

    fn resets_at_end(&self) -> bool {
        matches!(sockopt::socket_linger(self), Ok(Some(Duration::ZERO)))
    }

    /// Ends the direction to the peer; what has been written still arrives.
    pub fn finish(&self) {
        self.shut(net::Shutdown::Write);
    }

    /// Ends the direction from the peer without its notice. Does nothing for a unix socket, where the peer would notice.
    pub(crate) fn stop_reading(&self) {
        if let Self::Tcp(_) = self {
            self.shut(net::Shutdown::Read);
        }
    }

    /// Ends the direction to the peer, and waits until the peer has closed the connection, or until `deadline`. Closing a socket
    /// with unread bytes would discard the bytes written last.
    pub(crate) fn linger(&self, deadline: Instant) {
        self.finish();
        let mut unread = [0; 4096];
        while let Ok(Some(1..)) = self.read_until(&mut unread, Some(deadline))
            && Instant::now() < deadline
        {}
    }

    /// Reads available bytes: at least one, or 0 if the peer has closed the connection. `None` if nothing arrives by
    /// `deadline`.
    ///
    /// # Errors
    /// The system's.
    pub fn read_until(
        &self,
        out: &mut [u8],
        deadline: Option<Instant>,
    ) -> io::Result<Option<usize>> {
        loop {
            if !wait_until(&mut [PollFd::new(self, PollFlags::IN)], deadline)? {
                return Ok(None);
            }
            match (&mut &*self).read(out) {
                Err(error) if is_transient(&error) => {}
                read => return read.map(Some),
            }
        }
    }

    /// Writes `head` and then `tail`, in one system call if the socket takes all of it.
    ///
    /// # Errors
    /// The system's; see [`is_stall`] for a peer that took nothing for the stall timeout.
    pub fn write_both(&self, head: &[u8], tail: &[u8]) -> io::Result<()> {
        self.write_slices(&mut [IoSlice::new(head), IoSlice::new(tail)])
    }

    /// As [`write_both`](Self::write_both), of any number of slices.
    pub(crate) fn write_slices(&self, slices: &mut [IoSlice<'_>]) -> io::Result<()> {
        self.write_all(slices, &mut |taken| match taken {
            0 => Err(io::ErrorKind::WouldBlock.into()),
            _ => Ok(()),
        })
    }

    /// Writes `header` and then `pages`, straight from guest memory, in one system call if the socket takes all of it. If the
    /// guest writes meanwhile, the peer receives a mixture of old and new bytes.
    ///
    /// # Errors
    /// As [`Socket::write_both`].
    pub fn send_memory(&self, header: &[u8], pages: &[VolatileSlice<'_>]) -> io::Result<()> {
        let mut left = Left::new(header, pages);
        while left.bytes() > 0 {
            match uninterrupted(|| memory::send(self.as_fd(), &left, 0))? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                bytes => left.advance(bytes),
            }
        }
        Ok(())
    }

    /// Reads available bytes straight into guest memory: at least one, or 0 if the peer has closed the connection.
    pub(crate) fn receive_memory(&self, left: &mut Left<'_>) -> io::Result<usize> {
        let bytes = uninterrupted(|| memory::receive(self.as_fd(), left))?;
        left.advance(bytes);
        Ok(bytes)
    }

    /// Writes all of `slices`. `stalled` is called with the number of bytes taken whenever the kernel has not taken everything
    /// within the stall timeout; its error ends the write.
    pub(crate) fn write_all(
        &self,
        mut slices: &mut [IoSlice<'_>],
        stalled: &mut dyn FnMut(usize) -> io::Result<()>,
    ) -> io::Result<()> {
        IoSlice::advance_slices(&mut slices, 0);
        while !slices.is_empty() {
            match (&mut &*self).write_vectored(slices) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(bytes) => {
                    IoSlice::advance_slices(&mut slices, bytes);
                    if !slices.is_empty() {
                        stalled(bytes)?;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => stalled(0)?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Lets reads and writes return after `patience` without progress. A session judges a connection by the bytes it receives,
    /// not by TCP acknowledgements: a live peer may have stopped reading.
    pub(crate) fn set_patience(&self, patience: Duration) -> io::Result<()> {
        self.set_stall_timeout(patience)?;
        if let Self::Tcp(stream) = self {
            sockopt::set_tcp_user_timeout(stream, 0)?;
        }
        Ok(())
    }

    /// Lets the next read or write return by `deadline`. Fails if the deadline has passed.
    pub(crate) fn set_deadline(&self, deadline: Instant) -> io::Result<()> {
        match left(deadline) {
            Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
            left => self.set_patience(left.max(Duration::from_millis(1))),
        }
    }

    /// Sets the stall timeout: how long a read or write waits for the peer.
    ///
    /// # Errors
    /// When `timeout` is zero.
    pub fn set_stall_timeout(&self, timeout: Duration) -> io::Result<()> {
        sockopt::set_socket_timeout(self, sockopt::Timeout::Recv, Some(timeout))?;
        sockopt::set_socket_timeout(self, sockopt::Timeout::Send, Some(timeout))?;
        if let Self::Tcp(stream) = self {
            // Unacknowledged bytes end the connection after the same time.
            let millis = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
            sockopt::set_tcp_user_timeout(stream, millis)?;
        }
        Ok(())
    }

    /// The stall timeout; zero if there is none.
    pub fn stall_timeout(&self) -> Duration {
        let timeout = sockopt::socket_timeout(self, sockopt::Timeout::Recv);
        timeout.ok().flatten().unwrap_or_default()
    }

    fn shut(&self, how: net::Shutdown) {
        // Fails only if the peer has closed the connection already.
        let _ = match self {
            Self::Tcp(stream) => stream.shutdown(how),
            Self::Unix(stream) => stream.shutdown(how),
        };
    }

    /// Configures a new connection.
    pub(crate) fn configured(self, timeout: Duration) -> io::Result<Self> {
        match &self {
            Self::Tcp(stream) => {
                stream.set_nonblocking(false)?;
                stream.set_nodelay(true)?;
                sockopt::set_socket_keepalive(stream, true)?;
                sockopt::set_tcp_keepidle(stream, timeouts::KEEPALIVE_IDLE)?;
                sockopt::set_tcp_keepintvl(stream, timeouts::KEEPALIVE_INTERVAL)?;
                sockopt::set_tcp_keepcnt(stream, 4)?;
            }
            Self::Unix(stream) => stream.set_nonblocking(false)?,
        }
        self.set_stall_timeout(timeout)?;
        Ok(self)
    }
}

/// A connected stream socket that the program has made itself: TCP, unix, vsock.
impl TryFrom<OwnedFd> for Socket {
    type Error = io::Error;

    fn try_from(socket: OwnedFd) -> io::Result<Self> {
        if sockopt::socket_type(&socket)? != SocketType::STREAM {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let socket = match sockopt::socket_domain(&socket)? {
            AddressFamily::INET | AddressFamily::INET6 => Self::Tcp(socket.into()),
            // Only what works with a stream socket of any domain is done with these.
            _ => Self::Unix(socket.into()),
        };
        socket.configured(timeouts::STALL)
    }
}

impl Read for &Socket {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(stream) => (&mut &*stream).read(buffer),
            Socket::Unix(stream) => (&mut &*stream).read(buffer),
        }
    }
}

/// Writing to a closed connection is an error without SIGPIPE, which would kill a VMM that does not ignore it.
impl Write for &Socket {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        Ok(send(*self, buffer, SendFlags::NOSIGNAL)?)
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut control = SendAncillaryBuffer::default();
        Ok(sendmsg(*self, slices, &mut control, SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

/// Whether `error` of a read or write means that the peer made no progress for the stall timeout: its process (`WouldBlock`) or
/// its host (`TimedOut`).
pub fn is_stall(error: &io::Error) -> bool {
    [io::ErrorKind::WouldBlock, io::ErrorKind::TimedOut].contains(&error.kind())
}

/// Repeats a system call until no signal interrupts it.
pub(crate) fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Whether a read or write may simply be repeated: it timed out, or a signal interrupted it.
pub(crate) fn is_transient(error: &io::Error) -> bool {
    [io::ErrorKind::WouldBlock, io::ErrorKind::Interrupted].contains(&error.kind())
}

/// Listens on one address. A unix socket's file is removed when the listener is dropped.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    address: Address,
    stall_timeout: Duration,
    peers: Peers,
}

impl Listener {
    /// Listens on `address` for any peer. The file of a unix socket that is no longer in use is replaced. Accepted connections
    /// have `stall_timeout`.
    ///
    /// Only root and the user of this process can connect to a unix socket.
    ///
    /// # Errors
    /// When the address is in use, or is not an address of this host.
    pub fn bind(address: &Address, stall_timeout: Duration) -> Result<Self, SocketError> {
        Self::bind_for(address, stall_timeout, Peers::anyone())
    }

    /// As [`Listener::bind`], but rejects users of this host that are not in `peers`. If this process is root and `peers` has one
    /// other user, the file of a unix socket is given to that user; if there are more, the file is open to all users.
    ///
    /// # Errors
    /// As [`Listener::bind`].
    pub fn bind_for(
        address: &Address,
        stall_timeout: Duration,
        peers: Peers,
    ) -> Result<Self, SocketError> {
        let listening = match address {
            Address::Tcp { host, port } => listen_tcp(host, *port),
            Address::Unix(path) => listen_unix(path, &peers).map(|it| (it, address.clone())),
        };
        let (socket, address) =
            listening.map_err(|source| SocketError::of("listen on", address, source))?;
        Ok(Self {
            socket,
            address,
            stall_timeout,
            peers,
        })
    }

    /// Listens for `peers` on a TCP socket passed by the parent process. The passed descriptor stays open when the listener is
    /// dropped.
    ///
    /// # Errors
    /// When `number` is not a listening TCP socket.
    pub fn passed(number: RawFd, stall_timeout: Duration, peers: Peers) -> io::Result<Self> {
        let socket = memory::passed(number)?;
        if !sockopt::socket_acceptconn(&socket)? {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let listener = TcpListener::from(socket);
        listener.set_nonblocking(true)?;
        let bound = listener.local_addr()?;
        let address = Address::Tcp {
            host: bound.ip().to_string(),
            port: bound.port(),
        };
        Ok(Self {
            socket: listener.into(),
            address,
            stall_timeout,
            peers,
        })
    }

    /// Address of the listener, with the port that the system chose.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Accepts a waiting connection, if there is one. Poll the listener's file descriptor to wait for connections.
    ///
    /// # Errors
    /// The system's, for example when out of file descriptors ([`SocketError::is_exhaustion`]).
    pub fn try_accept(&self) -> Result<Option<Socket>, SocketError> {
        loop {
            let stream = match self.accept() {
                Ok(stream) => stream,
                Err(error) if is_of_connection(&error) => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(source) => {
                    let action = "accept a connection on";
                    return Err(SocketError::of(action, &self.address, source));
                }
            };
            if !self.is_welcome(&stream) {
                continue;
            }
            match stream.configured(self.stall_timeout) {
                Ok(stream) => return Ok(Some(stream)),
                Err(error) => debug!("dropping a connection on {}: {error}", self.address),
            }
        }
    }

    fn accept(&self) -> io::Result<Socket> {
        let socket = accept_with(&self.socket, SocketFlags::CLOEXEC)?;
        Ok(match &self.address {
            Address::Tcp { .. } => Socket::Tcp(socket.into()),
            Address::Unix(_) => Socket::Unix(socket.into()),
        })
    }

    fn is_welcome(&self, stream: &Socket) -> bool {
        static HAS_WARNED: AtomicBool = AtomicBool::new(false);
        if self.peers.is_anyone() {
            return true;
        }
        let address = &self.address;
        match peer_of(stream) {
            Ok(peer) if self.peers.allow(peer) => return true,
            Ok(Peer::Uid(uid)) => warn!("turning away user {uid} on {address}"),
            // Usually a connection that has been closed already.
            Ok(peer) => debug!("turning away a connection on {address}: {peer:?}"),
            Err(error) => {
                let problem = format!(
                    "turning away a connection on {address}: cannot tell whose it is: {error}"
                );
                // The kernel is the reason, so one warning is enough.
                match HAS_WARNED.swap(true, Ordering::Relaxed) {
                    true => debug!("{problem}"),
                    false => warn!("{problem}"),
                }
            }
        }
        false
    }
}

/// Whether accept(2) reports an error of the waiting connection rather than of the listener, so that others may follow.
fn is_of_connection(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(
            Errno::INTR
                | Errno::CONNABORTED
                | Errno::PROTO
                | Errno::NETDOWN
                | Errno::NETUNREACH
                | Errno::NOPROTOOPT
                | Errno::HOSTDOWN
                | Errno::HOSTUNREACH
                | Errno::NONET
        )
    )
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Address::Unix(path) = &self.address {
            // The file may have been removed already.
            let _ = fs::remove_file(path);
        }
    }
}

fn listen_tcp(host: &str, port: u16) -> io::Result<(OwnedFd, Address)> {
    let bind = |host| TcpListener::bind((host, port)).map(|listener| (listener, host));
    let (listener, host) = match host {
        // All addresses, of both kinds. The host may not have IPv6.
        "" => bind("::").or_else(|error| match Errno::from_io_error(&error) {
            Some(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL) => bind("0.0.0.0"),
            _ => Err(error),
        }),
        host => bind(host),
    }?;
    // The standard library's queue of 128 is too short: clients behind a burst would wait for seconds.
    listen(&listener, BACKLOG)?;
    listener.set_nonblocking(true)?;
    let address = Address::Tcp {
        host: host.to_owned(),
        port: listener.local_addr()?.port(),
    };
    Ok((listener.into(), address))
}

fn listen_unix(path: &Path, peers: &Peers) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // Sets the mode of the file that bind creates, so that the file never has another mode.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    let address = SocketAddrUnix::new(path)?;
    match bind(&socket, &address) {
        Err(Errno::ADDRINUSE) if is_stale(path, &address)? => {
            fs::remove_file(path)?;
            bind(&socket, &address)?;
        }
        bound => bound?,
    }
    let opened = allow_users(path, &peers.others());
    if let Err(error) = opened.and_then(|()| Ok(listen(&socket, BACKLOG)?)) {
        let _ = fs::remove_file(path);
        return Err(error);
    }
    Ok(socket)
}

/// More than the channels of a migration. The system's own limit comes on top.
const BACKLOG: i32 = 4096;

/// Whether `path` is a socket file that is not bound to a socket any more.
///
/// The probe is a datagram socket: the connection is refused if there is no socket, and a stream listener never notices it.
fn is_stale(path: &Path, address: &SocketAddrUnix) -> io::Result<bool> {
    if !fs::symlink_metadata(path)?.file_type().is_socket() {
        return Ok(false);
    }
    let probe = socket_with(
        AddressFamily::UNIX,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    Ok(connect_to(&probe, address) == Err(Errno::CONNREFUSED))
}

/// Allows `uids` to connect to the new socket at `path`.
fn allow_users(path: &Path, uids: &[u32]) -> io::Result<()> {
    if uids.is_empty() {
        return Ok(());
    }
    // A user with write access to the directory may have replaced the file: another file must not be given away.
    let file = open(
        path,
        OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let by_number = format!("/proc/self/fd/{}", file.as_raw_fd());
    let found = fs::metadata(&by_number)?;
    let is_ours = found.uid() == geteuid().as_raw() && found.nlink() == 1;
    if !found.file_type().is_socket() || !is_ours {
        return Err(io::Error::other(
            "another file has taken the socket's place",
        ));
    }
    match uids {
        [uid] if geteuid().is_root() => {
            let uid = Some(Uid::from_raw(*uid));
            chownat(&file, "", uid, None, AtFlags::EMPTY_PATH)?;
        }
        _ => fs::set_permissions(&by_number, fs::Permissions::from_mode(0o666))?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;
    use crate::wait_for;

    #[test]
    fn passed_socket_accepts_connections() {
        let made = TcpListener::bind("127.0.0.1:0").unwrap();
        let number = made.as_raw_fd();
        let listener = Listener::passed(number, Duration::from_secs(1), Peers::anyone()).unwrap();
        let address = made.local_addr().unwrap();
        let port = address.port();
        let expected = format!("tcp:127.0.0.1:{port}");
        assert_eq!(listener.address().to_string(), expected);
        let dialled = TcpStream::connect(address).unwrap();
        wait_for(
            &mut [PollFd::new(&listener, PollFlags::IN)],
            Duration::from_secs(60),
        )
        .unwrap();
        assert!(listener.try_accept().unwrap().is_some());
        for wrong in [dialled.as_raw_fd(), RawFd::MAX] {
            assert!(Listener::passed(wrong, Duration::from_secs(1), Peers::anyone()).is_err());
        }
    }

    #[test]
    fn a_connection_that_is_given_up_is_reset_and_one_that_has_ended_is_not() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let pair = || {
            let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let near = Socket::Tcp(near);
            near.reset_at_end(true);
            (near, listener.accept().unwrap().0)
        };
        let ended = |mut far: TcpStream| {
            let ended = far.read_to_end(&mut Vec::new());
            ended.map_err(|error| error.kind())
        };
        let reset = Err(io::ErrorKind::ConnectionReset);

        let (near, far) = pair();
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| (&near).read(&mut [0]));
            near.shut_down();
            // Whoever reads does not see an end.
            assert!(reader.join().unwrap().is_err());
        });
        assert_eq!(ended(far), reset);

        let (near, far) = pair();
        drop(near);
        assert_eq!(ended(far), reset);

        let (near, far) = pair();
        near.write_both(b"all", b"").unwrap();
        near.finish();
        near.reset_at_end(false);
        near.shut_down();
        drop(near);
        assert_eq!(ended(far), Ok(3));
    }

    /// `stalled` is also called when the peer reads slowly, so that a slow connection can be given up.
    #[test]
    fn slow_write_can_be_ended() {
        let (near, far) = UnixStream::pair().unwrap();
        let near = Socket::Unix(near);
        near.set_stall_timeout(Duration::from_millis(10)).unwrap();
        let mut asked = 0;
        let bytes = vec![7; 64 << 20];
        let written = near.write_all(&mut [IoSlice::new(&bytes)], &mut |taken| {
            asked += 1;
            assert!(asked == 1 || taken > 0);
            (&far).read_exact(&mut vec![0; 64 << 10]).unwrap();
            match asked {
                5 => Err(io::ErrorKind::NotConnected.into()),
                _ => Ok(()),
            }
        });
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::NotConnected);
        assert_eq!(asked, 5);
    }

    #[test]
    fn burst_of_connections_is_queued() {
        let address = Address::Tcp {
            host: "127.0.0.1".to_owned(),
            port: 0,
        };
        let listener = Listener::bind(&address, Duration::from_secs(1)).unwrap();
        let Address::Tcp { port, .. } = *listener.address() else {
            panic!("it is TCP");
        };
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let connect = |_| TcpStream::connect_timeout(&address, Duration::from_secs(20)).unwrap();
        let _clients: Vec<_> = (0..300).map(connect).collect();
    }
}
