//! Finds where the guest is, and checks the invariants.

use std::time::{Duration, Instant};

use anyhow::anyhow;
use lab::counter;
use lab::writer::Ended;

use super::instance::State;
use super::scene::{Outcome, Scene};
use crate::campaign::claim::Claim;
use crate::campaign::fault::{Kind, Role};
use crate::campaign::report::{Broken, Trouble, broken};
use crate::campaign::timeline::{Life, doubled};

/// Who has the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    /// This instance.
    Instance(usize),
    /// Nobody: its only copy was killed.
    Lost(&'static str),
}

/// The limit for states to settle.
const SETTLING: Duration = Duration::from_secs(5);

impl Scene<'_> {
    /// Finds who has the guest, and checks everything so far.
    pub(crate) fn judge(&mut self) -> Result<Holder, Trouble> {
        self.expect_source()?;
        let holder = if self.plan.runs {
            self.who_runs()?
        } else {
            self.who_holds()?
        };
        let lives = self.lives();
        self.check_lives(&lives)?;
        for outcome in self.outcomes.clone() {
            self.check_claim(&outcome, &holder, &lives)?;
        }
        if let Holder::Instance(holder) = holder {
            self.check_memory(holder)?;
        }
        Ok(holder)
    }

    /// Checks that the source's QEMU has not ended by itself. Servers may end the others.
    fn expect_source(&mut self) -> Result<(), Trouble> {
        let killed = self.injector.struck().contains(&Kind::Kill(Role::Source));
        if killed || !self.instances[0].process.has_ended() {
            return Ok(());
        }
        broken(
            Broken::Crash,
            "the source's QEMU has ended, but was not killed",
        )
    }

    /// Finds the instance that runs.
    fn who_runs(&mut self) -> Result<Holder, Trouble> {
        let begin = Instant::now();
        loop {
            let states: Vec<_> = self
                .instances
                .iter_mut()
                .map(|instance| instance.state())
                .collect();
            let mut running = (0..states.len()).filter(|index| states[*index] == State::Running);
            match (running.next(), running.next()) {
                (Some(one), None) => return Ok(Holder::Instance(one)),
                (Some(one), Some(other)) => {
                    let name = |index: usize| self.instances[index].name.clone();
                    let what = format!("{} and {} run", name(one), name(other));
                    return broken(Broken::Doubled, what);
                }
                (None, _) => {}
            }
            if let Some(lost) = self.excuse_for_loss() {
                return Ok(lost);
            }
            if begin.elapsed() > SETTLING {
                let what =
                    format!("the guest runs nowhere, and its only copy was not killed: {states:?}");
                return broken(Broken::Nowhere, what);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Finds the instance that has a paused guest by following the commands' claims, and checks that its QEMU agrees.
    fn who_holds(&mut self) -> Result<Holder, Trouble> {
        let follow = |holder, outcome: &Outcome| match outcome.claim {
            Claim::Moved if outcome.migration.from == holder => outcome.migration.to,
            _ => holder,
        };
        let holder = self.outcomes.iter().fold(0, follow);
        match self.instances[holder].state() {
            State::Still(state) if state != "inmigrate" => Ok(Holder::Instance(holder)),
            State::Running => broken(
                Broken::Started,
                format!("{} runs", self.instances[holder].name),
            ),
            state => match self.excuse_for_loss() {
                Some(lost) => Ok(lost),
                None => broken(
                    Broken::Nowhere,
                    format!("{} is {state:?}", self.instances[holder].name),
                ),
            },
        }
    }

    /// The reason, if there is one, why no instance has to have the guest: its only copy was killed.
    fn excuse_for_loss(&mut self) -> Option<Holder> {
        let struck = self.injector.struck();
        // If killing the source was the only fault, the destination must have a guest that it had loaded completely. After another
        // fault, `migrate` may not know that the source had paused the guest.
        let known = struck == [Kind::Kill(Role::Source)] && self.was_whole_at_destination();
        if struck.contains(&Kind::Kill(Role::Source)) && !known {
            return Some(Holder::Lost("its source was killed"));
        }
        let committed = self.message_at("request:commit");
        let died = self.instances[1].process.ended_at();
        if let (Some(committed), Some(died)) = (committed, died)
            && struck.contains(&Kind::Kill(Role::Destination))
            && died + IN_FLIGHT > committed
        {
            return Some(Holder::Lost("its destination was killed"));
        }
        None
    }

    /// Whether the source was killed when the destination had loaded the whole guest, and the source had paused it for that.
    fn was_whole_at_destination(&mut self) -> bool {
        let Some(died) = self.injector.struck_at(Kind::Kill(Role::Source)) else {
            return false;
        };
        let ran_last = self.instances[0].life().runs.last().copied();
        let stopped = ran_last
            .and_then(|(_, end)| end)
            .is_some_and(|end| end < died);
        let before = |at: Duration| at < died;
        stopped && self.instances[1].loaded_at().is_some_and(before)
    }

    pub(super) fn check_lives(&self, lives: &[Life]) -> Result<(), Trouble> {
        if let Some(doubled) = doubled(lives) {
            return broken(Broken::Doubled, doubled);
        }
        let ran = lives.iter().find(|life| life.has_run());
        match ran {
            Some(ran) if !self.plan.runs => {
                let what = format!("{} ran, and the guest was paused at the source", ran.name);
                broken(Broken::Started, what)
            }
            _ => Ok(()),
        }
    }

    /// Compares a command's claim with the facts at that time.
    fn check_claim(
        &self,
        outcome: &Outcome,
        holder: &Holder,
        lives: &[Life],
    ) -> Result<(), Trouble> {
        let (what, claim) = (outcome.migration.what, outcome.claim);
        let untrue =
            |why: String| broken(Broken::Untrue, format!("{what} says `{claim}`, and {why}"));
        let elsewhere = lives
            .iter()
            .enumerate()
            .find(|(index, life)| *index != outcome.migration.from && life.has_run_by(outcome.at));
        match claim {
            Claim::Moved
                if self.plan.runs
                    && !lives[outcome.migration.to].runs_at(outcome.at, IN_FLIGHT) =>
            {
                let died = self.instances[outcome.migration.to].process.ended_at();
                if died.is_some_and(|died| self.reported_running_around(died)) {
                    return Ok(());
                }
                untrue(format!("{} does not run", lives[outcome.migration.to].name))
            }
            Claim::Moved => Ok(()),
            Claim::Source => match (
                elsewhere,
                self.instances[outcome.migration.from].process.ended_at(),
            ) {
                (Some((_, life)), _) => untrue(format!("{} had run by then", life.name)),
                (None, Some(died)) if died + SURE < outcome.at => {
                    untrue("the source had ended".to_owned())
                }
                _ => Ok(()),
            },
            Claim::Elsewhere if self.plan.runs && elsewhere.is_none() => {
                untrue("it has run nowhere else".to_owned())
            }
            Claim::Lost if matches!(holder, Holder::Instance(_)) => {
                untrue("it is there".to_owned())
            }
            Claim::InDoubt if outcome.whole => {
                broken(Broken::InDoubt, format!("{what} is in doubt"))
            }
            Claim::InDoubt if !outcome.committed => untrue("no commit had been sent".to_owned()),
            _ => Ok(()),
        }
    }

    /// Whether the destination reported a running guest before `died`, or at most [`IN_FLIGHT`] later.
    fn reported_running_around(&self, died: Duration) -> bool {
        let told = self.message_at("answer:running");
        told.is_some_and(|told| told < died + IN_FLIGHT)
    }

    /// Checks all memory of the holder, and that its counter has not gone backwards.
    fn check_memory(&mut self, holder: usize) -> Result<(), Trouble> {
        let before = counter::count(self.instances[0].qemu.ram())?;
        if self.plan.runs {
            self.instances[holder].qemu.qmp.stop()?;
        }
        let name = &self.instances[holder].name;
        let ram = self.instances[holder].qemu.ram();
        let at = match self.image.check(ram) {
            Ok(at) => at,
            Err(error) => return broken(Broken::Memory, format!("{name}: {error:#}")),
        };
        if self.plan.runs && holder != 0 && at < before {
            let what = format!("{name} is at {at}, the source had come to {before}");
            return broken(Broken::Memory, what);
        }
        if self.plan.runs {
            self.instances[holder].qemu.qmp.cont()?;
            self.expect_alive(holder, at)?;
        }
        Ok(())
    }

    /// Checks that the disk has everything the guest wrote, exactly once, and that the image is not locked. Only the holder's QEMU is
    /// ended; the others keep running. A guest that was paused runs for a while first.
    pub(crate) fn check_disk(&mut self, holder: &Holder) -> Result<(), Trouble> {
        let checked = match holder {
            Holder::Instance(holder) => {
                let instance = &mut self.instances[*holder];
                if !self.plan.runs {
                    let at = counter::count(instance.qemu.ram())?;
                    instance.qemu.qmp.cont()?;
                    self.expect_alive(*holder, at)?;
                }
                let instance = &mut self.instances[*holder];
                instance.qemu.qmp.stop()?;
                instance.process.kill();
                self.disk.check(instance.qemu.ram(), Ended::Stopped)
            }
            // It is not certain which of them had it last.
            Holder::Lost(_) => {
                let dead = self.instances.iter().filter(|it| it.process.has_ended());
                let checks = dead.map(|it| self.disk.check(it.qemu.ram(), Ended::Running));
                let found = checks.reduce(Result::or);
                found.unwrap_or_else(|| Err(anyhow!("the guest is lost, and no QEMU has ended")))
            }
        };
        match checked {
            Ok(_) => Ok(()),
            Err(error) => broken(Broken::Disk, format!("{holder:?}: {error:#}")),
        }
    }

    /// Checks that the guest's counter keeps increasing.
    fn expect_alive(&mut self, holder: usize, at: u32) -> Result<(), Trouble> {
        let begin = Instant::now();
        while counter::count(self.instances[holder].qemu.ram())? <= at {
            if begin.elapsed() > SETTLING {
                let what = format!("{} runs and does not count", self.instances[holder].name);
                return broken(Broken::Nowhere, what);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}

/// A message may be in flight this long.
const IN_FLIGHT: Duration = Duration::from_millis(100);
/// The time between reading two clocks on a busy machine.
const SURE: Duration = Duration::from_millis(300);
