//! Measures what Vamoose costs beside stock QEMU, on this machine, and says which of the project's figures hold.
//!
//! ```text
//!  cargo build --release -p vamoose -p vamoose-demo -p lab
//!  target/release/figures [--ram 3G] [--runs 3] [--json FILE] [--corpus DIR] [--only NAME]...
//! ```
//!
//! Cases `cpu/...`, `memory/...` and `live/...` move a guest that does not run (module [`still`]), `downtime/...` one
//! that does (module [`running`]), `live-downtime/...` one of the crate `live` (module [`live`]), and `links/...`, where named, a still one
//! over links of given rates (module [`links`]). Each case runs once per round, in an order that turns by one from round to round, and
//! counts with the median of its rounds (more of them for downtimes, which vary most): on a shared machine only what was
//! measured side by side can be compared.
//! `docs/figures/README.md` tells how to read the result.

mod criteria;
mod links;
mod live;
mod options;
mod report;
mod running;
mod still;

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Parser as _;
use lab::{net, qemu};
use options::Options;

fn main() -> ExitCode {
    lab::exit_code("figures", run(&Options::parse()))
}

fn run(options: &Options) -> Result<()> {
    let (stills, runnings, lives, linked) = (
        still::cases(options),
        running::cases(options),
        live::cases(options),
        links::cases(options),
    );
    still::check(&stills)?;
    if !(runnings.is_empty() && lives.is_empty() && linked.is_empty()) {
        net::available()?;
    }
    let qemu = qemu::available().last();
    let qemu = qemu.context("there is no QEMU: run scripts/setup qemu")?;
    let vamoose = options.vamoose()?;
    let demo = options.demo(&vamoose)?;
    let setup = report::SetUp::look(options, qemu, &vamoose)?;

    let corpus = options.corpus()?;
    let figures = report::Figures {
        still: still::measure(stills, options, qemu, &corpus, &vamoose, &demo)?,
        running: running::measure(runnings, options, qemu, &vamoose)?,
        live: live::measure(lives, &demo)?,
        links: links::measure(linked, options, qemu, &corpus, &vamoose)?,
    };

    let verdicts = criteria::judge(&figures, options);
    print!("{}", report::markdown(&setup, &figures, &verdicts));
    if let Some(path) = &options.json {
        let json = report::json(&setup, &figures, &verdicts);
        std::fs::write(path, format!("{json:#}\n"))
            .with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

/// A case and what each of its rounds has shown.
struct Measured<C, R> {
    case: C,
    rounds: Vec<R>,
}

/// Calls `measure` for every case once per round, each round starting with another case.
fn interleaved<C, R>(
    cases: Vec<C>,
    rounds: usize,
    name: impl Fn(&C) -> &str,
    mut measure: impl FnMut(&C) -> Result<R>,
) -> Result<Vec<Measured<C, R>>> {
    let measured = |case| Measured {
        case,
        rounds: Vec::new(),
    };
    let mut all: Vec<_> = cases.into_iter().map(measured).collect();
    for round in 0..rounds {
        for step in 0..all.len() {
            let at = (round + step) % all.len();
            let (case, start) = (&all[at].case, Instant::now());
            let (name, number) = (name(case), round + 1);
            let result = measure(case).with_context(|| format!("{name}, round {number}"))?;
            let seconds = start.elapsed().as_secs_f64();
            eprintln!("round {number} of {rounds}: {name} ({seconds:.0} s)");
            all[at].rounds.push(result);
        }
    }
    Ok(all)
}

/// A number for a table.
fn or_dash(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_runs_once_a_round_and_the_first_one_changes() {
        let mut order = Vec::new();
        let results = interleaved(
            vec!["a", "b"],
            2,
            |case| case,
            |case| {
                order.push(*case);
                Ok(order.len())
            },
        );
        let results: Vec<_> = results.unwrap().into_iter().map(|it| it.rounds).collect();
        assert_eq!(results, [[1, 4], [2, 3]]);
        assert_eq!(order, ["a", "b", "b", "a"]);
    }
}
