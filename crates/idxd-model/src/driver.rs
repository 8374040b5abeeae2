//! Drives the machine by the calls of its clients, in virtual or real time.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use super::{
    machine::{Executor, Machine},
    memory::Pages,
    nanoseconds,
};
use idxd::{Record, Refusal};

/// How time advances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Time {
    Virtual,
    Real,
}

/// Virtual time in nanoseconds of one submission, accepted or not, so that loops of retries end.
const SUBMISSION: u64 = 100;

/// Shorter waits in real time, in nanoseconds, yield instead of sleeping, which takes longer.
const NAP: u64 = 100_000;

#[derive(Debug)]
pub(super) struct Driver {
    machine: Mutex<Machine>,
    executor: Arc<Executor>,
    time: Time,
    start: Instant,
}

impl Driver {
    pub(super) fn new(machine: Machine, time: Time) -> Self {
        Self {
            executor: machine.executor(),
            machine: Mutex::new(machine),
            time,
            start: Instant::now(),
        }
    }

    pub(super) fn pages(&self) -> &Pages {
        &self.executor.pages
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `next` to submit descriptors until none is left, or one is refused. `next` returns `None` if no descriptor is left,
    /// `Some(None)` if one was accepted, and `Some(Some(_))` if one was refused.
    pub(super) fn submit(
        &self,
        mut next: impl FnMut(&mut Machine) -> Option<Option<Refusal>>,
    ) -> Option<Refusal> {
        let mut machine = self.lock();
        if self.time == Time::Real {
            self.catch_up(&mut machine);
        }
        loop {
            let denied = next(&mut machine)?;
            match self.time {
                Time::Virtual => {
                    machine.clock = machine.clock.saturating_add(SUBMISSION);
                    if denied.is_some() {
                        machine.step();
                    }
                }
                // Idle engines fetch the descriptor at once, which frees its entry.
                Time::Real => while machine.step() {},
            }
            if denied.is_some() {
                return denied;
            }
        }
    }

    pub(super) fn now(&self) -> Duration {
        let mut machine = self.lock();
        Duration::from_nanos(match self.time {
            Time::Virtual => machine.clock,
            Time::Real => self.catch_up(&mut machine),
        })
    }

    /// Waits for a while, at most until `deadline`, unless `record` is complete. The caller repeats this.
    pub(super) fn pause(&self, record: &Record, deadline: u64) {
        if record.status() != 0 {
            return;
        }
        let mut machine = self.lock();
        match self.time {
            Time::Virtual => {
                if !machine.step() {
                    let to = machine.next_due().map_or(deadline, |due| due.min(deadline));
                    machine.clock = machine.clock.max(to);
                }
            }
            Time::Real => {
                let now = self.catch_up(&mut machine);
                let next = machine.next_due().unwrap_or(u64::MAX).min(deadline);
                drop(machine);
                if record.status() == 0 {
                    rest(next.saturating_sub(now));
                }
            }
        }
    }

    /// Waits until a client has nothing in flight. Drops descriptors that never complete.
    pub(super) fn close(&self, client: usize) {
        let mut machine = self.lock();
        machine.clients[client].closed = true;
        while machine.clients[client].in_flight > 0 {
            if self.time == Time::Virtual && machine.step() {
                continue;
            }
            let now = match self.time {
                Time::Virtual => machine.clock,
                Time::Real => self.catch_up(&mut machine),
            };
            match (self.time, machine.next_due()) {
                _ if machine.clients[client].in_flight == 0 => {}
                (_, None) => machine.abandon(client),
                (Time::Virtual, Some(due)) => machine.clock = machine.clock.max(due),
                (Time::Real, Some(due)) => {
                    drop(machine);
                    rest(due.saturating_sub(now));
                    machine = self.lock();
                }
            }
        }
    }

    /// Advances the machine to the present, which is returned in nanoseconds since the start.
    fn catch_up(&self, machine: &mut Machine) -> u64 {
        let now = nanoseconds(self.start.elapsed());
        match machine.next_due() {
            Some(due) if due <= now => machine.advance(now),
            _ => machine.clock = machine.clock.max(now),
        }
        now
    }
}

/// Waits about this number of nanoseconds, or less.
fn rest(time: u64) {
    if time > NAP {
        thread::sleep(Duration::from_nanos(time - NAP / 2));
    } else {
        thread::yield_now();
    }
}
