//! The world: virtual time, what there is in it, and what must never happen.
//!
//! Events wait in one queue, ordered by their time and then by their number, so that a run depends on nothing but its options.

use std::{
    collections::BTreeMap,
    fmt,
    time::{Duration, Instant},
};

use handover::{AttemptId, DestinationState, GuestLocation};
use serde::{Serialize, de::DeserializeOwned};

use crate::{
    destination::{AtDestination, Serve},
    mutants::Mutant,
    net::{Connection, Link},
    options::{Fault, Moment, Options},
    people::{Evacuation, Guest},
    qemu::{Qemu, Status},
    random::Random,
    session::{CLIENT, SERVER, Session},
    source::Migrate,
    trace::Trace,
};

pub(crate) struct World<'a> {
    pub(crate) options: &'a Options,
    pub(crate) now: Duration,
    /// What the shipped code takes for the beginning of time.
    pub(crate) epoch: Instant,
    queue: BTreeMap<(Duration, u64), Event>,
    number: u64,
    pub(crate) random: Random,
    pub(crate) trace: Trace,
    pub(crate) hosts: Vec<Host>,
    pub(crate) guests: Vec<Guest>,
    pub(crate) qemus: Vec<Qemu>,
    pub(crate) migrates: Vec<Migrate>,
    pub(crate) serves: Vec<Serve>,
    pub(crate) sessions: Vec<Session>,
    pub(crate) connections: Vec<Connection>,
    pub(crate) links: Vec<Link>,
    pub(crate) evacuation: Option<Evacuation<'a>>,
    /// When the first fault came.
    pub(crate) disturbed: Duration,
    /// Faults that wait for their moment.
    armed: Vec<(Moment, Fault)>,
    /// Processes that are to be killed before their next action, and how long they are gone.
    doomed: Vec<(Process, Duration)>,
    /// When the last fault ended that a session need not survive.
    pub(crate) troubled: Duration,
    pub(crate) flips: usize,
    pub(crate) wrong: Option<String>,
    pub(crate) counts: Counts,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// What comes next on a connection to an end.
    Arrives(usize, usize),
    /// An end of a session looks after its streams.
    Looks(usize, usize),
    /// A client dials for a stream, or gives up an attempt.
    Dials(usize, usize),
    DialIsLate(usize, usize, usize),
    Migrate(usize),
    StillReceiving(usize, AttemptId),
    LooksAgain(usize, AttemptId),
    /// A guest writes.
    Writes(usize),
    /// A person looks at a guest.
    Person(usize),
    Evacuates,
    Fault(usize),
    Happens(Fault),
    /// The next reset of a storm, until it ends.
    Resets(usize, Duration, Duration),
    /// `serve` is started.
    Starts(usize),
}

#[derive(Default)]
pub(crate) struct Host {
    /// The server that runs.
    pub(crate) serve: Option<usize>,
    pub(crate) is_up: bool,
    pub(crate) refuses_until: Duration,
    pub(crate) full_until: Duration,
    /// Entries by role and attempt, each with when it was written and what was there before.
    journal: BTreeMap<(Role, AttemptId), Entry>,
}

struct Entry {
    text: Vec<u8>,
    written: Duration,
    before: Option<Vec<u8>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Role {
    Source,
    Destination,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Process {
    Migrate(usize),
    Serve(usize),
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) commands: u64,
    pub(crate) moved: u64,
    pub(crate) in_doubt: u64,
    pub(crate) restarted: u64,
    pub(crate) reconnects: u64,
    pub(crate) events: u64,
    pub(crate) faults: BTreeMap<String, u64>,
}

impl Counts {
    pub(crate) fn add(&mut self, other: &Self) {
        self.commands += other.commands;
        self.moved += other.moved;
        self.in_doubt += other.in_doubt;
        self.restarted += other.restarted;
        self.reconnects += other.reconnects;
        self.events += other.events;
        for (kind, number) in &other.faults {
            *self.faults.entry(kind.clone()).or_default() += number;
        }
    }
}

/// Data that were not written to a disk explicitly are there after this time.
const WRITTEN_BACK: Duration = Duration::from_secs(30);

impl<'a> World<'a> {
    pub(crate) fn new(options: &'a Options, is_kept: bool) -> Self {
        let mut world = Self {
            options,
            now: Duration::ZERO,
            epoch: Instant::now(),
            queue: BTreeMap::new(),
            number: 0,
            random: Random::new(!options.seed),
            trace: Trace::new(is_kept),
            hosts: Vec::new(),
            guests: Vec::new(),
            qemus: Vec::new(),
            migrates: Vec::new(),
            serves: Vec::new(),
            sessions: Vec::new(),
            connections: Vec::new(),
            links: Vec::new(),
            evacuation: None,
            disturbed: Duration::MAX,
            armed: Vec::new(),
            doomed: Vec::new(),
            troubled: Duration::ZERO,
            flips: 0,
            wrong: None,
            counts: Counts::default(),
        };
        for host in 0..options.hosts {
            world.hosts.push(Host {
                is_up: true,
                ..Host::default()
            });
            world.start_serve(host);
        }
        world.lay_links();
        world.settle_people();
        for (number, (at, ..)) in options.faults.iter().enumerate() {
            world.at(*at, Event::Fault(number));
        }
        world
    }

