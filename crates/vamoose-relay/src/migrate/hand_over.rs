//! Drives the source's machine of crate `handover`: carries out its actions, and reports what happens.

use std::{
    collections::VecDeque,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use handover::{
    AttemptId, Decision, DestinationMessage, GuestLocation, LastSeen, SourceAction, SourceEvent,
    SourceMessage, SourceState,
};
use tracing::{debug, info, warn};
use vamoose_link::{Remote, Session, left};

use super::{Cause, source::SourceQemu};
use crate::{
    JournalError, chain,
    control::{Control, ControlError},
    journal::{AtSource, Entry},
};

/// One attempt, from the source's side.
pub(super) struct HandOver<'a> {
    pub(super) entry: Entry<AtSource>,
    machine: handover::Source,
    to: &'a Remote,
    pub(super) control: Option<Control>,
    limits: Limits,
    cancel: &'a AtomicBool,
    /// The user knows that the server is being asked again.
    warned: bool,
    /// Since when the destination cannot determine whether the guest runs.
    unclear_since: Option<Instant>,
    last_problem: String,
    /// It was found running here, although it may have been handed over.
    runs_here: bool,
    /// When the destination reported that the guest runs.
    pub(super) running_at: Option<Instant>,
    /// And in what state it was then, by the name that the destination's QEMU has for it.
    their_state: Option<String>,
    /// Why the destination has aborted.
    pub(super) their_cause: Option<String>,
    /// The destination has been told to abort.
    has_aborted: bool,
}

/// How long things may take.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    pub(super) downtime: Duration,
}

/// How long to wait for an answer to `commit`. The guest is paused: a connection that is dead must not be waited
/// for, and asking again does no harm, should the server only be slow.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// How long to wait for the answer to `abort`: the guest runs, the destination ends its QEMU.
const ABORTED_WITHIN: Duration = Duration::from_secs(15);
/// Between two attempts to get an answer.
const ASK_AGAIN: Duration = Duration::from_secs(1);

impl<'a> HandOver<'a> {
    /// Goes on with what `entry` remembers, or begins.
    pub(super) fn new(
        entry: Entry<AtSource>,
        to: &'a Remote,
        limits: Limits,
        cancel: &'a AtomicBool,
    ) -> Self {
        let record = &entry.record;
        Self {
            machine: handover::Source::restore(record.state.clone(), record.side.resume),
            entry,
            to,
            control: None,
            limits,
            cancel,
            warned: false,
            unclear_since: None,
            last_problem: String::new(),
            runs_here: false,
            running_at: None,
            their_state: None,
            their_cause: None,
            has_aborted: false,
        }
    }

    pub(super) fn session(&self) -> Option<Session> {
        self.control.as_ref()?.session().cloned()
    }

    pub(super) fn attempt(&self) -> AttemptId {
        self.entry.record.attempt
    }

    /// Goes on with an attempt of an earlier process, to its end.
    pub(super) fn go_on(&mut self, source: Option<&mut SourceQemu>) -> Decision {
        let actions = self.machine.go_on();
        self.drive(actions, source)
    }

    /// Takes an event that leads to the attempt's end, and returns when that is reached.
    pub(super) fn finish(
        &mut self,
        event: SourceEvent,
        source: Option<&mut SourceQemu>,
    ) -> Decision {
        self.runs_here |= event == SourceEvent::Resumed
            && matches!(self.machine.state(), SourceState::Committing { .. });
        let actions = self.machine.handle(event);
        self.drive(actions, source)
    }

    pub(super) fn prepared(&mut self, message: DestinationMessage) -> Result<(), Cause> {
        let actions = self.machine.handle(SourceEvent::Message(message));
        if actions.contains(&SourceAction::Persist) {
            self.persist()?;
        }
        Ok(())
    }

