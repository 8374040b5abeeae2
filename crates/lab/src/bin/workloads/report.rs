//! The tables, and each migration as a line of JSON, from which the tables can be made again.

use std::fmt::Write as _;
use std::fs;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Terms;
use crate::clients::{Sample, Service};
use crate::contender::Contender;
use crate::stage::{Migration, REST};
use crate::workload::Workload;

/// A migration, and how its guest served its clients.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Run {
    pub(crate) terms: Terms,
    pub(crate) workload: Workload,
    pub(crate) contender: Contender,
    pub(crate) moved: bool,
    seconds: f64,
    rounds: u64,
    bytes: u64,
    downtime_ms: Option<f64>,
    throttle: u64,
    dirty_rate: u64,
    before: Service,
    during: Service,
    report: Option<Value>,
}

impl Run {
    pub(crate) fn of(
        workload: Workload,
        terms: &Terms,
        migration: Migration,
        samples: &[Sample],
    ) -> Self {
        let (from, to) = (migration.from, migration.to);
        Self {
            terms: terms.clone(),
            workload,
            contender: migration.contender,
            moved: !migration.is_cancelled,
            seconds: migration.seconds(),
            rounds: migration.rounds,
            bytes: migration.bytes,
            downtime_ms: migration.downtime,
            throttle: migration.throttle,
            dirty_rate: migration.dirty_rate,
            before: Service::of(samples, from - REST, from),
            // What was asked during the migration may have been answered shortly after.
            during: Service::of(samples, from, to + REST / 3),
            report: migration.report,
        }
    }

    pub(crate) fn line(&self) -> Result<String> {
        Ok(serde_json::to_string(self)? + "\n")
    }

    /// Those that a file of lines holds.
    pub(crate) fn read_all(lines: &str) -> Result<Vec<Self>> {
        let read = |(number, line)| {
            serde_json::from_str(line).with_context(|| format!("line {}", number + 1))
        };
        lines.lines().enumerate().map(read).collect()
    }
}

/// What all tables have in common.
pub(crate) fn heading() -> Result<String> {
    let cpus = fs::read_to_string("/proc/cpuinfo")?;
    let model = cpus
        .lines()
        .find_map(|line| line.strip_prefix("model name"));
    let model = model.unwrap_or("").trim_start_matches(['\t', ':', ' ']);
    let count = cpus
        .lines()
        .filter(|line| line.starts_with("processor"))
        .count();
    let load = fs::read_to_string("/proc/loadavg")?;
    Ok(format!(
        "{count} processors ({model}), load average at the start {}; median (least to most)\n",
        load.split(' ').take(3).collect::<Vec<_>>().join(", ")
    ))
}

const COLUMNS: [&str; 13] = [
    "moved",
    "seconds",
    "rounds",
    "MB",
    "downtime ms",
    "longest ms",
    "throttle %",
    "per second before",
    "during",
    "p50 ms before",
    "during",
    "p99 ms before",
    "during",
];

/// A workload's migrations, by contender.
pub(crate) fn table(workload: Workload, terms: &Terms, runs: &[Run]) -> String {
    let dirty = spread(runs.iter().map(|run| run.dirty_rate as f64), 0);
    let mut out = format!(
        "**{}**: {}; the guest changes {dirty} MiB a second; clients' {}\n\n| | {} |\n|{}\n",
        workload.name(),
        terms,
        workload.unit(),
        COLUMNS.join(" | "),
        "---|".repeat(COLUMNS.len() + 1)
    );
    for contender in crate::chosen::<Contender>(&[]) {
        let all: Vec<_> = runs
            .iter()
            .filter(|run| run.contender == contender)
            .collect();
        if all.is_empty() {
            continue;
        }
        let moved = all.iter().filter(|run| run.moved).count();
        let of = |value: &dyn Fn(&Run) -> Option<f64>, digits| {
            spread(all.iter().filter_map(|run| value(run)), digits)
        };
        let cells = [
            contender.name(),
            format!("{moved} of {}", all.len()),
            of(&|run| Some(run.seconds), 1),
            of(&|run| Some(run.rounds as f64), 0),
            of(&|run| Some(run.bytes as f64 / 1e6), 0),
            of(&|run| run.downtime_ms, 0),
            of(&|run| run.during.longest, 0),
            of(&|run| Some(run.throttle as f64), 0),
            of(&|run| Some(run.before.rate), 1),
            of(&|run| Some(run.during.rate), 1),
            of(&|run| run.before.p50, 1),
            of(&|run| run.during.p50, 1),
            of(&|run| run.before.p99, 1),
            of(&|run| run.during.p99, 1),
        ];
        let _ = writeln!(out, "| {} |", cells.join(" | "));
    }
    out
}

fn spread(values: impl Iterator<Item = f64>, digits: usize) -> String {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let (Some(least), Some(most)) = (values.first(), values.last()) else {
        return "-".to_owned();
    };
    let middle = lab::median(values.iter().copied()).unwrap_or(f64::NAN);
    let [middle, least, most] = [middle, *least, *most].map(|value| format!("{value:.digits$}"));
    match least == most {
        true => middle,
        false => format!("**{middle}** ({least}-{most})"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    impl Run {
        /// One of 7 s, which was cancelled if it has no downtime.
        pub(crate) fn example(contender: Contender, downtime: Option<f64>) -> Self {
            let from = Instant::now() + Duration::from_secs(60);
            let terms = Terms {
                qemu: "11.1.3".to_owned(),
                rate: 1000,
                downtime_limit: 300,
                limit: 30,
                method: "auto".to_owned(),
                page_cache: None,
            };
            let migration = Migration {
                contender,
                is_cancelled: downtime.is_none(),
                from,
                to: from + Duration::from_secs(7),
                downtime,
                rounds: 5,
                bytes: 7_000_000,
                throttle: 0,
                dirty_rate: 300,
                report: None,
            };
            Self::of(Workload::Updates, &terms, migration, &[])
        }
    }

    #[test]
    fn the_median_is_between_least_and_most() {
        let spread = |values: &[f64]| spread(values.iter().copied(), 1);
        assert_eq!(spread(&[3.0, 1.0, 2.0, 9.0]), "**2.5** (1.0-9.0)");
        assert_eq!(spread(&[3.0, 1.0, 9.0]), "**3.0** (1.0-9.0)");
        assert_eq!(spread(&[3.0, 3.0]), "3.0");
        assert_eq!(spread(&[]), "-");
    }

    #[test]
    fn tables_can_be_made_of_lines() {
        let runs = [
            Run::example(Contender::StockNone, None),
            Run::example(Contender::Vamoose, Some(90.0)),
        ];
        let lines: Vec<_> = runs.iter().map(|run| run.line().unwrap()).collect();
        let again = Run::read_all(&lines.concat()).unwrap();
        let terms = &again[0].terms;
        let table = table(Workload::Updates, terms, &again);
        assert_eq!(table, super::table(Workload::Updates, terms, &runs));
        assert!(
            table.contains("| stock-none | 0 of 1 | 7.0 | 5 | 7 | - |"),
            "{table}"
        );
        assert!(
            table.contains("| vamoose | 1 of 1 | 7.0 | 5 | 7 | 90 |"),
            "{table}"
        );
    }
}
