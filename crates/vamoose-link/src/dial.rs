//! Connects to an address: looks its name up and tries its addresses in turn, all within one deadline.

use std::{
    io,
    net::{IpAddr, SocketAddr, ToSocketAddrs as _},
    os::fd::OwnedFd,
    path::Path,
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags},
    io::Errno,
    net::{
        AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, socket_with, sockopt,
    },
};

use crate::{Address, Socket, SocketError, left, lock, threads, wait_until};

/// Connects to `address` within `timeout`, which is also the connection's stall timeout.
///
/// # Errors
/// When there is no listener, or no answer in time. The listener of a unix socket answers unless its queue is full.
pub fn dial(address: &Address, timeout: Duration) -> Result<Socket, SocketError> {
    Destination::new(address.clone()).dial(None, timeout)
}

/// An address to dial repeatedly. Its name is looked up once.
pub(crate) struct Destination {
    address: Address,
    lookup: Arc<Lookup>,
}

impl Destination {
    pub(crate) fn new(address: Address) -> Self {
        Self::by(address, |host, port| {
            let found = (host, port).to_socket_addrs();
            // The system's resolver has no kinds of errors.
            found.map_or_else(
                |error| Err(io::Error::new(io::ErrorKind::NotFound, error)),
                |it| Ok(it.collect()),
            )
        })
    }

    /// A destination whose name is looked up by `resolve`.
    pub(crate) fn by(
        address: Address,
        resolve: impl Fn(&str, u16) -> io::Result<Vec<SocketAddr>> + Send + Sync + 'static,
    ) -> Self {
        let lookup = Arc::new(Lookup {
            state: Mutex::new(State::Unknown),
            changed: Condvar::new(),
            resolve: Box::new(resolve),
        });
        Self { address, lookup }
    }

    /// As [`dial`], from one of this host's addresses.
    pub(crate) fn dial(
        &self,
        from: Option<IpAddr>,
        timeout: Duration,
    ) -> Result<Socket, SocketError> {
        let deadline = Instant::now() + timeout;
        let connected = match &self.address {
            Address::Unix(path) => connect_unix(path, timeout).map(|it| Socket::Unix(it.into())),
            Address::Tcp { host, port } => self.connect(host, *port, from, deadline),
        };
        connected
            .and_then(|socket| socket.configured(timeout))
            .map_err(|source| SocketError::dial(&self.address, source))
    }

    fn connect(
        &self,
        host: &str,
        port: u16,
        from: Option<IpAddr>,
        deadline: Instant,
    ) -> io::Result<Socket> {
        let mut addresses = match host.parse::<IpAddr>() {
            Ok(address) => vec![SocketAddr::new(address, port)],
            Err(_) => Lookup::addresses(&self.lookup, host, port, deadline)?,
        };
        addresses.retain(|to| from.is_none_or(|from| from.is_ipv4() == to.is_ipv4()));
        let connect = |to, time| connect_tcp(to, from, time).map(|socket| (to, socket));
        let (to, socket) = in_turn(&addresses, || left(deadline), connect)?;
        self.lookup.prefer(to);
        Ok(Socket::Tcp(socket.into()))
    }
}

/// The addresses of a name.
struct Lookup {
    state: Mutex<State>,
    changed: Condvar,
    resolve: Box<Resolve>,
}

type Resolve = dyn Fn(&str, u16) -> io::Result<Vec<SocketAddr>> + Send + Sync;

enum State {
    Unknown,
    UnderWay,
    /// In the order in which they are tried.
    Known(Vec<SocketAddr>),
    Failed(io::Error),
}

