//! One attempt from the source's side. Carries out the decisions of crate `handover`.

use std::{
    mem,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use handover::{
    AttemptId, Decision, DestinationMessage, FoundGuest, GuestLocation, LastSeen, Source,
    SourceDriver, SourceEvent, SourceHost, SourceMessage, SourceState,
};
use tracing::{debug, warn};
use vamoose_link::{Conversation, ConversationError, Remote, Session, left};

use super::{
    Cause,
    source::{EVENT_WAIT, SourceQemu},
};
use crate::{
    JournalError, chain,
    control::{ControlError, QEMU_FAILED, ask, connect},
    journal::{AtSource, Entry},
};

/// One attempt, from the source's side.
pub(super) struct HandOver<'a> {
    driver: SourceDriver,
    pub(super) attempt: Attempt<'a>,
}

/// The journal entry of an attempt, its connection to the server, and what the server has answered.
pub(super) struct Attempt<'a> {
    pub(super) entry: Entry<AtSource>,
    pub(super) to: &'a Remote,
    pub(super) control: Option<Conversation>,
    cancel: &'a AtomicBool,
    /// The server may be unable for this long to determine whether the guest runs.
    longest_unclear: Duration,
    unclear_since: Option<Instant>,
    /// The user knows that the server is being asked again.
    warned: bool,
    last_problem: String,
    /// Why the journal could not be written.
    unwritten: Option<JournalError>,
    /// When the destination reported that the guest runs.
    pub(super) running_at: Option<Instant>,
    /// The guest's state at that time, as the destination's QEMU names it.
    their_state: Option<String>,
    /// Why the destination has aborted.
    pub(super) their_cause: Option<String>,
    /// The destination has been told to abort.
    has_aborted: bool,
    /// It has been asked to wait for a source that is silent.
    is_wait_asked: bool,
    /// Whether the guest's memory comes no further. `None` if it goes through no relay from its beginning on.
    pub(super) relay_has_ended: Option<Arc<AtomicBool>>,
}

/// How long to wait for an answer to `commit`. The guest is paused, so a dead connection must not be waited for. Asking a slow
/// server again does no harm.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// How long to wait for the answer to `abort`: the guest runs, the destination ends its QEMU.
const ABORTED_WITHIN: Duration = Duration::from_secs(15);
/// Time between two attempts to get an answer.
const ASK_AGAIN: Duration = Duration::from_secs(1);

impl<'a> HandOver<'a> {
    /// Begins a new attempt.
    pub(super) fn begin(attempt: Attempt<'a>) -> Self {
        let resume = attempt.entry.record.side.resume;
        Self {
            driver: SourceDriver::new(Source::new(resume)),
            attempt,
        }
    }

    /// Takes up an attempt of an earlier process.
    pub(super) fn take_up(attempt: Attempt<'a>, guest: FoundGuest) -> Self {
        let record = &attempt.entry.record;
        let (state, resume) = (record.state.clone(), record.side.resume);
        Self {
            driver: SourceDriver::take_up(state, resume, guest),
            attempt,
        }
    }

    /// Reports an event that leads to the attempt's end, and returns when that is reached.
    pub(super) fn finish(
        &mut self,
        event: SourceEvent,
        source: Option<&mut SourceQemu>,
    ) -> Decision {
        self.driver.handle(event);
        self.drive(source)
    }

    /// Carries out what is pending, until it is decided where the guest is.
    pub(super) fn drive(&mut self, source: Option<&mut SourceQemu>) -> Decision {
        let attempt = &mut self.attempt;
        let mut host = Host { attempt, source };
        let decision = self.driver.drive(&mut host, Host::next_event);
        let stays = matches!(decision.guest, GuestLocation::Source | GuestLocation::Lost);
        if stays && self.attempt.has_aborted && !self.attempt.entry.record.side.confirmed {
            self.attempt.confirm_abort();
        }
        decision
    }

    /// Records that the server has accepted the attempt.
    pub(super) fn prepared(&mut self, message: DestinationMessage) -> Result<(), Cause> {
        self.record(SourceEvent::Message(message))
    }

