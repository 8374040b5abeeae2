//! A gateway between two hosts: whoever migrates a guest by its QEMU alone (libvirt, for one) gains what two Vamooses have.
//!
//! ```text
//!  QEMU ── alias of the peer, port P ──> gateway ══ a session for each migration ══> gateway ── own alias, port P ──> QEMU
//! ```
//!
//! On every host each peer has an address of the host's own, its *alias*; QEMUs wait at the same ports of it as on the peer.
//! The gateway listens at all of them, and at the sockets of *streams*, which lead to sockets of the peers.
//! Module `first_bytes` classifies what connects, [`sorting`] decides what a port carries, [`door`]
//! is a migration from this host, [`visit`] one to it. Two gateways agree on a migration before any of its bytes are
//! taken: [`announce`] draws it. Migrations in plain text go through a [`Relay`](crate::Relay) at each end;
//! everything else (NBD, TLS of QEMU's own) goes as bytes, over the same session (module `opaque`).
//!
//! A thread accepts for this host, another one for the sessions of others, and every migration has its own.

mod account;
mod announce;
mod config;
mod door;
mod front;
mod guest;
mod place;
#[cfg(feature = "fuzzing")]
pub mod seam;
mod slots;
mod sorting;
mod visit;

use std::{
    collections::HashMap,
    io,
    os::fd::AsFd as _,
    panic::{self, AssertUnwindSafe},
    sync::{Arc, Mutex},
    thread::{self, Scope},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags};
use thiserror::Error;
use tracing::{error, error_span, warn};
use vamoose_link::{
    Address, Hangup, Introduced, Listener, Sessions, SessionsError, SocketError, Stream, lock,
    wait_for,
};

pub use announce::AnnounceError;
pub use config::{GatewayConfig, GatewayPeer, GatewayStream};
use door::Door;
use front::Front;
use place::Place;
use visit::{Admission, Visit};

use crate::{Observer, UnderWay, first_bytes::FirstBytes};

/// Moves migrations between this host and its peers, as many at once as there are.
pub struct Gateway {
    config: Mutex<Arc<GatewayConfig>>,
    sessions: Sessions,
    front: Front,
    /// Migrations from this host, by where they came.
    doors: Mutex<HashMap<Place, Arc<Door>>>,
    /// Migrations to this host.
    visits: Mutex<Vec<Arc<Visit>>>,
    admission: Admission,
    observer: Arc<dyn Observer>,
    /// Thrown when no further migrations are taken, and when those that there are have to end.
    drain: Hangup,
    stop: Hangup,
}

