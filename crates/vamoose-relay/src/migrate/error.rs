//! Why a migration did not go through, and where that leaves the guest.

use std::{io, sync::Arc, time::Duration};

use handover::{AttemptId, DestinationMessage, GuestLocation, SourceState};
use thiserror::Error;
use vamoose_link::SocketError;

use crate::{
    JournalError, RelayError,
    control::ControlError,
    journal::{AtSource, Record},
    qemu::QemuError,
};

/// A migration that did not go through.
#[derive(Debug, Error)]
#[error("{}; {}", what(cause), whereabouts(cause, *guest))]
pub struct Failure {
    /// Why.
    #[source]
    pub cause: Cause,
    /// Where that leaves the guest.
    pub guest: GuestLocation,
    /// Whether the guest is known to run at the source.
    pub is_running: bool,
    /// The attempt that is to be finished or settled, or has left the guest there.
    pub attempt: Option<AttemptId>,
}

/// Why a migration did not go through.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum Cause {
    #[error("the migration was cancelled")]
    Cancelled,
    #[error("source QEMU")]
    Source(#[from] QemuError),
    #[error("server")]
    Control(#[from] ControlError),
    #[error("the server refuses: {0}")]
    Refused(String),
    /// What differs, in lines.
    #[error("the QEMU that waits at {host} is not made for this guest: {}", differences.join("; "))]
    Differs {
        host: String,
        differences: Vec<String>,
    },
    #[error("attempt {0} is under way: another process is moving the guest to {1}")]
    UnderWay(AttemptId, String),
    #[error("attempt {0} to {1} is unfinished: `migrate` without --dry-run finishes it first")]
    Unfinished(AttemptId, String),
    /// What QEMU says of the copy.
    #[error("the disk `{name}` cannot be copied: {problem}")]
    Disk { name: String, problem: String },
    #[error(
        "the source's QEMU has no writable disk `{name}`: it has {}",
        list(known)
    )]
    NoDisk { name: String, known: Vec<String> },
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error("cannot set up the migration")]
    SetUp(#[from] io::Error),
    #[error(transparent)]
    Journal(#[from] JournalError),
    #[error("the guest stood still for more than {} s", .0.as_secs_f64())]
    Downtime(Duration),
    /// The guest has not been paused `after` this time.
    #[error("after {} s, {} MiB are left ({} MiB/s are moved)", after.as_secs(), remaining >> 20, rate >> 20)]
    TimedOut {
        after: Duration,
        /// Bytes.
        remaining: u64,
        /// Bytes per second.
        rate: u64,
    },
    /// The source's QEMU has ended, which is proven.
    #[error("the source's QEMU has ended")]
    SourceEnded,
    /// The guest was sent away before, by an attempt that is over.
    #[error("attempt {attempt} has moved the guest to {to} ({name}){}{now}", if now.is_empty() { "" } else { "; " })]
    MovedBefore {
        attempt: AttemptId,
        to: String,
        name: String,
        /// What is known of it now.
        now: String,
    },
    #[error("the source has sent its guest away in a migration that is not in this journal")]
    NotInJournal,
    /// The guest was continued at the destination, and something has stopped it since.
    #[error("it was continued there, and something has stopped it since: it is `{0}`")]
    StandsStill(String),
    /// The guest runs at the destination under post-copy.
    #[error("memory of the guest is still here, and the guest stands still when it needs it: {0}")]
    Unsupplied(String),
    /// The guest was continued at the source although it may have been handed over.
    #[error("{0}")]
    RunsHere(String),
    /// The connection to the server was lost for good.
    #[error("{} ({cause})", lost(*seconds))]
    Lost { seconds: u64, cause: Arc<str> },
    /// The migration broke.
    #[error("{}{}", reports.join("; "), if relay.is_some() { "; the relay reports" } else { "" })]
    Broken {
        /// What the two sides report.
        reports: Vec<String>,
        /// The relay's error, usually the cause of what QEMU reports.
        #[source]
        relay: Option<RelayError>,
    },
}

fn what(cause: &Cause) -> &'static str {
    match cause {
        Cause::Cancelled => "the guest was not migrated",
        Cause::MovedBefore { .. } => "nothing was migrated",
        Cause::StandsStill(_) => "the guest has moved, and does not run",
        Cause::Unsupplied(_) => "post-copy has been interrupted",
        _ => "the migration failed",
    }
}

/// Where the guest is. After an earlier attempt that may be another destination than the one asked for now.
fn whereabouts(cause: &Cause, guest: GuestLocation) -> String {
    match cause {
        Cause::MovedBefore { to, .. } if guest == GuestLocation::Destination => {
            format!("the guest has left for {to}")
        }
        Cause::RunsHere(_) if guest == GuestLocation::InDoubt => {
            "the guest runs at the source and may be running at the destination as well".to_owned()
        }
        _ => guest.to_string(),
    }
}

impl Cause {
    pub(super) fn broken(report: impl Into<String>) -> Self {
        Self::Broken {
            reports: vec![report.into()],
            relay: None,
        }
    }

    pub(super) fn unexpected(answer: &DestinationMessage) -> Self {
        Self::broken(format!("unexpected answer from the server: {answer:?}"))
    }

    /// An earlier attempt has taken the guest away. `now` is what is known of the guest now.
    pub(super) fn moved_before(record: &Record<AtSource>, now: impl Into<String>) -> Self {
        if record.state == SourceState::Supplying {
            return Self::Unsupplied(now.into());
        }
        Self::MovedBefore {
            attempt: record.attempt,
            to: record.side.to.clone(),
            name: record.name.clone(),
            now: now.into(),
        }
    }
}

impl Failure {
    /// A failure of an attempt that left the guest at `guest`.
    pub(super) fn of(attempt: AttemptId, cause: impl Into<Cause>, guest: GuestLocation) -> Self {
        Self {
            cause: cause.into(),
            guest,
            is_running: false,
            attempt: Some(attempt),
        }
    }
}

/// A failure before anything was done to the guest.
pub(super) fn at_source(cause: impl Into<Cause>) -> Failure {
    Failure {
        cause: cause.into(),
        guest: GuestLocation::Source,
        is_running: false,
        attempt: None,
    }
}

fn list(names: &[String]) -> String {
    match names {
        [] => "none".to_owned(),
        names => names.join(", "),
    }
}

/// How long there has been no connection.
fn lost(seconds: u64) -> String {
    match seconds {
        0 => "the connection to the server was lost for good".to_owned(),
        _ => format!("there has been no connection to the server for {seconds} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_guest_in_doubt_is_not_called_paused() {
        let told = |cause| Failure::of(AttemptId([1; 16]), cause, GuestLocation::InDoubt);
        let runs = told(Cause::RunsHere("no answer".to_owned())).to_string();
        assert!(runs.contains("the guest runs at the source"), "{runs}");
        let paused = told(Cause::broken("no answer")).to_string();
        assert!(
            paused.contains("the guest is paused at the source"),
            "{paused}"
        );
    }
}
