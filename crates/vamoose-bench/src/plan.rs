//! Which migrations are left to be made, in which order, and making them.
//!
//! Cells of one guest and link are measured side by side: each round makes every one of them once, and begins with another
//! one, so that a slow period of the machine affects all alike.

use std::io::IsTerminal as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::measure::{Host, Stage};
use crate::record::{Cell, Outcome, Record};
use crate::results::Results;

/// Everything that is to be measured.
pub(crate) struct Plan {
    groups: Vec<Group>,
}

/// Cells that are measured side by side.
struct Group {
    cells: Vec<Cell>,
    rounds: u32,
}

/// Then a contender is not tried with this guest again: it cannot move it.
const GIVE_UP: u32 = 2;

impl Plan {
    pub(crate) fn new() -> Self {
        Self { groups: Vec::new() }
    }

    /// Adds cells, those of one guest and link beside one another.
    pub(crate) fn add(&mut self, cells: Vec<Cell>, rounds: u32) {
        let is_beside = |a: &Cell, b: &Cell| (a.guest, a.link) == (b.guest, b.link);
        let groups = cells.chunk_by(is_beside);
        self.groups.extend(groups.map(|cells| Group {
            cells: cells.to_vec(),
            rounds,
        }));
    }

    /// Makes what is not in the results yet. A cell that fails is said, and the others go on; `stop` ends the run after the
    /// migration that is under way.
    pub(crate) fn carry_out(
        &self,
        host: &Host,
        results: &mut Results,
        stop: &AtomicBool,
    ) -> Result<()> {
        let turns: Vec<Vec<_>> = self.groups.iter().map(|it| it.turns(results)).collect();
        let mut progress = Progress::new(turns.iter().map(Vec::len).sum());
        let mut failures = 0_usize;
        for turns in turns.into_iter().filter(|turns| !turns.is_empty()) {
            let ended = group(host, turns, results, &mut progress, stop);
            if stop.load(Ordering::Relaxed) {
                progress.end();
                bail!("interrupted; the same command goes on where it was");
            }
            failures += ended.unwrap_or_else(|error| {
                progress.say(&format!("FAILED: {error:#}"));
                1
            });
        }
        progress.end();
        match failures {
            0 => Ok(()),
            _ => bail!(
                "{failures} failed, and are not in the results; the same command tries them again"
            ),
        }
    }
}

