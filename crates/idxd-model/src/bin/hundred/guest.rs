//! One guest: the driver, as a migration uses it, step by step.
//!
//! ```text
//!   start(batch n+1)   send(batch n)   finish(batch n+1)   │   start(batch n+2)   send(batch n+1)   …
//!   └── a step: everything but its place in the queue is this guest's own affair ──┘
//! ```

use std::{collections::VecDeque, path::Path, sync::Arc};

use anyhow::{Context, Result};
use idxd::{
    Queue, Shape, Tuning,
    offload::{self, Devices, OffloadCounters, ZeroScanner},
    shares::{Share, Table, Weight},
};

use crate::{
    host::{Clock, Host, Port},
    parameters::{BATCH, PAGE, Picos},
};

/// What is in the guests' memory: zero pages come in runs of 32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Content {
    /// Zero pages in a thousand.
    pub(crate) zero_in_1000: u64,
}

impl Content {
    /// Whether the page at `address` is zero.
    pub(crate) fn is_zero(self, address: u64) -> bool {
        scatter(address >> 17) % 1000 < self.zero_in_1000
    }
}

/// A number that looks like any other (the finaliser of SplitMix64).
pub(crate) fn scatter(number: u64) -> u64 {
    let number = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ number >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ number >> 31
}

/// What a guest does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// Batches that it scans.
    pub(crate) batches: u64,
    /// Batches that it has started before it finishes the first of them.
    pub(crate) depth: usize,
    /// Bytes a second that it sends of its normal pages; `None`: it only scans.
    pub(crate) link: Option<u64>,
    /// What it is worth, compared with others.
    pub(crate) weight: Weight,
}

/// Where a guest's scanning thread is.
#[derive(Debug)]
pub(crate) struct Guest {
    clock: Arc<Clock>,
    host: Arc<Host>,
    content: Content,
    plan: Plan,
    devices: Arc<Devices>,
    scanner: ZeroScanner,
    base: u64,
    next: u64,
    out: VecDeque<(Vec<u64>, offload::Batch, Picos)>,
    /// Bytes of the batch before, to be sent.
    unsent: u64,
    seen: OffloadCounters,
    pub(crate) scans: Vec<Picos>,
    pub(crate) wrong: u64,
}

impl Guest {
    /// Guest `number`, which begins at `begin`, on the first `devices` devices, which it divides with others by tables
    /// in `shares`.
    pub(crate) fn new(
        host: &Arc<Host>,
        number: u64,
        begin: Picos,
        content: Content,
        plan: Plan,
        devices: usize,
        shares: Option<&Path>,
    ) -> Result<Self> {
        let clock = Arc::new(Clock::starting_at(begin, devices));
        let queues = (0..devices).map(|device| {
            let port = Arc::new(Port::new(host, &clock, device, content));
            let shape = Shape {
                members: u32::try_from(BATCH)?,
                buffer_bytes: 0,
            };
            let tuning = Tuning {
                slots: slots(plan.depth),
                ..Tuning::default()
            };
            let queue = Queue::new(port, shape, tuning)?;
            let join = |directory: &Path| -> Result<Share> {
                let table = table(directory, device, host.parameters.entries)?;
                Ok(table.join(plan.weight)?)
            };
            Ok((queue, shares.map(join).transpose()?))
        });
        let queues: Vec<_> = queues.collect::<Result<_>>()?;
        let devices = Arc::new(Devices::new(queues, None));
        Ok(Self {
            scanner: ZeroScanner::new(devices.clone(), u32::try_from(PAGE)?, None),
            host: host.clone(),
            clock,
            content,
            plan,
            devices,
            base: (number + 1) << 40,
            next: 0,
            out: VecDeque::new(),
            unsent: 0,
            seen: OffloadCounters::default(),
            scans: Vec::new(),
            wrong: 0,
        })
    }

    pub(crate) fn now(&self) -> Picos {
        self.clock.now()
    }

    /// Scans a batch more; whether there is another one.
    pub(crate) fn step(&mut self) -> bool {
        let started = self.clock.cpu();
        if self.next < self.plan.batches {
            let first = self.base + self.next * BATCH as u64 * PAGE;
            let pages: Vec<u64> = (0..BATCH as u64).map(|page| first + page * PAGE).collect();
            let batch = self.scanner.start(&pages);
            self.next += 1;
            self.out
                .push_back((pages, batch, self.clock.cpu() - started));
        }
        if self.next < self.plan.batches && self.out.len() < self.plan.depth {
            return true;
        }
        let Some((pages, batch, starting)) = self.out.pop_front() else {
            return false;
        };
        self.send();
        let finished = self.clock.cpu();
        let verdicts = self.finish(&pages, batch);
        self.scans.push(starting + self.clock.cpu() - finished);
        for (page, verdict) in pages.iter().zip(verdicts) {
            self.wrong += u64::from(verdict != self.content.is_zero(*page));
            self.unsent += if verdict { 0 } else { PAGE };
        }
        !self.out.is_empty() || self.next < self.plan.batches
    }

    fn finish(&mut self, pages: &[u64], batch: offload::Batch) -> [bool; BATCH] {
        let mut verdicts = [false; BATCH];
        let (clock, host, content) = (&self.clock, &self.host, self.content);
        let parameters = &host.parameters;
        let mut look = |page: usize| {
            let zero = content.is_zero(pages[page]);
            let (time, bytes) = match zero {
                true => (parameters.cpu_zero, PAGE),
                false => (parameters.cpu_normal, parameters.normal_bytes),
            };
            clock.work(host.transfer(time, bytes));
            zero
        };
        let finished = self.scanner.finish(batch, pages, &mut look, &mut verdicts);
        self.wrong += u64::from(finished.is_err());
        let work = self.devices.work();
        let parsed = work.by_device - self.seen.by_device;
        self.seen = work;
        clock.work(parameters.parse * parsed);
        verdicts
    }

    /// The processor is free meanwhile.
    fn send(&mut self) {
        let bytes = std::mem::take(&mut self.unsent);
        if let Some(link) = self.plan.link {
            let time = bytes * (crate::parameters::SECOND / 1000) / (link / 1000).max(1);
            self.clock.idle_until(self.clock.now() + time);
        }
    }

    /// Time that a processor has worked for it.
    pub(crate) fn cpu(&self) -> Picos {
        self.clock.cpu()
    }

    pub(crate) fn work(&self) -> OffloadCounters {
        self.devices.work()
    }

    pub(crate) fn devices(&self) -> &Devices {
        &self.devices
    }
}

/// As many as are ever in use: those that are out, and those that are late.
fn slots(depth: usize) -> u32 {
    if depth > 64 {
        128
    } else if depth > 1 {
        32
    } else {
        8
    }
}

/// The table of the shares of `device`, a queue of `entries`, as another process opens it.
pub(crate) fn table(directory: &Path, device: usize, entries: u32) -> Result<Table> {
    let entries = entries.try_into().context("no entries")?;
    Ok(Table::open(directory, &format!("wq{device}.0"), entries)?)
}
