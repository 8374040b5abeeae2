//! The attempts that this host remembers, and the status of each.

use handover::{AttemptId, DestinationState, GuestLocation, SourceState};
use serde::Serialize;

use crate::{
    Instance, Journal, JournalError,
    journal::{AtDestination, AtSource, Record, Side},
};

/// One attempt, from this host's side.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Attempt {
    /// Its id.
    pub attempt: AttemptId,
    /// `source` or `destination`.
    pub role: &'static str,
    /// The guest's name at the destination.
    pub name: String,
    /// Its status.
    pub standing: Standing,
    /// The journal's name for how far it has come.
    pub phase: &'static str,
    /// What went wrong, if something did.
    pub cause: Option<String>,
    /// When it began, in milliseconds since the epoch.
    pub began: u64,
    /// At the source: the destination's address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// The QEMU on this host.
    pub qemu: Instance,
}

/// The status of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standing {
    /// A process on this host drives it.
    Running,
    /// Its process was ended: the same command, or a restarted server, continues it.
    Unfinished,
    /// A loaded guest at the destination, whose source has sent nothing for the orphan timeout, or that no server
    /// looks after.
    Orphaned,
    /// The guest is paused at the source, and may run at the destination.
    InDoubt,
    /// It is over: the guest stayed at the source.
    AtSource,
    /// It is over: the guest was handed over to the destination.
    AtDestination,
    /// It is over: the guest has ended.
    Lost,
    /// It is over: the guest has ended at the source, or another tool has moved it.
    Gone,
}

/// All attempts, the oldest first.
///
/// # Errors
/// When the journal cannot be read.
pub fn attempts(journal: &Journal) -> Result<Vec<Attempt>, JournalError> {
    let mut all = list(journal, at_source)?;
    all.extend(list(journal, at_destination)?);
    all.sort_by_key(|attempt| attempt.began);
    Ok(all)
}

/// A record's phase, status, what went wrong, the destination's address.
type Described = (&'static str, Standing, Option<String>, Option<String>);

fn list<S: Side>(
    journal: &Journal,
    describe: fn(Record<S>, bool) -> Described,
) -> Result<Vec<Attempt>, JournalError> {
    let attempt = |record: Record<S>| {
        let is_driven = journal.is_driven::<S>(record.attempt);
        let (phase, standing, cause, to) = describe(record.clone(), is_driven);
        Attempt {
            attempt: record.attempt,
            role: S::ROLE,
            name: record.name,
            standing,
            phase,
            cause,
            began: record.began,
            to,
            qemu: record.qemu,
        }
    };
    Ok(journal.records()?.into_iter().map(attempt).collect())
}

fn at_source(record: Record<AtSource>, is_driven: bool) -> Described {
    let (phase, standing, cause) = match record.state {
        SourceState::Moving { .. } => ("moving", Standing::Unfinished, None),
        SourceState::Committing { .. } => ("committing", Standing::InDoubt, None),
        SourceState::Returning { cause } => ("returning", Standing::Unfinished, Some(cause)),
        SourceState::Over { guest, cause } => ("over", over(guest), cause),
    };
    let standing = if is_driven {
        Standing::Running
    } else {
        standing
    };
    (phase, standing, cause, Some(record.side.to))
}

fn at_destination(record: Record<AtDestination>, is_driven: bool) -> Described {
    let is_running = is_driven && !record.side.orphaned && !record.is_over();
    let (phase, standing, cause) = match record.state {
        DestinationState::Receiving => ("receiving", Standing::Unfinished, None),
        DestinationState::Loaded => ("loaded", Standing::Orphaned, None),
        DestinationState::Starting { .. } => ("starting", Standing::Unfinished, None),
        DestinationState::Running => ("running", Standing::AtDestination, None),
        DestinationState::Ended { cause } => ("ended", Standing::Lost, Some(cause)),
        DestinationState::Aborting { cause } => ("aborting", Standing::Unfinished, Some(cause)),
        DestinationState::Aborted { cause } => ("aborted", Standing::AtSource, Some(cause)),
    };
    let standing = if is_running {
        Standing::Running
    } else {
        standing
    };
    (phase, standing, cause, None)
}

fn over(guest: GuestLocation) -> Standing {
    match guest {
        GuestLocation::Source => Standing::AtSource,
        GuestLocation::Destination | GuestLocation::MovedOn => Standing::AtDestination,
        GuestLocation::InDoubt | GuestLocation::Unconfirmed => Standing::InDoubt,
        GuestLocation::Lost => Standing::Lost,
        GuestLocation::Gone => Standing::Gone,
    }
}
