//! `vamoose bench`: migrates guests on this host by Vamoose and by stock QEMU, and reports tables.
//!
//! ```text
//!  scenarios (TOML) ─> cells ─> plan: rounds, side by side ─> measure ─> results.jsonl ─> report.md
//! ```

#![forbid(unsafe_code)]

mod clients;
mod codec;
mod corpus;
mod demo;
mod machine;
mod measure;
mod needs;
mod plan;
mod record;
mod report;
mod results;
mod scenario;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;

use measure::{Host, newest_qemu};
use needs::Found;
use plan::Plan;
use record::Machine;
use results::Results;
use scenario::{Contender, Guest, Scenario, Size};

/// Measure migrations by Vamoose beside stock QEMU's on this host
///
/// All migrations are real. A figure is kept only if the guest arrived intact: its RAM is compared, or the running guest has
/// verified it. Results are added to a folder; the same command continues an interrupted run.
#[derive(Parser, Debug)]
#[command(
    name = "vamoose-bench",
    version,
    max_term_width = 100,
    args_conflicts_with_subcommands = true
)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    run: RunOptions,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// List the scenarios
    List,
    /// Write the report of a run again: report.md
    Report {
        /// Folder of results
        #[arg(value_name = "DIR")]
        dir: PathBuf,
    },
    /// Move a running guest, pull the cable during a move, prove that nothing was lost, and compare with stock QEMU (a few minutes)
    Demo {
        /// Program to show [default: the one beside this program]
        #[arg(long, value_name = "PROGRAM")]
        vamoose: Option<PathBuf>,
    },
    /// Measure what each method makes of given pages: ratio, and speed in both directions
    Codec(codec::Options),
    /// Write the memory of a guest in which real programs have worked, for `codec`
    Dump(Dump),
}

#[derive(Args, Debug)]
struct Dump {
    /// base, postgres, jvm or web
    #[arg(hide_possible_values = true)]
    guest: Guest,
    /// File to write: the physical memory, page by page
    file: PathBuf,
    /// Memory of the guest
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    ram: Size,
}

#[derive(Args, Debug)]
struct RunOptions {
    /// Scenarios: names from `vamoose bench list`, dirty-N for N pages a second, or files NAME.toml [default: idle, silesia,
    /// half-zero, zero and links]
    #[arg(value_name = "SCENARIO")]
    scenarios: Vec<String>,
    /// Measure less: one round, small guests, only the first guest and number of channels of each scenario (five minutes on two
    /// processors)
    #[arg(long)]
    quick: bool,
    /// Folder of results
    #[arg(long, value_name = "DIR", default_value = "vamoose-bench")]
    out: PathBuf,
    /// Number of rounds [default: the scenario's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Maximum memory of guests that do not run [default: a quarter of the free memory]
    #[arg(long, value_name = "SIZE")]
    ram: Option<Size>,
    /// Only these contenders, such as `qemu zstd` or `migrate auto` (repeatable)
    #[arg(long, value_name = "CONTENDER")]
    contender: Vec<Contender>,
    /// Folder of files that fill memory [default: the Silesia corpus if it was fetched, else files of this host]
    #[arg(long, value_name = "DIR")]
    corpus: Option<PathBuf>,
    /// QEMU to measure with [default: the newest]
    #[arg(long, value_name = "VERSION")]
    qemu: Option<String>,
    /// Program to measure [default: the one beside this program]
    #[arg(long, value_name = "PROGRAM")]
    vamoose: Option<PathBuf>,
}

/// Scenarios of a command that names none.
const DEFAULT: [&str; 5] = ["idle", "silesia", "half-zero", "zero", "links"];

/// Maximum seconds that a link takes for the memory of a guest that does not run, without compression.
const SECONDS: u64 = 20;

