//! Counts the results of experiments.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use crate::fault::{Fault, Kind};
use crate::report::{Broken, Ended, Report};

/// All experiments so far.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    rows: BTreeMap<Kind, Row>,
    total: Row,
    reasons: BTreeMap<&'static str, u64>,
    violations: BTreeMap<Broken, Vec<u64>>,
    missed: usize,
    left_over: u64,
    pub(crate) experiments: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Row {
    tried: u64,
    source: u64,
    destination: u64,
    in_doubt: u64,
    lost: u64,
    broken: u64,
    time: Duration,
}

impl Tally {
    pub(crate) fn add(&mut self, report: &Report) {
        self.experiments += 1;
        self.missed += report.missed;
        self.left_over += u64::from(report.left_over);
        match report.ended {
            Ended::Lost(why) => *self.reasons.entry(why).or_default() += 1,
            Ended::Source | Ended::Destination | Ended::InDoubt => {}
        }
        self.total.add(report);
        for kind in &report.struck {
            self.rows.entry(*kind).or_default().add(report);
        }
    }

    pub(crate) fn add_violation(&mut self, faults: &[Fault], broken: Broken, experiment: u64) {
        self.experiments += 1;
        for fault in faults {
            let row = self.rows.entry(fault.kind).or_default();
            row.tried += 1;
            row.broken += 1;
        }
        self.total.tried += 1;
        self.total.broken += 1;
        self.violations.entry(broken).or_default().push(experiment);
    }

    pub(crate) fn has_violations(&self) -> bool {
        !self.violations.is_empty()
    }
}

impl Row {
    fn add(&mut self, report: &Report) {
        self.tried += 1;
        match report.ended {
            Ended::Source => self.source += 1,
            Ended::Destination => self.destination += 1,
            Ended::Lost(_) => self.lost += 1,
            Ended::InDoubt => {}
        }
        self.in_doubt += u64::from(report.in_doubt);
        self.time += report.took;
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let done = (self.tried - self.broken).max(1);
        let seconds = self.time.as_secs_f64() / done as f64;
        write!(
            f,
            "{:>7} {:>9} {:>14} {:>10} {:>6} {:>7} {seconds:>8.2}",
            self.tried, self.source, self.destination, self.in_doubt, self.lost, self.broken
        )
    }
}

const HEAD: &str = "\
fault                    tried at source at destination  in doubt*   lost  broken  seconds";

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{HEAD}")?;
        for (kind, row) in &self.rows {
            writeln!(f, "{kind:<22} {row}")?;
        }
        writeln!(f, "{:<22} {}", "experiments", self.total)?;
        writeln!(
            f,
            "* for a while: by a command that ended when something was still broken"
        )?;
        writeln!(f, "faults whose moment never came: {}", self.missed)?;
        writeln!(
            f,
            "destinations that waited on when the guest stayed: {}",
            self.left_over
        )?;
        for (why, count) in &self.reasons {
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
