//! The timeline of a real migration: what `vamoose migrate --json FILE` has written, as a summary and as a page with plots.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::report::chart::{Chart, Marks, Series, over_time};
use crate::report::page::Page;
use crate::report::plots::{beginnings, rates, seconds};
use crate::report::svg::Svg;
use crate::report::table::{PARTS, Table, Tone, short};

/// The report of a migration, as far as it is shown; each key may be absent.
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

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
struct Sample {
    milliseconds: u64,
    wire_bytes: u64,
    page_bytes: u64,
    remaining: Option<u64>,
    dirty_sync_count: Option<u64>,
    dirty_pages_rate: Option<u64>,
    packets: BTreeMap<String, u64>,
    reconnects: u64,
    paused: Option<u64>,
}

/// Prints a summary of the report in `file`, and writes a page with plots to `page`, or beside `file`.
pub(crate) fn write(file: &Path, page: Option<&Path>) -> Result<()> {
    let text =
        fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let what = || {
        format!(
            "{} is no report of `vamoose migrate --json`",
            file.display()
        )
    };
    let report: Report = serde_json::from_str(&text).with_context(what)?;
    ensure!(
        !report.timeline.is_empty(),
        "{}: it has no timeline",
        what()
    );
    let page = page.map_or_else(|| file.with_extension("html"), PathBuf::from);
    ensure!(
        page != file,
        "the page would replace the report: name another file by --html"
    );
    for line in &summary(&report).rows {
        println!("{}", line.cells.join(": "));
    }
    fs::write(&page, draw(&report)).with_context(|| format!("cannot write {}", page.display()))?;
    println!("plots: {}", page.display());
    Ok(())
}

fn summary(report: &Report) -> Table {
    let mebi = |bytes: u64| short(bytes as f64 / f64::from(1 << 20));
    let part = |name: &str| Some(format!(", {name} {} ms", report.downtime_parts.get(name)?));
    let parts: String = PARTS.into_iter().filter_map(part).collect();
    let rows = [
        ("status", Some(report.status.clone())),
        ("error", report.error_desc.clone()),
        (
            "total time",
            Some(format!("{} s", short(seconds(report.total_time)))),
        ),
        (
            "downtime",
            report.downtime.map(|millis| format!("{millis} ms{parts}")),
        ),
        (
            "rounds over memory",
            report.ram.dirty_sync_count.map(|rounds| rounds.to_string()),
        ),
        ("method", Some(report.method.clone())),
        ("packets by method", packets(report)),
        (
            "on the wire",
            Some(format!(
                "{} MiB, {} Mbit/s",
                mebi(report.wire_bytes),
                short(report.ram.mbps)
            )),
        ),
        (
            "pages",
            Some(format!(
                "{} MiB, and {} zero pages",
                mebi(report.page_bytes),
                report.zero_pages
            )),
        ),
        (
            "reconnects",
            report
                .timeline
                .last()
                .map(|sample| sample.reconnects.to_string()),
        ),
        (
            "CPU of vamoose migrate",
            Some(format!("{} s", short(report.cpu_seconds.total))),
        ),
    ];
    let mut table = Table::new(["", "the migration"]);
    for (name, value) in rows {
        if let Some(value) = value {
            table.add(Tone::Plain, [name.to_owned(), value]);
        }
    }
    table
}

fn packets(report: &Report) -> Option<String> {
    let packets = &report.timeline.last()?.packets;
    let packets = packets
        .iter()
        .map(|(method, count)| format!("{method} {count}"));
    Some(packets.collect::<Vec<_>>().join(", ")).filter(|text| !text.is_empty())
}

fn draw(report: &Report) -> String {
    let mut page = Page::new("A migration by Vamoose");
    page.table("As vamoose migrate reports it", &summary(report));
    page.plots(&plots(report));
    page.finish()
}

fn plots(report: &Report) -> Vec<Svg> {
    let samples = &report.timeline;
    let of = |value: fn(&Sample) -> Option<u64>, unit: f64| -> Vec<(f64, f64)> {
        let points = samples
            .iter()
            .filter_map(|sample| Some((sample, value(sample)?)));
        points
            .map(|(sample, value)| (seconds(sample.milliseconds), value as f64 / unit))
            .collect()
    };
    let sent: Vec<_> = samples
        .iter()
        .map(|sample| (sample.milliseconds, sample.wire_bytes))
        .collect();
    let pages: Vec<_> = samples
        .iter()
        .map(|sample| (sample.milliseconds, sample.page_bytes))
        .collect();
    let one = |name, points| {
        chart(
            name,
            vec![Series {
                name: String::new(),
                colour: 3,
                points,
            }],
        )
    };
    let charts = [
        one("sent, Mbit/s", rates(&sent)),
        one(
            "left to send, MiB",
            of(|sample| sample.remaining, f64::from(1 << 20)),
        ),
        one(
            "pages written by the guest, 1/s",
            of(|sample| sample.dirty_pages_rate, 1.0),
        ),
        one(
            "ratio: page bytes by bytes sent",
            ratios(&rates(&pages), &rates(&sent)),
        ),
        chart("packets/s by method", by_method(samples)),
    ];
    let charts: Vec<_> = charts.into_iter().flatten().collect();
    if charts.is_empty() {
        return Vec::new();
    }
    let counts = samples
        .iter()
        .filter_map(|sample| Some((sample.milliseconds, sample.dirty_sync_count?)));
    let marks = Marks {
        until: seconds(report.total_time),
        paused: paused(report),
        rounds: beginnings(&counts.collect::<Vec<_>>()),
        events: reconnects(samples),
    };
    let note = "Dotted: a round over memory begins. Shaded: the guest is paused.";
    let mut svg = over_time("From the beginning to the end", note, &charts, &marks);
    let told = summary(report)
        .rows
        .into_iter()
        .map(|line| line.cells.join(" "));
    svg.tell(&told.collect::<Vec<_>>().join("; "));
    vec![svg]
}

