//! The destination's side of `migrate`: takes migrations for the QEMUs that wait on this host.
//!
//! ```text
//!  prepare ─> check the waiting QEMU, set it up, tell it not to start by itself, run a relay to it
//!  data    ─> handed to that relay
//!  commit  ─> when the QEMU has loaded the guest: continue it, answer when it runs
//!  abort   ─> end the relay and the QEMU, which holds half a guest
//! ```
//!
//! The guest must never run twice and never nowhere. So a loaded guest is continued on `commit`
//! only, which comes when the source has stopped for good; a connection that is lost decides
//! nothing; and only a server that knows that the guest never ran here says so.

use std::{
    collections::HashMap,
    fmt::Write as _,
    io,
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, Scope},
    time::{Duration, Instant},
};

use codec::{Engines, Settings};
use multifd::{Layout, Method};
use rustix::event::{PollFd, PollFlags, poll};
use serde_json::json;
use thiserror::Error;
use tracing::{debug, info, warn};
use transfer::{Address, Hangup, Listener, SocketError, Stats, Stream};

use crate::{
    Config, Dialer, Handover, Outcome, Relay, RelayError,
    control::{
        Answer, Commit, Control, Id, Kind, PREAMBLE_LEN, PROTOCOL, Prepare, Request, parse_preamble,
    },
    qemu::{Qemu, QemuError},
};

/// Takes migrations on one address, as many at once as come.
pub struct Server {
    listener: Listener,
    qmp_dir: PathBuf,
    engines: Engines,
    stall_timeout: Duration,
    /// By the QEMU's name: the one migration that it takes part in.
    jobs: Mutex<HashMap<String, Arc<Job>>>,
}

/// A server that cannot go on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The socket.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The system refused something that every server needs.
    #[error("cannot wait for connections: {0}")]
    Wait(#[source] io::Error),
}

impl Server {
    /// Listens on `address` for the QEMUs whose monitors are `qmp_dir/NAME.qmp`. `engines` decode what
    /// comes, and encode for the QEMUs: with method none, for these are set up for no other.
    ///
    /// # Errors
    /// When the address is taken or not this host's.
    pub fn bind(
        address: &Address,
        qmp_dir: &Path,
        engines: Engines,
        stall_timeout: Duration,
    ) -> Result<Self, ServeError> {
        Ok(Self {
            listener: Listener::bind(address, stall_timeout)?,
            qmp_dir: qmp_dir.to_owned(),
            engines,
            stall_timeout,
            jobs: Mutex::default(),
        })
    }

    /// Where it listens.
    pub fn address(&self) -> &Address {
        self.listener.address()
    }

    /// Takes migrations until `stop` is thrown; those under way are aborted then.
    ///
    /// # Errors
    /// When the system refuses to accept connections at all.
    pub fn run(&self, stop: &Hangup) -> Result<(), ServeError> {
        thread::scope(|scope| {
            loop {
                let mut fds = [
                    PollFd::new(stop, PollFlags::IN),
                    PollFd::new(&self.listener, PollFlags::IN),
                ];
                match poll(&mut fds, None) {
                    Ok(_) | Err(rustix::io::Errno::INTR) => {}
                    Err(error) => return Err(ServeError::Wait(error.into())),
                }
                if stop.is_hung_up() {
                    for job in self.jobs().values() {
                        job.hangup.hang_up();
                    }
                    return Ok(());
                }
                match self.listener.try_accept() {
                    Ok(Some(stream)) => {
                        let stream = Arc::new(stream);
                        stop.register(&stream);
                        scope.spawn(move || self.handle(scope, &stream));
                    }
                    Ok(None) => {}
                    // One client too many must not end the migrations of the others.
                    Err(error) => warn!("{error}"),
                }
            }
        })
    }
}

