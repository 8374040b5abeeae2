//! The figures as Markdown for people, and as JSON for programs.

use std::fmt::Write as _;
use std::fs;
use std::process::Command;

use anyhow::{Context, Result};
use lab::qemu::Binary;
use serde_json::{Value, json};

use crate::criteria::Verdict;
use crate::live;
use crate::options::Options;
use crate::running::{self, Pause};
use crate::still::{self, Cost};

/// What was measured on.
pub(crate) struct SetUp {
    processor: String,
    processors: usize,
    kernel: String,
    qemu: String,
    vamoose: String,
    corpus: String,
    ram: u64,
    runs: usize,
    downtime_runs: usize,
    dirty_rate: u32,
    load_before: String,
}

impl SetUp {
    /// Looks at this machine.
    pub(crate) fn look(options: &Options, qemu: &Binary) -> Result<Self> {
        let information = fs::read_to_string("/proc/cpuinfo").context("reading /proc/cpuinfo")?;
        let model = information
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").context("which kernel?")?;
        let version = Command::new(&options.vamoose)
            .arg("--version")
            .output()
            .context("which vamoose?")?;
        Ok(Self {
            processor: model
                .map_or("unknown processor", |(_, model)| model)
                .to_owned(),
            processors: std::thread::available_parallelism()?.get(),
            kernel: kernel.trim().to_owned(),
            qemu: qemu.version.to_string(),
            vamoose: String::from_utf8_lossy(&version.stdout).trim().to_owned(),
            corpus: options.corpus_name(),
            ram: options.ram,
            runs: options.runs,
            downtime_runs: running::rounds(options),
            dirty_rate: options.dirty_rate,
            load_before: load(),
        })
    }

    fn markdown(&self) -> String {
        let Self {
            processor,
            processors,
            kernel,
            qemu,
            vamoose,
            corpus,
            runs,
            downtime_runs,
            dirty_rate,
            load_before,
            ..
        } = self;
        let (ram, after) = (self.ram >> 20, load());
        format!(
            "{processors} processors ({processor}), Linux {kernel}, QEMU {qemu}, {vamoose}. Guest that does not run: {ram} MiB, \
             filled from {corpus}. Guest that runs: {dirty_rate} pages rewritten a second. Medians of {runs} rounds, of downtimes {downtime_runs}; of memory the most. Load average before {load_before}, after {after}.\n"
        )
    }
}

/// All that was measured.
pub(crate) struct Figures {
    pub(crate) still: Vec<still::Measured>,
    pub(crate) running: Vec<running::Measured>,
    pub(crate) live: Vec<live::Measured>,
}

/// Tables and verdicts.
pub(crate) fn markdown(setup: &SetUp, figures: &Figures, verdicts: &[Verdict]) -> String {
    let Figures {
        still,
        running,
        live,
    } = figures;
    let mut text = setup.markdown();
    if !still.is_empty() {
        text += "\n| case | channels | CPU-s source | relay A | relay B | destination | total | time s | MB on the wire | peak MiB A | B |\n";
        text += "|---|---|---|---|---|---|---|---|---|---|---|\n";
        text.extend(still.iter().map(still_row));
    }
    if !running.is_empty() {
        text += "\n| case | downtime ms (each round) | QEMU reported | QEMU expected | vamoose reported | total s | rounds over memory | MB on the link |\n";
        text += "|---|---|---|---|---|---|---|---|\n";
        text.extend(running.iter().map(running_row));
    }
    if !live.is_empty() {
        text += "\n| case | runs | ended | downtime ms, median (worst) | total ms | rounds | throttle % | guest at |\n";
        text += "|---|---|---|---|---|---|---|---|\n";
        text.extend(live.iter().map(live::Measured::row));
    }
    text.push('\n');
    for verdict in verdicts {
        let (mark, numbers) = match &verdict.found {
            Some(found) if found.pass => ("PASS", found.numbers.as_str()),
            Some(found) => ("FAIL", found.numbers.as_str()),
            None => ("not measured", ""),
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "- **{mark}** {}: {numbers}", verdict.demand);
    }
    text
}

