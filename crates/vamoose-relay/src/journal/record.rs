//! What a journal remembers of an attempt, on either side.

use std::fmt::Debug;

use handover::{AttemptId, DestinationState, Incarnation, SourceState};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::Instance;

/// An attempt, as one of its sides remembers it.
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
    /// How far an attempt has come.
    type State: Clone + Debug + PartialEq + Serialize + DeserializeOwned;

    /// How the names of its files begin.
    const ROLE: &'static str;

    /// Whether an attempt in this state is over.
    const IS_OVER: fn(&Self::State) -> bool;
}

impl<S: Side> Record<S> {
    /// Whether nothing is left to be decided.
    pub(crate) fn is_over(&self) -> bool {
        S::IS_OVER(&self.state)
    }
}

/// What only the source remembers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct AtSource {
    /// The destination's address.
    pub(crate) to: String,
    /// Whether the guest ran, and is to run at the destination.
    pub(crate) resume: bool,
    /// The destination has confirmed that it knows how the attempt ended.
    pub(crate) confirmed: bool,
}

impl Side for AtSource {
    type State = SourceState;

    const ROLE: &'static str = "source";
    const IS_OVER: fn(&SourceState) -> bool = SourceState::is_over;
}

/// What only the destination remembers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct AtDestination {
    /// The server that accepted the attempt.
    pub(crate) incarnation: Incarnation,
    /// Where that listens.
    pub(crate) server: String,
    /// The guest is loaded, and its source has sent nothing for longer than the orphan timeout.
    pub(crate) orphaned: bool,
    /// Who the source has proved to be: nobody else decides about its guest. `None` without authentication.
    #[serde(default)]
    pub(crate) source: Option<String>,
}

impl Side for AtDestination {
    type State = DestinationState;

    const ROLE: &'static str = "destination";
    const IS_OVER: fn(&DestinationState) -> bool = DestinationState::is_over;
}
