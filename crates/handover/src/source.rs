//! The source's side of the hand-over.
//!
//! ```text
//!            Stopped (GuestDied while stopped)                running
//!  Moving ─────────────────────────────> Committing ────────────────> Over(Destination)
//!    │ Failed, Cancelled                     │ │ └── ended, moved-on ──> Over(Lost), Over(MovedOn)
//!    │                                       │ └── aborted ─> Returning ── Resumed ─> Over(Source)
//!    └─> Over(Source), or Over(Lost)         └─ anything else: still Committing, decided InDoubt
//! ```

use serde::{Deserialize, Serialize};

use crate::{Decision, DestinationMessage, GuestLocation, Incarnation, SourceMessage};

/// The source of one attempt.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    state: SourceState,
    resume: bool,
    direct: bool,
    /// The destination has sent `starting` to this process.
    started: bool,
    /// A connection on which the destination may have sent that broke in a way that can lose it.
    message_lost: bool,
    /// The guest has been seen to run here, although `commit` may have been sent.
    runs_here: bool,
}

/// How far an attempt has come; what the source's journal remembers of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "kebab-case")]
#[allow(missing_docs, reason = "a cause and a reason are texts for people")]
pub enum SourceState {
    /// The guest is the source's, whatever has been sent.
    Moving {
        /// The destination that has accepted the attempt.
        incarnation: Option<Incarnation>,
    },
    /// `commit` has been sent, or is about to be.
    Committing {
        /// The destination that has accepted the attempt.
        incarnation: Option<Incarnation>,
        /// The source's VMM has ended: there is nothing to go back to.
        guest_died: bool,
    },
    /// The destination has never run the guest: it resumes here.
    Returning { cause: String },
    /// Nothing is left to do.
    Over {
        /// Where the guest is.
        guest: GuestLocation,
        /// Why it is not at the destination.
        cause: Option<String>,
    },
}

impl SourceState {
    /// Whether nothing is left to do.
    pub fn is_over(&self) -> bool {
        matches!(self, Self::Over { .. })
    }
}

/// What happens to a source.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "a cause and a reason are texts for people")]
pub enum SourceEvent {
    /// A message of the destination, on a connection of this attempt.
    Message(DestinationMessage),
    /// A connection has been opened, after [`SourceAction::Dial`].
    Connected,
    /// The connection has ended. `complete`: closed by the destination's system behind all that the destination
    /// had sent, so that nothing can have been lost. Ended without notice, out of order or by the source itself
    /// otherwise.
    Closed {
        /// See above.
        complete: bool,
    },
    /// The destination's address refuses connections.
    Refused,
    /// It is time to ask again: no answer came, or one that is none.
    AskAgain,
    /// This run of the source stops asking: it was cancelled, or the time is over.
    GaveUp { cause: String },
    /// The guest has stopped for good and the destination has got all of it.
    Stopped,
    /// The migration has failed or was cancelled before [`SourceEvent::Stopped`].
    Failed { cause: String },
    /// The source's VMM has ended; its process is gone, which is proven.
    GuestDied {
        /// The guest was paused for the switchover and has not run since.
        stopped: bool,
    },
    /// The guest runs here, after [`SourceAction::Resume`] or, see [`Source::restore`], without.
    Resumed,
    /// It does not, or this is not known.
    NotResumed { reason: String },
    /// The journal could not be written and has what it had before, and nothing that was to follow
    /// [`SourceAction::Persist`] has been done.
    NotPersisted { reason: String },
}

/// What a source has to do, in this order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SourceAction {
    /// Write [`Source::state`] to the journal, durably. If that fails, do nothing that follows, and report
    /// [`SourceEvent::NotPersisted`].
    Persist,
    /// Send this on the open connection. That it was sent means nothing. Without a connection, report
    /// [`SourceEvent::Closed`], not complete.
    Send(SourceMessage),
    /// Open a new connection of this attempt, after a while, and report it.
    Dial,
    /// Continue the guest here, as it was before, and report the result.
    Resume,
    /// This run is over. [`GuestLocation::InDoubt`] may be asked about again by another run.
    Decide(Decision),
}

