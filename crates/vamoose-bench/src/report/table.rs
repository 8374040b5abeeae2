//! Tables: those of a group have a row for each cell, and of the columns those in which something is known. A reader decides by the few
//! columns of the first; the second has the others.

use super::results::{Group, Row, Spread};
use super::verdict;
use crate::record::{Record, Service};

/// Texts, to be laid out by the formats.
pub(crate) struct Table {
    pub(crate) columns: Vec<String>,
    pub(crate) rows: Vec<Line>,
}

/// A row of a table, as wide as its columns.
pub(crate) struct Line {
    pub(crate) cells: Vec<String>,
    pub(crate) tone: Tone,
}

/// How a row stands out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    Plain,
    /// Vamoose's default.
    Default,
    /// A requirement that is not met.
    Short,
}

/// A column of the tables of groups.
struct Column {
    name: &'static str,
    /// What the figures are, in a sentence.
    meaning: &'static str,
    place: Place,
    value: fn(&Row) -> Option<String>,
}

/// In which of a group's two tables a column is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// What tells the rows apart.
    Both,
    First,
    /// In the first where no row of the group has the column before it, which says the same more truly.
    Instead,
    Second,
}

/// What a downtime consists of, in this order.
pub(crate) const PARTS: [&str; 4] = ["last-round", "device-state", "load", "commit"];

/// What is not known.
pub(super) const ABSENT: &str = "–";

/// All that there may be.
static COLUMNS: [Column; 27] = [
    Column {
        name: "contender",
        meaning: "who moved the guest, by which method and with which options",
        place: Place::Both,
        value: |row| Some(row.cell.contender.to_string()),
    },
    Column {
        name: "channels",
        meaning: "data channels (connections)",
        place: Place::Both,
        value: |row| Some(row.cell.channels.to_string()),
    },
    Column {
        name: "seconds",
        meaning: "total time of the migration; one with > was cancelled after that time",
        place: Place::First,
        value: seconds,
    },
    Column {
        name: "downtime, ms",
        meaning: "from the guest's stop to its start at the destination, by one clock",
        place: Place::First,
        value: |row| text(row.spread(|record| record.figures.downtime)),
    },
    Column {
        name: "reported, ms",
        meaning: "the downtime that the source QEMU reports",
        place: Place::Instead,
        value: |row| text(row.spread(|record| record.figures.downtime_reported)),
    },
    Column {
        name: "parts, ms",
        meaning: "what the downtime consists of, as Vamoose reports it: last round + device state + load + commit, a median of each",
        place: Place::Second,
        value: parts,
    },
    Column {
        name: "rounds",
        meaning: "rounds over the guest's memory",
        place: Place::Second,
        value: |row| count(row.spread(|record| record.figures.rounds.map(float))),
    },
    Column {
        name: "throttle, %",
        meaning: "the most by which auto-converge slowed the guest",
        place: Place::Second,
        value: |row| count(row.spread(|record| record.figures.throttle.map(float))),
    },
    Column {
        name: "guest writes, MiB/s",
        meaning: "memory that the guest changed in a second, before the migration",
        place: Place::Second,
        value: |row| count(row.spread(|record| record.figures.dirty_rate.map(float))),
    },
    Column {
        name: "wire, MB",
        meaning: "bytes between the hosts, as the sender counts them, in 10^6",
        place: Place::First,
        value: |row| text(row.spread(|record| record.figures.wire_bytes.map(mega))),
    },
    Column {
        name: "link, MB",
        meaning: "bytes over the link, headers of TCP and IP included, in 10^6",
        place: Place::Second,
        value: |row| text(row.spread(|record| record.figures.link_bytes.map(mega))),
    },
    Column {
        name: "guest, MB/s",
        meaning: "the guest's memory divided by the total time",
        place: Place::Second,
        value: |row| middle(row.spread(guest_rate)),
    },
    Column {
        name: "link, Mbit/s",
        meaning: "bits over the link (where those are not known: on the wire) divided by the total time",
        place: Place::First,
        value: |row| middle(row.spread(link_rate)),
    },
    Column {
        name: "pages/s",
        meaning: "pages, zero pages among them, divided by the total time",
        place: Place::Second,
        value: |row| middle(row.spread(pages_rate)),
    },
    Column {
        name: "CPU send, s",
        meaning: "CPU seconds of the source's host: QEMU and Vamoose",
        place: Place::Second,
        value: |row| middle(row.spread(|record| cpu(record, record.figures.cpu.sending()))),
    },
    Column {
        name: "CPU receive, s",
        meaning: "CPU seconds of the destination's host: QEMU and Vamoose",
        place: Place::Second,
        value: |row| middle(row.spread(|record| cpu(record, record.figures.cpu.receiving()))),
    },
    Column {
        name: "CPU total, s",
        meaning: "both",
        place: Place::Second,
        value: |row| text(row.spread(cpu_total)),
    },
    Column {
        name: "CPU, s/GiB",
        meaning: "CPU seconds of both hosts for each GiB of the guest's memory",
        place: Place::First,
        value: |row| middle(row.spread(cpu_by_memory)),
    },
    Column {
        name: "CPU send, %",
        meaning: "CPU seconds of the source's host divided by the total time: 100 is one core",
        place: Place::Second,
        value: |row| middle(row.spread(|record| share(record, record.figures.cpu.sending()))),
    },
    Column {
        name: "CPU receive, %",
        meaning: "the same of the destination's host",
        place: Place::Second,
        value: |row| middle(row.spread(|record| share(record, record.figures.cpu.receiving()))),
    },
    Column {
        name: "peak, MiB",
        meaning: "the most memory of Vamoose, at the end where it had more",
        place: Place::First,
        value: |row| middle(row.spread(|record| peak(record).map(mebi))),
    },
    Column {
        name: "peak send, MiB",
        meaning: "the most memory of Vamoose at the source",
        place: Place::Second,
        value: |row| middle(row.spread(|record| record.figures.peak_sender.map(mebi))),
    },
    Column {
        name: "peak receive, MiB",
        meaning: "the same at the destination",
        place: Place::Second,
        value: |row| middle(row.spread(|record| record.figures.peak_receiver.map(mebi))),
    },
    Column {
        name: "clients, answers/s",
        meaning: "what the guest's clients got: before the migration → through it",
        place: Place::Second,
        value: |row| services(row, |service| Some(service.rate)),
    },
    Column {
        name: "p99, ms",
        meaning: "latency of the slowest hundredth of the answers: before → through the migration",
        place: Place::First,
        value: |row| services(row, |service| service.p99),
    },
    Column {
        name: "longest, ms",
        meaning: "the longest latency: before → through the migration",
        place: Place::Second,
        value: |row| services(row, |service| service.longest),
    },
    Column {
        name: "proof",
        meaning: "equal: the whole memory of both ends was compared; checked: the guest, which runs on, has verified its memory; \
                  served: a real program ran on, without a wrong answer; cancelled: took too long, and runs at the source",
        place: Place::First,
        value: |row| Some(row.proof()),
    },
];

