//! The host in virtual time: eight queues in front of eight devices, DRAM that all of them share, and a clock for each
//! guest.
//!
//! ```text
//!   guest 0  ── its clock ── Port ─┐      ┌───── Device ─────────────────────────────┐
//!   guest 1  ── its clock ── Port ─┼────> │ queue: 128 ──> fetched: 4 ──> 30 GB/s    │──> records, at their time,
//!   …                              │      └──────────────────────────────────────────┘    by the guest's clock
//! ```
//! A device serves its queue in order. So when an entry is taken it is certain when each of its pages will be done,
//! whatever comes later; and the records are written when the clock of the guest that waits for them gets there. A guest
//! needs the others only for its place in a queue: between two submissions its clock may run ahead of theirs.
//!
//! It reads no guest's memory: what is in a page follows from its address.

use std::{
    collections::VecDeque,
    num::NonZeroU32,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use idxd::{
    Capabilities, Descriptor, Kind, Limits, Mode, Operations, Record, Refusal, Submit, Submitted,
    opcode,
};

use crate::guest::Content;
use crate::parameters::{MICRO, MILLI, PAGE, Parameters, Picos, SECOND};

/// What all guests have in common.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) parameters: Parameters,
    devices: Vec<Mutex<Device>>,
    memory: Mutex<Memory>,
}

/// What a device has done.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Use {
    /// Time in which it transferred.
    pub(crate) busy: Picos,
    /// Batches of guests that were taken.
    pub(crate) taken: u64,
    /// Pages in them.
    pub(crate) pages: u64,
    /// Submissions of guests that were refused.
    pub(crate) refused: u64,
}

impl Host {
    pub(crate) fn new(parameters: Parameters) -> Self {
        let device = || Mutex::new(Device::new(parameters.engines));
        Self {
            parameters,
            devices: (0..parameters.devices).map(|_| device()).collect(),
            memory: Mutex::new(Memory::new(parameters.memory)),
        }
    }

    /// No guest's clock will be before `now` any more.
    pub(crate) fn advance(&self, now: Picos) {
        lock(&self.memory).advance(now);
    }

    /// How many times longer memory takes than it would for a single guest.
    pub(crate) fn slowdown(&self) -> f64 {
        lock(&self.memory).slowdown
    }

    /// `time`, as memory makes it, for `bytes` of it.
    pub(crate) fn transfer(&self, time: Picos, bytes: u64) -> Picos {
        lock(&self.memory).transfer(time, bytes)
    }

    /// What the devices have done.
    pub(crate) fn uses(&self) -> Vec<Use> {
        self.devices
            .iter()
            .map(|device| lock(device).done)
            .collect()
    }

    /// Another client's batches of `pages` pages, until the queue of `device` takes no more. When it will.
    pub(crate) fn flood(&self, device: usize, now: Picos, pages: u64) -> Picos {
        let mut device = lock(&self.devices[device]);
        let mut tries = 0;
        while tries <= self.parameters.entries && device.admit(self, now, pages).is_some() {
            tries += 1;
        }
        device.waiting.front().map_or(now + MICRO, |fetch| *fetch)
    }
}

/// A queue and the engines behind it.
#[derive(Debug)]
struct Device {
    /// When each entry that is in the queue will be fetched, in order.
    waiting: VecDeque<Picos>,
    /// When the last entries that were taken will be done: as many as there are engines.
    fetched: VecDeque<Picos>,
    /// When everything taken is transferred.
    free: Picos,
    done: Use,
}

impl Device {
    fn new(engines: usize) -> Self {
        Self {
            waiting: VecDeque::new(),
            fetched: VecDeque::from(vec![0; engines]),
            free: 0,
            done: Use::default(),
        }
    }

