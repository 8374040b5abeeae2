//! Counts the results of experiments.

use std::collections::BTreeMap;
use std::fmt;

use crate::campaign::fault::{Fault, Kind};
use crate::campaign::report::{Broken, Ended, Report};

/// All experiments so far.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) experiments: u64,
    /// By kind of fault; `None` are all experiments.
    rows: BTreeMap<Option<Kind>, Counts>,
    lost: BTreeMap<&'static str, u64>,
    violations: BTreeMap<Broken, Vec<u64>>,
    missed: usize,
}

/// A number for each of [`COLUMNS`] that is not 0.
type Counts = BTreeMap<&'static str, u64>;

const COLUMNS: [&str; 6] = [
    TRIED,
    "at source",
    "at destination",
    IN_DOUBT,
    "lost",
    "broken",
];
const TRIED: &str = "tried";
/// The guest may be known to be somewhere later, so it also counts there.
const IN_DOUBT: &str = "in doubt*";

impl Tally {
    pub(crate) fn add(&mut self, report: &Report) {
        self.missed += report.missed;
        let ended = match report.ended {
            Ended::Source => "at source",
            Ended::Destination => "at destination",
            Ended::Lost(_) => "lost",
        };
        if let Ended::Lost(why) = report.ended {
            *self.lost.entry(why).or_default() += 1;
        }
        let in_doubt = report.in_doubt.then_some(IN_DOUBT);
        let columns: Vec<_> = [ended].into_iter().chain(in_doubt).collect();
        self.count(&report.struck, &columns);
    }

    pub(crate) fn add_violation(&mut self, faults: &[Fault], broken: Broken, experiment: u64) {
        self.violations.entry(broken).or_default().push(experiment);
        let kinds: Vec<_> = faults.iter().map(|fault| fault.kind).collect();
        self.count(&kinds, &["broken"]);
    }

    pub(crate) fn has_violations(&self) -> bool {
        !self.violations.is_empty()
    }

    /// Counts an experiment in the rows of its faults.
    fn count(&mut self, kinds: &[Kind], columns: &[&'static str]) {
        self.experiments += 1;
        let kinds = kinds.iter().copied().map(Some);
        for kind in kinds.chain([None]) {
            let row = self.rows.entry(kind).or_default();
            for column in [TRIED].iter().chain(columns) {
                *row.entry(column).or_default() += 1;
            }
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<22}", "fault")?;
        for column in COLUMNS {
            write!(f, "{column:>15}")?;
        }
        for (kind, row) in &self.rows {
            let name = kind.map_or("experiments".to_owned(), |kind| kind.to_string());
            write!(f, "\n{name:<22}")?;
            for column in COLUMNS {
                write!(f, "{:>15}", row.get(column).unwrap_or(&0))?;
            }
        }
        writeln!(
            f,
            "\n* for a while: by a command that ended when something was still broken"
        )?;
        writeln!(f, "faults whose moment never came: {}", self.missed)?;
        for (why, count) in &self.lost {
            writeln!(f, "lost {count} times: {why}")?;
        }
        for (broken, experiments) in &self.violations {
            writeln!(
                f,
                "BROKEN {} times: {broken}, in {experiments:?}",
                experiments.len()
            )?;
        }
        Ok(())
    }
}
