//! The destination's side of the hand-over.
//!
//! ```text
//!            Loaded              commit               Started
//!  Receiving ──────> Loaded ───────────────> Starting ──────> Running ── Died ─> Ended
//!      │ abort; Failed, │ Failed, abort         │ │                                ▲
//!      │ then NotStarted│                       │ └──────── Died ──────────────────┘
//!      │                │                       │ NotStarted, the first time
//!      └────────────────┴──────> Aborting <─────┘
//!                                    │ Died: its VMM has ended, which is proven
//!                                    └────────> Aborted
//! ```
//!
//! A VMM whose connections break may have loaded all of the guest just before, and have the only copy. So it is looked at before it is
//! ended, unless the source gives the attempt up.
//!
//! Under post-copy, `Switched` takes the place of `Loaded`: what the guest needs to run is here, and its source cannot continue it. From
//! then on, only the source's `abort` gives the guest up.

use serde::{Deserialize, Serialize};

use crate::{DestinationMessage, GuestLocation, Incarnation, SourceMessage};

/// The destination of one attempt.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Destination {
    incarnation: Incarnation,
    state: DestinationState,
    /// A `commit` that came before everything was loaded: whether the guest shall run.
    commit: Option<bool>,
    /// An earlier action may have told the guest to run, so that a refusal proves nothing.
    told: bool,
    /// Nothing more comes in, for this reason. It is not known yet whether everything had been loaded before.
    cut: Option<String>,
    /// [`DestinationAction::Look`], [`DestinationAction::Run`] or [`DestinationAction::Check`] is being carried out.
    looking: bool,
    /// The answer that was just observed, while the journal is being written.
    seen: Option<DestinationMessage>,
}

/// How far an attempt has come. The destination's journal holds this.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "kebab-case")]
#[allow(missing_docs, reason = "a cause and a reason are texts for people")]
pub enum DestinationState {
    /// The guest is being received.
    Receiving,
    /// All of the guest is here, or all that it needs to run under post-copy, and it does not run.
    Loaded {
        /// The rest of its memory comes by post-copy.
        #[serde(default)]
        post_copy: bool,
    },
    /// The guest belongs to the destination, and is being started.
    Starting {
        /// Whether it shall run. Otherwise it stays paused.
        resume: bool,
        /// The rest of its memory comes by post-copy.
        #[serde(default)]
        post_copy: bool,
    },
    /// The guest has been observed here: continued, or paused if it was paused at the source.
    Running,
    /// The guest was here, or may have been, and its VMM has ended.
    Ended { cause: String },
    /// The guest will never run here. Its VMM is being ended.
    Aborting { cause: String },
    /// The guest has never run here, and its VMM has ended.
    Aborted { cause: String },
}

impl DestinationState {
    /// Whether nothing is left to do.
    pub fn is_over(&self) -> bool {
        self.outcome().is_some()
    }

    /// Where the guest is, once nothing is left to do.
    pub fn outcome(&self) -> Option<GuestLocation> {
        match self {
            Self::Running => Some(GuestLocation::Destination),
            Self::Ended { .. } => Some(GuestLocation::Lost),
            Self::Aborted { .. } => Some(GuestLocation::Source),
            _ => None,
        }
    }
}

/// What happens to a destination.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "a cause and a reason are texts for people")]
pub enum DestinationEvent {
    /// A message of the source, on a connection of this attempt.
    Message(SourceMessage),
    /// All of the guest has been loaded. It does not run.
    Loaded,
    /// The source has switched to post-copy, and all that the guest needs to run has been loaded. It does not run.
    Switched,
    /// A `commit` has waited long enough for [`DestinationEvent::Loaded`] and is to be answered.
    StillReceiving,
    /// Nothing more will come, or the guest is not wanted: the connections broke, loading failed, the migration was cancelled,
    /// the source was silent for too long.
    Failed { cause: String },
    /// The guest has been observed here, continued, or paused if it was paused at the source. It has run, even if something
    /// has stopped it since it was continued (a full disk, a panic).
    Started {
        /// The VMM's name for its state.
        state: String,
    },
    /// The guest was here, and has been sent on to another host since.
    MovedOn,
    /// The guest was not told to run, or failed in a way that proves it never ran. Also if the VMM had ended
    /// before [`DestinationAction::Run`] reached it; [`DestinationEvent::Died`] follows then. After [`DestinationAction::Look`]:
    /// the guest is not all here.
    NotStarted { cause: String },
    /// The guest was told to run, or queried, and it is not known whether it runs, or is all here.
    Unclear { reason: String },
    /// The VMM's process is proven to have ended. While [`DestinationAction::Look`], [`DestinationAction::Run`] or
    /// [`DestinationAction::Check`] is being carried out, only that action reports what it finds.
    Died { cause: String },
    /// Its VMM could not be ended, after [`DestinationAction::End`].
    NotEnded { reason: String },
    /// The journal could not be written and is unchanged. Nothing that was to follow
    /// [`DestinationAction::Persist`] has been done.
    NotPersisted { reason: String },
}