    /// Runs until all is done, or something is wrong.
    pub(crate) fn run(&mut self) {
        let end = self.options.calm + PATIENCE;
        while self.wrong.is_none() {
            let Some(((at, _), event)) = self.queue.pop_first() else {
                break;
            };
            if at > end {
                break;
            }
            self.now = at;
            self.counts.events += 1;
            self.happens(event);
        }
        if self.wrong.is_none() {
            self.check_the_end();
        }
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Arrives(connection, end) => self.arrives(connection, end),
            Event::Looks(session, end) => self.looks(session, end),
            Event::Dials(session, stream) => self.dial(session, stream),
            Event::DialIsLate(session, stream, connection) => {
                self.dial_is_late(session, stream, connection);
            }
            Event::Migrate(id) => self.advance_migrate(id),
            Event::StillReceiving(serve, attempt) => self.still_receiving(serve, attempt),
            Event::LooksAgain(serve, attempt) => self.looks_at_cut(serve, attempt),
            Event::Writes(guest) => self.writes(guest),
            Event::Person(guest) => self.person(guest),
            Event::Evacuates => self.evacuates(),
            Event::Fault(number) => self.is_due(number),
            Event::Happens(fault) => self.fault(fault),
            Event::Resets(link, every, until) => {
                self.cut(link, &[CLIENT, SERVER]);
                if self.now + every < until {
                    self.after(every, Event::Resets(link, every, until));
                }
            }
            Event::Starts(host) => self.start_serve(host),
        }
    }

    pub(crate) fn at(&mut self, at: Duration, event: Event) {
        self.number += 1;
        self.queue.insert((at.max(self.now), self.number), event);
    }

    pub(crate) fn after(&mut self, time: Duration, event: Event) {
        self.at(self.now + time, event);
    }

    pub(crate) fn instant(&self) -> Instant {
        self.epoch + self.now
    }

    pub(crate) fn is_calm(&self) -> bool {
        self.now >= self.options.calm
    }

    pub(crate) fn has(&self, mutant: Mutant) -> bool {
        self.options.mutant == Some(mutant)
    }

    pub(crate) fn note(&mut self, what: fmt::Arguments<'_>) {
        self.trace.note(self.now, what);
    }

    /// Something has happened that must never happen. The first counts.
    pub(crate) fn fail(&mut self, what: impl Into<String>) {
        let what = what.into();
        self.note(format_args!("WRONG: {what}"));
        self.wrong.get_or_insert(what);
    }

    /// A process is about to do what is told. Whether it is killed instead.
    pub(crate) fn is_killed(&mut self, process: Process, told: &str) -> bool {
        if self.is_calm() {
            return false;
        }
        let is_due = |((word, before), _): &mut (Moment, Fault)| {
            let is_it = told.contains(*word);
            let is_due = is_it && *before == 0;
            *before -= u32::from(is_it && !is_due);
            is_due
        };
        let due: Vec<_> = self.armed.extract_if(.., is_due).collect();
        for (_, fault) in due {
            let fault = match self.command_with(process) {
                Some(id) => {
                    let it = &self.migrates[id];
                    fault.aimed(it.guest, [it.host, it.to])
                }
                None => fault,
            };
            match fault {
                // Now, and not when the action has been carried out.
                Fault::KillMigrate(_) if matches!(process, Process::Migrate(_)) => {
                    self.counts(fault);
                    self.doomed.push((process, Duration::ZERO));
                }
                Fault::KillMigrate(_)
                | Fault::KillServe(..)
                | Fault::KillBoth(..)
                | Fault::SendOn(..) => {
                    self.fault(fault);
                }
                _ => self.after(Duration::ZERO, Event::Happens(fault)),
            }
        }
        if let Process::Serve(id) = process
            && !self.serves[id].is_alive
        {
            return true;
        }
        let doomed = self
            .doomed
            .iter()
            .position(|(doomed, _)| *doomed == process);
        let Some(at) = doomed else {
            return false;
        };
        let (_, back) = self.doomed.remove(at);
        match process {
            Process::Migrate(id) => self.kill_migrate(id),
            Process::Serve(id) => self.kill_serve(id, back),
        }
        true
    }

