//! The source side: drives one QEMU through a migration to a server on another host.
//!
//! ```text
//!  look      read the source QEMU's state and the journal; finish an unfinished attempt first
//!  inspect   ask the server what its QEMU for this guest is, and compare both; nothing has been changed so far
//!  prepare   from here on, the journal has the attempt
//!  set up    the source QEMU and a relay beside it
//!  watch     until the source reports completed, failed or cancelled
//!  hand over after completed: the source is paused for good; crate `handover` decides what every answer means.
//!            Otherwise the guest resumes here, and the server ends its QEMU.
//! ```

mod earlier;
mod error;
mod hand_over;
mod link;
mod policy;
mod post_copy;
mod predict;
mod preflight;
mod remainder;
mod socket;
mod source;
mod storage;
mod watch;

use std::{
    mem,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, ScopedJoinHandle},
    time::{Duration, Instant},
};

use convergence::{AutoConverge, OnTimeout, Policy};
use handover::{
    AttemptId, ConnectionKind, Decision, DestinationMessage, GuestLocation, Prepare, SourceEvent,
    SourceMessage, SourceState,
};
use serde_json::{Value, json};
use tracing::{Span, error_span};
use vamoose_link::{
    ConversationError, Counters, Hangup, Listener, Opening, Remote, Session, Stats, lock, random_id,
};

use crate::{
    Config, Dialer, DowntimeParts, Journal, Relay, RelayError, Switchover, chain,
    control::{ControlError, PostCopyAbilities, answer, preamble},
    journal::{AtSource, Record, now},
    qemu::Image,
};
use error::at_source;
pub use error::{Cause, Failure};
use hand_over::{Attempt, HandOver};
pub use link::LinkSpeed;
pub use predict::{Forecast, Inputs, Prediction, Remedies, Writes};
use preflight::Inspected;
use socket::{Route, listen_beside};
pub(crate) use source::{SourceQemu, capabilities};
pub use storage::{CopiedDisks, Storage};
use storage::{Copies, clean_up};
use watch::SourceRelay;

/// One migration to be driven.
pub struct Migration<'a> {
    /// The source QEMU's monitor.
    pub qmp: &'a Path,
    /// The destination's server.
    pub to: &'a Remote,
    /// What the user calls the destination's host.
    pub host: &'a str,
    /// How long the server may be unreachable at first, and the source's monitor be held by another client.
    pub connect_timeout: Duration,
    /// Where attempts are remembered: see [`Journal`].
    pub state_dir: &'a Path,
    /// The waiting QEMU's name at the server.
    pub name: &'a str,
    /// Number of multifd channels, from QEMU to QEMU.
    pub channels: u8,
    /// What the relay does with the pages.
    pub config: Config,
    /// Longest downtime to accept; QEMU's own setting if `None`.
    pub downtime_limit: Option<Duration>,
    /// Longest pause of the guest before the hand-over. After that the guest resumes here.
    pub downtime_max: Duration,
    /// What to do about a guest that has not been paused after this time.
    pub timeout: Option<(Duration, OnTimeout)>,
    /// Switches to post-copy at this time, if the guest has not been paused by then; after the first round if that is zero.
    pub post_copy: Option<Duration>,
    /// Whether and how far QEMU's auto-converge slows the guest down; with [`OnTimeout::Throttle`] only from then on.
    pub auto_converge: Option<AutoConverge>,
    /// Bytes per second that each CPU of the guest may write, by QEMU's dirty-limit, which needs KVM with a dirty ring.
    pub dirty_limit: Option<u64>,
    /// The disks to copy, if any.
    pub storage: Option<&'a Storage>,
    /// How the source finds zero pages (`none`, `legacy`, `multifd`); the best that both QEMUs know
    /// if `None`.
    pub zero_page_detection: Option<&'a str>,
    /// An attempt for which a person vouches that the source QEMU sent its guest for this attempt, and not for another tool.
    pub confirm: Option<AttemptId>,
    /// Ends the source's QEMU when the guest has certainly moved.
    pub quit_source: bool,
    /// Set to cancel. After the switch to post-copy it is reset once, and has an effect when it is set again.
    pub cancel: &'a AtomicBool,
}

