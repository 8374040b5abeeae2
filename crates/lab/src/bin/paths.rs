//! What several paths bring: a guest's whole memory over one wire of 1 Gbit/s, over two, and over two of which one is slower.
//!
//! ```text
//!  source QEMU ─unix─> vamoose migrate ═══ a path for each wire ═══> vamoose serve ─unix─> destination QEMU
//! ```
//! Random pages by method none, so that the wires are the limit. Times are those of the report, medians of rounds that take turns.
//! After each migration the whole RAM of both is compared. Needs root, for network namespaces.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;
use lab::net::{self, End, Link};
use lab::qemu::{self, Builder};
use lab::ram::{self, Fill};
use lab::vamoose::{Keys, Vamoose, program, state_dir};
use serde_json::Value;
use tempfile::TempDir;

/// Measure what several paths bring
#[derive(Parser, Debug)]
#[command(name = "paths", max_term_width = 100)]
struct Options {
    /// Memory of the guest in MiB
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    ram: u64,
    /// Number of rounds, in each of which every case runs once
    #[arg(long, value_name = "N", default_value_t = 3)]
    runs: usize,
    /// Channels of the migration
    #[arg(long, value_name = "N", default_value_t = 4)]
    channels: u8,
    /// Use TLS with keys instead of --insecure
    #[arg(long)]
    keys: bool,
    /// Program to measure [default: the one beside this program]
    #[arg(long, value_name = "PROGRAM")]
    vamoose: Option<PathBuf>,
}

/// Wires by their rates in Mbit/s.
const CASES: [&[u64]; 3] = [&[1000], &[1000, 1000], &[1000, 250]];

const LIMIT: Duration = Duration::from_secs(300);

fn main() -> Result<()> {
    let options = Options::parse();
    net::available()?;
    let mut times = vec![Vec::new(); CASES.len()];
    let mut shares = vec![String::new(); CASES.len()];
    for _ in 0..options.runs {
        for ((rates, times), shares) in CASES.iter().zip(&mut times).zip(&mut shares) {
            let report = migrate(&options, rates).with_context(|| format!("{rates:?} Mbit/s"))?;
            times.push(report["total-time"].as_f64().context("a time")? / 1e3);
            *shares = delivered(&report);
        }
    }
    println!(
        "{} MiB, {} channels, {}, median (lowest to highest) of {}:\n",
        options.ram,
        options.channels,
        if options.keys { "TLS" } else { "without TLS" },
        options.runs
    );
    println!("| wires, Mbit/s | seconds | times one wire | delivered by each, MiB |");
    println!("|---|---|---|---|");
    let one = middle(&times[0]);
    for ((rates, times), shares) in CASES.iter().zip(&times).zip(shares) {
        let rates: Vec<_> = rates.iter().map(u64::to_string).collect();
        let time = middle(times);
        let lowest = times.iter().copied().fold(f64::INFINITY, f64::min);
        let highest = times.iter().copied().fold(0.0, f64::max);
        println!(
            "| {} | {time:.2} ({lowest:.2} to {highest:.2}) | {:.2} | {shares} |",
            rates.join(" + "),
            one / time,
        );
    }
    Ok(())
}

/// Moves a guest over wires of these rates, and returns the report.
fn migrate(options: &Options, rates: &[u64]) -> Result<Value> {
    let bits: Vec<_> = rates.iter().map(|rate| Some(rate * 1_000_000)).collect();
    let link = Link::of_wires(&bits)?;
    let vamoose = program(options.vamoose.as_deref(), "vamoose")?;
    let security = Security::new(&vamoose, options.keys)?;
    let binary = qemu::available().last().context("there is no QEMU here")?;
    let machine = |incoming: bool| {
        let machine = Builder::bare(binary, options.ram << 20).preallocate();
        match incoming {
            true => machine.incoming().start(),
            false => machine.content(Fill::Random, 1).start(),
        }
    };
    let (mut source, destination) = (machine(false)?, machine(true)?);
    source.qmp.cont()?;
    let (monitors, state) = (TempDir::new()?, state_dir()?);
    std::os::unix::fs::symlink(destination.qmp_socket(), monitors.path().join("guest.qmp"))?;
    let mut serve = link.destination.command(&vamoose);
    serve.arg("serve").args(&security.destination);
    serve.arg("--qmp-dir").arg(monitors.path());
    serve
        .arg("--state-dir")
        .arg(state.path().join("destination"));
    // One address for all: the source's decides the wire.
    serve
        .arg("--listen")
        .arg(format!("tcp:{}:0", link.destination.address()));
    let server = Vamoose::start(&mut serve)?;
    let to = server.wait_for("taking migrations on ", LIMIT)?;
    let mut migrate = link.source.command(&vamoose);
    migrate.args([
        "migrate", "--json", "-", "--name", "guest", "--method", "none",
    ]);
    migrate.args(["--channels", &options.channels.to_string(), "--qmp"]);
    migrate.arg(source.qmp_socket());
    migrate.args(&security.source);
    migrate.arg("--state-dir").arg(state.path().join("source"));
    for wire in &link.wires {
        migrate.args([
            "--to",
            &to,
            "--bind",
            &wire.address(End::Source).to_string(),
        ]);
    }
    let ended = Vamoose::start(&mut migrate)?.finish(LIMIT)?;
    let ended = ended.success().with_context(|| server.stderr())?;
    ram::compare(source.ram(), destination.ram())?;
    serde_json::from_str(&ended.stdout).context("the report")
}

/// Options of the two ends.
struct Security {
    source: Vec<String>,
    destination: Vec<String>,
    _keys: Option<Keys>,
}

impl Security {
    fn new(vamoose: &Path, with_keys: bool) -> Result<Self> {
        if !with_keys {
            let insecure = || vec!["--insecure".to_owned()];
            return Ok(Self {
                source: insecure(),
                destination: insecure(),
                _keys: None,
            });
        }
        let keys = Keys::make(vamoose)?;
        let options = |host: &Path| vec!["--keys".to_owned(), host.display().to_string()];
        Ok(Self {
            source: options(&keys.source),
            destination: options(&keys.destination),
            _keys: Some(keys),
        })
    }
}

/// What each path has delivered.
fn delivered(report: &Value) -> String {
    let paths = report["link"]["paths"].as_array().into_iter().flatten();
    let mebibytes = |path: &Value| path["delivered-bytes"].as_u64().unwrap_or_default() >> 20;
    let each: Vec<_> = paths.map(|path| mebibytes(path).to_string()).collect();
    each.join(" + ")
}

fn middle(times: &[f64]) -> f64 {
    lab::median(times.iter().copied()).unwrap_or(f64::NAN)
}
