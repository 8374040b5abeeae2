//! People: who moves guests, what owners and operators do meanwhile, and who repairs what is left. All of this is a model, but for
//! the plan and the schedule of an evacuation ([`Scheduler`]).
//!
//! A person knows what commands have reported, and looks before an act that a command cannot check: so a confirmation is true, and
//! a copy that is ended is an old one. Only [`Fault::Settle`] is by somebody who is wrong, and the destination must contradict.

use std::time::Duration;

use evacuation::{
    Action, At, End, Event as Evacuated, Failure, Fleet, GuestId, Limits, Outcome, Plan, Scheduler,
};
use handover::{GuestLocation, SourceState};

use crate::{
    destination::AtDestination,
    mutants::Mutant,
    options::Fault,
    qemu::{Happened, State, Status},
    source::AtSource,
    world::{Event, Role, World},
};

/// The truth about a guest, and what people know of it.
pub(crate) struct Guest {
    pub(crate) memory: Vec<u64>,
    pub(crate) written: u64,
    /// Its owner wants it to run, and that is known to whoever migrates it.
    pub(crate) wanted: bool,
    is_sure: bool,
    /// The QEMU that has it; and the one in which it was last started from its disk.
    pub(crate) home: usize,
    pub(crate) booted: usize,
    /// No QEMU has it any more.
    pub(crate) is_lost: bool,
    pub(crate) wrote_at: Duration,
    pub(crate) writes_at: Duration,
    pub(crate) owed: u64,
    /// The last command, from host to host, and what it reported: nothing if it was killed.
    last: Option<(usize, usize)>,
    report: Option<Option<GuestLocation>>,
    doubts: u32,
    /// When a person looks at it next.
    looks_at: Duration,
}

pub(crate) struct Evacuation<'a> {
    scheduler: Scheduler<'a>,
    /// The destinations of migrations under way, by guest.
    moving: Vec<Option<(usize, usize)>>,
}

/// Hosts that accept guests of the first one.
pub(crate) fn fleet(hosts: usize, guests: usize) -> Fleet {
    let host = |number: usize| evacuation::Host {
        name: format!("host {number}"),
        memory_free: 2,
        cpus: 1,
    };
    let guest = |number: usize| evacuation::Guest {
        name: format!("guest {number}"),
        source: evacuation::SourceId(0),
        memory: 1,
        cpus: 1,
        image: None,
        obstacles: Vec::new(),
        barred: Default::default(),
    };
    Fleet {
        destinations: (1..hosts).map(host).collect(),
        guests: (0..guests).map(guest).collect(),
    }
}

/// A command that takes longer is cancelled.
const IMPATIENCE: Duration = Duration::from_secs(180);
/// Times that a person asks again when nothing fails any more.
const DOUBTS: u32 = 8;

impl<'a> World<'a> {
    pub(crate) fn settle_people(&mut self) {
        for guest in 0..self.options.guests {
            let host = match self.options.evacuates {
                true => 0,
                false => self.random.below(self.options.hosts),
            };
            self.guests.push(Guest {
                memory: Vec::new(),
                written: 0,
                wanted: !(self.options.paused && guest == 0),
                is_sure: true,
                home: 0,
                booted: 0,
                is_lost: false,
                wrote_at: Duration::ZERO,
                writes_at: Duration::ZERO,
                owed: 0,
                last: None,
                report: None,
                doubts: 0,
                looks_at: Duration::ZERO,
            });
            self.boot(guest, host);
            let soon = self.random.millis(1_000, 20_000);
            if !self.options.evacuates {
                self.looks_again(guest, soon);
            }
        }
    }

    pub(crate) fn evacuate(&mut self, fleet: &'a Fleet) {
        let limits = Limits {
            per_host: std::num::NonZeroUsize::MIN.saturating_add(1),
            retries: 3,
            backoff: Duration::from_secs(5),
            timeout: Some(IMPATIENCE),
        };
        let plan = Plan::new(fleet);
        self.evacuation = Some(Evacuation {
            scheduler: Scheduler::new(fleet, &plan, limits),
            moving: vec![None; fleet.guests.len()],
        });
        self.after(Duration::from_secs(5), Event::Evacuates);
    }

