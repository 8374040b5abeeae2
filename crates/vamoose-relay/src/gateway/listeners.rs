//! The sockets to which this host's QEMUs connect: ports of the peers' aliases, and sockets of streams.

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

/// Listens at all endpoints. Reports a listener with a connection once, until [`Listeners::resume`]. In between, the migration
/// accepts there.
pub(super) struct Listeners {
    /// By number.
    listening: Mutex<HashMap<u64, Arc<EndpointListener>>>,
    last: AtomicU64,
    /// Polls all listeners. A peer has 64, too many for `poll`.
    epoll: OwnedFd,
    /// Listening sockets that this process has inherited.
    passed: Mutex<Vec<Listener>>,
    /// Listeners that have been removed from the configuration, while migrations accept there.
    retired: Mutex<Vec<Weak<EndpointListener>>>,
}

/// Listens at one endpoint. An endpoint whose address changes gets another listener.
pub(super) struct EndpointListener {
    pub(super) at: Endpoint,
    pub(super) listener: Listener,
    /// Identifies the listener to epoll. Never reused.
    pub(super) number: u64,
}

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

    /// Listens at the endpoints of `config`, and stops listening at all others.
    pub(super) fn listen(&self, config: &GatewayConfig) -> Result<(), GatewayError> {
        let mut listening = lock(&self.listening);
        let known: HashMap<_, _> = listening.values().map(|it| (&it.at, it)).collect();
        let mut next = HashMap::new();
        for (at, address) in config.endpoints() {
            let kept = known
                .get(&at)
                .filter(|it| *it.listener.address() == address);
            let listener = match kept {
                Some(listener) => Arc::clone(listener),
                None => self.add(at, &address, config)?,
            };
            next.insert(listener.number, listener);
        }
        let gone = listening
            .values()
            .filter(|it| !next.contains_key(&it.number));
        let mut retired = lock(&self.retired);
        retired.retain(|listener| listener.strong_count() > 0);
        retired.extend(gone.map(Arc::downgrade));
        *listening = next;
        Ok(())
    }

    /// Listens at an endpoint that is new or whose address has changed.
    fn add(
        &self,
        at: Endpoint,
        address: &Address,
        config: &GatewayConfig,
    ) -> Result<Arc<EndpointListener>, GatewayError> {
        // Another endpoint must not get the socket: its connections would reach the first endpoint's destination.
        let is_it = |it: &Arc<EndpointListener>| it.at == at && it.listener.address() == address;
        let retired = lock(&self.retired);
        let in_use = retired.iter().filter_map(Weak::upgrade).find(is_it);
        if let Some(listener) = in_use {
            self.arm(&listener)?;
            return Ok(listener);
        }
        let listener = Arc::new(EndpointListener {
            listener: self.bind(address, config)?,
            at,
            number: self.last.fetch_add(1, Ordering::Relaxed),
        });
        let data = epoll::EventData::new_u64(listener.number);
        epoll::add(&self.epoll, &listener.listener, data, ONCE).map_err(io::Error::from)?;
        Ok(listener)
    }

    fn bind(&self, address: &Address, config: &GatewayConfig) -> Result<Listener, SocketError> {
        let patience = config.outgoing.stall_timeout;
        let mut passed = lock(&self.passed);
        match passed.iter().position(|it| it.address() == address) {
            Some(found) => Ok(passed.swap_remove(found)),
            None if matches!(address, Address::Unix(_)) => {
                Listener::bind_for(address, patience, config.users.clone())
            }
            // The migration checks who connects: users may change, and other hosts are never allowed.
            None => Listener::bind(address, patience),
        }
    }

    /// Listeners with connections that have not been reported.
    pub(super) fn ready(&self) -> io::Result<Vec<Arc<EndpointListener>>> {
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

    /// Reports this listener again, unless it has been removed from the configuration.
    pub(super) fn resume(&self, listener: &EndpointListener) {
        if lock(&self.listening).contains_key(&listener.number)
            && let Err(error) = self.arm(listener)
        {
            let at = &listener.at;
            warn!("{at}: no further connections are accepted: {error}");
        }
    }

    fn arm(&self, listener: &EndpointListener) -> io::Result<()> {
        let data = epoll::EventData::new_u64(listener.number);
        Ok(epoll::modify(&self.epoll, &listener.listener, data, ONCE)?)
    }

    /// Closes all sockets except the ones at which a migration accepts.
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
