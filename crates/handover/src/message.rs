//! The messages between a source and a destination, and their versions.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use thiserror::Error;

use crate::{FrameError, Incarnation};

/// The newest version of the protocol that this crate has.
pub const VERSION: u32 = 1;

/// The oldest one.
pub const OLDEST_VERSION: u32 = 1;

/// Fields that an engine adds to `prepare` and `prepared`. This crate does not interpret them.
pub type Details = serde_json::Map<String, serde_json::Value>;

/// Writes a structure as the fields that an engine adds to a message.
///
/// # Errors
/// When it cannot be written as JSON.
pub fn to_details(value: &impl Serialize) -> Result<Details, FrameError> {
    Ok(match serde_json::to_value(value)? {
        serde_json::Value::Object(details) => details,
        _ => Details::new(),
    })
}

/// Reads a structure from the fields that an engine has added to a message.
///
/// # Errors
/// When they are not those of the structure.
pub fn from_details<T: DeserializeOwned>(details: Details) -> Result<T, FrameError> {
    Ok(serde_json::from_value(details.into())?)
}

/// A message of the source.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case")]
#[non_exhaustive]
#[allow(missing_docs, reason = "a cause and a reason are texts for people")]
pub enum SourceMessage {
    /// Asks how `prepare` would be answered. Changes nothing.
    Inspect(Prepare),
    /// Requests the destination to get ready.
    Prepare(Prepare),
    /// The device state follows as raw bytes, behind this line.
    State {
        /// Its length in bytes.
        len: u64,
    },
    /// A part of the device state that goes ahead follows as raw bytes, behind this line.
    StatePart {
        /// Its length in bytes.
        len: u64,
    },
    /// The VMM is about to be told to switch to post-copy, once this is answered by `receiving`. From then on, the destination waits
    /// for a source that is silent.
    Switching,
    /// The guest belongs to the destination now. May be repeated over new connections: the answer is the same.
    Commit {
        /// Whether it shall run; it was paused at the source otherwise.
        resume: bool,
    },
    /// The guest stays at the source. After a `commit` it asks for the outcome: a guest that has not begun to run never will.
    Abort {
        #[serde(default)]
        cause: String,
    },
    /// The source knows the outcome and will not ask again.
    Settled,
}

/// The first message.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Prepare {
    /// The newest version that the source supports.
    pub protocol: u32,
    /// The oldest one; the same if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oldest_protocol: Option<u32>,
    /// Description of the guest, defined by the engine.
    #[serde(flatten)]
    pub details: Details,
}

impl Prepare {
    /// Offers all versions of this crate.
    pub fn new(details: Details) -> Self {
        Self {
            protocol: VERSION,
            oldest_protocol: Some(OLDEST_VERSION),
            details,
        }
    }

    /// The version to continue with.
    ///
    /// # Errors
    /// When the source supports none that this crate does.
    pub fn negotiate(&self) -> Result<u32, VersionMismatch> {
        negotiate(self.oldest_protocol.unwrap_or(self.protocol)..=self.protocol)
    }
}

/// A message of the destination.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case")]
#[non_exhaustive]
#[allow(missing_docs, reason = "a cause and a reason are texts for people")]
pub enum DestinationMessage {
    /// Answer to `inspect`, if the destination does not reject the migration.
    Inspected {
        /// What the source has to know.
        #[serde(flatten)]
        details: Details,
    },
    /// The destination is not ready yet. Repeated until it is.
    Preparing,
    /// The source may send.
    Prepared {
        /// The version to continue with.
        protocol: u32,
        /// The destination that accepts the attempt.
        incarnation: Incarnation,
        /// What else the source has to know.
        #[serde(flatten)]
        details: Details,
    },
    /// The destination rejects this migration.
    Refused { reason: String },
    /// All pages of a round have been written.
    Synced {
        /// The round's number.
        round: u64,
    },
    /// The device state has been loaded.
    Loaded,
    /// Answer to `switching`, and to a `commit` for which to ask again: the guest is being received.
    Receiving,
    /// The guest is about to run here.
    Starting,
    /// The guest has been observed here: continued, or paused if it was paused at the source.
    Running {
        /// The guest's state, as the VMM names it.
        #[serde(default)]
        state: String,
    },
    /// The guest has never run here and never will.
    Aborted {
        /// The destination that accepted the attempt.
        incarnation: Incarnation,
        cause: String,
    },
    /// The guest has run here and was sent on to another host.
    MovedOn,
    /// The guest has run here, or may have, and its VMM has ended. It is no longer here.
    Ended { cause: String },
    /// The guest was requested to run, and it is not known whether it runs. Ask again.
    Unclear { reason: String },
    /// This destination does not know the attempt, so it cannot report its outcome.
    Unknown {
        /// The destination that answers.
        incarnation: Incarnation,
        /// The known cause.
        reason: String,
    },
}

