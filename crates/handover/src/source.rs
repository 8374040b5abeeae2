//! The source's side of the hand-over.
//!
//! ```text
//!            Stopped (GuestDied while stopped)                running
//!  Moving ─────────────────────────────> Committing ────────────────> Over(Destination)
//!    │                                       │ │ └── ended, moved-on ──> Over(Lost), Over(MovedOn)
//!    │ Failed, GaveUp, NotPersisted,         │ └── aborted, NotPersisted, ─> Returning ── Resumed ─> Over(Source)
//!    │ aborted, refused                      │     ConnectionRefused if direct
//!    ├─────────────> Returning               └─ no proof: still Committing; this run may end InDoubt
//!    │ GuestDied, FoundSent
//!    └─────────────> Over(Lost), Over(Gone)
//! ```
//!
//! The main transitions: events begin with a capital letter, messages do not. If the guest's VMM has ended, what would lead to Returning
//! leads to Over(Lost).
//!
//! ```text
//!  post-copy:  Moving ── SwitchAsked ──> Switching ── Stopped ──> Committing ── running ──> Supplying ── Supplied ──> Over(Destination)
//! ```
//!
//! Behind post-copy's switch the VMM cannot continue the guest here. Switching is written down before the VMM is asked to switch. A VMM
//! that fails before the switch leads from Switching to Returning, as from Moving.
//!
//! In this attempt, only a `commit` can let the guest run at the destination: see [`SourceState::guest`]. So only Committing is in doubt.

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
    /// A connection broke in a way that may have lost a message of the destination.
    message_lost: bool,
    /// The guest has been seen to run here, although `commit` may have been sent.
    runs_here: bool,
}

/// How far an attempt has come. The source's journal holds this.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "kebab-case")]
#[allow(missing_docs, reason = "a cause and a reason are texts for people")]
pub enum SourceState {
    /// The guest belongs to the source.
    Moving {
        /// Of the destination that has accepted the attempt; `None` until one has.
        incarnation: Option<Incarnation>,
    },
    /// `commit` has been sent, or is about to be.
    Committing {
        /// Of the destination that has accepted the attempt.
        incarnation: Option<Incarnation>,
        /// The source's VMM has ended: the guest cannot resume here.
        guest_died: bool,
        /// The rest of the guest's memory goes by post-copy.
        #[serde(default)]
        post_copy: bool,
    },
    /// The VMM has been asked, or is about to be asked, to switch to post-copy.
    Switching {
        /// Of the destination that has accepted the attempt.
        incarnation: Option<Incarnation>,
    },
    /// The guest runs at the destination, and fetches the rest of its memory from here by post-copy.
    Supplying,
    /// The destination has never run the guest. The guest resumes here.
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
        self.outcome().is_some()
    }

    /// Where the guest is, once nothing is left to do.
    pub fn outcome(&self) -> Option<GuestLocation> {
        match self {
            Self::Over { guest, .. } => Some(*guest),
            _ => None,
        }
    }

    /// Whether `aborted` from this destination proves that the guest has never run there. Once a destination has accepted the
    /// attempt, only that one can prove it. In Returning it is already proven.
    pub fn accepts_abort_of(&self, from: Incarnation) -> bool {
        match self {
            Self::Moving { incarnation: None } | Self::Returning { .. } => true,
            Self::Moving { incarnation }
            | Self::Switching { incarnation }
            | Self::Committing { incarnation, .. } => *incarnation == Some(from),
            Self::Supplying | Self::Over { .. } => false,
        }
    }

    /// Where the guest is, as far as this is known: until a `commit` may have been sent, at the source.
    pub fn guest(&self) -> GuestLocation {
        match self {
            Self::Moving { .. } | Self::Switching { .. } | Self::Returning { .. } => {
                GuestLocation::Source
            }
            Self::Committing { .. } => GuestLocation::InDoubt,
            Self::Supplying => GuestLocation::Destination,
            Self::Over { guest, .. } => *guest,
        }
    }
}

/// The guest's last known state before its VMM ended. The destination may hold a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LastSeen {
    /// The guest ran at the source until its VMM ended. The destination's copy is incomplete or older.
    Running,
    /// The guest was stopped, for the switchover or by its owner, and did not run again before its VMM ended. If the destination's
    /// copy is complete, that copy is the guest.
    Stopped,
    /// No source process was following the guest when its VMM ended.
    Unknown,
}

