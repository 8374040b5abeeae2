//! The state of the devices: queues, engines, batches, and the order of events.
//!
//! ```text
//!   submit ─> entries of a work queue ──start──> engine ──finish──> deliveries ──deliver──> record, accounts
//!                                       │          ^                 (latency, lateness)      │
//!                                       └─> batch ─┘ members, read one by one                 │
//!                                              ^──────────────────────────────────────────────┘ members done
//! ```
//! [`admission`] accepts descriptors, [`batch`] reads lists, [`executor`] does the work, [`completion`] reports it.
//! Nothing here waits: time is a number, and one [`Machine::step`] is one action. The driver decides whether time is
//! real.

mod admission;
mod batch;
mod completion;
mod executor;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    hash::{DefaultHasher, Hash as _},
    sync::Arc,
};

use fastrand::Rng;

use super::{
    Statistics,
    config::{Config, DeviceConfig},
    dsa::Outcome,
    faults::{Faults, InjectedFault, On, Scripted},
    memory::Pages,
    nanoseconds,
    validate::validate,
};
pub(super) use admission::gone;
use batch::Batch;
use completion::Delivery;
pub(super) use executor::Executor;
use idxd::{Descriptor, Kind, Limits, RecordImage, opcode};

/// Never: later than everything.
pub(super) const NEVER: u64 = u64::MAX;

#[derive(Debug)]
pub(super) struct Machine {
    pub(super) clock: u64,
    pub(super) devices: Vec<Device>,
    pub(super) clients: Vec<Client>,
    pub(super) faults: Faults,
    pub(super) scripted: Vec<Scripted>,
    pub(super) statistics: Statistics,
    /// A hash of all events in their order, without addresses, which differ from run to run.
    pub(super) trace: DefaultHasher,
    batches: BTreeMap<u64, Batch>,
    /// DRAIN descriptors, which wait for all earlier ones.
    drains: Vec<Unit>,
    /// Descriptors that will never complete.
    stuck: Vec<Unit>,
    deliveries: Vec<Delivery>,
    random: Rng,
    sequence: u64,
    executor: Arc<Executor>,
}

#[derive(Debug)]
pub(super) struct Device {
    pub(super) kind: Kind,
    pub(super) enabled: bool,
    pub(super) unplugged: bool,
    pub(super) queues: Vec<Queue>,
    /// What each engine runs.
    pub(super) engines: Vec<Option<Running>>,
    /// Time at which the throughput that the engines share is free again.
    pipe: u64,
}

#[derive(Debug)]
pub(super) struct Queue {
    pub(super) limits: Limits,
    /// Incremented when the device is disabled, which invalidates earlier handles.
    pub(super) generation: u32,
    /// Number of submissions that will be refused as full.
    pub(super) full: u32,
    entries: VecDeque<Unit>,
    /// Sequence numbers of incomplete submissions, and their clients.
    outstanding: BTreeMap<u64, usize>,
}

/// A process that opened a work queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Client {
    pub(super) device: usize,
    pub(super) queue: usize,
    pub(super) generation: u32,
    pub(super) in_flight: usize,
    pub(super) closed: bool,
    /// Opened by the process that this one was forked from.
    pub(super) forked: bool,
}

/// A descriptor that the device has.
#[derive(Clone, Debug)]
pub(super) struct Unit {
    pub(super) sequence: u64,
    pub(super) client: usize,
    device: usize,
    queue: usize,
    descriptor: Descriptor,
    /// Its batch, and its index in the batch.
    member: Option<(u64, u32)>,
    /// An injected fault.
    fault: Option<InjectedFault>,
}

#[derive(Clone, Debug)]
pub(super) struct Running {
    pub(super) unit: Unit,
    pub(super) due: u64,
}

/// A possible next action of the devices.
#[derive(Clone, Copy, Debug)]
enum Action {
    Start(usize, usize),
    Finish(usize, usize),
    Deliver(usize),
}

impl Machine {
    pub(super) fn new(config: &Config) -> Self {
        Self {
            clock: 0,
            devices: config.devices.iter().map(Device::new).collect(),
            clients: Vec::new(),
            faults: config.faults.clone(),
            scripted: Vec::new(),
            statistics: Statistics::default(),
            trace: DefaultHasher::new(),
            batches: BTreeMap::new(),
            drains: Vec::new(),
            stuck: Vec::new(),
            deliveries: Vec::new(),
            random: Rng::with_seed(config.seed),
            sequence: 0,
            executor: Arc::new(Executor {
                pages: Pages::default(),
                speeds: config.speeds,
                work: config.work.clone(),
            }),
        }
    }

    pub(super) fn executor(&self) -> Arc<Executor> {
        Arc::clone(&self.executor)
    }

    /// Injects a fault; see `Model::inject`.
    pub(super) fn script(&mut self, on: On, skip: u32, times: u32, fault: InjectedFault) {
        if times > 0 {
            self.scripted.push(Scripted {
                on,
                skip,
                times,
                fault,
            });
        }
    }