    /// A guest starts from its disk.
    fn boot(&mut self, guest: usize, host: usize) {
        let qemu = self.start_qemu(host, guest, false);
        let memory: Vec<u64> = (0..self.options.chunks)
            .map(|_| self.random.number() >> 32)
            .collect();
        self.qemus[qemu].memory.clone_from(&memory);
        let of = &mut self.guests[guest];
        (of.memory, of.written, of.home, of.is_lost) = (memory, 1 << 40 | of.written, qemu, false);
        of.booted = qemu;
        self.qemus[qemu].written = of.written;
        match of.wanted {
            true => self.runs(qemu),
            false => self.takes_over(qemu),
        }
    }

    fn command_of(&self, guest: usize) -> Option<usize> {
        (0..self.migrates.len()).rev().find(|id| {
            let it = &self.migrates[*id];
            it.guest == guest && it.is_alive()
        })
    }

    pub(crate) fn command_ended(&mut self, id: usize, report: Option<GuestLocation>) {
        let guest = self.migrates[id].guest;
        self.guests[guest].report = Some(report);
        let soon = match self.is_calm() {
            true => Duration::from_secs(2),
            false => self.random.millis(500, 15_000),
        };
        match self.evacuation {
            Some(_) => self.after(soon, Event::Evacuates),
            None => self.looks_again(guest, soon),
        }
    }

    fn looks_again(&mut self, guest: usize, time: Duration) {
        let at = self.now + time;
        self.guests[guest].looks_at = at;
        self.at(at, Event::Person(guest));
    }

    /// A person looks at a guest, and acts.
    pub(crate) fn person(&mut self, guest: usize) {
        if self.evacuation.is_some() || self.guests[guest].looks_at != self.now {
            return;
        }
        if let Some(id) = self.command_of(guest) {
            let patience = if self.is_calm() {
                IMPATIENCE / 3
            } else {
                IMPATIENCE
            };
            if self.now > self.migrates[id].since + patience {
                self.judge_slowness(id);
                self.migrates[id].is_cancelled = true;
            }
            self.migrates[id].is_cancelled |= self.is_calm() && self.waits_for_earlier(id);
            return self.looks_again(guest, Duration::from_secs(10));
        }
        if let Some(report) = self.guests[guest].report.take()
            && self.acts_on(guest, report)
        {
            return;
        }
        if self.guests[guest].is_lost {
            return self.restart(guest);
        }
        // What a command has left open is finished first, as far as a command does.
        let open = self.open_record(guest);
        let is_past = open.as_ref().is_some_and(|it| self.is_past(it));
        if let Some((host, record)) = open.filter(|_| !is_past) {
            return self.runs_again(guest, host, record.to, false);
        }
        if is_past || !self.qemus[self.guests[guest].home].is_alive {
            self.settle(guest);
        }
        // The copy that is left is one that its server ends.
        if !self.qemus[self.guests[guest].home].is_alive {
            return self.restart(guest);
        }
        if self.is_calm() {
            return self.tidy_up(guest);
        }
        let to = self.random.below(self.hosts.len());
        let rest = self.random.millis(1_000, 20_000);
        if !self.begins(guest, to) {
            self.looks_again(guest, rest);
        }
    }

