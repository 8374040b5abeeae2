//! The thread of one connection: takes bytes from one end and passes them to the other, as its state says.

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

/// Ends a wait, or the next one.
pub(super) fn wake(eventfd: &OwnedFd) {
    // It fails only when it counts to 2^64.
    let _ = rustix::io::write(eventfd, &1_u64.to_ne_bytes());
}

/// Lets the next wait wait again.
pub(super) fn settle(eventfd: &OwnedFd) {
    // It fails if nothing has woken.
    let _ = rustix::io::read(eventfd, &mut [0; 8]);
}

/// One direction's bytes that were read and not yet passed on.
struct Pump {
    direction: Direction,
    buffer: Vec<u8>,
    waiting: Range<usize>,
    /// How many of them may pass before the observer is asked: all without one.
    piece: usize,
    is_observed: bool,
    /// Bytes or the sender's end have arrived, or a piece has passed, and the observer has not been asked since.
    has_news: bool,
    /// How the sender has ended, if it has.
    end: Option<End>,
    /// The receiver has been told the end.
    is_done: bool,
    /// The receiver takes no bytes any more.
    is_blocked: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Finished,
    Broken,
}

/// What a thread waits for: one of these, or to be woken.
struct Wait {
    awaited: Vec<Awaited>,
    wake: Arc<OwnedFd>,
}

/// What a pump waits for.
enum Awaited {
    Socket(Arc<TcpStream>, PollFlags),
    Time(Instant),
}

/// As much as is passed on at once.
const BUFFER: usize = 256 << 10;

/// On loopback a listener answers at once, unless its queue is full.
const DIALLING: Duration = Duration::from_secs(5);

fn is_dialling(entry: &Entry) -> bool {
    entry.status == Status::Dialling
}

/// Connects to the listener. A dialler whose listener is not there is reset, the closest thing to a refusal.
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
            // It was changed meanwhile.
            Ok(far) => match entry.status {
                Status::Closed => drop(far.shutdown(Shutdown::Both)),
                Status::Dialling | Status::Open | Status::Reset => reset(&far),
            },
            Err(_) => entry.apply(Change::Reset),
        }
    });
}

/// Passes on what can be, and says what to wait for next, if the connection has not ended.
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
        wake: entry.wake.clone(),
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

    /// Whether what waits is not a whole piece yet.
    fn needs_more(&self) -> bool {
        self.piece == 0 && !self.has_news
    }

    /// Reads, if nothing waits or more is needed.
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

    /// Asks the observer, if there is news, how much passes next.
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

    /// Where to read from now.
    fn readable_end(&self, entry: &Entry) -> Option<Arc<TcpStream>> {
        let is_wanted = (self.waiting.is_empty() || self.needs_more())
            && self.end.is_none()
            && entry.flow(self.direction) != Flow::Hold;
        entry.sender(self.direction).filter(|_| is_wanted)
    }

    /// Passes on or drops what waits, as far as it can now.
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
            let written = match state.entries[number].lane(self.direction).mask() {
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

    /// Sees the end of its sender that the other direction has met when it wrote there.
    fn see_broken_end(&mut self, other: &Self) {
        if other.is_blocked {
            self.end = Some(End::Broken);
        }
    }

    /// Tells the receiver how the sender has ended, if everything has passed before.
    fn pass_end(&mut self, entry: &mut Entry) {
        let passes = match entry.flow(self.direction) {
            Flow::Pass | Flow::Slow(_) | Flow::Late(_) => self.waiting.is_empty(),
            Flow::Hold | Flow::Drop => false,
        };
        match self.end {
            Some(End::Finished) if passes && !self.is_done => {
                self.is_done = true;
                if let Some(to) = entry.receiver(self.direction) {
                    // It may be gone already.
                    let _ = to.shutdown(Shutdown::Write);
                }
            }
            Some(End::Broken) if passes => entry.apply(Change::Reset),
            _ => {}
        }
    }

    /// Whether nothing comes any more.
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
            Flow::Pass | Flow::Slow(_) | Flow::Late(_) | Flow::Drop => {
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
        // What has happened shows in the next step.
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