/// What a migration reports while it runs.
#[derive(Clone, Copy, Debug)]
pub enum News<'a> {
    /// Its progress, several times a second while memory is moved.
    Progress(&'a Progress),
    /// What it may wait for until the next report.
    WaitsFor(&'a str),
}

/// Status of a migration under way.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// QEMU's name for the state: `setup`, `active`, `device`, ...
    pub status: String,
    /// QEMU's answer to `query-migrate`, with `downtime-parts` once the guest runs at the destination.
    pub source: Value,
    /// What the relay has moved.
    pub moved: Counters,
    /// The disks that are copied.
    pub disks: Option<CopiedDisks>,
    /// The session with the server.
    pub session: Option<Session>,
    /// For how long the guest has been paused for the switchover.
    pub stopped_for: Duration,
}

/// A guest that has moved.
#[derive(Clone, Debug, Default)]
pub struct Moved {
    /// The attempt that moved it.
    pub attempt: Option<AttemptId>,
    /// Whether it runs at the destination.
    pub is_running: bool,
    /// QEMU's last answer to `query-migrate`, with `downtime-parts`. Empty if another process drove the migration.
    pub source: Value,
    /// What the relay has moved.
    pub moved: Counters,
    /// The disks that were copied.
    pub disks: Option<CopiedDisks>,
    /// From the source's stop to the server's message that the guest runs, by this host's clock.
    /// `None` when it did not run.
    pub downtime: Option<Duration>,
    /// Parts of the downtime, as far as this process has observed them.
    pub downtime_parts: Option<DowntimeParts>,
    /// From the first command to the server's last message.
    pub total_time: Duration,
}

