//! The attempts that this host remembers, and where each of them stands.

use handover::{AttemptId, DestinationState, GuestLocation, SourceState};
use serde::Serialize;

use crate::{DestinationRecord, Instance, Journal, JournalError, SourceRecord, journal::Record};

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
    /// Where it stands.
    pub standing: Standing,
    /// The journal's word for how far it has come.
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

/// Where an attempt stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standing {
    /// A process on this host drives it.
    Running,
    /// Its process was ended: the same command, or a server that is started again, goes on with it.
    Unfinished,
    /// A loaded guest at the destination, whose source has not been heard of for the orphan timeout, or that no
    /// server looks after.
    Orphaned,
    /// The guest is paused at the source, and may run at the destination.
    InDoubt,
    /// It is over: the guest stayed at the source.
    AtSource,
    /// It is over: the guest was handed over to the destination.
    AtDestination,
    /// It is over: the guest has ended.
    Lost,
}

/// All attempts, the oldest first.
///
/// # Errors
/// When the journal cannot be read.
pub fn attempts(journal: &Journal) -> Result<Vec<Attempt>, JournalError> {
    let sources = journal.records::<SourceRecord>()?;
    let sources = sources.into_iter().map(|record| {
        let driven = journal.is_driven::<SourceRecord>(record.attempt);
        at_source(record, driven)
    });
    let destinations = journal.records::<DestinationRecord>()?;
    let destinations = destinations.into_iter().map(|record| {
        let driven = journal.is_driven::<DestinationRecord>(record.attempt);
        at_destination(record, driven)
    });
    let mut all: Vec<_> = sources.chain(destinations).collect();
    all.sort_by_key(|attempt| attempt.began);
    Ok(all)
}

fn at_source(record: SourceRecord, driven: bool) -> Attempt {
    let (phase, standing, cause) = match record.state {
        SourceState::Moving { .. } => ("moving", Standing::Unfinished, None),
        SourceState::Committing { .. } => ("committing", Standing::InDoubt, None),
        SourceState::Returning { cause } => ("returning", Standing::Unfinished, Some(cause)),
        SourceState::Over { guest, cause } => ("over", over(guest), cause),
    };
    Attempt {
        attempt: record.attempt,
        role: SourceRecord::ROLE,
        name: record.name,
        standing: if driven { Standing::Running } else { standing },
        phase,
        cause,
        began: record.began,
        to: Some(record.to),
        qemu: record.qemu,
    }
}

fn at_destination(record: DestinationRecord, driven: bool) -> Attempt {
    let (phase, standing, cause) = match record.state {
        DestinationState::Receiving => ("receiving", Standing::Unfinished, None),
        DestinationState::Loaded => ("loaded", Standing::Orphaned, None),
        DestinationState::Starting { .. } => ("starting", Standing::Unfinished, None),
        DestinationState::Running => ("running", Standing::AtDestination, None),
        DestinationState::Ended { cause } => ("ended", Standing::Lost, Some(cause)),
        DestinationState::Aborting { cause } => ("aborting", Standing::Unfinished, Some(cause)),
        DestinationState::Aborted { cause } => ("aborted", Standing::AtSource, Some(cause)),
    };
    let is_over = matches!(
        standing,
        Standing::AtSource | Standing::AtDestination | Standing::Lost
    );
    let looked_after = driven && !record.orphaned && !is_over;
    Attempt {
        attempt: record.attempt,
        role: DestinationRecord::ROLE,
        name: record.name,
        standing: if looked_after {
            Standing::Running
        } else {
            standing
        },
        phase,
        cause,
        began: record.began,
        to: None,
        qemu: record.qemu,
    }
}

fn over(guest: GuestLocation) -> Standing {
    match guest {
        GuestLocation::Source => Standing::AtSource,
        GuestLocation::Destination | GuestLocation::MovedOn => Standing::AtDestination,
        GuestLocation::InDoubt => Standing::InDoubt,
        GuestLocation::Lost => Standing::Lost,
    }
}