    /// What follows from a command's report. Returns whether another command runs.
    fn acts_on(&mut self, guest: usize, report: Option<GuestLocation>) -> bool {
        let Some((host, to)) = self.guests[guest].last else {
            return false;
        };
        let home = self.guests[guest].home;
        match report {
            None | Some(GuestLocation::InDoubt) => {
                self.guests[guest].doubts += u32::from(report.is_some());
                if self.guests[guest].doubts > DOUBTS && self.is_calm() {
                    self.settle(guest);
                    return false;
                }
                match self.random.below(8) {
                    _ if self.is_calm() => {}
                    0 if self.claims_that_it_never_ran(guest) => return true,
                    1 => self.continues_by_hand(guest),
                    // An unfinished attempt is finished even if the command names another destination.
                    2 | 3 => {
                        let other = self.random.below(self.hosts.len());
                        let other = if other == host { to } else { other };
                        self.runs_again(guest, host, other, false);
                        return true;
                    }
                    _ => {}
                }
                self.runs_again(guest, host, to, false);
            }
            Some(GuestLocation::Unconfirmed) => {
                let is_its_own =
                    self.qemus[home].host == host && self.qemus[home].state.is_switchover();
                if !is_its_own {
                    self.settle(guest);
                    return false;
                }
                self.runs_again(guest, host, to, true);
            }
            Some(GuestLocation::Destination | GuestLocation::MovedOn) => {
                self.counts.moved += u64::from(report == Some(GuestLocation::Destination));
                self.guests[guest].doubts = 0;
                let old = self.at_path(host, guest).filter(|it| *it != home);
                if let Some(old) = old.filter(|_| self.qemus[home].is_alive)
                    && self.random.percent(70)
                {
                    self.kill_qemu(old, "its guest has moved");
                }
                return false;
            }
            Some(GuestLocation::Source) => {
                self.guests[guest].doubts = 0;
                return false;
            }
            Some(GuestLocation::Gone | GuestLocation::Lost) => {
                self.settle(guest);
                // It ended where it was to run, and nobody saw whether it did: the copy that is left is out of date.
                let is_copy = self.qemus[home].is_alive && !self.qemus[home].has_disks;
                if !is_copy || report != Some(GuestLocation::Lost) {
                    return false;
                }
                self.restart(guest);
            }
        }
        true
    }

    fn runs_again(&mut self, guest: usize, host: usize, to: usize, confirm: bool) {
        self.guests[guest].last = Some((host, to));
        if !self.hosts[host].is_up {
            return self.looks_again(guest, Duration::from_secs(5));
        }
        self.start_migrate(guest, host, to, confirm);
        self.looks_again(guest, Duration::from_secs(10));
    }

    /// Starts a migration of a guest that is well. Returns whether it did.
    fn begins(&mut self, guest: usize, to: usize) -> bool {
        let home = self.guests[guest].home;
        let host = self.qemus[home].host;
        if host == to
            || !self.hosts[host].is_up
            || !self.hosts[to].is_up
            || !self.qemus[home].is_alive
        {
            return false;
        }
        match self.at_path(to, guest) {
            Some(old) if self.qemus[old].state == State::Postmigrate => {
                self.kill_qemu(old, "its guest has moved");
                self.start_qemu(to, guest, true);
            }
            Some(_) => {}
            None => {
                self.start_qemu(to, guest, true);
            }
        }
        self.runs_again(guest, host, to, false);
        true
    }

    /// An attempt of the guest that no command has finished, and its host.
    fn open_record(&self, guest: usize) -> Option<(usize, AtSource)> {
        (0..self.hosts.len()).find_map(|host| {
            let mut records = self.journal::<AtSource>(host, Role::Source).into_iter();
            let is_open = |record: &AtSource| record.guest == guest && !record.state.is_over();
            Some((host, records.find(is_open)?))
        })
    }

    /// Its QEMU has ended, and commands find another one at its monitor's path.
    fn is_past(&self, (host, record): &(usize, AtSource)) -> bool {
        !self.qemus[record.qemu].is_alive && self.at_path(*host, record.guest).is_some()
    }

    /// No copy is left, and all that is left of the guest is ended.
    fn restart(&mut self, guest: usize) {
        let host = self.qemus[self.guests[guest].home].host;
        let left: Vec<_> = self.of_guest(guest).collect();
        for qemu in left {
            self.kill_qemu(qemu, "its guest is started from its disk");
        }
        if self.hosts[host].is_up {
            self.settle(guest);
            self.boot(guest, host);
        }
        self.looks_again(guest, Duration::from_secs(20));
    }