    /// Whether the destination has answered that it waits for a source that is silent. Asks it, the first time.
    pub(super) fn is_waited_for(&mut self) -> Result<bool, ControlError> {
        let control = self.attempt.control.as_mut();
        let control = control.ok_or(ConversationError::Closed)?;
        if !mem::replace(&mut self.attempt.is_wait_asked, true) {
            control.send(&SourceMessage::Switching)?;
        }
        let answer = control.receive_until(Instant::now() + EVENT_WAIT)?;
        Ok(answer == Some(DestinationMessage::Receiving))
    }

    /// Records that the source QEMU is to be told to switch to post-copy, and whether the guest is held before.
    pub(super) fn ask_to_switch(&mut self, holds: bool) -> Result<(), Cause> {
        self.attempt.entry.record.side.held = holds;
        self.record(SourceEvent::SwitchAsked)
    }

    /// Whether the guest runs at the destination, and lacks memory that is at the source.
    pub(super) fn is_supplying(&self) -> bool {
        *self.driver.state() == SourceState::Supplying
    }

    /// Whether the source QEMU is past the switch to post-copy, and the guest may need memory that is here.
    pub(super) fn is_under_post_copy(&self) -> bool {
        self.is_supplying() || commits_post_copy(self.driver.state())
    }

    /// What is known of the guest.
    pub(super) fn decision(&self) -> Decision {
        Decision {
            guest: self.driver.state().guest(),
            cause: None,
        }
    }

    /// Asks the destination what has become of its guest.
    pub(super) fn ask_again(&mut self) -> Result<(), ControlError> {
        let resume = self.driver.resume();
        let commit = SourceMessage::Commit { resume };
        let (answer, control) = ask(self.attempt.to, self.attempt.id(), &commit, ANSWER_WITHIN)?;
        self.attempt.control = Some(control);
        self.driver.handle(SourceEvent::Message(answer));
        Ok(())
    }

    /// Records whether the guest is to run, when that has changed.
    pub(super) fn note_wish(&mut self, running: bool) -> Result<(), Cause> {
        match self.driver.resume() == running {
            true => Ok(()),
            false => self.record(SourceEvent::Wanted { running }),
        }
    }

    /// Reports an event that only changes the journal.
    fn record(&mut self, event: SourceEvent) -> Result<(), Cause> {
        self.driver.handle(event);
        let attempt = &mut self.attempt;
        let source = None;
        self.driver.step(&mut Host { attempt, source });
        match self.attempt.unwritten.take() {
            Some(error) => Err(error.into()),
            None => Ok(()),
        }
    }

    /// Whether the guest runs at the source, and may run at the destination.
    pub(super) fn may_run_twice(&self, decision: &Decision) -> bool {
        self.driver.runs_here() && decision.guest == GuestLocation::InDoubt
    }

    /// The state of a guest that was continued at the destination, if something has stopped it since.
    pub(super) fn stands_still_there(&self) -> Option<String> {
        let state = self.attempt.their_state.as_deref()?;
        (self.driver.resume() && stands_still(state)).then(|| state.to_owned())
    }
}

impl<'a> Attempt<'a> {
    pub(super) fn new(
        entry: Entry<AtSource>,
        to: &'a Remote,
        longest_unclear: Duration,
        cancel: &'a AtomicBool,
    ) -> Self {
        Self {
            entry,
            to,
            control: None,
            cancel,
            longest_unclear,
            unclear_since: None,
            warned: false,
            last_problem: String::new(),
            unwritten: None,
            running_at: None,
            their_state: None,
            their_cause: None,
            has_aborted: false,
            is_wait_asked: false,
            relay_has_ended: None,
        }
    }

    pub(super) fn id(&self) -> AttemptId {
        self.entry.record.attempt
    }

    pub(super) fn session(&self) -> Option<Session> {
        self.control.as_ref()?.stream().session()
    }

    /// Whether the destination's QEMU itself has given the cause.
    pub(super) fn is_explained(&self) -> bool {
        let cause = self.their_cause.as_ref();
        cause.is_some_and(|cause| cause.starts_with(QEMU_FAILED))
    }