/// An action of a destination. Actions are carried out in order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum DestinationAction {
    /// Write [`Destination::state`] to the journal, durably. On failure, skip all pending actions and report
    /// [`DestinationEvent::NotPersisted`].
    Persist,
    /// Send this on every control connection of this attempt. Success proves nothing.
    Send(DestinationMessage),
    /// Nothing more comes in. Find out whether all of the guest has been loaded, change nothing, and report `Loaded`, `Switched`,
    /// `NotStarted`, `Unclear` or `Died`.
    Look,
    /// Give the guest what belongs to it (its disks) and, if `resume`, continue it, unless that was done before. Report
    /// [`DestinationEvent::Started`], `MovedOn`, `NotStarted`, `Unclear` or `Died`.
    Run {
        /// Whether it shall run.
        resume: bool,
    },
    /// Find out what became of the guest, change nothing, and report `Started`, `MovedOn`, `Unclear` or `Died`. In the state
    /// [`DestinationState::Starting`], a guest that has not been continued is `Unclear`: only `Run` starts it.
    Check,
    /// End its VMM and report [`DestinationEvent::Died`] when it has ended, or
    /// [`DestinationEvent::NotEnded`].
    End,
    /// The source will not ask again. The attempt may be forgotten.
    Forget,
}

impl Destination {
    /// A new attempt, accepted in the name of `incarnation`.
    pub fn new(incarnation: Incarnation) -> Self {
        Self {
            incarnation,
            state: DestinationState::Receiving,
            commit: None,
            told: false,
            cut: None,
            looking: false,
            seen: None,
        }
    }

    /// Continues from a journal: the `incarnation` that accepted the attempt, and its recorded state.
    pub fn restore(incarnation: Incarnation, state: DestinationState) -> Self {
        Self {
            told: matches!(
                state,
                DestinationState::Starting { .. } | DestinationState::Running
            ),
            state,
            ..Self::new(incarnation)
        }
    }

    /// What to do after [`Destination::restore`]. A guest that was being received went to a process that is gone.
    pub fn go_on(&mut self) -> Vec<DestinationAction> {
        match &self.state {
            DestinationState::Receiving => self.cut("the destination's process was ended".into()),
            DestinationState::Aborting { .. } => vec![DestinationAction::End],
            // A guest that was to be started is started now. Others are looked at when the source asks.
            DestinationState::Starting { resume, .. } => {
                let resume = *resume;
                self.looking = true;
                vec![DestinationAction::Run { resume }]
            }
            _ => Vec::new(),
        }
    }

    /// How far it has come, for the journal.
    pub fn state(&self) -> &DestinationState {
        &self.state
    }

    /// The destination that accepted the attempt.
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// As [`DestinationState::is_over`].
    pub fn is_over(&self) -> bool {
        self.state.is_over()
    }

    /// Whether nothing more comes in, and it is not known yet whether everything had been loaded before.
    pub fn is_cut(&self) -> bool {
        self.cut.is_some()
    }

