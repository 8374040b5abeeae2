//! The results of a run, in the order of the report: scenarios, groups of comparable cells, cells.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;

use crate::record::{Cell, Machine, Outcome, Record};
use crate::results;
use crate::scenario::{Contender, Guest, Rate, Scenario, Who};

/// A run.
pub(super) struct Results {
    pub(super) machine: Machine,
    pub(super) scenarios: Vec<Section>,
}

/// A scenario.
pub(super) struct Section {
    pub(super) name: String,
    /// Unknown for a user's own scenario.
    pub(super) about: Option<String>,
    pub(super) groups: Vec<Group>,
}

/// Cells of the same guest, link, size and downtime limit: only these can be compared.
pub(super) struct Group {
    /// Never empty.
    pub(super) rows: Vec<Row>,
}

/// A cell, and its migrations.
pub(super) struct Row {
    pub(super) cell: Cell,
    pub(super) records: Vec<Record>,
}

/// The median of some values, the minimum and the maximum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
}

impl Results {
    pub(super) fn read(dir: &Path) -> Result<Self> {
        let (machine, records) = (results::read_machine(dir)?, results::read(dir)?);
        Ok(Self::new(machine, records))
    }

    pub(super) fn new(machine: Machine, records: Vec<Record>) -> Self {
        let mut names: Vec<String> = Vec::new();
        let mut rows: BTreeMap<_, Vec<Record>> = BTreeMap::new();
        for record in records {
            let cell = record.cell.clone();
            if !names.contains(&cell.scenario) {
                names.push(cell.scenario.clone());
            }
            let row = rows.entry((comparable(&cell), cell)).or_default();
            row.push(record);
        }
        // Scenarios in the order in which they were measured.
        let section = |name: String| {
            let of_scenario = |((_, cell), _): &(&(_, Cell), _)| cell.scenario == name;
            let of_scenario: Vec<_> = rows.iter().filter(of_scenario).collect();
            let groups = of_scenario.chunk_by(|((one, _), _), ((other, _), _)| one == other);
            Section {
                groups: groups.map(Group::new).collect(),
                about: Scenario::named(&name).ok().map(|scenario| scenario.about),
                name,
            }
        };
        let scenarios = names.into_iter().map(section).collect();
        Self { machine, scenarios }
    }

    /// The groups of all scenarios.
    pub(super) fn groups(&self) -> impl Iterator<Item = &Group> {
        self.scenarios.iter().flat_map(|section| &section.groups)
    }
}

/// The properties that comparable cells share.
type Comparable = (Guest, Rate, u64, u64);

fn comparable(cell: &Cell) -> Comparable {
    (cell.guest, cell.link, cell.ram, cell.downtime_limit)
}

impl Group {
    fn new(rows: &[(&(Comparable, Cell), &Vec<Record>)]) -> Self {
        let row = |((_, cell), records): &(&(Comparable, Cell), &Vec<Record>)| Row {
            cell: cell.clone(),
            records: (*records).clone(),
        };
        Self {
            rows: rows.iter().map(row).collect(),
        }
    }

    /// A heading: guest, size, link.
    pub(super) fn title(&self) -> String {
        let cell = &self.rows[0].cell;
        let link = match cell.link {
            Rate::Constant(_) => format!("{}bit/s", cell.link)
                .replace("Gbit", " Gbit")
                .replace("Mbit", " Mbit"),
            Rate::Open => "an open link".to_owned(),
        };
        let limit = match cell.guest.runs() {
            true => format!(", downtime limit {} ms", cell.downtime_limit),
            false => String::new(),
        };
        let size = cell.ram.div_ceil(1 << 20);
        format!("{}, {size} MiB, over {link}{limit}", cell.guest)
    }

    /// A row's contender, and its channels if they differ in the group.
    pub(super) fn label(&self, row: &Row) -> String {
        match self.channels().len() {
            1 => row.cell.contender.to_string(),
            _ => row.label(),
        }
    }

    /// The fastest row of stock QEMU on equal terms: encrypted if Vamoose's default is.
    pub(super) fn fastest_stock(&self) -> Option<&Row> {
        let tls = self.default().map(|row| row.cell.contender.tls);
        self.fastest(|it| it.who == Who::Qemu && tls.is_none_or(|tls| it.tls == tls))
    }

    /// The fastest row of Vamoose's default, which encrypts.
    pub(super) fn default(&self) -> Option<&Row> {
        let encrypted = self.fastest(|it| it.is_default() && it.tls);
        encrypted.or_else(|| self.fastest(Contender::is_default))
    }

    /// The row with the least median time, of those with the fewest cancelled migrations.
    fn fastest(&self, is_wanted: impl Fn(&Contender) -> bool) -> Option<&Row> {
        let rows = self
            .rows
            .iter()
            .filter(|row| is_wanted(&row.cell.contender));
        let timed = rows.filter_map(|row| Some((row, row.seconds()?.median)));
        let fastest = timed.min_by(|(one, time), (other, other_time)| {
            let cancelled = one.cancelled().total_cmp(&other.cancelled());
            cancelled.then(time.total_cmp(other_time))
        });
        fastest.map(|(row, _)| row)
    }

    /// Numbers of channels, without repetition.
    fn channels(&self) -> Vec<u8> {
        let mut all: Vec<u8> = self.rows.iter().map(|row| row.cell.channels).collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

impl Row {
    /// Contender and channels.
    pub(super) fn label(&self) -> String {
        format!("{}, {} ch", self.cell.contender, self.cell.channels)
    }

    /// The migrations that moved the guest.
    fn moved(&self) -> impl Iterator<Item = &Record> {
        self.records
            .iter()
            .filter(|record| record.outcome != Outcome::Cancelled)
    }

    /// The spread of `value` over the migrations that moved the guest, where it is known.
    pub(super) fn spread(&self, value: impl Fn(&Record) -> Option<f64>) -> Option<Spread> {
        Spread::of(self.moved().filter_map(value))
    }

    pub(super) fn seconds(&self) -> Option<Spread> {
        self.spread(|record| Some(record.figures.seconds))
    }

    /// Share of the migrations that were cancelled, from 0 to 1.
    fn cancelled(&self) -> f64 {
        1.0 - self.moved().count() as f64 / self.records.len().max(1) as f64
    }

    /// Number of migrations for each outcome.
    pub(super) fn proof(&self) -> String {
        let count = |outcome: Outcome| {
            let ended = |record: &&Record| record.outcome == outcome;
            self.records.iter().filter(ended).count()
        };
        let counts = [
            ("equal", Outcome::Equal),
            ("checked", Outcome::Checked),
            ("served", Outcome::Served),
            ("cancelled", Outcome::Cancelled),
        ]
        .map(|(name, outcome)| (name, count(outcome)));
        let known = counts.into_iter().filter(|(_, count)| *count > 0);
        let all = self.records.len();
        let texts: Vec<_> = known
            .map(|(name, count)| format!("{name} {count} of {all}"))
            .collect();
        texts.join(", ")
    }
}

impl Spread {
    /// `None` without a finite value.
    pub(super) fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values
            .into_iter()
            .filter(|value| value.is_finite())
            .collect();
        values.sort_by(f64::total_cmp);
        Some(Self {
            // The sum of two may be infinite.
            median: lab::median(values.iter().copied()).filter(|median| median.is_finite())?,
            least: *values.first()?,
            most: *values.last()?,
        })
    }
}