/// A gateway that cannot start, or continue.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum GatewayError {
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error(transparent)]
    Sessions(#[from] SessionsError),
    #[error("cannot wait for connections")]
    Wait(#[from] io::Error),
    #[error("a bug of the gateway has ended the thread that takes {0}: start it again")]
    Panicked(&'static str),
}

/// How often it is looked whether all migrations have ended.
const TICK: Duration = Duration::from_millis(200);

/// Of the thread of one migration, which has panicked: the place has been reported.
const BUG: &str = "a bug of the gateway has ended this migration: its connections are closed";

impl Gateway {
    /// Listens for other gateways, and at the aliases of the peers. Of `passed`, sockets that listen already, it takes those at
    /// addresses that it needs.
    ///
    /// # Errors
    /// When an address is taken or not this host's, or certificates or keys cannot be used.
    pub fn bind(config: GatewayConfig, mut passed: Vec<Listener>) -> Result<Self, GatewayError> {
        let patience = config.sessions.stall_timeout;
        let listen = |address: &Address| {
            let found = passed.iter().position(|it| it.address() == address);
            match found {
                Some(at) => Ok(passed.swap_remove(at)),
                None => Listener::bind(address, patience),
            }
        };
        let listeners = config.listen.iter().map(listen);
        let listeners = listeners.collect::<Result<_, _>>()?;
        Ok(Self {
            sessions: Sessions::new(listeners, config.sessions.clone())?,
            front: Front::new(&config, passed)?,
            config: Mutex::new(Arc::new(config)),
            doors: Mutex::default(),
            visits: Mutex::default(),
            admission: Admission::default(),
            observer: Arc::new(()),
            drain: Hangup::new()?,
            stop: Hangup::new()?,
        })
    }

    /// Tells `observer` of its migrations.
    #[must_use]
    pub fn observed_by(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observer = observer;
        self
    }

    /// Where other gateways reach it.
    pub fn addresses(&self) -> impl Iterator<Item = &Address> {
        self.sessions.addresses()
    }

    /// Works by another configuration from now on. Migrations under way go on as they began; where other gateways reach
    /// this one stays.
    ///
    /// # Errors
    /// As [`Gateway::bind`]; then nothing changes.
    pub fn reload(&self, config: GatewayConfig) -> Result<(), GatewayError> {
        self.sessions
            .set_security(config.sessions.security.clone())?;
        let before = lock(&self.config).clone();
        if let Err(error) = self.front.listen(&config) {
            let restored = self.sessions.set_security(before.sessions.security.clone());
            if let Err(error) = restored {
                warn!(
                    "cannot go back to the security before: {}",
                    crate::chain(&error)
                );
            }
            return Err(error);
        }
        *lock(&self.config) = Arc::new(config);
        Ok(())
    }

    /// What is under way, in both directions.
    pub fn under_way(&self) -> Vec<UnderWay> {
        let doors: Vec<_> = lock(&self.doors).values().cloned().collect();
        let visits = lock(&self.visits).clone();
        let leaving = doors.iter().map(|door| door.under_way());
        let coming = visits.iter().filter_map(|visit| visit.under_way());
        leaving.chain(coming).collect()
    }

    /// Takes no further migrations; when those under way have ended, [`run`](Self::run) returns.
    pub fn drain(&self) {
        self.admission.close();
        self.drain.hang_up();
    }

    /// Ends migrations under way.
    pub fn stop(&self) {
        self.drain();
        self.stop.hang_up();
    }

    /// Moves migrations until it is drained or stopped.
    ///
    /// # Errors
    /// When the system refuses to wait for connections, or one of its own threads has panicked: migrations under way have finished
    /// then, as when it is drained.
    pub fn run(&self) -> Result<(), GatewayError> {
        thread::scope(|scope| {
            let visits = || self.guard("migrations to this host", || self.accept_visits(scope));
            let accepts = scope.spawn(visits);
            let accepted = self.guard("migrations from this host", || self.accept_here(scope));
            let mut deadline = None;
            while matches!(accepted, Err(GatewayError::Panicked(_)))
                && !self.has_drained(&mut deadline)
            {
                thread::sleep(TICK);
            }
            // Not before the deadline of the drain, or when all have ended.
            self.stop();
            self.hang_up_all();
            let visits = accepts.join();
            accepted.and(visits.unwrap_or(Ok(())))
        })
    }

    /// Does what the gateway cannot be without. If that panics, no further migrations are taken.
    fn guard(
        &self,
        takes: &'static str,
        work: impl FnOnce() -> Result<(), GatewayError>,
    ) -> Result<(), GatewayError> {
        panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
            let error = GatewayError::Panicked(takes);
            error!("{error}; no further migrations are taken, those under way finish");
            self.drain();
            Err(error)
        })
    }

    /// Takes connections of this host's QEMUs.
    fn accept_here<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
    ) -> Result<(), GatewayError> {
        let (mut deadline, mut fresh) = (None, Vec::new());
        loop {
            for (at, stream, first) in self.front.wait(&mut fresh, &self.drain, TICK)? {
                self.offer(scope, at, stream, first);
            }
            if self.drain.is_hung_up() && self.has_drained(&mut deadline) {
                return Ok(());
            }
        }
    }

    /// Whether all migrations have ended since it is being drained, or have to.
    fn has_drained(&self, deadline: &mut Option<Instant>) -> bool {
        let timeout = lock(&self.config).drain_timeout;
        let deadline = *deadline.get_or_insert_with(|| Instant::now() + timeout);
        if self.stop.is_hung_up() || self.is_idle() {
            return true;
        }
        let is_late = Instant::now() >= deadline;
        if is_late {
            let seconds = timeout.as_secs();
            warn!("migrations under way have not ended in {seconds} s: they are ended now");
        }
        is_late
    }

    /// Gives a connection to the migration that it belongs to, or begins one.
    fn offer<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        at: Place,
        stream: Arc<Stream>,
        first: FirstBytes,
    ) {
        let mut doors = lock(&self.doors);
        if let Some(door) = doors.get(&at) {
            return door.push(stream, first);
        }
        if self.drain.is_hung_up() {
            return warn!("{at}: a connection is closed: this gateway is about to end");
        }
        let config = lock(&self.config).clone();
        let Some(peer) = config.behind(&at) else {
            // It has just been removed from the configuration.
            return;
        };
        let (slots, outgoing) = (self.admission.slots.clone(), config.outgoing.clone());
        let (observer, rounds) = (self.observer.clone(), self.front.rounds().clone());
        let door = match Door::new(peer.clone(), at.clone(), outgoing, slots, observer, rounds) {
            Ok(door) => Arc::new(door),
            Err(error) => return warn!("{at}: a connection is closed: {error}"),
        };
        door.push(stream, first);
        let (begun, span) = (
            door.clone(),
            error_span!("migration", to = peer.name, at = %at.target()),
        );
        let place = at.clone();
        let work = move || span.in_scope(|| self.run_door(scope, &place, &begun));
        match thread::Builder::new().spawn_scoped(scope, work) {
            Ok(_) => drop(doors.insert(at, door)),
            Err(error) => warn!("{at}: a connection is closed: no thread can be started: {error}"),
        }
    }

    fn run_door<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        at: &Place,
        door: &Arc<Door>,
    ) {
        let closing = panic::catch_unwind(AssertUnwindSafe(|| door.run()));
        if closing.is_err() {
            error!("{BUG}");
            door.hang_up();
        }
        let mut doors = lock(&self.doors);
        let leftover = door.leftover();
        doors.remove(at);
        drop(doors);
        for (stream, first) in leftover {
            self.offer(scope, at.clone(), stream, first);
        }
        if let Ok(closing) = closing {
            closing.finish();
        }
    }

    /// Takes the sessions of other gateways.
    fn accept_visits<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
    ) -> Result<(), GatewayError> {
        loop {
            let mut fds = [self.stop.as_fd(), self.sessions.as_fd()]
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            wait_for(&mut fds, TICK)?;
            if self.stop.is_hung_up() {
                return Ok(());
            }
            while let Some(introduced) = self.sessions.try_next() {
                self.take(scope, introduced);
            }
        }
    }

    fn take<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, introduced: Introduced) {
        let Introduced { stream, session } = introduced;
        let (mut visits, stream) = (lock(&self.visits), Arc::new(stream));
        if let Some(visit) = visits.iter().find(|visit| visit.is_of(&session)) {
            return visit.push(stream);
        }
        let visit = match Visit::new(session, self.observer.clone()) {
            Ok(visit) => Arc::new(visit),
            Err(error) => return warn!("a session is closed: {error}"),
        };
        let (begun, config) = (visit.clone(), lock(&self.config).clone());
        let span = error_span!("migration", role = "destination");
        let work = move || {
            span.in_scope(|| {
                let run = AssertUnwindSafe(|| begun.run(stream, &config, &self.admission));
                if panic::catch_unwind(run).is_err() {
                    error!("{BUG}");
                    begun.hang_up();
                }
            });
            lock(&self.visits).retain(|other| !Arc::ptr_eq(other, &begun));
        };
        match thread::Builder::new().spawn_scoped(scope, work) {
            Ok(_) => visits.push(visit),
            Err(error) => warn!("a session is closed: no thread can be started: {error}"),
        }
    }

    fn is_idle(&self) -> bool {
        lock(&self.doors).is_empty() && lock(&self.visits).is_empty()
    }

    fn hang_up_all(&self) {
        for door in lock(&self.doors).values() {
            door.hang_up();
        }
        for visit in lock(&self.visits).iter() {
            visit.hang_up();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        net::{IpAddr, Ipv4Addr, TcpStream},
        sync::atomic::{AtomicUsize, Ordering},
    };

    use multifd::{MAIN_MAGIC, Method};
    use vamoose_codec::{Engines, Settings};
    use vamoose_link::{MethodChoice, Peers, Remote, Security, SessionConfig};

    use super::*;
    use crate::{Config, End, Observed};

    /// Panics whenever a migration begins.
    #[derive(Default)]
    struct Faulty(AtomicUsize);

    impl Observer for Faulty {
        fn begun(&self, _: &Arc<Observed>) {
            self.0.fetch_add(1, Ordering::Relaxed);
            panic!("as a test wants it");
        }

        fn ended(&self, _: &Arc<Observed>, _: End) {}
    }

    /// A gateway with one door, to a peer that is not there.
    fn gateway() -> (Gateway, (IpAddr, u16)) {
        let alias = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
        let at = "tcp:127.0.0.2:0".parse().unwrap();
        let listener = Listener::bind(&at, Duration::from_secs(60)).unwrap();
        let Address::Tcp { port, .. } = *listener.address() else {
            unreachable!();
        };
        let none = Engines::software(Settings::new(Method::None, None).unwrap());
        let config = Config::new(MethodChoice::Fixed(none));
        let sessions = SessionConfig::new(Security::Insecure);
        let peer = GatewayPeer {
            name: "other".to_owned(),
            alias: Some(alias),
            ports: port..=port,
            remote: Remote {
                paths: vec!["tcp:127.0.0.1:1".parse::<Address>().unwrap().into()],
                config: sessions.clone(),
            },
            identity: None,
            migrations: 1,
            max_bandwidth: None,
        };
        let config = GatewayConfig {
            listen: vec!["tcp:127.0.0.1:0".parse().unwrap()],
            alias: None,
            ports: 1..=1,
            peers: vec![Arc::new(peer)],
            streams: Vec::new(),
            users: Peers::own_and([]),
            outgoing: config.clone(),
            incoming: config,
            sessions,
            drain_timeout: Duration::from_secs(60),
        };
        (
            Gateway::bind(config, vec![listener]).unwrap(),
            (alias, port),
        )
    }

    #[test]
    fn a_migration_whose_thread_panics_leaves_its_port_to_the_next_one() {
        let (gateway, door) = gateway();
        let faulty = Arc::<Faulty>::default();
        let gateway = gateway.observed_by(faulty.clone());
        thread::scope(|scope| {
            let runs = scope.spawn(|| gateway.run());
            let closed = [(), ()].map(|()| {
                let mut source = TcpStream::connect(door).unwrap();
                source.write_all(&MAIN_MAGIC.to_be_bytes()).unwrap();
                let limit = Some(Duration::from_secs(60));
                source.set_read_timeout(limit).unwrap();
                source.read(&mut [0])
            });
            gateway.drain();
            runs.join().unwrap().unwrap();
            for closed in closed {
                let reset = io::ErrorKind::ConnectionReset;
                assert!(closed.map_or_else(|error| error.kind() == reset, |read| read == 0));
            }
        });
        assert_eq!(faulty.0.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn a_gateway_whose_own_thread_panics_ends_with_an_error_when_all_have_finished() {
        let (gateway, _) = gateway();
        let panicked = gateway.guard("nothing", || panic!("as a test wants it"));
        assert!(matches!(panicked, Err(GatewayError::Panicked("nothing"))));
        // Nothing is under way.
        gateway.run().unwrap();
    }
}
