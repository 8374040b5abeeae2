//! The plots of a group: time and CPU of each cell, and a typical migration of Vamoose's default and of stock QEMU's fastest
//! method.

use anyhow::Result;
use plotters::style::RGBColor;

use super::chart::{Bar, COLOURS, Curve, IN_REPORT, Marks, Panel, bars, over_time};
use super::results::{Group, Row, Spread};
use super::table::{cpu_by_memory, downtime, escaped, short};
use crate::record::{Record, Sample};

/// A plot in a file of its own.
pub(crate) struct Plot {
    /// Name of the file, without a folder.
    file: String,
    title: String,
    /// Text below the title.
    note: String,
    pub(super) svg: String,
}

impl Plot {
    /// Path of the file in the folder of the report.
    pub(super) fn path(&self) -> String {
        format!("plots/{}", self.file)
    }

    pub(super) fn markdown(&self) -> String {
        let (title, note) = (escaped(&self.title), escaped(&self.note));
        format!("\n**{title}**. {note}\n\n![{title}]({})\n", self.path())
    }
}

/// The plots of a group of `scenario`.
pub(super) fn of(scenario: &str, group: &Group) -> Result<Vec<Plot>> {
    let title = group.title();
    let plot = |kind: &str, subject: &str, note: String, svg| Plot {
        file: file_name(&format!("{scenario}-{}-{kind}", group.slug())),
        title: format!("{subject}: {title}"),
        note,
        svg,
    };
    let mut plots = Vec::new();
    let note = || "Bars are medians, lines the minimum and the maximum of the rounds.".to_owned();
    if let Some(svg) = bar_chart(group, "seconds", Row::seconds)? {
        plots.push(plot("time", "Total time", note(), svg));
    }
    let cpu = |row: &Row| row.spread(cpu_by_memory);
    if let Some(svg) = bar_chart(group, "CPU seconds for each GiB, both hosts", cpu)? {
        plots.push(plot("cpu", "CPU time", note(), svg));
    }
    let shown = [group.default(), group.fastest_stock()];
    let typical = |row: &'_ Row| row.typical().cloned().map(|record| (row.label(), record));
    let shown: Vec<_> = shown.into_iter().flatten().filter_map(typical).collect();
    let ends = shown.iter().map(|(_, record)| end(record));
    let until = ends.fold(0.0, f64::max);
    for (label, record) in &shown {
        let colour = COLOURS[record.cell.contender.who as usize];
        if let Some(svg) = timeline(&record.timeline, paused(record), until, (colour, IN_REPORT))? {
            let (kind, subject) = (
                format!("timeline-{label}"),
                format!("A migration by {label}"),
            );
            plots.push(plot(&kind, &subject, description(record), svg));
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
    let bar = |row: &Row| Bar {
        name: group.label(row),
        value: value(row),
        colour: COLOURS[row.cell.contender.who as usize],
    };
    let of_rows: Vec<_> = rows.into_iter().map(bar).collect();
    let is_known = of_rows.iter().any(|bar| bar.value.is_some());
    is_known.then(|| bars(unit, &of_rows)).transpose()
}

/// Plots the samples of a migration: rate, remaining memory, written pages, and what else they have. `paused` is when the guest was
/// paused, in seconds; the time axis ends at `until` or later. `None` where no sample shows anything.
pub(crate) fn timeline(
    samples: &[Sample],
    paused: Option<(f64, f64)>,
    until: f64,
    (colour, width): (RGBColor, u32),
) -> Result<Option<String>> {
    let known = |value: fn(&Sample) -> Option<u64>, unit: f64| -> Vec<(f64, f64)> {
        let point = |sample: &Sample| Some((sample.seconds(), value(sample)? as f64 / unit));
        samples.iter().filter_map(point).collect()
    };
    let sent = rates(samples, |sample| sample.wire_bytes);
    let pages = rates(samples, |sample| sample.page_bytes);
    let megabits = sent.iter().map(|(at, bytes)| (*at, bytes * 8.0 / 1e6));
    let both = pages.iter().zip(&sent).filter(|(_, (_, sent))| *sent > 0.0);
    let ratios = both.map(|((at, pages), (_, sent))| (*at, pages / sent));
    let panels = [
        ("sent, Mbit/s", megabits.collect()),
        (
            "left to send, MiB",
            known(|sample| sample.remaining, f64::from(1 << 20)),
        ),
        (
            "pages written by the guest, 1/s",
            known(|sample| sample.dirty_pages_rate, 1.0),
        ),
        ("ratio: page bytes to bytes sent", ratios.collect()),
    ];
    let panels = panels.map(|(name, points)| Panel {
        name,
        curves: vec![Curve {
            name: String::new(),
            colour,
            points,
        }],
    });
    let panels = panels.into_iter().chain([packets_by_method(samples)]);
    let panels: Vec<_> = panels.filter(Panel::shows_anything).collect();
    let marks = Marks {
        until,
        paused,
        // The first round begins with the migration.
        rounds: increases(samples, |sample| {
            sample.dirty_sync_count.unwrap_or(0).saturating_sub(1)
        }),
        reconnects: increases(samples, |sample| sample.reconnects),
    };
    let is_empty = panels.is_empty();
    (!is_empty)
        .then(|| over_time(&panels, &marks, width))
        .transpose()
}

fn packets_by_method(samples: &[Sample]) -> Panel {
    let methods = samples.last().map(|last| last.packets.keys().zip(1..));
    let curve = |(method, colour): (&String, usize)| Curve {
        name: method.clone(),
        colour: COLOURS[colour % COLOURS.len()],
        points: rates(samples, |sample| {
            sample.packets.get(method).copied().unwrap_or(0)
        }),
    };
    Panel {
        name: "packets/s by method",
        curves: methods.into_iter().flatten().map(curve).collect(),
    }
}

/// When a bench's guest was paused, in seconds since the beginning; `None` where that is unknown.
fn paused(record: &Record) -> Option<(f64, f64)> {
    let (start, downtime) = (record.figures.stopped? / 1e3, downtime(record)? / 1e3);
    (downtime > 0.0).then_some((start, start + downtime))
}

/// When the migration ended, in seconds. The total time is QEMU's own, which begins later where Vamoose sets up first.
fn end(record: &Record) -> f64 {
    let last = record.timeline.last();
    last.map_or(record.figures.seconds, Sample::seconds)
}

fn description(record: &Record) -> String {
    let pause = paused(record).map_or(String::new(), |(from, to)| {
        format!(" Downtime {} ms (shaded).", short((to - from) * 1e3))
    });
    let (seconds, rounds) = (record.figures.seconds, record.figures.rounds.unwrap_or(0));
    format!(
        "{} s, {rounds} rounds over memory (vertical lines).{pause}",
        short(seconds)
    )
}

/// Amounts a second, from the amounts so far. Samples that are close together count as one.
fn rates(samples: &[Sample], amount: impl Fn(&Sample) -> u64) -> Vec<(f64, f64)> {
    /// Seconds: QEMU and the kernel send in bursts.
    const LEAST: f64 = 0.1;
    let mut rates = Vec::new();
    let Some(mut from) = samples.first() else {
        return rates;
    };
    for sample in samples {
        let elapsed = sample.seconds() - from.seconds();
        if elapsed >= LEAST {
            let rate = amount(sample).saturating_sub(amount(from)) as f64 / elapsed;
            rates.extend([(from.seconds(), rate), (sample.seconds(), rate)]);
            from = sample;
        }
    }
    rates
}

/// When a count increased, in seconds.
fn increases(samples: &[Sample], count: impl Fn(&Sample) -> u64) -> Vec<f64> {
    let pairs = samples.windows(2);
    let increased = pairs.filter(|pair| count(&pair[1]) > count(&pair[0]));
    increased.map(|pair| pair[1].seconds()).collect()
}

/// Letters and digits, with a hyphen in place of everything else.
fn file_name(text: &str) -> String {
    let words = text.split(|character: char| !character.is_ascii_alphanumeric());
    let words: Vec<_> = words.filter(|word| !word.is_empty()).collect();
    format!("{}.svg", words.join("-"))
}
