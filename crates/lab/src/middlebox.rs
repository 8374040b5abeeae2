//! A TCP proxy that breaks what passes through it, under the control of a test.
//!
//! ```text
//!  dialler ──> Middlebox ──> listener      one thread per connection; numbers in order of arrival
//!               └ apply(All, Reset), apply_at(byte 1000 of connection 2, ...), admit(Refuse), flip_at(...)
//! ```
//! A change is complete when its call returns: no further byte passes that should not. So tests need no sleeps: they name the byte
//! at which something breaks, or wait for a number of bytes or connections. An [`Observer`] decides piece by piece what passes.
//!
//! ```
//! use std::io::{Read, Write};
//! use std::net::{TcpListener, TcpStream};
//! use std::time::Duration;
//! use lab::middlebox::{Change, Direction, Mark, Middlebox, Which};
//!
//! let listener = TcpListener::bind("127.0.0.1:0")?;
//! let middlebox = Middlebox::new(listener.local_addr()?)?;
//! let mut dialler = TcpStream::connect(middlebox.address())?;
//! let (mut accepted, _) = listener.accept()?;
//!
//! // The third byte is the last one that passes.
//! let mark = Mark { connection: 0, direction: Direction::ToListener, bytes: 3 };
//! middlebox.apply_at(mark, Which::All, Change::Close);
//! dialler.write_all(b"abcdef")?;
//! let mut received = String::new();
//! accepted.read_to_string(&mut received)?;
//! assert_eq!(received, "abc");
//! middlebox.wait_for_changes(Duration::from_secs(60))?;
//! assert_eq!(middlebox.connections()[0].to_listener.passed, 3);
//! # anyhow::Ok(())
//! ```

mod connection;
mod state;
#[cfg(test)]
mod tests;

use std::fmt;
use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::OwnedFd;

use crate::sockets::{Port, reset};
use crate::watched::Watched;
use state::State;

/// A proxy on 127.0.0.1, between a dialler and a listener. Dropping it resets its connections and ends its threads.
#[derive(Debug)]
pub struct Middlebox {
    handle: Handle,
    acceptor: Option<JoinHandle<()>>,
}

/// Controls a [`Middlebox`] from any thread, and does not keep it alive.
#[derive(Clone, Debug)]
pub struct Handle(Arc<Shared>);

/// Sees what passes through a middlebox, in pieces that it chooses. No lock is held during a call, so the observer may change
/// connections; meanwhile nothing passes through this one.
pub trait Observer: Send + Sync {
    /// How many of `bytes` pass next, in one piece: bytes of one direction that have arrived and have not passed. Called when bytes
    /// have arrived, and again when a piece has passed, then possibly without bytes. 0 waits for more bytes; what is left when the
    /// sender has ended passes.
    fn piece(
        &self,
        middlebox: &Handle,
        connection: usize,
        direction: Direction,
        bytes: &[u8],
    ) -> usize;
}

/// What happens to connections to come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Admission {
    /// Each is joined to a connection to the listener.
    #[default]
    Pass,
    /// The kernel answers with RST, as if nothing listened.
    Refuse,
    /// Each is accepted and never passes anything, until it is reset; the listener does not see it.
    Silence,
}

/// Which connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// All that exist.
    All,
    /// The connection of this number, in order of arrival, from 0.
    One(usize),
}

/// A direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the dialler to the listener.
    ToListener,
    /// From the listener to the dialler.
    ToDialler,
}

/// A change to a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Both ends get RST. Bytes in flight are dropped.
    Reset,
    /// Both ends get FIN after what has passed. Bytes in flight and later ones are dropped.
    Close,
    /// Changes both directions.
    Flow(Flow),
    /// Changes one direction.
    OneWay(Direction, Flow),
}

/// What happens to the bytes of a direction, and to its sender's FIN or RST.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Flow {
    /// They pass.
    #[default]
    Pass,
    /// They pass this much later than they arrive.
    Late(Duration),
    /// They wait, and so does the sender's FIN or RST, like on a cable that is plugged in again before a timeout.
    Hold,
    /// They are dropped, and so is the sender's FIN or RST, like in a NAT that has lost its table. A direction that has lost bytes
    /// never passes any again.
    Drop,
}

