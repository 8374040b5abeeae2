//! Tables of the report. The table of a group has a row for each cell, and the columns in which something is known.

use super::markdown::escaped;
use super::results::{Group, Results, Row, Spread};
use super::verdict;
use crate::record::{Figures, Outcome, Record, Service};

/// Columns and rows of text.
pub(crate) struct Table {
    columns: Vec<String>,
    /// With the cell that is bold, if one is.
    rows: Vec<(Option<usize>, Vec<String>)>,
}

/// A column of the table of a group.
struct Column {
    name: &'static str,
    meaning: &'static str,
    value: fn(&Row) -> Option<String>,
}

/// The parts of a downtime, in their order.
pub(crate) const PARTS: [&str; 4] = ["last-round", "device-state", "load", "commit"];

/// Stands for an unknown value.
pub(super) const ABSENT: &str = "–";

const fn column(
    name: &'static str,
    meaning: &'static str,
    value: fn(&Row) -> Option<String>,
) -> Column {
    Column {
        name,
        meaning,
        value,
    }
}

static COLUMNS: [Column; 19] = [
    column(
        "contender",
        "what moved the guest, by which method and with which options",
        |row| Some(row.cell.contender.to_string()),
    ),
    column("channels", "data channels (connections)", |row| {
        Some(row.cell.channels.to_string())
    }),
    column(
        "seconds",
        "total time of the migration; > marks one that was cancelled after that time",
        seconds,
    ),
    column(
        "downtime, ms",
        "from the guest's stop to its start at the destination, by one clock",
        |row| figure(row, full, |of| of.downtime),
    ),
    column(
        "reported, ms",
        "downtime that the source QEMU reports",
        |row| figure(row, full, |of| of.downtime_reported),
    ),
    column(
        "parts, ms",
        "parts of the downtime, as Vamoose reports them: last round + device state + load + commit, a median of each",
        parts,
    ),
    column("rounds", "rounds over the guest's memory", |row| {
        figure(row, count, |of| of.rounds.map(float))
    }),
    column(
        "throttle, %",
        "the most by which auto-converge slowed the guest",
        |row| figure(row, count, |of| of.throttle.map(float)),
    ),
    column(
        "guest writes, MiB/s",
        "memory that the guest changed in a second, before the migration",
        |row| figure(row, count, |of| of.dirty_rate.map(float)),
    ),
    column(
        "wire, MB",
        "bytes between the hosts, as the sender counts them, in 10^6",
        |row| figure(row, full, |of| of.wire_bytes.map(mega)),
    ),
    column(
        "link, MB",
        "bytes over the link, headers of TCP and IP included, in 10^6",
        |row| figure(row, full, |of| of.link_bytes.map(mega)),
    ),
    column(
        "link, Mbit/s",
        "bits over the link (where unknown: on the wire) divided by the total time",
        |row| figure(row, median, link_rate),
    ),
    column(
        "CPU, s/GiB",
        "CPU seconds of both hosts for each GiB of the guest's memory",
        |row| row.spread(cpu_by_memory).map(median),
    ),
    column(
        "CPU send, %",
        "CPU seconds of the source's host divided by the total time: 100 is one core",
        |row| figure(row, median, cpu_of_source),
    ),
    column(
        "peak, MiB",
        "the most memory of Vamoose, at the end that had more",
        |row| {
            figure(row, median, |of| {
                of.peak_sender.max(of.peak_receiver).map(mebi)
            })
        },
    ),
    column(
        "clients, answers/s",
        "answers to the guest's clients: before the migration → through it",
        |row| services(row, |service| Some(service.rate)),
    ),
    column(
        "p99, ms",
        "latency of the slowest hundredth of the answers: before → through the migration",
        |row| services(row, |service| service.p99),
    ),
    column(
        "longest, ms",
        "the longest latency: before → through the migration",
        |row| services(row, |service| service.longest),
    ),
    column(
        "proof",
        "equal: the whole memory of both ends was compared; checked: the running guest has verified its memory; \
         served: a real program ran on without a wrong answer; cancelled: took too long, and runs at the source",
        |row| Some(row.proof()),
    ),
];

impl Table {
    pub(crate) fn new<T: Into<String>>(columns: impl IntoIterator<Item = T>) -> Self {
        Self {
            columns: columns.into_iter().map(Into::into).collect(),
            rows: Vec::new(),
        }
    }

