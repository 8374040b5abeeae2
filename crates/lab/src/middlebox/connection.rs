//! The thread of one connection: passes bytes from one end to the other as the state says.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;

use super::state::{Entry, State};
use super::{Change, Direction, Flow, Handle, Status};
use crate::sockets::reset;
use crate::watched::Watched;

/// Joins a connection to the listener, and passes its bytes until it ends.
pub(super) fn serve(middlebox: &Handle, number: usize) {
    let state = &middlebox.0.state;
    if is_dialling(&state.lock().entries[number]) {
        join(state, number);
    }
    state.update(|state| state.apply_planned(number));
    let is_observed = middlebox.0.observer.is_some();
    let mut pumps = Direction::BOTH.map(|direction| Pump::new(direction, is_observed));
    loop {
        for pump in &mut pumps {
            pump.read(&mut state.lock().entries[number]);
            pump.ask(middlebox, number);
        }
        let step = |state: &mut State| step(state, number, &mut pumps);
        let Some(wait) = state.update(step) else {
            return;
        };
        if pumps.iter().all(|pump| !pump.has_news) {
            wait.wait();
        }
    }
}

/// Wakes a thread that waits, or will wait next.
pub(super) fn wake(eventfd: &OwnedFd) {
    // Fails only at a count of 2^64.
    let _ = rustix::io::write(eventfd, &1_u64.to_ne_bytes());
}

/// Resets what [`wake`] has set.
pub(super) fn settle(eventfd: &OwnedFd) {
    // Fails if nothing was set.
    let _ = rustix::io::read(eventfd, &mut [0; 8]);
}

/// Passes the bytes of one direction.
struct Pump {
    direction: Direction,
    buffer: Vec<u8>,
    waiting: Range<usize>,
    /// How many of the waiting bytes may pass before the observer is asked again; all if there is no observer.
    piece: usize,
    is_observed: bool,
    /// Bytes or the sender's end have arrived, or a piece has passed, and the observer has not been asked since.
    has_news: bool,
    /// How the sender has ended the direction, if it has.
    end: Option<End>,
    /// The receiver has got the sender's FIN.
    is_done: bool,
    /// The receiver takes no more bytes.
    is_blocked: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Finished,
    Broken,
}

/// What a thread waits for, besides being woken.
struct Wait {
    awaited: Vec<Awaited>,
    wake: Arc<OwnedFd>,
}

/// What a pump waits for.
enum Awaited {
    Socket(Arc<TcpStream>, PollFlags),
    Time(Instant),
}

/// At most this much passes at once.
const BUFFER: usize = 256 << 10;

/// A listener on loopback answers at once, unless its queue is full.
const DIALLING: Duration = Duration::from_secs(5);

fn is_dialling(entry: &Entry) -> bool {
    entry.status == Status::Dialling
}

/// Connects to the listener. If there is none, the dialler gets RST, which is closest to a refusal.
fn join(state: &Watched<State>, number: usize) {
    let listener = state.lock().listener;
    let dialled = TcpStream::connect_timeout(&listener, DIALLING);
    let far = dialled.and_then(|far| {
        far.set_nonblocking(true)?;
        far.set_nodelay(true)?;
        Ok(far)
    });
    state.update(|state| {
        let entry = &mut state.entries[number];
        match far {
            Ok(far) if is_dialling(entry) => {
                entry.far = Some(Arc::new(far));
                entry.status = Status::Open;
            }
            // Changed in the meantime.
            Ok(far) => match entry.status {
                Status::Closed => drop(far.shutdown(Shutdown::Both)),
                Status::Dialling | Status::Open | Status::Reset => reset(&far),
            },
            Err(_) => entry.apply(Change::Reset),
        }
    });
}

/// Passes what can pass. Returns what to wait for, or `None` if the connection has ended.
fn step(state: &mut State, number: usize, pumps: &mut [Pump; 2]) -> Option<Wait> {
    for pump in &mut *pumps {
        pump.write(state, number);
    }
    let entry = &mut state.entries[number];
    let [there, back] = pumps;
    there.see_broken_end(back);
    back.see_broken_end(there);
    there.pass_end(entry);
    back.pass_end(entry);
    let has_ended = match entry.status {
        Status::Reset => true,
        Status::Closed => there.is_over(entry) && back.is_over(entry),
        Status::Open | Status::Dialling => there.is_done && back.is_done,
    };
    if has_ended {
        entry.close();
        return None;
    }
    let awaited = [there.awaited(entry), back.awaited(entry)];
    Some(Wait {
        awaited: awaited.into_iter().flatten().collect(),
        wake: entry.wake.clone()?,
    })
}

impl Pump {
    fn new(direction: Direction, is_observed: bool) -> Self {
        Self {
            direction,
            buffer: vec![0; BUFFER],
            waiting: 0..0,
            piece: if is_observed { 0 } else { usize::MAX },
            is_observed,
            has_news: false,
            end: None,
            is_done: false,
            is_blocked: false,
        }
    }

    /// Whether the waiting bytes are not a whole piece yet.
    fn needs_more(&self) -> bool {
        self.piece == 0 && !self.has_news
    }