    /// Takes an event and returns what to do.
    pub fn handle(&mut self, event: DestinationEvent) -> Vec<DestinationAction> {
        let seen = self.seen.take();
        match event {
            DestinationEvent::Message(SourceMessage::Commit { resume }) => self.commit(resume),
            DestinationEvent::Message(SourceMessage::Abort { cause }) => self.aborted(cause),
            DestinationEvent::Message(SourceMessage::Settled) if self.is_over() => {
                vec![DestinationAction::Forget]
            }
            DestinationEvent::Message(_) => Vec::new(),
            DestinationEvent::Loaded => self.loaded(false),
            DestinationEvent::Switched => self.loaded(true),
            DestinationEvent::StillReceiving => match &self.state {
                DestinationState::Receiving if self.commit.is_some() => {
                    vec![DestinationAction::Send(DestinationMessage::Receiving)]
                }
                _ => Vec::new(),
            },
            DestinationEvent::Failed { cause } => match &self.state {
                DestinationState::Receiving => self.cut(cause),
                DestinationState::Loaded { post_copy: false } => self.abort(cause),
                _ => Vec::new(),
            },
            DestinationEvent::Started { state } => {
                self.started(DestinationMessage::Running { state })
            }
            DestinationEvent::MovedOn => self.started(DestinationMessage::MovedOn),
            DestinationEvent::NotStarted { cause } => self.not_started(cause),
            DestinationEvent::Unclear { reason } => {
                self.looking = false;
                unclear(reason)
            }
            DestinationEvent::Died { cause } => self.died(cause),
            DestinationEvent::NotEnded { reason } => match &self.state {
                DestinationState::Aborting { cause } => unclear(format!(
                    "{cause}; the destination's VMM is still there: {reason}"
                )),
                _ => Vec::new(),
            },
            DestinationEvent::NotPersisted { reason } => self.not_persisted(reason, seen),
        }
    }

    fn commit(&mut self, resume: bool) -> Vec<DestinationAction> {
        match &self.state {
            DestinationState::Receiving => {
                self.commit = Some(resume);
                match self.cut {
                    Some(_) => self.look(),
                    None => Vec::new(),
                }
            }
            DestinationState::Loaded { post_copy } => self.start(resume, *post_copy),
            // The guest belongs here. The present observation is the answer.
            DestinationState::Starting { resume, .. } if !self.looking => {
                let resume = *resume;
                self.looking = true;
                self.told = true;
                vec![DestinationAction::Run { resume }]
            }
            _ => self.asked(),
        }
    }

    fn start(&mut self, resume: bool, post_copy: bool) -> Vec<DestinationAction> {
        self.state = DestinationState::Starting { resume, post_copy };
        self.commit = None;
        self.looking = true;
        vec![
            DestinationAction::Persist,
            DestinationAction::Send(DestinationMessage::Starting),
            DestinationAction::Run { resume },
        ]
    }

    fn aborted(&mut self, cause: String) -> Vec<DestinationAction> {
        match &self.state {
            DestinationState::Receiving | DestinationState::Loaded { .. } => self.abort(cause),
            _ => self.asked(),
        }
    }

    /// What to do for a source that asks for the outcome.
    fn asked(&mut self) -> Vec<DestinationAction> {
        match &self.state {
            DestinationState::Starting { .. } | DestinationState::Running if !self.looking => {
                self.looking = true;
                vec![DestinationAction::Check]
            }
            DestinationState::Aborting { .. } => vec![DestinationAction::End],
            DestinationState::Ended { .. } | DestinationState::Aborted { .. } => {
                vec![self.final_answer()]
            }
            // Answered once the outcome is known.
            _ => Vec::new(),
        }
    }

    fn cut(&mut self, cause: String) -> Vec<DestinationAction> {
        self.cut.get_or_insert(cause);
        self.look()
    }

    fn look(&mut self) -> Vec<DestinationAction> {
        match std::mem::replace(&mut self.looking, true) {
            true => Vec::new(),
            false => vec![DestinationAction::Look],
        }
    }

    /// The journal records first that the guest never runs here. Once the VMM has ended, that cannot be found out again.
    fn abort(&mut self, cause: String) -> Vec<DestinationAction> {
        self.state = DestinationState::Aborting { cause };
        (self.cut, self.looking) = (None, false);
        vec![DestinationAction::Persist, DestinationAction::End]
    }

    fn loaded(&mut self, post_copy: bool) -> Vec<DestinationAction> {
        if self.state != DestinationState::Receiving {
            return Vec::new();
        }
        self.state = DestinationState::Loaded { post_copy };
        (self.cut, self.looking) = (None, false);
        let mut actions = vec![
            DestinationAction::Persist,
            DestinationAction::Send(DestinationMessage::Loaded),
        ];
        if let Some(resume) = self.commit.take() {
            actions.extend(self.start(resume, post_copy));
        }
        actions
    }

