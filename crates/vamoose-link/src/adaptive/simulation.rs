//! Auto in virtual time: senders, sockets, a link, receivers and the cores under them, step by step.
//!
//! ```text
//! data ─> encode ─> copy ─> [ socket's buffer ] ═ link ═> [ buffer ] ─> read ─> decode ─> pages
//!         └─── sender's thread ───┘                                └─ receiver's thread ─┘
//!            cores of the source                        those of the destination, or the same
//! ```
//! Threads that have work share their cores evenly, channels that have bytes share the link evenly. What
//! rungs cost and save on the simulated data is not what [`Ladder`](super::ladder::Ladder) starts with.
//! Everything is deterministic, time included.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "bytes and nanoseconds of a simulation are far from the limits"
)]

use std::{collections::VecDeque, time::Duration};

use super::{
    controller::{Controller, Cost, Sent},
    ladder::{FIRST, RAW, RUNGS},
};

/// Bytes of pages in a packet.
const PACKET: usize = 512 << 10;

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
    /// Whether sockets report how much they hold.
    tells: bool,
    /// Nanoseconds of the receiver for each byte of pages, beside reading and decoding.
    touching: f64,
    data: Data,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Data {
    Text,
    /// Some packets hardly compress, some to next to nothing.
    Memory,
    Noise,
    /// Every other 8 packets are noise, the others text.
    Mixed,
}

impl Data {
    /// Size by each rung, of the packet of that number.
    fn size(self, rung: usize, number: usize) -> f64 {
        const TEXT: [f64; RUNGS] = [1.0, 0.46, 0.385, 0.32, 0.26, 0.24, 0.23];
        if rung == RAW {
            return 1.0;
        }
        match self {
            Self::Noise => 1.0,
            Self::Mixed if (number / 8).is_multiple_of(2) => 1.0,
            Self::Text | Self::Mixed => TEXT[rung],
            Self::Memory => [0.1, 0.35, 0.6, 0.9, 1.3, 1.7, 2.0][number * 5 % 7] * TEXT[rung],
        }
        .min(1.0)
    }

    fn is_hopeless(self, rung: usize, number: usize) -> bool {
        self.size(rung, number) >= 1.0
    }
}

/// Nanoseconds per byte of pages, of one core.
const ENCODING: [f64; RUNGS] = [0.0, 0.75, 1.2, 1.8, 2.3, 3.4, 8.0];
const DECODING: [f64; RUNGS] = [0.0, 0.22, 0.23, 0.5, 0.7, 0.7, 0.7];
/// Nanoseconds per byte on the wire.
const SENDING: f64 = 0.2;
const RECEIVING: f64 = 0.25;

/// Which rung a channel takes.
enum Choice {
    Fixed(usize),
    /// Part of the packets by one rung, the rest by another.
    Mix(usize, usize, f64),
    Auto(Box<Controller>),
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
    debt: f64,
    /// Part of the time for which the thread has a core.
    speed: f64,
    // What the controller will receive.
    rung: usize,
    begun: f64,
    cpu: f64,
    blocked: bool,
    encoded: (f64, f64),
    last_out: f64,
}

#[derive(Clone, Copy, Debug)]
enum Sender {
    /// Nanoseconds of work left.
    Encode(f64),
    /// Wire bytes left to hand to the socket, and all of them.
    Send(f64, f64),
}

#[derive(Clone, Copy, Debug)]
enum Receiver {
    Read,
    /// Nanoseconds of work left, and the pages that are done then.
    Decode(f64, f64),
}

struct Simulation {
    world: World,
    channels: Vec<Channel>,
    now: f64,
    arrived: f64,
}

impl Simulation {
    fn new(world: World, choice: impl Fn() -> Choice) -> Self {
        let channels = (0..world.channels).map(|index| {
            let mut channel = Channel::new(choice(), index * 3);
            channel.begin(&world, 0.0);
            channel
        });
        Self {
            world,
            channels: channels.collect(),
            now: 0.0,
            arrived: 0.0,
        }
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
        let near: usize = self
            .channels
            .iter()
            .filter(|c| c.sender_has_work(&world))
            .count();
        let far: usize = self
            .channels
            .iter()
            .filter(|c| c.receiver_has_work())
            .count();
        let speed = |threads: usize| (world.cores as f64 / threads as f64).min(1.0);
        let (near_speed, far_speed) = match world.shared_cores {
            true => (speed(near + far), speed(near + far)),
            false => (speed(near), speed(far)),
        };
        for channel in &mut self.channels {
            channel.send(&world, self.now, step, near_speed);
            self.arrived += channel.receive(step * far_speed);
        }
        self.now += step;
    }
}

