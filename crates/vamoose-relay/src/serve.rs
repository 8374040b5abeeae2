//! The destination's side of `migrate`: takes migrations for the QEMUs that wait on this host.
//!
//! ```text
//!  prepare ─> check the waiting QEMU, set it up, tell it not to start by itself, run a relay to it
//!  data    ─> handed to that relay
//!  commit  ─> when the QEMU has loaded the guest: continue it, answer when it runs
//!  abort   ─> end the relay and the QEMU, which holds half a guest
//! ```
//!
//! What every message means for the guest is decided by crate `handover`, whose machine is driven in `job`; what is
//! done to the QEMU is in `guest`. This module has the connections, and which attempt they belong to: by the
//! attempt's id alone. One that is not known here, by memory or journal, is answered `unknown`.

mod guest;
mod job;
mod setup;

use std::{
    collections::HashMap,
    fs, io,
    os::fd::AsFd,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread::{self, Scope},
    time::Duration,
};

use handover::{
    AttemptId, ConnectionKind, Destination, DestinationMessage, DestinationState, Incarnation,
    PREAMBLE_LEN, Preamble, Prepare, SourceMessage,
};
use multifd::{Layout, Method};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Resource, getrlimit},
};
use thiserror::Error;
use tracing::{debug, info, warn};
use vamoose_codec::Engines;
use vamoose_link::{Address, Hangup, Listener, MethodChoice, Peers, SocketError, Stream};

use crate::{
    AcceptQueue, Config, DestinationRecord, Dialer, Instance, Journal, JournalError,
    control::{self, Control, Offer, Request, from_details, reply, to_details},
    journal::{Record as _, now},
    qemu::Qemu,
};
pub(crate) use guest::Guest;
pub(crate) use job::Job;
use job::Transfer;
use setup::{PrepareError, check, set_up};

/// Takes migrations on one address, as many at once as come.
pub struct Server {
    listener: Listener,
    config: ServerConfig,
    journal: Journal,
    incarnation: Incarnation,
    /// The attempts that something is to be done for.
    jobs: Mutex<HashMap<AttemptId, Arc<Job>>>,
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
    /// How long a peer may neither send nor take a byte while one is awaited.
    pub stall_timeout: Duration,
    /// Which users of this host may connect.
    pub peers: Peers,
    /// After how long without its source a loaded guest is reported as an orphan.
    pub orphan_timeout: Duration,
}

/// A server that cannot go on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The socket.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The journal.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The system refused something that every server needs.
    #[error("cannot wait for connections: {0}")]
    Wait(#[from] io::Error),
}

/// Most connections at once; more are closed at once. A migration has one for each channel, and two.
const MOST_CONNECTIONS: u64 = 4096;
/// Descriptors that are kept for other things than connections.
const OTHER_DESCRIPTORS: u64 = 64;
/// How often leases are looked at, and how long to wait when the system has no descriptors left.
const TICK: Duration = Duration::from_secs(1);

impl Server {
    /// Listens on `address`.
    ///
    /// # Errors
    /// When the address is taken or not this host's, or there is no journal to be had.
    pub fn bind(address: &Address, mut config: ServerConfig) -> Result<Self, ServeError> {
        // The journal compares paths.
        config.qmp_dir = fs::canonicalize(&config.qmp_dir)?;
        let journal = Journal::open(&config.state_dir)?;
        journal.clean_up::<DestinationRecord>();
        Ok(Self {
            listener: Listener::bind_for(address, config.stall_timeout, config.peers.clone())?,
            config,
            journal,
            incarnation: Incarnation(control::random()?),
            jobs: Mutex::default(),
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
        let unfinished = self.take_up()?;
        thread::scope(|scope| {
            for job in unfinished {
                scope.spawn(move || job.go_on());
            }
            let accepted = self.accept_all(scope, stop);
            for job in self.jobs().values() {
                job.hang_up();
            }
            accepted
        })
    }

    fn accept_all<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        stop: &'scope Hangup,
    ) -> Result<(), ServeError> {
        let mut accepts = true;
        loop {
            let mut fds = vec![PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN)];
            if accepts {
                fds.push(PollFd::from_borrowed_fd(
                    self.listener.as_fd(),
                    PollFlags::IN,
                ));
            }
            let tick = Timespec::try_from(TICK).ok();
            match poll(&mut fds, tick.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
            if stop.is_hung_up() {
                return Ok(());
            }
            self.look_after_jobs();
            match self.listener.try_accept() {
                Ok(Some(stream)) => self.take_connection(scope, stop, stream),
                Ok(None) => {}
                Err(error) => {
                    // Of its own accord the connection stays where it is: looking again at once is of no use.
                    if accepts {
                        warn!("{error}; trying again");
                    }
                    accepts = false;
                    continue;
                }
            }
            accepts = true;
        }
    }

    fn take_connection<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        stop: &'scope Hangup,
        stream: Stream,
    ) {
        let Some(place) = Place::take(&self.connections, self.most_connections) else {
            debug!("too many connections: one is closed");
            return;
        };
        let stream = Arc::new(stream);
        stop.register(&stream);
        let work = move || {
            self.handle(scope, &stream);
            drop(place);
        };
        // One client too many must not end the migrations of the others.
        if let Err(error) = thread::Builder::new().spawn_scoped(scope, work) {
            warn!("a connection is closed: no thread can be had for it: {error}");
        }
    }