    /// Does one random action of those that are possible now. Returns whether there was one.
    pub(super) fn step(&mut self) -> bool {
        let mut actions = self.possible();
        if actions.is_empty() {
            return false;
        }
        let action = actions.swap_remove(self.random.usize(..actions.len()));
        self.act(action);
        true
    }

    /// Time of the next action, if none is possible now.
    pub(super) fn next_due(&self) -> Option<u64> {
        let engines = self.devices.iter().flat_map(|device| &device.engines);
        let running = engines.flatten().map(|running| running.due);
        let deliveries = self.deliveries.iter().map(|delivery| delivery.due);
        running.chain(deliveries).filter(|due| *due != NEVER).min()
    }

    /// Does all actions up to time `to`, in the order of time.
    pub(super) fn advance(&mut self, to: u64) {
        loop {
            while self.step() {}
            match self.next_due() {
                Some(due) if due <= to => self.clock = self.clock.max(due),
                _ => break,
            }
        }
        self.clock = self.clock.max(to);
    }

    /// Gives work to an idle engine, if there is any.
    fn start(&mut self, device: usize, engine: usize) {
        let Some(choice) = self.choose(device) else {
            return;
        };
        let fetched = match choice {
            Choice::Member(batch) => self.next_member(batch),
            Choice::Queue(queue) => self.devices[device].queues[queue].entries.pop_front(),
        };
        let Some(mut unit) = fetched else {
            return;
        };
        [2, self.clock, unit.sequence].hash(&mut self.trace);
        unit.fault = self.fault(&unit);
        let limits = &self.devices[device].queues[unit.queue].limits;
        let valid = validate(&unit.descriptor, limits, unit.member.is_some());
        if let Err(outcome) = valid {
            return self.deliver_at(self.clock, unit, Some(outcome.image()));
        }
        match (unit.descriptor.opcode(), unit.fault) {
            (_, Some(InjectedFault::Stuck)) => self.stuck.push(unit),
            (_, Some(InjectedFault::StuckEngine)) => {
                self.devices[device].engines[engine] = Some(Running { unit, due: NEVER });
            }
            (opcode::BATCH, Some(InjectedFault::Status(code))) => {
                self.deliver_at(self.clock, unit, Some(Outcome::status(code).image()));
            }
            (opcode::BATCH, _) => self.open_batch(unit),
            (opcode::DRAIN, _) => {
                self.drains.push(unit);
                self.check_drains();
            }
            (_, Some(InjectedFault::Late(after))) => {
                let due = self.clock.saturating_add(nanoseconds(after));
                self.deliver_at(due, unit, None);
            }
            _ => {
                let slow = match unit.fault {
                    Some(InjectedFault::Slow(by)) => nanoseconds(by),
                    _ => 0,
                };
                let took = self.executor.duration(&unit.descriptor);
                let pipe = &mut self.devices[device].pipe;
                *pipe = self.clock.max(*pipe).saturating_add(took);
                // Earlier than `NEVER`, which means that the operation does not end.
                let due = pipe.saturating_add(slow).min(NEVER - 1);
                self.devices[device].engines[engine] = Some(Running { unit, due });
            }
        }
    }

    /// Finishes what an engine runs.
    fn finish(&mut self, device: usize, engine: usize) {
        let Some(Running { unit, .. }) = self.devices[device].engines[engine].take() else {
            return;
        };
        [3, self.clock, unit.sequence].hash(&mut self.trace);
        let image = self.work(&unit);
        self.conclude(unit, image);
    }

    /// Does the work of a descriptor, and returns what its record reports.
    fn work(&mut self, unit: &Unit) -> RecordImage {
        let random = self.random.u64(..);
        let kind = self.devices[unit.device].kind;
        self.executor
            .work(kind, &unit.descriptor, unit.fault, random)
    }

    /// Opens a work queue for another client. `None` if it cannot be opened.
    pub(super) fn open(&mut self, device: usize, queue: usize) -> Option<(usize, Limits)> {
        let here = self.devices.get(device)?;
        let is_there = here.enabled && !here.unplugged;
        let there = here.queues.get(queue).filter(|_| is_there)?;
        self.clients.push(Client {
            device,
            queue,
            generation: there.generation,
            in_flight: 0,
            closed: false,
            forked: false,
        });
        Some((self.clients.len() - 1, there.limits.clone()))
    }

    /// Drops the client's descriptors that can never complete, as its queue is being closed.
    pub(super) fn abandon(&mut self, client: usize) {
        let given = self.remove(|unit| unit.client == client);
        self.statistics.aborted += given;
        self.clients[client].in_flight = 0;
    }

    /// Invalidates all handles of a device.
    pub(super) fn revoke(&mut self, device: usize) {
        for queue in &mut self.devices[device].queues {
            queue.generation += 1;
        }
    }

