//! The state of all connections, and changes to it.

use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fastrand::Rng;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;

use super::connection::wake;
use super::{
    Admission, Change, Connection, Direction, Flipped, Flow, Mark, Status, Traffic, Which,
};
use crate::sockets::reset;

#[derive(Debug)]
pub(super) struct State {
    pub(super) listener: SocketAddr,
    pub(super) admission: Admission,
    /// The flows of connections to come, by direction.
    pub(super) flows: [Flow; 2],
    /// The middlebox is being dropped.
    ending: bool,
    pub(super) entries: Vec<Entry>,
    /// Changes to be made when marks are passed.
    pub(super) planned: Vec<(Mark, Which, Change)>,
    pub(super) flipped: Vec<Flipped>,
    /// Bits to flip on connections to come.
    flips: Vec<(Mark, u8)>,
    /// Whether what passes is recorded.
    pub(super) records: bool,
    /// Random flips on connections to come, by direction: one in this many bytes, and the seed.
    random: [Option<(u64, u64)>; 2],
}

/// A connection.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) status: Status,
    /// The socket to the dialler, until the connection has ended.
    near: Option<Arc<TcpStream>>,
    /// The socket to the listener, if the connection is joined.
    pub(super) far: Option<Arc<TcpStream>>,
    /// Wakes its thread.
    pub(super) wake: Arc<OwnedFd>,
    lanes: [Lane; 2],
}

/// One direction of a connection.
#[derive(Debug, Default)]
pub(super) struct Lane {
    flow: Flow,
    /// Bytes are missing, so nothing passes any more.
    lost: bool,
    traffic: Traffic,
    /// What has passed while it was recorded.
    pub(super) record: Vec<u8>,
    /// When the next byte may pass, if bytes are slow or late.
    pub(super) ready_at: Option<Instant>,
    /// Byte and bit.
    flips: Vec<(u64, u8)>,
    random: Option<RandomFlips>,
}

#[derive(Debug)]
struct RandomFlips {
    rng: Rng,
    every: u64,
    next: (u64, u8),
}

impl State {
    pub(super) fn new(listener: SocketAddr) -> Self {
        Self {
            listener,
            admission: Admission::Pass,
            flows: [Flow::Pass; 2],
            ending: false,
            entries: Vec::new(),
            planned: Vec::new(),
            flipped: Vec::new(),
            flips: Vec::new(),
            records: false,
            random: [None; 2],
        }
    }

    pub(super) fn connections(&self) -> Vec<Connection> {
        let connection = |entry: &Entry| Connection {
            status: entry.status,
            to_listener: entry.lane_of(Direction::ToListener).traffic,
            to_dialler: entry.lane_of(Direction::ToDialler).traffic,
        };
        self.entries.iter().map(connection).collect()
    }

    /// Resets all connections, also closed ones that wait for their ends.
    pub(super) fn end(&mut self) {
        self.ending = true;
        for entry in &mut self.entries {
            entry.apply(Change::Reset);
        }
    }

    pub(super) fn is_ending(&self) -> bool {
        self.ending
    }

