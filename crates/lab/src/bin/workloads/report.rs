//! The tables, and each migration as a line of JSON.

use std::fmt::Write as _;
use std::fs;

use anyhow::Result;
use serde_json::json;

use crate::Conditions;
use crate::clients::{Sample, Service};
use crate::contender::Contender;
use crate::stage::{Migration, REST};
use crate::workload::Workload;

/// A migration, and how its guest served its clients.
pub(crate) struct Run {
    migration: Migration,
    before: Service,
    during: Service,
}

impl Run {
    pub(crate) fn of(migration: Migration, samples: &[Sample]) -> Self {
        let (from, to) = (migration.from, migration.to);
        Self {
            before: Service::of(samples, from - REST, from),
            // What was asked during the migration may have been answered shortly after.
            during: Service::of(samples, from, to + REST / 5),
            migration,
        }
    }
}

/// What all tables have in common.
pub(crate) fn heading(conditions: &Conditions) -> Result<String> {
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
        "{count} processors ({model}), QEMU {}, link of {} Mbit/s, downtime limit {} ms, load average {}\n",
        conditions.qemu.version,
        conditions.rate / 1_000_000,
        conditions.downtime_limit,
        load.split(' ').take(3).collect::<Vec<_>>().join(", ")
    ))
}

/// The medians of a workload's migrations, least and most of some in brackets.
pub(crate) fn table(workload: Workload, contenders: &[Contender], runs: &[Run]) -> String {
    let unit = workload.unit();
    let mut out = format!(
        "| {} | moved | seconds | rounds | MB | downtime ms | throttle % | {unit}/s before | during | p50 ms before | during | p99 ms before | during | longest ms |\n|{}\n",
        workload.name(),
        "---|".repeat(14)
    );
    for contender in contenders {
        let all = runs
            .iter()
            .filter(|run| run.migration.contender == *contender);
        let all: Vec<_> = all.collect();
        let moved: Vec<_> = all
            .iter()
            .filter(|run| !run.migration.is_cancelled)
            .collect();
        let of = |value: fn(&Migration) -> f64, digits| {
            spread(
                all.iter().map(|run| value(&run.migration)).collect(),
                digits,
            )
        };
        let median = |value: fn(&Run) -> f64| {
            let (middle, ..) = quantiles(all.iter().map(|run| value(run)).collect());
            format!("{middle:.1}")
        };
        let cells = [
            contender.name(),
            format!("{} of {}", moved.len(), all.len()),
            of(Migration::seconds, 1),
            of(|it| it.rounds as f64, 0),
            of(|it| it.bytes as f64 / 1e6, 0),
            spread(moved.iter().map(|run| run.migration.downtime).collect(), 0),
            of(|it| it.throttle as f64, 0),
            median(|run| run.before.rate),
            median(|run| run.during.rate),
            median(|run| run.before.p50),
            median(|run| run.during.p50),
            median(|run| run.before.p99),
            median(|run| run.during.p99),
            median(|run| run.during.longest),
        ];
        let _ = writeln!(out, "| {} |", cells.join(" | "));
    }
    out
}

/// A line for each migration.
pub(crate) fn json_lines(workload: Workload, runs: &[Run]) -> Result<String> {
    let mut lines = String::new();
    for Run {
        migration,
        before,
        during,
    } in runs
    {
        let line = json!({
            "workload": workload.name(),
            "contender": migration.contender.name(),
            "moved": !migration.is_cancelled,
            "seconds": migration.seconds(),
            "rounds": migration.rounds,
            "bytes": migration.bytes,
            "downtime-ms": migration.downtime,
            "throttle": migration.throttle,
            "before": before,
            "during": during,
            "report": migration.report,
        });
        lines += &serde_json::to_string(&line)?;
        lines.push('\n');
    }
    Ok(lines)
}

fn spread(values: Vec<f64>, digits: usize) -> String {
    if values.is_empty() {
        return "-".to_owned();
    }
    let (middle, least, most) = quantiles(values);
    format!("**{middle:.digits$}** ({least:.digits$}-{most:.digits$})")
}

/// The median, the least and the most; not numbers if there are none.
fn quantiles(mut values: Vec<f64>) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    let of = |value: Option<f64>| value.unwrap_or(f64::NAN);
    let (least, most) = (values.first().copied(), values.last().copied());
    (of(lab::median(values)), of(least), of(most))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_between_least_and_most() {
        assert_eq!(quantiles(vec![3.0, 1.0, 2.0, 9.0]), (2.5, 1.0, 9.0));
        assert_eq!(spread(vec![3.0, 1.0, 9.0], 0), "**3** (1-9)");
        assert_eq!(spread(Vec::new(), 0), "-");
    }
}