    fn started(&mut self, answer: DestinationMessage) -> Vec<DestinationAction> {
        self.looking = false;
        match &self.state {
            DestinationState::Starting { .. } => {
                self.state = DestinationState::Running;
                self.seen = Some(answer.clone());
                vec![DestinationAction::Persist, DestinationAction::Send(answer)]
            }
            DestinationState::Running => vec![DestinationAction::Send(answer)],
            _ => Vec::new(),
        }
    }

    fn not_started(&mut self, cause: String) -> Vec<DestinationAction> {
        self.looking = false;
        match &self.state {
            DestinationState::Receiving => {
                let cause = self.cut.take().unwrap_or(cause);
                self.abort(cause)
            }
            DestinationState::Starting {
                post_copy: false, ..
            } if !self.told => self.abort(cause),
            // The source may not be able to continue the guest. The next `commit` tries again.
            DestinationState::Starting { .. } if !self.told => {
                self.state = DestinationState::Loaded { post_copy: true };
                let mut actions = vec![DestinationAction::Persist];
                actions.extend(unclear(cause));
                actions
            }
            _ => unclear(cause),
        }
    }

    fn died(&mut self, cause: String) -> Vec<DestinationAction> {
        self.looking = false;
        self.state = match std::mem::replace(&mut self.state, DestinationState::Receiving) {
            DestinationState::Receiving | DestinationState::Loaded { .. } => {
                // The VMM may have ended for that reason.
                let cause = self.cut.take().unwrap_or(cause);
                DestinationState::Aborted { cause }
            }
            DestinationState::Aborting { cause } => DestinationState::Aborted { cause },
            DestinationState::Starting { .. } | DestinationState::Running => {
                DestinationState::Ended { cause }
            }
            over @ (DestinationState::Ended { .. } | DestinationState::Aborted { .. }) => {
                self.state = over;
                return vec![self.final_answer()];
            }
        };
        vec![DestinationAction::Persist, self.final_answer()]
    }

    fn not_persisted(
        &mut self,
        reason: String,
        seen: Option<DestinationMessage>,
    ) -> Vec<DestinationAction> {
        match &self.state {
            // The guest has not been told to run. The journal's state remains true.
            DestinationState::Starting { post_copy, .. } if !self.told => {
                let post_copy = *post_copy;
                self.state = DestinationState::Loaded { post_copy };
                self.looking = false;
                unclear(format!("the journal cannot be written: {reason}"))
            }
            DestinationState::Aborting { .. } => vec![DestinationAction::End],
            // A restarted process finds these out again from the journal's state.
            DestinationState::Loaded { .. } => {
                vec![DestinationAction::Send(DestinationMessage::Loaded)]
            }
            DestinationState::Running => seen.map(DestinationAction::Send).into_iter().collect(),
            DestinationState::Ended { .. } | DestinationState::Aborted { .. } => {
                vec![self.final_answer()]
            }
            _ => Vec::new(),
        }
    }

    fn final_answer(&self) -> DestinationAction {
        DestinationAction::Send(match &self.state {
            DestinationState::Aborted { cause } => DestinationMessage::Aborted {
                incarnation: self.incarnation,
                cause: cause.clone(),
            },
            DestinationState::Ended { cause } => DestinationMessage::Ended {
                cause: cause.clone(),
            },
            _ => DestinationMessage::Receiving,
        })
    }
}

