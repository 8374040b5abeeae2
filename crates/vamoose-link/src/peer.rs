//! Who is at the other end of a connection, where that is a process on this host.
//!
//! That an address is a loopback address, or a path, does not make its peers trustworthy: every local user
//! can connect, and so can a guest behind QEMU's user-mode network.

use std::{
    collections::BTreeSet,
    fs::File,
    io::{self, BufRead as _, BufReader},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    os::fd::AsFd as _,
};

use rustix::process::geteuid;

use crate::{Socket, memory};

/// Who opened a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// A process of this user, on this host.
    Uid(u32),
    /// Another host.
    Remote,
    /// A process on this host that nothing is known about: it may have closed the connection already, or be in
    /// another network namespace.
    Unknown,
}

/// The process that opened `stream`, which has been accepted.
///
/// # Errors
/// When the system does not provide it, for example without /proc.
pub fn peer_of(stream: &Socket) -> io::Result<Peer> {
    match stream {
        Socket::Unix(stream) => {
            let peer = memory::peer_credentials(stream.as_fd())?;
            Ok(Peer::Uid(peer.uid))
        }
        Socket::Tcp(stream) => peer_of_tcp(stream),
    }
}

/// Which users on this host may connect. Other hosts are not judged here: that is for the address to decide on which
/// one listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peers {
    /// All, if `None`.
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

    /// Users to whom a socket's file must be opened besides root and our own.
    pub(crate) fn others(&self) -> Vec<u32> {
        let own = geteuid().as_raw();
        let uids = self.uids.iter().flatten().copied();
        uids.filter(|uid| *uid != ROOT && *uid != own).collect()
    }

    /// Whether anything about a peer could matter.
    pub(crate) fn is_anyone(&self) -> bool {
        self.uids.is_none()
    }
}

const ROOT: u32 = 0;

/// The inode of the other end's socket, if that is a TCP socket on this host: what /proc/PID/fd names it by.
///
/// # Errors
/// As [`peer_of`].
pub fn peer_inode(stream: &Socket) -> io::Result<Option<u64>> {
    match stream {
        Socket::Unix(_) => Ok(None),
        Socket::Tcp(stream) => Ok(other_end(stream)?.map(|owner| owner.inode)),
    }
}

fn peer_of_tcp(stream: &TcpStream) -> io::Result<Peer> {
    let (near, far) = ends(stream)?;
    // Who connects to one of this host's own addresses does it from that address.
    if !far.ip().is_loopback() && far.ip() != near.ip() {
        return Ok(Peer::Remote);
    }
    let owner = other_end(stream)?;
    Ok(owner.map_or(Peer::Unknown, |owner| Peer::Uid(owner.uid)))
}

/// Our address, and the peer's.
fn ends(stream: &TcpStream) -> io::Result<(SocketAddr, SocketAddr)> {
    let (near, far) = (stream.local_addr()?, stream.peer_addr()?);
    Ok((canonical(near), canonical(far)))
}

/// The other end of a connection, where that is a socket on this host.
fn other_end(stream: &TcpStream) -> io::Result<Option<Owner>> {
    let (near, far) = ends(stream)?;
    // A socket of IPv6 may have a peer of IPv4 (::ffff:127.0.0.1), and either may be in the other's table.
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let file = match File::open(table) {
            // Without IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            file => file?,
        };
        for line in BufReader::new(file).lines() {
            if let Some(owner) = owner(&line?, far, near) {
                return Ok(Some(owner));
            }
        }
    }
    Ok(None)
}

/// A socket, as the tables have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Owner {
    uid: u32,
    inode: u64,
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Who has the established connection from `near` to `far`, if it is in this line of /proc/net/tcp or tcp6:
///
/// ```text
/// sl: local_address:port rem_address:port state queues timer retransmits uid timeout inode ...
/// ```
///
/// One that its process has closed belongs to no process and is listed as root's, so only those that are established count.
fn owner(line: &str, near: SocketAddr, far: SocketAddr) -> Option<Owner> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let ends = [fields.next()?, fields.next()?];
    if fields.next()? != ESTABLISHED {
        return None;
    }
    if parse_address(ends[0])? != near || parse_address(ends[1])? != far {
        return None;
    }
    let mut fields = fields.skip(3);
    let uid = fields.next()?.parse().ok()?;
    // Of no process, if 0.
    let inode: u64 = fields.nth(1)?.parse().ok()?;
    (inode != 0).then_some(Owner { uid, inode })
}

