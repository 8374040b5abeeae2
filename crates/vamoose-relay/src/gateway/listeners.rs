//! The sockets at which this host's QEMUs connect: ports of the peers' aliases, and sockets of streams.

use std::{
    collections::HashMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use rustix::{
    buffer::spare_capacity,
    event::{Timespec, epoll},
    io::Errno,
};
use tracing::warn;
use vamoose_link::{Address, Listener, SocketError, lock};

use super::{GatewayConfig, GatewayError, endpoint::Endpoint};

/// Listens at all endpoints. One that has a connection is reported once; its migration accepts there until it
/// [resumes](Self::resume).
pub(super) struct Listeners {
    /// By the numbers that epoll reports.
    listening: Mutex<HashMap<u64, (Endpoint, Arc<Listener>)>>,
    last: AtomicU64,
    /// Of all listeners: there are 64 for each peer, too many for poll.
    epoll: OwnedFd,
    /// Listened already when this process was started.
    passed: Mutex<Vec<Listener>>,
    /// Removed from the configuration, perhaps while a migration still accepts there.
    retired: Mutex<Vec<(Endpoint, Weak<Listener>)>>,
}

/// No time at all.
const NOW: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 0,
};

const ONCE: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ONESHOT);

impl Listeners {
    pub(super) fn new(config: &GatewayConfig, passed: Vec<Listener>) -> Result<Self, GatewayError> {
        let listeners = Self {
            listening: Mutex::default(),
            last: AtomicU64::new(0),
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC).map_err(io::Error::from)?,
            passed: Mutex::new(passed),
            retired: Mutex::default(),
        };
        listeners.listen(config)?;
        Ok(listeners)
    }

    /// Listens where `config` says, and nowhere else.
    pub(super) fn listen(&self, config: &GatewayConfig) -> Result<(), GatewayError> {
        let mut listening = lock(&self.listening);
        let known = listening
            .iter()
            .map(|(number, (at, listener))| (at, (*number, listener)));
        let known: HashMap<_, _> = known.collect();
        let mut next = HashMap::new();
        for (at, address) in config.endpoints() {
            let kept = known.get(&at);
            let (number, listener) = match kept.filter(|(_, it)| *it.address() == address) {
                Some((number, listener)) => (*number, (*listener).clone()),
                None => {
                    let number = self.last.fetch_add(1, Ordering::Relaxed);
                    let listener = self.bind(&at, &address, config)?;
                    let data = epoll::EventData::new_u64(number);
                    let added = epoll::add(&self.epoll, &*listener, data, ONCE);
                    added.map_err(io::Error::from)?;
                    (number, listener)
                }
            };
            next.insert(number, (at, listener));
        }
        let gone = listening
            .iter()
            .filter(|(number, _)| !next.contains_key(number));
        let gone = gone.map(|(_, (at, listener))| (at.clone(), Arc::downgrade(listener)));
        let mut retired = lock(&self.retired);
        retired.retain(|(_, listener)| listener.strong_count() > 0);
        retired.extend(gone);
        *listening = next;
        Ok(())
    }

    fn bind(
        &self,
        endpoint: &Endpoint,
        address: &Address,
        config: &GatewayConfig,
    ) -> Result<Arc<Listener>, SocketError> {
        // Another endpoint cannot have the socket: its connections would go where the first one's go.
        let retired = lock(&self.retired).clone();
        let mut in_use = retired.iter().filter(|(at, _)| at == endpoint);
        let is_it = |listener: Arc<Listener>| (listener.address() == address).then_some(listener);
        if let Some(listener) = in_use.find_map(|(_, it)| it.upgrade().and_then(is_it)) {
            // Its number was another one.
            let _ = epoll::delete(&self.epoll, &*listener);
            return Ok(listener);
        }
        let patience = config.outgoing.stall_timeout;
        let mut passed = lock(&self.passed);
        let bound = match passed.iter().position(|it| it.address() == address) {
            Some(found) => Ok(passed.swap_remove(found)),
            None if matches!(address, Address::Unix(_)) => {
                Listener::bind_for(address, patience, config.users.clone())
            }
            // The migration turns others away: users may change, and other hosts are never welcome.
            None => Listener::bind(address, patience),
        };
        Ok(Arc::new(bound?))
    }

    /// Endpoints that have connections, each reported once.
    pub(super) fn ready(&self) -> io::Result<Vec<(Endpoint, Arc<Listener>)>> {
        let listening = lock(&self.listening);
        let mut events: Vec<epoll::Event> = Vec::with_capacity(listening.len().max(1));
        match epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&NOW)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let numbers = events.iter().map(|event| { event.data }.u64());
        let ready = numbers.filter_map(|number| listening.get(&number).cloned());
        Ok(ready.collect())
    }

    /// Reports connections at this endpoint again.
    pub(super) fn resume(&self, endpoint: &Endpoint) {
        let listening = lock(&self.listening);
        let found = listening.iter().find(|(_, (at, _))| at == endpoint);
        if let Some((number, (_, listener))) = found {
            let data = epoll::EventData::new_u64(*number);
            if let Err(error) = epoll::modify(&self.epoll, &**listener, data, ONCE) {
                warn!("{endpoint}: no further connections are accepted: {error}");
            }
        }
    }

    /// Closes all sockets, but for those where a migration accepts.
    pub(super) fn close(&self) {
        lock(&self.listening).clear();
    }
}

impl AsFd for Listeners {
    /// Readable while an endpoint has connections.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