    /// The command whose process this is, or that has one with a server.
    fn command_with(&self, process: Process) -> Option<usize> {
        match process {
            Process::Migrate(id) => Some(id),
            Process::Serve(id) => (0..self.migrates.len()).rev().find(|it| {
                let it = &self.migrates[*it];
                it.is_alive() && self.hosts[it.to].serve == Some(id)
            }),
        }
    }

    // Journals.

    /// Writes an entry. A journal that is full keeps what it has.
    pub(crate) fn write_journal(
        &mut self,
        host: usize,
        key: (Role, AttemptId),
        record: &impl Serialize,
    ) -> Result<(), String> {
        if self.now < self.hosts[host].full_until && !self.is_calm() {
            return match self.has(Mutant::IgnoresFailedWrites) {
                true => Ok(()),
                false => Err("no space".to_owned()),
            };
        }
        let text = serde_json::to_vec(record).map_err(|error| error.to_string())?;
        self.trace.mix(text.len() as u64);
        let (journal, written) = (&mut self.hosts[host].journal, self.now);
        let before = journal.remove(&key).map(|entry| entry.text);
        let entry = Entry {
            text,
            written,
            before,
        };
        journal.insert(key, entry);
        Ok(())
    }

    /// The entries of a role, oldest first where records say when they began.
    pub(crate) fn journal<T: DeserializeOwned>(&self, host: usize, role: Role) -> Vec<T> {
        let entries = self.hosts[host].journal.iter();
        let of_role = entries.filter(|((of, _), _)| *of == role);
        of_role
            .map(|(_, entry)| serde_json::from_slice(&entry.text).unwrap())
            .collect()
    }

    pub(crate) fn entry<T: DeserializeOwned>(
        &self,
        host: usize,
        key: (Role, AttemptId),
    ) -> Option<T> {
        let entry = self.hosts[host].journal.get(&key)?;
        Some(serde_json::from_slice(&entry.text).unwrap())
    }

    /// A host comes up again after a loss of power: what it has of its journal.
    pub(crate) fn recover_journal(&mut self, host: usize) {
        let (now, syncs) = (self.now, !self.has(Mutant::ForgetsFsync));
        if !self.options.keeps_journals {
            self.hosts[host].journal.clear();
            return;
        }
        self.hosts[host].journal.retain(|_, entry| {
            let before = entry.before.take();
            let is_there = syncs || now > entry.written + WRITTEN_BACK;
            if !is_there {
                entry.text = before.unwrap_or_default();
            }
            !entry.text.is_empty()
        });
    }

    // Faults.

    /// A fault is due. What would hit nothing waits for the next command.
    fn is_due(&mut self, number: usize) {
        let (_, goes_with, fault) = self.options.faults[number];
        let is_idle = !self.migrates.iter().rev().take(8).any(Migrate::is_alive);
        let is_of_people = matches!(
            fault,
            Fault::Again(_) | Fault::Settle(_) | Fault::NewQemu(_) | Fault::OtherTool(_)
        );
        match goes_with {
            _ if self.is_calm() => {}
            Some(moment) => self.armed.push((moment, fault)),
            None if is_idle && !is_of_people => {
                let soon = self.random.millis(200, 3_000);
                self.after(soon, Event::Fault(number));
            }
            None => self.fault(fault),
        }
    }