    /// A person who has looked everywhere settles what is open, and continues the copy that is left.
    fn settle(&mut self, guest: usize) {
        let home = self.guests[guest].home;
        let is_lost = self.guests[guest].is_lost;
        while let Some(open) = self.open_record(guest) {
            let is_past = self.is_past(&open);
            let (host, mut record) = open;
            let is_here = record.qemu == home && !is_lost;
            self.note(format_args!(
                "a person settles {:?} on host {host}",
                record.state
            ));
            if self.is_calm()
                && matches!(record.state, SourceState::Committing { .. })
                && !is_past
                && self.can_be_known(&record)
            {
                self.fail("a guest stays in doubt though its destination knows");
            }
            if is_here && self.qemus[home].state == State::Postmigrate {
                match self.guests[guest].wanted {
                    true => self.runs(home),
                    false => self.takes_over(home),
                }
            }
            let guest = if is_here {
                GuestLocation::Source
            } else {
                GuestLocation::Gone
            };
            let cause = Some("settled by hand".to_owned());
            record.state = SourceState::Over { guest, cause };
            if self
                .write_journal(host, (Role::Source, record.attempt), &record)
                .is_err()
            {
                return;
            }
        }
        let is_waiting = !is_lost && !self.qemus[home].is_alive;
        let copy = self.of_guest(guest).find(|it| self.has_guest(*it));
        if let Some(copy) = copy.filter(|_| is_waiting) {
            self.note(format_args!("a person continues the copy in QEMU {copy}"));
            let resume = self.guests[guest].wanted;
            match self.settle_there(copy, resume) {
                true => {}
                false if resume => self.runs(copy),
                false => self.takes_over(copy),
            }
        }
    }

    /// Whether the destination of an attempt still has its journal and QEMU.
    fn can_be_known(&self, record: &AtSource) -> bool {
        let key = (Role::Destination, record.attempt);
        let there = self.entry::<AtDestination>(record.to, key);
        there.is_some_and(|it| self.qemus[it.qemu].is_alive)
    }

    /// Nothing fails any more, no attempt is open: the guest goes on as its owner wants it.
    fn tidy_up(&mut self, guest: usize) {
        let home = self.guests[guest].home;
        let is_halted = matches!(self.qemus[home].state, State::IoError | State::Paused);
        if self.guests[guest].wanted
            && !self.guests[guest].is_sure
            && is_halted
            && self.qemus[home].is_alive
        {
            self.runs(home);
        } else if !self.qemus[home].is_alive {
            self.settle(guest);
        }
    }

    // Faults.

    pub(crate) fn people_do(&mut self, fault: Fault, guest: usize) {
        let home = self.guests[guest].home;
        let command = self.command_of(guest);
        match fault {
            Fault::Pause(_) if self.qemus[home].is_running() => {
                self.pause_guest(home, State::Paused);
                self.guests[guest].wanted = false;
                // Who migrates it may not have seen that.
                let is_open = self.open_record(guest).is_some();
                self.guests[guest].is_sure &= command.is_none() && !is_open;
            }
            Fault::Continue(_) => {
                let is_there = self.qemus[home].is_alive && self.qemus[home].has_disks;
                if is_there && !self.qemus[home].is_running() {
                    self.runs(home);
                    self.guests[guest].wanted = true;
                    let is_open = self.open_record(guest).is_some();
                    self.guests[guest].is_sure &= command.is_none() && !is_open;
                }
            }
            Fault::Halt(_) => self.halt(home),
            Fault::Cancel(_) => {
                if let Some(id) = command {
                    self.migrates[id].is_cancelled = true;
                }
            }
            Fault::Again(_) => {
                if let Some((host, to)) = self.guests[guest]
                    .last
                    .filter(|(host, _)| self.hosts[*host].is_up)
                {
                    let to = if self.random.percent(50) {
                        to
                    } else {
                        (host + 1) % self.hosts.len()
                    };
                    if host != to {
                        self.start_migrate(guest, host, to, false);
                    }
                }
            }
            Fault::Settle(_) => {
                self.claims_that_it_never_ran(guest);
            }
            Fault::OtherTool(any) => self.other_tool_moves(guest, any),
            Fault::NewQemu(any) => {
                let (host, to) = (self.qemus[home].host, any % self.hosts.len());
                if command.is_none()
                    && host != to
                    && self.hosts[host].is_up
                    && self.qemus[home].is_alive
                {
                    self.qemus[home].busy_until =
                        (self.now + Duration::from_secs(30)).min(self.options.calm);
                    self.start_migrate(guest, host, to, false);
                }
            }
            _ => {}
        }
    }