    /// Drops all descriptors of a device; their records are never written.
    pub(super) fn reset(&mut self, device: usize) {
        let given = self.remove(|unit| unit.device == device);
        self.statistics.aborted += given;
        for client in self
            .clients
            .iter_mut()
            .filter(|client| client.device == device)
        {
            client.in_flight = 0;
        }
        self.devices[device].pipe = 0;
        self.revoke(device);
        [4, self.clock, device as u64].hash(&mut self.trace);
    }

    /// Removes the descriptors that `which` selects. Returns how many of them clients had submitted.
    fn remove(&mut self, which: impl Fn(&Unit) -> bool) -> u64 {
        let mut gone = BTreeSet::new();
        let mut note = |unit: &Unit| {
            let found = which(unit);
            if found && unit.member.is_none() {
                gone.insert((unit.device, unit.queue, unit.sequence));
            }
            !found
        };
        for device in &mut self.devices {
            for queue in &mut device.queues {
                queue.entries.retain(&mut note);
            }
            for engine in &mut device.engines {
                engine.take_if(|running| !note(&running.unit));
            }
        }
        self.batches.retain(|_, batch| note(&batch.parent));
        self.drains.retain(&mut note);
        self.stuck.retain(&mut note);
        self.deliveries.retain(|delivery| note(&delivery.unit));
        let mut count = 0;
        for (device, queue, sequence) in gone {
            // A descriptor that only lacks its record is not outstanding.
            if self.devices[device].queues[queue]
                .outstanding
                .remove(&sequence)
                .is_some()
            {
                count += 1;
            }
        }
        self.check_drains();
        count
    }

    fn next_sequence(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }

    /// All actions that are possible now.
    fn possible(&self) -> Vec<Action> {
        let mut actions = Vec::new();
        for (d, device) in self.devices.iter().enumerate() {
            let has_choice = self.choices(d).next().is_some();
            for (e, engine) in device.engines.iter().enumerate() {
                match engine {
                    Some(running) if running.due <= self.clock => {
                        actions.push(Action::Finish(d, e));
                    }
                    None if has_choice => actions.push(Action::Start(d, e)),
                    _ => {}
                }
            }
        }
        let due = self.deliveries.iter().enumerate();
        let due = due.filter(|(_, delivery)| delivery.due <= self.clock);
        actions.extend(due.map(|(index, _)| Action::Deliver(index)));
        actions
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Start(device, engine) => self.start(device, engine),
            Action::Finish(device, engine) => self.finish(device, engine),
            Action::Deliver(index) => self.deliver(index),
        }
    }

    /// Work that the engines of a device could begin next.
    fn choices(&self, device: usize) -> impl Iterator<Item = Choice> {
        let here = &self.devices[device];
        let batches = self
            .batches
            .iter()
            .filter(move |(_, batch)| batch.parent.device == device && batch.has_next());
        let queues = here.queues.iter().enumerate().filter(move |(_, queue)| {
            let first = queue.entries.front();
            first.is_some_and(|unit| {
                unit.descriptor.opcode() != opcode::BATCH || self.takes_batch(device)
            })
        });
        batches
            .map(|(id, _)| Choice::Member(*id))
            .chain(queues.map(|(index, _)| Choice::Queue(index)))
    }

    fn choose(&mut self, device: usize) -> Option<Choice> {
        let count = self.choices(device).count();
        let index = self.random.usize(..count.max(1));
        self.choices(device).nth(index)
    }

    /// The fault of a descriptor: an injected one, or else a random one.
    fn fault(&mut self, unit: &Unit) -> Option<InjectedFault> {
        let (code, member) = (
            unit.descriptor.opcode(),
            unit.member.map(|(_, index)| index),
        );
        for index in 0..self.scripted.len() {
            let script = &mut self.scripted[index];
            if !script.on.fits(unit.device, code, member) {
                continue;
            }
            if script.skip > 0 {
                script.skip -= 1;
                continue;
            }
            let fault = script.fault;
            script.times = script.times.saturating_sub(1);
            if script.times == 0 {
                self.scripted.remove(index);
            }
            return Some(fault);
        }
        let random = &mut self.random;
        let mut chances = self.faults.chances.iter();
        let chance = chances.find(|chance| {
            chance.on.fits(unit.device, code, member) && is_due(random, chance.per_mille)
        });
        chance.map(|chance| chance.fault)
    }
}

/// Whether a fault with this probability, per mille, happens now. An impossible one draws no random number.
fn is_due(random: &mut Rng, per_mille: u16) -> bool {
    per_mille > 0 && random.u16(..1000) < per_mille
}

#[derive(Clone, Copy, Debug)]
enum Choice {
    Member(u64),
    Queue(usize),
}

impl Device {
    fn new(config: &DeviceConfig) -> Self {
        let queues = config.queues.iter().map(|limits| Queue {
            limits: limits.clone(),
            generation: 0,
            full: 0,
            entries: VecDeque::new(),
            outstanding: BTreeMap::new(),
        });
        Self {
            kind: config.kind,
            enabled: true,
            unplugged: false,
            queues: queues.collect(),
            engines: (0..config.engines).map(|_| None).collect(),
            pipe: 0,
        }
    }
}