    fn fault(&mut self, fault: Fault) {
        self.counts(fault);
        let (hosts, pairs) = (self.hosts.len(), self.pairs());
        let until = |time: Duration| (self.now + time).min(self.options.calm);
        match fault {
            Fault::Reset(link) => self.cut(link % pairs, &[CLIENT, SERVER]),
            Fault::HalfOpen(link, end) => {
                self.cut(link % pairs, &[end]);
                self.troubles(self.now);
            }
            Fault::Swallow(link) => {
                self.cut(link % pairs, &[]);
                self.troubles(self.now);
            }
            Fault::Silence(path, time) => {
                let (path, until) = (path % self.links.len(), until(time));
                self.links[path].silent_until = until;
                self.troubles(until);
            }
            Fault::Storm(link, every, time) => {
                let until = until(time);
                self.after(
                    Duration::ZERO,
                    Event::Resets(link % pairs, every.max(self.options.delay * 12), until),
                );
            }
            Fault::Slow(path, divisor, time) => {
                let (path, until) = (path % self.links.len(), until(time));
                self.links[path].slow = (divisor, until);
                self.troubles(until);
            }
            Fault::Late(any, end, time) => {
                let until = until(time);
                if let Some(connection) = self.some_connection(any) {
                    self.connections[connection].late_until[end] = until;
                    self.troubles(until);
                }
            }
            Fault::Corrupt(any, end) => {
                if let Some(connection) = self.some_connection(any) {
                    self.flips += 1;
                    self.connections[connection].flips[end] = Some(any % 4);
                }
            }
            Fault::Refuse(host, time) => {
                let until = until(time);
                self.hosts[host % hosts].refuses_until = until;
                self.troubles(until);
            }
            Fault::KillMigrate(any) => {
                if let Some(id) = self.some_migrate(any) {
                    self.doomed.push((Process::Migrate(id), Duration::ZERO));
                }
            }
            Fault::KillServe(host, back) => {
                if let Some(id) = self.hosts[host % hosts].serve {
                    self.doomed.push((Process::Serve(id), back));
                }
            }
            Fault::KillSource(any) => {
                let home = self.guests[any % self.guests.len()].home;
                self.kill_qemu(home, "a fault");
            }
            Fault::KillDestination(any) => {
                let guest = any % self.guests.len();
                let home = self.guests[guest].home;
                let other = self.of_guest(guest).filter(|q| *q != home).last();
                if let Some(other) = other {
                    self.kill_qemu(other, "a fault");
                }
            }
            Fault::KillBoth(host, _, back) | Fault::SendOn(host, _, back) => {
                let host = host % hosts;
                let home = |q: usize| self.guests[self.qemus[q].guest].home == q;
                let on_host = (0..self.qemus.len()).rev();
                let mut on_host =
                    on_host.filter(|q| self.qemus[*q].host == host && self.qemus[*q].is_alive);
                // Also the guest's home, if it has just begun to be.
                let last = on_host
                    .next()
                    .filter(|q| !home(*q) || self.qemus[*q].outgoing.is_none());
                if let Some(id) = self.hosts[host].serve {
                    self.kill_serve(id, back);
                }
                match (last, fault) {
                    (Some(last), Fault::KillBoth(_, of_home, _)) => {
                        let home = self.guests[self.qemus[last].guest].home;
                        self.kill_qemu(if of_home { home } else { last }, "a fault");
                    }
                    (Some(last), Fault::SendOn(_, true, _)) => {
                        self.other_tool_moves(self.qemus[last].guest, host);
                    }
                    (Some(last), _) => self.halt(last),
                    _ => {}
                }
            }
            Fault::Crash(host, back) => self.crash(host % hosts, back),
            Fault::Journal(host, time) => self.hosts[host % hosts].full_until = until(time),
            Fault::Monitor(any, of_home, time) => {
                let (qemu, until) = (self.some_qemu(any, of_home), until(time));
                self.qemus[qemu].busy_until = until;
            }
            Fault::Break(any, is_done) => {
                let qemu = self.some_qemu(any, false);
                self.qemus[qemu].breaks = Some(is_done);
            }
            Fault::Stuck(any, time) => {
                let (qemu, until) = (self.some_qemu(any, false), until(time));
                self.qemus[qemu].stuck_until = until;
            }
            Fault::Numb(any) => {
                let qemu = self.some_qemu(any, true);
                self.qemus[qemu].is_numb = true;
                self.relay_ends(qemu);
            }
            Fault::Pause(any)
            | Fault::Continue(any)
            | Fault::Halt(any)
            | Fault::Cancel(any)
            | Fault::Again(any)
            | Fault::Settle(any)
            | Fault::OtherTool(any)
            | Fault::NewQemu(any) => self.people_do(fault, any % self.guests.len()),
        }
    }