fn chart(name: &'static str, series: Vec<Series>) -> Option<Chart> {
    let mut points = series.iter().flat_map(|series| &series.points);
    points.any(|(_, value)| *value > 0.0).then_some(Chart {
        name,
        series,
        is_logarithmic: false,
    })
}

/// Where anything was sent; both have the same times.
fn ratios(pages: &[(f64, f64)], sent: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let both = pages.iter().zip(sent).filter(|(_, (_, sent))| *sent > 0.0);
    both.map(|((at, pages), (_, sent))| (*at, pages / sent))
        .collect()
}

/// Packets a second by each method, without those that were never used.
fn by_method(samples: &[Sample]) -> Vec<Series> {
    let Some(last) = samples.last() else {
        return Vec::new();
    };
    let series = last.packets.keys().zip(1..).map(|(method, colour)| {
        let count = |sample: &Sample| sample.packets.get(method).copied().unwrap_or(0);
        let counts: Vec<_> = samples
            .iter()
            .map(|sample| (sample.milliseconds, count(sample)))
            .collect();
        let points = rates(&counts).into_iter();
        Series {
            name: method.clone(),
            colour: colour % 6,
            // Not megabits, but packets.
            points: points.map(|(at, rate)| (at, rate / 8.0 * 1e6)).collect(),
        }
    });
    series.collect()
}

/// From the guest's stop, as far as samples have seen it, to its start.
fn paused(report: &Report) -> Option<(f64, f64)> {
    let began = report.timeline.iter().find_map(|sample| {
        let paused = sample.paused?;
        Some(sample.milliseconds.saturating_sub(paused))
    })?;
    let last = report.timeline.last()?.milliseconds;
    let ended = report
        .downtime
        .map_or(last, |downtime| began.saturating_add(downtime));
    Some((seconds(began), seconds(ended)))
}

fn reconnects(samples: &[Sample]) -> Vec<(f64, String)> {
    let pairs = samples
        .windows(2)
        .filter(|pair| pair[1].reconnects > pair[0].reconnects);
    pairs
        .map(|pair| (seconds(pair[1].milliseconds), "reconnected".to_owned()))
        .collect()
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
    fn a_page_has_all_panels_and_the_downtime() -> Result<()> {
        let dir = TempDir::new()?;
        let file = dir.path().join("migration.json");
        fs::write(&file, migration().to_string())?;
        write(&file, None)?;
        let page = fs::read_to_string(dir.path().join("migration.html"))?;
        crate::report::example::check(&page);
        for name in [
            "sent, Mbit/s",
            "left to send",
            "written by the guest",
            "ratio",
            "zstd-frames",
            "reconnected",
        ] {
            assert!(page.contains(name), "{name}");
        }
        // From 80 ms before the first sample that saw the pause.
        let report: Report = serde_json::from_value(migration())?;
        assert_eq!(paused(&report), Some((4.82, 4.94)));
        assert!(page.contains("the guest is paused: 120 ms"));
        if let Some(wanted) = std::env::var_os("REPORT_EXAMPLE") {
            fs::write(Path::new(&wanted).join("timeline.html"), page)?;
        }
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
        assert!(error("{").contains("is no report of `vamoose migrate --json`"));
        assert!(error("{}").contains("it has no timeline"));
        fs::write(&file, migration().to_string())?;
        let own = write(&file, Some(&file)).unwrap_err().to_string();
        assert!(own.contains("would replace the report"));
        Ok(())
    }

    proptest! {
        #[test]
        fn whatever_the_samples_are_the_page_is_well_formed(
            samples in proptest::collection::vec(any::<(u64, u64, u64, Option<u64>, String)>(), 0..8),
        ) {
            let samples = samples.into_iter().map(|(milliseconds, wire_bytes, page_bytes, some, name)| Sample {
                milliseconds, wire_bytes, page_bytes, remaining: some, dirty_sync_count: some, dirty_pages_rate: some,
                packets: [(name, page_bytes)].into(), reconnects: wire_bytes, paused: some,
            });
            let report = Report { timeline: samples.collect(), downtime: Some(u64::MAX), ..Report::default() };
            crate::report::example::check(&draw(&report));
        }
    }
}