    /// When the transfer of an entry of `pages` pages that comes at `now` begins, and how long each page takes;
    /// `None` if the queue is full.
    fn admit(&mut self, host: &Host, now: Picos, pages: u64) -> Option<(Picos, Picos)> {
        while self.waiting.front().is_some_and(|fetch| *fetch <= now) {
            self.waiting.pop_front();
        }
        if self.waiting.len() >= host.parameters.entries as usize {
            return None;
        }
        let page = host.transfer(host.parameters.device_page * pages, PAGE * pages) / pages.max(1);
        let fetch = now.max(self.fetched.pop_front().unwrap_or(0));
        if fetch > now {
            self.waiting.push_back(fetch);
        }
        let begin = self.free.max(fetch);
        self.free = begin + page * pages;
        self.fetched.push_back(self.free);
        self.done.busy += page * pages;
        Some((begin, page))
    }
}

/// DRAM. When more is asked of it than it gives, everything takes longer, for processors and devices alike (assumed).
#[derive(Debug)]
struct Memory {
    /// Bytes that it gives in a window.
    most: Option<f64>,
    /// Bytes that were asked for in this window, which ends at `end`.
    asked: u64,
    end: Picos,
    slowdown: f64,
}

impl Memory {
    /// How often it is looked how much was asked for.
    const WINDOW: Picos = MILLI;

    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    fn new(rate: Option<u64>) -> Self {
        Self {
            most: rate.map(|rate| rate as f64 * Self::WINDOW as f64 / SECOND as f64),
            asked: 0,
            end: Self::WINDOW,
            slowdown: 1.0,
        }
    }

    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "times that are much shorter than 2^53 picoseconds"
    )]
    fn transfer(&mut self, time: Picos, bytes: u64) -> Picos {
        self.asked += bytes;
        (time as f64 * self.slowdown) as Picos
    }

    /// Three quarters of the way, on a logarithmic scale, to where just as much is asked for as there is.
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    fn advance(&mut self, now: Picos) {
        while now >= self.end {
            if let Some(most) = self.most {
                let demand = (self.asked as f64 / most).max(0.25);
                self.slowdown = (self.slowdown * demand.powf(0.75)).max(1.0);
            }
            self.asked = 0;
            self.end += Self::WINDOW;
        }
    }
}

/// A guest's time, and the records that will be written in it.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    state: Mutex<ClockState>,
}

#[derive(Debug, Default)]
struct ClockState {
    now: Picos,
    cpu: Picos,
    /// Of each device, in their order.
    due: Vec<VecDeque<Completion>>,
}

#[derive(Clone, Copy, Debug)]
struct Completion {
    at: Picos,
    /// Address of the record.
    record: u64,
    /// Its first word: status and result.
    word: u64,
}

impl Clock {
    pub(crate) fn starting_at(now: Picos, devices: usize) -> Self {
        let state = ClockState {
            now,
            due: vec![VecDeque::new(); devices],
            ..ClockState::default()
        };
        Self {
            state: Mutex::new(state),
        }
    }

    pub(crate) fn now(&self) -> Picos {
        lock(&self.state).now
    }

    /// Time that a processor has worked.
    pub(crate) fn cpu(&self) -> Picos {
        lock(&self.state).cpu
    }

    /// A processor works for so long.
    pub(crate) fn work(&self, time: Picos) {
        let mut state = lock(&self.state);
        state.now += time;
        state.cpu += time;
        state.deliver();
    }

    /// Time goes by.
    pub(crate) fn idle_until(&self, time: Picos) {
        let mut state = lock(&self.state);
        state.now = state.now.max(time);
        state.deliver();
    }
}

impl ClockState {
    fn deliver(&mut self) {
        let now = self.now;
        for due in &mut self.due {
            while let Some(completion) = due.front().filter(|completion| completion.at <= now) {
                // SAFETY: the submitter promised (`Submit::submit`) that the record stays, atomics that only the
                // device writes to, until it is complete or the queue closed; on closing `due` is emptied.
                let word = unsafe { AtomicU64::from_ptr(completion.record as *mut u64) };
                word.store(completion.word, Ordering::Release);
                due.pop_front();
            }
        }
    }
}

