//! The plots of a group: time and CPU of each cell, and a typical migration of Vamoose's default and of stock QEMU's fastest
//! method.

use anyhow::Result;
use plotters::style::RGBColor;

use super::chart::{Bar, COLOURS, Curve, Marks, Panel, bars, over_time};
use super::markdown::Plot;
use super::results::{Group, Row, Spread};
use super::table::{cpu_by_memory, downtime, short};
use super::verdict;
use crate::record::{Moment, Record};
use crate::scenario::Who;

/// The plots of a group of `scenario`.
pub(super) fn of(scenario: &str, group: &Group) -> Result<Vec<Plot>> {
    let title = group.title();
    let plot = |kind: &str, subject: String, note: String, svg| Plot {
        file: format!(
            "{}.svg",
            file_name(&format!("{scenario}-{}-{kind}", group.slug()))
        ),
        title: format!("{subject}: {title}"),
        note,
        svg,
    };
    let mut plots = Vec::new();
    let note = || "Bars are medians, lines the least and the most of the rounds.".to_owned();
    if let Some(svg) = bar_chart(group, "seconds", Row::seconds)? {
        plots.push(plot("time", "Total time".to_owned(), note(), svg));
    }
    if let Some(svg) = bar_chart(group, "CPU seconds for each GiB, both hosts", |row| {
        row.spread(cpu_by_memory)
    })? {
        plots.push(plot("cpu", "CPU time".to_owned(), note(), svg));
    }
    let shown = typical(group);
    let until = shown
        .iter()
        .map(|(_, record)| end(record))
        .fold(0.0, f64::max);
    for (row, record) in shown {
        let (label, note) = (row.label(), description(record));
        if let Some(svg) = timeline(row, record, until)? {
            plots.push(plot(
                &format!("timeline-{label}"),
                format!("A migration by {label}"),
                note.clone(),
                svg,
            ));
        }
        if let Some(svg) = latencies(row, record)? {
            plots.push(plot(
                &format!("latency-{label}"),
                format!("Clients of the guest, by {label}"),
                note,
                svg,
            ));
        }
    }
    Ok(plots)
}

fn bar_chart(
    group: &Group,
    unit: &str,
    value: impl Fn(&Row) -> Option<Spread>,
) -> Result<Option<String>> {
    let mut rows: Vec<&Row> = group.rows.iter().collect();
    rows.sort_by(|one, other| one.cell.contender.cmp(&other.cell.contender));
    let of_rows: Vec<_> = rows
        .into_iter()
        .map(|row| Bar {
            name: group.label(row),
            value: value(row),
            colour: colour(row),
        })
        .collect();
    let is_known = of_rows.iter().any(|bar| bar.value.is_some());
    is_known.then(|| bars(unit, &of_rows)).transpose()
}

/// A typical migration by Vamoose's default (without one, by the fastest Vamoose), and by stock QEMU's fastest method.
fn typical(group: &Group) -> Vec<(&Row, &Record)> {
    let rows = || group.rows.iter();
    let is_stock = |row: &&Row| row.cell.contender.who == Who::Qemu;
    let default = verdict::fastest(rows().filter(|row| verdict::is_default(&row.cell.contender)));
    let ours = default.or_else(|| verdict::fastest(rows().filter(|row| !is_stock(row))));
    let stock = verdict::fastest(rows().filter(is_stock));
    let both = [ours, stock].into_iter().flatten();
    both.filter_map(|row| Some((row, row.typical()?))).collect()
}

/// Rate, remaining memory and written pages of a migration.
fn timeline(row: &Row, record: &Record, until: f64) -> Result<Option<String>> {
    let moments = &record.timeline;
    let of = |value: fn(&Moment) -> f64| -> Vec<(f64, f64)> {
        moments
            .iter()
            .map(|moment| (seconds(moment.milliseconds), value(moment)))
            .collect()
    };
    let sent: Vec<_> = moments
        .iter()
        .map(|moment| (moment.milliseconds, moment.sent_bytes))
        .collect();
    let remaining = of(|moment| moment.remaining_bytes as f64 / f64::from(1 << 20));
    let written = of(|moment| moment.dirty_pages_rate as f64);
    let panels: Vec<_> = progress(colour(row), &sent, remaining, written).collect();
    let counts: Vec<_> = moments
        .iter()
        .map(|moment| (moment.milliseconds, moment.rounds))
        .collect();
    let marks = Marks {
        until,
        paused: paused(record),
        rounds: beginnings(&counts),
        ..Marks::default()
    };
    (!panels.is_empty())
        .then(|| over_time(&panels, &marks))
        .transpose()
}

