//! Where this host's QEMUs connect: the aliases of the peers, at every port, and the sockets of streams. What connects is looked at before it goes on.

use std::{
    collections::HashMap,
    io, mem,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use rustix::{
    buffer::spare_capacity,
    event::{PollFd, PollFlags, Timespec, epoll},
    io::Errno,
};
use tracing::{debug, warn};
use vamoose_link::{
    Address, Hangup, Listener, Peer, Peers, PollQueue, Socket, SocketError, Stream, lock, peer_of,
    wait_for,
};

use super::{GatewayConfig, GatewayError, place::Place};
use crate::{
    chain,
    first_bytes::{FirstBytes, MAGIC_LEN, classify, peek},
};

/// Listens there.
pub(super) struct Front {
    listening: Mutex<Listening>,
    /// Of all listeners: there are 64 for each peer, too many to name them whenever they are waited for.
    epoll: OwnedFd,
    users: Mutex<Peers>,
    /// Listened already when this process was started.
    passed: Mutex<Vec<Listener>>,
    rounds: Arc<Rounds>,
}

/// Sockets that listen, each by a number of its own, which epoll tells.
#[derive(Default)]
struct Listening {
    listeners: HashMap<Place, (u64, Arc<Listener>)>,
    places: HashMap<u64, Place>,
    last: u64,
}

/// How far whoever accepts has got. A round accepts what has come, and hands on what has begun.
pub(super) struct Rounds {
    /// Those that are done, of those that could accept.
    done: AtomicU64,
    could_not_accept: AtomicBool,
    /// Where more had come than the last round accepted, and the last one that accepted all there.
    behind: Mutex<HashMap<Place, u64>>,
    /// Where connections have not been handed on: all that came before this round began has been.
    held: Mutex<HashMap<Place, u64>>,
    /// Begins the next one at once.
    wake: PollQueue<()>,
}

/// A connection of which it is not known yet what it is.
pub(super) struct Fresh {
    at: Place,
    socket: Socket,
    since: Instant,
    /// In which it was accepted.
    round: u64,
}

/// A connection, where it came, and what it begins with.
pub(super) type Begun = (Place, Arc<Stream>, FirstBytes);

/// Most connections of which it is not known yet what they are: more than the migrations of a host begin at once. Further ones
/// wait in the queues of their sockets. Who floods one place does not hold up the others: each has its share of a round.
const MOST_FRESH: usize = 1024;

/// How long a connection may be silent before the gateway assumes that the server speaks first.
const SILENCE: Duration = Duration::from_millis(50);

/// No time at all.
const NOW: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};

/// For the system to have file descriptors again.
const PAUSE: Duration = Duration::from_millis(100);

