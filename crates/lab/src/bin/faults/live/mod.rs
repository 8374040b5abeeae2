//! Two VMMs with the crate `live`, each a process of its own, and everything that can go wrong between them.
//!
//! ```text
//!  VMM A (source) ──> link ──> VMM B (destination)      VMM C, D: destinations that come after it
//! ```
//! The guests are threads that write memory and keep sums of it (see the crate `testguest`).

mod plan;
mod stage;
mod vmm;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::fault::Kind;
use crate::report::{Ended, Report, Trouble, missed};
use plan::{Choices, Plan};
use stage::Stage;

/// What all jobs know.
#[derive(Clone)]
pub(crate) struct Setting {
    program: PathBuf,
    choices: Choices,
    clean: Duration,
}

/// Messages at which faults strike, if a migration has them.
const WORDS: [&str; 14] = [
    "request:hello",
    "request:prepare",
    "request:state",
    "request:commit",
    "request:settled",
    "answer:accepted",
    "answer:preparing",
    "answer:prepared",
    "answer:synced",
    "answer:loaded",
    "answer:receiving",
    "answer:starting",
    "answer:running",
    "answer:unclear",
];

impl Setting {
    /// Looks how a migration goes without faults.
    pub(crate) fn new(program: &Path, kinds: &[Kind]) -> Result<Self> {
        ensure!(
            program.is_file(),
            "there is no {}: cargo build --release -p live --example vmm, with the same target folder",
            program.display()
        );
        let wanted = KINDS.iter().filter(|(_, kind)| kinds.contains(kind));
        let mut setting = Self {
            program: program.to_owned(),
            choices: Choices {
                words: WORDS.to_vec(),
                kinds: wanted.copied().collect(),
            },
            clean: Duration::ZERO,
        };
        let (words, clean) = setting
            .without_faults()
            .context("a migration without faults")?;
        setting
            .choices
            .words
            .retain(|known| words.iter().any(|word| word == known));
        setting.clean = clean;
        Ok(setting)
    }

    /// The plan of an experiment; `None` if there is no fault to draw from.
    pub(crate) fn plan(&self, seed: u64, number: u64) -> Option<Plan> {
        let some = !self.choices.kinds.is_empty();
        some.then(|| Plan::draw(seed, number, &self.choices))
    }

    /// Makes an experiment.
    pub(crate) fn experiment(&self, plan: &Plan) -> Result<Report, Trouble> {
        let begin = Instant::now();
        let mut stage = Stage::new(plan, &self.program, self.clean)?;
        let ended = stage
            .play()
            .map_err(|trouble| trouble.with_story(stage.story()))?;
        let struck = stage.struck();
        Ok(Report {
            missed: missed(&plan.faults, &struck),
            struck,
            ended,
            in_doubt: stage.in_doubt,
            left_over: false,
            took: begin.elapsed(),
        })
    }

    fn without_faults(&self) -> Result<(Vec<String>, Duration)> {
        let plan = Plan::without_faults();
        let mut last = None;
        // The first one finds nothing in caches.
        for _ in 0..2 {
            let mut stage = Stage::new(&plan, &self.program, Duration::ZERO)?;
            let begin = Instant::now();
            match stage.play() {
                Ok(Ended::Destination) => last = Some((stage.words(), begin.elapsed())),
                Ok(other) => bail!("the guest ended {other:?}"),
                Err(trouble) => bail!("{trouble:?}\n{}", stage.story().join("\n")),
            }
        }
        last.context("no migration")
    }
}

/// How often each kind of fault is drawn, of all.
const KINDS: [(u64, Kind); 16] = [
    (6, Kind::KillSource),
    (6, Kind::KillDestination),
    (6, Kind::RestartDestination),
    (5, Kind::FreezeSource),
    (6, Kind::FreezeDestination),
    (8, Kind::Interrupt),
    (8, Kind::Cut),
    (8, Kind::Reset),
    (8, Kind::Silence),
    (8, Kind::BlackHole),
    (8, Kind::Refuse),
    (4, Kind::Delay),
    (6, Kind::Duplicate),
    (4, Kind::Flip),
    (3, Kind::FilesSource),
    (3, Kind::FilesDestination),
];

/// All kinds of faults of this engine.
pub(crate) fn kinds() -> impl Iterator<Item = Kind> {
    KINDS.iter().map(|(_, kind)| *kind)
}
