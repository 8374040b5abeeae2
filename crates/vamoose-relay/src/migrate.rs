//! The source's side: drives one QEMU through a migration to a server on another host.
//!
//! ```text
//!  look      at the source QEMU, and at what the journal knows of it: an attempt that is not over is finished first
//!  prepare   the server: is there a QEMU for it, what can that one do
//!  set up    the source QEMU and a relay beside it
//!  watch     until the source says completed, failed or cancelled
//!  hand over completed: the source is paused for good; crate `handover` decides what every answer means.
//!            Anything else: the guest goes on here, the server ends its QEMU.
//! ```

mod earlier;
mod hand_over;
mod socket;
mod source;

use std::{
    io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use handover::{
    AttemptId, ConnectionKind, Decision, DestinationMessage, GuestLocation, Prepare, SourceEvent,
    SourceMessage, SourceState,
};
use serde_json::{Value, json};
use thiserror::Error;
use tracing::{info, warn};
use vamoose_link::{Address, Hangup, Snapshot, SocketError, Stats};

use crate::{
    Config, Dialer, Journal, JournalError, Relay, RelayError, SourceRecord,
    control::{self, Control, ControlError, Offer, Request, from_details, preamble, to_details},
    journal::now,
    qemu::QemuError,
};
use hand_over::{HandOver, Limits};
use socket::Socket;
use source::EVENT_WAIT;
pub(crate) use source::Source;

/// One migration to be driven.
pub struct Migration<'a> {
    /// The source QEMU's monitor.
    pub qmp: &'a Path,
    /// The server.
    pub to: &'a Address,
    /// Where attempts are remembered: see [`Journal`].
    pub state_dir: &'a Path,
    /// The waiting QEMU's name at the server.
    pub name: &'a str,
    /// Data channels, all the way.
    pub channels: u8,
    /// What the relay does with the pages.
    pub config: Config,
    /// Longest downtime to aim at; QEMU's own setting if `None`.
    pub downtime_limit: Option<Duration>,
    /// Longest time for which the guest may stand still before the hand-over: then it goes on here.
    pub downtime_max: Duration,
    /// How the source finds zero pages (`none`, `legacy`, `multifd`); the best that both QEMUs know
    /// if `None`.
    pub zero_page_detection: Option<&'a str>,
    /// Set to cancel.
    pub cancel: &'a AtomicBool,
}

/// Where a migration stands.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// QEMU's name for the state: `setup`, `active`, `device`, ...
    pub status: String,
    /// QEMU's whole account, as `query-migrate` gives it.
    pub source: Value,
    /// What the relay has moved.
    pub moved: Snapshot,
}

/// A guest that has moved.
#[derive(Clone, Debug)]
pub struct Moved {
    /// QEMU's account at the end; empty when the migration had been driven by somebody else.
    pub source: Value,
    /// What the relay has moved.
    pub moved: Snapshot,
    /// From the source's stop to the server's word that the guest runs, as this host's clock saw it.
    /// `None` when it did not run.
    pub downtime: Option<Duration>,
    /// From the first command to the server's last word.
    pub total_time: Duration,
}

/// A migration that did not go through.
#[derive(Debug, Error)]
#[error("{cause}{}", self.location())]
pub struct Failure {
    /// Why.
    #[source]
    pub cause: Cause,
    /// Where that leaves the guest.
    pub guest: GuestLocation,
    /// The attempt that is to be finished or settled, or has left the guest there.
    pub attempt: Option<AttemptId>,
}

impl Failure {
    /// Where the guest is, where the cause does not say so itself.
    fn location(&self) -> String {
        match (&self.cause, self.guest) {
            (Cause::MovedBefore { .. }, GuestLocation::Destination) => String::new(),
            (_, guest) => format!("; {guest}"),
        }
    }
}

