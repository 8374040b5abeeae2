//! The state of all connections, and changes to it.

use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Instant;

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
    /// Bits to flip.
    flips: Vec<(Mark, u8)>,
    /// Whether what passes is recorded.
    pub(super) records: bool,
}

/// A connection.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) status: Status,
    /// The socket to the dialler, until the connection has ended.
    near: Option<Arc<TcpStream>>,
    /// The socket to the listener, if the connection is joined.
    pub(super) far: Option<Arc<TcpStream>>,
    /// Wakes its thread, until the connection has ended.
    pub(super) wake: Option<Arc<OwnedFd>>,
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
    /// When the next byte may pass, if bytes are late.
    pub(super) ready_at: Option<Instant>,
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
        let lanes = Direction::BOTH.map(|direction| Lane {
            flow: self.flows[direction as usize],
            lost: self.admission == Admission::Silence,
            ..Lane::default()
        });
        self.entries.push(Entry {
            status: match self.admission {
                Admission::Silence => Status::Open,
                Admission::Pass | Admission::Refuse => Status::Dialling,
            },
            near: Some(Arc::new(near)),
            far: None,
            wake: Some(Arc::new(wake)),
            lanes,
        });
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

    pub(super) fn flip_at(&mut self, mark: Mark, bit: u8) {
        self.flips.push((mark, bit % 8));
    }

    /// How many of this many bytes may pass now, before the next change, flip or pause.
    pub(super) fn most(&self, connection: usize, direction: Direction, bytes: usize) -> usize {
        let entry = &self.entries[connection];
        let lane = entry.lane_of(direction);
        let passed = lane.traffic.passed;
        let is_late = lane.ready_at.is_some_and(|at| at > Instant::now());
        let flow = entry.flow(direction);
        if matches!(flow, Flow::Hold | Flow::Drop) || is_late {
            return 0;
        }
        let here = |mark: &&Mark| mark.connection == connection && mark.direction == direction;
        // Bytes that have passed are not changed. The byte that is flipped passes alone.
        let flips = self.flips.iter().map(|(mark, _)| mark).filter(here);
        let flips = flips.filter(|mark| mark.bytes >= passed);
        let flips = flips.map(|mark| (mark.bytes - passed).max(1));
        let marks = self.planned.iter().map(|(mark, ..)| mark).filter(here);
        let marks = marks.map(|mark| mark.bytes.saturating_sub(passed));
        let limits = flips.chain(marks);
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

    /// The bits to flip of the next byte.
    pub(super) fn mask(&self, connection: usize, direction: Direction) -> u8 {
        let bytes = self.entries[connection].lane_of(direction).traffic.passed;
        let next = Mark {
            connection,
            direction,
            bytes,
        };
        let here = self.flips.iter().filter(|(mark, _)| *mark == next);
        here.fold(0, |mask, (_, bit)| mask ^ (1 << bit))
    }

    /// Counts bytes that have passed, and makes the changes planned there.
    pub(super) fn count_passed(&mut self, connection: usize, direction: Direction, count: usize) {
        let lane = self.entries[connection].lane(direction);
        let byte = lane.traffic.passed;
        lane.traffic.passed += count as u64;
        let mark = Mark {
            connection,
            direction,
            bytes: byte,
        };
        for (_, bit) in self.flips.extract_if(.., |(flip, _)| *flip == mark) {
            self.flipped.push(Flipped {
                connection,
                direction,
                byte,
                bit,
            });
        }
        self.apply_planned(connection);
    }
}

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
        (self.near, self.far, self.wake) = (None, None, None);
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
        if let Some(eventfd) = &self.wake {
            wake(eventfd);
        }
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
}
