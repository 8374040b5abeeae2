//! Scheduler: starts the migrations of a plan, cancels those that take too long, and retries those that fail.

use std::{cmp::Reverse, collections::BTreeMap, num::NonZeroUsize, time::Duration};

use thiserror::Error;

use crate::{Fleet, GuestId, Hindrance, HostId, Plan, SourceId, plan};

/// Limits of an evacuation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Migrations at once from each source, and to each destination.
    pub per_host: NonZeroUsize,
    /// Further tries after the first.
    pub retries: u32,
    /// Wait before the second try; doubled before each further one.
    pub backoff: Duration,
    /// Maximum duration of a try.
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
    },
    /// Cancel a migration. Its end must still be reported.
    Cancel {
        /// The guest.
        guest: GuestId,
    },
}

/// An event, reported by the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Time has passed. Timeouts and backoffs depend on ticks.
    Tick,
    /// A migration has ended.
    Ended(End),
    /// No more migrations are wanted.
    Stop(Stop),
}

/// The end of a migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// The guest.
    pub guest: GuestId,
    /// Location of the guest, as both hosts report it.
    pub at: At,
    /// Result of the migration itself.
    pub result: Result<(), Failure>,
}

/// Location of a guest, observed while no migration of it is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// Only at the source.
    Source,
    /// Only at the destination.
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
    /// Whether another try may succeed, later or at another destination.
    pub is_temporary: bool,
    /// The reason, for people.
    pub reason: String,
}

impl Failure {
    /// A failure after which another try makes sense.
    pub fn temporary(reason: impl Into<String>) -> Self {
        Self {
            is_temporary: true,
            reason: reason.into(),
        }
    }

    /// A failure that every further try would have as well.
    pub fn permanent(reason: impl Into<String>) -> Self {
        Self {
            is_temporary: false,
            reason: reason.into(),
        }
    }
}

/// Treatment of migrations under way when the evacuation is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stop {
    /// They continue to their end.
    Finish,
    /// They are cancelled.
    Cancel,
}

/// Outcome of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The guest runs at its destination.
    Moved {
        /// The destination.
        to: HostId,
    },
    /// The guest is where it was.
    Stays(Stay),
    /// The guest's location is unknown, or the guest runs twice. An operator must find out.
    InDoubt {
        /// Intended destination.
        to: HostId,
        /// Observed location.
        at: At,
        /// Failure of the migration, if any.
        reason: Option<String>,
    },
}

/// Why a guest stays.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Stay {
    /// The guest cannot move.
    #[error("{0}")]
    Hindered(Hindrance),
    /// The evacuation was stopped before the guest's first try.
    #[error("stopped before its turn")]
    NotStarted,
    /// The evacuation was stopped, and the migration cancelled.
    #[error("cancelled")]
    Cancelled,
    /// The last try failed.
    #[error("{0}")]
    Failed(Failure),
}

/// Carries out a plan.
#[derive(Clone, Debug)]
pub struct Scheduler<'a> {
    fleet: &'a Fleet,
    limits: Limits,
    /// Tasks, in the order of their start.
    tasks: Vec<Task>,
    stop: Option<Stop>,
}

/// One guest of a schedule.
#[derive(Clone, Debug)]
struct Task {
    guest: GuestId,
    state: State,
    /// Destinations of all tries, in order.
    tried: Vec<HostId>,
}

#[derive(Clone, Debug)]
enum State {
    Waiting {
        to: HostId,
        /// Earliest start.
        until: Duration,
        /// Failure of the last try.
        failure: Option<Failure>,
    },
    Running {
        to: HostId,
        since: Duration,
        is_cancelled: bool,
    },
    Done(Outcome),
}

impl<'a> Scheduler<'a> {
    /// A scheduler that starts nothing before the first [`Event::Tick`].
    pub fn new(fleet: &'a Fleet, plan: &Plan, limits: Limits) -> Self {
        let moves = plan.moves.iter().map(|step| {
            let (to, until, failure) = (step.to, Duration::ZERO, None);
            (step.guest, State::Waiting { to, until, failure })
        });
        let stays = plan.stays.iter().map(|(guest, why)| {
            let stay = Stay::Hindered(why.clone());
            (*guest, State::Done(Outcome::Stays(stay)))
        });
        let tasks = moves.chain(stays).map(|(guest, state)| Task {
            guest,
            state,
            tried: Vec::new(),
        });
        Self {
            fleet,
            limits,
            tasks: tasks.collect(),
            stop: None,
        }
    }

    /// Actions after `event`. `now` never decreases.
    pub fn handle(&mut self, now: Duration, event: Event) -> Vec<Action> {
        match event {
            Event::Tick => {}
            Event::Ended(end) => self.ended(now, end),
            Event::Stop(stop) => self.stop = self.stop.max(Some(stop)),
        }
        let mut actions = self.cancel(now);
        match self.stop {
            None => actions.extend(self.start(now)),
            Some(_) => self.drop_waiting(),
        }
        actions
    }

    /// Whether all guests have an outcome.
    pub fn is_done(&self) -> bool {
        let is_done = |task: &Task| matches!(task.state, State::Done(_));
        self.tasks.iter().all(is_done)
    }

    /// Outcome of a guest, if it is known.
    pub fn outcome(&self, guest: GuestId) -> Option<&Outcome> {
        match &self.task(guest)?.state {
            State::Done(outcome) => Some(outcome),
            State::Waiting { .. } | State::Running { .. } => None,
        }
    }

    /// Number of times that a guest's migration was started.
    pub fn tries(&self, guest: GuestId) -> usize {
        self.task(guest).map_or(0, |task| task.tried.len())
    }

