//! Identifies the user at the other end of a connection from this host.
//!
//! Peers on a loopback address or a unix socket are not trustworthy by themselves: every local user can connect, and so can a
//! guest behind QEMU's user-mode network.

#[cfg_attr(not(feature = "peers"), path = "peer/absent.rs")]
mod owner;

use std::{
    collections::BTreeSet,
    io,
    net::{SocketAddr, TcpStream, UdpSocket},
    os::fd::AsFd as _,
};

use rustix::process::geteuid;

use crate::{Socket, memory};
use owner::owner;

/// Who opened a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// A process of this user, on this host.
    Uid(u32),
    /// Another host.
    Remote,
    /// An unknown process on this host: it may have closed the connection already, or be in another network namespace.
    Unknown,
}

/// The peer that opened the accepted connection `stream`.
///
/// # Errors
/// When the kernel does not report it.
pub fn peer_of(stream: &Socket) -> io::Result<Peer> {
    let stream = match stream {
        Socket::Unix(stream) => {
            let peer = memory::peer_credentials(stream.as_fd())?;
            return Ok(Peer::Uid(peer.uid));
        }
        Socket::Tcp(stream) => stream,
    };
    let Ok(ends) = Ends::of(stream) else {
        // The connection has been reset already.
        return Ok(Peer::Unknown);
    };
    ends.judge(ends.peer())
}

/// Users of this host that may connect. Other hosts are always allowed: the address of the listener decides which hosts reach it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peers {
    /// `None` allows all users.
    uids: Option<BTreeSet<u32>>,
}

impl Peers {
    /// All users.
    pub fn anyone() -> Self {
        Self { uids: None }
    }

    /// Root, the user that this process runs as, and those in `others`.
    pub fn own_and(others: impl IntoIterator<Item = u32>) -> Self {
        let own = [ROOT, geteuid().as_raw()];
        Self {
            uids: Some(own.into_iter().chain(others).collect()),
        }
    }

    /// Whether `peer` may connect.
    pub fn allow(&self, peer: Peer) -> bool {
        let Some(uids) = &self.uids else { return true };
        match peer {
            Peer::Uid(uid) => uids.contains(&uid),
            Peer::Remote => true,
            Peer::Unknown => false,
        }
    }

    /// The allowed users except root and the user of this process.
    pub(crate) fn others(&self) -> Vec<u32> {
        let own = geteuid().as_raw();
        let uids = self.uids.iter().flatten().copied();
        uids.filter(|uid| *uid != ROOT && *uid != own).collect()
    }

    /// Whether all users are allowed.
    pub(crate) fn is_anyone(&self) -> bool {
        self.uids.is_none()
    }
}

const ROOT: u32 = 0;

/// The inode of the peer's socket, as in /proc/PID/fd, if it is a TCP socket on this host.
///
/// # Errors
/// As [`peer_of`].
pub fn peer_inode(stream: &Socket) -> io::Result<Option<u32>> {
    Ok(peer_owner(stream)?.map(|owner| owner.inode))
}

/// Whether the peer is on this host and all bytes it has sent have arrived, even if they have not been read.
///
/// # Errors
/// As [`peer_of`].
pub fn all_has_come(stream: &Socket) -> io::Result<bool> {
    let is_unix = matches!(stream, Socket::Unix(_));
    Ok(is_unix || peer_owner(stream)?.is_some_and(|owner| owner.under_way == 0))
}

/// The peer's socket, if it is a TCP socket on this host.
fn peer_owner(stream: &Socket) -> io::Result<Option<Owner>> {
    match stream {
        Socket::Unix(_) => Ok(None),
        Socket::Tcp(stream) => Ends::of(stream)?.peer(),
    }
}

/// A socket of this host, as the kernel reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Owner {
    uid: u32,
    inode: u32,
    /// Sent bytes that the other end has not acknowledged.
    under_way: u32,
}

/// The addresses of a connection.
struct Ends {
    near: SocketAddr,
    far: SocketAddr,
}

impl Ends {
    fn of(stream: &TcpStream) -> io::Result<Self> {
        Ok(Self {
            near: canonical(stream.local_addr()?),
            far: canonical(stream.peer_addr()?),
        })
    }

    /// Owner of the other end, if it is a process on this host.
    fn peer(&self) -> io::Result<Option<Owner>> {
        owner(self.far, self.near)
    }

    /// The peer, by the owner of the other end. If the kernel does not report owners, an address that no process here can have is
    /// another host's.
    fn judge(&self, owner: io::Result<Option<Owner>>) -> io::Result<Peer> {
        match owner {
            Ok(Some(owner)) => Ok(Peer::Uid(owner.uid)),
            Ok(None) if self.are_on_this_host() => Ok(Peer::Unknown),
            Err(error) if self.are_on_this_host() || is_of_this_host(self.far) => Err(error),
            Ok(None) | Err(_) => Ok(Peer::Remote),
        }
    }

    /// Whether both addresses can only be on this host.
    fn are_on_this_host(&self) -> bool {
        let (near, far) = (self.near.ip(), self.far.ip());
        near.is_loopback() || far.is_loopback() || near == far
    }
}

/// Whether a process of this host can have this address: any address if net.ipv4.ip_nonlocal_bind is set.
fn is_of_this_host(mut address: SocketAddr) -> bool {
    address.set_port(0);
    let bound = UdpSocket::bind(address);
    !bound.is_err_and(|error| error.kind() == io::ErrorKind::AddrNotAvailable)
}

