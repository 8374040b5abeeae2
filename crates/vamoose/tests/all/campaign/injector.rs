//! Injects faults and repairs them: from the link's threads at a message, or from the scene's thread at a time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lab::middlebox::{Change, Direction, Flow};
use lab::process::{Process, now};
use lab::watched::Watched;
use rustix::process::{Rlimit, Signal};

use crate::campaign::disk::Disk;
use crate::campaign::fault::{Fault, Kind, Moment, Role};
use crate::campaign::link::{LinkHandle, Which};
use crate::campaign::report::{Ended, Report};
use crate::campaign::timeline::clock;

/// A scheduled action for the fault of this number.
#[derive(Clone, Copy, Debug)]
enum Deed {
    Strike(usize),
    /// Repeats the strike.
    Again(usize),
    Repair(usize),
    /// The scene starts another command.
    Command(usize),
}

/// Everything that faults are injected into. Copies share their state.
#[derive(Clone)]
pub(crate) struct Injector {
    pub(crate) faults: Arc<Vec<Fault>>,
    pub(crate) link: LinkHandle,
    pub(crate) source: Process,
    pub(crate) destination: Process,
    /// The disks of the source's and the destination's host.
    pub(crate) disks: [Disk; 2],
    pub(crate) state: Arc<Watched<State>>,
}

#[derive(Default)]
pub(crate) struct State {
    deeds: Vec<(Instant, Deed)>,
    migrate: Option<Process>,
    serve: Option<Process>,
    limits: Vec<(Process, Rlimit)>,
    /// The faults that have struck, with the time.
    struck: Vec<(usize, Duration)>,
    /// The number of strikes in progress.
    striking: usize,
    /// The faults that are not repaired.
    active: Vec<usize>,
    /// When a fault last struck or was repaired.
    changed: Option<Instant>,
    /// No more faults strike.
    over: bool,
    story: Vec<(Duration, String)>,
}

/// The interval of [`Kind::ResetAgain`].
pub(crate) const RESET_EVERY: Duration = Duration::from_millis(300);

/// The limit for a migration without faults: many times its longest timeout.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// All faults are repaired after this time.
pub(crate) const REPAIRED: Duration = Duration::from_secs(25);

/// A strike takes at most the seconds until a killed process is dead.
const STRIKING: Duration = Duration::from_secs(60);

impl Injector {
    /// Sets the commands once they are started.
    pub(crate) fn reaches(&self, migrate: Option<Process>, serve: Process) {
        let mut state = self.state.lock();
        state.migrate = migrate;
        state.serve = Some(serve);
    }

    /// Schedules the faults of a migration that takes `clean` undisturbed.
    pub(crate) fn arm(&self, clean: Duration) {
        let start = Instant::now();
        for (index, fault) in self.faults.iter().enumerate() {
            match fault.moment {
                Moment::Time(part) => {
                    let at = start + clean.mul_f64(part as f64 / 1000.0);
                    self.state.lock().deeds.push((at, Deed::Strike(index)));
                }
                Moment::At(point) => {
                    let injector = self.clone();
                    self.link
                        .arm(point, Box::new(move || injector.strike(index)));
                }
            }
        }
    }