    fn task(&self, guest: GuestId) -> Option<&Task> {
        self.tasks.iter().find(|task| task.guest == guest)
    }

    fn ended(&mut self, now: Duration, end: End) {
        let End { guest, at, result } = end;
        let Some(index) = self.tasks.iter().position(|task| task.guest == guest) else {
            return;
        };
        let State::Running {
            to, is_cancelled, ..
        } = self.tasks[index].state
        else {
            // The end of a migration that was not started.
            return;
        };
        self.tasks[index].state = match at {
            At::Destination => State::Done(Outcome::Moved { to }),
            At::Both | At::Neither | At::Unknown => State::Done(Outcome::InDoubt {
                to,
                at,
                reason: result.err().map(|failure| failure.reason),
            }),
            At::Source => match self.failure(is_cancelled, result) {
                None => State::Done(Outcome::Stays(Stay::Cancelled)),
                Some(failure) => self.after_failure(&self.tasks[index], to, now, failure),
            },
        };
    }

    /// Why a guest is still at the source after a try; `None` if this try was cancelled by a stop.
    fn failure(&self, is_cancelled: bool, result: Result<(), Failure>) -> Option<Failure> {
        if is_cancelled && self.stop == Some(Stop::Cancel) {
            return None;
        }
        Some(match result {
            _ if is_cancelled => {
                let seconds = self.limits.timeout.unwrap_or_default().as_secs();
                Failure::temporary(format!("cancelled after {seconds} s without an end"))
            }
            Ok(()) => Failure::temporary(
                "its migration reported success, but the guest is still at the source",
            ),
            Err(failure) => failure,
        })
    }

    /// A further try, if one makes sense.
    fn after_failure(&self, task: &Task, to: HostId, now: Duration, failure: Failure) -> State {
        let retries = task.tried.len().saturating_sub(1);
        let has_retries = u32::try_from(retries).is_ok_and(|it| it < self.limits.retries);
        if !failure.is_temporary || !has_retries {
            return State::Done(Outcome::Stays(Stay::Failed(failure)));
        }
        State::Waiting {
            to: self.next_destination(task).unwrap_or(to),
            until: now + self.limits.backoff * (1 << retries.min(16)),
            failure: Some(failure),
        }
    }

    /// The destination with the fewest failed tries; of several, the one with the most memory left.
    fn next_destination(&self, task: &Task) -> Option<HostId> {
        let guest = self.fleet.guest(task.guest);
        let free = self.free_for(task.guest);
        let hosts = self.fleet.host_ids();
        let takes = |host: &HostId| plan::refusal(self.fleet, guest, *host, free[host.0]).is_none();
        let failed = |host: HostId| task.tried.iter().filter(|other| **other == host).count();
        hosts
            .filter(takes)
            .min_by_key(|host| (failed(*host), Reverse(free[host.0]), *host))
    }

    /// By host: bytes that no other guest uses or has reserved.
    fn free_for(&self, guest: GuestId) -> Vec<u64> {
        let hosts = self.fleet.destinations.iter();
        let mut free: Vec<_> = hosts.map(|host| host.memory_free).collect();
        for task in self.tasks.iter().filter(|task| task.guest != guest) {
            let to = match &task.state {
                State::Waiting { to, .. }
                | State::Running { to, .. }
                | State::Done(Outcome::Moved { to } | Outcome::InDoubt { to, .. }) => *to,
                State::Done(Outcome::Stays(_)) => continue,
            };
            free[to.0] = free[to.0].saturating_sub(self.fleet.guest(task.guest).memory);
        }
        free
    }

    /// Cancels all migrations after a stop, otherwise those that take too long.
    fn cancel(&mut self, now: Duration) -> Vec<Action> {
        let mut actions = Vec::new();
        for task in &mut self.tasks {
            if let State::Running {
                since,
                is_cancelled,
                ..
            } = &mut task.state
            {
                let is_late = |limit| now.saturating_sub(*since) >= limit;
                let is_unwanted =
                    self.stop == Some(Stop::Cancel) || self.limits.timeout.is_some_and(is_late);
                if is_unwanted && !*is_cancelled {
                    *is_cancelled = true;
                    actions.push(Action::Cancel { guest: task.guest });
                }
            }
        }
        actions
    }

    /// Starts migrations in order, skipping those that wait for a slot.
    fn start(&mut self, now: Duration) -> Vec<Action> {
        let mut leaving = BTreeMap::<SourceId, usize>::new();
        let mut arriving = vec![0; self.fleet.destinations.len()];
        for task in &self.tasks {
            if let State::Running { to, .. } = task.state {
                let source = self.fleet.guest(task.guest).source;
                *leaving.entry(source).or_default() += 1;
                arriving[to.0] += 1;
            }
        }
        let mut actions = Vec::new();
        for task in &mut self.tasks {
            let State::Waiting { to, until, .. } = task.state else {
                continue;
            };
            let guest = task.guest;
            let from = leaving.entry(self.fleet.guest(guest).source).or_default();
            let into = &mut arriving[to.0];
            let most = self.limits.per_host.get();
            if until > now || *from >= most || *into >= most {
                continue;
            }
            *from += 1;
            *into += 1;
            task.tried.push(to);
            task.state = State::Running {
                to,
                since: now,
                is_cancelled: false,
            };
            actions.push(Action::Start { guest, to });
        }
        actions
    }

    fn drop_waiting(&mut self) {
        for task in &mut self.tasks {
            if let State::Waiting { failure, .. } = &mut task.state {
                let stay = failure.take().map_or(Stay::NotStarted, Stay::Failed);
                task.state = State::Done(Outcome::Stays(stay));
            }
        }
    }
}