/// What happens to a source.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "a cause and a reason are texts for people")]
pub enum SourceEvent {
    /// A message of the destination, on a connection of this attempt.
    Message(DestinationMessage),
    /// A connection has been opened, after [`SourceAction::Dial`].
    Connected,
    /// The connection has ended.
    Closed {
        /// The destination's operating system closed the connection, and everything that the destination had sent has been received.
        /// Otherwise the connection was reset or broke off, or the source closed it.
        complete: bool,
    },
    /// The destination's address refuses connections.
    ConnectionRefused,
    /// It is time to ask again: no answer came, or an answer that decides nothing.
    AskAgain,
    /// This run of the source stops asking: it was cancelled, or the time is over.
    GaveUp { cause: String },
    /// The guest's owner, or its VMM, has paused or continued it, apart from the switchover. The guest shall end up in this
    /// state, here or there.
    Wanted {
        /// Whether it runs.
        running: bool,
    },
    /// The VMM is to switch to post-copy. It is asked to only once that is written down.
    SwitchAsked,
    /// The destination has received all memory that post-copy had left here.
    Supplied,
    /// The guest has stopped for good and the destination has received all of it, or all that it needs to run under post-copy, in the migration of this attempt: a process
    /// has followed the migration to its end, or a person vouches for it.
    Stopped,
    /// The VMM reports that the guest has stopped for good and has been sent, but no process of this attempt has seen that. The
    /// guest may have run meanwhile, and been moved by another tool.
    FoundSent,
    /// The migration has failed or was cancelled before [`SourceEvent::Stopped`].
    Failed { cause: String },
    /// The source's VMM has ended; its process is gone, which is proven.
    GuestDied {
        /// How it was before.
        last: LastSeen,
    },
    /// After [`SourceAction::Resume`]: the guest is here, running if it was to run. Also reported when the guest is found running
    /// here without a `Resume`.
    Resumed,
    /// The guest could not be resumed, or this is not known.
    NotResumed { reason: String },
    /// The journal could not be written and is unchanged. Nothing that was to follow
    /// [`SourceAction::Persist`] has been done.
    NotPersisted { reason: String },
}

/// An action of a source. Actions are carried out in order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SourceAction {
    /// Write [`Source::state`] and [`Source::resume`] to the journal, durably. On failure, skip all pending actions and report
    /// [`SourceEvent::NotPersisted`].
    Persist,
    /// Send this on the open connection. Success proves nothing. Without a connection, report an incomplete
    /// [`SourceEvent::Closed`].
    Send(SourceMessage),
    /// After a pause, open a new connection of this attempt; report [`SourceEvent::Connected`] or [`SourceEvent::ConnectionRefused`].
    Dial,
    /// Give the guest back to its owner here, with everything that belongs to it: running or paused, by
    /// [`Source::resume`]. Report the result.
    Resume,
    /// This run is over. Unless the state is [`SourceState::Over`], another run may continue the attempt.
    Decide(Decision),
}

impl Source {
    /// A new attempt. `resume` is whether the guest shall run: as it does at the source, see [`SourceEvent::Wanted`].
    pub fn new(resume: bool) -> Self {
        Self {
            message_lost: false,
            ..Self::restore(SourceState::Moving { incarnation: None }, resume)
        }
    }

    /// Goes on from a journal: from its state and [`Source::resume`]. Report first what has become of the guest meanwhile, as
    /// [`SourceDriver::take_up`](crate::SourceDriver::take_up) does.
    pub fn restore(state: SourceState, resume: bool) -> Self {
        Self {
            state,
            resume,
            direct: false,
            started: false,
            // The destination may have sent messages to the earlier process that are not in the journal.
            message_lost: true,
            runs_here: false,
        }
    }

    /// Declares that nothing between the two processes can accept, close or refuse a connection on behalf of the
    /// destination: no tunnel, no proxy, no address translation. Then a destination that has closed all its
    /// connections and no longer listens has ended.
    #[must_use]
    pub fn direct(mut self) -> Self {
        self.direct = true;
        self
    }

    /// How far it has come, for the journal.
    pub fn state(&self) -> &SourceState {
        &self.state
    }