impl Front {
    pub(super) fn new(config: &GatewayConfig, passed: Vec<Listener>) -> Result<Self, GatewayError> {
        let front = Self {
            listening: Mutex::default(),
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC).map_err(io::Error::from)?,
            users: Mutex::new(config.users.clone()),
            passed: Mutex::new(passed),
            rounds: Arc::new(Rounds::new()?),
        };
        front.listen(config)?;
        Ok(front)
    }

    pub(super) fn rounds(&self) -> &Arc<Rounds> {
        &self.rounds
    }

    /// Listens where `config` says, and nowhere else.
    pub(super) fn listen(&self, config: &GatewayConfig) -> Result<(), GatewayError> {
        let mut listening = lock(&self.listening);
        let mut last = listening.last;
        let mut next = Listening::default();
        for (at, address) in config.places() {
            let known = listening.listeners.get(&at);
            let known = known.filter(|(_, listener)| *listener.address() == address);
            let (number, listener) = match known {
                Some(known) => known.clone(),
                None => {
                    last += 1;
                    let listener = Arc::new(self.bind(&address, config)?);
                    let number = epoll::EventData::new_u64(last);
                    let added = epoll::add(&self.epoll, &*listener, number, epoll::EventFlags::IN);
                    added.map_err(io::Error::from)?;
                    (last, listener)
                }
            };
            next.places.insert(number, at.clone());
            next.listeners.insert(at, (number, listener));
        }
        next.last = last;
        // Those that are not there any more are closed by that, and nobody waits for them then.
        *listening = next;
        *lock(&self.users) = config.users.clone();
        self.rounds.wake();
        Ok(())
    }

    /// Where something has come.
    fn ready(&self) -> io::Result<Vec<(Place, Arc<Listener>)>> {
        let listening = lock(&self.listening);
        // Room for all: a round does not leave anybody out.
        let mut events: Vec<epoll::Event> = Vec::with_capacity(listening.places.len().max(1));
        match epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&NOW)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let places = events
            .iter()
            .filter_map(|event| listening.places.get(&{ event.data }.u64()));
        let ready = places.filter_map(|at| {
            let (_, listener) = listening.listeners.get(at)?;
            Some((at.clone(), listener.clone()))
        });
        Ok(ready.collect())
    }

    fn bind(&self, address: &Address, config: &GatewayConfig) -> Result<Listener, SocketError> {
        let patience = config.outgoing.stall_timeout;
        let mut passed = lock(&self.passed);
        match passed.iter().position(|it| it.address() == address) {
            Some(found) => Ok(passed.swap_remove(found)),
            None if matches!(address, Address::Unix(_)) => {
                Listener::bind_for(address, patience, config.users.clone())
            }
            // Who connects is looked up once it is known that something came.
            None => Listener::bind(address, patience),
        }
    }

    /// Waits for connections that begin; for `time` at most, and not longer when `wake` is thrown. Those of the round before
    /// have been handed on.
    pub(super) fn wait(
        &self,
        fresh: &mut Vec<Fresh>,
        wake: &Hangup,
        time: Duration,
    ) -> Result<Vec<Begun>, GatewayError> {
        self.rounds.end(fresh);
        let room = MOST_FRESH.saturating_sub(fresh.len());
        {
            let mut fds = vec![PollFd::new(&self.rounds.wake, PollFlags::IN)];
            if room > 0 {
                fds.push(PollFd::new(&self.epoll, PollFlags::IN));
            } else {
                self.rounds.could_not_accept();
            }
            if !wake.is_hung_up() {
                fds.push(PollFd::new(wake, PollFlags::IN));
            }
            let sockets = fresh.iter().map(|it| &it.socket);
            fds.extend(sockets.map(|socket| PollFd::new(socket, PollFlags::IN)));
            let late = fresh
                .iter()
                .map(|it| SILENCE.saturating_sub(it.since.elapsed()));
            wait_for(&mut fds, late.min().unwrap_or(time).min(time))?;
        }
        self.rounds.wake.pop();
        if room > 0 {
            self.accept(&self.ready()?, room, fresh);
        }
        Ok(self.take_begun(fresh))
    }

    fn accept(&self, ready: &[(Place, Arc<Listener>)], room: usize, fresh: &mut Vec<Fresh>) {
        let share = (room / ready.len().max(1)).max(1);
        let mut behind = lock(&self.rounds.behind);
        let before = mem::take(&mut *behind);
        for (at, listener) in ready {
            if !self.accept_at(at, listener, share, fresh) {
                let last = before.get(at).copied();
                behind.insert(at.clone(), last.unwrap_or(self.rounds.done()));
            }
        }
    }

    /// Whether all were accepted.
    fn accept_at(
        &self,
        at: &Place,
        listener: &Listener,
        most: usize,
        fresh: &mut Vec<Fresh>,
    ) -> bool {
        for _ in 0..most {
            match listener.try_accept() {
                Ok(Some(socket)) => fresh.push(Fresh {
                    at: at.clone(),
                    socket,
                    since: Instant::now(),
                    round: self.rounds.done() + 1,
                }),
                Ok(None) => return true,
                Err(error) => {
                    warn!("{}; trying again", chain(&error));
                    self.rounds.could_not_accept();
                    thread::sleep(PAUSE);
                    return false;
                }
            }
        }
        false
    }

    /// Takes out those that have begun and are welcome, and drops those that have ended without a byte.
    fn take_begun(&self, fresh: &mut Vec<Fresh>) -> Vec<Begun> {
        let mut begun = Vec::new();
        for it in mem::take(fresh) {
            let mut bytes = [0; MAGIC_LEN];
            let Some(length) = peek(&it.socket, &mut bytes) else {
                debug!("{}: a connection was closed before its first byte", it.at);
                continue;
            };
            match classify(&bytes[..length], it.since.elapsed() >= SILENCE) {
                Some(first) if self.is_welcome(&it.at, peer_of(&it.socket)) => {
                    begun.push((it.at, Arc::new(it.socket.into()), first));
                }
                Some(_) => {}
                None => fresh.push(it),
            }
        }
        begun
    }

    /// Whether it is a connection of this host, and of one of `users`.
    fn is_welcome(&self, at: &Place, peer: io::Result<Peer>) -> bool {
        match peer {
            Ok(Peer::Remote) => {
                warn!("{at}: turning away another host: only this one's QEMUs connect here")
            }
            Ok(peer) if lock(&self.users).allow(peer) => return true,
            Ok(Peer::Uid(uid)) => warn!("{at}: turning away user {uid}, who is not in `users`"),
            // Mostly one that has been closed already.
            Ok(Peer::Unknown) => debug!("{at}: turning away a connection: nobody has it open"),
            Err(error) => {
                warn!("{at}: turning away a connection: cannot tell whose it is: {error}")
            }
        }
        false
    }
}

