//! Which migrations are left to be made, in which order, and where their results go.

use std::fmt;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::contender::Contender;
use crate::report::Run;
use crate::stage::Stage;
use crate::workload::Workload;
use crate::{Conditions, Options, Terms, chosen};

/// The migrations of one workload's guest.
pub(crate) struct Plan {
    /// Those that were made earlier.
    before: Vec<Run>,
    /// Round and contender of the others.
    pub(crate) turns: Vec<(usize, Contender)>,
    give_up: usize,
}

impl Plan {
    /// What is left to do after some runs.
    pub(crate) fn new(options: &Options, before: Vec<Run>) -> Self {
        let contenders = chosen(&options.contender);
        let count = contenders.len();
        let made = |contender| {
            let of = before.iter().filter(|run| run.contender == contender);
            let given_up = of.clone().filter(|run| !run.moved).count() >= options.give_up;
            match given_up {
                true => options.runs,
                false => of.count(),
            }
        };
        let turns = (0..options.runs).flat_map(|round| {
            let order = (0..count).map(move |step| (round + step) % count);
            order.map(move |index| (round, index))
        });
        let turns = turns.map(|(round, index)| (round, contenders[index]));
        Self {
            turns: turns
                .filter(|(round, contender)| *round >= made(*contender))
                .collect(),
            before,
            give_up: options.give_up,
        }
    }

    /// Makes the migrations, and gives all runs. Their results are kept when all have been made: only then it is known what
    /// the clients have noticed.
    pub(crate) fn carry_out(
        self,
        workload: Workload,
        conditions: &Conditions,
        results: &mut Results,
        left: &mut TimeLeft,
    ) -> Result<Vec<Run>> {
        let mut runs = self.before;
        if self.turns.is_empty() {
            return Ok(runs);
        }
        let cancelled = runs.iter().filter(|run| !run.moved);
        let mut cancelled: Vec<_> = cancelled.map(|run| run.contender).collect();
        let mut stage = Stage::set(workload, conditions)?;
        let mut migrations = Vec::new();
        for (round, contender) in self.turns {
            left.turn();
            if cancelled.iter().filter(|of| **of == contender).count() >= self.give_up {
                continue;
            }
            let what = format!("round {}: {}", round + 1, contender.name());
            let migration = stage.migrate(contender).with_context(|| what.clone())?;
            eprintln!("{}, {what}: {migration}; {left}", workload.name());
            if migration.is_cancelled {
                cancelled.push(contender);
            }
            migrations.push(migration);
        }
        let samples = stage.end()?;
        let run = |migration| Run::of(workload, &conditions.terms, migration, &samples);
        let new: Vec<_> = migrations.into_iter().map(run).collect();
        results.add(&new)?;
        runs.extend(new);
        Ok(runs)
    }
}

/// What was measured, in a file if there is to be one.
pub(crate) struct Results {
    file: Option<File>,
    /// Of earlier.
    runs: Vec<Run>,
}

impl Results {
    /// Reads what is there already.
    pub(crate) fn open(path: Option<&Path>) -> Result<Self> {
        let Some(path) = path else {
            return Ok(Self {
                file: None,
                runs: Vec::new(),
            });
        };
        let open = || {
            let mut file = File::options()
                .read(true)
                .append(true)
                .create(true)
                .open(path)?;
            let mut lines = String::new();
            file.read_to_string(&mut lines)?;
            let runs = Run::read_all(&lines)?;
            let file = Some(file);
            anyhow::Ok(Self { file, runs })
        };
        open().with_context(|| format!("reading {}", path.display()))
    }

    /// The runs of a workload under these terms.
    pub(crate) fn take(&mut self, workload: Workload, terms: &Terms) -> Vec<Run> {
        let is_of = |run: &mut Run| run.workload == workload && run.terms == *terms;
        self.runs.extract_if(.., is_of).collect()
    }

    fn add(&mut self, runs: &[Run]) -> Result<()> {
        let lines: Vec<_> = runs.iter().map(Run::line).collect::<Result<_>>()?;
        match &mut self.file {
            Some(file) => file
                .write_all(lines.concat().as_bytes())
                .context("writing results"),
            None => Ok(()),
        }
    }
}

/// How long the rest takes, if every turn takes as long as those so far.
pub(crate) struct TimeLeft {
    since: Instant,
    done: u32,
    turns: u32,
}

impl TimeLeft {
    pub(crate) fn new(turns: usize) -> Self {
        Self {
            since: Instant::now(),
            done: 0,
            turns: u32::try_from(turns).unwrap_or(u32::MAX),
        }
    }

    /// Another turn begins.
    fn turn(&mut self) {
        self.done += 1;
    }
}

impl fmt::Display for TimeLeft {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let each = self.since.elapsed() / self.done.max(1);
        let left: Duration = each * self.turns.saturating_sub(self.done);
        write!(f, "{} min left", left.as_secs().div_ceil(60))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use Contender::{StockNone, StockZstd, Vamoose};

    fn turns(before: Vec<Run>) -> Vec<(usize, Contender)> {
        let options = Options::parse_from(
            "workloads --runs 3 --contender stock-none --contender stock-zstd --contender vamoose"
                .split(' '),
        );
        Plan::new(&options, before).turns
    }

    #[test]
    fn every_contender_is_the_first_once() {
        let all = [StockNone, StockZstd, Vamoose, StockNone, StockZstd];
        let expected = (0..3).flat_map(|round| {
            let of = all[round..round + 3].iter();
            of.map(move |contender| (round, *contender))
        });
        assert_eq!(turns(Vec::new()), expected.collect::<Vec<_>>());
    }

    #[test]
    fn what_was_made_or_given_up_is_not_made_again() {
        let before = [
            (StockNone, None),
            (StockZstd, Some(80.0)),
            (Vamoose, Some(70.0)),
            (Vamoose, Some(90.0)),
            (StockNone, None),
        ];
        let before = before.map(|(contender, downtime)| Run::example(contender, downtime));
        assert_eq!(
            turns(before.into()),
            [(1, StockZstd), (2, Vamoose), (2, StockZstd)]
        );
    }
}