const ESTABLISHED: &str = "01";

/// An address as the tables have it: words of 32 bits as they are in memory, and a port, in hexadecimal.
fn parse_address(text: &str) -> Option<SocketAddr> {
    let (words, port) = text.split_once(':')?;
    let word = |at: usize| {
        let digits = words.get(at..at + 8)?;
        Some(u32::from_str_radix(digits, 16).ok()?.to_ne_bytes())
    };
    let ip = match words.len() {
        8 => IpAddr::from(Ipv4Addr::from(word(0)?)),
        32 => {
            let mut bytes = [0; 16];
            for (bytes, at) in bytes.chunks_exact_mut(4).zip((0..32).step_by(8)) {
                bytes.copy_from_slice(&word(at)?);
            }
            IpAddr::from(Ipv6Addr::from(bytes))
        }
        _ => return None,
    };
    let port = u16::from_str_radix(port, 16).ok()?;
    Some(SocketAddr::new(ip.to_canonical(), port))
}

#[cfg(test)]
mod tests {
    use std::{
        net::TcpListener,
        os::unix::net::{UnixListener, UnixStream},
    };

    use super::*;

    /// Who the listener on `listen` takes the peer for that dials `dial`.
    fn peer(listen: &str, dial: &str) -> Peer {
        let listener = TcpListener::bind((listen, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let _near = TcpStream::connect((dial, port)).unwrap();
        let (far, _) = listener.accept().unwrap();
        peer_of(&Socket::Tcp(far)).unwrap()
    }

    #[test]
    fn a_peer_on_this_host_is_known_by_its_uid() {
        let own = Peer::Uid(geteuid().as_raw());
        assert_eq!(peer("127.0.0.1", "127.0.0.1"), own);
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
        let _near = UnixStream::connect(folder.path().join("socket")).unwrap();
        let (far, _) = listener.accept().unwrap();
        assert_eq!(peer_of(&Socket::Unix(far)).unwrap(), own);
    }

    #[test]
    fn a_peers_socket_is_known_by_its_inode() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        let inode = peer_inode(&Socket::Tcp(far)).unwrap();
        assert_eq!(inode, Some(rustix::fs::fstat(&near).unwrap().st_ino));
    }

    #[test]
    fn a_peer_of_either_family_is_known() {
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

    /// The system lists it as root's.
    #[test]
    fn a_peer_that_has_closed_is_not_taken_for_root() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        drop(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let (far, _) = listener.accept().unwrap();
        assert_eq!(peer_of(&Socket::Tcp(far)).unwrap(), Peer::Unknown);
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn lines_of_the_tables_are_read() {
        let v4 = "   2: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000  1000        0 4711 1 0";
        let v6 = "   0: 0000000000000000FFFF00000100007F:1F90 0000000000000000FFFF00000100007F:C350 01 00000000:00000000 \
                  00:00000000 00000000  1000        0 4711 1 0";
        let (near, far) = (
            "127.0.0.1:8080".parse().unwrap(),
            "127.0.0.1:50000".parse().unwrap(),
        );
        let found = Owner {
            uid: 1000,
            inode: 4711,
        };
        for line in [v4, v6] {
            assert_eq!(owner(line, near, far), Some(found));
            assert_eq!(owner(line, far, near), None);
            assert_eq!(owner(&line.replace(" 01 ", " 06 "), near, far), None);
            assert_eq!(owner(&line.replace("4711", "0"), near, far), None);
            for length in 0..line.len() - 10 {
                // Nothing that is cut off is misread.
                let cut = owner(&line[..length], near, far);
                assert!(cut.is_none_or(|owner| owner.uid == 1000));
            }
        }
        assert_eq!(
            owner("  sl  local_address rem_address   st", near, far),
            None
        );
    }

    #[test]
    fn only_those_who_are_named_may_connect() {
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
