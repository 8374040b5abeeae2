//! The attempts in this host's journal, and their status.

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
    pub phase: String,
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
    /// A loaded guest at the destination whose source has been silent for the orphan timeout, or that no server
    /// serves.
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
    let mut all = Vec::new();
    for record in journal.records::<AtSource>()? {
        let standing = at_source(&record, journal.is_driven::<AtSource>(record.attempt));
        let to = record.side.to.clone();
        all.push(Attempt::new(record, standing, Some(to)));
    }
    for record in journal.records::<AtDestination>()? {
        let is_driven = journal.is_driven::<AtDestination>(record.attempt);
        let standing = at_destination(&record, is_driven);
        all.push(Attempt::new(record, standing, None));
    }
    all.sort_by_key(|attempt| attempt.began);
    Ok(all)
}

impl Attempt {
    fn new<S: Side>(record: Record<S>, standing: Standing, to: Option<String>) -> Self {
        // As the journal's file has them.
        let state = serde_json::to_value(&record.state).unwrap_or_default();
        let text = |name: &str| state[name].as_str().map(str::to_owned);
        Self {
            attempt: record.attempt,
            role: S::ROLE,
            name: record.name,
            standing,
            phase: text("phase").unwrap_or_default(),
            cause: text("cause"),
            began: record.began,
            to,
            qemu: record.qemu,
        }
    }
}

fn at_source(record: &Record<AtSource>, is_driven: bool) -> Standing {
    match &record.state {
        _ if is_driven => Standing::Running,
        SourceState::Moving { .. }
        | SourceState::Switching { .. }
        | SourceState::Supplying
        | SourceState::Returning { .. } => Standing::Unfinished,
        SourceState::Committing { .. } => Standing::InDoubt,
        SourceState::Over { guest, .. } => Standing::after(*guest),
    }
}

fn at_destination(record: &Record<AtDestination>, is_driven: bool) -> Standing {
    match (record.outcome(), &record.state) {
        (Some(guest), _) => Standing::after(guest),
        (None, _) if is_driven && !record.side.orphaned => Standing::Running,
        (None, DestinationState::Loaded { .. }) => Standing::Orphaned,
        (None, _) => Standing::Unfinished,
    }
}

impl Standing {
    /// The status of an attempt that is over.
    fn after(guest: GuestLocation) -> Self {
        match guest {
            GuestLocation::Source => Self::AtSource,
            GuestLocation::Destination | GuestLocation::MovedOn => Self::AtDestination,
            GuestLocation::InDoubt | GuestLocation::Unconfirmed => Self::InDoubt,
            GuestLocation::Lost => Self::Lost,
            GuestLocation::Gone => Self::Gone,
        }
    }
}
