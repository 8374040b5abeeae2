//! All scenarios, as tables and as a plot.

use std::{fmt::Write, num::NonZeroUsize, sync::Mutex, thread};

use anyhow::Result;
use idxd::shares::Weight;

use crate::{
    crash::{Crash, crash},
    parameters::{MICRO, PAGE, Parameters},
    plot::{self, Line, Panel},
    run::{Outcome, Scenario, Who, mean, quantile, run},
};

/// Tables, each with what it is about.
pub(crate) struct Report {
    tables: Vec<Table>,
    crash: Crash,
}

struct Table {
    title: &'static str,
    note: &'static str,
    rows: Vec<Row>,
}

struct Row {
    label: String,
    scenario: Scenario,
    outcome: Outcome,
}

const GUESTS: [usize; 8] = [1, 2, 5, 10, 20, 50, 100, 200];
const WHO: [Who; 3] = [Who::Processor, Who::Devices, Who::Shares];
const MIXES: [u64; 3] = [1000, 500, 100];

impl Report {
    /// Runs everything; if it is to be `quick`, with little memory, and twenty guests at most.
    pub(crate) fn of(quick: bool) -> Result<Self> {
        let mut tables = tables();
        let mut rows: Vec<_> = tables
            .iter_mut()
            .flat_map(|table| &mut table.rows)
            .collect();
        if quick {
            for row in &mut rows {
                row.scenario.guests = row.scenario.guests.min(20);
                row.scenario.batches = 32;
            }
        }
        run_all(rows)?;
        Ok(Self {
            tables,
            crash: crash(4)?,
        })
    }

    pub(crate) fn markdown(&self) -> String {
        let mut text = String::from(HEAD);
        for table in &self.tables {
            // Writing to a string does not fail.
            let _ = write!(
                text,
                "\n## {}\n\n{}\n\n{COLUMNS}\n",
                table.title, table.note
            );
            for row in &table.rows {
                let _ = writeln!(text, "{}", line(row));
            }
        }
        let Crash {
            members,
            before,
            after,
            delay,
        } = self.crash;
        let _ = write!(
            text,
            "\n## A guest that dies\n\nOf {members} guests that share a queue one is killed (a real process). Each of the others \
             had {before} entries, and has {after} after {} ms.\n",
            delay.as_millis()
        );
        text
    }

    /// CPU time for a GiB of zeros, by the number of guests.
    pub(crate) fn svg(&self) -> String {
        let panel = |title: &str, table: usize| {
            let lines = WHO.map(|who| Line {
                name: name(who),
                points: self.tables[table]
                    .rows
                    .iter()
                    .filter(|row| row.scenario.who == who)
                    .map(|row| (row.scenario.guests, 1000.0 * row.outcome.cpu_per_gib))
                    .collect(),
            });
            Panel {
                title: title.to_owned(),
                lines: lines.into(),
            }
        };
        plot::svg(
            "model: CPU time of scanning, in ms per GiB, by guests at once",
            &[
                panel("all zero, only scanning, unlimited DRAM", 0),
                panel("all zero, only scanning, DRAM 300 GB/s", 1),
                panel("half zero, sending, DRAM 300 GB/s", 2),
            ],
        )
    }
}

fn tables() -> Vec<Table> {
    let table = |title, note, rows| Table { title, note, rows };
    let limit = Parameters::default().memory;
    vec![
        table(
            "Only scanning, DRAM without limit",
            "All pages are zero, nothing is sent: each guest wants its verdicts at once.",
            by_guests(1000, false, None),
        ),
        table(
            "Only scanning, DRAM of 300 GB/s",
            "The same, with all processors and devices on one memory.",
            by_guests(1000, false, limit),
        ),
        table(
            "Sending",
            "Half of the pages are zero; each guest sends the others over its part of a link of 50 GB/s, while the next batch is out.",
            by_guests(500, true, limit),
        ),
        table(
            "A hundred guests, by what is in their memory",
            "",
            by_content(limit),
        ),
        table(
            "A client without a share",
            "20 guests that send, half of their pages zero. A client without a share keeps queues full, with batches of 128 pages.",
            flooded(),
        ),
        table(
            "A guest that takes more than others",
            "20 guests that scan, one of which has up to 512 batches out at once. Scan time: of this one; of the rest.",
            greedy(),
        ),
        table(
            "Weights",
            "100 guests that scan, each with 16 batches out; ten of them have weight 15, the others 1. Scan time: of the ten; of the rest.",
            weights(),
        ),
        table(
            "What it rests on",
            "100 guests, half of their pages zero, without shares; one parameter changed in each row.",
            sensitivity(),
        ),
    ]
}