/// The moment when exactly this many bytes of a direction have passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The connection's number in order of arrival, from 0; it may be one to come.
    pub connection: usize,
    /// The direction whose bytes are counted.
    pub direction: Direction,
    /// 0 is before the first byte.
    pub bytes: u64,
}

/// One connection through the middlebox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// Whether it is open.
    pub status: Status,
    /// From the dialler to the listener.
    pub to_listener: Traffic,
    /// From the listener to the dialler.
    pub to_dialler: Traffic,
}

/// The state of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Accepted, not yet joined to the listener.
    Dialling,
    /// Open, as far as the middlebox knows.
    Open,
    /// Closed by its ends or by [`Change::Close`].
    Closed,
    /// Reset by one end, by a missing listener, or by [`Change::Reset`].
    Reset,
}

/// The bytes of one direction of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Passed on. A reset may have overtaken the last bytes.
    pub passed: u64,
    /// Read and dropped.
    pub dropped: u64,
}

/// A bit that was flipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flipped {
    /// The number of the connection.
    pub connection: usize,
    /// The direction of the byte.
    pub direction: Direction,
    /// The position of the byte in its direction.
    pub byte: u64,
    /// The bit, 0 for the lowest.
    pub bit: u8,
}

impl Middlebox {
    /// A proxy to `listener`, which need not be open yet. Everything passes.
    pub fn new(listener: SocketAddr) -> Result<Self> {
        Self::start(listener, None)
    }

    /// A proxy whose bytes pass as `observer` says.
    pub fn observed(listener: SocketAddr, observer: Arc<dyn Observer>) -> Result<Self> {
        Self::start(listener, Some(observer))
    }

    fn start(listener: SocketAddr, observer: Option<Arc<dyn Observer>>) -> Result<Self> {
        let port = Port::new().context("a port for the middlebox")?;
        port.listen().context("listening for the middlebox")?;
        let handle = Handle(Arc::new(Shared {
            port,
            observer,
            wake: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
                .context("waking the middlebox")?,
            state: Watched::new(State::new(listener)),
        }));
        let acceptor = thread::spawn({
            let handle = handle.clone();
            move || handle.accept()
        });
        Ok(Self {
            handle,
            acceptor: Some(acceptor),
        })
    }
}

impl Deref for Middlebox {
    type Target = Handle;

    fn deref(&self) -> &Handle {
        &self.handle
    }
}

impl Handle {
    /// The address that diallers connect to.
    pub fn address(&self) -> SocketAddr {
        self.0.port.address()
    }

    /// Where connections are joined to.
    pub fn listener(&self) -> SocketAddr {
        self.0.state.lock().listener
    }

    /// Joins connections to come to another listener.
    pub fn lead_to(&self, listener: SocketAddr) {
        self.0.state.lock().listener = listener;
    }

    /// Decides what happens to connections to come.
    pub fn admit(&self, admission: Admission) -> Result<()> {
        let mut state = self.0.state.lock();
        state.admission = admission;
        let port = &self.0.port;
        match admission {
            Admission::Refuse => port.refuse().context("refusing connections")?,
            Admission::Pass | Admission::Silence => port.listen().context("listening again")?,
        }
        drop(state);
        connection::wake(&self.0.wake);
        Ok(())
    }

    /// Changes connections now. Returns how many were open.
    pub fn apply(&self, which: Which, change: Change) -> usize {
        self.0.state.update(|state| state.apply(which, change))
    }

    /// Changes connections at a mark, or at once if the mark has been passed.
    pub fn apply_at(&self, mark: Mark, which: Which, change: Change) {
        self.0.state.update(|state| {
            state.planned.push((mark, which, change));
            state.apply_planned(mark.connection);
        });
    }

    /// Changes a direction of all connections, also of those to come.
    pub fn set_flow(&self, direction: Direction, flow: Flow) {
        self.0.state.update(|state| {
            state.flows[direction as usize] = flow;
            state.apply(Which::All, Change::OneWay(direction, flow));
        });
    }

    /// Flips a bit (0 for the lowest) of the byte at a mark, if the mark has not been passed.
    pub fn flip_at(&self, mark: Mark, bit: u8) {
        self.0.state.update(|state| state.flip_at(mark, bit));
    }

    /// The bits flipped so far.
    pub fn flips(&self) -> Vec<Flipped> {
        self.0.state.lock().flipped.clone()
    }

