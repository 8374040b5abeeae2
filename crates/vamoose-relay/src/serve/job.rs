//! One attempt to migrate a guest to this host, which carries out the decisions of crate `handover`.
//!
//! One lock is held during everything that concerns the guest: a commit in progress cannot be aborted.

use std::{
    io,
    sync::{Arc, Condvar, Mutex, PoisonError, Weak},
    thread,
    time::{Duration, Instant},
};

use handover::{
    AttemptId, ConnectionKind, Destination, DestinationDriver, DestinationEvent, DestinationHost,
    DestinationMessage, DestinationState, SourceMessage,
};
use tracing::{Span, debug, info, warn};
use vamoose_link::{Address, Hangup, PollQueue, Session, Stats, Stream, left, lock, send_message};

use super::{
    qemu::{DestinationQemu, FAIL_WITHIN, LOAD_WITHIN},
    setup::PrepareError,
    storage::Exports,
};
use crate::{
    Config, Dialer, EndKind, Milestone, Observer, Outcome, Relay, RelayError, Role, UnderWay,
    chain,
    journal::{AtDestination, Entry},
    main_stream::KEEP_TRYING,
    observer::Observation,
    qemu::EXIT_WITHIN,
};

/// How long a QEMU may take to load the last pages of post-copy, when its source has hung up.
const LOAD_REST_WITHIN: Duration = Duration::from_secs(2);
/// How soon to ask a QEMU again that did not tell whether it has the guest.
const LOOK_AGAIN: Duration = Duration::from_secs(5);
/// How often to ask a QEMU that may be past the switch to post-copy.
const ASK_IF_SWITCHED_EVERY: Duration = Duration::from_millis(5);

/// An attempt at the destination: its state machine, its QEMU, and its relay while memory is received.
pub(crate) struct Job {
    pub(super) attempt: AttemptId,
    pub(super) name: String,
    inner: Mutex<Inner>,
    changed: Condvar,
    /// `None` once the memory has been transferred.
    transfer: Mutex<Option<Arc<Transfer>>>,
}

/// The relay of an attempt and its connections.
pub(crate) struct Transfer {
    hangup: Hangup,
    connections: PollQueue<Arc<Stream>>,
    /// The session of all connections.
    session: Session,
    began: Instant,
    stats: Arc<Stats>,
    dialer: Dialer,
    pub(super) config: Config,
    /// The disks that are copied.
    pub(super) exports: Option<Exports>,
    observer: Arc<dyn Observer>,
    /// Whether the relay resumes a post-copy.
    pub(super) resumes: bool,
}

struct Inner {
    driver: DestinationDriver,
    host: Host,
    /// When the source's last connection was lost.
    silent_since: Option<Instant>,
    /// The source QEMU may have switched to post-copy: the loss of a connection does not end the attempt.
    may_be_switched: bool,
}

/// Carries out the driver's actions.
struct Host {
    entry: Entry<AtDestination>,
    qemu: DestinationQemu,
    controls: Vec<Weak<Stream>>,
    /// When its QEMU was looked at.
    looked: Instant,
    /// The last write of the journal failed.
    unwritten: bool,
}

impl Transfer {
    pub(super) fn new(
        session: Session,
        dialer: Dialer,
        config: Config,
        observer: Arc<dyn Observer>,
    ) -> io::Result<Self> {
        Ok(Self {
            hangup: Hangup::new()?,
            connections: PollQueue::new()?,
            session,
            began: Instant::now(),
            stats: Arc::default(),
            dialer,
            config,
            exports: None,
            observer,
            resumes: false,
        })
    }
}

impl Job {
    pub(super) fn new(
        machine: Destination,
        entry: Entry<AtDestination>,
        qemu: DestinationQemu,
        transfer: Option<Transfer>,
    ) -> Self {
        Self {
            attempt: entry.record.attempt,
            name: entry.record.name.clone(),
            inner: Mutex::new(Inner {
                driver: DestinationDriver::new(machine),
                host: Host {
                    entry,
                    qemu,
                    controls: Vec::new(),
                    looked: Instant::now(),
                    unwritten: false,
                },
                silent_since: Some(Instant::now()),
                may_be_switched: false,
            }),
            changed: Condvar::new(),
            transfer: Mutex::new(transfer.map(Arc::new)),
        }
    }