fn unclear(reason: String) -> Vec<DestinationAction> {
    let message = DestinationMessage::Unclear { reason };
    vec![DestinationAction::Send(message)]
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOADED: DestinationState = DestinationState::Loaded { post_copy: false };
    const HERE: Incarnation = Incarnation([1; 16]);

    #[test]
    fn a_migration_that_goes_through() {
        let told = [
            (DestinationEvent::Loaded, "persist, send loaded"),
            (commit(), "persist, send starting, run"),
            (started(), "persist, send running"),
            (settled(), "forget"),
        ];
        follow(&mut receiving(), told);
    }

    #[test]
    fn a_commit_may_come_first() {
        let told = [
            (DestinationEvent::StillReceiving, ""),
            (commit(), ""),
            (DestinationEvent::StillReceiving, "send receiving"),
            (
                DestinationEvent::Loaded,
                "persist, send loaded, persist, send starting, run",
            ),
            (commit(), ""),
        ];
        follow(&mut receiving(), told);
    }

    #[test]
    fn a_guest_that_is_not_to_come_is_ended_before_that_is_answered() {
        for state in [DestinationState::Receiving, LOADED] {
            for event in [failed(), abort()] {
                let mut ended = restored(state.clone());
                if state == DestinationState::Receiving && event == failed() {
                    follow(
                        &mut ended,
                        [(event, "look"), (not_started(), "persist, end")],
                    );
                } else {
                    follow(&mut ended, [(event, "persist, end")]);
                }
                let told = [
                    (commit(), "end"),
                    (not_ended(), "send unclear"),
                    (died(), "persist, send aborted"),
                    (commit(), "send aborted"),
                    (abort(), "send aborted"),
                    (settled(), "forget"),
                ];
                follow(&mut ended, told);
            }
            let told = [(died(), "persist, send aborted"), (started(), "")];
            follow(&mut restored(state), told);
        }
    }

    /// Its source may be gone by now.
    #[test]
    fn a_guest_that_was_loaded_when_the_connections_broke_is_kept() {
        let told = [
            (failed(), "look"),
            (failed(), ""),
            (DestinationEvent::Loaded, "persist, send loaded"),
            (commit(), "persist, send starting, run"),
        ];
        follow(&mut receiving(), told);
        let mut again = restored(DestinationState::Receiving);
        assert_eq!(told_of(&again.go_on()), "look");
        let told = [
            (unclear(), "send unclear"),
            (failed(), "look"),
            (unclear(), "send unclear"),
            (commit(), "look"),
            (
                DestinationEvent::Loaded,
                "persist, send loaded, persist, send starting, run",
            ),
        ];
        follow(&mut again, told);
        let mut again = restored(DestinationState::Receiving);
        assert_eq!(told_of(&again.go_on()), "look");
        let told = [
            (unclear(), "send unclear"),
            (abort(), "persist, end"),
            (not_started(), "send unclear"),
        ];
        follow(&mut again, told);
    }

    #[test]
    fn running_is_looked_at_for_each_answer() {
        let mut destination = running();
        let told = [
            (commit(), "check"),
            (commit(), ""),
            (started(), "send running"),
            (abort(), "check"),
            (unclear(), "send unclear"),
            (commit(), "check"),
            (died(), "persist, send ended"),
            (commit(), "send ended"),
            (abort(), "send ended"),
            (settled(), "forget"),
        ];
        follow(&mut destination, told);
    }

    #[test]
    fn only_the_first_refusal_proves_that_the_guest_has_not_run() {
        follow(&mut starting(), [(not_started(), "persist, end")]);
        let told = [
            (unclear(), "send unclear"),
            (abort(), "check"),
            (unclear(), "send unclear"),
            (commit(), "run"),
            (not_started(), "send unclear"),
            (failed(), ""),
            (died(), "persist, send ended"),
        ];
        follow(&mut starting(), told);
        let resume = true;
        let mut again = restored(DestinationState::Starting {
            resume,
            post_copy: false,
        });
        assert_eq!(told_of(&again.go_on()), "run");
        follow(&mut again, [(not_started(), "send unclear")]);
    }

    /// Behind post-copy's switch the source cannot continue the guest.
    #[test]
    fn only_the_source_gives_up_a_guest_under_post_copy() {
        let told = [
            (DestinationEvent::Switched, "persist, send loaded"),
            (failed(), ""),
            (commit(), "persist, send starting, run"),
            (not_started(), "persist, send unclear"),
            (commit(), "persist, send starting, run"),
            (started(), "persist, send running"),
        ];
        follow(&mut receiving(), told);
        let told = [
            (DestinationEvent::Switched, "persist, send loaded"),
            (abort(), "persist, end"),
            (died(), "persist, send aborted"),
        ];
        follow(&mut receiving(), told);
    }

    #[test]
    fn journal_that_cannot_be_written() {
        // The guest has not been requested to run: it can be tried again.
        let told = [
            (not_persisted(), "send unclear"),
            (commit(), "persist, send starting, run"),
        ];
        follow(&mut starting(), told);
        // All else is found out again.
        let told = [
            (DestinationEvent::Loaded, "persist, send loaded"),
            (not_persisted(), "send loaded"),
        ];
        follow(&mut receiving(), told);
        follow(&mut running(), [(not_persisted(), "send running")]);
        let told = [
            (failed(), "look"),
            (not_started(), "persist, end"),
            (not_persisted(), "end"),
            (died(), "persist, send aborted"),
            (not_persisted(), "send aborted"),
        ];
        follow(&mut receiving(), told);
    }

    #[test]
    fn a_process_that_is_started_again_goes_on() {
        let (resume, cause) = (true, String::new);
        for (state, actions) in [
            (DestinationState::Receiving, "look"),
            (LOADED, ""),
            (
                DestinationState::Starting {
                    resume,
                    post_copy: false,
                },
                "run",
            ),
            (DestinationState::Running, ""),
            (DestinationState::Aborting { cause: cause() }, "end"),
            (DestinationState::Aborted { cause: cause() }, ""),
            (DestinationState::Ended { cause: cause() }, ""),
        ] {
            assert_eq!(told_of(&restored(state).go_on()), actions);
        }
    }

    #[test]
    fn settled_is_no_news_before_it_is_over() {
        for mut destination in [receiving(), starting()] {
            follow(&mut destination, [(settled(), "")]);
        }
    }

    #[test]
    fn a_paused_guest_stays_paused() {
        let resume = false;
        let mut destination = restored(LOADED);
        let commit = DestinationEvent::Message(SourceMessage::Commit { resume });
        let run = DestinationAction::Run { resume };
        assert!(destination.handle(commit).contains(&run));
    }

    fn receiving() -> Destination {
        Destination::new(HERE)
    }

    fn restored(state: DestinationState) -> Destination {
        Destination::restore(HERE, state)
    }

    fn starting() -> Destination {
        let mut destination = restored(LOADED);
        follow(
            &mut destination,
            [(commit(), "persist, send starting, run")],
        );
        destination
    }

    fn running() -> Destination {
        let mut destination = starting();
        follow(&mut destination, [(started(), "persist, send running")]);
        destination
    }

    /// Each event, and the actions that follow.
    #[track_caller]
    fn follow<const N: usize>(
        destination: &mut Destination,
        events: [(DestinationEvent, &str); N],
    ) {
        for (event, actions) in events {
            let before = destination.clone();
            let done = destination.handle(event.clone());
            assert_eq!(told_of(&done), actions, "{event:?} after {before:?}");
        }
    }

    fn told_of(actions: &[DestinationAction]) -> String {
        let told = actions.iter().map(|action| match action {
            DestinationAction::Persist => "persist",
            DestinationAction::Look => "look",
            DestinationAction::Run { .. } => "run",
            DestinationAction::Check => "check",
            DestinationAction::End => "end",
            DestinationAction::Forget => "forget",
            DestinationAction::Send(message) => match message {
                DestinationMessage::Loaded => "send loaded",
                DestinationMessage::Receiving => "send receiving",
                DestinationMessage::Starting => "send starting",
                DestinationMessage::Running { .. } => "send running",
                DestinationMessage::Aborted { incarnation, .. } if *incarnation == HERE => {
                    "send aborted"
                }
                DestinationMessage::Ended { .. } => "send ended",
                DestinationMessage::Unclear { .. } => "send unclear",
                _ => "send something",
            },
        });
        told.collect::<Vec<_>>().join(", ")
    }

    fn commit() -> DestinationEvent {
        let resume = true;
        DestinationEvent::Message(SourceMessage::Commit { resume })
    }

    fn abort() -> DestinationEvent {
        let cause = String::new();
        DestinationEvent::Message(SourceMessage::Abort { cause })
    }

    fn settled() -> DestinationEvent {
        DestinationEvent::Message(SourceMessage::Settled)
    }

    fn started() -> DestinationEvent {
        let state = "running".to_owned();
        DestinationEvent::Started { state }
    }

    fn failed() -> DestinationEvent {
        let cause = String::new();
        DestinationEvent::Failed { cause }
    }

    fn not_started() -> DestinationEvent {
        let cause = String::new();
        DestinationEvent::NotStarted { cause }
    }

    fn died() -> DestinationEvent {
        let cause = String::new();
        DestinationEvent::Died { cause }
    }

    fn unclear() -> DestinationEvent {
        let reason = String::new();
        DestinationEvent::Unclear { reason }
    }

    fn not_ended() -> DestinationEvent {
        let reason = String::new();
        DestinationEvent::NotEnded { reason }
    }

    fn not_persisted() -> DestinationEvent {
        let reason = "no space".to_owned();
        DestinationEvent::NotPersisted { reason }
    }
}