/// The same scenario with each of `who`, not run yet.
fn rows(label: &str, who: &[Who], scenario: &Scenario) -> Vec<Row> {
    let row = |who: &Who| Row {
        label: label.to_owned(),
        scenario: Scenario {
            who: *who,
            ..scenario.clone()
        },
        outcome: Outcome::default(),
    };
    who.iter().map(row).collect()
}

fn by_guests(zero_in_1000: u64, sends: bool, memory: Option<u64>) -> Vec<Row> {
    let of = |guests| {
        let mut scenario = Scenario::of(Who::Processor, guests, zero_in_1000);
        (scenario.sends, scenario.host.memory) = (sends, memory);
        rows(&format!("{guests} guests"), &WHO, &scenario)
    };
    GUESTS.into_iter().flat_map(of).collect()
}

fn by_content(limit: Option<u64>) -> Vec<Row> {
    let mut all = Vec::new();
    for (does, sends, memory) in [
        ("scan", false, None),
        ("scan", false, limit),
        ("send", true, limit),
    ] {
        for zero in MIXES {
            let mut scenario = Scenario::of(Who::Processor, 100, zero);
            (scenario.sends, scenario.host.memory) = (sends, memory);
            let memory = memory.map_or("unlimited DRAM", |_| "300 GB/s");
            let label = format!("{does}, {} % zero, {memory}", zero / 10);
            all.extend(rows(&label, &WHO, &scenario));
        }
    }
    all
}

fn flooded() -> Vec<Row> {
    let of = |flooded| {
        let mut scenario = Scenario::of(Who::Processor, 20, 500);
        (scenario.sends, scenario.flooded) = (true, flooded);
        rows(&format!("{flooded} of 8 queues full"), &WHO, &scenario)
    };
    [0, 1, 4, 8].into_iter().flat_map(of).collect()
}

fn greedy() -> Vec<Row> {
    let mut scenario = Scenario::of(Who::Processor, 20, 1000);
    scenario.host.memory = None;
    scenario.batches = 2048;
    scenario.others = Some((1, 512, Weight::NORMAL));
    rows("one with 512 batches", &WHO, &scenario)
}

fn weights() -> Vec<Row> {
    let mut scenario = Scenario::of(Who::Processor, 100, 1000);
    scenario.host.memory = None;
    scenario.depth = 16;
    scenario.weight = Weight::MIN;
    scenario.others = Some((10, 16, Weight::MAX));
    rows("ten with weight 15", &WHO, &scenario)
}

fn sensitivity() -> Vec<Row> {
    type Change = fn(&mut Parameters);
    let changes: [(&str, Change); 9] = [
        ("as above", |_| ()),
        ("ENQCMD 1 µs", |host| host.enqcmd = MICRO),
        ("ENQCMD 3 µs", |host| host.enqcmd = 3 * MICRO),
        ("latency 10 µs", |host| host.latency = 10 * MICRO),
        ("device 15 GB/s", |host| host.device_page *= 2),
        ("device 60 GB/s", |host| host.device_page /= 2),
        ("CPU twice as fast", |host| {
            host.cpu_zero /= 2;
            host.cpu_normal /= 2;
        }),
        ("DRAM 150 GB/s", |host| host.memory = Some(150_000_000_000)),
        ("normal page: CPU reads all of it", |host| {
            host.cpu_normal = host.cpu_zero;
            host.normal_bytes = PAGE;
        }),
    ];
    let mut all = Vec::new();
    for (label, change) in changes {
        for (does, sends) in [("scan", false), ("send", true)] {
            let mut scenario = Scenario::of(Who::Processor, 100, 500);
            scenario.sends = sends;
            change(&mut scenario.host);
            let who = [Who::Processor, Who::Devices];
            all.extend(rows(&format!("{does}, {label}"), &who, &scenario));
        }
    }
    all
}

