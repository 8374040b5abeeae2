//! Whether all ends well once nothing fails any more: I3.

use std::{
    collections::HashSet,
    hash::{DefaultHasher, Hash, Hasher},
    sync::{Mutex, MutexGuard, PoisonError},
};

use handover::{DestinationState, SourceState};

use crate::{
    step::{Outcome, Step},
    world::{Doing, Engine, Now, Scene, SourceVmm, Vmm, World},
};

/// States from which all ends well, by what is true in them.
pub(crate) struct Repairs {
    known: Vec<Mutex<HashSet<u64>>>,
}

impl Repairs {
    pub(crate) fn new() -> Self {
        Self {
            known: (0..64).map(|_| Mutex::default()).collect(),
        }
    }

    /// Processes are started again, everything is delivered, the same command is run again: whether exactly one guest
    /// runs in the end, and both sides know.
    pub(crate) fn end_well(&self, scene: &Scene, world: &World) -> bool {
        if world.now.wrong.is_some() {
            return true;
        }
        let mut path = Vec::new();
        let mut on_path = HashSet::new();
        let mut key = key(&world.now);
        if self.knows(key) {
            return true;
        }
        let mut world = world.clone();
        loop {
            path.push(key);
            on_path.insert(key);
            let step = world.now.repair(scene);
            if let Some(step) = step {
                world = world.apply(scene, step);
                key = self::key(&world.now);
                if self.knows(key) {
                    break;
                }
            }
            // It goes round in circles: nothing more will happen.
            if step.is_none() || on_path.contains(&key) {
                // A mutant shall be found by what it does, not by what it would do.
                let caught = scene.mutant.is_some() && world.now.wrong.is_some();
                if !world.now.is_well() && !caught {
                    return false;
                }
                break;
            }
        }
        for key in path {
            self.shard(key).insert(key);
        }
        true
    }

    fn knows(&self, key: u64) -> bool {
        self.shard(key).contains(&key)
    }

    fn shard(&self, key: u64) -> MutexGuard<'_, HashSet<u64>> {
        let shard = &self.known[usize::try_from(key % 64).unwrap_or(0)];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn key(now: &Now) -> u64 {
    let mut hasher = DefaultHasher::new();
    now.hash(&mut hasher);
    hasher.finish()
}

impl Now {
    /// The next step when nothing fails.
    pub(crate) fn repair(&self, scene: &Scene) -> Option<Step> {
        if self.wrong.is_some() {
            return None;
        }
        if let Some(side) = self.busy() {
            return Some(Step::Carry(side));
        }
        if scene.engine == Engine::Qemu
            && let Some((host, _)) = (0..).zip(&self.servers).find(|(_, up)| up.is_none())
        {
            let forget = false;
            return Some(Step::StartServer { host, forget });
        }
        self.deliver()
            .or_else(|| self.at_the_destination(scene))
            .or_else(|| self.at_the_source(scene))
            .or_else(|| {
                let again = self.driver.is_none() && !self.is_settled();
                let (to, confirm) = (self.to, self.may_be_confirmed());
                (again && self.takes_commands(scene)).then_some(Step::Command { to, confirm })
            })
    }

    fn deliver(&self) -> Option<Step> {
        let ready = |c: &crate::world::Connection| self.can_serve(c);
        if let Some(position) = self.connections.iter().position(ready) {
            return Some(Step::Serve(position));
        }
        let mut open = self.connections.iter().filter(|c| c.open);
        let hears = open.any(|c| !c.down.is_empty() || c.gone.is_some());
        hears.then_some(Step::Hear)
    }

    fn at_the_destination(&self, scene: &Scene) -> Option<Step> {
        self.attempts
            .iter()
            .enumerate()
            .find_map(|(index, attempt)| {
                let job = attempt.job.as_ref()?;
                if job.doing.is_some() {
                    return Some(Step::Operate(index, Outcome::Works));
                }
                if attempt.sees_death() {
                    return Some(Step::SeesDeath(index));
                }
                if *job.machine.state() != DestinationState::Receiving {
                    return None;
                }
                match attempt.vmm {
                    Vmm::Loaded => return Some(Step::SeesLoaded(index)),
                    Vmm::Partial | Vmm::Frozen if scene.mutant.is_none() => {
                        return Some(Step::SeesSwitched(index));
                    }
                    _ => {}
                }
                let (attempt, by_itself) = (index, false);
                (!self.may_still_come(index)).then_some(Step::Fails { attempt, by_itself })
            })
    }

    fn at_the_source(&self, scene: &Scene) -> Option<Step> {
        if self.sees_source(scene).is_some() {
            return Some(Step::Look);
        }
        match self.source {
            SourceVmm::Migrating(_) if self.may_ask_to_switch(scene) => {
                return Some(Step::AskToSwitch);
            }
            SourceVmm::Migrating(attempt) if self.may_switch(scene, attempt.into()) => {
                return Some(Step::Switch(attempt.into()));
            }
            SourceVmm::Supplying(attempt) if self.may_arrive(attempt.into()) => {
                return Some(Step::Arrives(attempt.into()));
            }
            SourceVmm::Supplying(attempt) if self.may_supply(attempt.into()) => {
                return Some(Step::Supplies(attempt.into()));
            }
            SourceVmm::Migrating(attempt) | SourceVmm::Held(attempt)
                if self.has_data_path(attempt.into()) =>
            {
                return Some(self.sends_all(attempt.into()));
            }
            SourceVmm::Held(_) if self.driver.is_none() => {}
            SourceVmm::Migrating(_) | SourceVmm::Held(_) => {
                return Some(Step::MigrationFails { by_itself: false });
            }
            SourceVmm::Switching(_) => return Some(Step::Stop),
            _ => {}
        }
        let driver = self.driver.as_ref()?;
        match driver.doing {
            Doing::Dialing => return Some(Step::Dial),
            Doing::Resuming => return Some(Step::Resume(Outcome::Works)),
            Doing::Nothing => {}
        }
        let asks = matches!(
            driver.machine.state(),
            SourceState::Committing { .. } | SourceState::Supplying
        );
        let early = false;
        asks.then_some(Step::AskAgain { early })
    }

    /// Every attempt is over, as the source's journal has it.
    fn is_settled(&self) -> bool {
        self.unfinished().is_none() && self.kept.is_none()
    }

    fn is_well(&self) -> bool {
        if self.wrong.is_some() {
            return false;
        }
        if self.really_lost() {
            return true;
        }
        match self.running() {
            0 => self.unknowable,
            1 => self.unknowable || self.elsewhere || (self.driver.is_none() && self.is_settled()),
            _ => false,
        }
    }
}