impl Source {
    /// A new attempt. `resume` is whether the guest shall run at the destination: as it did at the source.
    pub fn new(resume: bool) -> Self {
        Self {
            message_lost: false,
            ..Self::restore(SourceState::Moving { incarnation: None }, resume)
        }
    }

    /// Goes on from a journal. If its state is not over, look at the guest first:
    /// - It has ended: report [`SourceEvent::GuestDied`]. What it did last is not known, so `stopped` is false.
    /// - Moving: report [`SourceEvent::Stopped`] or [`SourceEvent::Failed`].
    /// - Committing, and it runs, by an earlier process or a person's hand: report [`SourceEvent::Resumed`].
    ///
    /// Then, if that gave nothing to do, [`Source::go_on`].
    pub fn restore(state: SourceState, resume: bool) -> Self {
        Self {
            state,
            resume,
            direct: false,
            started: false,
            // What was sent to the process before is not known.
            message_lost: true,
            runs_here: false,
        }
    }

    /// Declares that nothing between the two processes can accept, close or refuse a connection in the
    /// destination's place: no tunnel, no proxy, no address translation. Then a destination that has closed all its
    /// connections and does not listen any more is gone.
    #[must_use]
    pub fn direct(mut self) -> Self {
        self.direct = true;
        self
    }

    /// How far it has come, for the journal.
    pub fn state(&self) -> &SourceState {
        &self.state
    }

    /// What to do after [`Source::restore`].
    pub fn go_on(&self) -> Vec<SourceAction> {
        match &self.state {
            SourceState::Moving { .. } => Vec::new(),
            SourceState::Committing { .. } => vec![SourceAction::Dial],
            SourceState::Returning { .. } => vec![SourceAction::Resume],
            SourceState::Over { .. } => self.decided(),
        }
    }

    /// Takes an event and returns what to do.
    pub fn handle(&mut self, event: SourceEvent) -> Vec<SourceAction> {
        match self.state.clone() {
            SourceState::Moving { incarnation } => self.moving(event, incarnation),
            SourceState::Committing {
                incarnation,
                guest_died,
            } => self.committing(event, incarnation, guest_died),
            SourceState::Returning { cause } => self.returning(event, cause),
            SourceState::Over { .. } => match event {
                // What is decided is decided. The destination gets no request to forget it.
                SourceEvent::NotPersisted { .. } => self.decided(),
                // Late answers.
                _ => Vec::new(),
            },
        }
    }

    /// Until `commit` is sent, the guest is ours.
    fn moving(
        &mut self,
        event: SourceEvent,
        incarnation: Option<Incarnation>,
    ) -> Vec<SourceAction> {
        match event {
            SourceEvent::Message(DestinationMessage::Prepared { incarnation, .. }) => {
                let incarnation = Some(incarnation);
                self.state = SourceState::Moving { incarnation };
                vec![SourceAction::Persist]
            }
            SourceEvent::Message(
                DestinationMessage::Aborted { cause, .. }
                | DestinationMessage::Refused { reason: cause },
            ) => self.fail(cause),
            SourceEvent::Stopped => self.commit(incarnation, false),
            SourceEvent::GuestDied { stopped: true } if incarnation.is_some() => {
                self.commit(incarnation, true)
            }
            SourceEvent::GuestDied { .. } => {
                let cause = "the source's VMM has ended".to_owned();
                let abort = abort(&cause);
                let mut actions = self.over(GuestLocation::Lost, Some(cause), []);
                actions.insert(0, abort);
                actions
            }
            SourceEvent::Failed { cause }
            | SourceEvent::GaveUp { cause }
            | SourceEvent::NotPersisted { reason: cause } => self.fail(cause),
            _ => Vec::new(),
        }
    }