impl Rounds {
    fn new() -> io::Result<Self> {
        Ok(Self {
            done: AtomicU64::new(0),
            could_not_accept: AtomicBool::new(false),
            behind: Mutex::default(),
            held: Mutex::default(),
            wake: PollQueue::new()?,
        })
    }

    /// How many are done.
    pub(super) fn done(&self) -> u64 {
        self.done.load(Ordering::Acquire)
    }

    /// Whether all has been handed on that had come at `at` when `done` rounds were done. If not, the next round begins at once.
    pub(super) fn have_passed(&self, done: u64, at: &Place) -> bool {
        let until = lock(&self.held).get(at).copied();
        // The round that was under way may have accepted before that; the one behind it has not.
        let have = until.unwrap_or(self.done()) >= done + 2;
        if !have {
            self.wake();
        }
        have
    }

    fn wake(&self) {
        self.wake.push(());
    }

    fn could_not_accept(&self) {
        self.could_not_accept.store(true, Ordering::Relaxed);
    }

    fn end(&self, fresh: &[Fresh]) {
        let mut held = lock(&self.held);
        held.clone_from(&lock(&self.behind));
        for it in fresh {
            // What came before the round before has been accepted in that one.
            let until = held.entry(it.at.clone()).or_insert(u64::MAX);
            *until = (*until).min(it.round.saturating_sub(1));
        }
        if !self.could_not_accept.swap(false, Ordering::Relaxed) {
            self.done.fetch_add(1, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn at(port: u16) -> Place {
        Place::Port(([127, 0, 0, 2], port).into())
    }

    fn fresh(rounds: &Rounds, port: u16) -> Fresh {
        Fresh {
            at: at(port),
            socket: Socket::Unix(UnixStream::pair().unwrap().0),
            since: Instant::now(),
            round: rounds.done() + 1,
        }
    }

    /// Whatever address it listens at.
    #[test]
    fn only_users_of_this_host_are_welcome() {
        let front = Front {
            listening: Mutex::default(),
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC).unwrap(),
            users: Mutex::new(Peers::own_and([4711])),
            passed: Mutex::default(),
            rounds: Arc::new(Rounds::new().unwrap()),
        };
        let is_welcome = |peer| front.is_welcome(&at(1), peer);
        assert!(is_welcome(Ok(Peer::Uid(4711))));
        assert!(!is_welcome(Ok(Peer::Uid(4712))));
        assert!(!is_welcome(Ok(Peer::Remote)));
        assert!(!is_welcome(Ok(Peer::Unknown)));
        assert!(!is_welcome(Err(io::ErrorKind::Unsupported.into())));
    }

    #[test]
    fn all_has_been_handed_on_after_a_whole_round() {
        let rounds = Rounds::new().unwrap();
        let asked = rounds.done();
        assert!(!rounds.have_passed(asked, &at(1)));
        rounds.end(&[]);
        assert!(!rounds.have_passed(asked, &at(1)));
        rounds.could_not_accept();
        rounds.end(&[]);
        assert!(!rounds.have_passed(asked, &at(1)));
        let silent = [fresh(&rounds, 1)];
        rounds.end(&silent);
        assert!(!rounds.have_passed(asked, &at(1)));
        assert!(rounds.have_passed(asked, &at(2)));
        rounds.end(&silent);
        assert!(!rounds.have_passed(asked, &at(1)));
        // That one has begun; others have come, but later.
        rounds.end(&[fresh(&rounds, 1), fresh(&rounds, 2)]);
        assert!(rounds.have_passed(asked, &at(1)));
    }

    #[test]
    fn where_more_had_come_than_a_round_accepts_the_next_ones_count() {
        let rounds = Rounds::new().unwrap();
        let asked = rounds.done();
        lock(&rounds.behind).insert(at(1), rounds.done());
        for _ in 0..3 {
            rounds.end(&[]);
        }
        assert!(!rounds.have_passed(asked, &at(1)));
        assert!(rounds.have_passed(asked, &at(2)));
        lock(&rounds.behind).clear();
        rounds.end(&[]);
        assert!(rounds.have_passed(asked, &at(1)));
    }
}