/// All of it, with each round.
pub(crate) fn json(setup: &SetUp, figures: &Figures, verdicts: &[Verdict]) -> Value {
    let still = figures.still.iter().map(|measured| {
        let case = &measured.case;
        json!({
            "case": case.name,
            "method": case.method,
            "channels": case.channels,
            "ram": case.ram,
            "median": cost(&measured.cost),
            "rounds": measured.rounds.iter().map(cost).collect::<Vec<_>>(),
        })
    });
    let running = figures.running.iter().map(|measured| {
        json!({
            "case": measured.case.name,
            "median": pause(&measured.pause),
            "rounds": measured.rounds.iter().map(pause).collect::<Vec<_>>(),
        })
    });
    let verdicts = verdicts.iter().map(|verdict| {
        let found = verdict.found.as_ref();
        json!({
            "demand": verdict.demand,
            "pass": found.map(|found| found.pass),
            "found": found.map(|found| &found.numbers),
        })
    });
    json!({
        "set-up": {
            "processor": setup.processor,
            "processors": setup.processors,
            "kernel": setup.kernel,
            "qemu": setup.qemu,
            "vamoose": setup.vamoose,
            "corpus": setup.corpus,
            "ram": setup.ram,
            "runs": setup.runs,
            "downtime-runs": setup.downtime_runs,
            "dirty-rate": setup.dirty_rate,
            "load-before": setup.load_before,
            "load-after": load(),
        },
        "still": still.collect::<Vec<_>>(),
        "running": running.collect::<Vec<_>>(),
        "live": figures.live.iter().map(live::Measured::json).collect::<Vec<_>>(),
        "criteria": verdicts.collect::<Vec<_>>(),
    })
}

fn still_row(measured: &still::Measured) -> String {
    let (case, cost) = (&measured.case, &measured.cost);
    let mib = |bytes: Option<f64>| or_dash(bytes.map(|bytes| bytes / 1_048_576.0), 1);
    format!(
        "| {} | {} | {:.2} | {} | {} | {:.2} | {:.2} | {:.1} | {:.1} | {} | {} |\n",
        case.name,
        case.channels,
        cost.source,
        or_dash(cost.relay_a, 2),
        or_dash(cost.relay_b, 2),
        cost.destination,
        cost.total(),
        cost.time,
        cost.wire / 1e6,
        mib(cost.peak_a),
        mib(cost.peak_b),
    )
}

fn running_row(measured: &running::Measured) -> String {
    let pause = &measured.pause;
    let each = measured
        .rounds
        .iter()
        .map(|pause| format!("{:.0}", pause.real));
    format!(
        "| {} | **{:.0}** ({}) | {:.0} | {:.0} | {} | {:.1} | {:.0} | {:.1} |\n",
        measured.case.name,
        pause.real,
        each.collect::<Vec<_>>().join(", "),
        pause.reported,
        pause.expected,
        or_dash(pause.vamoose, 0),
        pause.total / 1e3,
        pause.syncs,
        pause.wire / 1e6,
    )
}

fn or_dash(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
}

fn cost(cost: &Cost) -> Value {
    json!({
        "cpu-seconds": {
            "source": cost.source,
            "relay-a": cost.relay_a,
            "relay-b": cost.relay_b,
            "destination": cost.destination,
            "total": cost.total(),
        },
        "seconds": cost.time,
        "wire-bytes": cost.wire,
        "peak-bytes": { "relay-a": cost.peak_a, "relay-b": cost.peak_b },
    })
}

fn pause(pause: &Pause) -> Value {
    json!({
        "downtime": pause.real,
        "downtime-reported": pause.reported,
        "downtime-expected": pause.expected,
        "downtime-vamoose": pause.vamoose,
        "total-time": pause.total,
        "dirty-sync-count": pause.syncs,
        "link-bytes": pause.wire,
    })
}

/// The machine's load averages over 1, 5 and 15 minutes.
fn load() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let averages: Vec<_> = text.split(' ').take(3).collect();
    averages.join(", ")
}