/// One guest's view of one device's queue.
pub(crate) struct Port {
    host: Arc<Host>,
    clock: Arc<Clock>,
    device: usize,
    content: Content,
    limits: Limits,
}

impl std::fmt::Debug for Port {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Port")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

impl Port {
    pub(crate) fn new(
        host: &Arc<Host>,
        clock: &Arc<Clock>,
        device: usize,
        content: Content,
    ) -> Self {
        let operations = [opcode::BATCH, opcode::COMPARE_PATTERN];
        let entries = host.parameters.entries;
        let limits = Limits {
            kind: Kind::Dsa,
            mode: Mode::Shared,
            size: entries,
            threshold: entries,
            max_batch: NonZeroU32::new(128),
            max_transfer: 2 << 20,
            block_on_fault: false,
            operations: operations
                .into_iter()
                .fold(Operations::default(), |all, one| all.with(one)),
            version: 0x100,
            capabilities: Capabilities::FIRST_DSA,
            numa_node: None,
        };
        Self {
            host: host.clone(),
            clock: clock.clone(),
            device,
            content,
            limits,
        }
    }

    /// # Safety
    /// That of [`Submit::submit`].
    unsafe fn enqcmd(&self, descriptor: &Descriptor) -> bool {
        let parameters = &self.host.parameters;
        let members = match descriptor.opcode() {
            // SAFETY: a batch's list stays until the batch is complete, as the caller promises.
            opcode::BATCH => unsafe {
                std::slice::from_raw_parts(
                    descriptor.address_1 as *const Descriptor,
                    descriptor.size as usize,
                )
            },
            _ => std::slice::from_ref(descriptor),
        };
        let pages = members.len() as u64;
        self.clock
            .work(parameters.batch + parameters.build * pages + parameters.enqcmd);
        let mut device = lock(&self.host.devices[self.device]);
        let Some((begin, page)) = device.admit(&self.host, self.clock.now(), pages) else {
            device.done.refused += 1;
            return false;
        };
        device.done.taken += 1;
        device.done.pages += pages;
        let done = |pages: u64| begin + page * pages + parameters.latency;
        let mut clock = lock(&self.clock.state);
        let due = &mut clock.due[self.device];
        for (index, member) in members.iter().enumerate() {
            let differs = u64::from(!self.content.is_zero(member.address_1));
            due.push_back(Completion {
                at: done(index as u64 + 1),
                record: member.record,
                word: SUCCESS | differs << 8,
            });
        }
        if descriptor.opcode() == opcode::BATCH {
            due.push_back(Completion {
                at: done(pages),
                record: descriptor.record,
                word: SUCCESS | pages << 32,
            });
        }
        true
    }
}

impl Submit for Port {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    unsafe fn submit(&self, descriptors: &[Descriptor]) -> Submitted {
        let accepted = descriptors
            .iter()
            // SAFETY: as the caller promises.
            .take_while(|descriptor| unsafe { self.enqcmd(descriptor) })
            .count();
        Submitted {
            accepted,
            refusal: (accepted < descriptors.len()).then_some(Refusal::Full),
        }
    }

    fn now(&self) -> Duration {
        self.clock.work(self.host.parameters.look);
        Duration::from_nanos(self.clock.now() / 1000)
    }

    fn pause(&self, _: &Record, deadline: Duration) {
        let deadline = u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX);
        let mut state = lock(&self.clock.state);
        let next = state.due.iter().filter_map(|due| Some(due.front()?.at));
        let until = next
            .min()
            .unwrap_or(u64::MAX)
            .min(deadline.saturating_mul(1000));
        state.now = state.now.max(until);
        state.deliver();
    }

    fn close(&self) {
        lock(&self.clock.state).due[self.device].clear();
    }
}

const SUCCESS: u64 = 0x01;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