    /// A guest stops, as its disk is full.
    pub(crate) fn halt(&mut self, qemu: usize) {
        self.pause_guest(qemu, State::IoError);
        self.guests[self.qemus[qemu].guest].is_sure = false;
    }

    /// A person is wrong, perhaps, about a guest in doubt. Returns whether there is one.
    fn claims_that_it_never_ran(&mut self, guest: usize) -> bool {
        let (None, Some((host, record))) = (self.command_of(guest), self.open_record(guest)) else {
            return false;
        };
        let is_doubted = matches!(record.state, SourceState::Committing { .. });
        if !is_doubted || !self.hosts[host].is_up {
            return false;
        }
        let id = self.start_migrate(guest, host, record.to, false);
        self.migrates[id].settles = true;
        self.looks_again(guest, Duration::from_secs(10));
        true
    }

    /// A person who sees that no destination runs the guest or was requested to continues it where it was.
    fn continues_by_hand(&mut self, guest: usize) {
        let home = self.guests[guest].home;
        let Some((_, record)) = self.open_record(guest) else {
            return;
        };
        let key = (Role::Destination, record.attempt);
        let there = self.entry::<AtDestination>(record.to, key);
        let is_unused = there.is_some_and(|it| {
            use handover::DestinationState::{Aborted, Loaded};
            matches!(it.state, Loaded { .. } | Aborted { .. })
        });
        let is_quiet = self.is_silent_between(self.qemus[home].host, record.to);
        let is_sent = self.qemus[home].is_alive && self.qemus[home].state == State::Postmigrate;
        if is_unused && is_quiet && is_sent && record.qemu == home && self.guests[guest].wanted {
            self.note(format_args!(
                "a person continues guest {guest} in QEMU {home}"
            ));
            self.runs(home);
        }
    }

    pub(crate) fn other_tool_moves(&mut self, guest: usize, any: usize) {
        let home = self.guests[guest].home;
        let to = (self.qemus[home].host + 1 + any % (self.hosts.len() - 1)) % self.hosts.len();
        // Over another monitor, also while `migrate` is still getting ready.
        let command = self.command_of(guest);
        let is_free = command.is_none_or(|id| {
            let it = &self.migrates[id];
            it.is_getting_ready() || it.qemu != Some(home) && it.qemu.is_some()
        });
        let is_free = is_free && self.at_path(to, guest).is_none();
        let is_well = self.qemus[home].is_running() && !self.qemus[home].is_migrating();
        // Whoever evacuates a host leaves its guests alone otherwise.
        let is_free = is_free && self.evacuation.is_none();
        if !is_free || !is_well || !self.hosts[to].is_up {
            return;
        }
        let qemu = self.start_qemu(to, guest, false);
        self.begin_migration(home, false);
        let it = &mut self.qemus[home];
        (it.state, it.has_disks) = (State::Postmigrate, false);
        it.events.push_back(Happened::Stop);
        if let Some(outgoing) = &mut it.outgoing {
            outgoing.status = Status::Completed;
        }
        let (memory, written) = (it.memory.clone(), it.written);
        (self.qemus[qemu].memory, self.qemus[qemu].written) = (memory, written);
        self.note(format_args!(
            "another tool moves guest {guest} to host {to}"
        ));
        self.runs(qemu);
    }

    // An evacuation.

