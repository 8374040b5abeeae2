//! What an experiment with two VMMs does: everything that chance decides, before it begins.

use std::fmt;

use crate::fault::{Fault, Kind};
use crate::random::Random;

/// One experiment.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Method, channels, and pages that the guest writes in a second.
    pub(crate) options: Vec<String>,
    pub(crate) faults: Vec<Fault>,
    /// The migration after one that failed goes to the same process, if it lives.
    pub(crate) same_process: bool,
}

/// What plans are drawn from.
#[derive(Clone, Debug)]
pub(crate) struct Choices {
    /// The messages of a migration without faults.
    pub(crate) words: Vec<&'static str>,
    pub(crate) kinds: Vec<(u64, Kind)>,
}

impl Plan {
    pub(crate) fn draw(seed: u64, number: u64, choices: &Choices) -> Self {
        let mut random = Random::of_experiment(seed, number);
        let mut faults = vec![Fault::draw(
            &mut random,
            &choices.kinds,
            &choices.words,
            BYTES,
        )];
        if random.percent(30) {
            let words: Vec<_> = choices
                .words
                .iter()
                .chain(&AFTER_A_FAULT)
                .copied()
                .collect();
            faults.push(Fault::draw(&mut random, &choices.kinds, &words, BYTES));
        }
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
        for (index, fault) in self.faults.iter().enumerate() {
            write!(f, "{}{fault}", if index == 0 { "" } else { "; " })?;
        }
        let next = if self.same_process {
            "the same process"
        } else {
            "another process"
        };
        write!(f, " ({}; the next to {next})", self.options.join(" "))
    }
}

/// Messages that only a migration in trouble has.
const AFTER_A_FAULT: [&str; 2] = ["request:abort", "answer:aborted"];
/// Less than what is sent of 4 MiB of which a quarter is zeros, with the best of the methods.
const BYTES: u64 = 1500 << 10;