/// The same with --quick, and the maximum memory of such a guest.
const QUICK_SECONDS: u64 = 4;
const QUICK_RAM: u64 = 256 << 20;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let ended = match &cli.command {
        Some(Command::List) => list(),
        Some(Command::Report { dir }) => report::write(dir),
        Some(Command::Demo { vamoose }) => return demo::run(vamoose.as_deref()),
        Some(Command::Codec(options)) => codec::run(options),
        Some(Command::Dump(options)) => dump(options),
        None => run(&cli.run),
    };
    lab::exit_code("vamoose-bench", ended)
}

fn list() -> Result<()> {
    for (name, scenario) in Scenario::built_in()? {
        println!("{name:12} {}", scenario.about);
    }
    Ok(())
}

fn dump(options: &Dump) -> Result<()> {
    let real = options.guest.real();
    let real = real.context("only base, postgres, jvm and web are guests of real programs")?;
    let memory = real.memory(&newest_qemu("")?, options.ram.0)?;
    fs::copy(memory, &options.file)
        .with_context(|| format!("writing {}", options.file.display()))?;
    Ok(())
}

fn run(options: &RunOptions) -> Result<()> {
    let (host, found) = Host::look(
        options.qemu.as_deref().unwrap_or(""),
        options.vamoose.as_deref(),
        options.corpus.as_deref(),
    )?;
    let scenarios = options.scenarios()?;
    let machine = Machine::look(&host)?;
    let mut results = Results::open(&options.out, &machine)?;
    let mut plan = Plan::new();
    for (name, scenario) in &scenarios {
        let cells = options.cells(name, scenario, &found);
        let (cells, missing) = found.sort(cells);
        for line in missing {
            eprintln!("{name}: {line}");
        }
        plan.add(&cells, options.rounds_of(scenario));
    }
    let stop = stop_by_signals()?;
    let ended = plan.carry_out(&host, &mut results, &stop);
    if results.is_any() {
        report::write(results.folder())?;
        eprintln!("{}", results.folder().join("report.md").display());
    }
    ended
}

/// Set by a signal that would end this program.
fn stop_by_signals() -> Result<Arc<AtomicBool>> {
    let stop = Arc::<AtomicBool>::default();
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        flag::register(signal, stop.clone()).context("cannot catch signals")?;
    }
    Ok(stop)
}

impl RunOptions {
    /// The scenarios to measure, with their names in the results.
    fn scenarios(&self) -> Result<Vec<(String, Scenario)>> {
        let names = match &self.scenarios[..] {
            [] => DEFAULT.map(str::to_owned).to_vec(),
            names => names.to_vec(),
        };
        let named = |name: String| {
            let path = Path::new(&name);
            if path.extension().is_none_or(|extension| extension != "toml") {
                let scenario = Scenario::named(&name)?;
                return Ok((name, scenario));
            }
            let text = fs::read_to_string(path).with_context(|| format!("reading {name}"))?;
            let stem = path.file_stem().unwrap_or_default().to_string_lossy();
            let scenario = Scenario::parse(&text).with_context(|| name.clone())?;
            Ok((stem.into_owned(), scenario))
        };
        names.into_iter().map(named).collect()
    }

    fn cells(&self, name: &str, scenario: &Scenario, found: &Found) -> Vec<record::Cell> {
        let mut scenario = scenario.clone();
        let mut ram = self.ram.map_or(found.most_ram(), |size| size.0);
        let mut seconds = SECONDS;
        if self.quick {
            scenario.guests.truncate(1);
            scenario.channels.truncate(1);
            ram = ram.min(QUICK_RAM);
            seconds = QUICK_SECONDS;
        }
        let mut cells = scenario.cells(name, ram, seconds);
        let is_wanted = |cell: &record::Cell| {
            self.contender.is_empty() || self.contender.contains(&cell.contender)
        };
        cells.retain(is_wanted);
        cells
    }

    fn rounds_of(&self, scenario: &Scenario) -> u32 {
        let usual = if self.quick { 1 } else { scenario.rounds };
        self.rounds.unwrap_or(usual)
    }
}
