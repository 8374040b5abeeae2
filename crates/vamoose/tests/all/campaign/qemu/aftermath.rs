//! What follows the faults: everything is repaired and has to work.

use std::time::Duration;

use super::instance::State;
use super::judge::Holder;
use super::plan::Then;
use super::scene::{HOST, OTHER_HOST, Outcome, SOURCE_HOST, Scene};
use crate::campaign::claim::Claim;
use crate::campaign::report::{Broken, Trouble, broken};

impl Scene<'_> {
    /// Repeats the command until its claim is definite.
    pub(crate) fn run_until_definite(&mut self) -> Result<(), Trouble> {
        const MOST: usize = 4;
        for _ in 0..MOST {
            let last = self
                .outcomes
                .iter()
                .rev()
                .find(|outcome| outcome.migration.to == 1);
            // A command cannot say anything about a QEMU that has ended.
            let gone = self.instances[0].process.has_ended();
            let known = |outcome: &Outcome| {
                outcome.claim.is_definite() || gone && outcome.claim == Claim::Silent
            };
            if last.is_some_and(known) {
                return Ok(());
            }
            self.run(self.first_command("the command run again"))?;
        }
        broken(
            Broken::InDoubt,
            format!("the command says nothing definite, run {MOST} times"),
        )
    }

    /// Continues according to where the guest is. Returns where it is at the end.
    pub(crate) fn go_on(&mut self, holder: &Holder) -> Result<Holder, Trouble> {
        match holder {
            Holder::Lost(_) => Ok(holder.clone()),
            Holder::Instance(0) => self.migrate_again(),
            Holder::Instance(1) => self.after_success(),
            // At the other host, by the command to that host.
            Holder::Instance(_) if !self.plan.next.old_command => Ok(holder.clone()),
            Holder::Instance(other) => self.old_command(*other),
        }
    }

    /// Checks that the next migration of a guest that stayed works.
    fn migrate_again(&mut self) -> Result<Holder, Trouble> {
        // QEMU never again migrates a paused guest whose migration failed at the end.
        if self.instances[0].state() == State::Still("postmigrate".to_owned()) {
            return Ok(Holder::Instance(0));
        }
        let next = self.plan.next;
        let host = if next.other_host { OTHER_HOST } else { HOST };
        let name = if next.same_name {
            self.plan.name()
        } else {
            format!("{}-next", self.plan.name())
        };
        // Before a QEMU of the same name is started.
        for instance in &self.instances[1..] {
            instance.process.kill();
        }
        let to = self.add_waiting(host, self.plan.versions[2], &name, "D")?;
        let server = self.address(host)?;
        let migration = self.migration("the next migration", [0, to], SOURCE_HOST, server, &name);
        let claim = self.run(migration)?;
        if claim != Claim::Moved {
            let what = format!("nothing is broken any more, and the next migration says `{claim}`");
            return broken(Broken::NextFails, what);
        }
        let holder = self.expect(Holder::Instance(to))?;
        if next.old_command {
            self.old_command(to)
        } else {
            Ok(holder)
        }
    }

    fn after_success(&mut self) -> Result<Holder, Trouble> {
        match self.plan.then {
            Then::Nothing => Ok(Holder::Instance(1)),
            Then::SameCommand => {
                let migration = self.first_command("the same command after its success");
                let claim = self.run(migration)?;
                if claim != Claim::Moved {
                    let what = format!("the guest has moved, and the same command says `{claim}`");
                    return broken(Broken::Untrue, what);
                }
                self.expect(Holder::Instance(1))
            }
            Then::DestinationDies => {
                self.injector.tell("B is killed");
                self.instances[1].process.kill();
                std::thread::sleep(DEATH_NOTICED);
                let what = "the same command after the destination's death";
                let claim = self.run(self.first_command(what))?;
                if matches!(claim, Claim::Moved | Claim::Source) {
                    let what =
                        format!("the guest has died with B, and the same command says `{claim}`");
                    return broken(Broken::Untrue, what);
                }
                let lives = self.lives();
                self.check_lives(&lives)?;
                Ok(Holder::Lost("it was killed after the migration"))
            }
            Then::MovesOn { restart } => self.move_on(restart),
        }
    }

    /// Moves the guest on to the other host; afterwards the first command is outdated.
    fn move_on(&mut self, restart: bool) -> Result<Holder, Trouble> {
        let name = format!("{}-further", self.plan.name());
        let to = self.add_waiting(OTHER_HOST, self.plan.versions[2], &name, "E")?;
        let server = self.address(OTHER_HOST)?;
        let migration = self.migration("the move to another host", [1, to], HOST, server, &name);
        let claim = self.run(migration)?;
        if claim != Claim::Moved {
            let what = format!("nothing is broken any more, and the move on says `{claim}`");
            return broken(Broken::NextFails, what);
        }
        self.expect(Holder::Instance(to))?;
        if restart {
            self.injector.tell("B's server is started anew");
            self.restart_server()?;
        }
        self.old_command(to)
    }

    /// Repeats the first command while the guest is elsewhere: it must not claim to have moved the guest, and must not move it.
    fn old_command(&mut self, holder: usize) -> Result<Holder, Trouble> {
        self.run(self.first_command("the old command"))?;
        self.expect(Holder::Instance(holder))
    }

    fn expect(&mut self, holder: Holder) -> Result<Holder, Trouble> {
        let found = self.judge()?;
        if found == holder {
            return Ok(holder);
        }
        broken(
            Broken::Untrue,
            format!("the guest is at {found:?}, and has to be at {holder:?}"),
        )
    }
}

/// Time after which the server has noticed that its QEMU was killed.
const DEATH_NOTICED: Duration = Duration::from_millis(50);