    /// Strikes with a fault, once, unless no more faults strike.
    fn strike(&self, index: usize) {
        let fault = &self.faults[index];
        let mut state = self.state.lock();
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
            let over = (Instant::now() + lasts, Deed::Repair(index));
            state.deeds.push(over);
        }
        drop(state);
        self.tell(&format!("FAULT {fault}"));
        self.harm(index, fault);
        self.state.update(|state| state.striking -= 1);
    }

    fn harm(&self, index: usize, fault: &Fault) {
        let detail = fault.detail;
        let link = &self.link;
        match fault.kind {
            Kind::Kill(role) => drop(self.process(role).inspect(Process::kill)),
            Kind::Freeze(role) => self.signal(role, Signal::STOP),
            Kind::Interrupt => self.signal(Role::Migrate, Signal::INT),
            Kind::Cut => link.cut(which(detail), Change::Close),
            Kind::Reset => link.cut(which(detail), Change::Reset),
            Kind::ResetAgain => {
                link.cut(Which::All, Change::Reset);
                let again = (Instant::now() + RESET_EVERY, Deed::Again(index));
                self.state.lock().deeds.push(again);
            }
            Kind::Silence => link.set_flow(directions(detail), Flow::Hold),
            Kind::BlackHole => {
                link.set_flow(&[Direction::BOTH[usize::from(detail % 2 == 1)]], Flow::Drop)
            }
            Kind::DeadConnections => link.deaden(directions(detail)),
            Kind::Refuse => link.refuse(),
            Kind::Delay => {
                let late = Duration::from_millis(1 + detail % 40);
                link.set_flow(&Direction::BOTH, Flow::Late(late));
            }
            Kind::Duplicate => link.duplicate(which(detail)),
            Kind::Flip => link.flip(detail),
            Kind::Files(role) => self.limit(role, detail % 4),
            Kind::DiskFull(Role::Source) => self.fill(0, detail % 3),
            Kind::DiskFull(_) => self.fill(1, detail % 3),
            Kind::SameAgain | Kind::OtherHost => {
                let deed = (Instant::now(), Deed::Command(index));
                self.state.lock().deeds.push(deed);
            }
        }
    }

    fn harm_again(&self, index: usize) {
        if self.state.lock().active.contains(&index) {
            self.harm(index, &self.faults[index]);
        }
    }

    /// The process in a role, if it has been started.
    fn process(&self, role: Role) -> Option<Process> {
        match role {
            Role::Source => Some(self.source.clone()),
            Role::Destination => Some(self.destination.clone()),
            Role::Migrate => self.state.lock().migrate.clone(),
            Role::Serve => self.state.lock().serve.clone(),
        }
    }

    fn signal(&self, role: Role, signal: Signal) {
        if let Some(process) = self.process(role) {
            process.signal(signal);
        }
    }

    fn limit(&self, role: Role, more: u64) {
        let Some(process) = self.process(role) else {
            return;
        };
        // It fails for a process that has ended.
        if let Ok(before) = process.limit_files(more) {
            self.state.lock().limits.push((process, before));
        }
    }

    fn fill(&self, disk: usize, pages: u64) {
        if let Err(error) = self.disks[disk].fill(pages) {
            self.tell(&format!("{error:#}"));
        }
    }

    /// Repairs a fault, except what the scene has to do.
    fn repair(&self, index: usize) {
        let mut state = self.state.lock();
        state.active.retain(|active| *active != index);
        state.changed = Some(Instant::now());
        let limits = std::mem::take(&mut state.limits);
        drop(state);
        let kind = self.faults[index].kind;
        self.tell(&format!("over: {kind}"));
        for (process, limit) in limits {
            process.allow_files(limit);
        }
        match kind {
            Kind::Freeze(role) => self.signal(role, Signal::CONT),
            Kind::DiskFull(_) => self.disks.iter().for_each(Disk::free),
            Kind::BlackHole => {
                self.link.repair();
                self.link.cut(Which::All, Change::Reset);
            }
            kind if kind.is_of_link() => self.link.repair(),
            _ => {}
        }
    }

    /// Repairs all faults and lets no more strike. Returns the kinds whose repair the scene has to finish.
    pub(crate) fn finish(&self) -> Vec<Kind> {
        self.state.lock().over = true;
        self.state
            .wait(STRIKING, |state| (state.striking == 0).then_some(()));
        let mut state = self.state.lock();
        state.deeds.clear();
        let active = state.active.clone();
        drop(state);
        active.iter().for_each(|index| self.repair(*index));
        self.kinds(active.iter())
    }

    /// Carries out the actions that are due. Returns the kinds that the scene has to continue.
    pub(crate) fn work(&self) -> Vec<Kind> {
        let mut state = self.state.lock();
        let now = Instant::now();
        let due = state.deeds.extract_if(.., |(at, _)| *at <= now);
        let due: Vec<_> = due.map(|(_, deed)| deed).collect();
        drop(state);
        let mut rest = Vec::new();
        for deed in due {
            match deed {
                Deed::Strike(index) => self.strike(index),
                Deed::Again(index) => self.harm_again(index),
                Deed::Repair(index) => {
                    self.repair(index);
                    rest.push(index);
                }
                Deed::Command(index) => rest.push(index),
            }
        }
        self.kinds(rest.iter())
    }

    fn kinds<'a>(&self, indices: impl Iterator<Item = &'a usize>) -> Vec<Kind> {
        indices.map(|index| self.faults[*index].kind).collect()
    }

    pub(crate) fn struck(&self) -> Vec<Kind> {
        let state = self.state.lock();
        self.kinds(state.struck.iter().map(|(index, _)| index))
    }

    /// When a fault of this kind first struck.
    pub(crate) fn struck_at(&self, kind: Kind) -> Option<Duration> {
        let state = self.state.lock();
        let mut struck = state.struck.iter();
        let first = struck.find(|(index, _)| self.faults[*index].kind == kind);
        first.map(|(_, at)| *at)
    }

    /// Whether all faults are repaired.
    pub(crate) fn is_whole(&self) -> bool {
        self.state.lock().active.is_empty()
    }

    /// How long all faults have been repaired.
    pub(crate) fn whole_for(&self) -> Duration {
        let state = self.state.lock();
        match state.changed {
            _ if !state.active.is_empty() => Duration::ZERO,
            Some(changed) => changed.elapsed(),
            None => Duration::MAX,
        }
    }

    /// The report of an experiment in which no command was in doubt.
    pub(crate) fn report(&self, ended: Ended, took: Duration) -> Report {
        let struck = self.struck();
        let messages = self.link.messages().into_iter();
        Report {
            missed: self.faults.len() - struck.len(),
            struck,
            ended,
            messages: messages.map(|message| message.name).collect(),
            in_doubt: false,
            took,
        }
    }

    /// Adds to the story, which is printed after a violation.
    pub(crate) fn tell(&self, what: &str) {
        self.state.lock().story.push((now(), what.to_owned()));
    }

    /// The story with the link's messages and other events, sorted by time, a line each.
    pub(crate) fn story(&self, more: Vec<(Duration, String)>) -> Vec<String> {
        let mut story = [self.state.lock().story.clone(), more].concat();
        let messages = self.link.messages().into_iter();
        story.extend(messages.map(|message| (message.at, format!("link: {}", message.name))));
        story.push((now(), "(now)".to_owned()));
        story.sort();
        let line = |(at, what): &(Duration, String)| format!("{} {what}", clock(*at));
        story.iter().map(line).collect()
    }
}

/// The directions of a fault.
fn directions(detail: u64) -> &'static [Direction] {
    match detail % 3 {
        0 => &Direction::BOTH,
        1 => &[Direction::ToDialler],
        _ => &[Direction::ToListener],
    }
}

/// The connections of a fault.
fn which(detail: u64) -> Which {
    let number = usize::try_from(detail / 4).unwrap_or(0);
    match detail % 4 {
        0 => Which::All,
        1 => Which::Control,
        2 => Which::Data,
        _ => Which::OneOfData(number),
    }
}