impl Table {
    pub(crate) fn new<T: Into<String>>(columns: impl IntoIterator<Item = T>) -> Self {
        Self {
            columns: columns.into_iter().map(Into::into).collect(),
            rows: Vec::new(),
        }
    }

    pub(crate) fn add(&mut self, tone: Tone, cells: impl IntoIterator<Item = String>) {
        self.rows.push(Line {
            cells: cells.into_iter().collect(),
            tone,
        });
    }

    /// What a reader decides by.
    pub(super) fn first(group: &Group) -> Self {
        Self::with(group, |column, before| match column.place {
            Place::Both | Place::First => true,
            Place::Instead => before.is_some_and(|before| !before.is_known(group)),
            Place::Second => false,
        })
    }

    /// The others.
    pub(super) fn second(group: &Group) -> Self {
        Self::with(group, |column, before| match column.place {
            Place::Both | Place::Second => true,
            Place::Instead => before.is_some_and(|before| before.is_known(group)),
            Place::First => false,
        })
    }

    /// `is_in` is asked of a column and the one before it.
    fn with(group: &Group, is_in: impl Fn(&Column, Option<&Column>) -> bool) -> Self {
        let before = [None].into_iter().chain(COLUMNS.iter().map(Some));
        let columns = COLUMNS.iter().zip(before);
        let columns = columns.filter(|(column, before)| is_in(column, *before));
        let columns = columns.map(|(column, _)| column);
        let columns: Vec<_> = columns.filter(|column| column.is_known(group)).collect();
        let mut table = Self::new(columns.iter().map(|column| column.name));
        for row in &group.rows {
            let is_default = verdict::is_default(&row.cell.contender);
            let tone = if is_default {
                Tone::Default
            } else {
                Tone::Plain
            };
            let value = |column: &&Column| (column.value)(row).unwrap_or_else(|| ABSENT.to_owned());
            table.add(tone, columns.iter().map(value));
        }
        table
    }
}

/// What the columns mean that at least one of the groups has.
pub(super) fn meanings(groups: &[&Group]) -> Vec<(&'static str, &'static str)> {
    let is_known = |column: &&Column| groups.iter().any(|group| column.is_known(group));
    let known = COLUMNS.iter().filter(is_known);
    known.map(|column| (column.name, column.meaning)).collect()
}

