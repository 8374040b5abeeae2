//! Where the guest is after an attempt to migrate it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Where the guest is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuestLocation {
    /// At the source, as before the attempt: running if it ran then.
    Source,
    /// At the destination, and nowhere else.
    Destination,
    /// Handed over to the destination, and sent on from there since.
    MovedOn,
    /// No longer at the source, and never handed over: its VMM ended while no process followed it, or another tool moved it.
    /// The destination may still hold a paused copy, which only a person can continue.
    Gone,
    /// Paused at the source, which has sent all of it: in this attempt, or for another tool, whose destination has the guest
    /// then. Only a person can tell. No `commit` has been sent.
    Unconfirmed,
    /// Paused at the source, and perhaps running at the destination: a `commit` has been sent. Only the destination's
    /// answer, or a person who has looked there, can decide.
    InDoubt,
    /// Ended: with the source before the hand-over, or with the destination afterwards. The other side may
    /// still hold a paused copy from the moment of the hand-over, which only a person can continue.
    Lost,
}

impl fmt::Display for GuestLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "the guest stays at the source",
            Self::Destination => "the guest is at the destination",
            Self::MovedOn => "the guest has moved on from the destination",
            Self::Gone => {
                "the guest is no longer at the source: it ended there, or another tool moved it"
            }
            Self::Unconfirmed => {
                "please confirm that no other tool has moved the guest from the source"
            }
            Self::InDoubt => {
                "the guest is paused at the source and may be running at the destination"
            }
            Self::Lost => "the guest has ended",
        })
    }
}

/// How an attempt ended, as far as this run of the source can determine.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Decision {
    /// Where the guest is.
    pub guest: GuestLocation,
    /// Why it is not at the destination; `None` if it is.
    pub cause: Option<String>,
}
