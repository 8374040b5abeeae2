//! Auto in virtual time: senders, sockets, a link, receivers and the cores under them, step by step.
//!
//! ```text
//! QEMU ─> [ buffer ] ─> read ─> encode ─> copy ─> [ socket's buffer ] ═ link
//!                       └──── sender's thread ─┘
//! link ═> [ buffer ] ─> read ─> decode ─> write ─> [ buffer ] ─> QEMU
//!                       └── receiver's thread ─┘
//! ```
//! Threads with work share their cores evenly, or take turns; channels with bytes share the link evenly. The costs and sizes of
//! rungs on the simulated data are not those the policy starts with. Everything is deterministic, time included.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "bytes and nanoseconds of a simulation are far from the limits"
)]

use std::{cell::Cell, collections::VecDeque, fmt, rc::Rc, time::Duration};

use crate::adaptive::{
    COMPARED_PART, LEAST_PACKETS, SAMPLED_PART,
    meter::window,
    policy::{Cost, LIGHTEST, LinkWindow, Policy, RAW, RUNGS, Rates, Waits, buffered},
};

/// Bytes of pages in a packet.
const PACKET: f64 = 524_288.0;

/// Everything that a run depends on.
#[derive(Clone, Copy, Debug)]
struct World {
    /// Bytes per nanosecond; infinite if there is no limit.
    link: f64,
    channels: usize,
    cores: usize,
    shared_cores: bool,
    /// Bytes that each of a connection's two buffers holds.
    buffer: f64,
    /// Whether the receiver reports what it waits for.
    reports: bool,
    /// Nanoseconds of the receiver for each byte of pages, beside reading and decoding.
    touching: f64,
    /// Whether QEMUs are at both ends, each with a thread for each channel, and threads have cores by turns, as a scheduler
    /// gives them.
    qemus: bool,
    /// Threads of others that always want a core.
    others: usize,
    data: Data,
    /// Standard deviation of the rates that auto sees, as a part of them.
    noise: f64,
}