impl Group {
    /// What is not in the results, in its order.
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

/// Makes the turns of a group; gives how many have failed.
fn group(
    host: &Host,
    turns: Vec<(Cell, u32)>,
    results: &mut Results,
    progress: &mut Progress,
    stop: &AtomicBool,
) -> Result<usize> {
    let (mut failures, left) = (0, turns.len());
    let mut stage = Stage::set(host, &turns[0].0).inspect_err(|_| progress.skip(left))?;
    let mut cancelled: Vec<Cell> = Vec::new();
    for (turn, (cell, round)) in turns.into_iter().enumerate() {
        let given_up = cancelled.iter().filter(|it| **it == cell).count() >= GIVE_UP as usize;
        if stop.load(Ordering::Relaxed) || given_up {
            progress.skip(1);
            continue;
        }
        let what = format!(
            "{}, {} over {}, {} channels, {}, round {round}",
            cell.scenario, cell.guest, cell.link, cell.channels, cell.contender
        );
        progress.begin(&what);
        match stage.measure(&cell, round).context(what.clone()) {
            Ok(Some(record)) => {
                if record.outcome == Outcome::Cancelled {
                    cancelled.push(cell);
                }
                results.add(&record)?;
                progress.done(&what, Some(&record));
            }
            Ok(None) => progress.done(&what, None),
            Err(error) => {
                progress.done(&what, None);
                if matches!(stage, Stage::Running(_)) {
                    // With it goes the guest.
                    progress.skip(left - turn - 1);
                    return Err(error);
                }
                failures += 1;
                if !stop.load(Ordering::Relaxed) {
                    progress.say(&format!("FAILED: {error:#}"));
                }
            }
        }
    }
    for record in stage.end()? {
        results.add(&record)?;
        progress.say(&line(&record));
    }
    Ok(failures)
}

/// How far the run is: a bar on a terminal, else a line for each migration.
struct Progress {
    bar: ProgressBar,
    is_terminal: bool,
    since: Instant,
    done: u32,
    left: u32,
}

impl Progress {
    fn new(turns: usize) -> Self {
        let is_terminal = std::io::stderr().is_terminal();
        let bar = ProgressBar::with_draw_target(
            Some(turns as u64),
            match is_terminal {
                true => ProgressDrawTarget::stderr(),
                false => ProgressDrawTarget::hidden(),
            },
        );
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {prefix} {wide_msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.enable_steady_tick(Duration::from_secs(1));
        Self {
            bar,
            is_terminal,
            since: Instant::now(),
            done: 0,
            left: u32::try_from(turns).unwrap_or(u32::MAX),
        }
    }

    fn begin(&self, what: &str) {
        self.bar.set_message(what.to_owned());
    }

    fn done(&mut self, what: &str, record: Option<&Record>) {
        self.done += 1;
        self.left = self.left.saturating_sub(1);
        self.bar.inc(1);
        let left = self.since.elapsed() / self.done * self.left;
        let left = format!("{} min left", left.as_secs().div_ceil(60));
        self.bar.set_prefix(left.clone());
        match record {
            Some(record) => self.say(&format!("{}; {left}", line(record))),
            None if !self.is_terminal => self.say(&format!("{what}: done; {left}")),
            None => {}
        }
    }

    fn skip(&mut self, turns: usize) {
        self.left = self
            .left
            .saturating_sub(u32::try_from(turns).unwrap_or(u32::MAX));
        self.bar.inc(turns as u64);
    }

    fn say(&self, text: &str) {
        self.bar.suspend(|| eprintln!("{text}"));
    }

    fn end(&self) {
        self.bar.finish_and_clear();
    }
}

fn line(record: &Record) -> String {
    let Record {
        cell,
        round,
        outcome,
        figures,
        ..
    } = record;
    let ended = match outcome {
        Outcome::Cancelled => "cancelled after ",
        _ => "",
    };
    let bytes = figures.link_bytes.or(figures.wire_bytes);
    let bytes = bytes.map_or_else(String::new, |bytes| format!(", {} MB", bytes / 1_000_000));
    let downtime = figures.downtime.or(figures.downtime_reported);
    let downtime = downtime.map_or_else(String::new, |it| format!(", downtime {it:.0} ms"));
    format!(
        "{}, {} over {}, {} channels, {}, round {round}: {ended}{:.2} s, {:.2} CPU-s{bytes}{downtime}",
        cell.scenario,
        cell.guest,
        cell.link,
        cell.channels,
        cell.contender,
        figures.seconds,
        figures.cpu.total()
    )
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::record::{Figures, Machine};
    use crate::scenario::Scenario;

    fn cells() -> Vec<Cell> {
        let scenario = "about = ''\nguests = ['zero']\nlinks = ['open', '1G']\nram = '64M'\nrounds = 3\n\
            contenders = ['qemu none', 'qemu zstd', 'pair auto']";
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
        Record {
            cell: cell.clone(),
            round: 1,
            outcome,
            figures: Figures::default(),
            timeline: Vec::new(),
            service: None,
        }
    }

    #[test]
    fn every_cell_is_the_first_once() {
        let dir = TempDir::new().unwrap();
        let (mut plan, cells) = (Plan::new(), cells());
        plan.add(cells.clone(), 3);
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
    fn what_was_made_or_given_up_is_not_made_again() {
        let dir = TempDir::new().unwrap();
        let cells = cells();
        let mut plan = Plan::new();
        plan.add(cells[..3].to_vec(), 3);
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
