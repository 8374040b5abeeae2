//! The result of an experiment.

use std::fmt;
use std::time::Duration;

use thiserror::Error;

use crate::campaign::fault::Kind;

/// The result of an experiment without a violation.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    /// The faults that struck.
    pub(crate) struck: Vec<Kind>,
    /// The number of faults whose moment never came.
    pub(crate) missed: usize,
    /// Where the guest was after the repair.
    pub(crate) ended: Ended,
    /// The messages of the control stream.
    pub(crate) messages: Vec<String>,
    /// Whether a command was in doubt for a while.
    pub(crate) in_doubt: bool,
    pub(crate) took: Duration,
}

/// Where a guest ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Source,
    Destination,
    /// Lost, as its only copy was killed.
    Lost(&'static str),
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "at the source",
            Self::Destination => "moved",
            Self::Lost(why) => why,
        })
    }
}

/// The violations of invariants.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Broken {
    /// Both run, or one resumed with old memory.
    #[error("two guests")]
    Doubled,
    /// Although its only copy was not killed.
    #[error("no guest")]
    Nowhere,
    #[error("wrong memory")]
    Memory,
    /// Also a locked or damaged image.
    #[error("wrong disk")]
    Disk,
    #[error("a command is wrong")]
    Untrue,
    #[error("in doubt although everything is repaired")]
    InDoubt,
    #[error("a command does not end")]
    Hangs,
    #[error("the next migration fails")]
    NextFails,
    #[error("a paused guest was run")]
    Started,
    #[error("a process ended by itself")]
    Crash,
    /// Although it was not stopped.
    #[error("a QEMU does not answer any more")]
    Mute,
}

/// How an experiment fails.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// An invariant does not hold.
    Violation {
        kind: Broken,
        /// What was seen.
        what: String,
        /// All events.
        story: Vec<String>,
    },
    /// The experiment could not run.
    Experiment(anyhow::Error),
}

impl<E: Into<anyhow::Error>> From<E> for Trouble {
    fn from(error: E) -> Self {
        Self::Experiment(error.into())
    }
}

/// A violation, without its story.
pub(crate) fn broken<T>(kind: Broken, what: impl Into<String>) -> Result<T, Trouble> {
    Err(Trouble::Violation {
        kind,
        what: what.into(),
        story: Vec::new(),
    })
}

impl Trouble {
    /// Adds all events.
    pub(crate) fn with_story(self, story: Vec<String>) -> Self {
        match self {
            Self::Violation { kind, what, .. } => Self::Violation { kind, what, story },
            Self::Experiment(error) => Self::Experiment(error.context(story.join("\n"))),
        }
    }
}
