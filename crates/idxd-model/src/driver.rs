//! Drives the machine: by its callers, in virtual or real time, or by threads.

use std::{
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{
    config::Config,
    machine::{Denied, Device, Machine, Workshop},
    memory::Pages,
    nanoseconds,
};
use idxd::Record;

/// How time advances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Time {
    Virtual,
    Real,
    Threads,
}

/// Virtual time that a descriptor takes to be submitted, accepted or not: a loop of retries comes to an end too.
const SUBMISSION: u64 = 100;

/// Below this a wait in real time is spent awake: sleeping takes longer.
const NAP: u64 = 100_000;

#[derive(Debug)]
pub(super) struct Driver {
    machine: Mutex<Machine>,
    workshop: Arc<Workshop>,
    /// Something was submitted or changed, for workers.
    work: Condvar,
    /// Something completed: wakes threads that pause or close.
    done: Condvar,
    time: Time,
    start: Instant,
    over: AtomicBool,
}

impl Driver {
    pub(super) fn new(machine: Machine, time: Time) -> Self {
        Self {
            workshop: machine.workshop(),
            machine: Mutex::new(machine),
            work: Condvar::new(),
            done: Condvar::new(),
            time,
            start: Instant::now(),
            over: AtomicBool::new(false),
        }
    }

    pub(super) fn pages(&self) -> &Pages {
        &self.workshop.pages
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no thread works for an engine that `whose` names by client and device.
    fn until_idle<'a>(
        &self,
        mut machine: MutexGuard<'a, Machine>,
        whose: impl Fn(usize, usize) -> bool,
    ) -> MutexGuard<'a, Machine> {
        while machine.works(&whose) {
            machine = self
                .done
                .wait(machine)
                .unwrap_or_else(PoisonError::into_inner);
        }
        machine
    }

    /// Makes a device forget everything, after `change`. Nothing of it touches memory any more on return.
    pub(super) fn reset(&self, device: usize, change: impl FnOnce(&mut Device)) {
        let mut machine = self.lock();
        if let Some(here) = machine.devices.get_mut(device) {
            change(here);
            machine.reset(device);
            drop(self.until_idle(machine, |_, of| of == device));
            self.done.notify_all();
        }
    }

    /// Disables a device: what it has been given is done first, and what would never complete is given up.
    pub(super) fn disable(&self, device: usize) {
        let mut machine = self.lock();
        let Some(here) = machine.devices.get_mut(device) else {
            return;
        };
        here.enabled = false;
        machine.revoke(device);
        let machine = self.run_out(
            machine,
            |machine| machine.has_work(device),
            |machine| machine.reset(device),
        );
        drop(self.until_idle(machine, |_, of| of == device));
        self.done.notify_all();
    }

    /// Submits until `next` reports that nothing is left, or that something was denied.
    pub(super) fn submit(
        &self,
        mut next: impl FnMut(&mut Machine) -> Option<Option<Denied>>,
    ) -> Option<Denied> {
        let mut machine = self.lock();
        match self.time {
            Time::Virtual => loop {
                let denied = next(&mut machine)?;
                machine.clock = machine.clock.saturating_add(SUBMISSION);
                if denied.is_some() {
                    machine.step();
                    return denied;
                }
            },
            Time::Real => {
                self.catch_up(&mut machine);
                loop {
                    let denied = next(&mut machine)?;
                    if denied.is_some() {
                        return denied;
                    }
                    // Engines that wait have it at once: its entry is free again.
                    machine.start_all();
                }
            }
            Time::Threads => {
                self.catch_up(&mut machine);
                loop {
                    let denied = next(&mut machine)?;
                    // All: the one that is woken may be an engine of another device, which can do nothing.
                    self.work.notify_all();
                    if denied.is_some() {
                        return denied;
                    }
                }
            }
        }
    }

    pub(super) fn now(&self) -> Duration {
        match self.time {
            Time::Virtual => Duration::from_nanos(self.lock().clock),
            Time::Real => {
                let mut machine = self.lock();
                Duration::from_nanos(self.catch_up(&mut machine))
            }
            Time::Threads => Duration::from_nanos(self.real()),
        }
    }

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
            Time::Threads => {
                // Checked again under the lock, as that is where records are written.
                let left = deadline.saturating_sub(self.real());
                if record.status() == 0 && left > 0 {
                    let left = Duration::from_nanos(left);
                    drop(self.done.wait_timeout(machine, left));
                }
            }
        }
    }

    /// Waits until a client has nothing in flight; what never completes is given up.
    pub(super) fn close(&self, client: usize) {
        let mut machine = self.lock();
        let first = !std::mem::replace(&mut machine.clients[client].closed, true);
        let machine = self.run_out(
            machine,
            |machine| machine.clients[client].in_flight > 0,
            |machine| machine.abandon(client),
        );
        let mut machine = self.until_idle(machine, |of, _| of == client);
        if first {
            machine.leave(client);
        }
        self.done.notify_all();
        self.work.notify_all();
    }

    /// Lets time pass until nothing is `pending` any more. `give_up` is for what never ends.
    fn run_out<'a>(
        &'a self,
        mut machine: MutexGuard<'a, Machine>,
        pending: impl Fn(&Machine) -> bool,
        give_up: impl Fn(&mut Machine),
    ) -> MutexGuard<'a, Machine> {
        while pending(&machine) {
            if self.time == Time::Virtual && machine.step() {
                continue;
            }
            let now = match self.time {
                Time::Virtual => machine.clock,
                _ => self.catch_up(&mut machine),
            };
            let going_on = machine.works(|_, _| true) || machine.can_start();
            let next = machine.next_due();
            match (self.time, next) {
                _ if !pending(&machine) => {}
                (Time::Virtual, Some(due)) => machine.clock = machine.clock.max(due),
                (Time::Real, Some(due)) => {
                    drop(machine);
                    rest(due.saturating_sub(now));
                    machine = self.lock();
                }
                (Time::Threads, next)
                    if !self.over.load(Ordering::Relaxed) && (next.is_some() || going_on) =>
                {
                    machine = self
                        .done
                        .wait(machine)
                        .unwrap_or_else(PoisonError::into_inner);
                }
                _ => give_up(&mut machine),
            }
        }
        machine
    }

    /// Ends the workers.
    pub(super) fn shut_down(&self) {
        // Under the lock, so that none misses it between looking and waiting.
        let machine = self.lock();
        self.over.store(true, Ordering::Relaxed);
        self.work.notify_all();
        self.done.notify_all();
        drop(machine);
    }

    /// Does what is due by the real time, which it returns.
    fn catch_up(&self, machine: &mut Machine) -> u64 {
        let now = self.real();
        if self.time == Time::Real && machine.next_due().is_some_and(|due| due <= now) {
            machine.advance(now);
        } else {
            machine.clock = machine.clock.max(now);
        }
        now
    }

    fn real(&self) -> u64 {
        nanoseconds(self.start.elapsed())
    }
}

