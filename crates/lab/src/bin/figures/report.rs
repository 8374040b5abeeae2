//! The figures as Markdown for people, and as JSON for programs.

use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use lab::qemu::Binary;
use serde::Serialize;
use serde_json::{Value, json};

use crate::criteria::Verdict;
use crate::options::Options;
use crate::still::{self, Cost};
use crate::{links, live, or_dash, running};

/// What was measured on.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct SetUp {
    processor: String,
    processors: usize,
    kernel: String,
    qemu: String,
    vamoose: String,
    corpus: String,
    ram: u64,
    runs: NonZeroUsize,
    downtime_runs: usize,
    dirty_rate: u32,
    load_before: String,
}

impl SetUp {
    /// Looks at this machine.
    pub(crate) fn look(options: &Options, qemu: &Binary, vamoose: &Path) -> Result<Self> {
        let information = fs::read_to_string("/proc/cpuinfo").context("reading /proc/cpuinfo")?;
        let model = information
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").context("which kernel?")?;
        let version = lab::run(Command::new(vamoose).arg("--version"))?;
        Ok(Self {
            processor: model
                .map_or("unknown processor", |(_, model)| model)
                .to_owned(),
            processors: std::thread::available_parallelism()?.get(),
            kernel: kernel.trim().to_owned(),
            qemu: qemu.version.to_string(),
            vamoose: version.trim().to_owned(),
            corpus: options.corpus_name(),
            ram: options.ram,
            runs: options.runs,
            downtime_runs: running::rounds(options),
            dirty_rate: options.dirty_rate,
            load_before: load(),
        })
    }

    fn markdown(&self) -> String {
        format!(
            "{} processors ({}), Linux {}, QEMU {}, {}. Guest that does not run: {} MiB, \
             filled from {}. Guest that runs: {} pages rewritten a second. Medians of {} rounds, \
             of downtimes {}; of memory the most. Load average before {}, after {}.\n",
            self.processors,
            self.processor,
            self.kernel,
            self.qemu,
            self.vamoose,
            self.ram >> 20,
            self.corpus,
            self.dirty_rate,
            self.runs,
            self.downtime_runs,
            self.load_before,
            load()
        )
    }
}

/// All that was measured.
pub(crate) struct Figures {
    pub(crate) still: Vec<still::Measured>,
    pub(crate) running: Vec<running::Measured>,
    pub(crate) live: Vec<live::Measured>,
    pub(crate) links: Vec<links::Measured>,
}

/// Tables and verdicts.
pub(crate) fn markdown(setup: &SetUp, figures: &Figures, verdicts: &[Verdict]) -> String {
    let Figures {
        still,
        running,
        live,
        links,
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
    if !links.is_empty() {
        text += links::HEADER;
        text.extend(links.iter().map(links::Measured::row));
    }
    text.push('\n');
    for verdict in verdicts {
        let mark = match verdict.pass {
            Some(true) => "PASS",
            Some(false) => "FAIL",
            None => "not measured",
        };
        let found = verdict.found.as_deref().unwrap_or_default();
        text += &format!("- **{mark}** {}: {found}\n", verdict.demand);
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
            "median": cost(&measured.cost()),
            "rounds": measured.rounds.iter().map(cost).collect::<Vec<_>>(),
        })
    });
    let running = figures.running.iter().map(|measured| {
        let (median, rounds) = (measured.pause(), &measured.rounds);
        json!({ "case": measured.case.name, "median": median, "rounds": rounds })
    });
    let live = figures.live.iter();
    let live = live.map(|measured| json!({ "case": measured.case.name, "moves": measured.rounds }));
    let links = figures.links.iter();
    let links =
        links.map(|measured| json!({ "case": measured.case.name, "moves": measured.rounds }));
    let mut setup = json!(setup);
    setup["load-after"] = load().into();
    json!({
        "set-up": setup,
        "still": still.collect::<Vec<_>>(),
        "running": running.collect::<Vec<_>>(),
        "live": live.collect::<Vec<_>>(),
        "links": links.collect::<Vec<_>>(),
        "criteria": verdicts,
    })
}

fn still_row(measured: &still::Measured) -> String {
    let (case, cost) = (&measured.case, measured.cost());
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
    let pause = measured.pause();
    let each = measured
        .rounds
        .iter()
        .map(|pause| format!("{:.0}", pause.downtime));
    format!(
        "| {} | **{:.0}** ({}) | {:.0} | {:.0} | {} | {:.1} | {:.0} | {:.1} |\n",
        measured.case.name,
        pause.downtime,
        each.collect::<Vec<_>>().join(", "),
        pause.downtime_reported,
        pause.downtime_expected,
        or_dash(pause.downtime_vamoose, 0),
        pause.total_time / 1e3,
        pause.dirty_sync_count,
        pause.link_bytes / 1e6,
    )
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

/// The machine's load averages over 1, 5 and 15 minutes.
fn load() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let averages: Vec<_> = text.split(' ').take(3).collect();
    averages.join(", ")
}
