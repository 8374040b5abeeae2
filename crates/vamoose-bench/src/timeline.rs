//! `vamoose report`: shows the report of a real migration (`vamoose migrate --json FILE`) as a summary and as a page with plots.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::report::chart::{COLOURS, Curve, Marks, Panel, over_time};
use crate::report::markdown::Plot;
use crate::report::page;
use crate::report::plots::{beginnings, panel, progress, rates, seconds};
use crate::report::table::{PARTS, Table, short};

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
    let name = file.display();
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {name}"))?;
    let what = || format!("{name} is not a report of `vamoose migrate --json`");
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
    for cells in summary(&report).rows() {
        println!("{}", cells.join(": "));
    }
    fs::write(&page, html(&report)?).with_context(|| format!("cannot write {}", page.display()))?;
    println!("plots: {}", page.display());
    Ok(())
}

fn html(report: &Report) -> Result<String> {
    const TITLE: &str = "A migration by Vamoose";
    let plot = plot(report)?;
    let plots: String = plot.iter().map(Plot::markdown).collect();
    let markdown = format!("# {TITLE}\n\n{}{plots}", summary(report).markdown());
    Ok(page::of(TITLE, &markdown, plot.as_slice()))
}

fn summary(report: &Report) -> Table {
    let mebi = |bytes: u64| short(bytes as f64 / f64::from(1 << 20));
    let part = |name: &str| Some(format!(", {name} {} ms", report.downtime_parts.get(name)?));
    let parts: String = PARTS.into_iter().filter_map(part).collect();
    let [total, cpu] = [seconds(report.total_time), report.cpu_seconds.total].map(short);
    let (wire, rate) = (mebi(report.wire_bytes), short(report.ram.mbps));
    let (pages, zero) = (mebi(report.page_bytes), report.zero_pages);
    let rows = [
        ("status", Some(report.status.clone())),
        ("error", report.error_desc.clone()),
        ("total time", Some(format!("{total} s"))),
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
        ("on the wire", Some(format!("{wire} MiB, {rate} Mbit/s"))),
        ("pages", Some(format!("{pages} MiB, and {zero} zero pages"))),
        (
            "reconnects",
            report
                .timeline
                .last()
                .map(|sample| sample.reconnects.to_string()),
        ),
        ("CPU of vamoose migrate", Some(format!("{cpu} s"))),
    ];
    let mut table = Table::new(["", "as vamoose migrate reports it"]);
    for (name, value) in rows {
        if let Some(value) = value {
            table.add(None, [name.to_owned(), value]);
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

/// `None` where no sample shows anything.
fn plot(report: &Report) -> Result<Option<Plot>> {
    let samples = &report.timeline;
    let of = |value: fn(&Sample) -> Option<u64>, unit: f64| -> Vec<(f64, f64)> {
        let known = samples
            .iter()
            .filter_map(|sample| Some((sample, value(sample)?)));
        known
            .map(|(sample, value)| (seconds(sample.milliseconds), value as f64 / unit))
            .collect()
    };
    let so_far = |value: fn(&Sample) -> u64| -> Vec<(u64, u64)> {
        samples
            .iter()
            .map(|sample| (sample.milliseconds, value(sample)))
            .collect()
    };
    let sent = so_far(|sample| sample.wire_bytes);
    let pages = rates(&so_far(|sample| sample.page_bytes));
    let remaining = of(|sample| sample.remaining, f64::from(1 << 20));
    let written = of(|sample| sample.dirty_pages_rate, 1.0);
    let colour = COLOURS[3];
    let mut panels: Vec<_> = progress(colour, &sent, remaining, written).collect();
    let ratios = ratios(&pages, &rates(&sent));
    panels.extend(panel("ratio: page bytes to bytes sent", colour, ratios));
    panels.extend(packets_by_method(samples));
    if panels.is_empty() {
        return Ok(None);
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
    let paused = marks.paused.map_or(String::new(), |(from, to)| {
        format!(
            " Shaded: the guest is paused, for {} ms.",
            short((to - from) * 1e3)
        )
    });
    let note = format!(
        "Grey lines: a round over memory begins. Red lines: a connection was replaced.{paused}"
    );
    Ok(Some(Plot {
        file: "timeline.svg".to_owned(),
        title: "From the beginning to the end".to_owned(),
        note,
        svg: over_time(&panels, &marks)?,
    }))
}

/// Ratios of two rates with the same times, where anything was sent.
fn ratios(pages: &[(f64, f64)], sent: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let both = pages.iter().zip(sent).filter(|(_, (_, sent))| *sent > 0.0);
    both.map(|((at, pages), (_, sent))| (*at, pages / sent))
        .collect()
}

fn packets_by_method(samples: &[Sample]) -> Option<Panel> {
    let methods = samples.last()?.packets.keys().zip(1..);
    let curves = methods.map(|(method, colour)| {
        let count = |sample: &Sample| sample.packets.get(method).copied().unwrap_or(0);
        let counts: Vec<_> = samples
            .iter()
            .map(|sample| (sample.milliseconds, count(sample)))
            .collect();
        Curve {
            name: method.clone(),
            colour: COLOURS[colour % COLOURS.len()],
            points: rates(&counts),
        }
    });
    let curves: Vec<_> = curves.filter(|curve| !curve.points.is_empty()).collect();
    (!curves.is_empty()).then_some(Panel {
        name: "packets/s by method",
        curves,
    })
}

/// From the guest's stop, as the samples show it, to its start.
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

fn reconnects(samples: &[Sample]) -> Vec<f64> {
    let pairs = samples
        .windows(2)
        .filter(|pair| pair[1].reconnects > pair[0].reconnects);
    pairs.map(|pair| seconds(pair[1].milliseconds)).collect()
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
        crate::report::tests::check(&page);
        for name in [
            "sent, Mbit/s",
            "left to send",
            "written by the guest",
            "ratio",
            "zstd-frames",
            "a connection was replaced",
        ] {
            assert!(page.contains(name), "{name}");
        }
        // From 80 ms before the first sample that saw the pause.
        let report: Report = serde_json::from_value(migration())?;
        assert_eq!(paused(&report), Some((4.82, 4.94)));
        assert!(page.contains("the guest is paused, for 120 ms"));
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
        assert!(error("{").contains("is not a report of `vamoose migrate --json`"));
        assert!(error("{}").contains("it has no timeline"));
        fs::write(&file, migration().to_string())?;
        let own = write(&file, Some(&file)).unwrap_err().to_string();
        assert!(own.contains("would replace the report"));
        Ok(())
    }

    proptest! {
        #[test]
        fn whatever_the_samples_are_the_page_is_well_formed(
            samples in proptest::collection::vec((0..1_u64 << 40, 0..1_u64 << 50, 0..1_u64 << 50, proptest::option::of(0..1_u64 << 50), any::<String>()), 0..8),
        ) {
            let samples = samples.into_iter().map(|(milliseconds, wire_bytes, page_bytes, some, name)| Sample {
                milliseconds, wire_bytes, page_bytes, remaining: some, dirty_sync_count: some, dirty_pages_rate: some,
                packets: [(name, page_bytes)].into(), reconnects: wire_bytes, paused: some,
            });
            let report = Report { timeline: samples.collect(), downtime: Some(1 << 50), ..Report::default() };
            crate::report::tests::check(&html(&report).unwrap());
        }
    }
}
