//! The destination's side of `migrate`: takes migrations for the QEMUs waiting on this host.
//!
//! ```text
//!  prepare ─> check the waiting QEMU, set it up, keep it from starting itself, run a relay to it
//!  data    ─> handed to that relay
//!  commit  ─> when the QEMU has loaded the guest: continue it, answer when it runs
//!  abort   ─> end the relay and the QEMU, which holds half a guest
//! ```
//!
//! What every message means for the guest is decided by crate `handover`, whose machine is driven in `job`. `listener`
//! has the connections, `jobs` the attempts that they belong to, `setup` makes a QEMU ready, and `qemu` does what is
//! decided. A message belongs to an attempt by its id alone; one that is not known here, by memory or journal, is
//! answered `unknown`.

mod job;
mod jobs;
mod listener;
mod qemu;
mod setup;

use std::{fs, io, path::PathBuf, sync::atomic::AtomicUsize, thread, time::Duration};

use handover::{AttemptId, Incarnation};
use thiserror::Error;
use tracing::{Span, error_span};
use vamoose_codec::Engines;
use vamoose_link::{Address, Hangup, Listener, Peers, SocketError};

use crate::{Journal, JournalError, control};
pub(crate) use job::Job;
use jobs::Jobs;
use listener::most_connections;
pub(crate) use qemu::DestinationQemu;

/// Takes migrations on one address, as many at once as come.
pub struct Server {
    listener: Listener,
    config: ServerConfig,
    incarnation: Incarnation,
    jobs: Jobs,
    /// Connections that are open, and how many may be.
    connections: AtomicUsize,
    most_connections: usize,
}

/// How.
#[derive(Clone)]
pub struct ServerConfig {
    /// The QEMUs' monitors are `qmp_dir/NAME.qmp`.
    pub qmp_dir: PathBuf,
    /// Where attempts are remembered: see [`Journal`].
    pub state_dir: PathBuf,
    /// What decodes; and encodes for the QEMUs, with method none, for these are set up for no other.
    pub engines: Engines,
    /// Abort after this long without progress from a peer.
    pub stall_timeout: Duration,
    /// Which users of this host may connect.
    pub peers: Peers,
    /// After how long without its source a loaded guest is reported as an orphan.
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
    #[error("cannot wait for connections")]
    Wait(#[from] io::Error),
}

impl Server {
    /// Listens on `address`.
    ///
    /// # Errors
    /// When the address is taken or not this host's, or the journal cannot be used.
    pub fn bind(address: &Address, mut config: ServerConfig) -> Result<Self, ServeError> {
        // The journal compares paths.
        config.qmp_dir = fs::canonicalize(&config.qmp_dir)?;
        Ok(Self {
            jobs: Jobs::new(Journal::open(&config.state_dir)?),
            listener: Listener::bind_for(address, config.stall_timeout, config.peers.clone())?,
            config,
            incarnation: Incarnation(control::random()?),
            connections: AtomicUsize::new(0),
            most_connections: most_connections(),
        })
    }

    /// Where it listens.
    pub fn address(&self) -> &Address {
        self.listener.address()
    }

    /// Takes migrations until `stop` is thrown; those that are still coming in are ended then, and guests that have
    /// been loaded wait for the server to be started again.
    ///
    /// # Errors
    /// When the journal cannot be read, or the system refuses to wait for connections.
    pub fn run(&self, stop: &Hangup) -> Result<(), ServeError> {
        let unfinished = self.jobs.take_up(&self.config.qmp_dir)?;
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

fn span(attempt: AttemptId) -> Span {
    error_span!("migration", role = "destination", %attempt)
}