    /// Adds an accepted connection and returns its number, or the socket if the system lacks resources.
    pub(super) fn add(&mut self, near: TcpStream) -> Result<usize, TcpStream> {
        let Ok(wake) = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC) else {
            return Err(near);
        };
        if near
            .set_nonblocking(true)
            .and_then(|()| near.set_nodelay(true))
            .is_err()
        {
            return Err(near);
        }
        let number = self.entries.len();
        let lanes = Direction::BOTH.map(|direction| {
            let random = self.random[direction as usize];
            Lane {
                flow: self.flows[direction as usize],
                lost: self.admission == Admission::Silence,
                random: random.map(|(every, seed)| RandomFlips::new(every, seed, number, 0)),
                ..Lane::default()
            }
        });
        self.entries.push(Entry {
            status: match self.admission {
                Admission::Silence => Status::Open,
                Admission::Pass | Admission::Refuse => Status::Dialling,
            },
            near: Some(Arc::new(near)),
            far: None,
            wake: Arc::new(wake),
            lanes,
        });
        for (mark, bit) in self
            .flips
            .extract_if(.., |(mark, _)| mark.connection == number)
        {
            let lane = self.entries[number].lane(mark.direction);
            lane.flips.push((mark.bytes, bit));
        }
        Ok(number)
    }

    pub(super) fn apply(&mut self, which: Which, change: Change) -> usize {
        let entries = self.entries.iter_mut().enumerate();
        let wanted = |number: usize| match which {
            Which::All => true,
            Which::One(one) => number == one,
        };
        let wanted = entries.filter(|(number, entry)| wanted(*number) && entry.is_open());
        wanted.map(|(_, entry)| entry.apply(change)).count()
    }

    /// Makes the changes whose marks on this connection have been passed.
    pub(super) fn apply_planned(&mut self, connection: usize) {
        let Some(entry) = self.entries.get(connection) else {
            return;
        };
        if entry.status == Status::Dialling {
            return;
        }
        let passed = Direction::BOTH.map(|direction| entry.lane_of(direction).traffic.passed);
        let is_due = |mark: &Mark| {
            mark.connection == connection && mark.bytes <= passed[mark.direction as usize]
        };
        let due: Vec<_> = self
            .planned
            .extract_if(.., |(mark, ..)| is_due(mark))
            .collect();
        for (_, which, change) in due {
            self.apply(which, change);
        }
    }

    pub(super) fn flip(
        &mut self,
        number: usize,
        direction: Direction,
        byte: u64,
        bit: u8,
    ) -> Option<()> {
        let lane = self.entries.get_mut(number)?.lane(direction);
        lane.flips
            .push((lane.traffic.passed.saturating_add(byte), bit % 8));
        Some(())
    }

    pub(super) fn flip_at(&mut self, mark: Mark, bit: u8) {
        match self.entries.get_mut(mark.connection) {
            Some(entry) => entry.lane(mark.direction).flips.push((mark.bytes, bit % 8)),
            None => self.flips.push((mark, bit % 8)),
        }
    }

    pub(super) fn flip_one_in(&mut self, direction: Direction, every: u64, seed: u64) {
        self.random[direction as usize] = Some((every, seed));
        for (number, entry) in self.entries.iter_mut().enumerate() {
            let lane = entry.lane(direction);
            let from = lane.traffic.passed;
            lane.random = Some(RandomFlips::new(every, seed, number, from));
        }
    }

    /// How many of this many bytes may pass now, before the next change, flip or pause.
    pub(super) fn most(&self, connection: usize, direction: Direction, bytes: usize) -> usize {
        let entry = &self.entries[connection];
        let lane = entry.lane_of(direction);
        let passed = lane.traffic.passed;
        let slice = match entry.flow(direction) {
            Flow::Pass => None,
            Flow::Slow(_) | Flow::Late(_)
                if lane.ready_at.is_some_and(|at| at > Instant::now()) =>
            {
                Some(0)
            }
            Flow::Late(_) => None,
            Flow::Slow(rate) => Some((rate / SLICES).max(1)),
            Flow::Hold | Flow::Drop => Some(0),
        };
        // The byte that is flipped passes alone.
        let flip = lane.next_flip().map(|at| at.saturating_sub(passed).max(1));
        let mark = self.next_mark(connection, direction);
        let mark = mark.map(|at| at.saturating_sub(passed));
        let limits = [slice, flip, mark].into_iter().flatten();
        let limits = limits.map(|limit| usize::try_from(limit).unwrap_or(bytes));
        limits.fold(bytes, usize::min)
    }

    /// Records bytes that have passed, as the sender wrote them.
    pub(super) fn record(&mut self, connection: usize, direction: Direction, bytes: &[u8]) {
        if self.records {
            let lane = self.entries[connection].lane(direction);
            lane.record.extend_from_slice(bytes);
        }
    }

    /// Counts bytes that have passed, and makes the changes planned there.
    pub(super) fn count_passed(&mut self, connection: usize, direction: Direction, count: usize) {
        let lane = self.entries[connection].lane(direction);
        let byte = lane.traffic.passed;
        let bits = lane.count_passed(count as u64);
        self.flipped.extend(bits.into_iter().map(|bit| Flipped {
            connection,
            direction,
            byte,
            bit,
        }));
        self.apply_planned(connection);
    }

    /// The position of the next planned change in a direction.
    fn next_mark(&self, connection: usize, direction: Direction) -> Option<u64> {
        let planned = self.planned.iter().map(|(mark, ..)| mark);
        let here = planned.filter(|it| it.connection == connection && it.direction == direction);
        here.map(|mark| mark.bytes).min()
    }
}

/// The bytes of a second pass in this many slices on a slow connection.
const SLICES: u64 = 50;

impl Entry {
    pub(super) fn lane(&mut self, direction: Direction) -> &mut Lane {
        &mut self.lanes[direction as usize]
    }

    pub(super) fn lane_of(&self, direction: Direction) -> &Lane {
        &self.lanes[direction as usize]
    }

    fn is_open(&self) -> bool {
        matches!(self.status, Status::Dialling | Status::Open)
    }