/// Two sides without a version in common.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "this side speaks versions {OLDEST_VERSION} to {VERSION} of the control protocol, the other side {} to {}: \
     install the same release on both hosts",
    .theirs.start(), .theirs.end()
)]
pub struct VersionMismatch {
    /// The versions of the other side.
    pub theirs: RangeInclusive<u32>,
}

/// The newest version that is also one of `theirs`.
///
/// # Errors
/// When there is none.
pub fn negotiate(theirs: RangeInclusive<u32>) -> Result<u32, VersionMismatch> {
    let newest = VERSION.min(*theirs.end());
    if newest < OLDEST_VERSION || !theirs.contains(&newest) {
        return Err(VersionMismatch { theirs });
    }
    Ok(newest)
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_newest_common_version_is_chosen() {
        for (theirs, chosen) in [
            (1..=1, Some(1)),
            (0..=1, Some(1)),
            (1..=9, Some(1)),
            (0..=0, None),
            (2..=9, None),
        ] {
            assert_eq!(negotiate(theirs.clone()).ok(), chosen, "{theirs:?}");
        }
        #[allow(clippy::reversed_empty_ranges, reason = "a peer may send anything")]
        let nonsense = negotiate(2..=1);
        assert!(nonsense.is_err());
    }

    /// Later versions find the range where this one writes it.
    #[test]
    fn the_range_of_versions_stays_where_it_is() {
        let ours = SourceMessage::Prepare(Prepare::new(Details::new()));
        let ours = serde_json::to_string(&ours).unwrap();
        assert_eq!(
            ours,
            r#"{"request":"prepare","protocol":1,"oldest-protocol":1}"#
        );
        let newer = r#"{"request":"prepare","protocol":3,"oldest-protocol":2,"colour":"blue"}"#;
        let Ok(SourceMessage::Prepare(newer)) = serde_json::from_str(newer) else {
            panic!("not understood")
        };
        assert_eq!(newer.negotiate().unwrap_err().theirs, 2..=3);
    }

    fn details() -> impl Strategy<Value = Details> {
        proptest::collection::btree_map("x-[a-z]{1,8}", ".{0,8}", 0..3).prop_map(|fields| {
            let fields = fields.into_iter();
            fields.map(|(name, text)| (name, text.into())).collect()
        })
    }

    pub(crate) fn from_source() -> impl Strategy<Value = SourceMessage> {
        prop_oneof![
            (any::<u32>(), any::<Option<u32>>(), details()).prop_map(
                |(protocol, oldest_protocol, details)| SourceMessage::Prepare(Prepare {
                    protocol,
                    oldest_protocol,
                    details
                })
            ),
            details().prop_map(|details| SourceMessage::Inspect(Prepare::new(details))),
            any::<u64>().prop_map(|len| SourceMessage::State { len }),
            any::<u64>().prop_map(|len| SourceMessage::StatePart { len }),
            Just(SourceMessage::Switching),
            any::<bool>().prop_map(|resume| SourceMessage::Commit { resume }),
            ".{0,40}".prop_map(|cause| SourceMessage::Abort { cause }),
            Just(SourceMessage::Settled),
        ]
    }

    pub(crate) fn from_destination() -> impl Strategy<Value = DestinationMessage> {
        let incarnation = || any::<[u8; 16]>().prop_map(Incarnation);
        prop_oneof![
            details().prop_map(|details| DestinationMessage::Inspected { details }),
            Just(DestinationMessage::Preparing),
            (any::<u32>(), incarnation(), details()).prop_map(
                |(protocol, incarnation, details)| DestinationMessage::Prepared {
                    protocol,
                    incarnation,
                    details
                }
            ),
            ".{0,40}".prop_map(|reason| DestinationMessage::Refused { reason }),
            any::<u64>().prop_map(|round| DestinationMessage::Synced { round }),
            Just(DestinationMessage::Loaded),
            Just(DestinationMessage::Receiving),
            Just(DestinationMessage::Starting),
            ".{0,40}".prop_map(|state| DestinationMessage::Running { state }),
            (incarnation(), ".{0,40}").prop_map(|(incarnation, cause)| {
                DestinationMessage::Aborted { incarnation, cause }
            }),
            Just(DestinationMessage::MovedOn),
            ".{0,40}".prop_map(|cause| DestinationMessage::Ended { cause }),
            ".{0,40}".prop_map(|reason| DestinationMessage::Unclear { reason }),
            (incarnation(), ".{0,40}").prop_map(|(incarnation, reason)| {
                DestinationMessage::Unknown {
                    incarnation,
                    reason,
                }
            }),
        ]
    }
}
