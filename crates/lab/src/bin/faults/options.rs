//! The command line.

use std::{num::NonZeroUsize, thread};

use clap::Parser;
use lab::process::now;

/// Break migrations at random moments until an invariant does not hold
#[derive(Parser, Debug)]
#[command(name = "faults", max_term_width = 100)]
pub(crate) struct Options {
    /// Stop after this many faults [default: 200, without limit if --minutes is given]
    #[arg(long, value_name = "N")]
    faults: Option<u64>,
    /// Stop after this many minutes
    #[arg(long, value_name = "N")]
    pub(crate) minutes: Option<u64>,
    /// Random seed [default: a new one, which is printed]
    #[arg(long, value_name = "N", default_value_t = any_seed(), hide_default_value = true)]
    pub(crate) seed: u64,
    /// Number of experiments at once [default: two per processor]
    #[arg(long, value_name = "N")]
    jobs: Option<NonZeroUsize>,
    /// Run only this experiment, and print all of its events
    #[arg(long, value_name = "N")]
    pub(crate) experiment: Option<u64>,
    /// Use only faults whose name contains this, such as `kill` (repeatable)
    #[arg(long, value_name = "TEXT")]
    pub(crate) only: Vec<String>,
}

impl Options {
    /// The number of faults to stop after.
    pub(crate) fn faults(&self) -> u64 {
        let default = if self.minutes.is_some() {
            u64::MAX
        } else {
            200
        };
        self.faults.unwrap_or(default)
    }

    pub(crate) fn jobs(&self) -> usize {
        let processors = || thread::available_parallelism().map_or(1, usize::from);
        self.jobs.map_or_else(|| 2 * processors(), usize::from)
    }
}

/// A seed of few digits, which are easy to type.
fn any_seed() -> u64 {
    u64::from(now().subsec_micros())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &[&str]) -> Result<Options, clap::Error> {
        Options::try_parse_from([&["faults"], words].concat())
    }

    #[test]
    fn a_time_alone_is_no_number_of_faults() {
        assert_eq!(parse(&[]).unwrap().faults(), 200);
        let options = parse(&["--minutes", "3", "--seed", "5"]).unwrap();
        assert_eq!((options.faults(), options.seed), (u64::MAX, 5));
        let options = parse(&["--minutes", "3", "--faults", "9"]).unwrap();
        assert_eq!(options.faults(), 9);
    }

    #[test]
    fn nonsense_is_refused() {
        for words in [
            &["--nonsense"][..],
            &["--seed"],
            &["--seed", "x"],
            &["--jobs", "0"],
        ] {
            assert!(parse(words).is_err(), "{words:?}");
        }
    }
}