impl World {
    /// Nanoseconds per byte of pages for a rung, for the packet of that number.
    fn encoding(&self, rung: usize, number: usize) -> f64 {
        let varies = match self.qemus {
            true => [0.8, 1.1, 1.0, 1.3, 0.8][number * 3 % 5],
            false => 1.0,
        };
        let hurries = if self.data.size(rung, number) < 1.0 {
            1.0
        } else {
            0.4
        };
        ENCODING[rung] * varies * hurries
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Data {
    Text,
    /// PostgreSQL's memory.
    Database,
    /// Some packets hardly compress, some to next to nothing.
    Memory,
    Noise,
    /// Every other 8 packets are noise, the others text.
    Mixed,
    /// Files of all kinds and lengths, each of many packets.
    Files,
    /// A packed kernel and its packed files, as a guest that has booted has at the beginning, then text.
    Booted,
}

/// Packets of a kernel of [`Data::Booted`].
const KERNEL: usize = 14;

/// Packets of each of [`Data::Files`], and its size beside text's.
const FILES: [(usize, f64); 7] = [
    (10, 1.4),
    (26, 0.35),
    (14, 1.9),
    (6, 1.1),
    (32, 0.35),
    (12, 1.6),
    (8, 0.7),
];

impl Data {
    /// Size by each rung, of the packet of that number.
    fn size(self, rung: usize, number: usize) -> f64 {
        const TEXT: [f64; RUNGS] = [1.0, 0.32, 0.27, 0.26, 0.24, 0.23];
        if rung == RAW {
            return 1.0;
        }
        match self {
            Self::Database => [1.0, 0.112, 0.075, 0.07, 0.07, 0.066][rung],
            Self::Noise => 1.0,
            Self::Mixed if (number / 8).is_multiple_of(2) => 1.0,
            Self::Booted if number < KERNEL => [1.0, 0.96, 0.948, 0.945, 0.94, 0.935][rung],
            Self::Text | Self::Mixed | Self::Booted => TEXT[rung],
            Self::Memory => [0.1, 0.35, 0.6, 0.9, 1.3, 1.7, 2.0][number * 5 % 7] * TEXT[rung],
            Self::Files => {
                let mut left = number % FILES.iter().map(|file| file.0).sum::<usize>();
                let file = FILES.iter().find(|(packets, _)| {
                    let is_here = left < *packets;
                    left = left.saturating_sub(*packets);
                    is_here
                });
                file.map_or(1.0, |file| file.1) * TEXT[rung]
            }
        }
        .min(1.0)
    }
}

/// Nanoseconds per byte of pages, of one core.
const ENCODING: [f64; RUNGS] = [0.0, 1.7, 2.0, 2.25, 3.1, 6.5];
const DECODING: [f64; RUNGS] = [0.0, 0.5, 0.7, 0.7, 0.7, 0.7];
/// Nanoseconds per byte on the wire.
const SENDING: f64 = 0.2;
const RECEIVING: f64 = 0.25;

/// Nanoseconds of a QEMU for each byte of pages, and of a relay to read or write it beside that QEMU.
const QEMU: f64 = 0.3;
const PASSING: f64 = 0.15;

/// Bytes in the buffer between a QEMU and a relay.
const INSIDE: f64 = 212e3;

/// Which rung a channel takes.
enum Choice {
    Fixed(usize),
    Auto(Box<Policy>),
}

/// A channel from end to end.
struct Channel {
    choice: Choice,
    number: usize,
    sender: Sender,
    /// Wire bytes in the two buffers.
    near: f64,
    far: f64,
    /// The source has let its socket's buffer run full and waits until a third is free.
    waits: bool,
    /// What is on its way, oldest first: wire bytes left to read, bytes of pages, decoding in nanoseconds.
    packets: VecDeque<(f64, f64, f64)>,
    receiver: Receiver,
    /// Bytes of pages between the source QEMU and the sender, and between the receiver and the destination QEMU.
    read_ahead: f64,
    written: f64,
    rung: usize,
    /// Wire bytes in all, and when the window began.
    wire: f64,
    wire_before: f64,
    /// What has been received of all channels, and when the window began.
    received: Rc<Cell<f64>>,
    received_before: f64,
    /// The channel's bytes in both buffers, when the window began.
    before: f64,
    sender_waits: Window,
    receiver_waits: Window,
    reported: Option<f64>,
    noise: Noise,
}

/// Random numbers of mean 0 and deviation 1.
struct Noise(u64);

impl Noise {
    /// The sum of twelve uniform numbers is nearly normal.
    fn next(&mut self) -> f64 {
        let mut uniform = || {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 40) as f64 / (1_u64 << 24) as f64
        };
        (0..12).map(|_| uniform()).sum::<f64>() - 6.0
    }
}

/// What a thread has waited for since its window began: for input, for output, for a core.
#[derive(Clone, Copy, Default)]
struct Window {
    /// Time from the beginning to its own.
    start: f64,
    time: f64,
    waits: [f64; 3],
    packets: u32,
}

impl Window {
    /// A step in which the thread ran for `ran`, with a core for the part `speed` of the time that it wanted one. It is blocked
    /// now, for input or output, or not at all.
    fn add(&mut self, step: f64, ran: f64, speed: f64, blocked: Option<usize>) {
        self.time += step;
        match blocked {
            None => self.waits[2] += step - ran,
            Some(wait) => {
                let queued = (ran / speed.max(0.01) - ran).min(step - ran).max(0.0);
                self.waits[2] += queued;
                self.waits[wait] += step - ran - queued;
            }
        }
    }

    /// The shares, at the end of a packet.
    fn shares(&mut self) -> Option<[f64; 3]> {
        self.packets += 1;
        let least = window(Duration::from_nanos(self.start as u64));
        if self.time < least.as_secs_f64() * 1e9 || self.packets < LEAST_PACKETS {
            return None;
        }
        let start = self.start + self.time;
        let Self { time, waits, .. } = std::mem::replace(
            self,
            Self {
                start,
                ..Self::default()
            },
        );
        Some(waits.map(|wait| wait / time))
    }
}

#[derive(Clone, Copy, Debug)]
enum Sender {
    /// Bytes of pages left to read.
    Read(f64),
    /// Nanoseconds of work left.
    Encode(f64),
    /// Wire bytes left to hand to the socket.
    Send(f64),
}

#[derive(Clone, Copy, Debug)]
enum Receiver {
    Read,
    /// Nanoseconds of work left, and the pages that are done then.
    Decode(f64, f64),
    /// Bytes of pages left to write.
    Write(f64),
}

struct Simulation {
    world: World,
    channels: Vec<Channel>,
    now: f64,
    arrived: f64,
    /// Nanoseconds of cores that all threads have used.
    cpu: f64,
    turns: Turns,
}

impl Simulation {
    fn new(world: World, choice: impl Fn() -> Choice) -> Self {
        let received = Rc::new(Cell::new(0.0));
        let channels =
            (0..world.channels).map(|index| Channel::new(choice(), index * 3, received.clone()));
        Self {
            world,
            channels: channels.collect(),
            now: 0.0,
            arrived: 0.0,
            cpu: 0.0,
            turns: Turns::default(),
        }
    }