    /// Whether the guest shall run, for the journal.
    pub fn resume(&self) -> bool {
        self.resume
    }

    /// Whether the guest has been seen to run here although `commit` may have been sent.
    pub fn runs_here(&self) -> bool {
        self.runs_here
    }

    /// What to do after [`Source::restore`].
    pub fn go_on(&self) -> Vec<SourceAction> {
        match &self.state {
            SourceState::Moving { .. } | SourceState::Switching { .. } | SourceState::Supplying => {
                Vec::new()
            }
            SourceState::Committing { .. } => vec![SourceAction::Dial],
            SourceState::Returning { .. } => vec![SourceAction::Resume],
            SourceState::Over { .. } => self.decided(),
        }
    }

    /// Takes an event and returns what to do.
    pub fn handle(&mut self, event: SourceEvent) -> Vec<SourceAction> {
        match self.state.clone() {
            SourceState::Moving { incarnation } => self.moving(event, incarnation),
            SourceState::Switching { incarnation } => self.switching(event, incarnation),
            SourceState::Committing {
                incarnation,
                guest_died,
                post_copy,
            } => self.committing(event, incarnation, guest_died, post_copy),
            SourceState::Supplying => self.supplying(event),
            SourceState::Returning { cause } => self.returning(event, cause),
            SourceState::Over { .. } => match event {
                // The decision stands. Without a journal entry, `settled` must not be sent: the destination keeps its own.
                SourceEvent::NotPersisted { .. } => self.decided(),
                // Late answers.
                _ => Vec::new(),
            },
        }
    }