    /// Leases, and what need not be kept.
    fn look_after_jobs(&self) {
        let mut jobs = self.jobs();
        // Over, and in nobody's hands: whoever asks again is answered from the journal.
        jobs.retain(|_, job| Arc::strong_count(job) > 1 || !job.is_in_journal());
        for job in jobs.values() {
            job.check_lease(self.config.orphan_timeout);
        }
    }

    /// The attempts that an earlier server on this host has left unfinished.
    fn take_up(&self) -> Result<Vec<Arc<Job>>, ServeError> {
        let records = self.journal.records::<DestinationRecord>()?.into_iter();
        let ours = records.filter(|record| {
            record.qemu.monitor.parent() == Some(&self.config.qmp_dir) && !record.is_over()
        });
        let jobs = ours.filter_map(|record| self.restore(record));
        Ok(jobs
            .inspect(|job| info!("{}: taking up attempt {}", job.name, job.attempt))
            .collect())
    }

    /// Makes a job of what the journal remembers, unless another server has.
    fn restore(&self, record: DestinationRecord) -> Option<Arc<Job>> {
        let mut jobs = self.jobs();
        if let Some(job) = jobs.get(&record.attempt) {
            return Some(job.clone());
        }
        let entry = self.journal.claim(record);
        let entry = entry.inspect_err(|error| warn!("{error}")).ok()?;
        let record = &entry.record;
        let machine = Destination::restore(record.incarnation, record.state.clone());
        let guest = Guest::new(record.qemu.clone(), None);
        let job = Arc::new(Job::new(machine, entry, guest, None));
        jobs.insert(job.attempt, job.clone());
        Some(job)
    }