    /// The socket that the bytes of a direction come from.
    pub(super) fn sender(&self, direction: Direction) -> Option<Arc<TcpStream>> {
        match direction {
            Direction::ToListener => self.near.clone(),
            Direction::ToDialler => self.far.clone(),
        }
    }

    /// The socket that they go to.
    pub(super) fn receiver(&self, direction: Direction) -> Option<Arc<TcpStream>> {
        self.sender(direction.reverse())
    }

    fn ends(&self) -> impl Iterator<Item = &TcpStream> {
        let ends = [&self.near, &self.far].into_iter().flatten();
        ends.map(|end| &**end)
    }

    /// Closes the sockets of a connection that has ended.
    pub(super) fn close(&mut self) {
        if self.status == Status::Open {
            self.status = Status::Closed;
        }
        (self.near, self.far) = (None, None);
    }

    pub(super) fn apply(&mut self, change: Change) {
        match change {
            Change::Reset => {
                self.status = Status::Reset;
                self.ends().for_each(reset);
            }
            Change::Close => {
                self.status = Status::Closed;
                for end in self.ends() {
                    // Its peer may have reset it.
                    let _ = end.shutdown(Shutdown::Write);
                }
            }
            Change::Flow(flow) => {
                for direction in Direction::BOTH {
                    self.lane(direction).set_flow(flow);
                }
            }
            Change::OneWay(direction, flow) => self.lane(direction).set_flow(flow),
        }
        wake(&self.wake);
    }

    /// What happens to bytes of a direction.
    pub(super) fn flow(&self, direction: Direction) -> Flow {
        let lane = self.lane_of(direction);
        if lane.lost || !self.is_open() {
            Flow::Drop
        } else {
            lane.flow
        }
    }
}

impl Lane {
    fn set_flow(&mut self, flow: Flow) {
        self.flow = flow;
        self.ready_at = None;
    }

    /// The next byte with a bit to flip.
    fn next_flip(&self) -> Option<u64> {
        let random = self.random.as_ref().map(|random| random.next.0);
        let chosen = self.flips.iter().map(|(byte, _)| *byte);
        // Bytes that have passed are not changed.
        let to_come = chosen.filter(|byte| *byte >= self.traffic.passed);
        to_come.chain(random).min()
    }

    /// The bits of the next byte to flip.
    pub(super) fn mask(&self) -> u8 {
        let random = self.random.as_ref().map(|random| random.next);
        let flips = self.flips.iter().copied().chain(random);
        let here = flips.filter(|(at, _)| *at == self.traffic.passed);
        here.fold(0, |mask, (_, bit)| mask ^ (1 << bit))
    }

    pub(super) fn drop_bytes(&mut self, count: usize) {
        self.traffic.dropped += count as u64;
        self.lost = true;
    }

    /// Delays bytes that have just arrived, if bytes are late.
    pub(super) fn delay(&mut self) {
        if let Flow::Late(delay) = self.flow {
            self.ready_at = Some(Instant::now() + delay);
        }
    }

    /// Counts bytes that have passed, and returns the bits flipped in the first of them.
    fn count_passed(&mut self, count: u64) -> Vec<u8> {
        let bits = self.take_flips(self.traffic.passed);
        self.traffic.flipped += bits.len() as u64;
        self.traffic.passed += count;
        if let Flow::Slow(rate) = self.flow {
            let now = Instant::now();
            let from = self.ready_at.map_or(now, |at| at.max(now));
            let nanos = count.saturating_mul(1_000_000_000) / rate.max(1);
            self.ready_at = Some(from + Duration::from_nanos(nanos));
        }
        bits
    }

    fn take_flips(&mut self, byte: u64) -> Vec<u8> {
        let flips = self.flips.extract_if(.., |(at, _)| *at == byte);
        let mut bits: Vec<_> = flips.map(|(_, bit)| bit).collect();
        if let Some(random) = self.random.as_mut().filter(|it| it.next.0 == byte) {
            bits.push(random.next.1);
            random.draw(byte + 1);
        }
        bits
    }
}

impl RandomFlips {
    fn new(every: u64, seed: u64, connection: usize, from: u64) -> Self {
        let rng = Rng::with_seed(Rng::with_seed(seed).u64(..) ^ connection as u64);
        let mut flips = Self {
            rng,
            every: every.max(1),
            next: (0, 0),
        };
        flips.draw(from);
        flips
    }

    /// Draws the next flip. Distances are uniform from 1 to twice the average, less one.
    fn draw(&mut self, from: u64) {
        let most = self.every.saturating_mul(2) - 2;
        self.next = (from.saturating_add(self.rng.u64(..=most)), self.rng.u8(..8));
    }
}
