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
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use lab::qemu::Binary;

use crate::fault::{Choices, Kind, Role};
use crate::report::{Ended, Report, Trouble, broken};
use crate::table::Row;
use host::Host;
use judge::Holder;
use plan::Plan;
use scene::{Fixture, Scene};

/// What all jobs share.
pub(crate) struct Setting {
    program: PathBuf,
    binaries: Vec<Binary>,
    /// The sources without the defects of a QEMU before 8: it loses writes of a running guest, and see [`plan::BREAKS_QEMU_7`].
    sources: Vec<usize>,
    choices: Choices,
    /// The table of cuts, instead of random faults.
    pub(crate) table: Option<Vec<Row>>,
    clean: Duration,
}

/// A job's hosts, for its experiments.
pub(crate) struct Worker<'a> {
    setting: &'a Setting,
    fixture: Option<Fixture>,
}

impl Setting {
    /// Observes a migration without faults.
    pub(crate) fn new(
        program: PathBuf,
        binaries: Vec<Binary>,
        mut kinds: Vec<(u64, Kind)>,
        table: Option<Vec<Row>>,
    ) -> Result<Self> {
        let sources = newer_than_7(&binaries);
        if sources.is_empty() {
            kinds.retain(|(_, kind)| *kind != plan::BREAKS_QEMU_7);
        }
        let mut setting = Self {
            program,
            binaries,
            sources,
            // One in five of 1024 pages is zero, and the others hardly compress.
            choices: Choices::new(kinds, 2 << 20, 25),
            table,
            clean: Duration::ZERO,
        };
        if setting.table.is_some() {
            ensure!(
                !setting.sources.is_empty(),
                "the table needs a QEMU of version 8 or later"
            );
            return Ok(setting);
        }
        let rehearsed = setting.without_faults();
        let (words, clean) = rehearsed.context("a migration without faults")?;
        setting.choices.keep(&words);
        setting.clean = clean;
        Ok(setting)
    }

    fn without_faults(&self) -> Result<(Vec<String>, Duration)> {
        let mut fixture = self.fixture()?;
        let plan = Plan::without_faults();
        // The first runs warm caches.
        for _ in 0..2 {
            Scene::new(&plan, &mut fixture)?.rehearse()?;
        }
        let mut scene = Scene::new(&plan, &mut fixture)?;
        let begin = Instant::now();
        scene.rehearse()?;
        Ok((scene.message_names(), begin.elapsed()))
    }

    fn fixture(&self) -> Result<Fixture> {
        let host = || Host::new(&self.program, self.table.is_some());
        Ok(Fixture {
            program: self.program.clone(),
            binaries: self.binaries.clone(),
            hosts: [host()?, host()?, host()?],
            clean: self.clean,
        })
    }
}

/// Indices of the QEMUs of version 8 or later.
fn newer_than_7(binaries: &[Binary]) -> Vec<usize> {
    let all = binaries.iter().enumerate();
    let newer = all.filter(|(_, binary)| binary.version.major > 7);
    newer.map(|(index, _)| index).collect()
}

impl<'a> Worker<'a> {
    pub(crate) fn new(setting: &'a Setting) -> Self {
        Self {
            setting,
            fixture: None,
        }
    }

    pub(crate) fn plan(&self, seed: u64, number: u64) -> Plan {
        let Setting {
            binaries,
            sources,
            choices,
            table,
            ..
        } = self.setting;
        let row = table
            .as_ref()
            .and_then(|rows| rows.get(usize::try_from(number).ok()?));
        if let Some(row) = row {
            return Plan::of_row(number, row, sources, binaries.len());
        }
        Plan::draw(seed, number, choices, sources, binaries.len())
    }

    /// Runs an experiment. After a failed one, the next one gets new hosts.
    pub(crate) fn experiment(&mut self, plan: &Plan) -> Result<Report, Trouble> {
        let mut fixture = match self.fixture.take() {
            Some(fixture) => fixture,
            None => self.setting.fixture()?,
        };
        let report = Scene::new(plan, &mut fixture)?.play()?;
        self.fixture = Some(fixture);
        match plan.row.as_ref().and_then(|row| row.violation(&report)) {
            Some(kind) => broken(kind, plan.to_string()),
            None => Ok(report),
        }
    }
}

impl Scene<'_> {
    fn play(mut self) -> Result<Report, Trouble> {
        let begin = Instant::now();
        let played = self.try_play();
        let holder = played.map_err(|trouble| trouble.with_story(self.story()))?;
        let struck = self.injector.struck();
        Ok(Report {
            missed: self.plan.faults.len() - struck.len(),
            struck,
            ended: match holder {
                Holder::Instance(0) => Ended::Source,
                Holder::Instance(_) => Ended::Destination,
                Holder::Lost(why) => Ended::Lost(why),
            },
            downtime: self.downtime(),
            in_doubt: self.was_in_doubt(),
            took: begin.elapsed(),
        })
    }

    /// From the last pause of the guest at A to its resumption at B.
    fn downtime(&mut self) -> Option<Duration> {
        let [source, destination] = [0, 1].map(|index| self.instances[index].life());
        let (_, stopped) = *source.runs.last()?;
        let (resumed, _) = *destination.runs.first()?;
        resumed.checked_sub(stopped?)
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

    /// Runs a migration without faults.
    fn rehearse(&mut self) -> Result<()> {
        match self.try_play() {
            Ok(Holder::Instance(1)) => Ok(()),
            Ok(other) => bail!("the guest is at {other:?}"),
            Err(Trouble::Experiment(error)) => Err(error),
            Err(Trouble::Violation { kind, what, .. }) => {
                bail!("{kind}: {what}\n{}", self.story().join("\n"))
            }
        }
    }
}

/// The kinds of faults with their weights.
pub(crate) const KINDS: [(u64, Kind); 23] = [
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
    (6, Kind::Silence),
    (6, Kind::BlackHole),
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
