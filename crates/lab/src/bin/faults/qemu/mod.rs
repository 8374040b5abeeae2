//! Two stock QEMUs, `vamoose serve` and `vamoose migrate`, and everything that can go wrong between them.
//!
//! ```text
//!  host A: QEMU A <── vamoose migrate ──> link ──> vamoose serve ──> QEMU B    host B
//!                                                  vamoose serve ──> QEMU C    host C
//! ```
//! The guest counts in its memory (see [`lab::counter`]).

mod actor;
mod chapters;
mod host;
mod judge;
mod plan;
mod stage;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use lab::counter::{self, Image};
use lab::qemu::Binary;

use crate::fault::Kind;
use crate::program::Program;
use crate::report::{Ended, Report, Trouble, missed};
use crate::sandbox;
use host::Host;
use judge::Holder;
use plan::{CONTENTS, Choices, Plan, RAM};
use stage::{Props, Stage, firmware};

/// What all jobs know.
#[derive(Clone)]
pub(crate) struct Setting {
    program: Arc<Program>,
    binaries: Vec<Binary>,
    choices: Choices,
    clean: Duration,
}

/// One job's hosts, for one experiment after the other.
pub(crate) struct Bench {
    setting: Setting,
    props: Option<Props>,
}

/// Messages at which faults strike, if a migration has them.
const WORDS: [&str; 9] = [
    "request:prepare",
    "answer:preparing",
    "answer:prepared",
    "answer:loaded",
    "request:commit",
    "answer:receiving",
    "answer:starting",
    "answer:running",
    "request:settled",
];

impl Setting {
    /// Looks how a migration goes without faults.
    pub(crate) fn new(
        program: Program,
        binaries: &[Binary],
        kinds: &[Kind],
        short: bool,
    ) -> Result<Self> {
        let mut setting = Self {
            program: Arc::new(program),
            binaries: binaries.to_vec(),
            choices: Choices {
                versions: binaries.len(),
                words: WORDS.to_vec(),
                kinds: Vec::new(),
                short,
            },
            clean: Duration::ZERO,
        };
        let has_disk = sandbox::is_inside();
        setting.choices.kinds = KINDS
            .iter()
            .filter(|(_, kind)| kinds.contains(kind))
            .filter(|(_, kind)| has_disk || !kind.is_of_disk())
            .copied()
            .collect();
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

    fn without_faults(&self) -> Result<(Vec<String>, Duration)> {
        let mut props = self.props()?;
        let plan = Plan::without_faults();
        // The first one finds nothing in caches.
        for _ in 0..2 {
            Stage::new(&plan, &mut props)?.rehearse()?;
        }
        let mut stage = Stage::new(&plan, &mut props)?;
        let begin = Instant::now();
        stage.rehearse()?;
        Ok((stage.words(), begin.elapsed()))
    }

    fn props(&self) -> Result<Props> {
        let folder = tempfile::TempDir::new().context("creating a folder for the firmware")?;
        counter::write_firmware(&firmware(folder.path()))?;
        let images = (0..CONTENTS).map(|content| Image::new(RAM, content));
        let host = || Host::new(self.program.clone());
        Ok(Props {
            program: self.program.clone(),
            binaries: self.binaries.clone(),
            firmware: folder,
            images: images.collect::<Result<_>>()?,
            hosts: [host()?, host()?, host()?],
            clean: self.clean,
        })
    }
}

impl Bench {
    pub(crate) fn new(setting: &Setting) -> Self {
        Self {
            setting: setting.clone(),
            props: None,
        }
    }

    /// Makes an experiment. After one that went wrong the next one has hosts of its own.
    pub(crate) fn experiment(&mut self, plan: &Plan) -> Result<Report, Trouble> {
        let mut props = match self.props.take() {
            Some(props) => props,
            None => self.setting.props()?,
        };
        let report = Stage::new(plan, &mut props)?.play()?;
        self.props = Some(props);
        Ok(report)
    }
}

impl Stage<'_> {
    fn play(mut self) -> Result<Report, Trouble> {
        let begin = Instant::now();
        let played = self.try_play();
        let holder = played.map_err(|trouble| trouble.with_story(self.story()))?;
        let struck = self.hands.struck();
        Ok(Report {
            missed: missed(&self.plan.faults, &struck),
            struck,
            ended: match holder {
                Holder::Actor(0) => Ended::Source,
                Holder::Actor(_) => Ended::Destination,
                Holder::Lost(why) => Ended::Lost(why),
            },
            in_doubt: self.was_in_doubt(),
            left_over: self.left_over,
            took: begin.elapsed(),
        })
    }

    fn try_play(&mut self) -> Result<Holder, Trouble> {
        self.run_with_faults()?;
        self.expect_answers()?;
        self.run_until_definite()?;
        let holder = self.judge()?;
        self.go_on(&holder)?;
        Ok(holder)
    }

    /// A migration without faults.
    fn rehearse(&mut self) -> Result<()> {
        match self.try_play() {
            Ok(Holder::Actor(1)) => Ok(()),
            Ok(other) => bail!("the guest is at {other:?}"),
            Err(Trouble::Experiment(error)) => Err(error),
            Err(Trouble::Violation(violation)) => {
                bail!(
                    "{}: {}\n{}",
                    violation.kind,
                    violation.what,
                    self.story().join("\n")
                )
            }
        }
    }
}

/// How often each kind of fault is drawn, of all.
const KINDS: [(u64, Kind); 23] = [
    (4, Kind::KillSource),
    (6, Kind::KillDestination),
    (8, Kind::KillMigrate),
    (8, Kind::KillServe),
    (3, Kind::FreezeSource),
    (4, Kind::FreezeDestination),
    (4, Kind::FreezeMigrate),
    (5, Kind::FreezeServe),
    (6, Kind::Interrupt),
    (7, Kind::Cut),
    (7, Kind::Reset),
    (6, Kind::Silence),
    (6, Kind::BlackHole),
    (6, Kind::Refuse),
    (3, Kind::Delay),
    (5, Kind::Duplicate),
    (4, Kind::Flip),
    (4, Kind::DiskFullSource),
    (4, Kind::DiskFullDestination),
    (3, Kind::FilesMigrate),
    (3, Kind::FilesServe),
    (4, Kind::SameAgain),
    (4, Kind::OtherHost),
];

/// All kinds of faults of this engine.
pub(crate) fn kinds() -> impl Iterator<Item = Kind> {
    KINDS.iter().map(|(_, kind)| *kind)
}
