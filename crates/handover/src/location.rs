//! Where the guest is after an attempt to migrate it.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Where the guest is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuestLocation {
    /// At the source, as it was before the attempt: it runs if it ran.
    Source,
    /// At the destination, and nowhere else.
    Destination,
    /// It was handed over to the destination, and has been sent on from there since.
    MovedOn,
    /// Not at the source any more, and never handed over: its VMM has ended while no process followed it, or another tool has
    /// moved it. The destination may still hold a paused copy, which nothing but a person's word continues.
    Gone,
    /// Paused at the source, which has sent all of it: in this attempt, and then it may be committed, or for somebody else, who
    /// has it. Only a person can tell. No `commit` has been sent.
    Unconfirmed,
    /// Paused at the source, and perhaps running at the destination, to which a `commit` has been sent. Only the destination's
    /// answer, or a person who has looked there, can decide.
    InDoubt,
    /// It has ended: with the source before it was handed over, or with the destination afterwards. The other side may
    /// still hold a paused copy, of the moment of the hand-over, which nothing but a person's word continues.
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
