//! Does the harm, and undoes it: from the threads of the link at a message, or from the stage at a moment.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Rlimit, Signal};

use super::host::Disk;
use crate::fault::{Fault, Kind};
use crate::process::Process;
use crate::proxy::{Cut, Link, Way, Which, now};
use crate::timeline::clock;

/// What is left to do, and by when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Deed {
    /// The fault of this number strikes.
    Strike(usize),
    /// It is over.
    Repair(usize),
    /// A fault that only the stage can do: a further command.
    Command(usize),
}

/// Everything that can be harmed. All copies are the same.
#[derive(Clone)]
pub(crate) struct Hands {
    pub(crate) faults: Arc<Vec<Fault>>,
    pub(crate) link: Link,
    pub(crate) source: Process,
    pub(crate) destination: Process,
    /// The source's and the destination's.
    pub(crate) disks: [Disk; 2],
    state: Arc<Mutex<State>>,
}

struct State {
    deeds: Vec<(Instant, Deed)>,
    migrate: Option<Process>,
    serve: Option<Process>,
    limits: Vec<(Process, Rlimit)>,
    /// Which faults have struck.
    struck: Vec<usize>,
    /// Which are not over.
    active: Vec<usize>,
    /// When something last broke or was repaired, if ever.
    changed: Option<Instant>,
    /// No fault strikes any more.
    over: bool,
    story: Vec<(Duration, String)>,
}

impl Hands {
    pub(crate) fn new(
        faults: &[Fault],
        link: Link,
        [source, destination]: [Process; 2],
        disks: [Disk; 2],
    ) -> Self {
        Self {
            faults: Arc::new(faults.to_vec()),
            link,
            source,
            destination,
            disks,
            state: Arc::new(Mutex::new(State {
                deeds: Vec::new(),
                migrate: None,
                serve: None,
                limits: Vec::new(),
                struck: Vec::new(),
                active: Vec::new(),
                changed: None,
                over: false,
                story: Vec::new(),
            })),
        }
    }

    pub(crate) fn reaches(&self, migrate: Option<Process>, serve: Process) {
        let mut state = self.lock();
        state.migrate = migrate;
        state.serve = Some(serve);
    }

    /// Does the harm of a fault, now. A fault strikes once, and none when they are over.
    pub(crate) fn strike(&self, index: usize) {
        let fault = &self.faults[index];
        let mut state = self.lock();
        if state.over || state.struck.contains(&index) {
            return;
        }
        state.struck.push(index);
        if fault.kind.breaks() {
            state.changed = Some(Instant::now());
        }
        if let Some(lasts) = fault.lasts {
            state.active.push(index);
            state
                .deeds
                .push((Instant::now() + lasts, Deed::Repair(index)));
        }
        let (migrate, serve) = (state.migrate.clone(), state.serve.clone());
        drop(state);
        self.tell(&format!("FAULT {fault}"));
        self.harm(index, fault, migrate, serve);
    }

    fn harm(&self, index: usize, fault: &Fault, migrate: Option<Process>, serve: Option<Process>) {
        let (link, detail) = (&self.link, fault.detail);
        let signal = |process: Option<Process>, signal| {
            process.inspect(|process| process.signal(signal));
        };
        match fault.kind {
            Kind::KillSource => self.source.kill(),
            Kind::KillDestination => self.destination.kill(),
            Kind::KillMigrate => drop(migrate.inspect(Process::kill)),
            Kind::KillServe => drop(serve.inspect(Process::kill)),
            Kind::FreezeSource => self.source.signal(Signal::STOP),
            Kind::FreezeDestination => self.destination.signal(Signal::STOP),
            Kind::FreezeMigrate => signal(migrate, Signal::STOP),
            Kind::FreezeServe => signal(serve, Signal::STOP),
            Kind::Interrupt => signal(migrate, Signal::INT),
            Kind::Cut => link.cut(which(detail), Cut::Finished),
            Kind::Reset => link.cut(which(detail), Cut::Reset),
            Kind::Silence => link.silence(detail % 3 != 1, detail % 3 != 2),
            Kind::BlackHole => link.swallow(if detail % 2 == 0 {
                Way::There
            } else {
                Way::Back
            }),
            Kind::Refuse => link.refuse(),
            Kind::Delay => link.delay(Duration::from_millis(1 + detail % 40)),
            Kind::Duplicate => link.duplicate(which(detail)),
            Kind::Flip => link.flip(detail),
            Kind::FilesMigrate => self.limit(migrate, detail % 4),
            Kind::FilesServe => self.limit(serve, detail % 4),
            Kind::DiskFullSource => self.fill(0, detail % 3),
            Kind::DiskFullDestination => self.fill(1, detail % 3),
            Kind::SameAgain | Kind::OtherHost => {
                self.lock()
                    .deeds
                    .push((Instant::now(), Deed::Command(index)));
            }
        }
    }