impl Server {
    fn jobs(&self) -> MutexGuard<'_, HashMap<String, Arc<Job>>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn job(&self, id: Id) -> Option<Arc<Job>> {
        self.jobs().values().find(|job| job.id == id).cloned()
    }

    fn handle<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, stream: &Arc<Stream>) {
        let mut bytes = [0; PREAMBLE_LEN];
        let kind = match stream.read_full(&mut bytes) {
            Ok(PREAMBLE_LEN) => parse_preamble(&bytes),
            _ => None,
        };
        match kind {
            Some((Kind::Control, id)) => self.converse(scope, id, stream),
            Some((Kind::Data, id)) => match self.job(id) {
                Some(job) => job.handover.push(stream.clone()),
                None => warn!("a data connection for the unknown migration {id}"),
            },
            None => debug!("a connection that is not from a vamoose migrate"),
        }
    }

    /// Answers the requests of one control connection.
    fn converse<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        id: Id,
        stream: &Arc<Stream>,
    ) {
        let mut control = Control::new(stream.clone());
        loop {
            let answer = match control.next_request() {
                Ok(Some(Request::Prepare(prepare))) => match self.prepare(id, &prepare) {
                    Ok((answer, receiver)) => {
                        scope.spawn(receiver);
                        answer
                    }
                    Err(error) => {
                        warn!("{}: refused: {error}", prepare.name);
                        Answer::Refused {
                            reason: error.to_string(),
                        }
                    }
                },
                Ok(Some(Request::Commit(commit))) => self.commit(id, &commit),
                Ok(Some(Request::Abort)) => self.abort(id),
                Ok(None) | Err(_) => break,
            };
            if control.send(&answer).is_err() {
                break;
            }
        }
        // Without its `migrate` a migration that is still coming in cannot be committed; one that
        // has been loaded waits: `migrate` may ask again over a new connection.
        if let Some(job) = self.job(id) {
            job.hangup.hang_up();
        }
    }

    /// Makes a QEMU ready; returns the answer and the thread that has to be run then.
    fn prepare(
        &self,
        id: Id,
        prepare: &Prepare,
    ) -> Result<(Answer, impl FnOnce() + Send + use<>), PrepareError> {
        if prepare.protocol != PROTOCOL {
            return Err(PrepareError::Protocol {
                theirs: prepare.protocol,
            });
        }
        let method = prepare.method.as_str();
        let mut known = Method::ALL.iter().map(|method| method.name());
        if !["", Settings::auto().name()].contains(&method) && known.all(|known| known != method) {
            return Err(PrepareError::Method {
                theirs: method.to_owned(),
            });
        }
        let mut config = Config::new(self.engines.clone());
        config.layout = Layout::new(prepare.page_size)?;
        config.incoming_channels = Some(prepare.channels.into());
        config.stall_timeout = self.stall_timeout;
        let monitor = self.monitor(&prepare.name)?;
        let job = self.take_name(id, prepare)?;
        let incoming = monitor.with_extension("incoming");
        let prepared = Qemu::connect(&monitor)
            .map_err(PrepareError::from)
            .and_then(|mut qemu| {
                check(&mut qemu, prepare)?;
                set_up(&mut qemu, prepare.channels, &incoming)?;
                Ok(qemu)
            });
        let qemu = prepared.inspect_err(|_| {
            self.jobs().retain(|_, other| !Arc::ptr_eq(other, &job));
        })?;
        info!("{}: ready for a migration ({id})", prepare.name);
        let answer = Answer::Prepared {
            qemu: qemu.version().to_string(),
            knows_zero_pages: qemu.knows_zero_pages(),
        };
        *job.qemu() = Some(qemu);
        let dialer = Dialer::new(Address::Unix(incoming));
        Ok((answer, move || job.receive(&dialer, &config)))
    }

    /// Reserves a QEMU's name for one migration, before anything slow is done with the QEMU.
    fn take_name(&self, id: Id, prepare: &Prepare) -> Result<Arc<Job>, PrepareError> {
        let job = Arc::new(Job {
            id,
            name: prepare.name.clone(),
            uuid: prepare.uuid.clone(),
            hangup: Hangup::new()?,
            handover: Handover::new()?,
            qemu: Mutex::new(None),
            phase: Mutex::new(Phase::Receiving),
            changed: Condvar::new(),
        });
        let mut jobs = self.jobs();
        if jobs.get(&prepare.name).is_some_and(|job| !job.is_over()) {
            return Err(PrepareError::Busy {
                name: prepare.name.clone(),
            });
        }
        jobs.insert(prepare.name.clone(), job.clone());
        Ok(job)
    }

    /// The monitor of the QEMU called `name`; the name is a peer's word and must stay in its folder.
    fn monitor(&self, name: &str) -> Result<PathBuf, PrepareError> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if name.is_empty() || name.starts_with('.') || !name.chars().all(is_plain) {
            return Err(PrepareError::Name {
                name: name.to_owned(),
            });
        }
        Ok(self.qmp_dir.join(format!("{name}.qmp")))
    }

    fn commit(&self, id: Id, commit: &Commit) -> Answer {
        // A `migrate` that was started again to finish this has another id.
        let job = self
            .job(id)
            .or_else(|| self.jobs().get(&commit.name).cloned());
        let answer = match job {
            Some(job) => job.commit(commit),
            None => self.commit_unknown(commit),
        };
        match &answer {
            Answer::Running { state } => info!("{}: committed, {state}", commit.name),
            other => warn!("{}: not committed: {other:?}", commit.name),
        }
        answer
    }

    /// A migration that this server does not remember, because it was started anew or `migrate`
    /// was. What is known is in the QEMU.
    fn commit_unknown(&self, commit: &Commit) -> Answer {
        match self.find_loaded(commit) {
            Ok(mut qemu) => {
                make_run(&mut qemu, commit.resume).unwrap_or_else(|error| Answer::Refused {
                    reason: error.to_string(),
                })
            }
            Err(error) => Answer::Unknown {
                reason: format!("this server has not seen the migration, and: {error}"),
            },
        }
    }

    fn find_loaded(&self, commit: &Commit) -> Result<Qemu, PrepareError> {
        let mut qemu = Qemu::connect(&self.monitor(&commit.name)?)?;
        let uuid = qemu.uuid()?;
        if uuid != commit.uuid {
            return Err(PrepareError::Uuid {
                source_uuid: commit.uuid.clone(),
                here: uuid,
            });
        }
        if qemu.query_migrate()?["status"] != "completed" {
            return Err(QemuError::State {
                state: qemu.state()?,
                expected: "a guest that came by migration",
            }
            .into());
        }
        Ok(qemu)
    }

    fn abort(&self, id: Id) -> Answer {
        match self.job(id) {
            Some(job) => job.abort(),
            None => Answer::Aborted { cause: None },
        }
    }
}