    /// CPU time of all threads, in nanoseconds per byte of pages that has arrived.
    fn cpu_per_byte(&self) -> f64 {
        self.cpu / self.arrived
    }

    /// Bytes of pages per nanosecond over so many seconds.
    fn run(&mut self, seconds: f64) -> f64 {
        let (start, arrived) = (self.now, self.arrived);
        // A step is short beside a packet's time on the link, and beside its encoding.
        let share = self.world.link / self.world.channels as f64;
        let step = (16e3 / share).clamp(20e3, 200e3);
        while self.now < start + seconds * 1e9 {
            self.step(step);
        }
        (self.arrived - arrived) / (self.now - start)
    }

    fn step(&mut self, step: f64) {
        let world = self.world;
        // The link, shared by those who have bytes for it and room for them.
        let mut budget = step * world.link;
        let mut wanting = Vec::new();
        for (index, channel) in self.channels.iter().enumerate() {
            let wants = channel.near.min(world.buffer - channel.far).max(0.0);
            wanting.push((wants, index));
        }
        wanting.sort_by(|a, b| a.0.total_cmp(&b.0));
        let count = wanting.len();
        for (place, (wants, index)) in wanting.into_iter().enumerate() {
            let moved = f64::min(wants, budget / (count - place) as f64);
            budget -= moved;
            self.channels[index].near -= moved;
            self.channels[index].far += moved;
        }
        let runs = match world.qemus {
            true => self.turns.give(&world, step, &self.channels),
            false => shares(&world, &self.channels),
        };
        for (channel, [producer, sender, receiver, consumer]) in self.channels.iter_mut().zip(runs)
        {
            self.cpu += channel.produce(&world, step * producer);
            let ran = channel.send(&world, step * sender);
            channel
                .sender_waits
                .add(step, ran, sender, channel.sender_is_blocked(&world));
            let (received, decoded) = channel.receive(&world, step * receiver);
            channel.receiver_waits.add(
                step,
                decoded,
                receiver,
                channel.receiver_is_blocked(&world),
            );
            let (arrived, consumed) = channel.consume(&world, received, step * consumer);
            self.arrived += arrived;
            self.cpu += ran + decoded + consumed;
        }
        self.now += step;
    }
}

/// For each channel the part of a step for which its threads have a core: source QEMU, sender, receiver, destination QEMU.
type Runs = Vec<[f64; 4]>;

/// Threads share cores evenly.
fn shares(world: &World, channels: &[Channel]) -> Runs {
    let busy = |threads: [usize; 2]| -> usize {
        let of =
            |channel: &Channel| threads.map(|thread| usize::from(channel.has_work(world)[thread]));
        channels
            .iter()
            .map(|channel| of(channel).iter().sum::<usize>())
            .sum()
    };
    let speed = |threads: usize| (world.cores as f64 / threads as f64).min(1.0);
    let (near, far) = (busy([0, 1]), busy([2, 3]));
    let [near, far] = match world.shared_cores {
        true => [speed(near + far); 2],
        false => [speed(near), speed(far)],
    };
    vec![[near, near, far, far]; channels.len()]
}

/// Threads have cores by turns: who has had least goes first, and keeps its core for a while.
#[derive(Default)]
struct Turns {
    /// Nanoseconds that each thread has had, and whether it has a core.
    threads: Vec<(f64, bool)>,
}

/// How long a thread keeps its core while it has work, and how much less than others one that wakes up counts to have had.
const TURN: f64 = 3e6;
const BONUS: f64 = 1e6;

impl Turns {
    fn give(&mut self, world: &World, step: f64, channels: &[Channel]) -> Runs {
        let wants = channels.iter().flat_map(|channel| channel.has_work(world));
        let wants: Vec<_> = wants.chain(vec![true; world.others]).collect();
        self.threads.resize(wants.len(), (0.0, false));
        let had = |(had, has): (f64, bool)| if has { had - TURN } else { had };
        let awake = self.threads.iter().zip(&wants).filter(|(_, wants)| **wants);
        let least = awake
            .map(|(thread, _)| thread.0)
            .fold(f64::INFINITY, f64::min);
        let mut order: Vec<_> = (0..wants.len()).filter(|thread| wants[*thread]).collect();
        for thread in &mut self.threads {
            thread.0 = thread.0.max(least - BONUS);
        }
        order.sort_by(|a, b| had(self.threads[*a]).total_cmp(&had(self.threads[*b])));
        order.truncate(world.cores);
        for (number, thread) in self.threads.iter_mut().enumerate() {
            thread.1 = order.contains(&number);
            thread.0 += if thread.1 { step } else { 0.0 };
        }
        let runs = self.threads.chunks_exact(4).take(channels.len());
        runs.map(|run| [0, 1, 2, 3].map(|thread| if run[thread].1 { 1.0 } else { 0.0 }))
            .collect()
    }
}

impl Channel {
    fn new(choice: Choice, number: usize, received: Rc<Cell<f64>>) -> Self {
        Self {
            choice,
            number,
            sender: Sender::Read(PACKET),
            near: 0.0,
            far: 0.0,
            waits: false,
            packets: VecDeque::new(),
            receiver: Receiver::Read,
            read_ahead: 0.0,
            written: 0.0,
            rung: RAW,
            wire: 0.0,
            wire_before: 0.0,
            received,
            received_before: 0.0,
            before: 0.0,
            sender_waits: Window::default(),
            receiver_waits: Window::default(),
            reported: None,
            noise: Noise(number as u64),
        }
    }