    /// Until `commit` is sent, the guest belongs to the source.
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
            SourceEvent::Wanted { running } => {
                self.resume = running;
                vec![SourceAction::Persist]
            }
            // No destination has accepted the attempt, so nothing of it can have been sent. A person who vouched for `Stopped` is
            // mistaken.
            SourceEvent::Stopped | SourceEvent::FoundSent if incarnation.is_none() => {
                let cause = "the source's VMM has sent the guest in another migration; this attempt had not begun to send";
                self.over(GuestLocation::Gone, Some(cause.to_owned()), [])
            }
            SourceEvent::SwitchAsked => {
                self.state = SourceState::Switching { incarnation };
                vec![SourceAction::Persist]
            }
            SourceEvent::Stopped => self.commit(incarnation, false, false),
            SourceEvent::FoundSent => unconfirmed(),
            SourceEvent::GuestDied { last } => self.died(last, incarnation),
            SourceEvent::Failed { cause }
            | SourceEvent::GaveUp { cause }
            | SourceEvent::NotPersisted { reason: cause } => self.fail(cause),
            _ => Vec::new(),
        }
    }

    /// The VMM switches, completes or fails. Whatever else happens, only what it has done decides.
    fn switching(
        &mut self,
        event: SourceEvent,
        incarnation: Option<Incarnation>,
    ) -> Vec<SourceAction> {
        match event {
            SourceEvent::Stopped => self.commit(incarnation, false, true),
            SourceEvent::GuestDied {
                last: LastSeen::Stopped,
            } => self.commit(incarnation, true, true),
            SourceEvent::Failed { .. }
            | SourceEvent::FoundSent
            | SourceEvent::GuestDied { .. }
            | SourceEvent::Wanted { .. } => self.moving(event, incarnation),
            _ => Vec::new(),
        }
    }

    /// The guest is the destination's, and part of its memory is here.
    fn supplying(&mut self, event: SourceEvent) -> Vec<SourceAction> {
        match event {
            SourceEvent::Supplied => self.over(GuestLocation::Destination, None, [SETTLED]),
            // The destination may have had all memory just before, and only a look there can tell.
            SourceEvent::GuestDied { .. } => {
                self.over(GuestLocation::Destination, Some(incomplete()), [])
            }
            SourceEvent::Message(DestinationMessage::Ended { cause }) => {
                self.over(GuestLocation::Lost, Some(cause), [SETTLED])
            }
            SourceEvent::Message(DestinationMessage::MovedOn) => self.moved_on(),
            SourceEvent::Connected | SourceEvent::AskAgain => vec![self.commit_or_abort()],
            SourceEvent::Closed { .. } | SourceEvent::ConnectionRefused => {
                vec![SourceAction::Dial]
            }
            _ => Vec::new(),
        }
    }

    /// The guest runs nowhere, and will not by itself: no `commit` has been sent.
    fn died(&mut self, last: LastSeen, incarnation: Option<Incarnation>) -> Vec<SourceAction> {
        let cause = "the source's VMM has ended".to_owned();
        match last {
            LastSeen::Stopped if incarnation.is_some() => self.commit(incarnation, true, false),
            LastSeen::Unknown if incarnation.is_some() => {
                self.end_without_message(GuestLocation::Gone, cause)
            }
            // Nothing was sent for this attempt, and it is unknown what became of the guest.
            LastSeen::Unknown => self.over(GuestLocation::Gone, Some(cause), []),
            _ => {
                let abort = abort(&cause);
                let mut actions = self.over(GuestLocation::Lost, Some(cause), []);
                actions.insert(0, abort);
                actions
            }
        }
    }

    /// Sends the destination no message: its copy may be all that is left, and a person has to decide. An incomplete
    /// copy ends there by itself.
    fn end_without_message(&mut self, guest: GuestLocation, cause: String) -> Vec<SourceAction> {
        let cause = format!(
            "{cause}; if the source's VMM ended in the switchover, the destination has the whole guest and keeps it paused"
        );
        self.over(guest, Some(cause), [])
    }

    fn commit(
        &mut self,
        incarnation: Option<Incarnation>,
        guest_died: bool,
        post_copy: bool,
    ) -> Vec<SourceAction> {
        self.state = SourceState::Committing {
            incarnation,
            guest_died,
            post_copy,
        };
        vec![SourceAction::Persist, self.commit_or_abort()]
    }

    /// `commit`, which also asks for the outcome when it is repeated. If the guest runs here, `abort`: it must not be started there.
    fn commit_or_abort(&self) -> SourceAction {
        if self.runs_here {
            return abort("the guest runs at the source");
        }
        let resume = self.resume;
        SourceAction::Send(SourceMessage::Commit { resume })
    }

    /// The guest, which may be paused, resumes first. Notifying the destination can wait.
    fn fail(&mut self, cause: String) -> Vec<SourceAction> {
        self.state = SourceState::Returning { cause };
        vec![SourceAction::Persist, SourceAction::Resume]
    }

    /// `commit` may have been sent: `aborted` counts only from the destination that accepted the attempt. The other answers say that the
    /// guest has run, whoever gives them.
    fn committing(
        &mut self,
        event: SourceEvent,
        accepted_by: Option<Incarnation>,
        guest_died: bool,
        post_copy: bool,
    ) -> Vec<SourceAction> {
        match event {
            SourceEvent::Message(message) => self.answered(message, guest_died, post_copy),
            SourceEvent::Connected | SourceEvent::AskAgain => vec![self.commit_or_abort()],
            SourceEvent::Closed { complete } => {
                self.message_lost |= !complete;
                vec![SourceAction::Dial]
            }
            SourceEvent::ConnectionRefused if !self.direct || self.message_lost => {
                vec![SourceAction::Dial]
            }
            SourceEvent::ConnectionRefused if self.started => {
                let cause = "the destination began to run the guest, and has ended".to_owned();
                self.over(GuestLocation::Lost, Some(cause), [])
            }
            SourceEvent::ConnectionRefused => {
                let cause = "the destination has ended before it ran the guest".to_owned();
                self.take_back(cause, guest_died)
            }
            SourceEvent::GaveUp { cause } => {
                // The connection is not read from here on.
                self.message_lost = true;
                in_doubt(cause)
            }
            // The entry that `commit` depends on was not written, so `commit` has not been sent.
            SourceEvent::NotPersisted { reason } if guest_died => {
                self.end_without_message(GuestLocation::Lost, reason)
            }
            // The VMM cannot continue the guest. The journal's entry remains true, and another run tries again.
            SourceEvent::NotPersisted { reason } if post_copy => {
                self.state = SourceState::Switching {
                    incarnation: accepted_by,
                };
                undecided(GuestLocation::Unconfirmed, reason)
            }
            SourceEvent::NotPersisted { reason } => self.fail(reason),
            SourceEvent::GuestDied { .. } => {
                // Not persisted here: a restored source finds out again that its VMM has ended.
                self.state = SourceState::Committing {
                    incarnation: accepted_by,
                    guest_died: true,
                    post_copy,
                };
                Vec::new()
            }
            SourceEvent::Resumed => {
                self.runs_here = true;
                vec![SourceAction::Dial]
            }
            SourceEvent::Wanted { .. }
            | SourceEvent::SwitchAsked
            | SourceEvent::Supplied
            | SourceEvent::Stopped
            | SourceEvent::FoundSent
            | SourceEvent::Failed { .. }
            | SourceEvent::NotResumed { .. } => Vec::new(),
        }
    }

    fn answered(
        &mut self,
        message: DestinationMessage,
        guest_died: bool,
        post_copy: bool,
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
            DestinationMessage::Running { .. } if post_copy && !guest_died => {
                self.state = SourceState::Supplying;
                vec![SourceAction::Persist]
            }
            DestinationMessage::Running { .. } => {
                let cause = post_copy.then(incomplete);
                self.over(GuestLocation::Destination, cause, [SETTLED])
            }
            DestinationMessage::Aborted { incarnation, cause }
                if self.state.accepts_abort_of(incarnation) =>
            {
                self.take_back(cause, guest_died)
            }
            DestinationMessage::Aborted { .. } => in_doubt(
                "the answer came from another destination than the one that accepted the attempt"
                    .into(),
            ),
            DestinationMessage::Ended { cause } => {
                self.over(GuestLocation::Lost, Some(cause), [SETTLED])
            }
            DestinationMessage::MovedOn => self.moved_on(),
            DestinationMessage::Unknown { reason, .. } => in_doubt(reason),
            // Does not answer the question, which is asked again in a while.
            _ => Vec::new(),
        }
    }

    fn moved_on(&mut self) -> Vec<SourceAction> {
        let cause = "the destination has sent the guest on".to_owned();
        self.over(GuestLocation::MovedOn, Some(cause), [SETTLED])
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
            // A destination that does not know the outcome ends its VMM on `abort`. One that knows it drops its journal entry on
            // `settled`.
            SourceEvent::Resumed => {
                let abort = abort(&cause);
                self.over(GuestLocation::Source, Some(cause), [abort, SETTLED])
            }
            // The guest is here and nowhere else. Another run tries again.
            SourceEvent::NotResumed { reason } => undecided(
                GuestLocation::Source,
                format!("{cause}; then the guest could not be resumed: {reason}"),
            ),
            SourceEvent::FoundSent => unconfirmed(),
            SourceEvent::Wanted { running } => {
                self.resume = running;
                Vec::new()
            }
            SourceEvent::GuestDied {
                last: LastSeen::Unknown,
            } => self.over(GuestLocation::Gone, Some(cause), []),
            SourceEvent::GuestDied { .. } => self.over(GuestLocation::Lost, Some(cause), []),
            // The guest resumes all the same. A later run finds it running.
            SourceEvent::NotPersisted { .. } if self.resume => vec![SourceAction::Resume],
            // A later run could not see that a paused guest has its disks back, and might hand it over.
            SourceEvent::NotPersisted { reason } => undecided(
                GuestLocation::Source,
                format!("{cause}; then the journal could not be written: {reason}"),
            ),
            _ => Vec::new(),
        }
    }

    /// Ends the attempt. The messages are sent after the journal's entry is written.
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