    /// Adds a row, whose cell number `bold` stands out.
    pub(crate) fn add(&mut self, bold: Option<usize>, cells: impl IntoIterator<Item = String>) {
        self.rows.push((bold, cells.into_iter().collect()));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The cells of each row.
    pub(crate) fn rows(&self) -> impl Iterator<Item = &[String]> {
        self.rows.iter().map(|(_, cells)| cells.as_slice())
    }

    /// The table of a group.
    pub(super) fn of(group: &Group) -> Self {
        let columns: Vec<_> = COLUMNS
            .iter()
            .filter(|column| column.is_known(group))
            .collect();
        let mut table = Self::new(columns.iter().map(|column| column.name));
        for row in &group.rows {
            let bold = verdict::is_default(&row.cell.contender).then_some(0);
            let value = |column: &&Column| (column.value)(row).unwrap_or_else(|| ABSENT.to_owned());
            table.add(bold, columns.iter().map(value));
        }
        table
    }

    pub(crate) fn markdown(&self) -> String {
        let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
        let mut text = line(self.columns.iter().map(|name| escaped(name)).collect());
        text += &format!("|{}\n", "---|".repeat(self.columns.len()));
        for (bold, cells) in &self.rows {
            let cells = cells.iter().map(|cell| escaped(cell)).enumerate();
            text += &line(
                cells
                    .map(|(at, cell)| {
                        if *bold == Some(at) {
                            format!("**{cell}**")
                        } else {
                            cell
                        }
                    })
                    .collect(),
            );
        }
        text
    }
}

/// Names and meanings of the columns that a table of the report has.
pub(super) fn meanings(results: &Results) -> Vec<(&'static str, &'static str)> {
    let is_known = |column: &&Column| results.groups().any(|group| column.is_known(group));
    COLUMNS
        .iter()
        .filter(is_known)
        .map(|column| (column.name, column.meaning))
        .collect()
}

impl Column {
    fn is_known(&self, group: &Group) -> bool {
        group.rows.iter().any(|row| (self.value)(row).is_some())
    }
}

/// A number with three significant digits.
pub(crate) fn short(value: f64) -> String {
    match value.abs() {
        size if size >= 99.95 || value == 0.0 => format!("{value:.0}"),
        size if size >= 9.995 => format!("{value:.1}"),
        size if size >= 0.0995 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// The median, with the least and the most where they differ.
pub(super) fn full(spread: Spread) -> String {
    let [median, least, most] = [spread.median, spread.least, spread.most].map(short);
    match least == most {
        true => median,
        false => format!("{median} ({least}–{most})"),
    }
}

/// The median of a value derived from other columns, whose spread is theirs.
fn median(spread: Spread) -> String {
    short(spread.median)
}

/// The same as [`full`] for whole numbers.
fn count(spread: Spread) -> String {
    let Spread {
        median,
        least,
        most,
    } = spread;
    match least < most {
        true => format!("{median} ({least}–{most})"),
        false => median.to_string(),
    }
}

/// Downtime of a running guest by one clock; of other guests, the downtime that QEMU reports. In milliseconds.
pub(super) fn downtime(record: &Record) -> Option<f64> {
    record.figures.downtime.or(record.figures.downtime_reported)
}

pub(super) fn cpu_by_memory(record: &Record) -> Option<f64> {
    let total = record.figures.cpu.total();
    (total > 0.0).then(|| total / (record.cell.ram as f64 / f64::from(1 << 30)))
}

/// A figure as text: its spread over the migrations of a row.
fn figure(
    row: &Row,
    text: fn(Spread) -> String,
    value: fn(&Figures) -> Option<f64>,
) -> Option<String> {
    row.spread(|record| value(&record.figures)).map(text)
}

fn cpu_of_source(figures: &Figures) -> Option<f64> {
    (figures.cpu.total() > 0.0).then_some(figures.cpu.of_source() * 100.0 / figures.seconds)
}

fn link_rate(figures: &Figures) -> Option<f64> {
    let bytes = figures.link_bytes.or(figures.wire_bytes)?;
    Some(mega(bytes) * 8.0 / figures.seconds)
}

fn seconds(row: &Row) -> Option<String> {
    let moved = row.seconds().map(full);
    let cancelled = row
        .records
        .iter()
        .filter(|record| record.outcome == Outcome::Cancelled);
    let cancelled = Spread::of(cancelled.map(|record| record.figures.seconds));
    let cancelled = cancelled.map(|spread| format!("> {}", short(spread.most)));
    let both: Vec<_> = moved.into_iter().chain(cancelled).collect();
    (!both.is_empty()).then(|| both.join(", "))
}

fn parts(row: &Row) -> Option<String> {
    let part = |name: &str| row.spread(|record| record.figures.downtime_parts.get(name).copied());
    let parts = PARTS.map(part);
    let text =
        |part: Option<Spread>| part.map_or(ABSENT.to_owned(), |part| format!("{:.0}", part.median));
    let is_known = parts.iter().any(Option::is_some);
    is_known.then(|| parts.map(text).join("\u{a0}+\u{a0}"))
}

fn services(row: &Row, value: impl Fn(&Service) -> Option<f64>) -> Option<String> {
    let before = row.spread(|record| value(&record.service.as_ref()?.before));
    let during = row.spread(|record| value(&record.service.as_ref()?.during));
    before.or(during)?;
    let [before, during] = [before, during].map(|spread| spread.map_or(ABSENT.to_owned(), median));
    Some(format!("{before} → {during}"))
}

fn float(value: u64) -> f64 {
    value as f64
}

fn mega(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

fn mebi(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