impl Lookup {
    /// The addresses, once they are known. The system's resolver cannot be interrupted, so one thread waits for it on behalf of all
    /// callers. A failure is reported once; the next call looks the name up again.
    fn addresses(
        this: &Arc<Self>,
        host: &str,
        port: u16,
        deadline: Instant,
    ) -> io::Result<Vec<SocketAddr>> {
        let mut state = lock(&this.state);
        loop {
            match std::mem::replace(&mut *state, State::UnderWay) {
                State::Known(addresses) => {
                    *state = State::Known(addresses.clone());
                    return Ok(addresses);
                }
                State::Failed(error) => {
                    *state = State::Unknown;
                    return Err(error);
                }
                State::UnderWay => {}
                State::Unknown => {
                    let (lookup, host) = (this.clone(), host.to_owned());
                    let thread = threads::spawn(move || lookup.run(&host, port));
                    if let Err(error) = thread {
                        *state = State::Unknown;
                        return Err(error);
                    }
                }
            }
            let time = left(deadline);
            if time.is_zero() {
                let problem = "its name has not been looked up in time";
                return Err(io::Error::new(io::ErrorKind::TimedOut, problem));
            }
            let waited = this.changed.wait_timeout(state, time);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn run(&self, host: &str, port: u16) {
        let found = (self.resolve)(host, port);
        *lock(&self.state) = match found {
            Ok(addresses) => State::Known(addresses),
            Err(error) => State::Failed(error),
        };
        self.changed.notify_all();
    }

    /// Makes `address`, which has answered, the first to be tried.
    fn prefer(&self, address: SocketAddr) {
        if let State::Known(addresses) = &mut *lock(&self.state) {
            addresses.sort_by_key(|it| *it != address);
        }
    }
}

/// Tries `addresses` until one answers. The time `left` is divided equally among an address and those after it, so that a silent
/// address leaves time for the others.
fn in_turn<A: Copy, T>(
    addresses: &[A],
    mut left: impl FnMut() -> Duration,
    mut attempt: impl FnMut(A, Duration) -> io::Result<T>,
) -> io::Result<T> {
    let mut failure = io::Error::new(
        io::ErrorKind::NotFound,
        "the name has no address that could be dialled from here",
    );
    let parts = (1..=u32::try_from(addresses.len()).unwrap_or(u32::MAX)).rev();
    for (address, part) in addresses.iter().zip(parts) {
        match attempt(*address, left() / part) {
            Ok(connected) => return Ok(connected),
            // A timeout is kept: a refusal by another address does not show that there is no listener.
            Err(_) if failure.kind() == io::ErrorKind::TimedOut => {}
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

fn connect_tcp(to: SocketAddr, from: Option<IpAddr>, timeout: Duration) -> io::Result<OwnedFd> {
    let deadline = Instant::now() + timeout;
    let family = match to {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    if let Some(from) = from {
        bind(&socket, &SocketAddr::new(from, 0))?;
    }
    match connect(&socket, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => {}
        Err(error) => return Err(error.into()),
    }
    if !wait_until(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(deadline))? {
        return Err(Errno::TIMEDOUT.into());
    }
    sockopt::socket_error(&socket)??;
    Ok(socket)
}

/// If the listener's queue is full, connect(2) waits for the socket's send timeout.
fn connect_unix(path: &Path, timeout: Duration) -> io::Result<OwnedFd> {
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let address = SocketAddrUnix::new(path)?;
    let start = Instant::now();
    loop {
        let left = timeout.saturating_sub(start.elapsed());
        // 0 would mean no timeout.
        let left = left.max(Duration::from_millis(1));
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(left))?;
        match connect(&socket, &address) {
            Ok(()) => return Ok(socket),
            Err(Errno::INTR) if start.elapsed() < timeout => {}
            Err(Errno::INTR | Errno::AGAIN) => {
                let problem = "its listener takes no connections: the queue is full";
                return Err(io::Error::new(io::ErrorKind::TimedOut, problem));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::ErrorKind,
        net::TcpListener,
        sync::{
            atomic::{AtomicUsize, Ordering},
            mpsc,
        },
    };

    use rustix::net::listen;

    use super::*;

    /// Longer than anything takes on a busy machine.
    const LIMIT: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(300);

    /// Behaviour of an address: it answers or refuses after some seconds, or stays silent.
    #[derive(Clone, Copy)]
    enum Host {
        Answers(u64),
        Refuses(u64),
        Silent,
    }

    /// The address that answers and the time, or the error.
    type Reached = Result<(usize, u64), ErrorKind>;

    #[test]
    fn remaining_time_is_divided_among_remaining_addresses() {
        use Host::{Answers, Refuses, Silent};
        const TIME: u64 = 12;
        let cases: &[(&[Host], Reached)] = &[
            (&[Answers(5)], Ok((0, 5))),
            (&[Answers(12)], Ok((0, 12))),
            (&[Answers(13)], Err(ErrorKind::TimedOut)),
            (&[Silent, Answers(1)], Ok((1, 7))),
            (&[Silent, Answers(6)], Ok((1, 12))),
            (&[Silent, Answers(7)], Err(ErrorKind::TimedOut)),
            (&[Silent, Silent, Answers(1)], Ok((2, 9))),
            (&[Silent, Silent, Silent, Answers(3)], Ok((3, 12))),
            // Unused time is left for the others.
            (&[Refuses(0), Silent, Answers(6)], Ok((2, 12))),
            (&[Refuses(1), Refuses(1)], Err(ErrorKind::ConnectionRefused)),
            (&[Silent, Refuses(1)], Err(ErrorKind::TimedOut)),
            (&[Refuses(1), Silent], Err(ErrorKind::TimedOut)),
            (&[], Err(ErrorKind::NotFound)),
        ];
        for (number, (hosts, expected)) in cases.iter().enumerate() {
            let now = std::cell::Cell::new(0);
            let hosts: Vec<_> = hosts.iter().copied().enumerate().collect();
            let left = || Duration::from_secs(TIME - now.get());
            let answered = in_turn(&hosts, left, |(at, host), time| {
                let (seconds, answer) = match host {
                    Answers(seconds) => (seconds, Ok(at)),
                    Refuses(seconds) => (seconds, Err(ErrorKind::ConnectionRefused)),
                    Silent => (u64::MAX, Ok(at)),
                };
                let time = time.as_secs();
                now.set(now.get() + seconds.min(time));
                match seconds <= time {
                    true => answer.map_err(io::Error::from),
                    false => Err(ErrorKind::TimedOut.into()),
                }
            });
            let answered = answered.map(|at| (at, now.get()));
            assert_eq!(
                answered.map_err(|error| error.kind()),
                *expected,
                "{number}"
            );
        }
    }

    /// A listener with a full queue: connections get no answer.
    fn dead() -> (TcpListener, Vec<OwnedFd>, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listen(&listener, 0).unwrap();
        let address = listener.local_addr().unwrap();
        let mut queue = Vec::new();
        while let Ok(socket) = connect_tcp(address, None, SHORT) {
            queue.push(socket);
        }
        (listener, queue, address)
    }

    fn name() -> Address {
        "tcp:somewhere:4440".parse().unwrap()
    }

    #[test]
    fn address_after_a_dead_one_is_reached() {
        let (_listener, _queue, first) = dead();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let second = listener.local_addr().unwrap();
        let lookups = Arc::new(AtomicUsize::new(0));
        let count = lookups.clone();
        let destination = Destination::by(name(), move |_, _| {
            count.fetch_add(1, Ordering::Relaxed);
            Ok(vec![first, second])
        });
        let deadline = Instant::now() + SHORT;
        destination.connect("somewhere", 1, None, deadline).unwrap();
        // It is tried first from now on, and gets all of the time.
        let is_first = matches!(
            &*lock(&destination.lookup.state),
            State::Known(order) if *order == [second, first]
        );
        assert!(is_first);
        destination.dial(None, LIMIT).unwrap();
        assert_eq!(lookups.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn hanging_resolver_has_one_thread_and_a_deadline() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (go_on, wait) = mpsc::channel::<()>();
        let wait = Mutex::new(wait);
        let lookups = Arc::new(AtomicUsize::new(0));
        let count = lookups.clone();
        let destination = Destination::by(name(), move |host, port| {
            assert_eq!((host, port), ("somewhere", 4440));
            count.fetch_add(1, Ordering::Relaxed);
            let _ = lock(&wait).recv();
            Ok(vec![address])
        });
        for _ in 0..3 {
            let error = destination.dial(None, SHORT).unwrap_err();
            assert_eq!(error.source.kind(), ErrorKind::TimedOut);
            let said = "its name has not been looked up in time";
            assert_eq!(error.source.to_string(), said);
        }
        drop(go_on);
        destination.dial(None, LIMIT).unwrap();
        assert_eq!(lookups.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn name_that_was_not_found_is_looked_up_again() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let lookups = AtomicUsize::new(0);
        let destination = Destination::by(name(), move |_, _| {
            match lookups.fetch_add(1, Ordering::Relaxed) {
                0 => Err(io::Error::other("no such name")),
                _ => Ok(vec![address]),
            }
        });
        let error = destination.dial(None, LIMIT).unwrap_err();
        assert_eq!(error.source.to_string(), "no such name");
        destination.dial(None, LIMIT).unwrap();
    }

    #[test]
    fn source_address_limits_the_family() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let destination = Destination::by(name(), move |_, port| {
            Ok(vec![SocketAddr::new(IpAddr::from([0; 16]), port), address])
        });
        let from = IpAddr::from([127, 0, 0, 3]);
        destination.dial(Some(from), LIMIT).unwrap();
        assert_eq!(listener.accept().unwrap().1.ip(), from);
        let error = destination.dial(Some("::1".parse().unwrap()), LIMIT);
        assert!(error.is_err());
    }
}
