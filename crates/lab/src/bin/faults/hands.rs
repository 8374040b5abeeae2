//! Does the harm, and undoes it: from the threads of the link at a message, or from the stage at a moment.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Rlimit, Signal};

use crate::disk::Disk;
use crate::fault::{Fault, Kind, Moment};
use crate::process::Process;
use crate::proxy::{Cut, Link, Point, Way, Which, now};
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

/// Cancels a migration.
pub(crate) type Cancel = Arc<dyn Fn() + Send + Sync>;

/// Everything that can be harmed. All copies are the same.
#[derive(Clone)]
pub(crate) struct Hands {
    pub(crate) faults: Arc<Vec<Fault>>,
    pub(crate) link: Link,
    pub(crate) source: Process,
    pub(crate) destination: Process,
    /// The source's and the destination's.
    disks: Option<[Disk; 2]>,
    /// How the migration is cancelled, if not by a signal to its command.
    cancel: Option<Cancel>,
    state: Arc<Mutex<State>>,
    /// A strike has been done.
    done: Arc<Condvar>,
}

struct State {
    deeds: Vec<(Instant, Deed)>,
    migrate: Option<Process>,
    serve: Option<Process>,
    limits: Vec<(Process, Rlimit)>,
    /// Which faults have struck, and when.
    struck: Vec<(usize, Duration)>,
    /// How many are just being done.
    striking: usize,
    /// Which are not over.
    active: Vec<usize>,
    /// When something last broke or was repaired, if ever.
    changed: Option<Instant>,
    /// No fault strikes any more.
    over: bool,
    story: Vec<(Duration, String)>,
}

impl Hands {
    pub(crate) fn new(faults: &[Fault], link: Link, [source, destination]: [Process; 2]) -> Self {
        Self {
            faults: Arc::new(faults.to_vec()),
            link,
            source,
            destination,
            disks: None,
            cancel: None,
            state: Arc::new(Mutex::new(State {
                deeds: Vec::new(),
                migrate: None,
                serve: None,
                limits: Vec::new(),
                struck: Vec::new(),
                striking: 0,
                active: Vec::new(),
                changed: None,
                over: false,
                story: Vec::new(),
            })),
            done: Arc::default(),
        }
    }

    pub(crate) fn with_disks(mut self, disks: [Disk; 2]) -> Self {
        self.disks = Some(disks);
        self
    }

    pub(crate) fn with_cancel(mut self, cancel: Cancel) -> Self {
        self.cancel = Some(cancel);
        self
    }

    /// Makes the commands known, as they are started.
    pub(crate) fn reaches(&self, migrate: Option<Process>, serve: Process) {
        let mut state = self.lock();
        state.migrate = migrate;
        state.serve = Some(serve);
    }

    /// Has the faults strike at their moments, in a migration that takes this long undisturbed.
    pub(crate) fn arm(&self, clean: Duration) {
        let start = Instant::now();
        for (index, fault) in self.faults.iter().enumerate() {
            let point = match fault.moment {
                Moment::Time(part) => {
                    let at = start + clean.mul_f64(part as f64 / 1000.0);
                    self.lock().deeds.push((at, Deed::Strike(index)));
                    continue;
                }
                Moment::Bytes(bytes) => Point::Bytes(bytes),
                Moment::Before(word) => Point::Before(word),
                Moment::After(word) => Point::After(word),
            };
            let hands = self.clone();
            self.link.arm(point, Box::new(move || hands.strike(index)));
        }
    }

    /// Does the harm of a fault, now. A fault strikes once, and none when they are over.
    pub(crate) fn strike(&self, index: usize) {
        let fault = &self.faults[index];
        let mut state = self.lock();
        if state.over || state.struck.iter().any(|(struck, _)| *struck == index) {
            return;
        }
        state.struck.push((index, now()));
        state.striking += 1;
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
        self.lock().striking -= 1;
        self.done.notify_all();
    }

    fn harm(&self, index: usize, fault: &Fault, migrate: Option<Process>, serve: Option<Process>) {
        let (link, detail) = (&self.link, fault.detail);
        let signal = |process: &Option<Process>, signal| {
            if let Some(process) = process {
                process.signal(signal);
            }
        };
        match fault.kind {
            Kind::KillSource => self.source.kill(),
            Kind::KillDestination | Kind::RestartDestination => self.destination.kill(),
            Kind::KillMigrate => drop(migrate.inspect(Process::kill)),
            Kind::KillServe => drop(serve.inspect(Process::kill)),
            Kind::FreezeSource => self.source.signal(Signal::STOP),
            Kind::FreezeDestination => self.destination.signal(Signal::STOP),
            Kind::FreezeMigrate => signal(&migrate, Signal::STOP),
            Kind::FreezeServe => signal(&serve, Signal::STOP),
            Kind::Interrupt => match &self.cancel {
                Some(cancel) => cancel(),
                None => signal(&migrate, Signal::INT),
            },
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
            Kind::FilesSource => self.limit(Some(self.source.clone()), detail % 4),
            Kind::FilesDestination => self.limit(Some(self.destination.clone()), detail % 4),
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
        let disk = self.disks.as_ref().map(|disks| &disks[disk]);
        if let Some(Err(error)) = disk.map(|disk| disk.fill(pages)) {
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
            Kind::DiskFullSource | Kind::DiskFullDestination => {
                self.disks.iter().flatten().for_each(Disk::free);
            }
            kind if kind.is_of_link() => self.link.repair(),
            _ => {}
        }
    }

    /// No fault strikes from now on, and none is just striking; returns those that are not over.
    pub(crate) fn finish(&self) -> Vec<usize> {
        let mut state = self.lock();
        state.over = true;
        while state.striking > 0 {
            state = self
                .done
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        state.deeds.clear();
        state.active.clone()
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
        let state = self.lock();
        let struck = state.struck.iter();
        struck.map(|(index, _)| self.faults[*index].kind).collect()
    }

    /// When a fault of this kind struck first.
    pub(crate) fn struck_at(&self, kind: Kind) -> Option<Duration> {
        let state = self.lock();
        let mut struck = state.struck.iter();
        struck
            .find(|(index, _)| self.faults[*index].kind == kind)
            .map(|(_, at)| *at)
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
