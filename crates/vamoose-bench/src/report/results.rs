//! What a run has measured, in the order of the report: scenarios, in them groups of cells that can be compared, in them the cells.

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

/// Cells of the same guest and the same link: only these can be compared.
pub(super) struct Group {
    pub(super) same: Same,
    pub(super) rows: Vec<Row>,
}

/// What the cells of a group have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Same {
    pub(super) guest: Guest,
    pub(super) link: Rate,
    /// Bytes.
    pub(super) ram: u64,
    /// Milliseconds.
    pub(super) downtime_limit: u64,
}

/// A cell, and its migrations.
pub(super) struct Row {
    pub(super) cell: Cell,
    pub(super) records: Vec<Record>,
}

/// Some values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Spread {
    pub(super) median: f64,
    pub(super) least: f64,
    pub(super) most: f64,
}

impl Results {
    pub(super) fn read(dir: &Path) -> Result<Self> {
        let machine = results::read_machine(dir)?;
        let records = results::read(dir)?;
        Self::new(machine, records, |name| scenario(dir, name))
    }

    /// `scenario` finds a definition by its name.
    pub(super) fn new(
        machine: Machine,
        records: Vec<Record>,
        scenario: impl Fn(&str) -> Result<Option<Scenario>>,
    ) -> Result<Self> {
        // Scenarios in the order in which they were measured.
        let mut names: Vec<String> = Vec::new();
        let mut groups: BTreeMap<(String, Same), BTreeMap<Cell, Vec<Record>>> = BTreeMap::new();
        for record in records {
            let cell = record.cell.clone();
            if !names.contains(&cell.scenario) {
                names.push(cell.scenario.clone());
            }
            let rows = groups.entry((cell.scenario.clone(), Same::of(&cell)));
            rows.or_default().entry(cell).or_default().push(record);
        }
        let sections = names.into_iter().map(|name| {
            let definition = scenario(&name)?;
            let groups = groups.iter().filter(|((scenario, _), _)| *scenario == name);
            let groups = groups.map(|((_, same), rows)| Group::new(*same, rows));
            Ok(Section {
                groups: groups.collect(),
                about: definition.as_ref().map(|scenario| scenario.about.clone()),
                published: definition.and_then(|scenario| scenario.published),
                name,
            })
        });
        Ok(Self {
            machine,
            scenarios: sections.collect::<Result<_>>()?,
        })
    }
}

impl Results {
    /// Of all scenarios.
    pub(super) fn groups(&self) -> Vec<&Group> {
        let sections = self.scenarios.iter();
        sections.flat_map(|section| &section.groups).collect()
    }
}

/// The definition that the run has left beside its results, or the one that is built in; results outlive both.
fn scenario(dir: &Path, name: &str) -> Result<Option<Scenario>> {
    let file = dir.join(format!("{name}.toml"));
    if file.exists() {
        let scenario = Scenario::parse(&load(&file)?);
        return scenario
            .with_context(|| format!("{}", file.display()))
            .map(Some);
    }
    Ok(Scenario::named(name).ok())
}

fn load(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| {
        format!(
            "cannot read {}: is this the folder of a run?",
            path.display()
        )
    })
}

impl Same {
    pub(super) fn of(cell: &Cell) -> Self {
        Self {
            guest: cell.guest,
            link: cell.link,
            ram: cell.ram,
            downtime_limit: cell.downtime_limit,
        }
    }

    /// As a heading.
    pub(super) fn title(&self) -> String {
        let link = match self.link {
            Rate::Constant(_) => format!("{}bit/s", self.link).replace("Gbit", " Gbit"),
            Rate::Open => "an open link".to_owned(),
            Rate::Changing => "a link that changes".to_owned(),
        };
        let link = link.replace("Mbit", " Mbit");
        let limit = match self.guest {
            Guest::Running(_) => format!(", downtime limit {} ms", self.downtime_limit),
            Guest::Still(_) => String::new(),
        };
        format!(
            "{}, {} MiB, over {link}{limit}",
            self.guest,
            self.ram.div_ceil(1 << 20)
        )
    }

    /// As a part of a file's name.
    pub(super) fn slug(&self) -> String {
        let ram = self.ram.div_ceil(1 << 20);
        format!(
            "{}-{}-{ram}M-{}ms",
            self.guest, self.link, self.downtime_limit
        )
    }
}

impl Group {
    fn new(same: Same, rows: &BTreeMap<Cell, Vec<Record>>) -> Self {
        let rows = rows.iter().map(|(cell, records)| Row {
            cell: cell.clone(),
            records: records.clone(),
        });
        Self {
            same,
            rows: rows.collect(),
        }
    }

    /// A row's name: contender, and channels if they differ.
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

    /// The migrations that went through.
    pub(super) fn moved(&self) -> impl Iterator<Item = &Record> {
        self.records
            .iter()
            .filter(|record| record.outcome.is_moved())
    }

    /// Of the migrations that went through, those of which `value` is known.
    pub(super) fn spread(&self, value: impl Fn(&Record) -> Option<f64>) -> Option<Spread> {
        Spread::of(self.moved().filter_map(value))
    }

    pub(super) fn seconds(&self) -> Option<Spread> {
        self.spread(|record| Some(record.figures.seconds))
    }

    /// The migration that took the median time, or was nearest to it.
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

    /// How the migrations ended: what was compared in them, and how many went through.
    pub(super) fn proof(&self) -> String {
        let mut ways: Vec<&str> = self.records.iter().map(|r| proof(r.outcome)).collect();
        ways.sort_unstable();
        ways.dedup();
        let counted = ways.iter().map(|way| {
            let count = self.records.iter().filter(|r| proof(r.outcome) == *way);
            format!("{way} {} of {}", count.count(), self.records.len())
        });
        counted.collect::<Vec<_>>().join(", ")
    }
}

fn proof(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Equal => "equal",
        Outcome::Checked => "checked",
        Outcome::Served => "served",
        Outcome::Cancelled => "cancelled",
        Outcome::Bytes => "bytes only",
    }
}

impl Spread {
    /// `None` without a value that is finite.
    pub(super) fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().filter(|v| v.is_finite()).collect();
        values.sort_by(f64::total_cmp);
        Some(Self {
            // The sum of two may be too much.
            median: lab::median(values.iter().copied()).filter(|median| median.is_finite())?,
            least: *values.first()?,
            most: *values.last()?,
        })
    }
}
