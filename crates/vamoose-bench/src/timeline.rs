//! `vamoose report`: shows the report of a real migration (`vamoose migrate --json FILE`) as a summary, and as a page with a plot.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::record::Sample;
use crate::report::chart::{COLOURS, IN_PAGE};
use crate::report::plots::timeline;
use crate::report::table::short;

/// The keys of the report that are shown; each may be absent.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
struct Report {
    name: Option<String>,
    attempt: Option<String>,
    location: Option<String>,
    host: Option<String>,
    began: Option<u64>,
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
    link: Option<Link>,
    timeline: Vec<Sample>,
}

/// The session with the destination.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Link {
    peer: String,
    tls: Option<String>,
    check: bool,
    paths: Vec<Destination>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Destination {
    to: String,
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

/// Prints a summary of the report in `file`, and writes a page with a plot beside it, or only the plot to `svg`.
pub(crate) fn write(file: &Path, svg: Option<&Path>) -> Result<()> {
    let name = file.display();
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {name}"))?;
    let what = || format!("{name} is not a report of `vamoose migrate --json`");
    let report: Report = serde_json::from_str(&text).with_context(what)?;
    let last = report.timeline.last();
    let last = last.with_context(|| format!("{}: it has no timeline", what()))?;
    let to = svg.map_or_else(|| file.with_extension("html"), Path::to_owned);
    ensure!(
        to != file,
        "the plot would replace the report: name another file by --svg"
    );
    let lines = summary(&report, last)?;
    for (name, value) in &lines {
        println!("{name}: {value}");
    }
    let plot = plot(&report)?;
    let written = match (svg, plot) {
        (None, plot) => page(&report, &lines, plot.as_deref()),
        (Some(_), Some(plot)) => plot,
        (Some(_), None) => {
            println!("plot: none, the samples show nothing");
            return Ok(());
        }
    };
    fs::write(&to, written).with_context(|| format!("cannot write {}", to.display()))?;
    println!(
        "{}: {}",
        if svg.is_some() { "plot" } else { "page" },
        to.display()
    );
    Ok(())
}

/// A page that needs no other file, as wide as the window.
fn page(report: &Report, lines: &[(&str, String)], plot: Option<&str>) -> String {
    const STYLE: &str = "body { font: 15px sans-serif; margin: 24px; } h1 { font-size: 22px; } svg { width: 100%; height: auto; } \
        dl { columns: 2 420px; } dl > div { display: flex; break-inside: avoid; padding: 3px 0; } \
        dt { flex: 0 0 170px; color: #57606a; } dd { margin: 0; overflow-wrap: anywhere; }";
    let title = match &report.name {
        Some(name) => format!("Migration of {name}"),
        None => "A migration".to_owned(),
    };
    let mut rows = String::new();
    for (name, value) in lines {
        // Writing to a string does not fail.
        let _ = write!(rows, "<div><dt>{name}</dt><dd>{}</dd></div>", html(value));
    }
    let (title, plot) = (
        html(&title),
        plot.unwrap_or("<p>The samples show nothing.</p>"),
    );
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/><title>{title}</title><style>{STYLE}</style></head>\n\
         <body><h1>{title}</h1>\n<dl>{rows}</dl>\n<p>Grey lines: rounds over memory. Red lines: replaced connections. Shaded: the \
         downtime.</p>\n{plot}</body></html>\n"
    )
}

/// Text that is not markup.
fn html(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    text.replace(char::is_control, " ")
}

/// What the migration had in common with those that it may be compared with.
fn terms(link: &Link) -> String {
    let encrypted = match &link.tls {
        Some(cipher) => format!("both ends authenticated, encrypted with {cipher}"),
        None => "neither authenticated nor encrypted".to_owned(),
    };
    let checks = if link.check { "on" } else { "off" };
    format!("{encrypted}, checksums {checks}")
}

fn destination(link: &Link) -> String {
    let paths: Vec<_> = link.paths.iter().map(|path| &*path.to).collect();
    format!("{} ({})", paths.join(", "), link.peer)
}

fn date(began: u64) -> Result<String> {
    let mut date = Command::new("date");
    date.args([
        "--utc",
        "--iso-8601=seconds",
        "--date",
        &format!("@{began}"),
    ]);
    Ok(lab::run(&mut date)?.trim().to_owned())
}

fn summary(report: &Report, last: &Sample) -> Result<Vec<(&'static str, String)>> {
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
    let link = report.link.as_ref();
    let known = [
        ("guest", report.name.clone()),
        ("from", report.host.clone()),
        ("to", link.map(destination)),
        ("date", report.began.map(date).transpose()?),
        ("equal terms", link.map(terms)),
        ("attempt", report.attempt.clone()),
        ("the guest is at", report.location.clone()),
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
    let known = known.filter_map(|(name, value)| Some((name, value?)));
    Ok(known.collect())
}

fn plot(report: &Report) -> Result<Option<String>> {
    let until = report.total_time as f64 / 1e3;
    timeline(
        &report.timeline,
        paused(report),
        until,
        (COLOURS[3], IN_PAGE),
    )
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
            "name": "web1", "host": "kvm1", "began": 1_790_000_000, "location": "destination",
            "link": { "peer": "ed25519:<key>", "tls": "AES-128-GCM", "check": true, "paths": [{ "to": "tcp:192.0.2.20:4440" }] },
            "status": "completed", "total-time": 4950, "downtime": 120, "downtime-parts": { "load": 20, "commit": 5 },
            "method": "auto", "wire-bytes": 96_040_000, "page-bytes": 216_090_000, "zero-pages": 49,
            "ram": { "mbps": 155.2, "dirty-sync-count": 3 }, "cpu-seconds": { "total": 1.25 },
            "timeline": samples.collect::<Vec<_>>(),
        })
    }

    #[test]
    fn page_names_the_migration_and_has_all_panels() -> Result<()> {
        let dir = TempDir::new()?;
        let file = dir.path().join("migration.json");
        fs::write(&file, migration().to_string())?;
        write(&file, None)?;
        let page = fs::read_to_string(dir.path().join("migration.html"))?;
        crate::report::tests::check(page.trim_start_matches("<!DOCTYPE html>"));
        for text in [
            "Migration of web1",
            "kvm1",
            "tcp:192.0.2.20:4440 (ed25519:&lt;key>)",
            "2026-09-21T14:13:20+00:00",
            "both ends authenticated, encrypted with AES-128-GCM, checksums on",
            "120 ms, load 20 ms, commit 5 ms",
            "none 147, zstd-frames 2401",
            "sent, Mbit/s",
            "left to send",
            "written by the guest",
            "ratio",
        ] {
            assert!(page.contains(text), "{text}");
        }
        // From 80 ms before the first sample that saw the pause.
        let report: Report = serde_json::from_value(migration())?;
        assert_eq!(paused(&report), Some((4.82, 4.94)));
        let svg = dir.path().join("plot.svg");
        write(&file, Some(&svg))?;
        assert!(fs::read_to_string(svg)?.starts_with("<svg"));
        Ok(())
    }

    #[test]
    fn older_report_without_names_is_shown() -> Result<()> {
        let mut migration = migration();
        let keys = migration.as_object_mut().context("no object")?;
        keys.retain(|key, _| !["name", "host", "began", "location", "link"].contains(&&**key));
        let report: Report = serde_json::from_value(migration)?;
        let lines = summary(&report, &report.timeline[0])?;
        assert_eq!(lines[0], ("status", "completed".to_owned()));
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
