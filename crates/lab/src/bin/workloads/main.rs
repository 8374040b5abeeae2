//! Moves guests with real programs in them while clients use these, and shows what the clients notice: stock QEMU beside
//! Vamoose, over a link of a given rate.
//!
//! ```text
//!                         clients' namespace: Redis clients, pgbench
//!                     ┌──────────────────────┴──────────────────────┐
//!  namespace here     │                                             │     namespace there
//!    guest ─ source QEMU ══════════════ 1 Gbit/s ══════════════ destination QEMU ─ guest
//!            └ vamoose migrate                    vamoose serve ┘
//! ```
//!
//! One guest for each workload: it moves on from contender to contender, to and fro, and its clients go on all the time
//! (see [`stage`]). In each round every contender has its turn, and the first changes from round to round. A migration that
//! has not ended within `--limit` seconds is cancelled, and the guest stays where it is. With `--json` a run that was
//! interrupted goes on with the first workload that is not complete (see [`plan`]).

mod clients;
mod contender;
mod pgbench;
mod plan;
mod redis;
mod report;
mod stage;
mod workload;

use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use lab::vamoose::program;
use lab::{net, qemu};
use serde::{Deserialize, Serialize};

use contender::Contender;
use plan::{Plan, Results, TimeLeft};
use workload::Workload;

/// Measure migrations of guests in which Redis, PostgreSQL or a compiler runs, or a program that writes memory
#[derive(Parser, Debug)]
#[command(name = "workloads", max_term_width = 100)]
struct Options {
    /// Number of rounds, in each of which every contender moves each guest once
    #[arg(long, value_name = "N", default_value = "5")]
    runs: usize,
    /// Rate of the link, in Mbit/s [default: 1000 for programs that write memory, 200 for the others]
    #[arg(long, value_name = "N")]
    rate: Option<u64>,
    /// Downtime limit, in milliseconds
    #[arg(long, value_name = "MS", default_value = "300")]
    downtime_limit: u64,
    /// Cancel a migration that takes longer, in seconds
    #[arg(long, value_name = "S", default_value = "20")]
    limit: u64,
    /// Leave a contender out once so many of its migrations of a guest were cancelled
    #[arg(long, value_name = "N", default_value = "2")]
    give_up: usize,
    /// Only these workloads (repeatable)
    #[arg(long, value_enum)]
    workload: Vec<Workload>,
    /// Only these contenders (repeatable)
    #[arg(long, value_enum)]
    contender: Vec<Contender>,
    /// Method of Vamoose
    #[arg(long, value_name = "METHOD", default_value = "auto")]
    method: String,
    /// Page cache of Vamoose [default: its own]
    #[arg(long, value_name = "SIZE")]
    page_cache: Option<String>,
    /// QEMU to measure with; 7.2 loses writes of busy guests under TCG [default: the newest]
    #[arg(long, value_name = "VERSION")]
    qemu: Option<String>,
    /// Program to measure [default: the one beside this program]
    #[arg(long, value_name = "PROGRAM")]
    vamoose: Option<PathBuf>,
    /// Append each migration as a line of JSON too; those that are there already are not made again
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// With what migrations are made.
struct Conditions {
    qemu: qemu::Binary,
    vamoose: PathBuf,
    terms: Terms,
}

/// What migrations must have in common to be compared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Terms {
    qemu: String,
    /// Of the link, in Mbit/s.
    rate: u64,
    /// In milliseconds.
    downtime_limit: u64,
    /// In seconds.
    limit: u64,
    /// Vamoose's.
    method: String,
    page_cache: Option<String>,
}

impl fmt::Display for Terms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { qemu, rate, .. } = self;
        write!(
            f,
            "QEMU {qemu}, link of {rate} Mbit/s, downtime limit {} ms, cancelled after {} s",
            self.downtime_limit, self.limit
        )
    }
}

fn main() -> ExitCode {
    lab::exit_code("workloads", run(&Options::parse()))
}

fn run(options: &Options) -> Result<()> {
    ensure!(options.runs > 0, "--runs must be at least 1");
    net::available()?;
    let qemu = qemu_of(options)?;
    let vamoose = program(options.vamoose.as_deref(), "vamoose")?;
    let mut results = Results::open(options.json.as_deref())?;
    let mut plans = Vec::new();
    for workload in chosen(&options.workload) {
        let terms = Terms {
            qemu: qemu.version.to_string(),
            rate: options.rate.unwrap_or(workload.link_rate()),
            downtime_limit: options.downtime_limit,
            limit: options.limit,
            method: options.method.clone(),
            page_cache: options.page_cache.clone(),
        };
        let before = results.take(workload, &terms);
        plans.push((workload, terms, Plan::new(options, before)));
    }
    let mut left = TimeLeft::new(plans.iter().map(|(.., plan)| plan.turns.len()).sum());
    println!("{}", report::heading()?);
    for (workload, terms, plan) in plans {
        let conditions = Conditions {
            qemu: qemu.clone(),
            vamoose: vamoose.clone(),
            terms,
        };
        let runs = plan
            .carry_out(workload, &conditions, &mut results, &mut left)
            .with_context(|| format!("workload {}", workload.name()))?;
        println!("{}", report::table(workload, &conditions.terms, &runs));
    }
    Ok(())
}

fn qemu_of(options: &Options) -> Result<qemu::Binary> {
    let wanted = options.qemu.as_deref().unwrap_or("");
    let fits = |binary: &&qemu::Binary| binary.version.to_string().starts_with(wanted);
    let found = qemu::available().iter().rfind(fits);
    let found = found.with_context(|| format!("no QEMU {wanted}: run scripts/setup qemu"));
    found.cloned()
}

/// Those that the user has named, or all.
fn chosen<T: clap::ValueEnum>(named: &[T]) -> Vec<T> {
    match named {
        [] => T::value_variants().to_vec(),
        _ => named.to_vec(),
    }
}
