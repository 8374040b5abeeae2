//! The plan of an experiment with two VMMs: everything that is random.

use std::fmt;

use crate::fault::{Choices, Fault, list};
use crate::random::Random;

/// One experiment.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Method, channels, and pages that the guest writes per second.
    pub(crate) options: Vec<String>,
    pub(crate) faults: Vec<Fault>,
    /// The migration after a failed one goes to the same process, if it still runs.
    pub(crate) same_process: bool,
}

impl Plan {
    pub(crate) fn draw(seed: u64, number: u64, choices: &Choices) -> Self {
        let mut random = Random::of_experiment(seed, number);
        let faults = choices.draw(&mut random);
        let options = [
            random.choose(&["none", "zstd", "zlib", "lz4"]),
            random.choose(&["1", "2", "4"]),
            random.choose(&["200", "2000", "10000"]),
        ];
        Self {
            options: options.map(str::to_owned).to_vec(),
            faults,
            same_process: random.percent(50),
        }
    }

    /// The plainest migration.
    pub(crate) fn without_faults() -> Self {
        Self {
            options: ["none", "2", "2000"].map(str::to_owned).to_vec(),
            faults: Vec::new(),
            same_process: false,
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (faults, options) = (list(&self.faults), self.options.join(" "));
        let next = match self.same_process {
            true => "the same",
            false => "another",
        };
        write!(f, "{faults} ({options}; the next to {next} process)")
    }
}