fn incomplete() -> String {
    "the source's VMM has ended, and the destination may not have had all of the guest's memory; without it, the guest stands still"
        .to_owned()
}

fn unconfirmed() -> Vec<SourceAction> {
    let cause = "the source's VMM has sent the guest, and it is not recorded that it did so for this attempt";
    undecided(GuestLocation::Unconfirmed, cause.to_owned())
}

fn in_doubt(cause: String) -> Vec<SourceAction> {
    undecided(GuestLocation::InDoubt, cause)
}

/// Ends this run, which has not ended the attempt.
fn undecided(guest: GuestLocation, cause: String) -> Vec<SourceAction> {
    let cause = Some(cause);
    vec![SourceAction::Decide(Decision { guest, cause })]
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
        post_copy: false,
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
        let told = [running(), unknown(), SourceEvent::ConnectionRefused].map(|event| (event, ""));
        follow(&mut Source::new(true).direct(), told);
    }

    fn died_when(last: LastSeen) -> SourceEvent {
        SourceEvent::GuestDied { last }
    }

    #[test]
    fn post_copy_is_over_when_the_destination_has_all_memory() {
        let told = [
            (prepared(), "persist"),
            (SourceEvent::SwitchAsked, "persist"),
            (SourceEvent::Stopped, "persist, send commit"),
            (running(), "persist"),
            (not_persisted(), ""),
            (SourceEvent::AskAgain, "send commit"),
            (running(), ""),
            (
                SourceEvent::Supplied,
                "persist, send settled, decide destination",
            ),
        ];
        follow(&mut Source::new(true), told);
        for (event, actions) in [
            (ended(), "persist, send settled, decide lost"),
            (died_when(LastSeen::Stopped), "persist, decide destination"),
            (died_when(LastSeen::Unknown), "persist, decide destination"),
        ] {
            let mut source = Source::restore(SourceState::Supplying, true);
            assert_eq!(source.state().guest(), GuestLocation::Destination);
            follow(&mut source, [(event, actions)]);
        }
    }

    /// What the VMM has done decides, and nothing else.
    #[test]
    fn a_switch_that_fails_leaves_the_guest_at_the_source() {
        let switching = || {
            Source::restore(
                SourceState::Switching {
                    incarnation: Some(ACCEPTED),
                },
                true,
            )
        };
        for event in [gave_up(), aborted(ACCEPTED), closed(true), not_persisted()] {
            follow(&mut switching(), [(event, "")]);
        }
        let failed = SourceEvent::Failed {
            cause: String::new(),
        };
        let told = [
            (failed, "persist, resume"),
            (
                SourceEvent::Resumed,
                "persist, send abort, send settled, decide source",
            ),
        ];
        follow(&mut switching(), told);
        let told = [
            (SourceEvent::Stopped, "persist, send commit"),
            (not_persisted(), "decide unconfirmed"),
            (SourceEvent::Stopped, "persist, send commit"),
        ];
        follow(&mut switching(), told);
        // It may have sent all memory before.
        let told = [
            (died_when(LastSeen::Stopped), "persist, send commit"),
            (running(), "persist, send settled, decide destination"),
        ];
        follow(&mut switching(), told);
        // The destination has given up before it had what it needs, and the VMM cannot continue the guest here.
        let told = [
            (SourceEvent::Stopped, "persist, send commit"),
            (aborted(ACCEPTED), "persist, resume"),
            (died_when(LastSeen::Stopped), "persist, decide lost"),
        ];
        follow(&mut switching(), told);
    }

    #[test]
    fn after_commit_only_the_accepting_destination_can_return_the_guest() {
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
            (SourceEvent::ConnectionRefused, "dial"),
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
        let gone = SourceEvent::ConnectionRefused;
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
        // The destination may have sent messages to the earlier process that are not in the journal.
        let mut restored = Source::restore(COMMITTING, true).direct();
        follow(&mut restored, [(gone, "dial")]);
    }

    #[test]
    fn a_guest_that_dies_after_all_was_sent_is_committed() {
        let died = |last| SourceEvent::GuestDied { last };
        let mut source = Source::new(true);
        follow(
            &mut source,
            [
                (prepared(), "persist"),
                (died(LastSeen::Stopped), "persist, send commit"),
            ],
        );
        for (event, actions) in [
            (running(), "persist, send settled, decide destination"),
            (aborted(ACCEPTED), "persist, decide lost"),
            // The only copy may be the destination's, so it gets no `abort`.
            (not_persisted(), "persist, decide lost"),
        ] {
            follow(&mut source.clone(), [(event, actions)]);
        }
        let lost = "send abort, persist, decide lost";
        follow(&mut Source::new(true), [(died(LastSeen::Stopped), lost)]);
        let gone = (died(LastSeen::Unknown), "persist, decide gone");
        follow(&mut Source::new(true), [gone]);
        for (last, actions) in [
            (LastSeen::Running, lost),
            // Nobody has seen it: what the destination has is not to be ended.
            (LastSeen::Unknown, "persist, decide gone"),
        ] {
            let told = [(prepared(), "persist"), (died(last), actions)];
            follow(&mut Source::new(true), told);
        }
        let lost = [
            (died(LastSeen::Stopped), ""),
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
    fn a_guest_that_cannot_go_on_is_at_the_source_all_the_same() {
        let reason = String::new();
        let told = [
            (SourceEvent::NotResumed { reason }, "decide source"),
            (not_persisted(), "resume"),
            (
                SourceEvent::Resumed,
                "persist, send abort, send settled, decide source",
            ),
            (not_persisted(), "decide source"),
        ];
        follow(&mut returning(), told);
        // A paused guest does not get its disks before that is recorded: a later run could not see that it came back.
        let mut paused = Source::restore(returning().state, false);
        follow(&mut paused, [(not_persisted(), "decide source")]);
        for (last, actions) in [
            (LastSeen::Stopped, "persist, decide lost"),
            // The guest may have resumed, and another tool may have moved it.
            (LastSeen::Unknown, "persist, decide gone"),
        ] {
            follow(
                &mut returning(),
                [(SourceEvent::GuestDied { last }, actions)],
            );
        }
    }

    #[test]
    fn a_guest_found_sent_needs_confirmation() {
        let moving = SourceState::Moving {
            incarnation: Some(ACCEPTED),
        };
        for state in [moving.clone(), returning().state] {
            let mut source = Source::restore(state, true);
            let found = (SourceEvent::FoundSent, "decide unconfirmed");
            follow(&mut source, [found.clone(), found]);
        }
        let mut source = Source::restore(moving, true);
        follow(
            &mut source,
            [(SourceEvent::Stopped, "persist, send commit")],
        );
        // Before a destination has accepted the attempt, nothing is sent for it.
        let begun = SourceState::Moving { incarnation: None };
        for event in [SourceEvent::FoundSent, SourceEvent::Stopped] {
            let mut source = Source::restore(begun.clone(), true);
            follow(&mut source, [(event, "persist, decide gone")]);
        }
    }

    #[test]
    fn only_a_commit_puts_the_guest_in_doubt() {
        let over = |guest| SourceState::Over { guest, cause: None };
        for (state, guest) in [
            (
                SourceState::Moving {
                    incarnation: Some(ACCEPTED),
                },
                GuestLocation::Source,
            ),
            (returning().state, GuestLocation::Source),
            (COMMITTING, GuestLocation::InDoubt),
            (over(GuestLocation::Lost), GuestLocation::Lost),
        ] {
            assert_eq!(state.guest(), guest, "{state:?}");
        }
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
        follow(&mut source, [(prepared(), "persist")]);
        let commit = |resume| SourceAction::Send(SourceMessage::Commit { resume });
        assert!(source.handle(SourceEvent::Stopped).contains(&commit(false)));
        // The guest ends up as its owner last wanted it.
        for wishes in [vec![false], vec![false, true], vec![true, false]] {
            let mut source = Source::new(true);
            follow(&mut source, [(prepared(), "persist")]);
            for running in &wishes {
                follow(
                    &mut source,
                    [(SourceEvent::Wanted { running: *running }, "persist")],
                );
            }
            let last = *wishes.last().unwrap();
            assert_eq!(source.resume(), last);
            assert!(source.handle(SourceEvent::Stopped).contains(&commit(last)));
            // Too late.
            follow(&mut source, [(SourceEvent::Wanted { running: !last }, "")]);
            assert_eq!(source.resume(), last);
        }
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

    /// Each event, and the actions that follow.
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
                GuestLocation::Gone => "decide gone",
                GuestLocation::Unconfirmed => "decide unconfirmed",
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

    /// What `settle` relies on, as the machine does.
    #[test]
    fn abort_counts_from_the_destination_that_accepted() {
        let moving = |incarnation| SourceState::Moving { incarnation };
        let cause = String::new();
        let over = SourceState::Over {
            guest: GuestLocation::Source,
            cause: None,
        };
        for (state, from, counts) in [
            (moving(None), ANOTHER, true),
            (moving(Some(ACCEPTED)), ACCEPTED, true),
            (moving(Some(ACCEPTED)), ANOTHER, false),
            (COMMITTING, ACCEPTED, true),
            (COMMITTING, ANOTHER, false),
            (SourceState::Returning { cause }, ANOTHER, true),
            (over, ACCEPTED, false),
        ] {
            assert_eq!(state.accepts_abort_of(from), counts, "{state:?}");
        }
    }
}