    /// Which threads have work: source QEMU, sender, receiver, destination QEMU.
    fn has_work(&self, world: &World) -> [bool; 4] {
        [
            world.qemus && self.read_ahead < INSIDE,
            self.sender_is_blocked(world).is_none(),
            self.receiver_is_blocked(world).is_none(),
            world.qemus && self.written > 0.0,
        ]
    }

    /// What the sender waits for: 0 for its source, 1 for the socket.
    fn sender_is_blocked(&self, world: &World) -> Option<usize> {
        match self.sender {
            Sender::Read(_) => (world.qemus && self.read_ahead <= 0.0).then_some(0),
            Sender::Encode(_) => None,
            Sender::Send(..) => self.is_stuck(world).then_some(1),
        }
    }

    fn is_stuck(&self, world: &World) -> bool {
        let free = world.buffer - self.near;
        if self.waits {
            free < world.buffer / 3.0
        } else {
            free <= 1.0
        }
    }

    /// What the receiver waits for: 0 for the network, 1 for its consumer.
    fn receiver_is_blocked(&self, world: &World) -> Option<usize> {
        match self.receiver {
            Receiver::Read => (self.far <= 1.0).then_some(0),
            Receiver::Decode(..) => None,
            Receiver::Write(_) => (world.qemus && self.written >= INSIDE - 1e-6).then_some(1),
        }
    }

    /// Does what the source QEMU's thread does; returns the CPU time.
    fn produce(&mut self, world: &World, left: f64) -> f64 {
        if !world.qemus {
            return 0.0;
        }
        let bytes = f64::min(left / QEMU, INSIDE - self.read_ahead);
        self.read_ahead += bytes;
        bytes * QEMU
    }

    /// Does what the destination QEMU's thread does; returns the bytes of pages that have arrived there, and the CPU time.
    fn consume(&mut self, world: &World, received: f64, left: f64) -> (f64, f64) {
        if !world.qemus {
            return (received, 0.0);
        }
        let read = f64::min(self.written, left / QEMU);
        self.written -= read;
        (read, read * QEMU)
    }

    /// Does what the sender's thread does with so much CPU time; returns how much it used.
    fn send(&mut self, world: &World, time: f64) -> f64 {
        let mut left = time;
        while left > 1e-6 {
            match self.sender {
                Sender::Read(_) if !world.qemus => self.has_read(world),
                Sender::Read(bytes) => {
                    let read = f64::min(bytes, left / PASSING).min(self.read_ahead);
                    self.read_ahead -= read;
                    left -= read * PASSING;
                    self.sender = Sender::Read(bytes - read);
                    if bytes - read <= 1e-6 {
                        self.has_read(world);
                    } else if self.read_ahead <= 1e-6 {
                        self.read_ahead = 0.0;
                        break;
                    }
                }
                Sender::Encode(work) if work > left => {
                    self.sender = Sender::Encode(work - left);
                    left = 0.0;
                }
                Sender::Encode(work) => {
                    left -= work;
                    self.has_encoded(world);
                }
                Sender::Send(bytes) => {
                    if self.is_stuck(world) {
                        self.waits = true;
                        break;
                    }
                    self.waits = false;
                    let sent = bytes.min(left / SENDING).min(world.buffer - self.near);
                    self.near += sent;
                    left -= sent * SENDING;
                    self.sender = Sender::Send(bytes - sent);
                    if bytes - sent <= 1e-6 {
                        self.is_out(world);
                    }
                }
            }
        }
        time - left
    }