impl Migration<'_> {
    /// Runs the migration to its end. `observe` hears of it meanwhile.
    ///
    /// # Errors
    /// Why it did not go through, and where the guest is.
    pub fn run(&self, observe: &mut dyn FnMut(News<'_>)) -> Result<Moved, Failure> {
        let start = Instant::now();
        let journal = Journal::open(self.state_dir).map_err(at_source)?;
        journal.clean_up::<AtSource>();
        self.check_idle(&journal)?;
        observe(News::WaitsFor("the source QEMU's monitor"));
        let mut source = match SourceQemu::connect(self.qmp, self.connect_timeout) {
            Ok(source) => source,
            Err(error) => {
                // Another process may have begun meanwhile.
                self.check_idle(&journal)?;
                return self.without_source(&journal, error);
            }
        };
        observe(News::WaitsFor("the end of an earlier attempt"));
        let moved = match self.finish_earlier(&journal, &mut source, observe)? {
            Some(moved) => moved,
            None => {
                let moved = self.begin(&journal, &mut source, start, observe);
                moved.map_err(|failure| source.with_guest_kept(failure))?
            }
        };
        if self.quit_source {
            source.quit();
        }
        Ok(moved)
    }

    /// Begins a new attempt, if both QEMUs fit.
    fn begin(
        &self,
        journal: &Journal,
        source: &mut SourceQemu,
        start: Instant,
        observe: &mut dyn FnMut(News<'_>),
    ) -> Result<Moved, Failure> {
        self.check_source(source).map_err(at_source)?;
        let attempt = AttemptId(random_id().map_err(at_source)?);
        let _span = span(attempt).entered();
        // The copies of disks may take hours, so the streams are opened after them.
        let streams = match self.storage {
            Some(_) => 0,
            None => usize::from(self.channels_of(source).unwrap_or(0)) + 1,
        };
        let address = self.to.address();
        observe(News::WaitsFor(&format!("a connection to {address}")));
        let speed_test = self.needs_speed_test(source).then_some(attempt);
        let all_streams = streams + usize::from(speed_test.is_some());
        let control = self.connect(attempt, all_streams).map_err(at_source)?;
        self.notify_earlier(journal).map_err(at_source)?;
        let inspected = self.inspect(control, source, streams, speed_test);
        let inspected = inspected.map_err(at_source)?;
        self.warn(&inspected);
        self.judge(&inspected).map_err(at_source)?;
        self.attempt(attempt, journal, source, inspected, start, observe)
    }

    fn attempt(
        &self,
        attempt: AttemptId,
        journal: &Journal,
        source: &mut SourceQemu,
        inspected: Inspected,
        start: Instant,
        observe: &mut dyn FnMut(News<'_>),
    ) -> Result<Moved, Failure> {
        // The last attempt of a QEMU counts, so it must sort last even if the clock was set back.
        let known = journal.records::<AtSource>().map_err(at_source)?;
        let last = known.last().map_or(0, |record| record.began);
        let record = Record {
            attempt,
            began: now().max(last + 1),
            name: self.name.to_owned(),
            qemu: source.instance.clone(),
            side: AtSource {
                to: self.to.address(),
                resume: source.is_wanted,
                held: false,
                confirmed: false,
            },
            state: SourceState::Moving { incarnation: None },
        };
        let entry = journal.claim(record).map_err(at_source)?;
        entry.write().map_err(at_source)?;
        let mut attempt = Attempt::new(entry, self.to, self.downtime_max, self.cancel);
        attempt.control = Some(inspected.control);
        let mut hand_over = HandOver::begin(attempt);
        observe(News::WaitsFor("the server to prepare its QEMU"));
        let (decision, ended) = match self.prepare(&mut hand_over, inspected.prepare) {
            Ok(()) => {
                let mut config = self.config.clone();
                config.has_fast_link = inspected.has_fast_link;
                let (streams, images) = (inspected.streams, inspected.images);
                self.move_guest(&mut hand_over, source, config, streams, images, observe)
            }
            Err(cause) => (None, Ended::failed(cause)),
        };
        let decision = decision.unwrap_or_else(|| {
            observe(News::WaitsFor("the server to end the attempt"));
            hand_over.finish(ended.event(), Some(source))
        });
        let session = hand_over.attempt.session();
        let concluded = self.conclude(hand_over, decision, Some(source), ended, start, observe);
        concluded.inspect(|moved| {
            observe(News::Progress(&Progress {
                status: "completed".to_owned(),
                source: moved.source.clone(),
                moved: moved.moved,
                disks: moved.disks,
                session,
                stopped_for: moved.downtime.unwrap_or_default(),
            }));
        })
    }

    /// Lets the server prepare its QEMU.
    fn prepare(&self, hand_over: &mut HandOver<'_>, prepare: Prepare) -> Result<(), Cause> {
        let Some(control) = &mut hand_over.attempt.control else {
            return Err(ControlError::from(ConversationError::Closed).into());
        };
        let sent = control.send(&SourceMessage::Prepare(prepare));
        let answered = sent.and_then(|()| answer(control, PREPARED_WITHIN));
        match answered.map_err(ControlError::from)? {
            answer @ DestinationMessage::Prepared { .. } => hand_over.prepared(answer),
            DestinationMessage::Refused { reason } => Err(Cause::Refused(reason)),
            other => Err(Cause::unexpected(&other)),
        }
    }

    /// Sets the source up, copies its disks and lets it migrate. If the migration completes, also hands the guest over.
    fn move_guest(
        &self,
        hand_over: &mut HandOver<'_>,
        source: &mut SourceQemu,
        mut config: Config,
        data: Vec<Opening>,
        images: Vec<Image>,
        observe: &mut dyn FnMut(News<'_>),
    ) -> (Option<Decision>, Ended) {
        let mut copies = Copies::new(images);
        let ready = self.set_up(source, &copies);
        let (listener, hangup) = match ready {
            Ok(ready) => ready,
            Err(cause) => return (None, Ended::failed(cause)),
        };
        let Some(session) = hand_over.attempt.session() else {
            let closed = ControlError::from(ConversationError::Closed);
            return (None, Ended::failed(closed.into()));
        };
        let preamble = preamble(ConnectionKind::Data, hand_over.attempt.id());
        let begun = session.clone();
        let data = Mutex::new(data);
        let begin = move |_| Ok((begun.clone(), mem::take(&mut *lock(&data))));
        let dialer = Dialer::session(begin, &preamble);
        config.incoming_channels = self.channels_of(source).map(usize::from);
        config.outgoing_channels = config.incoming_channels;
        let stats = Arc::new(Stats::default());
        let relay = Relay {
            accept: &listener,
            dialer: &dialer,
            config: &config,
            hangup: &hangup,
            stats: &stats,
            reached: &|_| (),
        };
        let route = match self.route(&copies, &session, hand_over.attempt.id()) {
            Ok(route) => route,
            Err(cause) => return (None, Ended::failed(cause)),
        };
        let disks_stats = copies.stats.clone();
        let relay_has_ended = Arc::<AtomicBool>::default();
        hand_over.attempt.relay_has_ended = Some(relay_has_ended.clone());
        let span = Span::current();
        thread::scope(|scope| {
            let disks = route.as_ref().map(|route| {
                let relay = route.relay(&config, &hangup, &disks_stats);
                let span = span.clone();
                scope.spawn(move || span.in_scope(|| relay.pass_bytes()))
            });
            let copied = route.as_ref().map_or(Ok(()), |route| {
                self.copy_disks(hand_over, source, &mut copies, (route, &session), observe)
            });
            let relay = copied.is_ok().then(|| {
                scope.spawn(|| {
                    let relayed = span.in_scope(|| relay.relay());
                    relay_has_ended.store(true, Ordering::Release);
                    relayed
                })
            });
            let source_relay = SourceRelay {
                address: listener.address(),
                stats: &stats,
                session: &session,
                hangup: &hangup,
                has_ended: &|| relay.as_ref().is_none_or(ScopedJoinHandle::is_finished),
            };
            let moved = copied
                .and_then(|()| self.watch(hand_over, source, &source_relay, &mut copies, observe));
            let (decision, mut ended) = match moved {
                // The guest is paused, so the commit comes first, even before the end of the relay.
                Ok(info) => {
                    observe(News::WaitsFor("the server to continue the guest"));
                    let decision = hand_over.finish(SourceEvent::Stopped, Some(source));
                    let mut ended = Ended {
                        info,
                        ..Ended::default()
                    };
                    if hand_over.is_supplying() {
                        let supplied = self.supply(source, &source_relay, &mut ended, observe);
                        ended.cause = supplied.err();
                    }
                    (Some(decision), ended)
                }
                Err(cause) if source.has_ended_by(&cause) => {
                    let last = source.last_seen();
                    let decision = hand_over.finish(SourceEvent::GuestDied { last }, None);
                    (Some(decision), Ended::failed(Cause::SourceEnded))
                }
                // The journal says that it may have switched, and the next run finds out.
                Err(cause) if source.may_have_switched() => {
                    let mut decision = hand_over.drive(None);
                    if decision.guest == GuestLocation::Source {
                        decision.guest = GuestLocation::Unconfirmed;
                    }
                    (Some(decision), Ended::failed(cause))
                }
                Err(cause) => (None, Ended::failed(cause)),
            };
            // A QEMU past the switch ends no connection by itself.
            if ended.cause.is_some() || source.may_be_switched {
                hangup.hang_up();
            }
            ended.switchover = ended.join(relay).and_then(|summary| summary.switchover);
            hangup.hang_up();
            ended.join(disks);
            ended.moved = stats.snapshot();
            ended.disks = copies.progress();
            (decision, ended)
        })
    }

    fn set_up(
        &self,
        source: &mut SourceQemu,
        copies: &Copies,
    ) -> Result<(Listener, Hangup), Cause> {
        let (policy, mut capabilities) = (self.policy(source), self.capabilities(source.post_copy));
        // QEMU waits for `migrate-continue` when it has paused the guest.
        capabilities.extend(copies.are_due().then_some("pause-before-switchover"));
        source.set_up(self.channels, &policy, self.dirty_limit, &capabilities)?;
        let listener = listen_beside(self.qmp, "outgoing", self.config.stall_timeout)?;
        Ok((listener, Hangup::new()?))
    }

    /// The downtime and the slowdown that the guest may suffer.
    fn policy(&self, source: &SourceQemu) -> Policy {
        let limit = self.downtime_limit;
        Policy {
            downtime_limit: limit.unwrap_or_else(|| source.downtime_limit()),
            downtime_max: self.downtime_max,
            timeout: self.timeout,
            auto_converge: self.auto_converge,
        }
    }

    /// The capabilities that the source QEMU must have, and that are switched on for this migration.
    fn capabilities(&self, post_copy: Option<PostCopyAbilities>) -> Vec<&'static str> {
        let throttles = matches!(self.timeout, Some((_, OnTimeout::Throttle)));
        let throttles = throttles || self.auto_converge.is_some();
        let mut all = capabilities(post_copy);
        all.extend(throttles.then_some("auto-converge"));
        all.extend(self.dirty_limit.map(|_| "dirty-limit"));
        all
    }

    /// Number of multifd channels, unless post-copy takes their place.
    fn channels_of(&self, source: &SourceQemu) -> Option<u8> {
        source.post_copy.is_none().then_some(self.channels)
    }

    /// Threads that encode at once.
    fn encoders(&self) -> f64 {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        usize::from(self.channels).min(cores) as f64
    }

    fn conclude(
        &self,
        mut hand_over: HandOver<'_>,
        mut decision: Decision,
        mut source: Option<&mut SourceQemu>,
        mut ended: Ended,
        start: Instant,
        observe: &mut dyn FnMut(News<'_>),
    ) -> Result<Moved, Failure> {
        if let (true, Some(source)) = (hand_over.is_under_post_copy(), &mut source)
            && !matches!(ended.cause, Some(Cause::Cancelled))
        {
            ended.cause = None;
            decision = self.recover(&mut hand_over, source, &mut ended, observe);
        }
        let attempt = &hand_over.attempt;
        let record = &attempt.entry.record;
        let failure = |cause| Failure {
            is_running: decision.guest == GuestLocation::Source && record.side.resume,
            ..Failure::of(record.attempt, cause, decision.guest)
        };
        let mut downtime = None;
        if let Some(source) = source {
            let running = attempt.running_at.filter(|_| record.side.resume);
            downtime = source.stopped.map(|stopped| stopped.at).zip(running);
            if !hand_over.is_under_post_copy() {
                clean_up(&mut source.qemu);
                source.qemu.put_back();
            }
        }
        if hand_over.is_supplying() {
            let cause = ended.cause.as_ref().map(|cause| chain(cause));
            return Err(failure(Cause::Unsupplied(cause.unwrap_or_default())));
        }
        if let (GuestLocation::Destination, Some(cause)) = (decision.guest, &decision.cause) {
            return Err(failure(Cause::broken(cause)));
        }
        if decision.guest == GuestLocation::Destination {
            if !self.is_asked_for(record) {
                let now = "that attempt has just been finished";
                return Err(failure(Cause::moved_before(record, now)));
            }
            if let Some(state) = hand_over.stands_still_there() {
                return Err(failure(Cause::StandsStill(state)));
            }
            return Ok(Moved {
                attempt: Some(record.attempt),
                is_running: record.side.resume,
                ..ended.moved(downtime, start)
            });
        }
        if hand_over.may_run_twice(&decision) {
            return Err(failure(Cause::RunsHere(decision.cause.unwrap_or_default())));
        }
        let theirs = attempt.their_cause.as_ref();
        let theirs = theirs.map(|cause| format!("destination: {cause}"));
        let is_explained = attempt.is_explained();
        Err(failure(match (ended.cause, theirs) {
            // All else follows from that.
            (Some(Cause::Broken { .. } | Cause::Disk { .. }), Some(theirs)) if is_explained => {
                Cause::broken(theirs)
            }
            (Some(Cause::Broken { mut reports, relay }), theirs) => {
                reports.extend(theirs);
                Cause::Broken { reports, relay }
            }
            (Some(cause), _) => cause,
            (None, Some(theirs)) => Cause::broken(theirs),
            (None, None) => Cause::broken(decision.cause.unwrap_or_default()),
        }))
    }

    /// Whether the attempt had the same server and name as this migration.
    fn is_asked_for(&self, record: &Record<AtSource>) -> bool {
        record.side.to == self.to.address() && record.name == self.name
    }
}

/// How moving the memory ended.
#[derive(Default)]
struct Ended {
    /// Why it failed before the hand-over.
    cause: Option<Cause>,
    info: Value,
    moved: Counters,
    disks: Option<CopiedDisks>,
    switchover: Option<Switchover>,
}

impl Ended {
    fn failed(cause: Cause) -> Self {
        Self {
            cause: Some(cause),
            ..Self::default()
        }
    }

    /// Waits for the end of a relay, and adds its error. `None` if it has failed, or was not started.
    fn join<T>(&mut self, relay: Option<ScopedJoinHandle<'_, Result<T, RelayError>>>) -> Option<T> {
        // A thread that panicked has no result. The source's status decides.
        let error = match relay?.join() {
            Ok(Ok(result)) => return Some(result),
            Ok(Err(error)) => error,
            Err(_) => return None,
        };
        match (&mut self.cause, error.lost_connection()) {
            // What QEMU reports follows from that.
            (Some(cause @ (Cause::Broken { .. } | Cause::Disk { .. })), Some((seconds, lost))) => {
                *cause = Cause::Lost {
                    seconds,
                    cause: lost,
                };
            }
            (Some(Cause::Broken { relay, .. }), None)
                if !matches!(error, RelayError::Cancelled) =>
            {
                *relay = Some(error);
            }
            _ => {}
        }
        None
    }

    /// The result, if the guest was paused and ran again at these times.
    fn moved(self, downtime: Option<(Instant, Instant)>, start: Instant) -> Moved {
        let parts = downtime.zip(self.switchover);
        let parts =
            parts.map(|((stopped, running), switchover)| switchover.parts(stopped, running));
        let mut info = self.info;
        if let (Value::Object(info), Some(parts)) = (&mut info, &parts) {
            info.insert("downtime-parts".to_owned(), json!(parts));
        }
        Moved {
            source: info,
            moved: self.moved,
            disks: self.disks,
            downtime: downtime.map(|(stopped, running)| running.duration_since(stopped)),
            downtime_parts: parts,
            total_time: start.elapsed(),
            ..Moved::default()
        }
    }

    fn event(&self) -> SourceEvent {
        let cause = self.cause.as_ref().map(|cause| chain(cause));
        SourceEvent::Failed {
            cause: cause.unwrap_or_default(),
        }
    }
}

fn span(attempt: AttemptId) -> Span {
    error_span!("migration", role = "source", %attempt)
}

/// How long a server may take to get ready, or to report that it is still getting ready: a QEMU may be busy, or its monitor
/// held by another client.
const PREPARED_WITHIN: Duration = Duration::from_secs(60);
