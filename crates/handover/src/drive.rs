//! Carries out the machines' decisions.
//!
//! A [`Driver`] holds a machine and its pending actions. A host has the I/O: [`SourceHost`], [`DestinationHost`]. What
//! a host cannot get wrong is here: the order of the actions, that a failed write of the journal stops those that follow, and that
//! the source looks at its guest before each `commit`.

use std::{collections::VecDeque, ops::Deref};

use crate::{
    Decision, Destination, DestinationAction, DestinationEvent, DestinationMessage,
    DestinationState, Incarnation, LastSeen, Source, SourceAction, SourceEvent, SourceMessage,
    SourceState,
};

/// A machine and its pending actions.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Driver<M, A> {
    machine: M,
    pending: VecDeque<A>,
}

/// A source that is being driven.
pub type SourceDriver = Driver<Source, SourceAction>;

/// A destination that is being driven.
pub type DestinationDriver = Driver<Destination, DestinationAction>;

/// Carries out the decisions of a [`Source`]. A method returns the resulting event, or `None` if the event is reported later.
pub trait SourceHost {
    /// Carries out [`SourceAction::Persist`]. By default there is no journal: for a process that is its guest.
    ///
    /// # Errors
    /// Why the journal could not be written. Its content is unchanged then.
    fn persist(&mut self, source: &Source) -> Result<(), String> {
        let _ = source;
        Ok(())
    }

    /// Whether the guest has run here since it was sent. Called before each `commit`, which is not sent then. By default
    /// only this process continues the guest.
    fn has_come_back(&mut self) -> bool {
        false
    }

    /// Carries out [`SourceAction::Send`].
    fn send(&mut self, message: &SourceMessage) -> Option<SourceEvent>;

    /// Carries out [`SourceAction::Dial`].
    fn dial(&mut self, source: &Source) -> Option<SourceEvent>;

    /// Carries out [`SourceAction::Resume`].
    fn resume(&mut self, source: &Source) -> Option<SourceEvent>;
}

/// Carries out the decisions of a [`Destination`]. A method returns the resulting event, or `None` if the event is reported
/// later.
pub trait DestinationHost {
    /// Carries out [`DestinationAction::Persist`]. By default there is no journal: for a process that is its guest.
    ///
    /// # Errors
    /// Why the journal could not be written. Its content is unchanged then.
    fn persist(&mut self, destination: &Destination) -> Result<(), String> {
        let _ = destination;
        Ok(())
    }

    /// Carries out [`DestinationAction::Send`].
    fn send(&mut self, message: &DestinationMessage);

    /// Carries out [`DestinationAction::Look`]. By default the process that reports `Loaded` does so before anything can fail.
    fn look(&mut self) -> Option<DestinationEvent> {
        let cause = "the guest is incomplete".to_owned();
        Some(DestinationEvent::NotStarted { cause })
    }

    /// Carries out [`DestinationAction::Run`].
    fn run(&mut self, resume: bool) -> Option<DestinationEvent>;

    /// Carries out [`DestinationAction::Check`]. `was_seen`: the guest has been [seen](DestinationState::Running) here before.
    fn check(&mut self, was_seen: bool) -> Option<DestinationEvent>;

    /// Carries out [`DestinationAction::End`].
    fn end(&mut self) -> Option<DestinationEvent>;

    /// Carries out [`DestinationAction::Forget`].
    fn forget(&mut self);
}

/// The result of a [step](SourceDriver::step) of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// An action has been carried out.
    Done,
    /// No action is pending.
    Idle,
    /// This run of the source is over.
    Decided(Decision),
}

/// The guest at the source, as found by a process that takes up an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundGuest {
    /// Its VMM has ended, which is proven.
    Ended,
    /// It is paused, and its VMM has sent all of it.
    Sent {
        /// A person vouches that it was sent for this attempt, and not by another tool.
        confirmed: bool,
    },
    /// It has not been sent, or has run since.
    Here,
}

impl<M, A> Driver<M, A> {
    /// Drives `machine`, which has not decided anything yet.
    pub fn new(machine: M) -> Self {
        Self {
            machine,
            pending: VecDeque::new(),
        }
    }

    /// The actions that are still to be carried out, in their order.
    pub fn pending(&self) -> impl Iterator<Item = &A> {
        self.pending.iter()
    }
}

impl<M, A> Deref for Driver<M, A> {
    type Target = M;

    fn deref(&self) -> &M {
        &self.machine
    }
}

impl SourceDriver {
    /// Takes up an attempt of an earlier process, from its journal and the state in which the guest was found.
    pub fn take_up(state: SourceState, resume: bool, guest: FoundGuest) -> Self {
        let event = guest.event(&state);
        let mut driver = Self::new(Source::restore(state, resume));
        if let Some(event) = event {
            driver.handle(event);
        }
        if driver.pending.is_empty() {
            driver.go_on();
        }
        driver
    }