impl Column {
    fn is_known(&self, group: &Group) -> bool {
        group.rows.iter().any(|row| (self.value)(row).is_some())
    }
}

/// A number with as many digits as mean something.
pub(crate) fn short(value: f64) -> String {
    match value.abs() {
        size if size >= 99.95 || value == 0.0 => format!("{value:.0}"),
        size if size >= 9.995 => format!("{value:.1}"),
        size if size >= 0.0995 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// As short, with the least and the most where they differ.
pub(super) fn full(spread: Spread) -> String {
    let [median, least, most] = [spread.median, spread.least, spread.most].map(short);
    if least == most {
        return median;
    }
    format!("{median} ({least}–{most})")
}

/// As short.
pub(super) fn median(spread: Spread) -> String {
    short(spread.median)
}

/// Of a running guest by one clock; of others, which notice none, what QEMU reports. In milliseconds.
pub(super) fn downtime(record: &Record) -> Option<f64> {
    let figures = &record.figures;
    figures.downtime.or(figures.downtime_reported)
}

/// CPU seconds of both hosts; `None` where none were counted.
pub(super) fn cpu_total(record: &Record) -> Option<f64> {
    cpu(record, record.figures.cpu.total())
}

fn text(spread: Option<Spread>) -> Option<String> {
    spread.map(full)
}

/// Of what is derived from other columns: its spread is theirs.
fn middle(spread: Option<Spread>) -> Option<String> {
    spread.map(median)
}

/// Of what is counted.
fn count(spread: Option<Spread>) -> Option<String> {
    let spread = spread?;
    let [median, least, most] = [spread.median, spread.least, spread.most];
    Some(if least < most {
        format!("{median} ({least}–{most})")
    } else {
        median.to_string()
    })
}

fn seconds(row: &Row) -> Option<String> {
    let cancelled = row
        .records
        .iter()
        .filter(|record| !record.outcome.is_moved());
    let cancelled = Spread::of(cancelled.map(|record| record.figures.seconds));
    let cancelled = cancelled.map(|spread| format!("> {}", short(spread.most)));
    let moved = row.seconds().map(full);
    let both: Vec<_> = moved.into_iter().chain(cancelled).collect();
    (!both.is_empty()).then(|| both.join(", "))
}

fn parts(row: &Row) -> Option<String> {
    let part = |name: &str| row.spread(|record| record.figures.downtime_parts.get(name).copied());
    let parts = PARTS.map(|name| part(name).map(|part| format!("{:.0}", part.median)));
    parts.iter().any(Option::is_some).then(|| {
        parts
            .map(|part| part.unwrap_or_else(|| ABSENT.to_owned()))
            .join("\u{a0}+\u{a0}")
    })
}

fn services(row: &Row, value: impl Fn(&Service) -> Option<f64>) -> Option<String> {
    let before = row.spread(|record| value(&record.service.as_ref()?.before));
    let during = row.spread(|record| value(&record.service.as_ref()?.during));
    match (before, during) {
        (None, None) => None,
        (before, during) => {
            let text =
                |spread: Option<Spread>| spread.map_or(ABSENT.to_owned(), |s| short(s.median));
            Some(format!("{} → {}", text(before), text(during)))
        }
    }
}

fn guest_rate(record: &Record) -> Option<f64> {
    per_second(record, mega(record.cell.ram))
}

fn link_rate(record: &Record) -> Option<f64> {
    let bytes = record.figures.link_bytes.or(record.figures.wire_bytes)?;
    per_second(record, mega(bytes) * 8.0)
}

fn pages_rate(record: &Record) -> Option<f64> {
    let (normal, zero) = (record.figures.normal_pages, record.figures.zero_pages);
    let pages = normal
        .or(zero)
        .map(|_| float(normal.unwrap_or(0)) + float(zero.unwrap_or(0)))?;
    per_second(record, pages)
}

fn cpu(record: &Record, seconds: f64) -> Option<f64> {
    (record.figures.cpu.total() > 0.0).then_some(seconds)
}

pub(super) fn cpu_by_memory(record: &Record) -> Option<f64> {
    Some(cpu_total(record)? / (record.cell.ram as f64 / f64::from(1 << 30)))
}

fn peak(record: &Record) -> Option<u64> {
    record.figures.peak_sender.max(record.figures.peak_receiver)
}

fn share(record: &Record, seconds: f64) -> Option<f64> {
    per_second(record, cpu(record, seconds)? * 100.0)
}

fn per_second(record: &Record, amount: f64) -> Option<f64> {
    let seconds = record.figures.seconds;
    (seconds > 0.0).then(|| amount / seconds)
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
