//! Who is at the other end of a connection, where that is a process on this host.
//!
//! That an address is a loopback address, or a path, does not make its peers trustworthy: every local user
//! can connect, and so can a guest behind QEMU's user-mode network.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
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
    let peers = peers_of([stream])?;
    Ok(peers.first().copied().unwrap_or(Peer::Unknown))
}

/// The same of several, in their order. The system's tables of connections are read once for all: that takes long where
/// there are many.
///
/// # Errors
/// As [`peer_of`].
pub fn peers_of<'a>(streams: impl IntoIterator<Item = &'a Socket>) -> io::Result<Vec<Peer>> {
    let known = streams.into_iter().map(Known::of).collect::<Vec<_>>();
    let ends = known.iter().filter_map(|it| match it {
        Known::Peer(_) => None,
        Known::Ends(ends) => Some(*ends),
    });
    let owners = other_ends(ends.collect())?;
    let peers = known.into_iter().map(|it| match it {
        Known::Peer(peer) => peer,
        Known::Ends(ends) => owners
            .get(&ends)
            .map_or(Peer::Unknown, |owner| Peer::Uid(owner.uid)),
    });
    Ok(peers.collect())
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
        Socket::Tcp(stream) => {
            let owners = other_ends([Ends::of(stream)?].into())?;
            Ok(owners.into_values().next().map(|owner| owner.inode))
        }
    }
}

/// What a socket itself tells of its peer.
enum Known {
    Peer(Peer),
    /// It is for the system's tables to say.
    Ends(Ends),
}

impl Known {
    fn of(stream: &Socket) -> Self {
        // One that has gone again has no peer any more.
        Self::try_of(stream).unwrap_or(Self::Peer(Peer::Unknown))
    }

    fn try_of(stream: &Socket) -> io::Result<Self> {
        let stream = match stream {
            Socket::Unix(stream) => {
                let peer = memory::peer_credentials(stream.as_fd())?;
                return Ok(Self::Peer(Peer::Uid(peer.uid)));
            }
            Socket::Tcp(stream) => stream,
        };
        let ends = Ends::of(stream)?;
        let (near, far) = (ends.near.ip(), ends.far.ip());
        // Who connects to one of this host's own addresses does it from that address.
        match far.is_loopback() || far == near {
            true => Ok(Self::Ends(ends)),
            false => Ok(Self::Peer(Peer::Remote)),
        }
    }
}

/// The addresses of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
}

/// The other ends of connections, of those where that is a socket on this host.
fn other_ends(mut wanted: HashSet<Ends>) -> io::Result<HashMap<Ends, Owner>> {
    let mut found = HashMap::new();
    // A socket of IPv6 may have a peer of IPv4 (::ffff:127.0.0.1), and either may be in the other's table.
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        if wanted.is_empty() {
            break;
        }
        let file = match File::open(table) {
            // Without IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            file => file?,
        };
        for line in BufReader::new(file).lines() {
            let Some((near, far, owner)) = owner(&line?) else {
                continue;
            };
            // Seen from its peer.
            if let Some(ends) = wanted.take(&Ends {
                near: far,
                far: near,
            }) {
                found.insert(ends, owner);
                if wanted.is_empty() {
                    break;
                }
            }
        }
    }
    Ok(found)
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

/// The addresses, its own first, of an established connection in a line of /proc/net/tcp or tcp6, and who has it:
///
/// ```text
/// sl: local_address:port rem_address:port state queues timer retransmits uid timeout inode ...
/// ```
///
/// One that its process has closed belongs to no process and is listed as root's, so only those that are established count.
fn owner(line: &str) -> Option<(SocketAddr, SocketAddr, Owner)> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let ends = [fields.next()?, fields.next()?];
    if fields.next()? != ESTABLISHED {
        return None;
    }
    let (near, far) = (parse_address(ends[0])?, parse_address(ends[1])?);
    let mut fields = fields.skip(3);
    let uid = fields.next()?.parse().ok()?;
    // Of no process, if 0.
    let inode: u64 = fields.nth(1)?.parse().ok()?;
    (inode != 0).then_some((near, far, Owner { uid, inode }))
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

    #[test]
    fn peers_are_known_in_their_order() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let dial = || {
            let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            (near, Socket::Tcp(listener.accept().unwrap().0))
        };
        let (_first, one) = dial();
        let (closed, two) = dial();
        drop(closed);
        let (_third, three) = dial();
        let four = Socket::Unix(UnixStream::pair().unwrap().0);
        let own = Peer::Uid(geteuid().as_raw());
        let peers = peers_of([&one, &two, &three, &four]).unwrap();
        assert_eq!(peers, [own, Peer::Unknown, own, own]);
        assert_eq!(peers_of([]).unwrap(), []);
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
            assert_eq!(owner(line), Some((near, far, found)));
            assert_eq!(owner(&line.replace(" 01 ", " 06 ")), None);
            assert_eq!(owner(&line.replace("4711", "0")), None);
            for length in 0..line.len() - 10 {
                // Nothing that is cut off is misread.
                let cut = owner(&line[..length]);
                assert!(cut.is_none_or(|(.., owner)| owner.uid == 1000));
            }
        }
        assert_eq!(owner("  sl  local_address rem_address   st"), None);
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