/// Latencies of the guest's clients before, during and after a migration.
fn latencies(row: &Row, record: &Record) -> Result<Option<String>> {
    let latencies = record.service.iter().flat_map(|service| &service.latencies);
    let points = latencies.map(|latency| (latency.at as f64 / 1e3, latency.milliseconds));
    let marks = Marks {
        until: end(record),
        paused: paused(record),
        events: vec![0.0, end(record)],
        ..Marks::default()
    };
    let panel = panel("longest latency, ms", colour(row), points.collect());
    panel.map(|panel| over_time(&[panel], &marks)).transpose()
}

/// Panels of the rate, the remaining MiB, and the written pages; `sent` has milliseconds and bytes so far.
pub(crate) fn progress(
    colour: RGBColor,
    sent: &[(u64, u64)],
    remaining: Vec<(f64, f64)>,
    written: Vec<(f64, f64)>,
) -> impl Iterator<Item = Panel> {
    let rate = rates(sent).into_iter();
    let megabits = rate.map(|(at, bytes)| (at, bytes * 8.0 / 1e6)).collect();
    let panels = [
        ("sent, Mbit/s", megabits),
        ("left to send, MiB", remaining),
        ("pages written by the guest, 1/s", written),
    ];
    panels
        .into_iter()
        .filter_map(move |(name, points)| panel(name, colour, points))
}

/// A panel with one curve; `None` where there is nothing to see.
pub(crate) fn panel(
    name: &'static str,
    colour: RGBColor,
    points: Vec<(f64, f64)>,
) -> Option<Panel> {
    let is_shown = points.len() > 1 && points.iter().any(|(_, value)| *value > 0.0);
    let curve = Curve {
        name: String::new(),
        colour,
        points,
    };
    is_shown.then(|| Panel {
        name,
        curves: vec![curve],
    })
}

/// From when to when the guest was paused, in seconds since the beginning.
fn paused(record: &Record) -> Option<(f64, f64)> {
    let (downtime, end) = (downtime(record)? / 1e3, end(record));
    let start = record
        .figures
        .stopped
        .map_or(end - downtime, |stopped| stopped / 1e3);
    (downtime > 0.0 && start >= 0.0).then_some((start, start + downtime))
}

/// When the migration ended, in seconds. The total time is QEMU's own, which begins later where Vamoose sets up first.
fn end(record: &Record) -> f64 {
    let last = record.timeline.last();
    last.map_or(record.figures.seconds, |moment| {
        seconds(moment.milliseconds)
    })
}

fn description(record: &Record) -> String {
    let figures = &record.figures;
    let pause = paused(record).map_or(String::new(), |(from, to)| {
        let place = match figures.stopped {
            Some(_) => "",
            None => " Its beginning is unknown: drawn at the end.",
        };
        format!(" Downtime {} ms (shaded).{place}", short((to - from) * 1e3))
    });
    let rounds = figures.rounds.unwrap_or(0);
    format!(
        "{} s, {rounds} rounds over memory (vertical lines).{pause}",
        short(figures.seconds)
    )
}

/// Amounts a second, from milliseconds and amounts so far. Samples that are close together count as one.
pub(crate) fn rates(amounts: &[(u64, u64)]) -> Vec<(f64, f64)> {
    /// Milliseconds: QEMU and the kernel send in bursts.
    const LEAST: u64 = 100;
    let mut rates = Vec::new();
    let mut from = amounts.first().copied().unwrap_or_default();
    for (at, amount) in amounts.iter().copied() {
        let elapsed = at.saturating_sub(from.0);
        if elapsed >= LEAST {
            let rate = amount.saturating_sub(from.1) as f64 / seconds(elapsed);
            rates.extend([(seconds(from.0), rate), (seconds(at), rate)]);
            from = (at, amount);
        }
    }
    rates
}

/// When rounds over memory began, in seconds, from milliseconds and rounds so far. The beginning itself is left out.
pub(crate) fn beginnings(counts: &[(u64, u64)]) -> Vec<f64> {
    let pairs = counts
        .windows(2)
        .filter(|pair| pair[1].1 > pair[0].1 && pair[1].1 > 1);
    pairs.map(|pair| seconds(pair[1].0)).collect()
}

pub(crate) fn seconds(milliseconds: u64) -> f64 {
    milliseconds as f64 / 1e3
}

fn colour(row: &Row) -> RGBColor {
    COLOURS[match row.cell.contender.who {
        Who::Qemu => 0,
        Who::Relay => 1,
        Who::Pair => 2,
        Who::Migrate => 3,
        Who::Live => 4,
    }]
}

/// Letters and digits, with a hyphen in place of everything else.
fn file_name(text: &str) -> String {
    let words = text.split(|character: char| !character.is_ascii_alphanumeric());
    words
        .filter(|word| !word.is_empty())
        .collect::<Vec<_>>()
        .join("-")
}
