//! A guest of the crate `live` that writes while it moves over a link, of 1 Gbit/s or slower: for how long it stands still, and what becomes of
//! one that writes faster than the link.
//!
//! ```text
//!  vamoose-demo, source (namespace a) ─────the link─────> its destination process (namespace b)
//! ```

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lab::median;
use lab::net::Link;
use lab::vamoose::Vamoose;
use serde::Serialize;
use serde_json::Value;

use crate::options::Options;
use crate::{interleaved, or_dash};

/// One guest.
#[derive(Clone, Copy)]
pub(crate) struct Case {
    /// For `--only` and the tables.
    pub(crate) name: &'static str,
    /// What it writes in a second, as a part of what the link carries.
    load: f64,
    /// Bits a second.
    link: u64,
    ram: &'static str,
    /// Options of `vamoose-demo`.
    how: &'static str,
    /// How often it moves, for each round of the others.
    runs: usize,
}

/// What became of it.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Move {
    /// `completed`, or why not.
    pub(crate) status: String,
    /// Milliseconds.
    downtime: Option<f64>,
    /// Milliseconds.
    total_time: f64,
    /// Rounds over the memory.
    rounds: usize,
    /// Percent.
    throttle_percentage: f64,
    /// Where the guest is in the end, with its checksum right.
    pub(crate) at: String,
}

pub(crate) type Measured = crate::Measured<Case, Move>;

/// The limit of the downtime, in milliseconds.
pub(crate) const LIMIT: f64 = 300.0;
const TIMEOUT: Duration = Duration::from_secs(300);

/// The cases that are wanted.
pub(crate) fn cases(options: &Options) -> Vec<Case> {
    let case = |name, load, runs, how: &'static str| Case {
        name,
        load,
        link: 1_000_000_000,
        ram: "512M",
        how,
        runs,
    };
    let all = [
        case("live-downtime/20-percent", 0.2, 20, "--timeout 120"),
        case(
            "live-downtime/3x-auto-converge",
            3.0,
            1,
            "--auto-converge --timeout 120",
        ),
        case(
            "live-downtime/3x-auto",
            3.0,
            1,
            "--method auto --timeout 60",
        ),
        case("live-downtime/3x-timeout", 3.0, 1, "--timeout 15"),
        Case {
            link: 100_000_000,
            ram: "128M",
            ..case("live-downtime-100M/60-percent", 0.6, 5, "--timeout 120")
        },
        Case {
            link: 10_000_000,
            ram: "16M",
            ..case("live-downtime-10M/60-percent", 0.6, 5, "--timeout 120")
        },
    ];
    all.into_iter()
        .filter(|case| options.wants(case.name))
        .collect()
}

/// Measures the cases.
pub(crate) fn measure(cases: Vec<Case>, demo: &Path) -> Result<Vec<Measured>> {
    if cases.is_empty() {
        return Ok(Vec::new());
    }
    let link = Link::new(None).context("a link")?;
    let mut measured = Vec::new();
    for case in cases {
        link.set_rate(case.link)?;
        let run = |case: &Case| case.run(&link, demo);
        measured.extend(interleaved(vec![case], case.runs, |case| case.name, run)?);
    }
    Ok(measured)
}

impl Case {
    fn run(&self, link: &Link, demo: &Path) -> Result<Move> {
        let pages = self.load * self.link as f64 / 8.0 / 4096.0;
        let mut command = link.source.command(demo);
        let listen = format!("tcp:{}:0", link.destination.address());
        let via = format!("ip netns exec {}", link.destination.name());
        command
            .args(["--guest", "threads", "--ram", self.ram, "--json", "-"])
            .args(["--rate", &format!("{pages:.0}")])
            .args(["--downtime-limit", &format!("{LIMIT:.0}")])
            .args(["--insecure", "--listen", &listen, "--via", &via])
            .args(self.how.split(' '));
        let ended = Vamoose::start(&mut command)?.finish(TIMEOUT)?;
        let report: Value = serde_json::from_str(&ended.stdout)
            .with_context(|| format!("no report of vamoose-demo: {}", ended.stderr))?;
        ensure!(
            report["checksum-holds"] == true,
            "the guest is not whole: {report}"
        );
        ensure!(
            report["memory-equal"] != false,
            "the memory is not what it was: {report}"
        );
        Ok(Move {
            status: text(&report["status"]),
            downtime: report["downtime"].as_f64(),
            total_time: report["total-time"].as_f64().context("no total-time")?,
            rounds: report["rounds"].as_array().map_or(0, Vec::len),
            throttle_percentage: report["guest"]["throttle-percentage"]
                .as_f64()
                .unwrap_or(0.0),
            at: text(&report["guest"]["at"]),
        })
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or("?").to_owned()
}

impl Measured {
    /// The longest downtime, if all moves were completed.
    pub(crate) fn worst(&self) -> Option<f64> {
        let downtimes = self.rounds.iter().map(|one| one.downtime);
        let all: Option<Vec<f64>> = downtimes.collect();
        all?.into_iter().reduce(f64::max)
    }

    /// A row of a table.
    pub(crate) fn row(&self) -> String {
        let of = |field: fn(&Move) -> Option<f64>| median(self.rounds.iter().filter_map(field));
        let number = |value| or_dash(value, 0);
        let ends = |field: fn(&Move) -> &str| {
            let mut ends: Vec<_> = self.rounds.iter().map(field).collect();
            ends.dedup();
            ends.join(", ")
        };
        format!(
            "| {} | {} | {} | {} ({}) | {} | {} | {} | {} |\n",
            self.case.name,
            self.rounds.len(),
            ends(|one| &one.status),
            number(of(|one| one.downtime)),
            number(self.worst()),
            number(of(|one| Some(one.total_time))),
            number(of(|one| Some(one.rounds as f64))),
            number(of(|one| Some(one.throttle_percentage))),
            ends(|one| &one.at),
        )
    }
}
