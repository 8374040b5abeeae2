//! The results of a run in the order of the report: scenarios, groups of cells that can be compared, cells.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::record::{Cell, Machine, Outcome, Record};
use crate::results;
use crate::scenario::{Guest, Published, Rate, Scenario};

/// A run.
pub(super) struct Results {
    pub(super) machine: Machine,
    pub(super) scenarios: Vec<Section>,
}

/// A scenario.
pub(super) struct Section {
    pub(super) name: String,
    pub(super) about: Option<String>,
    pub(super) published: Option<Published>,
    pub(super) groups: Vec<Group>,
}

/// Cells of the same guest, link, size and downtime limit: only these can be compared.
pub(super) struct Group {
    /// At least one.
    pub(super) rows: Vec<Row>,
}

/// A cell, and its migrations.
pub(super) struct Row {
    pub(super) cell: Cell,
    pub(super) records: Vec<Record>,
}

/// The median of some values, and their range.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
}

impl Results {
    pub(super) fn read(dir: &Path) -> Result<Self> {
        let (machine, records) = (results::read_machine(dir)?, results::read(dir)?);
        Self::new(machine, records, |name| scenario(dir, name))
    }

    /// `scenario` finds a definition by its name.
    pub(super) fn new(
        machine: Machine,
        records: Vec<Record>,
        scenario: impl Fn(&str) -> Result<Option<Scenario>>,
    ) -> Result<Self> {
        let mut names: Vec<String> = Vec::new();
        let mut rows: BTreeMap<_, Vec<Record>> = BTreeMap::new();
        for record in records {
            let cell = record.cell.clone();
            if !names.contains(&cell.scenario) {
                names.push(cell.scenario.clone());
            }
            rows.entry((comparable(&cell), cell))
                .or_default()
                .push(record);
        }
        // Scenarios in the order in which they were measured.
        let sections = names.into_iter().map(|name| {
            let definition = scenario(&name)?;
            let of_scenario: Vec<_> = rows
                .iter()
                .filter(|((_, cell), _)| cell.scenario == name)
                .collect();
            let groups = of_scenario.chunk_by(|((one, _), _), ((other, _), _)| one == other);
            Ok(Section {
                groups: groups.map(Group::new).collect(),
                about: definition.as_ref().map(|scenario| scenario.about.clone()),
                published: definition.and_then(|scenario| scenario.published),
                name,
            })
        });
        let scenarios = sections.collect::<Result<_>>()?;
        Ok(Self { machine, scenarios })
    }

    /// The groups of all scenarios.
    pub(super) fn groups(&self) -> impl Iterator<Item = &Group> {
        self.scenarios.iter().flat_map(|section| &section.groups)
    }
}

/// What comparable cells have in common.
type Comparable = (Guest, Rate, u64, u64);

fn comparable(cell: &Cell) -> Comparable {
    (cell.guest, cell.link, cell.ram, cell.downtime_limit)
}

/// The definition beside the results, else the built-in one. Results may outlive both.
fn scenario(dir: &Path, name: &str) -> Result<Option<Scenario>> {
    let file = dir.join(format!("{name}.toml"));
    if !file.exists() {
        return Ok(Scenario::named(name).ok());
    }
    let text =
        fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let scenario = Scenario::parse(&text);
    scenario
        .with_context(|| file.display().to_string())
        .map(Some)
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
            Rate::Changing => "a changing link".to_owned(),
        };
        let limit = match cell.guest {
            Guest::Running(_) => format!(", downtime limit {} ms", cell.downtime_limit),
            Guest::Still(_) => String::new(),
        };
        let size = cell.ram.div_ceil(1 << 20);
        format!("{}, {size} MiB, over {link}{limit}", cell.guest)
    }

    /// Part of a file's name.
    pub(super) fn slug(&self) -> String {
        let cell = &self.rows[0].cell;
        let size = cell.ram.div_ceil(1 << 20);
        format!(
            "{}-{}-{size}M-{}ms",
            cell.guest, cell.link, cell.downtime_limit
        )
    }

    /// A row's contender, and its channels if they differ in the group.
    pub(super) fn label(&self, row: &Row) -> String {
        match self.channels().len() {
            1 => row.cell.contender.to_string(),
            _ => row.label(),
        }
    }

    /// Numbers of channels, without repetition.
    pub(super) fn channels(&self) -> Vec<u8> {
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
    pub(super) fn moved(&self) -> impl Iterator<Item = &Record> {
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

    /// The migration whose time is nearest to the median.
    pub(super) fn typical(&self) -> Option<&Record> {
        let median = self.seconds()?.median;
        let distance = |record: &&Record| (record.figures.seconds - median).abs();
        self.moved()
            .min_by(|one, other| distance(one).total_cmp(&distance(other)))
    }

    /// The part of the migrations that were cancelled, from 0 to 1.
    pub(super) fn cancelled(&self) -> f64 {
        1.0 - self.moved().count() as f64 / self.records.len().max(1) as f64
    }

    /// How the migrations ended, and how many of them in each way.
    pub(super) fn proof(&self) -> String {
        let names = [
            ("equal", Outcome::Equal),
            ("checked", Outcome::Checked),
            ("served", Outcome::Served),
            ("cancelled", Outcome::Cancelled),
        ];
        let counts = names.map(|(name, outcome)| {
            let count = self
                .records
                .iter()
                .filter(|record| record.outcome == outcome)
                .count();
            (count > 0).then(|| format!("{name} {count} of {}", self.records.len()))
        });
        counts.into_iter().flatten().collect::<Vec<_>>().join(", ")
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