    fn commit(&mut self, incarnation: Option<Incarnation>, guest_died: bool) -> Vec<SourceAction> {
        self.state = SourceState::Committing {
            incarnation,
            guest_died,
        };
        vec![SourceAction::Persist, self.ask()]
    }

    /// Requests the guest's state from the destination. One that runs here is not started there.
    fn ask(&self) -> SourceAction {
        if self.runs_here {
            return abort("the guest runs at the source");
        }
        let resume = self.resume;
        SourceAction::Send(SourceMessage::Commit { resume })
    }

    /// A guest that may be paused resumes first; notifying the destination can wait.
    fn fail(&mut self, cause: String) -> Vec<SourceAction> {
        self.state = SourceState::Returning { cause };
        vec![SourceAction::Persist, SourceAction::Resume]
    }

    /// `commit` has been sent: only messages of the destination that accepted the attempt count.
    fn committing(
        &mut self,
        event: SourceEvent,
        accepted_by: Option<Incarnation>,
        guest_died: bool,
    ) -> Vec<SourceAction> {
        match event {
            SourceEvent::Message(message) => self.answered(message, accepted_by, guest_died),
            SourceEvent::Connected | SourceEvent::AskAgain => vec![self.ask()],
            SourceEvent::Closed { complete } => {
                self.message_lost |= !complete;
                vec![SourceAction::Dial]
            }
            SourceEvent::Refused if !self.direct || self.message_lost => {
                vec![SourceAction::Dial]
            }
            SourceEvent::Refused if self.started => {
                let cause = "the destination began to run the guest, and has ended".to_owned();
                self.over(GuestLocation::Lost, Some(cause), [])
            }
            SourceEvent::Refused => {
                let cause = "the destination has ended before it ran the guest".to_owned();
                self.take_back(cause, guest_died)
            }
            SourceEvent::GaveUp { cause } => {
                // The connection is not read from here on.
                self.message_lost = true;
                in_doubt(cause)
            }
            // Of the entry that `commit` depends on: it has not been sent. The only copy may be the destination's then.
            SourceEvent::NotPersisted { reason } if guest_died => in_doubt(reason),
            SourceEvent::NotPersisted { reason } => self.fail(reason),
            SourceEvent::GuestDied { .. } => {
                // Found out again when this is restored, so the journal need not know.
                self.state = SourceState::Committing {
                    incarnation: accepted_by,
                    guest_died: true,
                };
                Vec::new()
            }
            SourceEvent::Resumed => {
                self.runs_here = true;
                vec![SourceAction::Dial]
            }
            SourceEvent::Stopped | SourceEvent::Failed { .. } | SourceEvent::NotResumed { .. } => {
                Vec::new()
            }
        }
    }

    fn answered(
        &mut self,
        message: DestinationMessage,
        accepted_by: Option<Incarnation>,
        guest_died: bool,
    ) -> Vec<SourceAction> {
        match message {
            DestinationMessage::Starting => {
                self.started = true;
                Vec::new()
            }
            DestinationMessage::Running { .. }
            | DestinationMessage::MovedOn
            | DestinationMessage::Ended { .. }
                if self.runs_here =>
            {
                in_doubt("the guest runs at the source, and has run at the destination".into())
            }
            DestinationMessage::Running { .. } => {
                self.over(GuestLocation::Destination, None, [SETTLED])
            }
            DestinationMessage::Aborted { incarnation, cause }
                if accepted_by == Some(incarnation) =>
            {
                self.take_back(cause, guest_died)
            }
            DestinationMessage::Aborted { .. } => in_doubt(
                "the answer is of another destination than the one that accepted the guest".into(),
            ),
            DestinationMessage::Ended { cause } => {
                self.over(GuestLocation::Lost, Some(cause), [SETTLED])
            }
            DestinationMessage::MovedOn => {
                let cause = "the destination has sent the guest on".to_owned();
                self.over(GuestLocation::MovedOn, Some(cause), [SETTLED])
            }
            DestinationMessage::Unknown { reason, .. } => in_doubt(reason),
            // No answer to the question: it is asked again in a while.
            _ => Vec::new(),
        }
    }

