//! The journal's record of an attempt, on either side.

use std::{fmt::Debug, ops::Not};

use handover::{AttemptId, DestinationState, GuestLocation, Incarnation, SourceState};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::Instance;

/// An attempt, as recorded by one of its sides.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", bound = "")]
pub(crate) struct Record<S: Side> {
    pub(crate) attempt: AttemptId,
    /// When it began, in milliseconds since the epoch.
    pub(crate) began: u64,
    /// The guest's name at the destination.
    pub(crate) name: String,
    pub(crate) qemu: Instance,
    #[serde(flatten)]
    pub(crate) side: S,
    #[serde(flatten)]
    pub(crate) state: S::State,
}

/// A side of a migration.
pub(crate) trait Side: Clone + Serialize + DeserializeOwned {
    /// State of the hand-over.
    type State: Clone + Debug + PartialEq + Serialize + DeserializeOwned;

    /// Prefix of the file names.
    const ROLE: &'static str;

    /// Where the guest is after an attempt in this state, if it is over.
    const OUTCOME: fn(&Self::State) -> Option<GuestLocation>;
}

impl<S: Side> Record<S> {
    /// Whether nothing is left to do.
    pub(crate) fn is_over(&self) -> bool {
        self.outcome().is_some()
    }

    /// Where the guest is, once nothing is left to do.
    pub(crate) fn outcome(&self) -> Option<GuestLocation> {
        S::OUTCOME(&self.state)
    }
}

/// The source's part of a record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct AtSource {
    /// The destination's address.
    pub(crate) to: String,
    /// Whether the guest ran, and is to run at the destination.
    pub(crate) resume: bool,
    /// The guest was paused just before the switch to post-copy, or was to be.
    #[serde(default, skip_serializing_if = "Not::not")]
    pub(crate) held: bool,
    /// The destination has confirmed that it knows how the attempt ended.
    pub(crate) confirmed: bool,
}

impl Side for AtSource {
    type State = SourceState;

    const ROLE: &'static str = "source";
    const OUTCOME: fn(&SourceState) -> Option<GuestLocation> = SourceState::outcome;
}

/// The destination's part of a record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct AtDestination {
    /// The server that accepted the attempt.
    pub(crate) incarnation: Incarnation,
    /// Where that server listens.
    pub(crate) server: String,
    /// The guest is loaded, and its source has sent nothing for longer than the orphan timeout.
    pub(crate) orphaned: bool,
    /// The authenticated identity of the source, which alone decides about its guest. `None` without authentication.
    #[serde(default)]
    pub(crate) source: Option<String>,
    /// The QEMU is prepared for post-copy.
    #[serde(default)]
    pub(crate) post_copy: bool,
    /// The last of the guest has not come, so its QEMU cannot have all of it.
    #[serde(default)]
    pub(crate) incomplete: bool,
    /// Inode of the connection to its monitor that the QEMU keeps.
    #[serde(default)]
    pub(crate) kept_monitor: Option<u64>,
}

impl Side for AtDestination {
    type State = DestinationState;

    const ROLE: &'static str = "destination";
    const OUTCOME: fn(&DestinationState) -> Option<GuestLocation> = DestinationState::outcome;
}