    /// An attempt from the journal.
    pub(crate) fn restore(entry: Entry<AtDestination>) -> Self {
        let record = &entry.record;
        let machine = Destination::restore(record.side.incarnation, record.state.clone());
        let qemu = DestinationQemu::new(record.qemu.clone(), None);
        Self::new(machine, entry, qemu, None)
    }

    /// Continues an attempt from the journal.
    pub(super) fn go_on(&self) {
        lock(&self.inner).drive(DestinationDriver::go_on);
        self.changed.notify_all();
    }

    /// Whether the guest is here, and may lack memory that is at the source.
    pub(super) fn is_under_post_copy(&self) -> bool {
        let inner = lock(&self.inner);
        let is_here = !matches!(
            inner.driver.state(),
            DestinationState::Receiving
                | DestinationState::Aborting { .. }
                | DestinationState::Aborted { .. }
                | DestinationState::Ended { .. }
        );
        inner.host.entry.record.side.post_copy && is_here
    }

    /// Ends the relay, and its connections with it.
    pub(super) fn end_relay(&self) {
        self.hang_up();
        let ended = Instant::now() + EXIT_WITHIN;
        while self.transfer().is_some() && Instant::now() < ended {
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Makes the QEMU wait for its source at `incoming`, and `transfer` the relay to it, unless all memory has come: then it returns
    /// true.
    pub(super) fn recover(
        &self,
        transfer: Transfer,
        incoming: &Address,
    ) -> Result<bool, PrepareError> {
        let Host { entry, qemu, .. } = &mut lock(&self.inner).host;
        let complete = qemu.recover(incoming, entry.record.side.kept_monitor)?;
        *lock(&self.transfer) = (!complete).then(|| Arc::new(transfer));
        Ok(complete)
    }

    /// Runs the relay to the waiting QEMU until it ends.
    pub(super) fn receive(&self) {
        let Some(transfer) = self.transfer() else {
            return;
        };
        let (stats, session) = (transfer.stats.clone(), &transfer.session);
        let (peer, observer) = (session.identity().unwrap_or_default(), &transfer.observer);
        let observation =
            Observation::begin(observer, Role::Destination, peer, transfer.began, stats);
        let relay = Relay {
            accept: &transfer.connections,
            dialer: &transfer.dialer,
            config: &transfer.config,
            hangup: &transfer.hangup,
            stats: &transfer.stats,
            reached: &|milestone| match milestone {
                Milestone::Last => lock(&self.inner).may_be_complete(),
                Milestone::Loaded => self.handle(DestinationEvent::Loaded),
            },
        };
        let span = Span::current();
        let result = thread::scope(|scope| {
            if let Some(exports) = &transfer.exports {
                let disks = exports.relay(&relay);
                scope.spawn(move || span.in_scope(|| disks.pass_bytes()));
            }
            let result = match transfer.resumes {
                true => relay.resume_post_copy(),
                false => relay.relay(),
            };
            transfer.hangup.hang_up();
            result
        });
        let switchover = result.as_ref().ok().and_then(|summary| summary.switchover);
        observation.end(EndKind::of(&result), switchover, session.faults());
        let cause = match result {
            Ok(summary) if transfer.resumes || summary.outcome == Outcome::Loaded => None,
            Ok(_) => Some("the source has no return path".to_owned()),
            Err(RelayError::Cancelled) => Some("the migration was cancelled".to_owned()),
            Err(error) => {
                let mut cause = chain(&error);
                if error.is_of_destination() {
                    lock(&self.inner).explain(&mut cause, FAIL_WITHIN);
                }
                Some(cause)
            }
        };
        match cause {
            Some(cause) => {
                self.fail(cause);
                // The source may have hung up because it has sent everything.
                let until = Instant::now() + LOAD_REST_WITHIN;
                while !lock(&self.inner).host.qemu.has_all_memory() && Instant::now() < until {
                    thread::sleep(Duration::from_millis(20));
                }
            }
            None => {
                lock(&self.transfer).take();
                lock(&self.inner).host.qemu.all_has_come();
            }
        }
    }

    /// Reports that the transfer of the memory has failed. A guest that is loaded already is not affected.
    pub(super) fn fail(&self, cause: String) {
        lock(&self.transfer).take();
        let mut inner = lock(&self.inner);
        if *inner.driver.state() == DestinationState::Receiving {
            inner.handle(DestinationEvent::Failed { cause });
        }
        self.changed.notify_all();
    }

    /// Whether its transfer has ended, its QEMU did not tell whether everything had been loaded, and is to be asked again.
    pub(super) fn is_to_be_looked_at(&self) -> bool {
        // The lock is held while an event is handled.
        let inner = self.inner.try_lock();
        inner.is_ok_and(|it| it.driver.is_cut() && it.host.looked.elapsed() >= LOOK_AGAIN)
    }

    /// Adds a data connection, if it belongs to the source's session.
    pub(super) fn push(&self, kind: ConnectionKind, stream: Arc<Stream>, session: &Session) {
        match self.transfer() {
            Some(transfer) if transfer.session.is(session) => match (kind, &transfer.exports) {
                (ConnectionKind::Disk, Some(exports)) => exports.streams.push(stream),
                (ConnectionKind::Disk, None) => warn!("{}: a disk is not expected", self.name),
                _ => transfer.connections.push(stream),
            },
            Some(_) => warn!("{}: a data connection of another session", self.name),
            None => warn!("{}: a data connection after the end", self.name),
        }
    }

    /// Whether the peer of `session` may decide about the guest: an authenticated peer has to be the source that began the attempt.
    /// Processes of this host, and peers of insecure sessions, have no identity and are not checked.
    pub(super) fn listens_to(&self, session: &Session) -> bool {
        let inner = lock(&self.inner);
        let source = inner.host.entry.record.side.source.as_deref();
        match (source, session.identity()) {
            (Some(source), Some(peer)) => source == peer,
            _ => true,
        }
    }

    pub(super) fn connected(&self, control: &Arc<Stream>) {
        let mut inner = lock(&self.inner);
        inner.host.controls.push(Arc::downgrade(control));
        inner.source_is_back();
    }

    pub(super) fn disconnected(&self, control: &Arc<Stream>) {
        let mut inner = lock(&self.inner);
        let this = Arc::downgrade(control);
        inner.host.controls.retain(|other| !other.ptr_eq(&this));
        if !inner.host.controls.is_empty() {
            return;
        }
        inner.silent_since = Some(Instant::now());
        // Without `migrate`, a guest that is still being received cannot be committed. A loaded guest can be, over a new
        // connection.
        if *inner.driver.state() == DestinationState::Receiving && !inner.may_be_switched {
            drop(inner);
            self.hang_up();
        }
    }

    /// Handles a request of the source. The answer goes to all its control connections.
    pub(crate) fn request(&self, mut message: SourceMessage) {
        let is_commit = matches!(message, SourceMessage::Commit { .. });
        if let SourceMessage::Abort { cause } = &mut message {
            // The source may notice first that QEMU has failed.
            lock(&self.inner).explain(cause, Duration::ZERO);
            self.hang_up();
        }
        if is_commit {
            lock(&self.inner).notice_end_after_start();
        }
        if let (SourceMessage::Switching, Some(transfer)) = (&message, self.transfer()) {
            transfer.session.keep_trying(KEEP_TRYING);
            let mut inner = lock(&self.inner);
            inner.may_be_switched = true;
            inner.host.send(&DestinationMessage::Receiving);
        }
        self.handle(DestinationEvent::Message(message));
        if !is_commit {
            return;
        }
        // The source may know that the guest is loaded before the relay here reports it.
        let mut inner = lock(&self.inner);
        let look = match inner.host.entry.record.side.post_copy {
            true => ASK_IF_SWITCHED_EVERY,
            false => LOAD_WITHIN,
        };
        let deadline = Instant::now() + LOAD_WITHIN;
        while *inner.driver.state() == DestinationState::Receiving && Instant::now() < deadline {
            if inner.host.has_switched() {
                inner.handle(DestinationEvent::Switched);
            } else {
                let changed = self.changed.wait_timeout(inner, look.min(left(deadline)));
                (inner, _) = changed.unwrap_or_else(PoisonError::into_inner);
            }
        }
        inner.handle(DestinationEvent::StillReceiving);
    }

    /// Whether memory is being received or the source has a connection, which it closes after the last answer.
    pub(super) fn is_under_way(&self) -> bool {
        // The lock is held while an event is handled.
        let Ok(inner) = self.inner.try_lock() else {
            return true;
        };
        !inner.host.controls.is_empty() || self.transfer().is_some()
    }

    /// Whether the guest's memory comes by post-copy at present.
    pub(super) fn is_fetching(&self) -> bool {
        let transfer = self.transfer();
        transfer.is_some_and(|transfer| transfer.stats.is_under_post_copy())
    }

    /// Progress of the memory, while it is being received.
    pub(super) fn under_way(&self) -> Option<UnderWay> {
        let transfer = self.transfer()?;
        let (peer, moved) = (transfer.session.peer(), transfer.stats.snapshot());
        let role = Role::Destination;
        Some(UnderWay {
            name: Some(self.name.clone()),
            ..UnderWay::new("serve", role, peer.to_owned(), transfer.began, &moved)
        })
    }

    /// Ends the connections: nothing more is received.
    pub(super) fn hang_up(&self) {
        if let Some(transfer) = self.transfer() {
            transfer.hangup.hang_up();
        }
    }

    /// Whether this is a loaded guest whose source has been silent for `timeout`, which is logged once. The guest is neither ended nor
    /// run: the source may come back.
    pub(super) fn is_orphan(&self, timeout: Duration) -> bool {
        // The lock is held while an event is handled.
        let Ok(mut inner) = self.inner.try_lock() else {
            return false;
        };
        let silent = inner.silent_since.map(|since| since.elapsed());
        let loaded = matches!(inner.driver.state(), DestinationState::Loaded { .. });
        if !loaded || inner.host.entry.record.side.orphaned {
            return loaded;
        }
        if silent.is_none_or(|silent| silent < timeout) {
            return false;
        }
        inner.host.entry.record.side.orphaned = true;
        inner.write();
        warn!(
            "{}: loaded, and its source has been silent for {} s: attempt {} is an orphan, to be finished by the \
             source or settled by hand",
            self.name,
            timeout.as_secs(),
            self.attempt
        );
        true
    }

    /// Whether the path of its QEMU is free for another attempt: this attempt is over, or its QEMU is gone.
    pub(super) fn leaves_qemu_free(&self) -> bool {
        // The lock is held while an event is handled.
        let Ok(mut inner) = self.inner.try_lock() else {
            return false;
        };
        inner.notice_end();
        inner.driver.is_over() || inner.host.qemu.is_gone()
    }

    /// Whether the attempt is over and the journal is up to date. A write that failed before is tried again.
    pub(super) fn is_in_journal(&self) -> bool {
        let Ok(mut inner) = self.inner.try_lock() else {
            return false;
        };
        let Inner { driver, host, .. } = &mut *inner;
        if host.unwritten && driver.is_over() {
            // Reported when it failed first.
            let _ = host.write(driver);
        }
        driver.is_over() && !host.unwritten
    }

    /// How far the attempt has come.
    pub(crate) fn state(&self) -> DestinationState {
        lock(&self.inner).driver.state().clone()
    }

    fn handle(&self, event: DestinationEvent) {
        lock(&self.inner).handle(event);
        self.changed.notify_all();
    }

    fn transfer(&self) -> Option<Arc<Transfer>> {
        lock(&self.transfer).clone()
    }
}

impl Inner {
    fn handle(&mut self, event: DestinationEvent) {
        self.drive(|driver| driver.handle(event));
    }

    /// Changes the driver, carries out its actions and logs a new state.
    fn drive(&mut self, change: impl FnOnce(&mut DestinationDriver)) {
        let before = self.driver.state().clone();
        change(&mut self.driver);
        self.driver.drive(&mut self.host);
        self.host.qemu.tidy_up();
        self.report(&before);
    }

    /// What the relay passes on next may complete the guest. The journal says so first.
    fn may_be_complete(&mut self) {
        self.host.entry.record.side.incomplete = false;
        self.write();
    }

    /// Ends the attempt if its QEMU has provably ended.
    fn notice_end(&mut self) {
        if !self.driver.is_over() && self.host.qemu.has_ended() {
            let cause = "its QEMU has ended".to_owned();
            self.handle(DestinationEvent::Died { cause });
        }
    }

    /// Replaces the cause of a failure by QEMU's own, if it fails `within` this time.
    fn explain(&mut self, cause: &mut String, within: Duration) {
        if *self.driver.state() == DestinationState::Receiving
            && let Some(words) = self.host.qemu.failure_cause(within)
        {
            *cause = words;
        }
    }

    /// After a restart of the server, an exited QEMU cannot tell whether it continued the guest.
    fn notice_end_after_start(&mut self) {
        if matches!(self.driver.state(), DestinationState::Starting { .. }) {
            self.notice_end();
        }
    }

    fn source_is_back(&mut self) {
        self.silent_since = None;
        if std::mem::take(&mut self.host.entry.record.side.orphaned) {
            self.write();
        }
    }

    /// Writes the journal; a failure has been logged.
    fn write(&mut self) {
        let _ = self.host.persist(&self.driver);
    }

    fn report(&self, before: &DestinationState) {
        let name = &self.host.entry.record.name;
        match self.driver.state() {
            now if now == before => {}
            DestinationState::Loaded { .. } => {
                info!(
                    guest = name,
                    outcome = "loaded",
                    "{name}: loaded, waiting for the commit"
                );
            }
            DestinationState::Running => {
                info!(
                    guest = name,
                    outcome = "running",
                    "{name}: committed, the guest is here"
                );
            }
            DestinationState::Ended { cause } => warn!("{name}: the guest was here: {cause}"),
            DestinationState::Aborting { cause } => {
                warn!("{name}: migration failed, and its QEMU cannot be ended: {cause}");
            }
            DestinationState::Aborted { cause } => {
                warn!(
                    guest = name,
                    outcome = "failed",
                    "{name}: migration failed: {cause}"
                );
            }
            DestinationState::Receiving | DestinationState::Starting { .. } => {}
        }
    }
}

impl DestinationHost for Host {
    fn persist(&mut self, destination: &Destination) -> Result<(), String> {
        self.write(destination)
            .inspect_err(|reason| warn!("{reason}"))
    }

    fn send(&mut self, message: &DestinationMessage) {
        self.controls.retain(|control| control.strong_count() > 0);
        for control in self.controls.iter().filter_map(Weak::upgrade) {
            // If it is lost, the source asks again.
            if let Err(error) = send_message(&control, message) {
                debug!("{}", chain(&error));
            }
        }
    }

    fn look(&mut self) -> Option<DestinationEvent> {
        self.looked = Instant::now();
        if self.entry.record.side.incomplete {
            let cause = "the guest is incomplete".to_owned();
            return Some(DestinationEvent::NotStarted { cause });
        }
        let event = self.qemu.look();
        if event == DestinationEvent::Switched {
            self.keep_monitor();
        }
        Some(event)
    }

    fn run(&mut self, resume: bool) -> Option<DestinationEvent> {
        Some(self.qemu.run(resume))
    }

    fn check(&mut self, was_seen: bool) -> Option<DestinationEvent> {
        Some(self.qemu.check(was_seen))
    }

    fn end(&mut self) -> Option<DestinationEvent> {
        Some(self.qemu.end())
    }

    /// The journal keeps the attempt for commands that come late.
    fn forget(&mut self) {}
}

impl Host {
    /// Whether a guest that is being received is past the switch to post-copy.
    fn has_switched(&mut self) -> bool {
        let switched = self.entry.record.side.post_copy && self.qemu.has_switched();
        if switched {
            self.keep_monitor();
        }
        switched
    }

    /// The journal has it first: a monitor that QEMU keeps and nobody knows of would be lost.
    fn keep_monitor(&mut self) {
        let inode = self.qemu.monitor_inode();
        self.entry.record.side.kept_monitor = inode;
        match (self.entry.write(), inode) {
            (Ok(()), Some(inode)) => self.qemu.keep_monitor(inode),
            (Ok(()), None) => {}
            (Err(error), _) => warn!("{}", chain(&error)),
        }
    }

    fn write(&mut self, destination: &Destination) -> Result<(), String> {
        self.entry.record.state = destination.state().clone();
        let written = self.entry.write();
        self.unwritten = written.is_err();
        written.map_err(|error| chain(&error))
    }
}
