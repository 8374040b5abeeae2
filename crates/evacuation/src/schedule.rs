//! Scheduler: starts migrations, sets their rates, and retries those that fail.

mod task;

use std::{
    num::{NonZeroU64, NonZeroUsize},
    time::Duration,
};

use thiserror::Error;

use self::task::{Cancelled, Running, State, Task};
pub use self::task::{Outcome, Stay};
use crate::{Fleet, GuestId, HostId, Plan, plan};

/// Limits of all migrations together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Migrations at once from a host.
    pub per_source: NonZeroUsize,
    /// Migrations at once to a host.
    pub per_destination: NonZeroUsize,
    /// Bytes a second of all migrations together, at least one unit; they share it equally.
    pub bandwidth: Option<u64>,
    /// Rates are multiples of this.
    pub rate_unit: NonZeroU64,
    /// Least rate of a migration beside others, in bytes a second: a slower one is not worth a slot.
    pub least_rate: u64,
    /// Further tries after the first.
    pub retries: u32,
    /// How long a guest waits before its second try; twice as long before each further one.
    pub backoff: Duration,
    /// How long a try may take.
    pub timeout: Option<Duration>,
}

/// An action for the caller, to be carried out in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Start a migration.
    Start {
        /// The guest.
        guest: GuestId,
        /// Its destination.
        to: HostId,
        /// Bytes a second, if anything limits it.
        rate: Option<u64>,
    },
    /// Change the rate of a migration.
    SetRate {
        /// The guest.
        guest: GuestId,
        /// Bytes a second.
        rate: u64,
    },
    /// Cancel a migration. Its end is awaited as that of any other.
    Cancel {
        /// The guest.
        guest: GuestId,
    },
}

/// An event, reported by the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Time has passed.
    Tick,
    /// A migration reports its guest's dirty rate.
    DirtyRate {
        /// The guest.
        guest: GuestId,
        /// Bytes a second.
        rate: u64,
    },
    /// A migration has ended.
    Ended(End),
    /// No more migrations are wanted.
    Stop(Stop),
}

/// How a migration has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// The guest.
    pub guest: GuestId,
    /// Location of the guest, as both hosts report it.
    pub at: At,
    /// Result of the migration itself.
    pub result: Result<(), Failure>,
}

/// Where a guest runs, observed when no migration of it is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// At the source alone.
    Source,
    /// At the destination alone.
    Destination,
    /// At both.
    Both,
    /// At neither.
    Neither,
    /// A host does not answer.
    Unknown,
}

/// Why a migration failed.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{reason}")]
pub struct Failure {
    /// Whether another try makes sense.
    pub kind: FailureKind,
    /// In words.
    pub reason: String,
}

/// Whether another try makes sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// The migration was cancelled.
    Cancelled,
    /// It may succeed later, or elsewhere.
    Temporary,
    /// It fails again.
    Permanent,
}

/// What happens to migrations under way when the evacuation is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stop {
    /// They continue to their end.
    Finish,
    /// They are cancelled.
    Cancel,
}

/// Carries a plan out.
#[derive(Clone, Debug)]
pub struct Scheduler<'a> {
    fleet: &'a Fleet,
    limits: Limits,
    /// By guest.
    tasks: Vec<Task>,
    /// Those that have no outcome yet, in the order in which they begin.
    open: Vec<GuestId>,
    /// By host: bytes that are neither used nor reserved.
    free: Vec<u64>,
    /// By host: migrations from it and to it.
    busy: Vec<[usize; 2]>,
    /// The rate of each migration under way.
    rate: Option<u64>,
    stop: Option<Stop>,
}

impl<'a> Scheduler<'a> {
    /// A scheduler that starts nothing before the first [`Event::Tick`].
    pub fn new(fleet: &'a Fleet, plan: &Plan, limits: Limits) -> Self {
        // The plan names each guest once; one that it does not name stays.
        let mut tasks: Vec<_> = fleet.guests().iter().map(Task::unplanned).collect();
        for (guest, why) in &plan.stays {
            tasks[guest.0].state = State::Done(Outcome::Stays(Stay::Hindered(why.clone())));
        }
        for step in &plan.moves {
            tasks[step.guest.0].state = State::Waiting {
                to: step.to,
                until: Duration::ZERO,
            };
        }
        let bandwidth = limits.bandwidth;
        Self {
            fleet,
            limits: Limits {
                bandwidth: bandwidth.map(|bytes| bytes.max(limits.rate_unit.get())),
                ..limits
            },
            tasks,
            open: plan.moves.iter().map(|step| step.guest).collect(),
            free: plan.free().to_vec(),
            busy: vec![[0, 0]; fleet.hosts().len()],
            rate: None,
            stop: None,
        }
    }