    /// Goes on after a decision that was not final.
    pub fn go_on(&mut self) {
        self.pending.extend(self.machine.go_on());
    }

    /// Reports an event; what follows from it is pending.
    pub fn handle(&mut self, event: SourceEvent) {
        self.pending.extend(self.machine.handle(event));
    }

    /// Carries out all actions, and then those that follow from the events that `wait` returns, until it is decided where the
    /// guest is.
    pub fn drive<H: SourceHost>(
        &mut self,
        host: &mut H,
        mut wait: impl FnMut(&mut H, &Source) -> SourceEvent,
    ) -> Decision {
        loop {
            match self.step(host) {
                Step::Done => {}
                Step::Decided(decision) => return decision,
                Step::Idle if matches!(self.state(), SourceState::Committing { .. }) => {
                    let event = wait(host, &self.machine);
                    self.handle(event);
                }
                // No event would change anything. Another run looks again.
                Step::Idle => {
                    return Decision {
                        guest: self.state().guest(),
                        cause: None,
                    };
                }
            }
        }
    }

    /// Carries out the next action.
    pub fn step(&mut self, host: &mut impl SourceHost) -> Step {
        let Some(action) = self.pending.pop_front() else {
            return Step::Idle;
        };
        let event = match action {
            SourceAction::Persist => host.persist(&self.machine).err().map(|reason| {
                self.pending.clear();
                SourceEvent::NotPersisted { reason }
            }),
            SourceAction::Send(SourceMessage::Commit { .. }) if host.has_come_back() => {
                Some(SourceEvent::Resumed)
            }
            SourceAction::Send(message) => host.send(&message),
            SourceAction::Dial => host.dial(&self.machine),
            SourceAction::Resume => host.resume(&self.machine),
            SourceAction::Decide(decision) => return Step::Decided(decision),
        };
        if let Some(event) = event {
            self.handle(event);
        }
        Step::Done
    }
}

impl DestinationDriver {
    /// Accepts an attempt in the name of `incarnation`: once that is in the journal, `prepared` is sent.
    pub fn accept(incarnation: Incarnation, prepared: DestinationMessage) -> Self {
        let actions = [
            DestinationAction::Persist,
            DestinationAction::Send(prepared),
        ];
        Self {
            machine: Destination::new(incarnation),
            pending: actions.into(),
        }
    }

    /// Continues from the journal.
    pub fn go_on(&mut self) {
        self.pending.extend(self.machine.go_on());
    }

    /// Reports an event; what follows from it is pending.
    pub fn handle(&mut self, event: DestinationEvent) {
        self.pending.extend(self.machine.handle(event));
    }

    /// Carries out all actions, and those that follow from them.
    pub fn drive(&mut self, host: &mut impl DestinationHost) {
        while self.step(host) {}
    }

    /// Carries out the next action; false when none is pending.
    pub fn step(&mut self, host: &mut impl DestinationHost) -> bool {
        let Some(action) = self.pending.pop_front() else {
            return false;
        };
        let event = match action {
            DestinationAction::Persist => host.persist(&self.machine).err().map(|reason| {
                self.pending.clear();
                DestinationEvent::NotPersisted { reason }
            }),
            DestinationAction::Send(message) => {
                host.send(&message);
                None
            }
            DestinationAction::Look => host.look(),
            DestinationAction::Run { resume } => host.run(resume),
            DestinationAction::Check => {
                host.check(*self.machine.state() == DestinationState::Running)
            }
            DestinationAction::End => host.end(),
            DestinationAction::Forget => {
                host.forget();
                None
            }
        };
        if let Some(event) = event {
            self.handle(event);
        }
        true
    }
}

impl FoundGuest {
    /// What to report to a source with this state before it goes on.
    fn event(self, state: &SourceState) -> Option<SourceEvent> {
        match (self, state) {
            (_, SourceState::Over { .. }) => None,
            (Self::Ended, _) => Some(SourceEvent::GuestDied {
                last: LastSeen::Unknown,
            }),
            (
                Self::Sent { confirmed: false },
                SourceState::Moving { .. }
                | SourceState::Switching { .. }
                | SourceState::Returning { .. },
            ) => Some(SourceEvent::FoundSent),
            (Self::Sent { .. }, SourceState::Moving { .. } | SourceState::Switching { .. }) => {
                Some(SourceEvent::Stopped)
            }
            (Self::Here, SourceState::Moving { .. } | SourceState::Switching { .. }) => {
                Some(SourceEvent::Failed {
                    cause: "the process that drove the migration was ended".to_owned(),
                })
            }
            (Self::Here, SourceState::Committing { .. }) => Some(SourceEvent::Resumed),
            (Self::Sent { .. }, _)
            | (Self::Here, SourceState::Returning { .. } | SourceState::Supplying) => None,
        }
    }
}