    /// Records what passes from now on.
    pub fn record(&self) {
        self.0.state.update(|state| state.records = true);
    }

    /// What was recorded of a direction, before bits were flipped.
    pub fn recorded(&self, connection: usize, direction: Direction) -> Vec<u8> {
        let state = self.0.state.lock();
        let entry = state.entries.get(connection);
        entry.map_or_else(Vec::new, |entry| entry.lane_of(direction).record.clone())
    }

    /// All connections in order of arrival.
    pub fn connections(&self) -> Vec<Connection> {
        self.0.state.lock().connections()
    }

    /// Waits until this many bytes have passed in a direction of all connections together.
    pub fn wait_for_bytes(&self, direction: Direction, bytes: u64, within: Duration) -> Result<()> {
        self.wait_until(within, |connections| {
            let passed = connections.iter().map(|it| it.traffic(direction).passed);
            passed.sum::<u64>() >= bytes
        })
    }

    /// Waits until a condition holds for the connections.
    pub fn wait_until(
        &self,
        within: Duration,
        is_so: impl Fn(&[Connection]) -> bool,
    ) -> Result<()> {
        self.wait(within, |state| is_so(&state.connections()))
    }

    /// Waits until all changes of [`Handle::apply_at`] have been made.
    pub fn wait_for_changes(&self, within: Duration) -> Result<()> {
        self.wait(within, |state| state.planned.is_empty())
    }

    fn wait(&self, within: Duration, is_so: impl Fn(&State) -> bool) -> Result<()> {
        let found = |state: &State| is_so(state).then_some(());
        if self.0.state.wait(within, found).is_none() {
            let state = self.0.state.lock();
            let (connections, planned) = (state.connections(), &state.planned);
            bail!("waited {within:?} in vain: {connections:?}, to be done: {planned:?}");
        }
        Ok(())
    }
}

impl Drop for Middlebox {
    fn drop(&mut self) {
        self.handle.0.state.update(State::end);
        connection::wake(&self.handle.0.wake);
        // The acceptor ends after its connections.
        let _ = self.acceptor.take().map(JoinHandle::join);
    }
}

impl Direction {
    /// Both.
    pub const BOTH: [Self; 2] = [Self::ToListener, Self::ToDialler];

    /// The other one.
    pub fn reverse(self) -> Self {
        match self {
            Self::ToListener => Self::ToDialler,
            Self::ToDialler => Self::ToListener,
        }
    }
}

impl Connection {
    /// The traffic of a direction.
    pub fn traffic(&self, direction: Direction) -> Traffic {
        match direction {
            Direction::ToListener => self.to_listener,
            Direction::ToDialler => self.to_dialler,
        }
    }
}

/// What the threads share. Every change is made under the one lock, so that it is complete when its call returns.
struct Shared {
    port: Port,
    observer: Option<Arc<dyn Observer>>,
    /// Wakes the acceptor.
    wake: OwnedFd,
    state: Watched<State>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Shared").field(&self.state).finish()
    }
}

impl Handle {
    /// Accepts connections until the middlebox is dropped.
    fn accept(&self) {
        thread::scope(|scope| {
            while let Some(refuses) = self.next() {
                let wake = PollFd::new(&self.0.wake, PollFlags::IN);
                let port = PollFd::new(&self.0.port, PollFlags::IN);
                // A port that refuses is always ready.
                let mut files = if refuses {
                    vec![wake]
                } else {
                    vec![wake, port]
                };
                // What is ready shows below, and an interruption is as good.
                let _ = poll(&mut files, None);
                connection::settle(&self.0.wake);
                if let Some(number) = self.accept_one() {
                    scope.spawn(move || connection::serve(self, number));
                }
            }
        });
    }

    /// Whether connections are refused, or `None` at the end.
    fn next(&self) -> Option<bool> {
        let state = self.0.state.lock();
        (!state.is_ending()).then_some(state.admission == Admission::Refuse)
    }

    /// Accepts a connection, if there is one and it is to be accepted.
    fn accept_one(&self) -> Option<usize> {
        self.0.state.update(|state| {
            if state.is_ending() || state.admission == Admission::Refuse {
                return None;
            }
            let near = self.0.port.accept().ok()?;
            let added = state.add(near);
            added.inspect_err(reset).ok()
        })
    }
}
