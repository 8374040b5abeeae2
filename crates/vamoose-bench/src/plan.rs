//! Determines which migrations are missing from the results, in which order to perform them, and performs them.
//!
//! Cells of one guest and link are measured in rounds: each round measures every cell once, and begins with another cell, so that a
//! slow period of the machine affects all cells alike.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context as _, Result, bail};

use crate::measure::{Host, Testbed};
use crate::record::{Cell, Outcome, Record};
use crate::results::Results;

/// Everything to be measured.
pub(crate) struct Plan {
    groups: Vec<Group>,
}

/// Cells that are measured in the same rounds.
struct Group {
    cells: Vec<Cell>,
    rounds: u32,
}

/// After this many cancelled migrations, a contender is not tried with this guest again.
const GIVE_UP: u32 = 2;

impl Plan {
    pub(crate) fn new() -> Self {
        Self { groups: Vec::new() }
    }

    /// Adds cells, ordered by guest and link.
    pub(crate) fn add(&mut self, cells: &[Cell], rounds: u32) {
        let groups = cells.chunk_by(|a, b| (a.guest, a.link) == (b.guest, b.link));
        self.groups.extend(groups.map(|cells| Group {
            cells: cells.to_vec(),
            rounds,
        }));
    }

    /// Performs the migrations that are missing from the results. A failure does not end the run; `stop` ends it after the current
    /// migration.
    pub(crate) fn carry_out(
        &self,
        host: &Host,
        results: &mut Results,
        stop: &AtomicBool,
    ) -> Result<()> {
        let turns: Vec<Vec<_>> = self
            .groups
            .iter()
            .map(|group| group.turns(results))
            .collect();
        let mut progress = Progress {
            since: Instant::now(),
            done: 0,
            left: turns.iter().map(Vec::len).sum(),
        };
        let mut failures = 0;
        for turns in turns.into_iter().filter(|turns| !turns.is_empty()) {
            let ended = measure(host, turns, results, &mut progress, stop);
            if stop.load(Ordering::Relaxed) {
                bail!("interrupted; the same command goes on where it was");
            }
            failures += ended.unwrap_or_else(|error| {
                eprintln!("FAILED: {error:#}");
                1
            });
        }
        match failures {
            0 => Ok(()),
            _ => bail!(
                "{failures} failed, and are not in the results; the same command tries them again"
            ),
        }
    }
}

impl Group {
    /// The migrations that are missing from the results, in order.
    fn turns(&self, results: &Results) -> Vec<(Cell, u32)> {
        let order = (0..self.rounds).zip(0_usize..).flat_map(|(round, first)| {
            let (before, from) = self.cells.split_at(first % self.cells.len());
            let order = from.iter().chain(before);
            order.map(move |cell| (cell, round + 1))
        });
        let is_left = |(cell, round): &(&Cell, u32)| {
            *round > results.rounds(cell) && results.cancelled(cell) < GIVE_UP
        };
        let left = order.filter(is_left);
        left.map(|(cell, round)| (cell.clone(), round)).collect()
    }
}

/// Performs the migrations of a group. Returns the number of failures.
fn measure(
    host: &Host,
    turns: Vec<(Cell, u32)>,
    results: &mut Results,
    progress: &mut Progress,
    stop: &AtomicBool,
) -> Result<usize> {
    let last = progress.left.saturating_sub(turns.len());
    let mut testbed = Testbed::new(host, &turns[0].0).inspect_err(|_| progress.left = last)?;
    let mut failures = 0;
    for (cell, round) in turns {
        if stop.load(Ordering::Relaxed) || results.cancelled(&cell) >= GIVE_UP {
            progress.left -= 1;
            continue;
        }
        match testbed
            .measure(&cell, round)
            .with_context(|| format!("{cell}, round {round}"))
        {
            Ok(Some(record)) => {
                results.add(&record)?;
                progress.done(&line(&record));
            }
            Ok(None) => progress.done(&format!("{cell}, round {round}: done")),
            Err(error) if testbed.is_lost() => {
                progress.left = last;
                return Err(error);
            }
            Err(error) => {
                failures += 1;
                if !stop.load(Ordering::Relaxed) {
                    progress.done(&format!("FAILED: {error:#}"));
                }
            }
        }
    }
    for record in testbed.finish()? {
        results.add(&record)?;
        eprintln!("{}", line(&record));
    }
    Ok(failures)
}