/// Gives `rows` their outcomes. Each runs on one thread, from its own seed: how many run at once does not matter to
/// any.
fn run_all(rows: Vec<&mut Row>) -> Result<()> {
    let next = Mutex::new(rows.into_iter());
    let take = || next.lock().ok()?.next();
    let work = || -> Result<()> {
        while let Some(row) = take() {
            row.outcome = run(&row.scenario)?;
        }
        Ok(())
    };
    let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| {
            worker
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    })
}

const HEAD: &str = "# A hundred guests at once: the tables

Made by `cargo run --release -p idxd-model --bin hundred`; [hundred-guests.md](../hundred-guests.md) explains them. **Every figure is of a
model**: virtual time, parameters of which many are assumptions, no hardware.

- CPU: time of scanning, of all guests together, and for each GiB scanned; sending is not in it.
- Scan: the time that a guest's scans took, in ms: mean / 99 % of guests below / worst guest. A guest scans 256 MiB.
- Batch: the time that the scan of 128 pages took, in µs: 99 % below / worst.
- By device: pages with a device's verdict. In vain: pages given to a device that the processor overtook. Busy: part of the
  time in which the devices transferred, while all guests ran.
- Refused: submissions that found the queue full. Jain: index of the pages that devices did for each guest; 1 is fair.
- Slow: how many times longer memory takes than for one guest.
- Wrong: verdicts that are wrong or missing, and submissions that failed or timed out.
";

const COLUMNS: &str = "\
| | who | CPU s | ms/GiB | scan ms | batch µs | by device | in vain | busy | refused | Jain | slow | wrong |
|---|---|---|---|---|---|---|---|---|---|---|---|---|";

fn line(row: &Row) -> String {
    let outcome = &row.outcome;
    let scan = match row.scenario.others {
        None => format!(
            "{:.2} / {:.2} / {:.2}",
            mean(&outcome.scans),
            quantile(&outcome.scans, 0.99),
            quantile(&outcome.scans, 1.0)
        ),
        Some(_) => format!("{:.2}; {:.2}", outcome.scan_of.0, outcome.scan_of.1),
    };
    let by_device = match row.scenario.others {
        None => percent(outcome.by_device),
        Some(_) => format!(
            "{}; {}",
            percent(outcome.by_device_of.0),
            percent(outcome.by_device_of.1)
        ),
    };
    let fairness = match row.scenario.who {
        Who::Processor => "-".to_owned(),
        Who::Devices | Who::Shares => format!("{:.3}", outcome.fairness),
    };
    format!(
        "| {} | {} | {:.3} | {:.1} | {scan} | {:.1} / {:.1} | {by_device} | {} | {} | {} | {fairness} | {:.2} | {} |",
        row.label,
        name(row.scenario.who),
        outcome.cpu,
        1000.0 * outcome.cpu_per_gib,
        quantile(&outcome.batches, 0.99),
        quantile(&outcome.batches, 1.0),
        percent(outcome.in_vain),
        percent(outcome.busy),
        percent(outcome.refused),
        outcome.slowdown,
        outcome.wrong,
    )
}

fn percent(part: f64) -> String {
    format!("{:.1} %", 100.0 * part)
}

fn name(who: Who) -> &'static str {
    match who {
        Who::Processor => "CPU only",
        Who::Devices => "DSA",
        Who::Shares => "DSA, shares",
    }
}
