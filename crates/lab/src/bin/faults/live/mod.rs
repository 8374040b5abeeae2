//! Two VMMs with the crate `vamoose-live`, each in its own process, and the faults between them.
//!
//! ```text
//!  VMM A (source) ──> link ──> VMM B (destination)      VMM C, D: later destinations
//! ```
//! The guests are threads that write memory and keep sums of it, see the crate `testguest`.

mod plan;
mod scene;
mod vmm;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::engine::{Engine, Experiment, rehearse};
use crate::fault::{Choices, Kind, Role};
use crate::report::{Report, Trouble};
use plan::Plan;
use scene::Scene;

/// What all experiments share.
pub(crate) struct Setting {
    program: PathBuf,
    choices: Choices,
    clean: Duration,
}

impl Setting {
    /// Observes a migration without faults.
    pub(crate) fn new(program: PathBuf, kinds: Vec<(u64, Kind)>) -> Result<Self> {
        let mut setting = Self {
            program,
            // Less than what any method sends of 4 MiB of which a quarter is zeros.
            choices: Choices::new(kinds, 1500 << 10, 30),
            clean: Duration::ZERO,
        };
        let report = rehearse(|| setting.play(&Plan::without_faults()))?;
        setting.choices.keep(&report.messages);
        setting.clean = report.took;
        Ok(setting)
    }

    /// Runs an experiment.
    fn play(&self, plan: &Plan) -> Result<Report, Trouble> {
        let mut scene = Scene::new(plan, &self.program, self.clean)?;
        let begin = Instant::now();
        let ended = scene
            .play()
            .map_err(|trouble| trouble.with_story(scene.story()))?;
        Ok(Report {
            in_doubt: scene.in_doubt,
            ..scene.injector.report(ended, begin.elapsed())
        })
    }
}

impl Engine for Setting {
    fn experiment(&self, seed: u64, number: u64) -> Experiment {
        let plan = Plan::draw(seed, number, &self.choices);
        Experiment {
            result: self.play(&plan),
            plan: plan.to_string(),
            faults: plan.faults,
        }
    }
}

/// The kinds of faults with their weights.
pub(crate) const KINDS: [(u64, Kind); 16] = [
    (6, Kind::Kill(Role::Source)),
    (6, Kind::Kill(Role::Destination)),
    (6, Kind::RestartDestination),
    (5, Kind::Freeze(Role::Source)),
    (6, Kind::Freeze(Role::Destination)),
    (8, Kind::Interrupt),
    (8, Kind::Cut),
    (8, Kind::Reset),
    (8, Kind::Silence),
    (8, Kind::BlackHole),
    (8, Kind::Refuse),
    (4, Kind::Delay),
    (6, Kind::Duplicate),
    (4, Kind::Flip),
    (3, Kind::Files(Role::Source)),
    (3, Kind::Files(Role::Destination)),
];