    fn counts(&mut self, fault: Fault) {
        *self.counts.faults.entry(fault.kind()).or_default() += 1;
        self.disturbed = self.disturbed.min(self.now);
        self.note(format_args!("FAULT {fault:?}"));
    }

    pub(crate) fn troubles(&mut self, until: Duration) {
        self.troubled = self.troubled.max(until);
    }

    /// A host loses its power: nothing on it says goodbye.
    fn crash(&mut self, host: usize, back: Duration) {
        if !std::mem::replace(&mut self.hosts[host].is_up, false) {
            return;
        }
        for id in 0..self.migrates.len() {
            if self.migrates[id].host == host {
                self.silence_of(Process::Migrate(id));
                self.kill_migrate(id);
            }
        }
        if let Some(id) = self.hosts[host].serve {
            self.silence_of(Process::Serve(id));
            self.kill_serve(id, back);
        }
        for qemu in 0..self.qemus.len() {
            if self.qemus[qemu].host == host {
                self.qemus[qemu].stuck_until = Duration::ZERO;
                self.kill_qemu(qemu, "its host has no power");
            }
        }
        self.recover_journal(host);
        let back = (self.now + back).min(self.options.calm);
        self.troubles(back);
    }

    /// What the destination of a command's attempt knows of it.
    fn at_destination(&self, id: usize) -> Option<AtDestination> {
        let record = self.migrates[id].record.as_ref()?;
        self.entry(record.to, (Role::Destination, record.attempt))
    }

    /// Whether the destination of a command's attempt has been told to commit.
    fn was_committed(&self, id: usize) -> bool {
        self.at_destination(id).is_some_and(|it| {
            matches!(
                it.state,
                DestinationState::Starting { .. }
                    | DestinationState::Running
                    | DestinationState::Ended { .. }
            )
        })
    }

    fn some_migrate(&mut self, any: usize) -> Option<usize> {
        let alive: Vec<_> = (0..self.migrates.len())
            .filter(|id| self.migrates[*id].is_alive())
            .collect();
        (!alive.is_empty()).then(|| alive[any % alive.len()])
    }

    /// The QEMU that has a guest, or the last that was started for it.
    fn some_qemu(&self, any: usize, of_home: bool) -> usize {
        let guest = any % self.guests.len();
        let home = self.guests[guest].home;
        match of_home {
            true => home,
            false => self.of_guest(guest).last().unwrap_or(home),
        }
    }

    /// What a command reports of the guest must be so.
    pub(crate) fn check_report(&mut self, id: usize, guest: GuestLocation) {
        let migrate = &self.migrates[id];
        let (source, of) = (migrate.qemu, migrate.guest);
        let home = self.guests[of].home;
        let is_lost = self.guests[of].is_lost;
        let has_moved = Some(home) != source || is_lost;
        let booted = self.guests[of].booted;
        let is_earlier = migrate.record.as_ref().is_some_and(|it| it.qemu < booted);
        match guest {
            GuestLocation::Destination if !has_moved => {
                self.fail("a guest that is at the source is reported at the destination");
            }
            GuestLocation::Source if migrate.is_undisturbed(self.disturbed, self.now) => {
                self.fail("a migration fails though nothing else has");
            }
            GuestLocation::Source if migrate.began && Some(home) != source && !is_lost => {
                self.fail("a guest that is elsewhere is reported at the source");
            }
            GuestLocation::MovedOn if migrate.began && !has_moved => {
                self.fail("a guest that is at the source is reported as moved on");
            }
            // An old command may speak of a guest that was started from its disk since.
            GuestLocation::Lost if is_earlier => {}
            // Another tool sent it on while its server was not there, and nobody is left who knows.
            GuestLocation::Lost
                if self
                    .at_destination(id)
                    .is_some_and(|it| self.qemus[it.qemu].status() == Some(Status::Completed)) => {}
            GuestLocation::Lost if migrate.began && !is_lost && self.qemus[home].is_running() => {
                self.fail("a guest that runs is reported as lost");
            }
            GuestLocation::Gone | GuestLocation::Unconfirmed if self.was_committed(id) => {
                self.fail("a guest that was handed over is reported as if it was not");
            }
            GuestLocation::InDoubt => {
                self.counts.in_doubt += 1;
                if !self.migrates[id].has_committed {
                    self.fail("a guest is in doubt without a commit");
                }
            }
            _ => {}
        }
    }
}

/// Time in which all must be settled once nothing fails any more.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1800);