/// A migration that will not be taken, and why.
#[derive(Debug, Error)]
enum PrepareError {
    #[error(
        "this server speaks version {PROTOCOL} of the control protocol, migrate speaks {theirs}"
    )]
    Protocol { theirs: u32 },
    #[error("this server does not know method {theirs}: it is older than the vamoose that asks")]
    Method { theirs: String },
    #[error(transparent)]
    Layout(#[from] multifd::LayoutError),
    #[error("`{name}` is not a name: letters, digits, - _ and . make one")]
    Name { name: String },
    #[error("{name}: another migration to this QEMU is under way")]
    Busy { name: String },
    #[error(transparent)]
    Qemu(#[from] QemuError),
    #[error("the destination's guest has the uuid {here}, the source's {source_uuid}")]
    Uuid { source_uuid: String, here: String },
    #[error("the destination's guest has {here} bytes of RAM, the source's {at_source}")]
    Ram { at_source: u64, here: u64 },
    #[error("the system refused: {0}")]
    System(#[from] io::Error),
}

/// Refuses a QEMU that cannot take this guest. Nothing has been touched yet.
fn check(qemu: &mut Qemu, prepare: &Prepare) -> Result<(), PrepareError> {
    qemu.check(&["multifd", "return-path"])?;
    let state = qemu.state()?;
    let status = qemu.query_migrate()?["status"].as_str().map(str::to_owned);
    if state != "inmigrate" || status.is_some_and(|status| status != "none") {
        return Err(QemuError::State {
            state,
            expected: "inmigrate, with no migration begun (start it with -incoming defer)",
        }
        .into());
    }
    let uuid = qemu.uuid()?;
    if uuid != prepare.uuid {
        return Err(PrepareError::Uuid {
            source_uuid: prepare.uuid.clone(),
            here: uuid,
        });
    }
    let here = qemu.ram_bytes()?;
    if here != prepare.ram_bytes {
        return Err(PrepareError::Ram {
            at_source: prepare.ram_bytes,
            here,
        });
    }
    Ok(())
}

/// Makes the QEMU listen for its relay at `incoming`, and not start by itself.
fn set_up(qemu: &mut Qemu, channels: u8, incoming: &Path) -> Result<(), QemuError> {
    let parameters = json!({ "multifd-channels": channels, "multifd-compression": "none" });
    // late-block-activate: the disks stay the source's until the commit.
    let optional = ["late-block-activate", "events"];
    qemu.set_up(&["multifd", "return-path"], &optional, parameters)?;
    // In this state `stop` means: do not start when everything is loaded, as -S does.
    let listening = qemu.execute("stop", json!({})).and_then(|()| {
        let uri = format!("unix:{}", incoming.display());
        qemu.execute("migrate-incoming", json!({ "uri": uri }))
    });
    if listening.is_err() {
        qemu.put_back();
    }
    listening
}

/// One migration that comes in.
struct Job {
    id: Id,
    name: String,
    uuid: String,
    hangup: Hangup,
    handover: Handover,
    /// Let go when nothing is left to do with it: a monitor serves one client.
    qemu: Mutex<Option<Qemu>>,
    phase: Mutex<Phase>,
    changed: Condvar,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    /// Pages are coming in, or nothing yet.
    Receiving,
    /// The QEMU has said on the return path that it has everything.
    Loaded,
    /// It was told to go on; from here on it may have run.
    Committed,
    /// It is gone and has never run.
    Gone { cause: String },
}

impl Job {
    /// Runs the relay to the waiting QEMU, to its end.
    fn receive(&self, dialer: &Dialer, config: &Config) {
        let result = Relay {
            accept: &self.handover,
            dialer,
            config,
            hangup: &self.hangup,
            stats: &Arc::new(Stats::default()),
            on_loaded: &|| self.loaded(),
        }
        .run();
        match result {
            Ok(summary) if summary.outcome == Outcome::Loaded => {}
            Ok(_) => self.give_up("the source has no return path"),
            Err(RelayError::Cancelled) => self.give_up("the migration was cancelled"),
            Err(error) => self.give_up(&error.to_string()),
        }
    }

    fn loaded(&self) {
        let mut phase = self.phase();
        if *phase == Phase::Receiving {
            info!("{}: loaded, waiting for the commit", self.name);
            *phase = Phase::Loaded;
            self.changed.notify_all();
        }
    }

    /// Ends the migration, unless it has been decided already.
    fn give_up(&self, cause: &str) {
        let mut phase = self.phase();
        if matches!(*phase, Phase::Receiving | Phase::Loaded) {
            self.end(&mut phase, cause);
        }
    }

    /// Ends a QEMU that holds half a guest, or one that nobody wants.
    fn end(&self, phase: &mut Phase, cause: &str) {
        let mut cause = cause.to_owned();
        if let Some(mut qemu) = self.qemu().take()
            && let Err(problem) = qemu.end()
        {
            let _ = write!(cause, "; its QEMU could not be ended: {problem}");
        }
        warn!("{}: migration failed: {cause}", self.name);
        *phase = Phase::Gone { cause };
        self.changed.notify_all();
    }

    fn commit(&self, commit: &Commit) -> Answer {
        if commit.uuid != self.uuid {
            return Answer::Refused {
                reason: format!("{} holds a guest with another uuid", self.name),
            };
        }
        // The source may know that the guest is loaded before our own relay has told us. The lock
        // is held to the end, so that nothing can abort what is being committed.
        let (mut phase, _) = self
            .changed
            .wait_timeout_while(self.phase(), LOADING, |phase| *phase == Phase::Receiving)
            .unwrap_or_else(PoisonError::into_inner);
        match &*phase {
            Phase::Receiving => Answer::Refused {
                reason: "the guest has not been loaded yet".to_owned(),
            },
            Phase::Gone { cause } => Answer::Aborted {
                cause: Some(cause.clone()),
            },
            Phase::Loaded | Phase::Committed => self.commit_loaded(&mut phase, commit.resume),
        }
    }

    fn commit_loaded(&self, phase: &mut Phase, resume: bool) -> Answer {
        let Some(mut qemu) = self.qemu().take() else {
            // The answer got lost on its way.
            return Answer::Running {
                state: "committed before".to_owned(),
            };
        };
        let made = wait_until_loaded(&mut qemu).and_then(|()| {
            *phase = Phase::Committed;
            make_run(&mut qemu, resume)
        });
        match made {
            Ok(answer) => {
                qemu.put_back();
                answer
            }
            // Told to go on, and neither refused nor seen running.
            Err(error) if *phase == Phase::Committed && !error.is_refusal() => Answer::Unknown {
                reason: format!("the guest was told to go on, then: {error}"),
            },
            Err(error) => {
                *self.qemu() = Some(qemu);
                let cause = format!("it failed when everything had been sent: {error}");
                self.end(phase, &cause);
                Answer::Aborted { cause: Some(cause) }
            }
        }
    }

    fn abort(&self) -> Answer {
        self.hangup.hang_up();
        self.give_up("the migration was aborted");
        match &*self.phase() {
            Phase::Gone { cause } => Answer::Aborted {
                cause: Some(cause.clone()),
            },
            _ => Answer::Refused {
                reason: "the guest has been committed and may be running here".to_owned(),
            },
        }
    }

    fn is_over(&self) -> bool {
        // Locked means that something is being done with it.
        let phase = self.phase.try_lock();
        phase.is_ok_and(|phase| matches!(*phase, Phase::Committed | Phase::Gone { .. }))
    }

    fn phase(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn qemu(&self) -> MutexGuard<'_, Option<Qemu>> {
        self.qemu.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How long a QEMU may take to get from its word that it has everything to a guest that can run.
const LOADING: Duration = Duration::from_secs(30);
/// How often a QEMU is asked while no event comes.
const ASKING: Duration = Duration::from_millis(20);

fn wait_until_loaded(qemu: &mut Qemu) -> Result<(), QemuError> {
    let deadline = Instant::now() + LOADING;
    loop {
        let state = qemu.state()?;
        if state != "inmigrate" {
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(QemuError::State {
                state,
                expected: "a loaded guest",
            });
        }
        // Any event is a reason to look again.
        qemu.next_event(ASKING)?;
    }
}

/// Continues a loaded guest if it shall run.
fn make_run(qemu: &mut Qemu, resume: bool) -> Result<Answer, QemuError> {
    let state = qemu.state()?;
    if state == "inmigrate" {
        return Err(QemuError::State {
            state,
            expected: "a loaded guest",
        });
    }
    if resume && state != "running" {
        qemu.execute("cont", json!({}))?;
    }
    let state = qemu.state()?;
    if resume && state != "running" {
        return Err(QemuError::State {
            state,
            expected: "running",
        });
    }
    Ok(Answer::Running { state })
}
