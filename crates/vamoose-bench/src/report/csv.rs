//! `results.csv`: a line for each migration, with every figure, for other programs.

use super::results::Results;
use crate::record::{Record, Service};

/// A column, and its value of a migration.
type Column = (&'static str, fn(&Record) -> String);

const COLUMNS: [Column; 40] = [
    ("scenario", |r| r.cell.scenario.clone()),
    ("guest", |r| r.cell.guest.to_string()),
    ("link", |r| r.cell.link.to_string()),
    ("channels", |r| r.cell.channels.to_string()),
    ("contender", |r| r.cell.contender.to_string()),
    ("ram_bytes", |r| r.cell.ram.to_string()),
    ("downtime_limit_ms", |r| r.cell.downtime_limit.to_string()),
    ("round", |r| r.round.to_string()),
    ("outcome", |r| {
        text(&serde_json::to_value(r.outcome).unwrap_or_default())
    }),
    ("seconds", |r| r.figures.seconds.to_string()),
    ("downtime_ms", |r| known(r.figures.downtime)),
    ("stopped_ms", |r| known(r.figures.stopped)),
    ("downtime_reported_ms", |r| {
        known(r.figures.downtime_reported)
    }),
    ("last_round_ms", |r| part(r, "last-round")),
    ("device_state_ms", |r| part(r, "device-state")),
    ("load_ms", |r| part(r, "load")),
    ("commit_ms", |r| part(r, "commit")),
    ("rounds", |r| known(r.figures.rounds)),
    ("throttle_percent", |r| known(r.figures.throttle)),
    ("dirty_mib_per_second", |r| known(r.figures.dirty_rate)),
    ("wire_bytes", |r| known(r.figures.wire_bytes)),
    ("link_bytes", |r| known(r.figures.link_bytes)),
    ("normal_pages", |r| known(r.figures.normal_pages)),
    ("zero_pages", |r| known(r.figures.zero_pages)),
    ("cpu_source_qemu", |r| r.figures.cpu.source.to_string()),
    ("cpu_sender", |r| r.figures.cpu.sender.to_string()),
    ("cpu_receiver", |r| r.figures.cpu.receiver.to_string()),
    ("cpu_destination_qemu", |r| {
        r.figures.cpu.destination.to_string()
    }),
    ("peak_sender_bytes", |r| known(r.figures.peak_sender)),
    ("peak_receiver_bytes", |r| known(r.figures.peak_receiver)),
    ("service_unit", |r| {
        r.service.as_ref().map_or(String::new(), |s| s.unit.clone())
    }),
    ("rate_before", |r| before(r, |s| Some(s.rate))),
    ("rate_during", |r| during(r, |s| Some(s.rate))),
    ("p50_before_ms", |r| before(r, |s| s.p50)),
    ("p50_during_ms", |r| during(r, |s| s.p50)),
    ("p99_before_ms", |r| before(r, |s| s.p99)),
    ("p99_during_ms", |r| during(r, |s| s.p99)),
    ("longest_before_ms", |r| before(r, |s| s.longest)),
    ("longest_during_ms", |r| during(r, |s| s.longest)),
    ("timeline_looks", |r| r.timeline.len().to_string()),
];

pub(super) fn of(results: &Results) -> String {
    let names = COLUMNS.map(|(name, _)| name.to_owned());
    let groups = results.groups().into_iter();
    let records = groups.flat_map(|group| group.rows.iter().flat_map(|row| &row.records));
    let lines = records.map(|record| line(COLUMNS.map(|(_, value)| value(record))));
    [line(names)].into_iter().chain(lines).collect()
}

fn line<const N: usize>(cells: [String; N]) -> String {
    format!("{}\r\n", cells.map(|cell| quoted(&cell)).join(","))
}

/// As RFC 4180 has it.
fn quoted(cell: &str) -> String {
    if cell.contains([',', '"', '\r', '\n']) {
        return format!("\"{}\"", cell.replace('"', "\"\""));
    }
    cell.to_owned()
}

fn known<T: ToString>(value: Option<T>) -> String {
    value.map_or(String::new(), |value| value.to_string())
}

fn part(record: &Record, name: &str) -> String {
    known(record.figures.downtime_parts.get(name).copied())
}

fn before(record: &Record, value: fn(&Service) -> Option<f64>) -> String {
    known(
        record
            .service
            .as_ref()
            .and_then(|services| value(&services.before)),
    )
}

fn during(record: &Record, value: fn(&Service) -> Option<f64>) -> String {
    known(
        record
            .service
            .as_ref()
            .and_then(|services| value(&services.during)),
    )
}

fn text(value: &serde_json::Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
