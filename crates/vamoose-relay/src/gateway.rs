//! A gateway between two hosts, for callers such as libvirt that migrate guests by QEMU alone.
//!
//! ```text
//!  QEMU ── alias of the peer, port P ──> gateway ══ a session for each migration ══> gateway ── own alias, port P ──> QEMU
//! ```
//!
//! Each peer has a local address on every host, its *alias*. A connection to a port of the alias reaches the QEMU that waits at
//! the same port on the peer. [`listeners`] has the sockets at these ports and those of *streams*, which lead to sockets of the
//! peers. [`outgoing`] is a migration from this host, and [`incoming`] a migration to it. Two gateways agree on a migration before
//! they read any of its bytes: [`announce`] shows the messages. A migration in plain text goes through a
//! [`Relay`](crate::Relay) at each end. Everything else (NBD, QEMU's own TLS) is forwarded as bytes over the same session.
//!
//! One thread accepts sessions, and starts a thread for each migration. A migration's thread accepts its connections.

mod account;
mod announce;
mod config;
mod endpoint;
#[cfg(feature = "fuzzing")]
#[path = "gateway/tests/fuzzing.rs"]
pub mod fuzzing;
mod guest;
mod incoming;
mod listeners;
mod outgoing;
mod slots;

use std::{
    collections::{HashMap, VecDeque},
    io, iter,
    os::fd::AsFd as _,
    panic::{self, AssertUnwindSafe},
    sync::{Arc, Mutex},
    thread::{self, Scope},
    time::Duration,
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
use incoming::IncomingMigration;
use listeners::{EndpointListener, Listeners};
use outgoing::OutgoingMigration;
use slots::Slots;

use crate::{
    Observer, UnderWay,
    accept::PAUSE,
    service::{Draining, catch, spawn},
};

/// Moves all migrations between this host and its peers.
pub struct Gateway {
    config: Mutex<Arc<GatewayConfig>>,
    sessions: Sessions,
    listeners: Listeners,
    /// Migrations from this host, by listener number.
    outgoing: Mutex<HashMap<u64, Arc<OutgoingMigration>>>,
    /// Migrations to this host.
    incoming: Mutex<Vec<Arc<IncomingMigration>>>,
    slots: Arc<Slots>,
    observer: Arc<dyn Observer>,
    draining: Draining,
    /// Ends all migrations.
    stop: Hangup,
}

/// An error that ends the gateway, or keeps it from starting.
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
    #[error("a bug of the gateway keeps it from accepting migrations: restart it")]
    Panicked,
}

/// Interval at which the end of a drain is checked.
const TICK: Duration = Duration::from_millis(200);

/// Limit of streams that are accepted in a row, before local connections.
const MOST_TAKEN: usize = 64;