    /// Actions after `event`. `now` never decreases.
    pub fn handle(&mut self, now: Duration, event: Event) -> Vec<Action> {
        match event {
            Event::Tick => {}
            Event::DirtyRate { guest, rate } => self.tasks[guest.0].dirty_rate = Some(rate),
            Event::Ended(end) => self.ended(now, end),
            Event::Stop(stop) => self.stop = self.stop.max(Some(stop)),
        }
        let mut actions = self.cancellations(now);
        match self.stop {
            None => {
                let started = self.admit(now);
                self.share(&started, &mut actions);
            }
            Some(_) => {
                self.drop_waiting();
                self.share(&[], &mut actions);
            }
        }
        actions
    }

    /// Time of the next tick that may produce actions, unless an event comes earlier.
    pub fn wake(&self, now: Duration) -> Option<Duration> {
        let times = self.open.iter().filter_map(|guest| {
            match &self.tasks[guest.0].state {
                // A guest whose time has come waits for the end of another migration.
                State::Waiting { until, .. } => (*until > now).then_some(*until),
                State::Running(running) if running.cancelled.is_none() => {
                    Some(running.since + self.limits.timeout?)
                }
                State::Running(_) | State::Done(_) => None,
            }
        });
        times.min()
    }

    /// Whether all guests have an outcome.
    pub fn is_done(&self) -> bool {
        self.open.is_empty()
    }

    /// Outcome of a guest, if it is known.
    pub fn outcome(&self, guest: GuestId) -> Option<&Outcome> {
        match &self.tasks[guest.0].state {
            State::Done(outcome) => Some(outcome),
            State::Waiting { .. } | State::Running(_) => None,
        }
    }

    /// Number of times that a guest's migration was started.
    pub fn tries(&self, guest: GuestId) -> u32 {
        self.tasks[guest.0].tries
    }

    /// The migrations that are under way: guest and destination.
    pub fn running(&self) -> impl Iterator<Item = (GuestId, HostId)> {
        let open = self.open.iter();
        open.filter_map(|guest| Some((*guest, self.tasks[guest.0].running()?.to)))
    }

    fn ended(&mut self, now: Duration, end: End) {
        let task = &mut self.tasks[end.guest.0];
        let Some(running) = task.running().copied() else {
            // Of a migration that was not started.
            return;
        };
        let to = running.to;
        let guest = self.fleet.guest(end.guest);
        let [from, _] = &mut self.busy[guest.host.0];
        *from -= 1;
        let [_, into] = &mut self.busy[to.0];
        *into -= 1;
        let stays = match end.at {
            At::Destination => return self.close(end.guest, Outcome::Moved { to }),
            At::Both | At::Neither | At::Unknown => {
                let reason = end.result.err().map(|failure| failure.reason);
                let at = end.at;
                return self.close(end.guest, Outcome::InDoubt { to, at, reason });
            }
            At::Source => task.stays(running, end.result, &self.limits),
        };
        self.free[to.0] += guest.memory;
        match stays {
            Ok(failure) => {
                let next = self.next_destination(end.guest).unwrap_or(to);
                self.free[next.0] -= guest.memory;
                let task = &mut self.tasks[end.guest.0];
                let doublings = task.tries.saturating_sub(1).min(16);
                let until = now + self.limits.backoff * (1 << doublings);
                task.last = Some(failure);
                task.state = State::Waiting { to: next, until };
            }
            Err(stay) => self.close(end.guest, Outcome::Stays(stay)),
        }
    }

    fn close(&mut self, guest: GuestId, outcome: Outcome) {
        self.tasks[guest.0].state = State::Done(outcome);
        self.open.retain(|other| *other != guest);
    }

    /// Where a guest has failed least often; of those, the one with the most memory left.
    fn next_destination(&self, id: GuestId) -> Option<HostId> {
        let guest = self.fleet.guest(id);
        let free = |host: HostId| self.free[host.0];
        let hosts = self.fleet.destinations().iter().copied();
        let takes = |host: &HostId| plan::refusal(self.fleet, guest, *host, free(*host)).is_none();
        let failed = |host: HostId| {
            let failed = self.tasks[id.0].failed_at.iter();
            failed.filter(|other| **other == host).count()
        };
        hosts
            .filter(takes)
            .min_by_key(|host| (failed(*host), std::cmp::Reverse(free(*host)), *host))
    }

