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

use anyhow::{Context, Result, bail};

use crate::fault::{Choices, Kind, Role};
use crate::report::{Ended, Report, Trouble};
use plan::Plan;
use scene::Scene;

/// What all jobs share.
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
        let rehearsed = setting.without_faults();
        let (words, clean) = rehearsed.context("a migration without faults")?;
        setting.choices.keep(&words);
        setting.clean = clean;
        Ok(setting)
    }

    pub(crate) fn plan(&self, seed: u64, number: u64) -> Plan {
        Plan::draw(seed, number, &self.choices)
    }

    /// Runs an experiment.
    pub(crate) fn experiment(&self, plan: &Plan) -> Result<Report, Trouble> {
        let begin = Instant::now();
        let mut scene = Scene::new(plan, &self.program, self.clean)?;
        let ended = scene
            .play()
            .map_err(|trouble| trouble.with_story(scene.story()))?;
        let struck = scene.struck();
        Ok(Report {
            missed: plan.faults.len() - struck.len(),
            struck,
            ended,
            in_doubt: scene.in_doubt,
            took: begin.elapsed(),
            downtime: None,
        })
    }

    fn without_faults(&self) -> Result<(Vec<String>, Duration)> {
        let plan = Plan::without_faults();
        let mut last = None;
        // The first run warms caches.
        for _ in 0..2 {
            let mut scene = Scene::new(&plan, &self.program, Duration::ZERO)?;
            let begin = Instant::now();
            match scene.play() {
                Ok(Ended::Destination) => last = Some((scene.message_names(), begin.elapsed())),
                Ok(other) => bail!("the guest ended {other:?}"),
                Err(trouble) => bail!("{trouble:?}\n{}", scene.story().join("\n")),
            }
        }
        last.context("no migration")
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
