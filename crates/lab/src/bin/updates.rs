//! A guest that updates its memory in place faster than the link carries pages: whether it moves, with differences and
//! without.
//!
//! ```text
//!  source QEMU ─unix─> vamoose migrate ═══ a wire of so many Mbit/s ═══> vamoose serve ─unix─> destination QEMU
//! ```
//! One guest moves to and fro, case after case, and checks its memory after each. Times and bytes are those of the report. A
//! migration that has not ended in time is cancelled. Needs root, for network namespaces.

use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;
use lab::guest::{Guest, Image, Load};
use lab::net::{self, Link};
use lab::qemu::{self, Builder};
use lab::vamoose::{Server, Vamoose, program};
use rustix::process::Signal;
use serde_json::Value;

/// Measure what differences save for a guest that updates its memory in place
#[derive(Parser, Debug)]
#[command(name = "updates", max_term_width = 100)]
struct Options {
    /// Rate of the link in Mbit/s
    #[arg(long, value_name = "MBIT", default_value_t = 100)]
    rate: u64,
    /// Memory that the guest fills, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 128)]
    fill: u32,
    /// The part of it that the guest updates, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 48)]
    hot: u32,
    /// Pages that it updates per second
    #[arg(long, value_name = "N", default_value_t = 9000)]
    pages: u32,
    /// Words of 8 bytes that change in each of them, of 512
    #[arg(long, value_name = "N", default_value_t = 40)]
    words: u32,
    /// Number of rounds, in each of which every case runs once
    #[arg(long, value_name = "N", default_value_t = 3)]
    runs: usize,
    /// Cancel a migration after this many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    limit: u64,
}

/// Methods and whether there are differences.
const CASES: [(&str, &str); 6] = [
    ("lz4", "off"),
    ("lz4", "on"),
    ("zstd-frames", "off"),
    ("zstd-frames", "on"),
    ("auto", "off"),
    ("auto", "on"),
];

const LIMIT: Duration = Duration::from_secs(300);

fn main() -> Result<()> {
    let options = Options::parse();
    net::available()?;
    let link = Link::new(Some(options.rate * 1_000_000))?;
    let qemu = qemu::newest_or_skip()?.context("no QEMU")?;
    let image = Image::build(16)?;
    let load = Load {
        fill: options.fill,
        hot: options.hot,
        rate: options.pages,
    };
    let ram = (u64::from(options.fill) + 160) << 20;
    let machine = image.machine_of_updates(&qemu, ram, &load, options.words);
    let mut guest = Guest::start(&machine.clone().namespace(link.source.name()))?;
    guest.wait_ready(LIMIT)?;
    let mut at_second = false;
    println!("{options:?}\n");
    println!(
        "| method | differences | seconds | downtime, ms | rounds | MB on the wire | pages as differences | CPU-s of the source |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for _ in 0..options.runs {
        for case in CASES {
            let (moved, report) = migrate(&options, &link, at_second, guest, &machine, case)
                .with_context(|| format!("{case:?}"))?;
            guest = moved;
            at_second ^= report["status"] == "completed";
            print(case, &report);
        }
    }
    Ok(())
}

/// Moves the guest, and returns it and the report.
fn migrate(
    options: &Options,
    link: &Link,
    at_second: bool,
    source: Guest,
    machine: &Builder,
    (method, delta): (&str, &str),
) -> Result<(Guest, Value)> {
    let (here, there) = match at_second {
        false => (&link.source, &link.destination),
        true => (&link.destination, &link.source),
    };
    let waiting = machine.clone().incoming().paused().namespace(there.name());
    let destination = Guest::start(&waiting)?;
    let vamoose = program(None, "vamoose")?;
    let server = Server::start(&vamoose, there, &destination.qemu)?;
    let mut command = server.migrate(&vamoose, here, &source.qemu);
    command.args(["--json", "-", "--downtime-limit", "300"]);
    command.args(["--method", method, "--delta", delta]);
    let migration = Vamoose::start(&mut command)?;
    if !migration.process().wait(Duration::from_secs(options.limit)) {
        migration.signal(Signal::INT)?;
    }
    let ended = migration.finish(LIMIT)?;
    let mut report: Value = serde_json::from_str(&ended.stdout).context(ended.stderr)?;
    report["cpu"] = ended.cpu_seconds.into();
    if report["status"] != "completed" {
        source.wait_ticks(5, LIMIT)?;
        return Ok((source, report));
    }
    destination.wait_rounds(1, LIMIT)?;
    destination.log().check()?;
    Ok((destination, report))
}

fn print((method, delta): (&str, &str), report: &Value) {
    let number = |value: &Value| value.as_f64().unwrap_or(0.0);
    let seconds = match report["status"] == "completed" {
        true => format!("{:.1}", number(&report["total-time"]) / 1e3),
        false => "cancelled".to_owned(),
    };
    println!(
        "| {method} | {delta} | {seconds} | {} | {} | {:.0} | {} | {:.1} |",
        report["downtime"],
        report["ram"]["dirty-sync-count"],
        number(&report["wire-bytes"]) / 1e6,
        report["delta"]["pages"],
        number(&report["cpu"]),
    );
}