/// A thread for every engine.
pub(super) fn workers(driver: &Arc<Driver>, config: &Config) -> Vec<JoinHandle<()>> {
    let engines = config
        .devices
        .iter()
        .enumerate()
        .flat_map(|(index, device)| {
            let count: usize = device.groups.iter().map(|group| group.engines).sum();
            (0..count).map(move |engine| (index, engine))
        });
    engines
        .map(|(device, engine)| {
            let driver = Arc::clone(driver);
            thread::spawn(move || run(&driver, device, engine))
        })
        .collect()
}

/// One engine's life.
fn run(driver: &Driver, device: usize, engine: usize) {
    let mut machine = driver.lock();
    while !driver.over.load(Ordering::Relaxed) {
        driver.catch_up(&mut machine);
        machine.deliver_due();
        let now = machine.clock;
        let due = machine.due(device, engine);
        if let Some(due) = due {
            // The work is done as soon as it is there, and counts when it is due.
            let Some(job) = machine.job(device, engine) else {
                continue;
            };
            machine.devices[device].engines[engine].busy = Some(job.unit.client);
            drop(machine);
            let worked = driver.workshop.work(&job);
            wait_awake(due.saturating_sub(now), driver);
            machine = driver.lock();
            driver.catch_up(&mut machine);
            machine.devices[device].engines[engine].busy = None;
            machine.finish(device, engine, worked);
        } else if !machine.start(device, engine) {
            let next = machine.next_delivery().map(|due| due.saturating_sub(now));
            driver.done.notify_all();
            machine = match next {
                Some(next) if next <= NAP => {
                    drop(machine);
                    thread::yield_now();
                    driver.lock()
                }
                Some(next) => {
                    let waited = driver
                        .work
                        .wait_timeout(machine, Duration::from_nanos(next));
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => driver
                    .work
                    .wait(machine)
                    .unwrap_or_else(PoisonError::into_inner),
            };
            continue;
        }
        driver.done.notify_all();
        if machine.can_start() {
            driver.work.notify_all();
        }
    }
}

/// Lets the time of a transfer pass, unless everything ends.
fn wait_awake(time: u64, driver: &Driver) {
    let end = Instant::now() + Duration::from_nanos(time);
    while !driver.over.load(Ordering::Relaxed) {
        let left = nanoseconds(end.saturating_duration_since(Instant::now()));
        if left == 0 {
            break;
        }
        // In steps, so that the end of everything is seen.
        rest(left.min(10_000_000));
    }
}

/// Passes about so many nanoseconds, or less.
fn rest(time: u64) {
    if time > NAP {
        thread::sleep(Duration::from_nanos(time - NAP / 2));
    } else {
        thread::yield_now();
    }
}