    /// The destination will never run the guest.
    fn take_back(&mut self, cause: String, guest_died: bool) -> Vec<SourceAction> {
        if guest_died {
            return self.over(GuestLocation::Lost, Some(cause), []);
        }
        self.fail(cause)
    }

    fn returning(&mut self, event: SourceEvent, cause: String) -> Vec<SourceAction> {
        match event {
            // A destination without the outcome ends its VMM, one with it drops its entry.
            SourceEvent::Resumed => {
                let abort = abort(&cause);
                self.over(GuestLocation::Source, Some(cause), [abort, SETTLED])
            }
            SourceEvent::NotResumed { reason } => in_doubt(format!(
                "{cause}; then the guest could not be resumed: {reason}"
            )),
            SourceEvent::GuestDied { .. } => self.over(GuestLocation::Lost, Some(cause), []),
            // The guest resumes all the same: a run that comes later finds it running.
            SourceEvent::NotPersisted { .. } => vec![SourceAction::Resume],
            _ => Vec::new(),
        }
    }

    /// Ends the attempt; the messages are sent behind the journal's entry.
    fn over<const N: usize>(
        &mut self,
        guest: GuestLocation,
        cause: Option<String>,
        messages: [SourceAction; N],
    ) -> Vec<SourceAction> {
        self.state = SourceState::Over { guest, cause };
        let mut actions = vec![SourceAction::Persist];
        actions.extend(messages);
        actions.extend(self.decided());
        actions
    }

    fn decided(&self) -> Vec<SourceAction> {
        match &self.state {
            SourceState::Over { guest, cause } => vec![SourceAction::Decide(Decision {
                guest: *guest,
                cause: cause.clone(),
            })],
            _ => Vec::new(),
        }
    }
}

const SETTLED: SourceAction = SourceAction::Send(SourceMessage::Settled);

fn abort(cause: &str) -> SourceAction {
    let cause = cause.to_owned();
    SourceAction::Send(SourceMessage::Abort { cause })
}

