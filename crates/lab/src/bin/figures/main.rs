//! Measures what Vamoose costs beside stock QEMU, on this machine, and says which of the project's figures hold.
//!
//! ```text
//!  cargo build --release -p vamoose -p vamoose-demo -p lab
//!  target/release/figures [--ram 3G] [--runs 3] [--json FILE] [--corpus DIR] [--only NAME]...
//! ```
//!
//! Cases `cpu/...`, `memory/...` and `live/...` move a guest that does not run (module [`still`]), `downtime/...` one
//! that does (module [`running`]), `live-downtime/...` one of the crate `live` (module [`live`]). Each case runs once per round, in an order that turns by one from round to round, and
//! counts with the median of its rounds (more of them for downtimes, which vary most): on a shared machine only what was
//! measured side by side can be compared.
//! `docs/figures/README.md` tells how to read the result.

mod criteria;
mod live;
mod options;
mod report;
mod running;
mod still;

use std::{process::ExitCode, time::Instant};

use anyhow::{Context, Result};
use clap::Parser as _;
use lab::{net, qemu};
use options::Options;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("figures: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let options = Options::parse();
    options.check()?;
    let (stills, runnings, lives) = (
        still::cases(&options),
        running::cases(&options),
        live::cases(&options),
    );
    still::check(&stills)?;
    if !(runnings.is_empty() && lives.is_empty()) {
        net::available()?;
    }
    let qemu = qemu::available().last();
    let qemu = qemu.context("there is no QEMU: run scripts/setup qemu")?;
    let setup = report::SetUp::look(&options, qemu)?;

    let corpus = options.corpus()?;
    let still = still::measure(&stills, &options, qemu, &corpus)?;
    let running = running::measure(&runnings, &options, qemu)?;

    let figures = report::Figures {
        still,
        running,
        live: live::measure(&lives, &options)?,
    };

    let verdicts = criteria::judge(&figures, &options);
    print!("{}", report::markdown(&setup, &figures, &verdicts));
    if let Some(path) = &options.json {
        let json = report::json(&setup, &figures, &verdicts);
        std::fs::write(path, format!("{json:#}\n"))
            .with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

/// Calls `measure` for every case once per round, each round starting with another case, and gives each case's results.
fn interleaved<C, R>(
    cases: &[C],
    rounds: usize,
    name: impl Fn(&C) -> String,
    mut measure: impl FnMut(&C) -> Result<R>,
) -> Result<Vec<Vec<R>>> {
    let mut results: Vec<Vec<R>> = cases.iter().map(|_| Vec::new()).collect();
    for round in 0..rounds {
        for step in 0..cases.len() {
            let at = (round + step) % cases.len();
            let (case, start) = (&cases[at], Instant::now());
            let name = name(case);
            let result = measure(case).with_context(|| format!("{name}, round {}", round + 1))?;
            eprintln!(
                "round {} of {rounds}: {name} ({:.0} s)",
                round + 1,
                start.elapsed().as_secs_f64()
            );
            results[at].push(result);
        }
    }
    Ok(results)
}

/// The middle one of some values, or the mean of the middle two; `None` when there are none.
fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let (low, high) = (values.len().checked_sub(1)? / 2, values.len() / 2);
    Some((values[low] + values[high]) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median([]), None);
        assert_eq!(median([3.0]), Some(3.0));
        assert_eq!(median([3.0, 1.0, 9.0]), Some(3.0));
        assert_eq!(median([4.0, 1.0, 9.0, 2.0]), Some(3.0));
    }

    #[test]
    fn every_case_runs_once_a_round_and_the_first_one_changes() {
        let mut order = Vec::new();
        let results = interleaved(
            &["a", "b"],
            2,
            |case| (*case).to_owned(),
            |case| {
                order.push(*case);
                Ok(order.len())
            },
        );
        assert_eq!(results.unwrap(), [[1, 4], [2, 3]]);
        assert_eq!(order, ["a", "b", "b", "a"]);
    }
}