    /// Chooses for the packet and begins to encode it.
    fn has_read(&mut self, world: &World) {
        let (number, data) = (self.number, world.data);
        let mut work = 0.0;
        self.rung = match &mut self.choice {
            Choice::Fixed(rung) => *rung,
            Choice::Auto(policy) => {
                if let Some(rung) = policy.wanted() {
                    let costs = [rung, rung + 1].map(|rung| Cost {
                        size: data.size(rung, number),
                        cpu: world.encoding(rung, number),
                    });
                    work += costs.iter().map(|cost| cost.cpu).sum::<f64>() / COMPARED_PART as f64;
                    policy.compared(rung, costs);
                }
                match policy.mixes_raw() {
                    true => {
                        work += world.encoding(LIGHTEST, number) / SAMPLED_PART as f64;
                        policy.pick(data.size(LIGHTEST, number))
                    }
                    false => policy.rung(),
                }
            }
        };
        work += world.encoding(self.rung, number);
        self.sender = Sender::Encode(work * PACKET);
    }

    fn has_encoded(&mut self, world: &World) {
        let size = world.data.size(self.rung, self.number);
        let decoding = if size < 1.0 { DECODING[self.rung] } else { 0.0 } + world.touching;
        let wire = PACKET * size + 1000.0;
        self.wire += wire;
        self.sender = Sender::Send(wire);
        self.packets.push_back((wire, PACKET, decoding * PACKET));
        self.number += 1;
    }

    fn is_out(&mut self, world: &World) {
        self.sender = Sender::Read(PACKET);
        let Choice::Auto(policy) = &mut self.choice else {
            return;
        };
        let Window { time, packets, .. } = self.sender_waits;
        if let Some([source, socket, core]) = self.sender_waits.shares() {
            let noise = 1.0 + world.noise * self.noise.next();
            let rate = f64::from(packets + 1) * PACKET / time * noise;
            let waits = Waits {
                source,
                socket,
                core,
                network: self.reported.filter(|_| world.reports),
            };
            let wire = (self.wire - self.wire_before) / time * noise;
            let (received, unacknowledged) = (self.received.get(), self.near + self.far);
            let link = LinkWindow {
                arrived: (received - self.received_before) / time * noise,
                buffered: buffered([self.before, unacknowledged], wire, [time, 0.0]),
            };
            (self.wire_before, self.received_before) = (self.wire, received);
            self.before = unacknowledged;
            let rates = Rates {
                pages: rate,
                wire,
                link: Some(link),
            };
            policy.observe(waits, rates);
        }
        policy.next_packet();
    }