    fn handle<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, stream: &Arc<Stream>) {
        let mut bytes = [0; PREAMBLE_LEN];
        let preamble = match stream.read_full(&mut bytes) {
            Ok(PREAMBLE_LEN) => Preamble::parse(&bytes),
            _ => None,
        };
        let Some(Preamble { kind, attempt }) = preamble else {
            debug!("a connection that is not from a vamoose migrate");
            return;
        };
        match kind {
            ConnectionKind::Control => self.converse(scope, attempt, stream),
            ConnectionKind::Data => match self.jobs().get(&attempt) {
                Some(job) => job.push(stream.clone()),
                None => warn!("a data connection for the unknown attempt {attempt}"),
            },
        }
    }

    /// Answers the requests of one control connection.
    fn converse<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        attempt: AttemptId,
        stream: &Arc<Stream>,
    ) {
        let mut control = Control::new(stream.clone());
        let mut job = self.find(attempt);
        if let Some(job) = &job {
            job.connected(stream);
        }
        loop {
            let message = match control.next_request() {
                Ok(message) => message,
                Err(error) => {
                    debug!("{error}");
                    break;
                }
            };
            let answered = match (message, &job) {
                (SourceMessage::Prepare(prepare), None) => {
                    self.prepare_and_reply(scope, attempt, &prepare, stream, &mut job)
                }
                (SourceMessage::Prepare(_), Some(_)) => refuse(stream, &PrepareError::Repeated),
                (message, Some(job)) => {
                    job.request(message);
                    Ok(())
                }
                (_, None) => reply(stream, &self.unknown()),
            };
            if answered.is_err() {
                break;
            }
        }
        if let Some(job) = job {
            job.disconnected(stream);
        }
    }

    /// The attempt, by memory or journal.
    fn find(&self, attempt: AttemptId) -> Option<Arc<Job>> {
        let known = self.jobs().get(&attempt).cloned();
        known.or_else(|| {
            let record = self.journal.find::<DestinationRecord>(attempt);
            let record = record.inspect_err(|error| warn!("{error}")).ok()??;
            let job = self.restore(record)?;
            // One that no server had taken up yet.
            job.go_on();
            Some(job)
        })
    }

    fn unknown(&self) -> DestinationMessage {
        DestinationMessage::Unknown {
            incarnation: self.incarnation,
            reason: "the server knows nothing of this attempt: it is another one than accepted it, or its journal \
                     is lost"
                .to_owned(),
        }
    }

    fn prepare_and_reply<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        attempt: AttemptId,
        prepare: &Prepare,
        stream: &Arc<Stream>,
        job: &mut Option<Arc<Job>>,
    ) -> Result<(), control::ControlError> {
        let Prepared {
            answer,
            job: prepared,
            dialer,
            config,
        } = match self.prepare(attempt, prepare) {
            Ok(prepared) => prepared,
            Err(error) => {
                warn!("refused: {error}");
                return refuse(stream, &error);
            }
        };
        prepared.connected(stream);
        let receiver = prepared.clone();
        let work = move || receiver.receive(&dialer, &config);
        let started = thread::Builder::new().spawn_scoped(scope, work);
        let job = job.insert(prepared);
        if let Err(error) = started {
            let cause = format!("no thread can be had: {error}");
            job.request(SourceMessage::Abort { cause });
            return Ok(());
        }
        reply(stream, &answer)
    }

    /// Makes a QEMU ready.
    fn prepare(&self, attempt: AttemptId, prepare: &Prepare) -> Result<Prepared, PrepareError> {
        let protocol = prepare.negotiate()?;
        let request: Request = from_details(prepare.details.clone())?;
        let method = request.method.as_str();
        let mut known = Method::ALL.iter().map(|method| method.name());
        if method != MethodChoice::ADAPTIVE && known.all(|known| known != method) {
            return Err(PrepareError::Method {
                theirs: method.to_owned(),
            });
        }
        let mut config = Config::new(self.config.engines.clone());
        config.layout = Layout::new(request.page_size)?;
        config.incoming_channels = Some(request.channels.into());
        config.stall_timeout = self.config.stall_timeout;
        let monitor = self.monitor(&request.name)?;
        self.check_idle(&request.name)?;
        let mut qemu = Qemu::connect(&monitor)?;
        check(&mut qemu, &request)?;
        let incoming = self
            .config
            .qmp_dir
            .join(format!("{}.incoming", request.name));
        let offer = to_details(&Offer {
            qemu: qemu.version().to_string(),
            knows_zero_pages: qemu.knows_zero_pages(),
        })?;
        let instance = Instance::of(&mut qemu, &monitor, request.uuid.clone());
        let transfer = Transfer {
            hangup: Hangup::new()?,
            connections: AcceptQueue::new()?,
        };
        let mut entry = self.journal.claim(DestinationRecord {
            attempt,
            began: now(),
            incarnation: self.incarnation,
            server: self.address().to_string(),
            name: request.name.clone(),
            qemu: instance.clone(),
            orphaned: false,
            state: DestinationState::Receiving,
        })?;
        entry.write()?;
        if let Err(error) = set_up(&mut qemu, request.channels, &incoming) {
            let cause = error.to_string();
            entry.record.state = DestinationState::Aborted { cause };
            entry.write()?;
            return Err(error.into());
        }
        let guest = Guest::new(instance, Some(qemu));
        let machine = Destination::new(self.incarnation);
        let job = Arc::new(Job::new(machine, entry, guest, Some(transfer)));
        // Its monitor serves one client, so nobody else has prepared it meanwhile.
        self.jobs().insert(attempt, job.clone());
        info!("{}: ready for attempt {attempt}", request.name);
        Ok(Prepared {
            answer: DestinationMessage::Prepared {
                protocol,
                incarnation: self.incarnation,
                details: offer,
            },
            job,
            dialer: Dialer::new(Address::Unix(incoming)),
            config,
        })
    }

    /// A QEMU takes part in one attempt at a time.
    fn check_idle(&self, name: &str) -> Result<(), PrepareError> {
        let mut jobs = self
            .jobs()
            .values()
            .cloned()
            .collect::<Vec<_>>()
            .into_iter();
        if jobs.any(|job| job.name == name && !job.is_out_of_the_way()) {
            let name = name.to_owned();
            return Err(PrepareError::Busy { name });
        }
        Ok(())
    }

    /// The monitor of the QEMU called `name`; the name is a peer's word and must stay in its folder.
    fn monitor(&self, name: &str) -> Result<PathBuf, PrepareError> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if name.is_empty() || name.starts_with('.') || !name.chars().all(is_plain) {
            return Err(PrepareError::Name {
                name: name.to_owned(),
            });
        }
        Ok(self.config.qmp_dir.join(format!("{name}.qmp")))
    }

    fn jobs(&self) -> MutexGuard<'_, HashMap<AttemptId, Arc<Job>>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A migration that has been accepted, and what is to be run for it.
struct Prepared {
    answer: DestinationMessage,
    job: Arc<Job>,
    dialer: Dialer,
    config: Config,
}

/// How many connections this process can have descriptors for.
fn most_connections() -> usize {
    let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let left = descriptors
        .saturating_sub(OTHER_DESCRIPTORS)
        .max(descriptors / 2);
    usize::try_from(left.min(MOST_CONNECTIONS)).unwrap_or(usize::MAX)
}

/// One of the connections that there may be.
struct Place<'a>(&'a AtomicUsize);

impl<'a> Place<'a> {
    fn take(taken: &'a AtomicUsize, most: usize) -> Option<Self> {
        let place = Self(taken);
        // Given back by the drop.
        (taken.fetch_add(1, Ordering::Relaxed) < most).then_some(place)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn refuse(stream: &Stream, error: &PrepareError) -> Result<(), control::ControlError> {
    let reason = error.to_string();
    reply(stream, &DestinationMessage::Refused { reason })
}
