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

use std::time::Duration;

use super::{
    controller::{Controller, Cost, Sent},
    ladder::{Codec, FIRST, RAW, RUNGS},
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
        const TEXT: [f64; RUNGS] = [1.0, 0.46, 0.385, 0.32, 0.26, 0.24, 0.23, 0.225];
        if rung == RAW {
            return 1.0;
        }
        match self {
            Self::Noise => 1.0,
            Self::Mixed if number / 8 % 2 == 0 => 1.0,
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
const ENCODING: [f64; RUNGS] = [0.0, 0.75, 1.2, 1.8, 2.3, 3.4, 8.0, 18.0];
const DECODING: [f64; RUNGS] = [0.0, 0.22, 0.23, 0.5, 0.7, 0.7, 0.7, 0.7];
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
    packets: std::collections::VecDeque<(f64, f64, f64)>,
    receiver: Receiver,
    debt: f64,
    /// Part of the time for which the thread has a core.
    speed: f64,
    // What the controller will be told.
    rung: usize,
    begun: f64,
    cpu: f64,
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
        let near: usize = self.channels.iter().filter(|c| c.sender_has_work(&world)).count();
        let far: usize = self.channels.iter().filter(|c| c.receiver_has_work()).count();
        let speed = |threads: usize| (world.cores as f64 / threads as f64).min(1.0);
        let (near_speed, far_speed) = match world.shared_cores {
            true => (speed(near + far), speed(near + far)),
            false => (speed(near), speed(far)),
        };
        for channel in &mut self.channels {
            channel.send(&world, self.now, step, near_speed);
            self.arrived += channel.receive(&world, step * far_speed);
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
            packets: std::collections::VecDeque::new(),
            receiver: Receiver::Read,
            debt: 0.0,
            speed: 1.0,
            rung: RAW,
            begun: 0.0,
            cpu: 0.0,
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
        if self.waits { free < world.buffer / 3.0 } else { free <= 1.0 }
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
                        self.waits = true;
                        return;
                    }
                    self.waits = false;
                    let now_sent = bytes.min(left / SENDING).min(world.buffer - self.near);
                    self.near += now_sent;
                    left -= now_sent * SENDING;
                    self.cpu += now_sent * SENDING;
                    self.sender = Sender::Send(bytes - now_sent, all);
                    if bytes - now_sent <= 1e-6 {
                        self.is_out(all, now + step - left / speed);
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

    fn is_out(&mut self, wire: f64, now: f64) {
        if let Choice::Auto(controller) = &mut self.choice {
            controller.sent(Sent {
                wire_bytes: wire as usize,
                page_bytes: PACKET,
                took: nanos(now - self.encoded.1),
                cpu: nanos(self.cpu),
                encoding: nanos(self.encoded.0),
                elapsed: nanos(now - self.last_out),
            });
        }
        self.last_out = now;
    }

    /// Does the receiver's work; returns the bytes of pages that have arrived.
    fn receive(&mut self, _world: &World, mut left: f64) -> f64 {
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

fn worlds() -> Vec<World> {
    let mut worlds = Vec::new();
    for link in [0.1, 1.0, 10.0, 25.0, 100.0, f64::INFINITY] {
        for (channels, cores) in [(1, 1), (1, 2), (2, 2), (8, 2), (2, 16), (8, 16), (64, 16), (64, 1)] {
            for shared_cores in [false, true] {
                for data in [Data::Text, Data::Memory, Data::Noise, Data::Mixed] {
                    for touching in [0.0, 0.75] {
                        worlds.push(World {
                            link: link * GBIT,
                            channels,
                            cores,
                            shared_cores,
                            buffer: (4e6 / channels as f64).clamp(256e3, 4e6),
                            touching,
                            data,
                        });
                    }
                }
            }
        }
    }
    worlds
}

/// The best goodput of a fixed rung.
fn best_fixed(world: World, seconds: f64) -> (f64, usize) {
    let runs = (0..RUNGS).map(|rung| {
        let mut simulation = Simulation::new(world, || Choice::Fixed(rung));
        simulation.run(seconds / 2.0);
        (simulation.run(seconds), rung)
    });
    runs.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap()
}

#[test]
fn explore() {
    let filter: Vec<String> = std::env::var("WORLDS").unwrap_or_default().split(',').map(str::to_owned).collect();
    let mut bad = 0;
    let mut all = 0;
    for world in worlds() {
        let name = format!("{world:?}");
        if !filter.iter().all(|word| name.contains(word.as_str())) { continue; }
        let mut simulation = Simulation::new(world, auto);
        let found = if std::env::var("TRACE").is_ok() { let mut last = 0.0; for _ in 0..40 { last = simulation.run(0.05); if let Choice::Auto(c) = &simulation.channels[0].choice { println!("{last:.3} {}", &c.describe()[..150]); } } last } else { simulation.run(1.0); simulation.run(1.5) };
        let (best, rung) = best_fixed(world, if world.link < 0.05 { 0.8 } else {0.2});
        all += 1;
        let share = found / best;
        if share < 0.9 || std::env::var("ALL").is_ok() {
            bad += 1;
            println!("{share:.2} of rung {rung} {best:.3} {:?} link {:.1} ch {} cores {} shared {} touch {}", world.data, world.link*8.0, world.channels, world.cores, world.shared_cores, world.touching);
            if std::env::var("ALL").is_ok() { if let Choice::Auto(c) = &simulation.channels[0].choice { println!("   {}", c.describe()); } }
        }
    }
    println!("{bad} of {all}");
}