    /// Does the receiver's work; returns the bytes of pages that have arrived, and the CPU time.
    fn receive(&mut self, world: &World, time: f64) -> (f64, f64) {
        let (mut arrived, mut left) = (0.0, time);
        while left > 1e-6 {
            match self.receiver {
                Receiver::Decode(work, pages) if work <= left => {
                    if let Some([network, ..]) = self.receiver_waits.shares() {
                        self.reported = Some(network);
                    }
                    left -= work;
                    arrived += pages;
                    self.receiver = Receiver::Write(pages);
                }
                Receiver::Write(_) if !world.qemus => self.receiver = Receiver::Read,
                Receiver::Write(bytes) => {
                    let written = f64::min(bytes, left / PASSING).min(INSIDE - self.written);
                    self.written += written;
                    left -= written * PASSING;
                    self.receiver = Receiver::Write(bytes - written);
                    if bytes - written <= 1e-6 {
                        self.receiver = Receiver::Read;
                    } else if self.written >= INSIDE - 1e-6 {
                        break;
                    }
                }
                Receiver::Decode(work, pages) => {
                    self.receiver = Receiver::Decode(work - left, pages);
                    left = 0.0;
                }
                Receiver::Read => {
                    let Some((wire, pages, decoding)) = self.packets.front_mut() else {
                        break;
                    };
                    let read = f64::min(*wire, self.far).min(left / RECEIVING);
                    if read <= 0.0 {
                        break;
                    }
                    self.far -= read;
                    self.received.set(self.received.get() + read);
                    *wire -= read;
                    left -= read * RECEIVING;
                    if *wire <= 1e-3 {
                        self.receiver = Receiver::Decode(*decoding, *pages);
                        self.packets.pop_front();
                    }
                }
            }
        }
        (arrived, time - left)
    }
}

fn auto() -> Choice {
    Choice::Auto(Box::new(Policy::new()))
}

const GBIT: f64 = 0.125;

const TEXT_AT_25: World = World {
    link: 25.0 * GBIT,
    channels: 2,
    cores: 2,
    shared_cores: false,
    buffer: 2e6,
    reports: true,
    touching: 0.0,
    qemus: false,
    others: 0,
    data: Data::Text,
    noise: 0.0,
};

/// The goodput of auto, once it has had a second.
fn goodput(world: World) -> f64 {
    let mut simulation = Simulation::new(world, auto);
    simulation.run(1.0);
    simulation.run(1.0)
}

/// The best goodput of a fixed rung, and the rung.
fn best_fixed(world: World) -> (f64, usize) {
    let runs = (0..RUNGS).map(|rung| {
        let mut simulation = Simulation::new(world, || Choice::Fixed(rung));
        let seconds = if world.link < GBIT { 0.8 } else { 0.2 };
        simulation.run(seconds / 2.0);
        (simulation.run(seconds), rung)
    });
    runs.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap()
}

#[track_caller]
fn assert_share(world: World, least: f64) {
    let (best, rung) = best_fixed(world);
    let share = goodput(world) / best;
    assert!(share >= least, "{share:.2} of rung {rung}: {world:?}");
}

/// From 100 Mbit/s to no limit; one channel, and as many as cores or more.
#[test]
fn auto_keeps_up_with_the_best_rung_on_every_link() {
    for link in [0.1, 1.0, 10.0, 25.0, 100.0, f64::INFINITY] {
        for (channels, cores) in [(1, 1), (2, 2), (8, 2)] {
            let world = World {
                link: link * GBIT,
                channels,
                cores,
                buffer: 4e6 / channels as f64,
                ..TEXT_AT_25
            };
            assert_share(world, 0.9);
            let noise = World {
                data: Data::Noise,
                ..world
            };
            assert_share(noise, 0.9);
        }
    }
}

/// Where encoding takes the receiver's cores, or the receiver is the bottleneck, a socket that takes no more
/// is no reason to encode more.
#[test]
fn auto_does_not_take_a_slow_receiver_for_a_slow_link() {
    for link in [1.0, 25.0, f64::INFINITY] {
        for touching in [0.0, 0.75] {
            let world = World {
                link: link * GBIT,
                shared_cores: true,
                touching,
                ..TEXT_AT_25
            };
            assert_share(world, 0.9);
        }
    }
}

/// Packets of all sizes, and noise by turns: what is best changes faster than it can be followed.
#[test]
fn auto_stays_near_the_best_rung_on_mixed_data() {
    for link in [1.0, 10.0, 25.0, f64::INFINITY] {
        let world = World {
            link: link * GBIT,
            ..TEXT_AT_25
        };
        assert_share(
            World {
                data: Data::Memory,
                ..world
            },
            0.9,
        );
        assert_share(
            World {
                data: Data::Mixed,
                ..world
            },
            0.75,
        );
    }
}

/// Two cores cannot encode all that 25 Gbit/s carry, and raw packets leave them idle.
#[test]
fn a_mix_beats_every_rung() {
    let (best, _) = best_fixed(TEXT_AT_25);
    let found = goodput(TEXT_AT_25);
    assert!(found > 1.05 * best, "{found} {best}");
}

/// Windows that differ by chance do not make auto give up a mix for raw packets.
#[test]
fn a_mix_beats_every_rung_also_where_rates_are_noisy() {
    let (best, _) = best_fixed(TEXT_AT_25);
    let found = goodput(World {
        noise: 0.15,
        ..TEXT_AT_25
    });
    assert!(found > 1.05 * best, "{found} {best}");
}

/// What is in the buffers when the link becomes slow has to go out first: small ones, for this is about the
/// choice.
#[test]
fn another_link_is_followed_within_a_second() {
    let small = World {
        buffer: 0.5e6,
        ..TEXT_AT_25
    };
    for [before, after] in [[10.0, 0.1], [0.1, 10.0], [25.0, 1.0], [1.0, 25.0]] {
        follow(small, before, after);
    }
}

/// A faster link shows at once where the socket reports what it holds, however much that is.
#[test]
fn faster_link_is_followed_within_a_second() {
    for [before, after] in [[0.1, 1.0], [0.1, 10.0], [1.0, 10.0], [1.0, 25.0]] {
        for buffer in [1e6, 2e6, 4e6] {
            let world = World {
                buffer,
                ..TEXT_AT_25
            };
            follow(world, before, after);
        }
    }
}

#[track_caller]
fn follow(world: World, before: f64, after: f64) {
    let [before, after] = [before, after].map(|link| World {
        link: link * GBIT,
        ..world
    });
    let mut simulation = Simulation::new(before, auto);
    simulation.run(2.0);
    simulation.world = after;
    simulation.run(1.0);
    let found = simulation.run(0.5);
    let (best, rung) = best_fixed(after);
    let share = found / best;
    assert!(
        share >= 0.9,
        "{share:.2} of rung {rung}: {before:?} to {after:?}"
    );
}

/// A slow link that is fast for a while, as a whole: what is lost until the change is noticed counts.
#[test]
fn a_link_that_changes_to_and_fro_is_used_as_by_the_best_rung() {
    for data in [Data::Text, Data::Files] {
        for buffer in [0.4e6, 2e6] {
            let world = World {
                link: 0.1 * GBIT,
                data,
                buffer,
                ..ONE_MACHINE
            };
            let run = |choice: &dyn Fn() -> Choice| {
                let mut simulation = Simulation::new(world, choice);
                for (link, seconds) in [(0.1, 3.0), (1.0, 1.5), (0.1, 2.0)] {
                    simulation.world.link = link * GBIT;
                    simulation.run(seconds);
                }
                simulation.arrived
            };
            let rungs = (0..RUNGS).map(|rung| run(&|| Choice::Fixed(rung)));
            let best = rungs.fold(0.0, f64::max);
            let share = run(&auto) / best;
            assert!(share >= 0.9, "{share:.2}: {world:?}");
        }
    }
}

/// All of a migration on two cores: both QEMUs, both relays, the kernel. The first rung is slower and the others are faster than
/// the ladder's first estimates.
const ONE_MACHINE: World = World {
    shared_cores: true,
    qemus: true,
    ..TEXT_AT_25
};

/// Also with others that take most of the cores, and from the beginning: the first seconds are all of a small guest's migration.
#[test]
fn auto_keeps_up_where_everything_shares_the_cores() {
    for data in [Data::Text, Data::Memory, Data::Noise] {
        for (link, seconds) in [(0.1, 4.0), (1.0, 2.0), (10.0, 1.0), (f64::INFINITY, 1.0)] {
            for others in [0, 3] {
                let world = World {
                    link: link * GBIT,
                    others,
                    data,
                    ..ONE_MACHINE
                };
                let row = Row::of(world, seconds);
                assert!(row.first >= 0.85 && row.then >= 0.9, "{row}: {world:?}");
            }
        }
    }
}

/// Zstd at level 1 is what stock QEMU has.
#[test]
fn a_link_of_1_gbit_is_no_reason_to_burn_the_cores() {
    for data in [Data::Text, Data::Memory, Data::Mixed] {
        let world = World {
            link: GBIT,
            data,
            ..ONE_MACHINE
        };
        let mut zstd = Simulation::new(world, || Choice::Fixed(2));
        zstd.run(4.0);
        let row = Row::of(world, 4.0);
        assert!(row.cpu < 1.1 * zstd.cpu_per_byte(), "{row}");
    }
}

/// Auto's goodput as a part of the best rung's, in the first seconds and in those after them, and the CPU time of all threads in
/// nanoseconds per byte of pages; the same of every rung.
struct Row {
    first: f64,
    then: f64,
    cpu: f64,
    rungs: Vec<(f64, f64)>,
}

impl Row {
    fn of(world: World, seconds: f64) -> Self {
        let run = |choice: &dyn Fn() -> Choice| {
            let mut simulation = Simulation::new(world, choice);
            let [first, then] = [(); 2].map(|()| simulation.run(seconds));
            (first, then, simulation.cpu_per_byte())
        };
        let rungs: Vec<_> = (0..RUNGS)
            .map(|rung| run(&|| Choice::Fixed(rung)))
            .collect();
        // The data of the two times differ.
        let best = rungs.iter().fold((0.0, 0.0), |best, rung| {
            (f64::max(best.0, rung.0), f64::max(best.1, rung.1))
        });
        let (first, then, cpu) = run(&auto);
        Self {
            first: first / best.0,
            then: then / best.1,
            cpu,
            rungs: rungs.iter().map(|rung| (rung.0, rung.2)).collect(),
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:.2} then {:.2} ({:.1})",
            self.first, self.then, self.cpu
        )?;
        for (goodput, cpu) in &self.rungs {
            write!(f, " | {:.0} ({cpu:.1})", goodput * 1e3)?;
        }
        Ok(())
    }
}

