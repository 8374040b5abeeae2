//! `make paths`: what several paths gain. A guest's memory moves over one wire of 1 Gbit/s, over two, and over two of which one is
//! slower. The pages are random and the method is none, so that the wires are the limit.

use std::time::Duration;

use anyhow::{Context as _, Result};
use lab::{
    net::{self, End, Link},
    qemu::{self, Builder},
    ram::{self, Fill},
    vamoose::{Vamoose, state_dir},
};
use serde_json::Value;
use tempfile::TempDir;

use crate::common::{MIB, number, vamoose};

/// The wires of each case by their rates in Mbit/s.
const CASES: [&[u64]; 3] = [&[1000], &[1000, 1000], &[1000, 250]];

const LIMIT: Duration = Duration::from_secs(300);

/// PATHS_RAM is the guest's memory in MiB, PATHS_RUNS how often each case runs, in turn.
#[test]
#[ignore = "minutes, as root"]
fn several_paths_are_measured() -> Result<()> {
    let (ram, runs) = (number("PATHS_RAM", 1024)?, number("PATHS_RUNS", 3)?);
    net::available()?;
    let mut times = vec![Vec::new(); CASES.len()];
    for _ in 0..runs {
        for (rates, times) in CASES.iter().zip(&mut times) {
            let report = migrate(ram, rates).with_context(|| format!("{rates:?} Mbit/s"))?;
            times.push(report["total-time"].as_f64().context("a time")? / 1e3);
        }
    }
    println!("{ram} MiB, without TLS, median (lowest to highest) of {runs}:\n");
    println!("| wires, Mbit/s | seconds | times one wire |\n|---|---|---|");
    let median = |times: &[f64]| lab::median(times.iter().copied()).context("no runs");
    let one = median(&times[0])?;
    for (rates, times) in CASES.iter().zip(&times) {
        let rates: Vec<_> = rates.iter().map(u64::to_string).collect();
        let lowest = times.iter().copied().fold(f64::INFINITY, f64::min);
        let highest = times.iter().copied().fold(0.0, f64::max);
        let (rates, time) = (rates.join(" + "), median(times)?);
        let gain = one / time;
        println!("| {rates} | {time:.2} ({lowest:.2} to {highest:.2}) | {gain:.2} |");
    }
    Ok(())
}

/// Moves a guest over wires of these rates, and returns the report.
fn migrate(ram: u64, rates: &[u64]) -> Result<Value> {
    let bits: Vec<_> = rates.iter().map(|rate| Some(rate * 1_000_000)).collect();
    let link = Link::of_wires(&bits)?;
    let binary = qemu::available().last().context("there is no QEMU here")?;
    let machine = || Builder::bare(binary, ram * MIB).preallocate();
    let mut source = machine().content(Fill::Random, 1).start()?;
    let destination = machine().incoming().start()?;
    source.qmp.cont()?;
    let (monitors, state) = (TempDir::new()?, state_dir()?);
    std::os::unix::fs::symlink(destination.qmp_socket(), monitors.path().join("guest.qmp"))?;
    let mut serve = link.destination.command(vamoose());
    serve.args(["serve", "--insecure", "--qmp-dir"]);
    serve.arg(monitors.path()).arg("--state-dir");
    serve.arg(state.path().join("destination"));
    // One address for all: the source's decides the wire.
    let listen = format!("tcp:{}:0", link.destination.address());
    let server = Vamoose::start(serve.args(["--listen", &listen]))?;
    let to = server.wait_for("taking migrations on ", LIMIT)?;
    let mut migrate = link.source.command(vamoose());
    migrate.args(["migrate", "--json", "-", "--name", "guest", "--insecure"]);
    migrate.args(["--method", "none", "--channels", "4", "--qmp"]);
    migrate.arg(source.qmp_socket()).arg("--state-dir");
    migrate.arg(state.path().join("source"));
    for wire in &link.wires {
        let bind = wire.address(End::Source).to_string();
        migrate.args(["--to", &to, "--bind", &bind]);
    }
    let ended = Vamoose::start(&mut migrate)?.finish(LIMIT)?;
    let ended = ended.success().with_context(|| server.stderr())?;
    ram::compare(source.ram(), destination.ram())?;
    serde_json::from_str(&ended.stdout).context("the report")
}