    fn send(&mut self, message: &SourceMessage) {
        if matches!(message, SourceMessage::Abort { .. }) {
            self.has_aborted = true;
            if self.control.is_none() && !self.entry.record.side.confirmed {
                self.control = connect(self.to, self.id()).ok();
            }
        }
        let sent = self.control.as_ref().map(|control| control.send(message));
        if let Some(Err(error)) = sent {
            debug!("{}", chain(&error));
            self.control = None;
        }
    }

    fn answered(&mut self, message: DestinationMessage, source: &Source) -> SourceEvent {
        match &message {
            DestinationMessage::Running { state } => {
                self.running_at = Some(Instant::now());
                self.their_state = Some(state.clone());
            }
            DestinationMessage::Aborted { cause, .. } => self.their_cause = Some(cause.clone()),
            DestinationMessage::Receiving => return SourceEvent::AskAgain,
            DestinationMessage::Unclear { reason } | DestinationMessage::Refused { reason } => {
                self.last_problem.clone_from(reason);
                let since = *self.unclear_since.get_or_insert_with(Instant::now);
                if since.elapsed() > self.longest_unclear {
                    let cause = reason.clone();
                    return SourceEvent::GaveUp { cause };
                }
                self.warn(source);
                thread::sleep(ASK_AGAIN);
                return SourceEvent::AskAgain;
            }
            _ => {}
        }
        SourceEvent::Message(message)
    }

    fn warn(&mut self, source: &Source) {
        if !mem::replace(&mut self.warned, true) {
            // An earlier cancel was not meant to give up the question; one that follows the warning is.
            self.cancel.store(false, Ordering::Relaxed);
            let guest = match source.runs_here() {
                true => "the guest runs at the source and was handed over before",
                false => "the guest is stopped",
            };
            warn!(
                "{guest}; asking the server again until it answers: {}",
                self.last_problem
            );
        }
    }

    /// Whether to ask no longer for the answer. A cancel of the user counts only after the warning that the server is being asked
    /// again.
    fn given_up(&self, source: &Source) -> Option<SourceEvent> {
        // The destination's QEMU may answer nothing while its guest waits for a page.
        if let (true, Some(ended)) = (commits_post_copy(source.state()), &self.relay_has_ended) {
            self.refuse_to_cancel();
            let cause = "the connection was lost after the switch to post-copy".to_owned();
            let has_ended = ended.load(Ordering::Acquire);
            return has_ended.then_some(SourceEvent::GaveUp { cause });
        }
        (self.warned && self.cancel.load(Ordering::Relaxed)).then(|| SourceEvent::GaveUp {
            cause: format!("cancelled; before that: {}", self.last_problem),
        })
    }

    /// Tells a user who cancels that it is too late, while the destination may lack what it needs to run the guest.
    pub(super) fn refuse_to_cancel(&self) {
        if self.cancel.swap(false, Ordering::Relaxed) {
            warn!("too late to cancel: the guest would be lost, as it is on its way");
        }
    }

    /// Tells the destination of a finished attempt that the attempt has failed. Returns whether the destination knows now.
    pub(super) fn notify(mut self, cause: String) -> bool {
        self.send(&SourceMessage::Abort { cause });
        self.wait_for_abort() && self.record_confirmation()
    }

    /// Waits until the destination confirms that it has given the guest up. Without the confirmation, a later command notifies
    /// the destination, or an operator does.
    fn confirm_abort(&mut self) {
        if self.their_cause.is_none() && !self.wait_for_abort() {
            warn!(
                "the server has not confirmed that it knows that the migration failed; do not continue the guest \
                 `{}` there",
                self.entry.record.name
            );
            return;
        }
        // A failure to write is logged. A later command notifies the destination again.
        self.record_confirmation();
    }

    /// Records that the destination knows of the failure. Returns whether the record was written.
    fn record_confirmation(&mut self) -> bool {
        self.entry.record.side.confirmed = true;
        let written = self.entry.write();
        written
            .inspect_err(|error| debug!("{}", chain(error)))
            .is_ok()
    }

