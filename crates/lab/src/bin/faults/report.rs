//! What an experiment has shown.

use std::fmt;
use std::time::Duration;

use crate::fault::{Fault, Kind};

/// An experiment that is over.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    /// Its faults: those that struck, and those whose moment never came.
    pub(crate) struck: Vec<Kind>,
    pub(crate) missed: Vec<Kind>,
    /// Where the guest was when everything had been repaired.
    pub(crate) ended: Ended,
    /// Whether a command was in doubt for a while.
    pub(crate) in_doubt: bool,
    /// Whether the guest has stayed and its destination was not ended, so that it waits for nothing.
    pub(crate) left_over: bool,
    pub(crate) took: Duration,
}

/// Those of `faults` that did not strike.
pub(crate) fn missed(faults: &[Fault], struck: &[Kind]) -> Vec<Kind> {
    let mut missed: Vec<_> = faults.iter().map(|fault| fault.kind).collect();
    for kind in struck {
        if let Some(index) = missed.iter().position(|missed| missed == kind) {
            missed.remove(index);
        }
    }
    missed
}

/// Where a guest ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Source,
    Destination,
    /// With whom: its only copy was killed.
    Lost(&'static str),
    /// Unknown, and need not be known.
    InDoubt,
}

/// An invariant that does not hold.
#[derive(Clone, Debug)]
pub(crate) struct Violation {
    pub(crate) kind: Broken,
    /// What was seen.
    pub(crate) what: String,
    /// All that happened.
    pub(crate) story: Vec<String>,
}

/// The invariants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Broken {
    /// Two guests ran, or one went on with old memory.
    Doubled,
    /// The guest runs nowhere, and its only copy was not killed.
    Nowhere,
    /// Memory that is not what it has to be.
    Memory,
    /// A command says what is not true.
    Untrue,
    /// Everything is repaired, and a command does not know, or does not end.
    InDoubt,
    Hangs,
    /// The migration after a failure fails.
    NextFails,
    /// A guest that was paused was let run.
    Started,
    /// A process that was not killed has ended.
    Crash,
    /// A QEMU that was not stopped does not answer.
    Mute,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Doubled => "two guests",
            Self::Nowhere => "no guest",
            Self::Memory => "wrong memory",
            Self::Untrue => "a command says what is not true",
            Self::InDoubt => "in doubt although everything is repaired",
            Self::Hangs => "a command does not end",
            Self::NextFails => "the next migration fails",
            Self::Started => "a paused guest was let run",
            Self::Mute => "a QEMU does not answer any more",
            Self::Crash => "a process ended by itself",
        })
    }
}

/// How an experiment goes wrong: by an invariant that does not hold, or because it could not be made.
#[derive(Debug)]
pub(crate) enum Trouble {
    Violation(Violation),
    Experiment(anyhow::Error),
}

impl<E: Into<anyhow::Error>> From<E> for Trouble {
    fn from(error: E) -> Self {
        Self::Experiment(error.into())
    }
}

impl Trouble {
    /// A violation that is reported elsewhere.
    pub(crate) fn broken(kind: Broken, what: impl Into<String>) -> Self {
        Self::Violation(Violation {
            kind,
            what: what.into(),
            story: Vec::new(),
        })
    }

    /// With all that happened.
    pub(crate) fn with_story(self, story: Vec<String>) -> Self {
        match self {
            Self::Violation(violation) => Self::Violation(Violation { story, ..violation }),
            Self::Experiment(error) => Self::Experiment(error.context(story.join("\n"))),
        }
    }
}