#[test]
#[ignore = "prints a table for people"]
fn table() {
    let worlds = [
        ("one machine", ONE_MACHINE),
        (
            "one machine, loaded",
            World {
                others: 3,
                ..ONE_MACHINE
            },
        ),
        ("two hosts", World { ..TEXT_AT_25 }),
    ];
    println!("auto / best rung at first, then (CPU ns/B of pages) | MB/s of each rung (CPU ns/B)");
    for (name, world) in worlds {
        for data in [Data::Text, Data::Memory, Data::Mixed, Data::Noise] {
            for (link, seconds) in [
                (0.01, 20.0),
                (0.1, 6.0),
                (1.0, 2.0),
                (10.0, 2.0),
                (f64::INFINITY, 2.0),
            ] {
                let world = World {
                    link: link * GBIT,
                    data,
                    ..world
                };
                println!(
                    "{name}, {data:?}, {link} Gbit/s: {}",
                    Row::of(world, seconds)
                );
            }
        }
    }
}

/// Files of all kinds on a slow link, where the thread has all the time. The densest rung saves a few percent more, which is not always
/// worth its CPU time.
#[test]
fn slow_link_uses_only_the_densest_rungs() {
    for reports in [true, false] {
        let world = World {
            link: 0.1 * GBIT,
            data: Data::Files,
            reports,
            ..ONE_MACHINE
        };
        let row = Row::of(world, 8.0);
        assert!(row.first >= 0.94 && row.then >= 0.94, "{row}");
    }
}

