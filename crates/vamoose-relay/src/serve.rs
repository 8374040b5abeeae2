//! The destination side of `migrate`: accepts migrations for the QEMUs that wait on this host.
//!
//! ```text
//!  inspect ─> check the waiting QEMU, answer what it is; it is not touched
//!  prepare ─> set it up, keep it from starting itself, run a relay to it
//!  data    ─> handed to that relay
//!  commit  ─> when the QEMU has loaded the guest: continue it, answer when it runs
//!  abort   ─> end the relay and the QEMU, which holds half a guest
//! ```
//!
//! Crate `handover` decides what a message means for the guest, and `job` drives its state machine. `listener` accepts the
//! connections, `jobs` keeps the attempts, `setup` prepares a QEMU, and `qemu` carries out the decisions. An id alone assigns a
//! message to its attempt. The answer is `unknown` if the attempt is neither in memory nor in the journal.

mod job;
mod jobs;
mod listener;
mod log;
mod qemu;
mod setup;
mod storage;

use std::{
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use handover::{AttemptId, Incarnation};
use rustix::fs::Mode;
use thiserror::Error;
use tracing::{Span, error_span};
use vamoose_codec::Engines;
use vamoose_link::{
    Address, Hangup, Listener, Peers, Security, SessionConfig, Sessions, SessionsError,
    SocketError, random_id,
};

use crate::{Journal, JournalError, Observer, UnderWay, service::Draining};
pub(crate) use job::Job;
use jobs::Jobs;
use listener::most_connections;
pub(crate) use qemu::DestinationQemu;

/// Accepts migrations, any number at once.
pub struct Server {
    sessions: Sessions,
    /// Accepts this host's commands, at a socket in a private folder.
    local: Sessions,
    config: ServerConfig,
    incarnation: Incarnation,
    jobs: Jobs,
    observer: Arc<dyn Observer>,
    /// Every open connection holds a clone.
    connections: Arc<()>,
    /// So does every one that measures the link.
    measuring: Arc<()>,
    most_connections: usize,
    draining: Draining,
}

/// The options of a [`Server`].
#[derive(Clone)]
pub struct ServerConfig {
    /// The QEMUs' monitors are `qmp_dir/NAME.qmp`.
    pub qmp_dir: PathBuf,
    /// Folder of the [`Journal`].
    pub state_dir: PathBuf,
    /// Decodes the pages that the QEMUs do not decode themselves.
    pub engines: Engines,
    /// Configuration of the sessions with sources.
    pub sessions: SessionConfig,
    /// Which users of this host may connect.
    pub peers: Peers,
    /// How long a loaded guest may be without its source before it is reported as an orphan.
    pub orphan_timeout: Duration,
}

/// A server that cannot continue.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ServeError {
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error(transparent)]
    Journal(#[from] JournalError),
    #[error(transparent)]
    Sessions(#[from] SessionsError),
    #[error(
        "the monitors in {} can be replaced by users who do not own them: take the right to write there from others, or give \
         the folder a sticky bit (chmod +t)", .0.display()
    )]
    Shared(PathBuf),
    #[error("cannot wait for connections")]
    Wait(#[from] io::Error),
}

impl Server {
    /// Listens on `addresses`.
    ///
    /// # Errors
    /// When an address is in use or belongs to another host, or the journal, certificates or keys cannot be used.
    pub fn bind(addresses: &[Address], mut config: ServerConfig) -> Result<Self, ServeError> {
        // The journal compares paths.
        config.qmp_dir = fs::canonicalize(&config.qmp_dir)?;
        if is_shared(&config.qmp_dir)? {
            return Err(ServeError::Shared(config.qmp_dir));
        }
        let jobs = Jobs::new(Journal::open(&config.state_dir)?);
        let stall_timeout = config.sessions.stall_timeout;
        let listen = |address| Listener::bind_for(address, stall_timeout, config.peers.clone());
        let listeners = addresses.iter().map(listen).collect::<Result<_, _>>()?;
        let local = local_listener(&config.state_dir, stall_timeout)?;
        Ok(Self {
            jobs,
            sessions: Sessions::new(listeners, config.sessions.clone())?,
            local: Sessions::new(vec![local], SessionConfig::new(Security::Insecure))?,
            config,
            observer: Arc::new(()),
            incarnation: Incarnation(random_id()?),
            connections: Arc::default(),
            measuring: Arc::default(),
            most_connections: most_connections(),
            draining: Draining::default(),
        })
    }

    /// Reports migrations to `observer`.
    #[must_use]
    pub fn observed_by(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observer = observer;
        self
    }

    /// Addresses at which sources reach this server.
    pub fn addresses(&self) -> impl Iterator<Item = &Address> {
        self.sessions.addresses()
    }

    /// The migrations under way.
    pub fn under_way(&self) -> Vec<UnderWay> {
        self.jobs.under_way()
    }

    /// Address for this host's commands.
    fn local_address(&self) -> String {
        let mut addresses = self.local.addresses();
        addresses
            .next()
            .map_or_else(String::new, Address::to_string)
    }

    /// Accepts no further migrations. [`Server::run`] returns when those under way have finished, or after `within`.
    pub fn drain(&self, within: Duration) {
        self.draining.begin(within);
    }

    /// Accepts migrations until `stop` is hung up or [`Server::drain`] has finished. Migrations that are still receiving then
    /// are ended. Loaded guests wait for a restart of the server.
    ///
    /// # Errors
    /// When the journal cannot be read, or the system refuses to wait for connections.
    pub fn run(&self, stop: &Hangup) -> Result<(), ServeError> {
        let unfinished = self.jobs.restore_unfinished(&self.config.qmp_dir)?;
        thread::scope(|scope| {
            for job in unfinished {
                scope.spawn(move || span(job.attempt).in_scope(|| job.go_on()));
            }
            let accepted = self.accept_all(scope, stop);
            self.jobs.hang_up();
            accepted
        })
    }
}

/// Whether users may remove and rename each other's files there.
fn is_shared(dir: &Path) -> io::Result<bool> {
    let mode = Mode::from_raw_mode(fs::metadata(dir)?.mode());
    Ok(mode.intersects(Mode::WGRP | Mode::WOTH) && !mode.contains(Mode::SVTX))
}

/// Listens at the first path that no other server uses.
fn local_listener(state_dir: &Path, stall_timeout: Duration) -> Result<Listener, SocketError> {
    let mut number = 0;
    loop {
        let path = state_dir.join(format!("serve-{number}.sock"));
        match Listener::bind_for(&Address::Unix(path), stall_timeout, Peers::own_and([])) {
            Err(error) if error.source.kind() == io::ErrorKind::AddrInUse => number += 1,
            bound => return bound,
        }
    }
}

fn span(attempt: AttemptId) -> Span {
    error_span!("migration", role = "destination", %attempt)
}