/// Converts ::ffff:127.0.0.1 to 127.0.0.1, as the kernel lists connections over IPv4.
fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        ip if ip == address.ip() => address,
        ip => SocketAddr::new(ip, address.port()),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write as _,
        net::{IpAddr, TcpListener},
        os::unix::net::{UnixListener, UnixStream},
    };

    use rustix::net::{AddressFamily, SocketType, bind, connect, socket};

    use super::*;

    /// The peer that dials `dial`, as the listener on `listen` sees it.
    fn peer(listen: &str, dial: &str) -> Peer {
        let listener = TcpListener::bind((listen, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let _near = TcpStream::connect((dial, port)).unwrap();
        let (far, _) = listener.accept().unwrap();
        peer_of(&Socket::Tcp(far)).unwrap()
    }

    #[test]
    fn local_peer_is_identified_by_uid() {
        let own = Peer::Uid(geteuid().as_raw());
        assert_eq!(peer("127.0.0.1", "127.0.0.1"), own);
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        let _near = UnixStream::connect(folder.path().join("socket")).unwrap();
        let (far, _) = listener.accept().unwrap();
        assert_eq!(peer_of(&Socket::Unix(far)).unwrap(), own);
    }

    #[test]
    fn socket_of_local_peer_is_identified_by_inode() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        let inode = peer_inode(&Socket::Tcp(far)).unwrap();
        assert_eq!(
            inode.map(u64::from),
            Some(rustix::fs::fstat(&near).unwrap().st_ino)
        );
    }

    #[test]
    fn bytes_in_flight_have_not_come() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = Socket::Tcp(listener.accept().unwrap().0);
        assert!(all_has_come(&far).unwrap());
        // More than the far end buffers.
        near.set_nonblocking(true).unwrap();
        while near.write(&[0; 1 << 20]).is_ok() {}
        assert!(!all_has_come(&far).unwrap());
        drop(near);
        // The peer has closed.
        assert!(!all_has_come(&far).unwrap());
        let far = Socket::Unix(UnixStream::pair().unwrap().0);
        assert!(all_has_come(&far).unwrap());
    }

    #[test]
    fn local_peer_of_either_family_is_identified() {
        // Some machines have no IPv6.
        if TcpListener::bind("[::1]:0").is_err() {
            return;
        }
        let own = Peer::Uid(geteuid().as_raw());
        assert_eq!(peer("::1", "::1"), own);
        // IPv4 on one side or on both.
        assert_eq!(peer("::", "127.0.0.1"), own);
        assert_eq!(peer("127.0.0.1", "::ffff:127.0.0.1"), own);
        assert_eq!(peer("::", "::ffff:127.0.0.1"), own);
    }

    /// Whichever address of this host it uses.
    #[test]
    fn local_peer_is_never_taken_for_another_host() {
        let Some(other) = own_address() else {
            return lab::skipped("this machine has no address but loopback").unwrap();
        };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        bind(&near, &SocketAddr::new(other, 0)).unwrap();
        connect(&near, &listener.local_addr().unwrap()).unwrap();
        let (far, from) = listener.accept().unwrap();
        assert_eq!(from.ip(), other);
        let own = Peer::Uid(geteuid().as_raw());
        assert_eq!(peer_of(&Socket::Tcp(far)).unwrap(), own);
    }

    /// An address of this machine that other hosts can reach.
    fn own_address() -> Option<IpAddr> {
        // Nothing is sent.
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.connect("192.0.2.1:9").ok()?;
        Some(socket.local_addr().unwrap().ip())
    }

    /// Other hosts are still accepted, and local users are not taken for them.
    #[test]
    fn kernel_without_owners_leaves_only_other_hosts() {
        let port = |ip: IpAddr| SocketAddr::new(ip, 4440);
        let parsed = |text: &str| text.parse::<IpAddr>().unwrap();
        let own = own_address();
        let near = own.unwrap_or_else(|| parsed("198.51.100.1"));
        let cases = [
            (near, parsed("192.0.2.1"), true),
            (near, parsed("2001:db8::1"), true),
            (near, parsed("127.0.0.1"), false),
            (parsed("127.0.0.1"), parsed("192.0.2.1"), false),
            (near, near, false),
        ];
        let own = own.map(|own| (parsed("198.51.100.1"), own, false));
        for (near, far, is_remote) in cases.into_iter().chain(own) {
            let ends = Ends {
                near: port(near),
                far: port(far),
            };
            let judged = ends.judge(Err(io::ErrorKind::Unsupported.into()));
            let expected = is_remote.then_some(Peer::Remote);
            assert_eq!(judged.ok(), expected, "{near} {far}");
        }
    }

    /// The kernel lists its socket as root's.
    #[test]
    fn closed_peer_is_not_taken_for_root() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        drop(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let (far, _) = listener.accept().unwrap();
        assert_eq!(peer_of(&Socket::Tcp(far)).unwrap(), Peer::Unknown);
    }

    #[test]
    fn only_named_users_may_connect() {
        let own = geteuid().as_raw();
        let stranger = Peer::Uid(own.wrapping_add(4711));
        let peers = Peers::own_and([]);
        assert!(peers.allow(Peer::Uid(own)) && peers.allow(Peer::Uid(ROOT)));
        assert!(peers.allow(Peer::Remote));
        assert!(!peers.allow(stranger) && !peers.allow(Peer::Unknown));
        assert!(Peers::own_and([own.wrapping_add(4711)]).allow(stranger));
        assert!(Peers::anyone().allow(stranger) && Peers::anyone().allow(Peer::Unknown));
    }
}
