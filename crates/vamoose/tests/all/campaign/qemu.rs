//! Two stock QEMUs, `vamoose serve` and `vamoose migrate`, and the faults between them.
//!
//! ```text
//!  host A: QEMU A <── vamoose migrate ──> link ──> vamoose serve ──> QEMU B    host B
//!                                                  vamoose serve ──> QEMU C    host C
//! ```
//! The guest counts in its memory and on its disk, an image that all hosts open, see [`lab::writer`].

mod aftermath;
mod host;
mod instance;
mod judge;
mod plan;
mod scene;

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use lab::qemu::Binary;

use crate::campaign::fault::{Choices, Fault, Kind, Role};
use crate::campaign::report::{Ended, Report, Trouble};
use host::Host;
use judge::Holder;
use plan::Plan;
use scene::Scene;

/// What all experiments share.
pub(crate) struct Setting {
    program: PathBuf,
    binaries: Vec<Binary>,
    /// The sources without the defects of a QEMU before 8: it loses writes of a running guest, and see [`plan::BREAKS_QEMU_7`].
    sources: Vec<usize>,
    choices: Choices,
    clean: Duration,
    /// The hosts of earlier experiments, whose servers run on.
    hosts: Mutex<Vec<Hosts>>,
}

/// An experiment that has been made.
pub(crate) struct Experiment {
    /// Everything that was random.
    pub(crate) plan: String,
    pub(crate) faults: Vec<Fault>,
    pub(crate) result: Result<Report, Trouble>,
}

/// The source's host, the destination's, and another one.
type Hosts = [Host; 3];

impl Setting {
    /// Observes a migration without faults.
    pub(crate) fn new(
        program: PathBuf,
        binaries: Vec<Binary>,
        mut kinds: Vec<(u64, Kind)>,
    ) -> Result<Self> {
        let newer = |index: &usize| binaries[*index].version.major > 7;
        let sources: Vec<_> = (0..binaries.len()).filter(newer).collect();
        if sources.is_empty() {
            kinds.retain(|(_, kind)| *kind != plan::BREAKS_QEMU_7);
        }
        let mut setting = Self {
            program,
            binaries,
            sources,
            // One in five of 1024 pages is zero, and the others hardly compress.
            choices: Choices::new(kinds, 2 << 20, 25),
            clean: Duration::ZERO,
            hosts: Mutex::default(),
        };
        let report = setting.rehearse()?;
        setting.choices.keep(&report.messages);
        setting.clean = report.took;
        Ok(setting)
    }

    /// Runs the experiment of this number.
    pub(crate) fn experiment(&self, seed: u64, number: u64) -> Experiment {
        let plan = Plan::draw(
            seed,
            number,
            &self.choices,
            &self.sources,
            self.binaries.len(),
        );
        Experiment {
            result: self.play(&plan),
            plan: plan.to_string(),
            faults: plan.faults,
        }
    }

    /// Observes a migration without faults. An earlier one warms caches.
    fn rehearse(&self) -> Result<Report> {
        let migrate = || self.play(&Plan::without_faults());
        let report = migrate()
            .and_then(|_| migrate())
            .map_err(|trouble| match trouble {
                Trouble::Violation { kind, what, story } => {
                    anyhow!("{kind}: {what}\n{}", story.join("\n"))
                }
                Trouble::Experiment(error) => error,
            })
            .context("a migration without faults")?;
        match report.ended {
            Ended::Destination => Ok(report),
            ended => bail!("after a migration without faults the guest is {ended}"),
        }
    }

    /// Runs an experiment. A failed one leaves its hosts to no other.
    fn play(&self, plan: &Plan) -> Result<Report, Trouble> {
        let pool = || self.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        let host = || Host::new(&self.program);
        let earlier = pool().pop();
        let mut hosts = match earlier {
            Some(hosts) => hosts,
            None => [host()?, host()?, host()?],
        };
        let report = Scene::new(plan, self, &mut hosts)?.play()?;
        pool().push(hosts);
        Ok(report)
    }
}

impl Scene<'_> {
    fn play(mut self) -> Result<Report, Trouble> {
        let begin = Instant::now();
        let played = self.try_play();
        let holder = played.map_err(|trouble| trouble.with_story(self.story()))?;
        let ended = match holder {
            Holder::Instance(0) => Ended::Source,
            Holder::Instance(_) => Ended::Destination,
            Holder::Lost(why) => Ended::Lost(why),
        };
        Ok(Report {
            in_doubt: self.was_in_doubt(),
            ..self.injector.report(ended, begin.elapsed())
        })
    }

    fn try_play(&mut self) -> Result<Holder, Trouble> {
        self.run_with_faults()?;
        self.expect_answers()?;
        self.run_until_definite()?;
        let holder = self.judge()?;
        let last = self.go_on(&holder)?;
        self.check_disk(&last)?;
        Ok(holder)
    }
}

/// The kinds of faults with their weights.
pub(crate) const KINDS: [(u64, Kind); 25] = [
    (4, Kind::Kill(Role::Source)),
    (6, Kind::Kill(Role::Destination)),
    (8, Kind::Kill(Role::Migrate)),
    (8, Kind::Kill(Role::Serve)),
    (3, Kind::Freeze(Role::Source)),
    (4, Kind::Freeze(Role::Destination)),
    (4, Kind::Freeze(Role::Migrate)),
    (5, Kind::Freeze(Role::Serve)),
    (6, Kind::Interrupt),
    (7, Kind::Cut),
    (7, Kind::Reset),
    (4, Kind::ResetAgain),
    (6, Kind::Silence),
    (6, Kind::BlackHole),
    (4, Kind::DeadConnections),
    (6, Kind::Refuse),
    (3, Kind::Delay),
    (5, Kind::Duplicate),
    (4, Kind::Flip),
    (4, Kind::DiskFull(Role::Source)),
    (4, Kind::DiskFull(Role::Destination)),
    (3, Kind::Files(Role::Migrate)),
    (3, Kind::Files(Role::Serve)),
    (4, Kind::SameAgain),
    (4, Kind::OtherHost),
];