    /// Takes down whether the guest is to run, when that has changed.
    pub(super) fn note_wish(&mut self, running: bool) -> Result<(), Cause> {
        if self.machine.resume() != running {
            let actions = self.machine.handle(SourceEvent::Wanted { running });
            if actions.contains(&SourceAction::Persist) {
                self.persist()?;
            }
        }
        Ok(())
    }

    /// Whether the guest runs at the source, and may run at the destination.
    pub(super) fn may_run_twice(&self, decision: &Decision) -> bool {
        self.runs_here && decision.guest == GuestLocation::InDoubt
    }

    /// The state of a guest that was continued at the destination, if something has stopped it since.
    pub(super) fn stands_still_there(&self) -> Option<String> {
        let state = self.their_state.as_deref()?;
        (self.machine.resume() && stands_still(state)).then(|| state.to_owned())
    }

    fn drive(&mut self, first: Vec<SourceAction>, mut source: Option<&mut SourceQemu>) -> Decision {
        let mut actions = VecDeque::from(first);
        loop {
            let event = match actions.pop_front() {
                Some(SourceAction::Persist) => match self.persist() {
                    Ok(()) => continue,
                    Err(error) => {
                        let reason = chain(&error);
                        warn!("{reason}");
                        actions.clear();
                        SourceEvent::NotPersisted { reason }
                    }
                },
                Some(SourceAction::Send(SourceMessage::Commit { .. }))
                    if source.as_deref_mut().is_some_and(has_come_back) =>
                {
                    warn!(
                        "the guest was continued at the source: the destination is to give it up"
                    );
                    SourceEvent::Resumed
                }
                Some(SourceAction::Send(message)) => {
                    self.send(&message);
                    continue;
                }
                Some(SourceAction::Dial) => self.dial(),
                Some(SourceAction::Resume) => match source.as_deref_mut() {
                    Some(source) => source.resume(self.machine.resume()),
                    None => SourceEvent::GuestDied {
                        last: LastSeen::Stopped,
                    },
                },
                Some(SourceAction::Decide(decision)) => return self.decide(decision),
                // An answer is waited for.
                None if matches!(self.machine.state(), SourceState::Committing { .. }) => {
                    self.next_event()
                }
                // Nothing that happens would change anything; another run looks again.
                None => {
                    return Decision {
                        guest: self.machine.state().guest(),
                        cause: Some(self.last_problem.clone()),
                    };
                }
            };
            actions.extend(self.machine.handle(event));
        }
    }

    fn persist(&mut self) -> Result<(), JournalError> {
        self.entry.record.state = self.machine.state().clone();
        self.entry.record.side.resume = self.machine.resume();
        self.entry.write()
    }

    fn send(&mut self, message: &SourceMessage) {
        if matches!(message, SourceMessage::Abort { .. }) {
            self.has_aborted = true;
            if self.control.is_none() {
                self.control = Control::connect(self.to, self.attempt()).ok();
            }
        }
        let sent = self.control.as_ref().map(|control| control.send(message));
        if let Some(Err(error)) = sent {
            debug!("{}", chain(&error));
            self.control = None;
        }
    }

    /// Opens a connection, as soon as one can be had.
    fn dial(&mut self) -> SourceEvent {
        self.control = None;
        loop {
            if self.warned {
                thread::sleep(ASK_AGAIN);
            }
            if let Some(event) = self.given_up() {
                return event;
            }
            self.warn();
            match Control::connect(self.to, self.attempt()) {
                Ok(control) => {
                    self.control = Some(control);
                    return SourceEvent::Connected;
                }
                Err(error) => {
                    let refused = matches!(
                        &error,
                        ControlError::Dial(error) if error.is_connection_refused()
                    );
                    self.last_problem = chain(&error);
                    if refused {
                        return SourceEvent::Refused;
                    }
                }
            }
        }
    }