    /// Reads, if nothing is waiting or more is needed.
    fn read(&mut self, entry: &mut Entry) {
        let Some(from) = self.readable_end(entry) else {
            return;
        };
        let waiting = self.waiting.len();
        self.buffer.copy_within(self.waiting.clone(), 0);
        if waiting == self.buffer.len() {
            self.buffer.resize(2 * waiting, 0);
        }
        match (&*from).read(&mut self.buffer[waiting..]) {
            Ok(0) => self.end = Some(End::Finished),
            Ok(count) => {
                self.waiting = 0..waiting + count;
                entry.lane(self.direction).delay();
            }
            Err(error) if is_temporary(&error) => {
                self.waiting = 0..waiting;
                return;
            }
            Err(_) => self.end = Some(End::Broken),
        }
        if self.end.is_some() {
            self.waiting = 0..waiting;
        }
        self.has_news = self.is_observed;
    }

    /// Asks the observer how much passes next, if anything has changed.
    fn ask(&mut self, middlebox: &Handle, number: usize) {
        let Some(observer) = middlebox.0.observer.as_ref().filter(|_| self.has_news) else {
            return;
        };
        self.has_news = false;
        let bytes = &self.buffer[self.waiting.clone()];
        self.piece = match observer.piece(middlebox, number, self.direction, bytes) {
            0 if self.end.is_some() => bytes.len(),
            piece => piece.min(bytes.len()),
        };
    }

    /// The socket to read from, if reading is wanted.
    fn readable_end(&self, entry: &Entry) -> Option<Arc<TcpStream>> {
        let is_wanted = (self.waiting.is_empty() || self.needs_more())
            && self.end.is_none()
            && entry.flow(self.direction) != Flow::Hold;
        entry.sender(self.direction).filter(|_| is_wanted)
    }

    /// Passes or drops waiting bytes, as far as possible now.
    fn write(&mut self, state: &mut State, number: usize) {
        while !self.waiting.is_empty() {
            let entry = &mut state.entries[number];
            let flow = entry.flow(self.direction);
            let receiver = entry.receiver(self.direction);
            let Some(to) = receiver.filter(|_| flow != Flow::Drop) else {
                let waiting = std::mem::take(&mut self.waiting);
                entry.lane(self.direction).drop_bytes(waiting.len());
                return;
            };
            let piece = self.piece.min(self.waiting.len());
            let most = state.most(number, self.direction, piece);
            if most == 0 {
                return;
            }
            let head = &self.buffer[self.waiting.start..][..most];
            let written = match state.mask(number, self.direction) {
                0 => (&*to).write(head),
                mask => (&*to).write(&[head[0] ^ mask]),
            };
            match written {
                Ok(count) => {
                    state.record(number, self.direction, &head[..count]);
                    self.waiting.start += count;
                    if self.is_observed {
                        self.piece -= count;
                        self.has_news = self.piece == 0;
                    }
                    state.count_passed(number, self.direction, count);
                }
                Err(error) if is_temporary(&error) => return,
                Err(_) => {
                    self.is_blocked = true;
                    state.entries[number].lane(self.direction).drop_bytes(0);
                }
            }
        }
    }

    /// Notes that the sender is gone, if the other direction could not write to it.
    fn see_broken_end(&mut self, other: &Self) {
        if other.is_blocked {
            self.end = Some(End::Broken);
        }
    }

    /// Passes the sender's FIN or RST, once all bytes have passed.
    fn pass_end(&mut self, entry: &mut Entry) {
        let passes = match entry.flow(self.direction) {
            Flow::Pass | Flow::Late(_) => self.waiting.is_empty(),
            Flow::Hold | Flow::Drop => false,
        };
        match self.end {
            Some(End::Finished) if passes && !self.is_done => {
                self.is_done = true;
                if let Some(to) = entry.receiver(self.direction) {
                    // The receiver may be gone.
                    let _ = to.shutdown(Shutdown::Write);
                }
            }
            Some(End::Broken) if passes => entry.apply(Change::Reset),
            _ => {}
        }
    }

    /// Whether nothing will arrive.
    fn is_over(&self, entry: &Entry) -> bool {
        self.end.is_some() || entry.sender(self.direction).is_none()
    }

    fn awaited(&self, entry: &Entry) -> Option<Awaited> {
        if self.waiting.is_empty() || self.needs_more() {
            let from = self.readable_end(entry)?;
            return Some(Awaited::Socket(from, PollFlags::IN));
        }
        match entry.flow(self.direction) {
            Flow::Hold => None,
            Flow::Pass | Flow::Late(_) | Flow::Drop => {
                let to = entry.receiver(self.direction)?;
                let ready_at = entry.lane_of(self.direction).ready_at;
                let later = ready_at.filter(|at| *at > Instant::now());
                Some(later.map_or(Awaited::Socket(to, PollFlags::OUT), Awaited::Time))
            }
        }
    }
}

impl Wait {
    fn wait(&self) {
        let mut files = vec![PollFd::new(&*self.wake, PollFlags::IN)];
        let mut until = None;
        for awaited in &self.awaited {
            match awaited {
                Awaited::Socket(socket, flags) => files.push(PollFd::new(&**socket, *flags)),
                Awaited::Time(at) => until = until.into_iter().chain([*at]).min(),
            }
        }
        let left = until.map(|at| at.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        // The next step finds out what has happened.
        let _ = poll(&mut files, left.as_ref());
        settle(&self.wake);
    }
}

fn is_temporary(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}
