//! What an experiment has shown.

use std::fmt;
use std::time::Duration;

use thiserror::Error;

use crate::fault::Kind;

/// An experiment that is over.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    /// Its faults that struck.
    pub(crate) struck: Vec<Kind>,
    /// How many have not, as their moment never came.
    pub(crate) missed: usize,
    /// Where the guest was when everything had been repaired.
    pub(crate) ended: Ended,
    /// Whether a command was in doubt for a while.
    pub(crate) in_doubt: bool,
    /// Whether the guest has stayed and its destination was not ended, so that it waits for nothing.
    pub(crate) left_over: bool,
    pub(crate) took: Duration,
    /// From the guest's pause at the source until it ran at the destination.
    pub(crate) downtime: Option<Duration>,
}

/// Where a guest ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Source,
    Destination,
    /// Its only copy was killed: whose.
    Lost(&'static str),
    /// The source's QEMU has aborted by itself, see docs/qemu.md.
    Documented,
    /// Unknown, and need not be known.
    InDoubt,
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "at the source",
            Self::Destination => "moved",
            Self::Lost(why) => why,
            Self::Documented => "documented",
            Self::InDoubt => "in doubt",
        })
    }
}

/// The invariants, by what is said when they do not hold.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Broken {
    /// Both run, or one went on with old memory.
    #[error("two guests")]
    Doubled,
    /// And its only copy was not killed.
    #[error("no guest")]
    Nowhere,
    #[error("wrong memory")]
    Memory,
    /// Or its image is locked or damaged.
    #[error("wrong disk")]
    Disk,
    #[error("a command says what is not true")]
    Untrue,
    #[error("in doubt although everything is repaired")]
    InDoubt,
    #[error("a command does not end")]
    Hangs,
    #[error("the next migration fails")]
    NextFails,
    #[error("a paused guest was let run")]
    Started,
    #[error("a short cut ended the migration")]
    Stayed,
    #[error("a process ended by itself")]
    Crash,
    /// Which was not stopped.
    #[error("a QEMU does not answer any more")]
    Mute,
}

/// How an experiment goes wrong.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// By an invariant that does not hold.
    Violation {
        kind: Broken,
        /// What was seen.
        what: String,
        /// All that happened.
        story: Vec<String>,
    },
    /// Because it could not be made.
    Experiment(anyhow::Error),
}

impl<E: Into<anyhow::Error>> From<E> for Trouble {
    fn from(error: E) -> Self {
        Self::Experiment(error.into())
    }
}

/// An invariant that does not hold, whose story is told later.
pub(crate) fn broken<T>(kind: Broken, what: impl Into<String>) -> Result<T, Trouble> {
    Err(Trouble::Violation {
        kind,
        what: what.into(),
        story: Vec::new(),
    })
}

impl Trouble {
    /// With all that happened.
    pub(crate) fn with_story(self, story: Vec<String>) -> Self {
        match self {
            Self::Violation { kind, what, .. } => Self::Violation { kind, what, story },
            Self::Experiment(error) => Self::Experiment(error.context(story.join("\n"))),
        }
    }
}