fn in_doubt(cause: String) -> Vec<SourceAction> {
    vec![SourceAction::Decide(Decision {
        guest: GuestLocation::InDoubt,
        cause: Some(cause),
    })]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Details;

    const ACCEPTED: Incarnation = Incarnation([1; 16]);
    const ANOTHER: Incarnation = Incarnation([2; 16]);

    const COMMITTING: SourceState = SourceState::Committing {
        incarnation: Some(ACCEPTED),
        guest_died: false,
    };

    #[test]
    fn a_migration_that_goes_through() {
        let mut source = Source::new(true);
        let told = [
            (prepared(), "persist"),
            (message(DestinationMessage::Loaded), ""),
            (SourceEvent::Stopped, "persist, send commit"),
            (message(DestinationMessage::Starting), ""),
            (running(), "persist, send settled, decide destination"),
            (running(), ""),
        ];
        follow(&mut source, told);
        assert!(matches!(
            source.state(),
            SourceState::Over { cause: None, .. }
        ));
    }

    #[test]
    fn before_the_commit_the_guest_goes_on_at_the_source() {
        let cause = || "enough".to_owned();
        for event in [
            aborted(ANOTHER),
            message(DestinationMessage::Refused { reason: cause() }),
            SourceEvent::Failed { cause: cause() },
            SourceEvent::GaveUp { cause: cause() },
            SourceEvent::NotPersisted { reason: cause() },
        ] {
            let told = [
                (prepared(), "persist"),
                (event, "persist, resume"),
                (
                    SourceEvent::Resumed,
                    "persist, send abort, send settled, decide source",
                ),
            ];
            follow(&mut Source::new(true), told);
        }
        // These decide nothing.
        let told = [running(), unknown(), SourceEvent::Refused].map(|event| (event, ""));
        follow(&mut Source::new(true).direct(), told);
    }

    #[test]
    fn behind_the_commit_only_the_destination_that_accepted_gives_it_back() {
        for (event, actions) in [
            (aborted(ACCEPTED), "persist, resume"),
            (aborted(ANOTHER), "decide in doubt"),
            (unknown(), "decide in doubt"),
            (gave_up(), "decide in doubt"),
            (ended(), "persist, send settled, decide lost"),
            (
                SourceEvent::Failed {
                    cause: String::new(),
                },
                "",
            ),
            (message(DestinationMessage::Receiving), ""),
            (
                message(DestinationMessage::Unclear {
                    reason: String::new(),
                }),
                "",
            ),
            (closed(true), "dial"),
            (SourceEvent::Refused, "dial"),
            (SourceEvent::Connected, "send commit"),
            (SourceEvent::AskAgain, "send commit"),
            // Its entry was not written, so that it has not been sent.
            (not_persisted(), "persist, resume"),
        ] {
            follow(&mut committing(), [(event, actions)]);
        }
    }

    #[test]
    fn a_direct_network_proves_the_end_of_a_destination_whose_messages_all_came() {
        let gone = SourceEvent::Refused;
        let starting = message(DestinationMessage::Starting);
        for (events, actions) in [
            (vec![closed(true)], "persist, resume"),
            (vec![starting, closed(true)], "persist, decide lost"),
            (vec![closed(false)], "dial"),
            (
                vec![closed(false), SourceEvent::Connected, closed(true)],
                "dial",
            ),
            // The connection was closed by this side, and what came on it was not read.
            (vec![gave_up()], "dial"),
        ] {
            let mut source = committing().direct();
            for event in events {
                source.handle(event);
            }
            follow(&mut source, [(gone.clone(), actions)]);
        }
        // What was sent to the process before is not known.
        let mut restored = Source::restore(COMMITTING, true).direct();
        follow(&mut restored, [(gone, "dial")]);
    }

    #[test]
    fn a_source_that_dies_when_all_has_been_sent_commits() {
        let died = |stopped| SourceEvent::GuestDied { stopped };
        let mut source = Source::new(true);
        follow(
            &mut source,
            [
                (prepared(), "persist"),
                (died(true), "persist, send commit"),
            ],
        );
        for (event, actions) in [
            (running(), "persist, send settled, decide destination"),
            (aborted(ACCEPTED), "persist, decide lost"),
            // The only copy may be the destination's, to which nothing has been sent.
            (not_persisted(), "decide in doubt"),
        ] {
            follow(&mut source.clone(), [(event, actions)]);
        }
        let lost = "send abort, persist, decide lost";
        follow(&mut Source::new(true), [(died(true), lost)]);
        follow(
            &mut Source::new(true),
            [(prepared(), "persist"), (died(false), lost)],
        );
        let lost = [
            (died(true), ""),
            (aborted(ACCEPTED), "persist, decide lost"),
        ];
        follow(&mut committing(), lost);
    }

    #[test]
    fn a_guest_that_was_sent_on_from_the_destination_is_not_there() {
        let moved = message(DestinationMessage::MovedOn);
        follow(
            &mut committing(),
            [(moved, "persist, send settled, decide moved on")],
        );
    }

    #[test]
    fn a_guest_that_cannot_go_on_is_in_doubt() {
        let reason = String::new();
        let told = [
            (SourceEvent::NotResumed { reason }, "decide in doubt"),
            (not_persisted(), "resume"),
            (
                SourceEvent::Resumed,
                "persist, send abort, send settled, decide source",
            ),
            (not_persisted(), "decide source"),
        ];
        follow(&mut returning(), told);
        let died = SourceEvent::GuestDied { stopped: true };
        follow(&mut returning(), [(died, "persist, decide lost")]);
    }

    #[test]
    fn a_guest_that_was_handed_over_and_runs_here_is_not_started_there() {
        let begins = [
            (SourceEvent::Resumed, "dial"),
            (SourceEvent::Connected, "send abort"),
            (SourceEvent::AskAgain, "send abort"),
        ];
        for (event, actions) in [
            (running(), "decide in doubt"),
            (ended(), "decide in doubt"),
            (aborted(ANOTHER), "decide in doubt"),
            (aborted(ACCEPTED), "persist, resume"),
        ] {
            let mut source = Source::restore(COMMITTING, true);
            follow(&mut source, begins.clone());
            follow(&mut source, [(event, actions)]);
        }
    }

    #[test]
    fn a_process_that_is_started_again_goes_on() {
        let over = SourceState::Over {
            guest: GuestLocation::Lost,
            cause: None,
        };
        let moving = SourceState::Moving { incarnation: None };
        for (state, actions) in [
            (moving, ""),
            (COMMITTING, "dial"),
            (returning().state, "resume"),
            (over, "decide lost"),
        ] {
            assert_eq!(told(&Source::restore(state, true).go_on()), actions);
        }
    }

    #[test]
    fn a_paused_guest_stays_paused() {
        let mut source = Source::new(false);
        let resume = false;
        let commit = SourceAction::Send(SourceMessage::Commit { resume });
        assert!(source.handle(SourceEvent::Stopped).contains(&commit));
    }

    fn committing() -> Source {
        let mut source = Source::new(true);
        follow(
            &mut source,
            [
                (prepared(), "persist"),
                (SourceEvent::Stopped, "persist, send commit"),
            ],
        );
        assert_eq!(source.state, COMMITTING);
        source
    }

    fn returning() -> Source {
        let cause = "enough".to_owned();
        Source::restore(SourceState::Returning { cause }, true)
    }

    /// Each event, and what it gives to do.
    #[track_caller]
    fn follow<const N: usize>(source: &mut Source, events: [(SourceEvent, &str); N]) {
        for (event, actions) in events {
            let before = source.clone();
            let done = source.handle(event.clone());
            assert_eq!(told(&done), actions, "{event:?} after {before:?}");
        }
    }

    fn told(actions: &[SourceAction]) -> String {
        let told = actions.iter().map(|action| match action {
            SourceAction::Persist => "persist",
            SourceAction::Send(SourceMessage::Commit { .. }) => "send commit",
            SourceAction::Send(SourceMessage::Abort { .. }) => "send abort",
            SourceAction::Send(SourceMessage::Settled) => "send settled",
            SourceAction::Send(_) => "send something",
            SourceAction::Dial => "dial",
            SourceAction::Resume => "resume",
            SourceAction::Decide(decision) => match decision.guest {
                GuestLocation::Source => "decide source",
                GuestLocation::Destination => "decide destination",
                GuestLocation::InDoubt => "decide in doubt",
                GuestLocation::MovedOn => "decide moved on",
                GuestLocation::Lost => "decide lost",
            },
        });
        told.collect::<Vec<_>>().join(", ")
    }

    fn message(message: DestinationMessage) -> SourceEvent {
        SourceEvent::Message(message)
    }

    fn prepared() -> SourceEvent {
        message(DestinationMessage::Prepared {
            protocol: crate::VERSION,
            incarnation: ACCEPTED,
            details: Details::new(),
        })
    }

    fn running() -> SourceEvent {
        let state = "running".to_owned();
        message(DestinationMessage::Running { state })
    }

    fn aborted(incarnation: Incarnation) -> SourceEvent {
        let cause = String::new();
        message(DestinationMessage::Aborted { incarnation, cause })
    }

    fn ended() -> SourceEvent {
        let cause = String::new();
        message(DestinationMessage::Ended { cause })
    }

    fn unknown() -> SourceEvent {
        message(DestinationMessage::Unknown {
            incarnation: ANOTHER,
            reason: String::new(),
        })
    }

    fn closed(complete: bool) -> SourceEvent {
        SourceEvent::Closed { complete }
    }

    fn gave_up() -> SourceEvent {
        let cause = "enough".to_owned();
        SourceEvent::GaveUp { cause }
    }

    fn not_persisted() -> SourceEvent {
        let reason = "no space".to_owned();
        SourceEvent::NotPersisted { reason }
    }
}
