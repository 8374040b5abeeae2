//! Where this host's QEMUs connect: the aliases of the peers, at every port. What connects is looked at before it goes on.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags};
use tracing::{debug, warn};
use vamoose_link::{
    Address, Hangup, Listener, Peer, Peers, PollQueue, Socket, SocketError, Stream, lock, peer_of,
    wait_for,
};

use super::{
    GatewayConfig, GatewayError,
    first::{First, Look, SILENCE, look},
};
use crate::chain;

/// Listens at the aliases.
pub(super) struct Front {
    listeners: Mutex<HashMap<SocketAddr, Arc<Listener>>>,
    users: Mutex<Peers>,
    /// Listened already when this process was started.
    passed: Mutex<Vec<Listener>>,
    /// Wakes who waits when there are other listeners.
    changed: PollQueue<()>,
}

/// A connection of which it is not known yet what it is.
pub(super) struct Fresh {
    at: SocketAddr,
    socket: Socket,
    since: Instant,
}

/// A connection, where it came, and what it begins with.
pub(super) type Begun = (SocketAddr, Arc<Stream>, First);

/// Most connections of which it is not known yet what they are: more than the migrations of a host begin at once. Further ones
/// wait in the queues of their sockets.
const MOST_FRESH: usize = 1024;

/// For the system to have file descriptors again.
const PAUSE: Duration = Duration::from_millis(100);

impl Front {
    pub(super) fn new(config: &GatewayConfig, passed: Vec<Listener>) -> Result<Self, GatewayError> {
        let front = Self {
            listeners: Mutex::default(),
            users: Mutex::new(config.users.clone()),
            passed: Mutex::new(passed),
            changed: PollQueue::new()?,
        };
        front.listen(config)?;
        Ok(front)
    }

    /// Listens where `config` says, and nowhere else.
    pub(super) fn listen(&self, config: &GatewayConfig) -> Result<(), SocketError> {
        let mut listeners = lock(&self.listeners);
        let mut next = HashMap::new();
        for at in config.doors() {
            let listener = match listeners.get(&at) {
                Some(known) => known.clone(),
                None => Arc::new(self.bind(at, config.outgoing.stall_timeout)?),
            };
            next.insert(at, listener);
        }
        *listeners = next;
        *lock(&self.users) = config.users.clone();
        self.changed.push(());
        Ok(())
    }

    fn bind(&self, at: SocketAddr, stall_timeout: Duration) -> Result<Listener, SocketError> {
        let address = Address::Tcp {
            host: at.ip().to_string(),
            port: at.port(),
        };
        let mut passed = lock(&self.passed);
        match passed.iter().position(|it| *it.address() == address) {
            Some(found) => Ok(passed.swap_remove(found)),
            None => Listener::bind(&address, stall_timeout),
        }
    }

    /// Waits for connections that begin; for `time` at most, and not longer when `wake` is thrown.
    pub(super) fn wait(
        &self,
        fresh: &mut Vec<Fresh>,
        wake: &Hangup,
        time: Duration,
    ) -> Result<Vec<Begun>, GatewayError> {
        let listeners: Vec<_> = lock(&self.listeners)
            .iter()
            .map(|(at, listener)| (*at, listener.clone()))
            .collect();
        let open = if fresh.len() < MOST_FRESH {
            &listeners[..]
        } else {
            &[]
        };
        let ready = {
            let polled = open.iter().map(|(_, it)| PollFd::new(&**it, PollFlags::IN));
            let mut fds: Vec<_> = polled.collect();
            fds.push(PollFd::new(&self.changed, PollFlags::IN));
            fds.extend(
                fresh
                    .iter()
                    .map(|it| PollFd::new(&it.socket, PollFlags::IN)),
            );
            if !wake.is_hung_up() {
                fds.push(PollFd::new(wake, PollFlags::IN));
            }
            let late = fresh
                .iter()
                .map(|it| SILENCE.saturating_sub(it.since.elapsed()));
            wait_for(&mut fds, late.min().unwrap_or(time).min(time))?;
            let polled = fds.iter().zip(open);
            let ready = polled.filter(|(fd, _)| !fd.revents().is_empty());
            ready.map(|(_, listener)| listener).collect::<Vec<_>>()
        };
        self.changed.pop();
        for (at, listener) in ready {
            self.accept(*at, listener, fresh);
        }
        Ok(take_begun(fresh))
    }

    fn accept(&self, at: SocketAddr, listener: &Listener, fresh: &mut Vec<Fresh>) {
        loop {
            match listener.try_accept() {
                Ok(Some(socket)) if self.is_welcome(at, &socket) => fresh.push(Fresh {
                    at,
                    socket,
                    since: Instant::now(),
                }),
                Ok(Some(_)) => {}
                Ok(None) => return,
                Err(error) => {
                    warn!("{}; trying again", chain(&error));
                    return thread::sleep(PAUSE);
                }
            }
        }
    }

    fn is_welcome(&self, at: SocketAddr, socket: &Socket) -> bool {
        match peer_of(socket) {
            Ok(peer) if lock(&self.users).allow(peer) => return true,
            Ok(Peer::Uid(uid)) => warn!("{at}: turning away user {uid}, who is none of `users`"),
            // Mostly one that has been closed already.
            unknown => debug!("{at}: turning away a connection: {unknown:?}"),
        }
        false
    }
}

/// Takes out those that have begun, and drops those that have ended without a byte.
fn take_begun(fresh: &mut Vec<Fresh>) -> Vec<Begun> {
    let mut begun = Vec::new();
    for it in std::mem::take(fresh) {
        match look(&it.socket, it.since.elapsed() >= SILENCE) {
            Look::Is(first) => begun.push((it.at, Arc::new(it.socket.into()), first)),
            Look::NotYet => fresh.push(it),
            Look::Gone => debug!("{}: a connection was closed before its first byte", it.at),
        }
    }
    begun
}