impl Gateway {
    /// Listens for other gateways, and at the aliases of the peers. Sockets in `passed` are listening already.
    ///
    /// # Errors
    /// When an address is in use or belongs to another host, or certificates or keys cannot be used.
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
            listeners: Listeners::new(&config, passed)?,
            config: Mutex::new(Arc::new(config)),
            outgoing: Mutex::default(),
            incoming: Mutex::default(),
            slots: Arc::default(),
            observer: Arc::new(()),
            draining: Draining::default(),
            stop: Hangup::new()?,
        })
    }

    /// Reports migrations to `observer`.
    #[must_use]
    pub fn observed_by(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observer = observer;
        self
    }

    /// Addresses at which other gateways reach this one.
    pub fn addresses(&self) -> impl Iterator<Item = &Address> {
        self.sessions.addresses()
    }

    /// Replaces the configuration. Migrations under way keep theirs, and the addresses for other gateways stay.
    ///
    /// # Errors
    /// As [`Gateway::bind`]. The old configuration stays in effect.
    pub fn reload(&self, config: GatewayConfig) -> Result<(), GatewayError> {
        self.sessions
            .set_security(config.sessions.security.clone())?;
        // Locked: no migration begins at a new endpoint before the configuration is replaced.
        let _outgoing = lock(&self.outgoing);
        let before = lock(&self.config).clone();
        let listening = match self.draining.has_begun() {
            true => Ok(()),
            false => self.listeners.listen(&config),
        };
        if let Err(error) = listening {
            let restored = self.sessions.set_security(before.sessions.security.clone());
            if let Err(error) = restored {
                warn!(
                    "cannot restore the previous certificates or keys: {}",
                    crate::chain(&error)
                );
            }
            return Err(error);
        }
        *lock(&self.config) = Arc::new(config);
        Ok(())
    }

    /// Migrations under way, in both directions.
    pub fn under_way(&self) -> Vec<UnderWay> {
        let outgoing: Vec<_> = lock(&self.outgoing).values().cloned().collect();
        let incoming = lock(&self.incoming).clone();
        let leaving = outgoing.iter().map(|migration| migration.under_way());
        let coming = incoming.iter().filter_map(|it| it.under_way());
        leaving.chain(coming).collect()
    }

    /// Accepts no further migrations. [`run`](Self::run) returns when the ones under way have ended.
    pub fn drain(&self) {
        let timeout = lock(&self.config).drain_timeout;
        self.draining.begin(timeout);
        self.listeners.close();
    }

    /// Ends migrations under way.
    pub fn stop(&self) {
        self.drain();
        self.stop.hang_up();
    }

    /// Moves migrations until the gateway is drained or stopped.
    ///
    /// # Errors
    /// When the system refuses to wait for connections, or the accepting thread has panicked. Migrations under way have been
    /// drained then.
    pub fn run(&self) -> Result<(), GatewayError> {
        thread::scope(|scope| {
            let accepted = self.until_drained(|| self.accept_all(scope));
            // All migrations have ended, or the drain has timed out.
            self.stop();
            self.hang_up_all();
            accepted
        })
    }

    /// Runs `work`. A panic begins a drain and restarts `work`, because migrations under way need further streams.
    fn until_drained(
        &self,
        work: impl Fn() -> Result<(), GatewayError>,
    ) -> Result<(), GatewayError> {
        let mut result = Ok(());
        loop {
            match panic::catch_unwind(AssertUnwindSafe(&work)) {
                Ok(ended) => return result.and(ended),
                Err(_) => {
                    error!(
                        "{}; migrations under way finish first",
                        GatewayError::Panicked
                    );
                    result = Err(GatewayError::Panicked);
                    self.drain();
                    thread::sleep(TICK);
                }
            }
        }
    }

    fn accept_all<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
    ) -> Result<(), GatewayError> {
        while !self.has_ended() {
            let mut fds = [
                self.stop.as_fd(),
                self.sessions.as_fd(),
                self.listeners.as_fd(),
            ]
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            wait_for(&mut fds, TICK)?;
            for introduced in iter::from_fn(|| self.sessions.try_next()).take(MOST_TAKEN) {
                self.take(scope, introduced);
            }
            for listener in self.listeners.ready()? {
                self.begin(scope, listener, VecDeque::new());
            }
        }
        Ok(())
    }

    /// Whether the gateway is stopped, or has drained.
    fn has_ended(&self) -> bool {
        let is_idle = || lock(&self.outgoing).is_empty() && lock(&self.incoming).is_empty();
        // A guest under post-copy stands still without its relay.
        let must_end = || {
            let mut outgoing = lock(&self.outgoing)
                .values()
                .cloned()
                .collect::<Vec<_>>()
                .into_iter();
            let mut incoming = lock(&self.incoming).clone().into_iter();
            outgoing.any(|it| it.stats().is_under_post_copy())
                || incoming.any(|it| it.stats().is_under_post_copy())
        };
        self.draining
            .has_ended(|| self.stop.is_hung_up() || is_idle(), must_end)
    }

    /// Begins a migration at an endpoint that has connections. The ones in `held` have been accepted already.
    fn begin<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        listener: Arc<EndpointListener>,
        held: VecDeque<Arc<Stream>>,
    ) {
        let mut outgoing = lock(&self.outgoing);
        // A migration that still accepts there rearms the listener at its end.
        if outgoing.contains_key(&listener.number) || self.draining.has_begun() {
            return;
        }
        let config = lock(&self.config).clone();
        let Some(peer) = config.peer_at(&listener.at) else {
            // The endpoint has just been removed from the configuration.
            return;
        };
        let migration = OutgoingMigration::new(
            peer.clone(),
            listener.clone(),
            &config,
            self.slots.clone(),
            self.observer.clone(),
            held,
        );
        let started = migration.and_then(|migration| {
            let migration = Arc::new(migration);
            let span = error_span!("migration", to = peer.name, at = %listener.at.target());
            let (begun, at) = (migration.clone(), listener.clone());
            spawn(scope, span, move || self.run_outgoing(scope, at, begun))?;
            Ok(migration)
        });
        match started {
            Ok(migration) => drop(outgoing.insert(listener.number, migration)),
            Err(error) => {
                drop(outgoing);
                warn!("{}: its connections are closed: {error}", listener.at);
                while let Ok(Some(_)) = listener.listener.try_accept() {}
                // File descriptors may become available again.
                thread::sleep(PAUSE);
                self.listeners.resume(&listener);
            }
        }
    }

    fn run_outgoing<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        listener: Arc<EndpointListener>,
        migration: Arc<OutgoingMigration>,
    ) {
        let closing = catch(|| migration.run());
        if closing.is_none() {
            migration.hang_up();
        }
        let leftover = migration.leftover();
        lock(&self.outgoing).remove(&listener.number);
        // Finishing takes seconds. A listener that has been removed from the configuration is closed before.
        drop(migration);
        match leftover.is_empty() {
            true => self.listeners.resume(&listener),
            false => self.begin(scope, listener.clone(), leftover),
        }
        drop(listener);
        if let Some(closing) = closing {
            closing.finish();
        }
    }

    /// Hands a stream to its session's migration, or begins that migration.
    fn take<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, introduced: Introduced) {
        let Introduced { stream, session } = introduced;
        let (mut incoming, stream) = (lock(&self.incoming), Arc::new(stream));
        if let Some(migration) = incoming.iter().find(|it| it.has_session(&session)) {
            return migration.push(stream);
        }
        let migration = match IncomingMigration::new(session, self.observer.clone()) {
            Ok(migration) => Arc::new(migration),
            Err(error) => return warn!("a session is closed: {error}"),
        };
        let (begun, config) = (migration.clone(), lock(&self.config).clone());
        let span = error_span!("migration", role = "destination");
        let work = move || {
            let run = || begun.run(stream, &config, &self.slots, &self.draining);
            if catch(run).is_none() {
                begun.hang_up();
            }
            lock(&self.incoming).retain(|other| !Arc::ptr_eq(other, &begun));
        };
        match spawn(scope, span, work) {
            Ok(()) => incoming.push(migration),
            Err(error) => warn!("a session is closed: no thread can be started: {error}"),
        }
    }

    fn hang_up_all(&self) {
        for migration in lock(&self.outgoing).values() {
            migration.hang_up();
        }
        for migration in lock(&self.incoming).iter() {
            migration.hang_up();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        net::{IpAddr, Ipv4Addr, TcpListener, TcpStream},
        os::unix::net::UnixStream,
        sync::atomic::{AtomicUsize, Ordering},
        time::Instant,
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

    const LIMIT: Duration = Duration::from_secs(60);

    /// A gateway with one endpoint, to a peer that is not there.
    fn gateway() -> (Gateway, (IpAddr, u16)) {
        let (config, listener, endpoint) = config();
        (Gateway::bind(config, vec![listener]).unwrap(), endpoint)
    }

    /// A configuration with one endpoint, and the socket that listens there.
    fn config() -> (GatewayConfig, Listener, (IpAddr, u16)) {
        let alias = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
        let at = "tcp:127.0.0.2:0".parse().unwrap();
        let listener = Listener::bind(&at, LIMIT).unwrap();
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
            drain_timeout: LIMIT,
        };
        (config, listener, (alias, port))
    }

    #[test]
    fn a_migration_whose_thread_panics_leaves_its_port_to_the_next_one() {
        let (gateway, endpoint) = gateway();
        let faulty = Arc::<Faulty>::default();
        let gateway = gateway.observed_by(faulty.clone());
        thread::scope(|scope| {
            let runs = scope.spawn(|| gateway.run());
            let closed = [(), ()].map(|()| {
                let mut source = TcpStream::connect(endpoint).unwrap();
                source.write_all(&MAIN_MAGIC.to_be_bytes()).unwrap();
                source.set_read_timeout(Some(LIMIT)).unwrap();
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
    fn a_stream_that_moves_to_another_socket_accepts_there_at_once() {
        let dir = tempfile::tempdir().unwrap();
        // Accepts connections and never answers, so a migration to it stays under way.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let (mut config, listener, _) = config();
        let to: Address = format!("tcp:{}", silent.local_addr().unwrap())
            .parse()
            .unwrap();
        let peer = Arc::make_mut(&mut config.peers[0]);
        peer.remote.paths = vec![to.into()];
        peer.migrations = 3;
        let at = |name: &str| {
            let mut config = config.clone();
            config.streams = vec![GatewayStream {
                name: "stream".into(),
                peer: "other".to_owned(),
                listen: Some(Address::Unix(dir.path().join(name))),
                to: None,
            }];
            config
        };
        let connect = |name| {
            let mut source = UnixStream::connect(dir.path().join(name)).unwrap();
            source.write_all(b"GET ").unwrap();
            source
        };
        let gateway = Gateway::bind(at("first"), vec![listener]).unwrap();
        let wait_for = |migrations| {
            let deadline = Instant::now() + LIMIT;
            while gateway.under_way().len() != migrations {
                assert!(
                    Instant::now() < deadline,
                    "not {migrations}: {:?}",
                    gateway.under_way()
                );
                thread::sleep(Duration::from_millis(5));
            }
        };
        thread::scope(|scope| {
            let runs = scope.spawn(|| gateway.run());
            // A test that fails ends.
            let checked = panic::catch_unwind(AssertUnwindSafe(|| {
                let _first = connect("first");
                wait_for(1);
                gateway.reload(at("second")).unwrap();
                let _second = connect("second");
                wait_for(2);
                // The first migration still accepts at the first socket.
                gateway.reload(at("first")).unwrap();
                let _third = connect("first");
                thread::sleep(TICK);
                assert_eq!(gateway.under_way().len(), 2);
            }));
            drop(silent);
            gateway.stop();
            runs.join().unwrap().unwrap();
            checked.unwrap();
        });
    }

    #[test]
    fn a_gateway_whose_own_thread_panics_goes_on_until_all_have_finished() {
        let (gateway, _) = gateway();
        let tries = AtomicUsize::new(0);
        let ended = gateway.until_drained(|| match tries.fetch_add(1, Ordering::Relaxed) {
            0 => panic!("as a test wants it"),
            _ => Ok(()),
        });
        assert!(matches!(ended, Err(GatewayError::Panicked)));
        assert_eq!(tries.into_inner(), 2);
        // Nothing is under way.
        gateway.run().unwrap();
    }
}
