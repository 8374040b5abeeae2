//! `vamoose report`: shows the report of a real migration (`vamoose migrate --json FILE`) as a summary and a plot.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::record::Sample;
use crate::report::chart::COLOURS;
use crate::report::plots::timeline;
use crate::report::table::short;

/// The keys of the report that are shown; each may be absent.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
struct Report {
    status: String,
    error_desc: Option<String>,
    total_time: u64,
    downtime: Option<u64>,
    downtime_parts: BTreeMap<String, u64>,
    method: String,
    wire_bytes: u64,
    page_bytes: u64,
    zero_pages: u64,
    cpu_seconds: CpuSeconds,
    ram: Ram,
    timeline: Vec<Sample>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct CpuSeconds {
    total: f64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
struct Ram {
    mbps: f64,
    dirty_sync_count: Option<u64>,
}

/// Parts of a downtime, in their order.
const PARTS: [&str; 4] = ["last-round", "device-state", "load", "commit"];

/// Prints a summary of the report in `file`, and writes a plot to `svg`, or beside `file`.
pub(crate) fn write(file: &Path, svg: Option<&Path>) -> Result<()> {
    let name = file.display();
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {name}"))?;
    let what = || format!("{name} is not a report of `vamoose migrate --json`");
    let report: Report = serde_json::from_str(&text).with_context(what)?;
    let last = report.timeline.last();
    let last = last.with_context(|| format!("{}: it has no timeline", what()))?;
    let svg = svg.map_or_else(|| file.with_extension("svg"), PathBuf::from);
    ensure!(
        svg != file,
        "the plot would replace the report: name another file by --svg"
    );
    for (name, value) in summary(&report, last) {
        println!("{name}: {value}");
    }
    match plot(&report)? {
        Some(plot) => {
            fs::write(&svg, plot).with_context(|| format!("cannot write {}", svg.display()))?;
            println!("plot: {}", svg.display());
        }
        None => println!("plot: none, the samples show nothing"),
    }
    Ok(())
}

fn summary(report: &Report, last: &Sample) -> Vec<(&'static str, String)> {
    let mebi = |bytes: u64| short(bytes as f64 / f64::from(1 << 20));
    let part = |name: &str| Some(format!(", {name} {} ms", report.downtime_parts.get(name)?));
    let parts: String = PARTS.into_iter().filter_map(part).collect();
    let packets = last.packets.iter();
    let packets: Vec<_> = packets
        .map(|(method, count)| format!("{method} {count}"))
        .collect();
    let (wire, rate) = (mebi(report.wire_bytes), short(report.ram.mbps));
    let (pages, zero) = (mebi(report.page_bytes), report.zero_pages);
    let downtime = report.downtime;
    let rounds = report.ram.dirty_sync_count;
    let known = [
        ("status", Some(report.status.clone())),
        ("error", report.error_desc.clone()),
        (
            "total time",
            Some(format!("{} s", short(report.total_time as f64 / 1e3))),
        ),
        (
            "downtime",
            downtime.map(|millis| format!("{millis} ms{parts}")),
        ),
        (
            "rounds over memory",
            rounds.map(|rounds| rounds.to_string()),
        ),
        ("method", Some(report.method.clone())),
        ("packets by method", Some(packets.join(", "))),
        ("on the wire", Some(format!("{wire} MiB, {rate} Mbit/s"))),
        ("pages", Some(format!("{pages} MiB, and {zero} zero pages"))),
        ("reconnects", Some(last.reconnects.to_string())),
        (
            "CPU of vamoose migrate",
            Some(format!("{} s", short(report.cpu_seconds.total))),
        ),
    ];
    let known = known.into_iter();
    known
        .filter_map(|(name, value)| Some((name, value?)))
        .collect()
}

fn plot(report: &Report) -> Result<Option<String>> {
    let until = report.total_time as f64 / 1e3;
    timeline(&report.timeline, paused(report), until, COLOURS[3])
}

/// From the guest's stop, as the samples show it, to its start, in seconds.
fn paused(report: &Report) -> Option<(f64, f64)> {
    let samples = report.timeline.iter();
    let mut stops =
        samples.filter_map(|sample| Some(sample.milliseconds.saturating_sub(sample.paused?)));
    let began = stops.next()?;
    let last = report.timeline.last()?.milliseconds;
    let ended = report
        .downtime
        .map_or(last, |downtime| began.saturating_add(downtime));
    Some((began as f64 / 1e3, ended as f64 / 1e3))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};
    use tempfile::TempDir;

    use super::*;

    fn migration() -> Value {
        let samples = (0..50u64).map(|at| {
            json!({
                "milliseconds": at * 100, "status": "active", "wire-bytes": at * at * 40_000, "page-bytes": at * at * 90_000,
                "zero-pages": at, "remaining": (50 - at) << 20, "dirty-sync-count": 1 + at / 20, "dirty-pages-rate": 4000 + at * 10,
                "packets": { "none": at * 3, "zstd-frames": at * at }, "reconnects": at / 30,
                "paused": (at > 48).then_some(80),
            })
        });
        json!({
            "status": "completed", "total-time": 4950, "downtime": 120, "downtime-parts": { "load": 20, "commit": 5 },
            "method": "auto", "wire-bytes": 96_040_000, "page-bytes": 216_090_000, "zero-pages": 49,
            "ram": { "mbps": 155.2, "dirty-sync-count": 3 }, "cpu-seconds": { "total": 1.25 },
            "timeline": samples.collect::<Vec<_>>(),
        })
    }

    #[test]
    fn the_plot_has_all_panels_and_the_downtime() -> Result<()> {
        let dir = TempDir::new()?;
        let file = dir.path().join("migration.json");
        fs::write(&file, migration().to_string())?;
        write(&file, None)?;
        let plot = fs::read_to_string(dir.path().join("migration.svg"))?;
        crate::report::tests::check(&plot);
        for name in [
            "sent, Mbit/s",
            "left to send",
            "written by the guest",
            "ratio",
            "zstd-frames",
        ] {
            assert!(plot.contains(name), "{name}");
        }
        // From 80 ms before the first sample that saw the pause.
        let report: Report = serde_json::from_value(migration())?;
        assert_eq!(paused(&report), Some((4.82, 4.94)));
        let lines = summary(&report, &report.timeline[49]);
        assert!(lines.contains(&("downtime", "120 ms, load 20 ms, commit 5 ms".to_owned())));
        assert!(lines.contains(&("packets by method", "none 147, zstd-frames 2401".to_owned())));
        Ok(())
    }

    #[test]
    fn other_files_are_refused() -> Result<()> {
        let dir = TempDir::new()?;
        let file = dir.path().join("report.json");
        let error = |text: &str| {
            fs::write(&file, text).unwrap();
            format!("{:#}", write(&file, None).unwrap_err())
        };
        assert!(error("{").contains("is not a report of `vamoose migrate --json`"));
        assert!(error("{}").contains("it has no timeline"));
        fs::write(&file, migration().to_string())?;
        let own = write(&file, Some(&file)).unwrap_err().to_string();
        assert!(own.contains("would replace the report"));
        Ok(())
    }

    proptest! {
        #[test]
        fn any_samples_make_a_well_formed_plot(
            samples in proptest::collection::vec((0..1_u64 << 40, 0..1_u64 << 50, 0..1_u64 << 50, proptest::option::of(0..1_u64 << 50), any::<String>()), 0..8),
        ) {
            let samples = samples.into_iter().map(|(milliseconds, wire_bytes, page_bytes, some, name)| Sample {
                milliseconds, wire_bytes, page_bytes, remaining: some, dirty_sync_count: some, dirty_pages_rate: some,
                packets: [(name, page_bytes)].into(), reconnects: wire_bytes, paused: some,
            });
            let report = Report { timeline: samples.collect(), downtime: Some(1 << 50), ..Report::default() };
            if let Some(plot) = plot(&report).unwrap() {
                crate::report::tests::check(&plot);
            }
        }
    }
}