    fn next_event(&mut self) -> SourceEvent {
        if let Some(event) = self.given_up() {
            return event;
        }
        let Some(control) = &mut self.control else {
            return SourceEvent::Closed { complete: false };
        };
        match control.receive(ANSWER_WITHIN) {
            Ok(message) => self.answered(message),
            Err(error) => {
                self.last_problem = chain(&error);
                SourceEvent::Closed {
                    complete: matches!(error, ControlError::Closed),
                }
            }
        }
    }

    fn answered(&mut self, message: DestinationMessage) -> SourceEvent {
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
                if since.elapsed() > self.limits.downtime {
                    let cause = reason.clone();
                    return SourceEvent::GaveUp { cause };
                }
                self.warn();
                thread::sleep(ASK_AGAIN);
                return SourceEvent::AskAgain;
            }
            _ => {}
        }
        SourceEvent::Message(message)
    }

    fn warn(&mut self) {
        if !std::mem::replace(&mut self.warned, true) {
            let guest = match self.runs_here {
                true => "the guest runs at the source and was handed over before",
                false => "the guest is stopped",
            };
            warn!(
                "{guest}; asking the server again until it answers: {}",
                self.last_problem
            );
            // A cancel from before cannot have been meant for this.
            self.cancel.store(false, Ordering::Relaxed);
        }
    }

    /// Only a user who knows that the answer is being waited for can end that.
    fn given_up(&self) -> Option<SourceEvent> {
        (self.warned && self.cancel.load(Ordering::Relaxed)).then(|| SourceEvent::GaveUp {
            cause: format!("cancelled; before that: {}", self.last_problem),
        })
    }

    fn decide(&mut self, decision: Decision) -> Decision {
        if self.has_aborted
            && matches!(decision.guest, GuestLocation::Source | GuestLocation::Lost)
            && !self.entry.record.side.confirmed
        {
            self.confirm_abort();
        }
        decision
    }

    /// Waits until the destination confirms that it has given the guest up. If it does not, it will be notified by a
    /// later command, or by a person there.
    fn confirm_abort(&mut self) {
        let confirmed = self.their_cause.is_some() || self.wait_for_abort();
        if !confirmed {
            warn!(
                "the server has not confirmed that it knows that the migration failed; do not continue the guest \
                 `{}` there",
                self.entry.record.name
            );
            return;
        }
        self.entry.record.side.confirmed = true;
        if let Err(error) = self.persist() {
            debug!("{}", chain(&error));
        }
    }

    fn wait_for_abort(&mut self) -> bool {
        let Some(control) = &mut self.control else {
            return false;
        };
        let deadline = Instant::now() + ABORTED_WITHIN;
        loop {
            match control.receive(left(deadline)) {
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

/// Whether the guest has run here since it was sent. Not if QEMU cannot be asked: it may have ended, which proves nothing.
fn has_come_back(source: &mut SourceQemu) -> bool {
    source.has_come_back().unwrap_or_else(|error| {
        debug!("{}", chain(&error));
        false
    })
}

/// Whether a guest in this state, by QEMU's name, runs no more although it was continued: its disk is full, it has panicked, it
/// has powered off. Not if a person has paused it.
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

/// Notifies the destination of an earlier attempt that has failed, which could not be reached then.
pub(super) fn confirm_earlier(
    entry: Entry<AtSource>,
    to: &Remote,
    limits: Limits,
    cancel: &AtomicBool,
) -> bool {
    let SourceState::Over {
        guest: GuestLocation::Source,
        cause,
    } = entry.record.state.clone()
    else {
        return true;
    };
    let Ok(to) = to.at(&entry.record.side.to) else {
        return true;
    };
    let mut earlier = HandOver::new(entry, &to, limits, cancel);
    earlier.send(&SourceMessage::Abort {
        cause: cause.unwrap_or_default(),
    });
    if earlier.wait_for_abort() {
        info!(
            "attempt {} is known to have failed there",
            earlier.attempt()
        );
        earlier.entry.record.side.confirmed = true;
        return earlier.entry.write().is_ok();
    }
    false
}