    fn wait_for_abort(&mut self) -> bool {
        let Some(control) = &mut self.control else {
            return false;
        };
        let deadline = Instant::now() + ABORTED_WITHIN;
        loop {
            match control.receive_within(left(deadline)) {
                Ok(DestinationMessage::Aborted { cause, .. }) => {
                    self.their_cause = Some(cause);
                    return true;
                }
                // It holds nothing of this attempt.
                Ok(
                    DestinationMessage::Unknown { .. }
                    | DestinationMessage::Ended { .. }
                    | DestinationMessage::MovedOn,
                ) => return true,
                Ok(DestinationMessage::Unclear { reason }) => {
                    warn!("destination: {reason}");
                    return false;
                }
                Ok(_) => {}
                Err(error) => {
                    debug!("{}", chain(&error));
                    return false;
                }
            }
        }
    }
}

/// An attempt and its source QEMU, if that has not ended.
struct Host<'h, 'a> {
    attempt: &'h mut Attempt<'a>,
    source: Option<&'h mut SourceQemu>,
}

impl SourceHost for Host<'_, '_> {
    fn persist(&mut self, source: &Source) -> Result<(), String> {
        let attempt = &mut self.attempt;
        attempt.entry.record.state = source.state().clone();
        attempt.entry.record.side.resume = source.resume();
        attempt.entry.write().map_err(|error| {
            let reason = chain(&error);
            warn!("{reason}");
            attempt.unwritten = Some(error);
            reason
        })
    }

    /// A QEMU that cannot be asked may have ended, which proves nothing.
    fn has_come_back(&mut self) -> bool {
        let asked = self.source.as_deref_mut().map(SourceQemu::has_come_back);
        match asked {
            Some(Ok(true)) => {
                warn!("the guest was continued at the source: the destination is to give it up");
                true
            }
            Some(Err(error)) => {
                debug!("{}", chain(&error));
                false
            }
            Some(Ok(false)) | None => false,
        }
    }

    fn send(&mut self, message: &SourceMessage) -> Option<SourceEvent> {
        self.attempt.send(message);
        None
    }

    /// Connects to the server; tries again until that succeeds or the user gives up.
    fn dial(&mut self, source: &Source) -> Option<SourceEvent> {
        let attempt = &mut self.attempt;
        attempt.control = None;
        loop {
            if attempt.warned {
                thread::sleep(ASK_AGAIN);
            }
            if let Some(event) = attempt.given_up(source) {
                return Some(event);
            }
            attempt.warn(source);
            match connect(attempt.to, attempt.id()) {
                Ok(control) => {
                    attempt.control = Some(control);
                    return Some(SourceEvent::Connected);
                }
                Err(error) => {
                    attempt.last_problem = chain(&error);
                    if matches!(&error, ControlError::Dial(error) if error.is_connection_refused())
                    {
                        return Some(SourceEvent::ConnectionRefused);
                    }
                }
            }
        }
    }

    fn resume(&mut self, source: &Source) -> Option<SourceEvent> {
        Some(match self.source.as_deref_mut() {
            Some(qemu) => qemu.resume(source.resume()),
            None => SourceEvent::GuestDied {
                last: LastSeen::Stopped,
            },
        })
    }
}

impl Host<'_, '_> {
    /// Waits for the server's answer.
    fn next_event(&mut self, source: &Source) -> SourceEvent {
        let attempt = &mut self.attempt;
        if let Some(event) = attempt.given_up(source) {
            return event;
        }
        let Some(control) = &mut attempt.control else {
            return SourceEvent::Closed { complete: false };
        };
        match control.receive_within(ANSWER_WITHIN) {
            Ok(message) => attempt.answered(message, source),
            Err(error) => {
                attempt.last_problem = chain(&error);
                let complete = matches!(error, ConversationError::Closed);
                SourceEvent::Closed { complete }
            }
        }
    }
}

fn commits_post_copy(state: &SourceState) -> bool {
    matches!(
        state,
        SourceState::Committing {
            post_copy: true,
            guest_died: false,
            ..
        }
    )
}

/// Whether a guest in this state, as QEMU names it, has stopped although it was continued: its disk is full, it has panicked, it
/// has powered off. A person's pause does not count.
pub(super) fn stands_still(state: &str) -> bool {
    let stopped = [
        "io-error",
        "internal-error",
        "guest-panicked",
        "watchdog",
        "shutdown",
    ];
    stopped.contains(&state)
}
