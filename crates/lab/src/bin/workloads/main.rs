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
//! has not ended within `--limit` seconds is cancelled, and the guest stays where it is.

mod clients;
mod contender;
mod pgbench;
mod redis;
mod report;
mod stage;
mod workload;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use lab::vamoose::program;
use lab::{net, qemu};

use contender::Contender;
use stage::Stage;
use workload::Workload;

/// Measure migrations of guests in which Redis, PostgreSQL or a compiler runs
#[derive(Parser, Debug)]
#[command(name = "workloads", max_term_width = 100)]
struct Options {
    /// Number of rounds, in each of which every contender moves each guest once
    #[arg(long, value_name = "N", default_value = "3")]
    runs: usize,
    /// Rate of the link, in Mbit/s
    #[arg(long, value_name = "N", default_value = "1000")]
    rate: u64,
    /// Downtime limit, in milliseconds
    #[arg(long, value_name = "MS", default_value = "300")]
    downtime_limit: u64,
    /// Cancel a migration that takes longer, in seconds
    #[arg(long, value_name = "S", default_value = "60")]
    limit: u64,
    /// Only these workloads (repeatable)
    #[arg(long, value_enum)]
    workload: Vec<Workload>,
    /// Only these contenders (repeatable)
    #[arg(long, value_enum)]
    contender: Vec<Contender>,
    /// Program to measure [default: the one beside this program]
    #[arg(long, value_name = "PROGRAM")]
    vamoose: Option<PathBuf>,
    /// Write each migration as a line of JSON too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Which migrations, and how.
struct Conditions {
    qemu: qemu::Binary,
    vamoose: PathBuf,
    /// Bits per second.
    rate: u64,
    /// In milliseconds.
    downtime_limit: u64,
    limit: Duration,
}

fn main() -> ExitCode {
    lab::exit_code("workloads", run(&Options::parse()))
}

fn run(options: &Options) -> Result<()> {
    ensure!(options.runs > 0, "--runs must be at least 1");
    net::available()?;
    let qemu = qemu::available().last();
    let conditions = Conditions {
        qemu: qemu
            .context("there is no QEMU: run scripts/setup qemu")?
            .clone(),
        vamoose: program(options.vamoose.as_deref(), "vamoose")?,
        rate: options.rate * 1_000_000,
        downtime_limit: options.downtime_limit,
        limit: Duration::from_secs(options.limit),
    };
    let contenders = chosen(&options.contender);
    println!("{}", report::heading(&conditions)?);
    let mut lines = String::new();
    for workload in chosen(&options.workload) {
        let runs = measure(workload, &contenders, options.runs, &conditions)
            .with_context(|| format!("workload {}", workload.name()))?;
        println!("{}", report::table(workload, &contenders, &runs));
        lines += &report::json_lines(workload, &runs)?;
    }
    if let Some(path) = &options.json {
        std::fs::write(path, lines).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

/// Those that the user has named, or all.
fn chosen<T: clap::ValueEnum>(named: &[T]) -> Vec<T> {
    match named {
        [] => T::value_variants().to_vec(),
        _ => named.to_vec(),
    }
}

/// All migrations of one workload, in the order in which they were made.
fn measure(
    workload: Workload,
    contenders: &[Contender],
    rounds: usize,
    conditions: &Conditions,
) -> Result<Vec<report::Run>> {
    let mut stage = Stage::set(workload, conditions)?;
    let mut migrations = Vec::new();
    for round in 0..rounds {
        for step in 0..contenders.len() {
            let contender = contenders[(round + step) % contenders.len()];
            let (name, number) = (contender.name(), round + 1);
            let migration = stage
                .migrate(contender)
                .with_context(|| format!("{name}, round {number}"))?;
            eprintln!(
                "{}, round {number} of {rounds}: {name}: {migration}",
                workload.name()
            );
            migrations.push(migration);
        }
    }
    let samples = stage.end()?;
    let run = |migration| report::Run::of(migration, &samples);
    Ok(migrations.into_iter().map(run).collect())
}