/// A second is half of a small guest's migration. Sockets hold what a writer allows them, see `backlog`.
#[test]
fn a_short_migration_has_the_right_rung_soon() {
    for data in [Data::Text, Data::Memory, Data::Files] {
        for (link, seconds, least) in [
            (0.1, 2.0, 0.95),
            (1.0, 1.0, 0.92),
            (10.0, 0.6, 0.9),
            (f64::INFINITY, 0.6, 0.8),
        ] {
            let world = World {
                link: link * GBIT,
                buffer: 0.4e6,
                data,
                ..ONE_MACHINE
            };
            let row = Row::of(world, seconds);
            assert!(row.first >= least, "{row}: {world:?}");
        }
    }
}

/// What hardly becomes smaller at first is no reason to send all that follows as it is.
#[test]
fn data_that_becomes_compressible_is_encoded() {
    for (link, seconds) in [(0.1, 4.0), (1.0, 2.0), (5.0, 2.0)] {
        for reports in [true, false] {
            let world = World {
                link: link * GBIT,
                buffer: 0.4e6,
                reports,
                data: Data::Booted,
                ..ONE_MACHINE
            };
            let row = Row::of(world, seconds);
            assert!(row.first >= 0.85 && row.then >= 0.95, "{row}: {world:?}");
        }
    }
}

/// An eighth of raw packets would nearly double the bytes, and the link is half full without them.
#[test]
fn raw_packets_do_not_fill_a_link_beside_highly_compressible_ones() {
    for others in [0, 1] {
        let world = World {
            link: GBIT,
            others,
            data: Data::Database,
            noise: 0.1,
            ..ONE_MACHINE
        };
        let run = |choice: &dyn Fn() -> Choice| {
            let mut simulation = Simulation::new(world, choice);
            while simulation.arrived < 1e9 {
                simulation.step(20e3);
            }
            let wire: f64 = simulation.channels.iter().map(|it| it.wire).sum();
            (simulation.now, wire)
        };
        let (time, wire) = run(&auto);
        let (best_time, best_wire) = run(&|| Choice::Fixed(1));
        assert!(time < 1.05 * best_time, "{time} {best_time}: {world:?}");
        assert!(
            wire < 1.6 * best_wire,
            "{time} {best_time} {wire} {best_wire}: {world:?}"
        );
    }
}