/// Why a migration did not go through.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Cause {
    /// Somebody asked for it.
    #[error("the migration was cancelled")]
    Cancelled,
    /// The source QEMU.
    #[error("source: {0}")]
    Source(#[from] QemuError),
    /// The server could not be talked to.
    #[error("server: {0}")]
    Control(#[from] ControlError),
    /// The server does not take this migration.
    #[error("the server refuses: {0}")]
    Refused(String),
    /// An answer to another question.
    #[error("the server answered out of turn: {0}")]
    OutOfTurn(String),
    /// The socket between the source QEMU and its relay.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The system refused something that every migration needs.
    #[error("cannot set up the migration: {0}")]
    SetUp(#[from] io::Error),
    /// The journal.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The guest stood still for too long.
    #[error("the guest stood still for more than {} s", .0.as_secs_f64())]
    Downtime(Duration),
    /// The source's QEMU has ended, which is proven.
    #[error("the source's QEMU has ended")]
    SourceEnded,
    /// The guest was sent away before, by an attempt that is over.
    #[error("attempt {attempt} has moved the guest to {to} ({name}){}{now}", if now.is_empty() { "" } else { "; " })]
    MovedBefore {
        /// The attempt.
        attempt: AttemptId,
        /// The destination's address.
        to: String,
        /// The guest's name there.
        name: String,
        /// What is known of it now.
        now: String,
    },
    /// The guest was sent away by something that left no entry in the journal.
    #[error("the source has sent its guest away in a migration that is not in this journal")]
    NotInJournal,
    /// It broke under way.
    #[error("{}", join(.0))]
    Broken(Vec<String>),
}

fn join(causes: &[String]) -> String {
    causes.join("; ")
}

impl Migration<'_> {
    /// Runs the migration to its end. `observe` is called several times a second meanwhile.
    ///
    /// # Errors
    /// Why it did not go through, and where the guest is.
    pub fn run(&self, observe: &mut dyn FnMut(&Progress)) -> Result<Moved, Failure> {
        let start = Instant::now();
        let journal = Journal::open(self.state_dir).map_err(at_source)?;
        journal.clean_up::<SourceRecord>();
        let mut source = match Source::connect(self.qmp) {
            Ok(source) => source,
            Err(error) => return self.without_source(&journal, error.into()),
        };
        if let Some(ended) = self.finish_earlier(&journal, &mut source)? {
            return ended;
        }
        source.check(self.zero_page_detection).map_err(at_source)?;
        self.tell_earlier(&journal).map_err(at_source)?;
        self.attempt(&journal, source, start, observe)
    }

    /// A new attempt.
    fn attempt(
        &self,
        journal: &Journal,
        mut source: Source,
        start: Instant,
        observe: &mut dyn FnMut(&Progress),
    ) -> Result<Moved, Failure> {
        let attempt = AttemptId(control::random().map_err(at_source)?);
        // The last attempt of a QEMU is the one that counts, also if the clock was set back.
        let known = journal.records::<SourceRecord>().map_err(at_source)?;
        let last = known.last().map_or(0, |record| record.began);
        let record = SourceRecord {
            attempt,
            began: now().max(last + 1),
            name: self.name.to_owned(),
            to: self.to.to_string(),
            qemu: source.instance.clone(),
            resume: source.was_running,
            confirmed: false,
            state: SourceState::Moving { incarnation: None },
        };
        let entry = journal.claim(record).map_err(at_source)?;
        entry.write().map_err(at_source)?;
        let mut hand_over = HandOver::new(entry, self.to, self.limits(), self.cancel);
        let prepared = self.prepare(&mut hand_over, &mut source);
        let ended = match prepared {
            Ok(()) => self.move_pages(&mut hand_over, &mut source, observe),
            Err(cause) => Ended::failed(cause),
        };
        let decision = match ended.decision.clone() {
            Some(decision) => decision,
            None => hand_over.finish(ended.event(), Some(&mut source)),
        };
        let ended = Ended { start, ..ended };
        self.conclude(hand_over, decision, Some(&mut source), ended)
    }

    fn prepare(&self, hand_over: &mut HandOver<'_>, source: &mut Source) -> Result<(), Cause> {
        let timeout = self.config.stall_timeout;
        let mut control = Control::connect(self.to, hand_over.attempt(), timeout)?;
        let request = Request {
            name: self.name.to_owned(),
            uuid: source.instance.uuid.clone(),
            ram_bytes: source.ram_bytes,
            channels: self.channels,
            page_size: u32::try_from(self.config.layout.page_size()).unwrap_or(u32::MAX),
            method: self.config.method.name().to_owned(),
        };
        let prepare = Prepare::new(to_details(&request)?);
        control.send(&SourceMessage::Prepare(prepare))?;
        let answer = loop {
            match control.receive(PREPARED_WITHIN)? {
                DestinationMessage::Preparing => {}
                answer => break answer,
            }
        };
        hand_over.control = Some(control);
        match answer {
            DestinationMessage::Prepared { ref details, .. } => {
                source.zero_pages = self.zero_pages(source, &from_details(details.clone())?)?;
                hand_over.prepared(answer)
            }
            DestinationMessage::Refused { reason } => Err(Cause::Refused(reason)),
            other => Err(Cause::OutOfTurn(format!("{other:?}"))),
        }
    }

    /// How the source is to find zero pages, where it can be told.
    fn zero_pages(&self, source: &Source, offer: &Offer) -> Result<Option<String>, Cause> {
        let (ours, theirs) = (source.qemu.version(), &offer.qemu);
        info!("source QEMU {ours}, destination QEMU {theirs}");
        if !source.qemu.knows_zero_pages() {
            return Ok(None);
        }
        // An older destination would lose zero pages in packets silently.
        let best = match offer.knows_zero_pages {
            true => "multifd",
            false => "legacy",
        };
        let wanted = self.zero_page_detection.unwrap_or(best);
        if wanted == "multifd" && !offer.knows_zero_pages {
            return Err(Cause::Refused(format!(
                "its QEMU {theirs} does not know zero-page-detection multifd"
            )));
        }
        Ok(Some(wanted.to_owned()))
    }

    /// From the set-up to the source's last word and, if that is *completed*, to the hand-over's end.
    fn move_pages(
        &self,
        hand_over: &mut HandOver<'_>,
        source: &mut Source,
        observe: &mut dyn FnMut(&Progress),
    ) -> Ended {
        let (socket, hangup) = match self.set_up(source) {
            Ok(ready) => ready,
            Err(cause) => return Ended::failed(cause),
        };
        let dialer = Dialer {
            address: self.to.clone(),
            preamble: preamble(ConnectionKind::Data, hand_over.attempt()).to_vec(),
        };
        let mut config = self.config.clone();
        config.incoming_channels = Some(self.channels.into());
        config.outgoing_channels = Some(self.channels.into());
        let stats = Arc::new(Stats::default());
        let relay = Relay {
            accept: &socket.listener,
            dialer: &dialer,
            config: &config,
            hangup: &hangup,
            stats: &stats,
            on_loaded: &|| (),
        };
        thread::scope(|scope| {
            let relay = scope.spawn(|| relay.run());
            let watched = self
                .start(source, &socket.path)
                .and_then(|()| self.watch(source, &stats, &hangup, observe));
            let mut ended = match watched {
                // The guest stands still: nothing comes before the commit, not even the relay's end.
                Ok(account) => Ended {
                    decision: Some(hand_over.finish(SourceEvent::Stopped, Some(source))),
                    account,
                    ..Ended::at(Instant::now())
                },
                Err(cause) if source.has_ended_by(&cause) => {
                    let stopped = source.stopped.is_some();
                    let event = SourceEvent::GuestDied { stopped };
                    Ended {
                        decision: Some(hand_over.finish(event, None)),
                        ..Ended::failed(Cause::SourceEnded)
                    }
                }
                Err(cause) => Ended::failed(cause),
            };
            if ended.cause.is_some() {
                hangup.hang_up();
            }
            // A thread that panicked has nothing to tell; the source's word decides.
            let relayed = relay.join().unwrap_or(Err(RelayError::Cancelled));
            ended.explain(relayed.err());
            ended.moved = stats.snapshot();
            ended
        })
    }

    fn set_up(&self, source: &mut Source) -> Result<(Socket, Hangup), Cause> {
        source.set_up(self.channels, self.downtime_limit)?;
        let socket = Socket::beside(self.qmp, self.config.stall_timeout)?;
        Ok((socket, Hangup::new()?))
    }

    fn start(&self, source: &mut Source, socket: &Path) -> Result<(), Cause> {
        if self.is_cancelled() {
            return Err(Cause::Cancelled);
        }
        let uri = format!("unix:{}", socket.display());
        Ok(source.qemu.execute("migrate", json!({ "uri": uri }))?)
    }

    /// Follows the source until it says how the migration ended.
    fn watch(
        &self,
        source: &mut Source,
        stats: &Stats,
        hangup: &Hangup,
        observe: &mut dyn FnMut(&Progress),
    ) -> Result<Value, Cause> {
        let mut stopping = None;
        let mut asked = None;
        loop {
            if stopping.is_none() {
                stopping = self.reason_to_stop(source);
                if let Some(Stop { cause, .. }) = &stopping {
                    info!("{cause}");
                    self.stop(source, cause, hangup)?;
                }
            }
            if let Some(Stop { since, .. }) = &stopping
                && since.elapsed() > CANCELLING
            {
                // The sockets are its last hold on the guest.
                hangup.hang_up();
            }
            if let Some(Stop { cause, .. }) = stopping.take_if(|stop| stop.is_overdue()) {
                return Err(cause);
            }
            let is_news = source.take_events(EVENT_WAIT)?;
            if !is_news && asked.is_some_and(|asked: Instant| asked.elapsed() < ASK_EVERY) {
                continue;
            }
            asked = Some(Instant::now());
            let (account, status) = match source.account() {
                Err(QemuError::Qmp(error)) if error.is_no_answer() && !self.is_cancelled() => {
                    warn!("{error}; it is asked again");
                    continue;
                }
                account => account?,
            };
            observe(&Progress {
                status: status.clone(),
                moved: stats.snapshot(),
                source: account.clone(),
            });
            match status.as_str() {
                "completed" => {
                    if stopping.is_some() {
                        warn!("too late to cancel: the guest has been sent");
                    }
                    // Among them, when it stopped. The guest stands still: nothing is waited for.
                    source.take_events(Duration::ZERO)?;
                    return Ok(account);
                }
                // A source that is cancelled sometimes calls it a failure.
                "cancelled" | "failed" => {
                    return Err(match stopping {
                        Some(Stop { cause, .. }) => cause,
                        None => broken(&status, &account),
                    });
                }
                _ => {}
            }
        }
    }

    fn reason_to_stop(&self, source: &Source) -> Option<Stop> {
        let cause = if self.is_cancelled() {
            Cause::Cancelled
        } else if source.stopped_for() > self.downtime_max {
            Cause::Downtime(self.downtime_max)
        } else {
            return None;
        };
        let since = Instant::now();
        Some(Stop { cause, since })
    }

    fn stop(&self, source: &mut Source, cause: &Cause, hangup: &Hangup) -> Result<(), Cause> {
        let cancelled = source.qemu.execute("migrate_cancel", json!({}));
        if !matches!(cause, Cause::Cancelled) || cancelled.is_err() {
            // Whoever waits for the destination with the guest stopped is not to wait for it any longer.
            hangup.hang_up();
        }
        match cancelled {
            // It may have ended by itself at this moment.
            Err(QemuError::Qmp(error)) if error.is_refusal() => Ok(()),
            result => Ok(result?),
        }
    }

    /// Draws the conclusion from what the hand-over has decided.
    fn conclude(
        &self,
        hand_over: HandOver<'_>,
        decision: Decision,
        source: Option<&mut Source>,
        ended: Ended,
    ) -> Result<Moved, Failure> {
        let record = &hand_over.entry.record;
        let failure = |cause| Failure {
            cause,
            guest: decision.guest,
            attempt: Some(record.attempt),
        };
        let mut downtime = None;
        if let Some(source) = source {
            let running = hand_over.running_at.filter(|_| record.resume);
            downtime = source
                .stopped
                .and_then(|(stopped, _)| Some(running?.saturating_sub(stopped)));
            if decision.guest != GuestLocation::InDoubt {
                source.qemu.put_back();
            }
        }
        if decision.guest == GuestLocation::Destination {
            if !self.is_asked_for(record) {
                return Err(failure(moved_before(
                    record,
                    "that attempt has just been finished",
                )));
            }
            return Ok(Moved {
                source: ended.account,
                moved: ended.moved,
                downtime,
                total_time: ended.start.elapsed(),
            });
        }
        let theirs = hand_over
            .their_cause
            .map(|cause| format!("destination: {cause}"));
        Err(failure(match (ended.cause, theirs) {
            (Some(Cause::Broken(causes)), Some(theirs)) if !causes.contains(&theirs) => {
                Cause::Broken(causes.into_iter().chain([theirs]).collect())
            }
            (Some(cause), _) => cause,
            (None, Some(theirs)) => Cause::Broken(vec![theirs]),
            (None, None) => Cause::Broken(vec![decision.cause.unwrap_or_default()]),
        }))
    }

    /// Whether this is the migration that the attempt was to be.
    fn is_asked_for(&self, record: &SourceRecord) -> bool {
        record.to == self.to.to_string() && record.name == self.name
    }

    fn limits(&self) -> Limits {
        Limits {
            dial: self.config.stall_timeout,
            downtime: self.downtime_max,
        }
    }

    fn is_cancelled(&self) -> bool {
        self.cancel.load(Ordering::Relaxed)
    }
}

/// Why a migration is being stopped from here.
struct Stop {
    cause: Cause,
    since: Instant,
}

impl Stop {
    /// Whether a QEMU that neither cancels nor completes has had time enough.
    fn is_overdue(&self) -> bool {
        self.since.elapsed() > 4 * CANCELLING
    }
}

/// How a migration's memory came to its end.
struct Ended {
    start: Instant,
    /// What the hand-over has decided already.
    decision: Option<Decision>,
    /// Why it failed, where it did before the hand-over.
    cause: Option<Cause>,
    /// QEMU's account.
    account: Value,
    moved: Snapshot,
}

impl Ended {
    fn at(start: Instant) -> Self {
        Self {
            start,
            decision: None,
            cause: None,
            account: Value::Null,
            moved: Snapshot::default(),
        }
    }

    fn failed(cause: Cause) -> Self {
        Self {
            cause: Some(cause),
            ..Self::at(Instant::now())
        }
    }

    /// What the relay saw is the cause, what QEMU says usually the consequence.
    fn explain(&mut self, relayed: Option<RelayError>) {
        if let (Some(Cause::Broken(causes)), Some(error)) = (&mut self.cause, relayed)
            && !matches!(error, RelayError::Cancelled)
        {
            causes.insert(0, error.to_string());
        }
    }

    fn event(&self) -> SourceEvent {
        let cause = self.cause.as_ref().map(ToString::to_string);
        SourceEvent::Failed {
            cause: cause.unwrap_or_default(),
        }
    }
}

/// How often to ask for QEMU's account.
const ASK_EVERY: Duration = Duration::from_millis(200);
/// How long a QEMU may take to cancel before its connections are taken away.
const CANCELLING: Duration = Duration::from_secs(5);
/// How long a server may take to get ready, or to say that it is still at it: a QEMU may be busy, or its monitor
/// held by somebody else.
const PREPARED_WITHIN: Duration = Duration::from_secs(60);
fn broken(status: &str, account: &Value) -> Cause {
    if status == "cancelled" {
        return Cause::Broken(vec!["somebody cancelled at the source".into()]);
    }
    let reason = account["error-desc"].as_str().unwrap_or("no reason given");
    Cause::Broken(vec![format!("source QEMU: {reason}")])
}

/// What is to be said of an attempt that has taken the guest away; `now`: what is known of it now.
fn moved_before(record: &SourceRecord, now: impl Into<String>) -> Cause {
    Cause::MovedBefore {
        attempt: record.attempt,
        to: record.to.clone(),
        name: record.name.clone(),
        now: now.into(),
    }
}

/// A failure before anything was done to the guest.
fn at_source(cause: impl Into<Cause>) -> Failure {
    Failure {
        cause: cause.into(),
        guest: GuestLocation::Source,
        attempt: None,
    }
}
