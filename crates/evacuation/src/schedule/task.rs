//! One guest of a schedule.

use std::time::Duration;

use thiserror::Error;

use super::{At, Failure, FailureKind, Limits};
use crate::{Guest, Hindrance, HostId};

#[derive(Clone, Debug)]
pub(super) struct Task {
    pub(super) state: State,
    pub(super) tries: u32,
    pub(super) failed_at: Vec<HostId>,
    /// How the last try failed.
    pub(super) last: Option<Failure>,
    pub(super) dirty_rate: Option<u64>,
}

#[derive(Clone, Debug)]
pub(super) enum State {
    Waiting {
        to: HostId,
        /// It does not start before.
        until: Duration,
    },
    Running(Running),
    Done(Outcome),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Running {
    pub(super) to: HostId,
    pub(super) since: Duration,
    pub(super) cancelled: Option<Cancelled>,
}

/// Why this scheduler has cancelled a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cancelled {
    Stopped,
    TimedOut,
}

/// Outcome of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The guest runs at its destination.
    Moved {
        /// The destination.
        to: HostId,
    },
    /// The guest is where it was.
    Stays(Stay),
    /// The guest's location is unknown, or it runs twice. An operator has to look.
    InDoubt {
        /// Intended destination.
        to: HostId,
        /// Observed location.
        at: At,
        /// Failure of the migration, if any.
        reason: Option<String>,
    },
}

/// Why a guest stays.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Stay {
    /// The guest cannot move.
    #[error("{0}")]
    Hindered(Hindrance),
    /// The plan does not include the guest.
    #[error("the plan does not include it")]
    Unplanned,
    /// The evacuation was stopped before its turn.
    #[error("stopped before its turn")]
    NotStarted,
    /// The evacuation was stopped, and the migration cancelled.
    #[error("cancelled")]
    Cancelled,
    /// The last try failed.
    #[error("{0}")]
    Failed(Failure),
}

impl Task {
    pub(super) fn unplanned(guest: &Guest) -> Self {
        Self {
            state: State::Done(Outcome::Stays(Stay::Unplanned)),
            tries: 0,
            failed_at: Vec::new(),
            last: None,
            dirty_rate: guest.dirty_rate,
        }
    }

    pub(super) fn running(&self) -> Option<&Running> {
        match &self.state {
            State::Running(running) => Some(running),
            State::Waiting { .. } | State::Done(_) => None,
        }
    }

    /// A migration has ended with the guest still at the source: the failure if the guest is to be tried again, or why it stays.
    pub(super) fn stays(
        &mut self,
        running: Running,
        result: Result<(), Failure>,
        limits: &Limits,
    ) -> Result<Failure, Stay> {
        let failure = match (running.cancelled, result) {
            (Some(Cancelled::Stopped), _) => return Err(Stay::Cancelled),
            (Some(Cancelled::TimedOut), _) => Failure {
                kind: FailureKind::Temporary,
                reason: format!(
                    "cancelled after {} s without an end",
                    limits.timeout.unwrap_or_default().as_secs()
                ),
            },
            (None, Ok(())) => Failure {
                kind: FailureKind::Temporary,
                reason: "its migration reported success, but the guest is still at the source"
                    .to_owned(),
            },
            (None, Err(failure)) => failure,
        };
        self.failed_at.push(running.to);
        match failure.kind {
            FailureKind::Temporary if self.tries <= limits.retries => Ok(failure),
            _ => Err(Stay::Failed(failure)),
        }
    }
}