    fn cancellations(&mut self, now: Duration) -> Vec<Action> {
        let mut actions = Vec::new();
        for &guest in &self.open {
            let State::Running(running) = &mut self.tasks[guest.0].state else {
                continue;
            };
            let is_late = |limit| now.saturating_sub(running.since) >= limit;
            let why = if self.stop == Some(Stop::Cancel) {
                Cancelled::Stopped
            } else if self.limits.timeout.is_some_and(is_late) {
                Cancelled::TimedOut
            } else {
                continue;
            };
            if running.cancelled.replace(why).is_none() {
                actions.push(Action::Cancel { guest });
            }
        }
        actions
    }

    fn drop_waiting(&mut self) {
        for guest in std::mem::take(&mut self.open) {
            let task = &mut self.tasks[guest.0];
            if let State::Waiting { to, .. } = task.state {
                self.free[to.0] += self.fleet.guest(guest).memory;
                let stay = match task.last.take() {
                    Some(failure) => Stay::Failed(failure),
                    None => Stay::NotStarted,
                };
                task.state = State::Done(Outcome::Stays(stay));
            } else {
                self.open.push(guest);
            }
        }
    }

    /// Starts migrations in order, skipping those that wait for a slot. None overtakes a migration that waits for bandwidth, which
    /// all share: others would take what becomes free, so that a busy guest might never move.
    fn admit(&mut self, now: Duration) -> Vec<GuestId> {
        let mut started = Vec::new();
        for guest in self.open.clone() {
            let State::Waiting { to, until } = self.tasks[guest.0].state else {
                continue;
            };
            let from = self.fleet.guest(guest).host;
            let is_free = self.busy[from.0][0] < self.limits.per_source.get()
                && self.busy[to.0][1] < self.limits.per_destination.get();
            if until > now || !is_free {
                continue;
            }
            if !self.has_bandwidth_for(guest) {
                break;
            }
            self.busy[from.0][0] += 1;
            self.busy[to.0][1] += 1;
            let task = &mut self.tasks[guest.0];
            task.tries += 1;
            task.state = State::Running(Running {
                to,
                since: now,
                cancelled: None,
            });
            started.push(guest);
        }
        started
    }

    /// Whether all migrations still get the rate they need if this one starts. One that runs alone needs no least rate.
    fn has_bandwidth_for(&self, guest: GuestId) -> bool {
        let mut all: Vec<_> = self.running().map(|(guest, _)| guest).collect();
        all.push(guest);
        let Some(rate) = self.rate_of(all.len()) else {
            return true;
        };
        all.len() == 1 || all.iter().all(|guest| rate >= self.needed(*guest))
    }

    /// The bytes a second that a migration has to have: the least rate, and more than its guest writes; but no more than it would
    /// have alone.
    fn needed(&self, guest: GuestId) -> u64 {
        let alone = self.rate_of(1).unwrap_or(u64::MAX);
        let least = self.limits.least_rate.max(self.limits.rate_unit.get());
        let least = least.min(alone);
        match self.tasks[guest.0].dirty_rate {
            // One that cannot be outrun needs no bandwidth that others can use.
            Some(writes) if writes < alone => least.max(writes + 1),
            _ => least,
        }
    }

    /// The rate of each of `migrations`, in whole units.
    fn rate_of(&self, migrations: usize) -> Option<u64> {
        let unit = self.limits.rate_unit.get();
        let migrations = u64::try_from(migrations).unwrap_or(u64::MAX);
        let units = (self.limits.bandwidth? / unit).checked_div(migrations)?;
        Some(units * unit)
    }

    /// Gives all that run their rate: before others start if it is lower than before, after that if it is higher.
    fn share(&mut self, started: &[GuestId], actions: &mut Vec<Action>) {
        let running: Vec<_> = self.running().collect();
        let rate = self.rate_of(running.len());
        let before = std::mem::replace(&mut self.rate, rate);
        let (mut starts, mut changes) = (Vec::new(), Vec::new());
        for (guest, to) in running {
            if started.contains(&guest) {
                starts.push(Action::Start { guest, to, rate });
            } else if let Some(rate) = rate.filter(|_| rate != before) {
                changes.push(Action::SetRate { guest, rate });
            }
        }
        match rate < before {
            true => actions.extend(changes.into_iter().chain(starts)),
            false => actions.extend(starts.into_iter().chain(changes)),
        }
    }
}