    pub(crate) fn evacuates(&mut self) {
        let Some(mut evacuation) = self.evacuation.take() else {
            return;
        };
        let mut events = vec![Evacuated::Tick];
        for guest in 0..self.guests.len() {
            let Some((id, to)) = evacuation.moving[guest] else {
                continue;
            };
            if self.migrates[id].is_alive() {
                continue;
            }
            evacuation.moving[guest] = None;
            let result = match self.migrates[id].report {
                Some(GuestLocation::Destination) => Ok(()),
                _ => Err(Failure::temporary("the command has failed")),
            };
            let (at, guest) = (self.where_is(guest, to), GuestId(guest));
            events.push(Evacuated::Ended(End { guest, at, result }));
        }
        for event in events {
            let actions = evacuation.scheduler.handle(self.now, event.clone());
            if let Evacuated::Ended(End { guest, .. }) = event
                && evacuation.scheduler.outcome(guest).is_none()
                && !self.is_on(guest.0, 0)
            {
                self.fail("an evacuation moves a guest again that is elsewhere");
            }
            for action in actions {
                match action {
                    Action::Start { guest, to } => {
                        let to = to.0 + 1;
                        if !self.is_on(guest.0, 0) || !self.begins(guest.0, to) {
                            // A command that fails at once.
                            self.start_migrate(guest.0, 0, to, false);
                        }
                        evacuation.moving[guest.0] = Some((self.migrates.len() - 1, to));
                    }
                    Action::Cancel { guest } => {
                        if let Some((id, _)) = evacuation.moving[guest.0] {
                            self.migrates[id].is_cancelled = true;
                        }
                    }
                }
            }
        }
        if !evacuation.scheduler.is_done() {
            self.evacuation = Some(evacuation);
            return self.after(Duration::from_secs(2), Event::Evacuates);
        }
        for guest in 0..self.guests.len() {
            self.judge_evacuation(&evacuation, guest);
            self.looks_again(guest, Duration::from_secs(1));
        }
    }

    /// Where both hosts say that a guest is.
    fn where_is(&self, guest: usize, to: usize) -> At {
        let has = |host: usize| {
            self.of_guest(guest)
                .any(|q| self.qemus[q].host == host && self.qemus[q].has_disks)
        };
        let answers =
            |host: usize| self.hosts[host].is_up && self.now >= self.hosts[host].refuses_until;
        if !answers(0) || !answers(to) {
            return match self.has(Mutant::TakesUnknownForSource) {
                true => At::Source,
                false => At::Unknown,
            };
        }
        match (has(0), has(to)) {
            (true, false) => At::Source,
            (false, true) => At::Destination,
            (true, true) => At::Both,
            (false, false) => At::Neither,
        }
    }

    /// Whether a guest's home is on a host, or it is lost.
    fn is_on(&self, guest: usize, host: usize) -> bool {
        let of = &self.guests[guest];
        of.is_lost || self.qemus[of.home].host == host
    }

    fn judge_evacuation(&mut self, evacuation: &Evacuation<'_>, guest: usize) {
        let outcome = evacuation.scheduler.outcome(GuestId(guest)).cloned();
        self.note(format_args!("guest {guest} is evacuated: {outcome:?}"));
        let is_right = match outcome {
            Some(Outcome::Moved { .. }) => self.guests[guest].is_lost || !self.is_on(guest, 0),
            Some(Outcome::Stays(_)) => self.is_on(guest, 0),
            Some(Outcome::InDoubt { .. }) => true,
            None => false,
        };
        if !is_right {
            self.fail("an evacuation reports a guest where it is not");
        }
    }

    // The end.

    /// Nothing has failed for long: all that could be kept runs, and nothing is left to do.
    pub(crate) fn check_the_end(&mut self) {
        for guest in 0..self.guests.len() {
            if let Some(id) = self.command_of(guest) {
                self.fail(format!("migrate {id} does not end"));
            }
            if let Some((_, record)) = self.open_record(guest) {
                self.fail(format!("an attempt stays open: {:?}", record.state));
            }
            let of = &self.guests[guest];
            let home = &self.qemus[of.home];
            if of.is_lost || !home.is_alive {
                self.fail("a guest does not run that could have been kept");
            } else if of.wanted && !home.is_running() && of.is_sure {
                self.fail("a guest that is to run does not");
            } else if !of.wanted && home.is_running() && of.is_sure {
                self.fail("a guest runs that is to be paused");
            } else if !home.has_disks {
                self.fail("a guest does not have its disks");
            }
        }
        let is_left = (0..self.qemus.len()).any(|q| self.is_half_received(q));
        if is_left {
            self.fail("half a guest is left in a QEMU");
        }
        if self.evacuation.is_some() {
            self.fail("an evacuation does not end");
        }
    }
}