    fn limit(&self, process: Option<Process>, more: u64) {
        let Some(process) = process else { return };
        // One that has ended needs no limit.
        if let Ok(before) = process.limit_files(more) {
            self.lock().limits.push((process, before));
        }
    }

    fn fill(&self, disk: usize, pages: u64) {
        if let Err(error) = self.disks[disk].fill(pages) {
            self.tell(&format!("{error:#}"));
        }
    }

    /// Undoes the harm of a fault, as far as it is done here.
    pub(crate) fn repair(&self, index: usize) {
        let mut state = self.lock();
        if !state.active.contains(&index) {
            return;
        }
        state.active.retain(|active| *active != index);
        state.changed = Some(Instant::now());
        let (migrate, serve) = (state.migrate.clone(), state.serve.clone());
        let limits = std::mem::take(&mut state.limits);
        drop(state);
        let fault = &self.faults[index];
        self.tell(&format!("over: {}", fault.kind.name()));
        for (process, limit) in limits {
            process.allow_files(limit);
        }
        let go_on = |process: Option<Process>| {
            process.inspect(|process| process.signal(Signal::CONT));
        };
        match fault.kind {
            Kind::FreezeSource => self.source.signal(Signal::CONT),
            Kind::FreezeDestination => self.destination.signal(Signal::CONT),
            Kind::FreezeMigrate => go_on(migrate),
            Kind::FreezeServe => go_on(serve),
            Kind::DiskFullSource => self.disks[0].free(),
            Kind::DiskFullDestination => self.disks[1].free(),
            kind if kind.is_of_link() => self.link.repair(),
            _ => {}
        }
    }

    /// No fault strikes from now on; returns those that are not over.
    pub(crate) fn finish(&self) -> Vec<usize> {
        let mut state = self.lock();
        state.over = true;
        state.deeds.clear();
        state.active.clone()
    }

    pub(crate) fn plan(&self, at: Instant, deed: Deed) {
        self.lock().deeds.push((at, deed));
    }

    /// Takes what is to be done by now.
    pub(crate) fn due(&self) -> Vec<Deed> {
        let mut state = self.lock();
        let now = Instant::now();
        let (due, later) = std::mem::take(&mut state.deeds)
            .into_iter()
            .partition::<Vec<_>, _>(|(at, _)| *at <= now);
        state.deeds = later;
        due.into_iter().map(|(_, deed)| deed).collect()
    }

    pub(crate) fn struck(&self) -> Vec<Kind> {
        self.lock()
            .struck
            .iter()
            .map(|index| self.faults[*index].kind)
            .collect()
    }

    /// Whether nothing is broken.
    pub(crate) fn is_whole(&self) -> bool {
        self.lock().active.is_empty()
    }

    /// For how long nothing has been broken.
    pub(crate) fn whole_for(&self) -> Duration {
        let state = self.lock();
        match state.changed {
            _ if !state.active.is_empty() => Duration::ZERO,
            Some(changed) => changed.elapsed(),
            None => Duration::MAX,
        }
    }

    /// Adds to the story, which is told if something goes wrong.
    pub(crate) fn tell(&self, what: &str) {
        self.lock().story.push((now(), what.to_owned()));
    }

    pub(crate) fn story(&self) -> Vec<(Duration, String)> {
        self.lock().story.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Which connections are harmed.
fn which(detail: u64) -> Which {
    let number = usize::try_from(detail / 4).unwrap_or(0);
    match detail % 4 {
        0 => Which::All,
        1 => Which::Control,
        2 => Which::Data,
        _ => Which::OneOfData(number),
    }
}

/// A line of a story.
pub(crate) fn line((at, what): &(Duration, String)) -> String {
    format!("{} {what}", clock(*at))
}
