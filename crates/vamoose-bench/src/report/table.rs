//! Tables of the report.

use super::results::{Group, Results, Row, Spread};
use crate::record::{Outcome, Record, Service};

/// Columns and rows of text.
pub(crate) struct Table {
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
}

/// A column of the table of a group.
struct Column {
    name: &'static str,
    /// `None` where the value is unknown.
    value: fn(&Row) -> Option<String>,
}

/// Stands for an unknown value.
const ABSENT: &str = "–";

const fn column(name: &'static str, value: fn(&Row) -> Option<String>) -> Column {
    Column { name, value }
}

static COLUMNS: [Column; 10] = [
    column("contender", |row| {
        let name = escaped(&row.cell.contender.to_string());
        Some(match row.cell.contender.is_default() {
            true => format!("**{name}**"),
            false => name,
        })
    }),
    column("channels", |row| Some(row.cell.channels.to_string())),
    column("seconds", seconds),
    column("downtime, ms", |row| row.spread(downtime).map(full)),
    column("rounds", |row| {
        let rounds = row.spread(|record| record.figures.rounds.map(|rounds| rounds as f64));
        rounds.map(|rounds| range(rounds, |number| number.to_string()))
    }),
    column("link, MB", |row| row.spread(megabytes).map(full)),
    column("CPU, s/GiB", |row| row.spread(cpu_by_memory).map(median)),
    column("answers/s", |row| {
        services(row, |service| Some(service.rate))
    }),
    column("p99, ms", |row| services(row, |service| service.p99)),
    column("proof", |row| Some(row.proof())),
];

/// The table of a group: a row for each cell, and the columns in which something is known.
pub(super) fn of(group: &Group) -> Table {
    let is_known = |column: &&Column| group.rows.iter().any(|row| (column.value)(row).is_some());
    let columns: Vec<_> = COLUMNS.iter().filter(is_known).collect();
    let mut table = Table::new(columns.iter().map(|column| column.name));
    for row in &group.rows {
        let value = |column: &&Column| (column.value)(row).unwrap_or_else(|| ABSENT.to_owned());
        table.add(columns.iter().map(value));
    }
    table
}

/// Vamoose's default beside stock QEMU's fastest method, a row for each group that has both.
pub(super) fn comparison(results: &Results) -> Table {
    let mut table = Table::new([
        "scenario",
        "guest and link",
        "encrypted",
        "stock QEMU",
        "Vamoose",
        "seconds",
        "ratio",
        "downtime, ms",
        "CPU, s/GiB",
    ]);
    for section in &results.scenarios {
        for group in &section.groups {
            if let (Some(stock), Some(default)) = (group.fastest_stock(), group.default()) {
                let both = |value: fn(&Record) -> Option<f64>| {
                    let [stock, default] =
                        [stock, default].map(|row| row.spread(value).map_or(ABSENT.into(), median));
                    format!("{stock} → {default}")
                };
                let times = default.seconds().zip(stock.seconds());
                let ratio = times.map(|(ours, theirs)| ours.median / theirs.median);
                let ratio = ratio.filter(|ratio| ratio.is_finite()).map(short);
                table.add([
                    escaped(&section.name),
                    group.title(),
                    if default.cell.contender.tls {
                        "both"
                    } else {
                        "neither"
                    }
                    .to_owned(),
                    group.label(stock),
                    escaped(&group.label(default)),
                    both(|record| Some(record.figures.seconds)),
                    ratio.unwrap_or(ABSENT.into()),
                    both(downtime),
                    both(cpu_by_memory),
                ]);
            }
        }
    }
    table
}

/// The medians of a group in few columns, without markup.
pub(super) fn narrow(group: &Group) -> String {
    let mut text = format!("\n{}\n", group.title());
    text += &format!(
        "{:<24}{:>10}{:>10}{:>10}{:>14}\n",
        "", "seconds", "MB", "CPU", "downtime, ms"
    );
    for row in &group.rows {
        let figure =
            |value: fn(&Record) -> Option<f64>| row.spread(value).map_or(ABSENT.into(), median);
        let contender = row.cell.contender.to_string();
        let [seconds, bytes] = [figure(|it| Some(it.figures.seconds)), figure(megabytes)];
        let [cpu, downtime] = [figure(|it| Some(it.figures.cpu.total())), figure(downtime)];
        text += &format!("{contender:<24}{seconds:>10}{bytes:>10}{cpu:>10}{downtime:>14}\n");
    }
    text
}

impl Table {
    pub(crate) fn new<T: Into<String>>(columns: impl IntoIterator<Item = T>) -> Self {
        Self {
            columns: columns.into_iter().map(Into::into).collect(),
            rows: Vec::new(),
        }
    }

    pub(crate) fn add(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Renders the table; its cells are Markdown.
    pub(crate) fn markdown(&self) -> String {
        let line = |cells: &Vec<String>| format!("| {} |\n", cells.join(" | "));
        let head = line(&self.columns) + &format!("|{}\n", "---|".repeat(self.columns.len()));
        head + &self.rows.iter().map(line).collect::<String>()
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

/// The median, with the minimum and the maximum where they differ.
fn full(spread: Spread) -> String {
    range(spread, short)
}

fn range(spread: Spread, text: fn(f64) -> String) -> String {
    let [median, least, most] = [spread.median, spread.least, spread.most].map(text);
    match least == most {
        true => median,
        false => format!("{median} ({least}–{most})"),
    }
}

fn median(spread: Spread) -> String {
    short(spread.median)
}

/// Downtime of a running guest by one clock; of other guests, the downtime that QEMU reports. In milliseconds.
pub(super) fn downtime(record: &Record) -> Option<f64> {
    record.figures.downtime.or(record.figures.downtime_reported)
}

/// Bytes over the link; where that is unknown, as the sender counts them. In 10^6.
fn megabytes(record: &Record) -> Option<f64> {
    let bytes = record.figures.link_bytes.or(record.figures.wire_bytes)?;
    Some(bytes as f64 / 1e6)
}

pub(super) fn cpu_by_memory(record: &Record) -> Option<f64> {
    let total = record.figures.cpu.total();
    (total > 0.0).then(|| total / (record.cell.ram as f64 / f64::from(1 << 30)))
}

fn seconds(row: &Row) -> Option<String> {
    let moved = row.seconds().map(full);
    let is_cancelled = |record: &&Record| record.outcome == Outcome::Cancelled;
    let cancelled = row.records.iter().filter(is_cancelled);
    let cancelled = Spread::of(cancelled.map(|record| record.figures.seconds));
    let cancelled = cancelled.map(|spread| format!("> {}", short(spread.most)));
    let both: Vec<_> = moved.into_iter().chain(cancelled).collect();
    (!both.is_empty()).then(|| both.join(", "))
}

fn services(row: &Row, value: impl Fn(&Service) -> Option<f64>) -> Option<String> {
    let before = row.spread(|record| value(&record.service.as_ref()?.before));
    let during = row.spread(|record| value(&record.service.as_ref()?.during));
    before.or(during)?;
    let [before, during] = [before, during].map(|spread| spread.map_or(ABSENT.into(), median));
    Some(format!("{before} → {during}"))
}

/// Text that is not markup, on one line.
pub(super) fn escaped(text: &str) -> String {
    text.chars().fold(String::new(), |mut text, character| {
        match character {
            '\\' | '|' | '*' | '_' | '`' | '<' | '[' | ']' | '#' | '&' => {
                text.extend(['\\', character])
            }
            // A table has no control characters.
            character if character.is_control() => text.push(' '),
            character => text.push(character),
        }
        text
    })
}