impl Channel {
    fn new(choice: Choice, number: usize) -> Self {
        Self {
            choice,
            number,
            sender: Sender::Encode(0.0),
            near: 0.0,
            far: 0.0,
            waits: false,
            packets: VecDeque::new(),
            receiver: Receiver::Read,
            debt: 0.0,
            speed: 1.0,
            rung: RAW,
            begun: 0.0,
            cpu: 0.0,
            blocked: false,
            encoded: (0.0, 0.0),
            last_out: 0.0,
        }
    }

    fn sender_has_work(&self, world: &World) -> bool {
        match self.sender {
            Sender::Encode(_) => true,
            Sender::Send(..) => !self.is_stuck(world),
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

    fn receiver_has_work(&self) -> bool {
        matches!(self.receiver, Receiver::Decode(..)) || self.far > 1.0
    }

    /// Does what the sender's thread does in a step in which it has a core for a part of the time.
    fn send(&mut self, world: &World, now: f64, step: f64, speed: f64) {
        let mut left = step * speed;
        self.speed = speed;
        while left > 1e-6 {
            match self.sender {
                Sender::Encode(work) if work > left => {
                    self.sender = Sender::Encode(work - left);
                    self.cpu += left;
                    left = 0.0;
                }
                Sender::Encode(work) => {
                    left -= work;
                    self.cpu += work;
                    self.has_encoded(world, now + step - left / speed);
                }
                Sender::Send(bytes, all) => {
                    if self.is_stuck(world) {
                        (self.waits, self.blocked) = (true, true);
                        return;
                    }
                    self.waits = false;
                    let now_sent = bytes.min(left / SENDING).min(world.buffer - self.near);
                    self.near += now_sent;
                    left -= now_sent * SENDING;
                    self.cpu += now_sent * SENDING;
                    self.sender = Sender::Send(bytes - now_sent, all);
                    if bytes - now_sent <= 1e-6 {
                        self.is_out(world, all, now + step - left / speed);
                        self.begin(world, now + step - left / speed);
                    }
                }
            }
        }
    }

    /// Chooses for the next packet and begins to encode it.
    fn begin(&mut self, world: &World, now: f64) {
        let page_bytes = PACKET as f64;
        let (rung, probe) = match &mut self.choice {
            Choice::Fixed(rung) => (*rung, None),
            Choice::Mix(low, high, share) => {
                self.debt += *share;
                let owed = self.debt > 0.5;
                self.debt -= f64::from(u8::from(owed));
                (if owed { *high } else { *low }, None)
            }
            Choice::Auto(controller) => (controller.plan().rung, controller.plan().probe),
        };
        let mut work = 0.0;
        if let (Choice::Auto(controller), Some(rungs)) = (&mut self.choice, probe) {
            let costs = rungs.map(|rung| {
                let cpu = ENCODING[rung] * page_bytes;
                work += cpu;
                cost(cpu, cpu / self.speed, world.data.size(rung, self.number))
            });
            controller.probed(rungs, costs);
        }
        let hopeless = rung != RAW && world.data.is_hopeless(rung, self.number);
        self.rung = if hopeless { RAW } else { rung };
        work += match &self.choice {
            // LZ4 and zstd hurry over what they find nothing in.
            Choice::Fixed(rung) | Choice::Mix(_, rung, _) if hopeless => 0.4 * ENCODING[*rung],
            Choice::Auto(_) if rung != RAW => {
                0.03 * ENCODING[FIRST] + if hopeless { 0.0 } else { ENCODING[rung] }
            }
            _ => ENCODING[rung],
        } * page_bytes;
        self.encoded = (work, now);
        self.cpu = 0.0;
        self.begun = now;
        self.sender = Sender::Encode(work);
        if let (Choice::Auto(controller), true) = (&mut self.choice, hopeless) {
            let cpu = 0.03 * ENCODING[FIRST] * page_bytes;
            controller.gave_up(cost(cpu, cpu / self.speed, 1.0));
        }
    }

    fn has_encoded(&mut self, world: &World, now: f64) {
        let size = world.data.size(self.rung, self.number);
        if let (Choice::Auto(controller), true) = (&mut self.choice, self.rung != RAW) {
            // Of a probe's time only the encoding's share.
            let cpu = ENCODING[self.rung] * PACKET as f64;
            let wall = cpu * ((now - self.begun) / self.encoded.0.max(1.0)).max(1.0);
            controller.encoded(cost(cpu, wall, size));
        }
        self.encoded = (now - self.begun, now);
        self.cpu = 0.0;
        let wire = PACKET as f64 * size + 1000.0;
        self.sender = Sender::Send(wire, wire);
        let decoding = (DECODING[self.rung] + world.touching) * PACKET as f64;
        self.packets.push_back((wire, PACKET as f64, decoding));
        self.number += 1;
    }

    fn is_out(&mut self, world: &World, wire: f64, now: f64) {
        if let Choice::Auto(controller) = &mut self.choice {
            controller.sent(Sent {
                wire_bytes: wire as usize,
                page_bytes: PACKET,
                took: nanos(now - self.encoded.1),
                queued: world.tells.then_some(self.near as usize),
                cpu: nanos(self.cpu),
                blocked: std::mem::take(&mut self.blocked),
                encoding: nanos(self.encoded.0),
                elapsed: nanos(now - self.last_out),
            });
        }
        self.last_out = now;
    }

    /// Does the receiver's work; returns the bytes of pages that have arrived.
    fn receive(&mut self, mut left: f64) -> f64 {
        let mut arrived = 0.0;
        while left > 1e-6 {
            match self.receiver {
                Receiver::Decode(work, pages) if work <= left => {
                    left -= work;
                    arrived += pages;
                    self.receiver = Receiver::Read;
                }
                Receiver::Decode(work, pages) => {
                    self.receiver = Receiver::Decode(work - left, pages);
                    return arrived;
                }
                Receiver::Read => {
                    let Some((wire, pages, decoding)) = self.packets.front_mut() else {
                        return arrived;
                    };
                    let read = f64::min(*wire, self.far).min(left / RECEIVING);
                    if read <= 0.0 {
                        return arrived;
                    }
                    self.far -= read;
                    *wire -= read;
                    left -= read * RECEIVING;
                    if *wire <= 1e-3 {
                        self.receiver = Receiver::Decode(*decoding, *pages);
                        self.packets.pop_front();
                    }
                }
            }
        }
        arrived
    }
}

fn cost(cpu: f64, wall: f64, size: f64) -> Cost {
    Cost {
        page_bytes: PACKET,
        payload_bytes: (PACKET as f64 * size) as usize,
        cpu: nanos(cpu),
        wall: nanos(wall),
    }
}

fn nanos(time: f64) -> Duration {
    Duration::from_nanos(time.max(0.0) as u64)
}

fn auto() -> Choice {
    Choice::Auto(Box::new(Controller::new()))
}

const GBIT: f64 = 0.125;

const TEXT_AT_25: World = World {
    link: 25.0 * GBIT,
    channels: 2,
    cores: 2,
    shared_cores: false,
    buffer: 2e6,
    tells: true,
    touching: 0.0,
    data: Data::Text,
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
            let silent = World {
                tells: false,
                ..world
            };
            assert_share(silent, 0.9);
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
    let mixes = (0..20).map(|share| {
        let choice = || Choice::Mix(RAW, FIRST, f64::from(share) / 20.0);
        let mut simulation = Simulation::new(TEXT_AT_25, choice);
        simulation.run(0.1);
        simulation.run(0.2)
    });
    let best_mix = mixes.max_by(f64::total_cmp).unwrap();
    let found = goodput(TEXT_AT_25);
    assert!(best_mix > 1.2 * best, "{best_mix} {best}");
    assert!(found > 1.1 * best, "{found} {best}");
    assert!(found > 0.9 * best_mix, "{found} {best_mix}");
}

/// What is in the buffers when the link becomes slow has to go out first: small ones, for this is about the
/// choice.
#[test]
fn another_link_is_followed_within_a_second() {
    let small = World {
        buffer: 0.5e6,
        ..TEXT_AT_25
    };
    let silent = World {
        tells: false,
        ..small
    };
    for [before, after] in [[10.0, 0.1], [0.1, 10.0], [25.0, 1.0], [1.0, 25.0]] {
        for world in [small, silent] {
            follow(world, before, after);
        }
    }
}

/// A faster link shows at once where the socket reports what it holds, however much that is.
#[test]
fn a_faster_link_is_followed_within_a_second_whatever_the_buffers_hold() {
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