/// Prints a line for each migration, with the remaining time.
struct Progress {
    since: Instant,
    done: usize,
    left: usize,
}

impl Progress {
    fn done(&mut self, text: &str) {
        self.done += 1;
        self.left = self.left.saturating_sub(1);
        let each = self.since.elapsed().as_secs_f64() / self.done as f64;
        let minutes = (each * self.left as f64 / 60.0).ceil();
        eprintln!("{text}; {minutes} min left");
    }
}

fn line(record: &Record) -> String {
    let (cell, round, figures) = (&record.cell, record.round, &record.figures);
    let ended = match record.outcome {
        Outcome::Cancelled => "cancelled after ",
        _ => "",
    };
    let (seconds, cpu) = (figures.seconds, figures.cpu.total());
    let bytes = figures.link_bytes.or(figures.wire_bytes);
    let bytes = bytes.map_or(String::new(), |bytes| format!(", {} MB", bytes / 1_000_000));
    let downtime = figures.downtime.or(figures.downtime_reported);
    let downtime = downtime.map_or(String::new(), |millis| format!(", downtime {millis:.0} ms"));
    format!("{cell}, round {round}: {ended}{seconds:.2} s, {cpu:.2} CPU-s{bytes}{downtime}")
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::record::{Figures, Machine};
    use crate::scenario::Scenario;

    fn cells() -> Vec<Cell> {
        let scenario = "about = ''\nguests = ['zero']\nlinks = ['open', '1G']\nram = '64M'\nrounds = 3\n\
            contenders = ['qemu none', 'qemu zstd', 'migrate auto']";
        Scenario::parse(scenario)
            .unwrap()
            .cells("test", 1 << 30, 20)
    }

    fn results(dir: &TempDir) -> Results {
        let machine = Machine {
            processor: String::new(),
            processors: 1,
            memory: 0,
            kernel: String::new(),
            qemu: String::new(),
            vamoose: String::new(),
            corpus: String::new(),
            command: String::new(),
            date: String::new(),
            load: String::new(),
        };
        Results::open(dir.path(), &machine).unwrap()
    }

    fn made(cell: &Cell, outcome: Outcome) -> Record {
        Record::new(cell, 1, outcome, Figures::default())
    }

    #[test]
    fn each_cell_begins_one_round() {
        let dir = TempDir::new().unwrap();
        let (mut plan, cells) = (Plan::new(), cells());
        plan.add(&cells, 3);
        let firsts: Vec<_> = plan
            .groups
            .iter()
            .map(|group| group.turns(&results(&dir)))
            .collect();
        assert_eq!(firsts.len(), 2);
        let expected = [0, 1, 2, 1, 2, 0, 2, 0, 1].map(|index| cells[index].clone());
        let order: Vec<_> = firsts[0].iter().map(|(cell, _)| cell.clone()).collect();
        assert_eq!(order, expected);
    }

    #[test]
    fn finished_and_abandoned_cells_are_not_repeated() {
        let dir = TempDir::new().unwrap();
        let cells = cells();
        let mut plan = Plan::new();
        plan.add(&cells[..3], 3);
        let mut results = results(&dir);
        for (index, outcome) in [
            (0, Outcome::Equal),
            (1, Outcome::Cancelled),
            (1, Outcome::Cancelled),
            (2, Outcome::Equal),
            (2, Outcome::Cancelled),
        ] {
            results.add(&made(&cells[index], outcome)).unwrap();
        }
        let turns = plan.groups[0].turns(&results);
        let expected = [(0, 2), (2, 3), (0, 3)];
        assert_eq!(
            turns,
            expected.map(|(index, round)| (cells[index].clone(), round))
        );
    }
}
