//! A stream of a session: bytes in both directions that go on over the next connection when one breaks.
//!
//! ```text
//!           lost                                     attached
//!  Up ──────────────> Down (the client dials, the server waits) ──────> Up
//!   │                   │ no progress for the reconnect timeout
//!   └─ shut down,       v
//!      aborted ────> Closed: every call fails with the reason
//! ```
//!
//! Two locks, one a direction, are held while bytes go; a third, never held for long, is for the state above. The
//! order is `attaching`, `incoming`, `outgoing`, `link`. Whoever waits for room reads acknowledgements itself, unless a reader does.

use std::{
    fmt, io,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, TryLockError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use thiserror::Error;
use tracing::{debug, info, warn};
use vamoose_session::{
    frame::{Header, Kind, MAX_LEN},
    handshake::Refusal,
    window::{AcknowledgeError, Buffer, Sums, Window},
};
use vm_memory::VolatileSlice;

use super::{
    Shared as Session,
    connection::{Connection, Receiver, Sender},
    incoming::{Corruption, Event, Failure, Incoming, Target, Violation},
};
use crate::{chain, left, lock, memory::Left};

/// What a user of a stream holds. Dropping it ends the stream: what was written before
/// [`finish`](crate::Stream::finish) still arrives, without that the peer learns that the stream was given up.
pub struct Resumable(Arc<Carried>);

/// A stream, whoever uses it.
pub(crate) struct Carried {
    pub(crate) number: u32,
    session: Arc<Session>,
    attaching: Mutex<()>,
    incoming: Mutex<Incoming>,
    outgoing: Mutex<Outgoing>,
    link: Mutex<Link>,
    changed: Condvar,
    /// What the peer has received, by the last frame, to be applied to the window by who has its lock next.
    acknowledged: AtomicU64,
    /// What we have received.
    received: AtomicU64,
    /// What of it the peer has been told.
    told: AtomicU64,
    stall_timeout: AtomicU64,
    is_dropped: AtomicBool,
    /// The server has passed the stream on, or is about to.
    is_introduced: AtomicBool,
}

struct Outgoing {
    /// `None` while there is no connection.
    sender: Option<Sender>,
    window: Window,
}

struct Link {
    state: State,
    /// Since when there was no progress; `None` while all is well.
    troubled: Option<Instant>,
    /// Where a frame was corrupt last: what had been received, and acknowledged by the peer.
    corrupt_at: Option<(u64, u64)>,
    /// It has had a connection.
    was_up: bool,
    /// Another connection is taking the place of the last.
    is_attaching: bool,
}

enum State {
    Up(Arc<Connection>),
    Down { cause: Arc<str> },
    Closed(StreamError),
}

/// Why a stream of a session is of no use any more.
#[derive(Clone, Debug, Error)]
#[allow(missing_docs, reason = "the messages say it")]
#[non_exhaustive]
pub enum StreamError {
    #[error("the stream was shut down here")]
    ShutDown,
    #[error("the peer has given the stream up")]
    Aborted,
    #[error("the connection was lost, and there is no thread to make another one: {error}")]
    NoThread { error: io::ErrorKind },
    #[error("the connection was lost ({cause}) and not back after {seconds} s")]
    Lost { cause: Arc<str>, seconds: u64 },
    #[error("the connection was lost ({cause}), and the peer refuses to go on: {refusal}")]
    Refused { cause: Arc<str>, refusal: Refusal },
    #[error(
        "twice in a row on {path}: {corruption}; this path, or the memory of a host, changes what it carries"
    )]
    Corrupt {
        path: String,
        corruption: Corruption,
    },
    #[error("the peer breaks the protocol: {0}")]
    Violation(Violation),
    #[error("the peer breaks the protocol: {0}")]
    Acknowledge(AcknowledgeError),
    #[error("timed out after {seconds} s: the peer has stopped reading")]
    Stalled { seconds: u64 },
}

impl StreamError {
    fn to_io(&self) -> io::Error {
        let kind = match self {
            Self::ShutDown => io::ErrorKind::NotConnected,
            Self::Aborted | Self::Refused { .. } => io::ErrorKind::ConnectionReset,
            Self::Lost { .. } | Self::NoThread { .. } => io::ErrorKind::ConnectionAborted,
            Self::Corrupt { .. } | Self::Violation(_) | Self::Acknowledge(_) => {
                io::ErrorKind::InvalidData
            }
            Self::Stalled { .. } => io::ErrorKind::TimedOut,
        };
        io::Error::new(kind, self.clone())
    }
}

impl Resumable {
    pub(crate) fn new(carried: Arc<Carried>) -> Self {
        Self(carried)
    }

    pub(crate) fn carried(&self) -> &Arc<Carried> {
        &self.0
    }
}

impl fmt::Debug for Resumable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream {}", self.0.number)
    }
}

impl Drop for Resumable {
    fn drop(&mut self) {
        self.0.abandon();
    }
}

impl Carried {
    /// A stream without a connection, which is about to get one.
    pub(crate) fn new(number: u32, session: Arc<Session>, stall_timeout: Duration) -> Self {
        Self {
            number,
            session,
            attaching: Mutex::default(),
            incoming: Mutex::new(Incoming::new(0)),
            outgoing: Mutex::new(Outgoing {
                sender: None,
                window: Window::new(0),
            }),
            link: Mutex::new(Link {
                state: State::Down {
                    cause: "it was never there".into(),
                },
                troubled: Some(Instant::now()),
                corrupt_at: None,
                was_up: false,
                is_attaching: false,
            }),
            changed: Condvar::new(),
            acknowledged: AtomicU64::new(0),
            received: AtomicU64::new(0),
            told: AtomicU64::new(0),
            stall_timeout: AtomicU64::new(millis(stall_timeout)),
            is_dropped: AtomicBool::new(false),
            is_introduced: AtomicBool::new(false),
        }
    }

    // Reading.

    /// Reads whole bytes: at least one, or 0 at the stream's end. `WouldBlock` when none came for the stall timeout.
    pub(crate) fn read(self: &Arc<Self>, out: &mut [u8]) -> io::Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        self.receive(&mut Target::Own(out), Patience::Stall(None))
    }

    /// As [`read`](Self::read), but `None` when nothing has come by `deadline`.
    pub(crate) fn read_until(
        self: &Arc<Self>,
        out: &mut [u8],
        deadline: Option<Instant>,
    ) -> io::Result<Option<usize>> {
        match self.receive(&mut Target::Own(out), Patience::Until(deadline)) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            read => read.map(Some),
        }
    }

    /// Reads until `out` is full or the stream ends.
    pub(crate) fn read_full(self: &Arc<Self>, out: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        while filled < out.len() {
            match self.read(&mut out[filled..])? {
                0 => break,
                read => filled += read,
            }
        }
        Ok(filled)
    }

    /// Reads into the guest's memory until `pages` are full or the stream ends.
    pub(crate) fn receive_memory(
        self: &Arc<Self>,
        pages: &[VolatileSlice<'_>],
    ) -> io::Result<usize> {
        let mut left = Left::new(&[], pages);
        let wanted = left.bytes();
        while left.bytes() > 0 {
            if self.receive(&mut Target::Guest(&mut left), Patience::Stall(None))? == 0 {
                break;
            }
        }
        Ok(wanted - left.bytes())
    }

    /// The checksum of pages that came with what was read last.
    pub(crate) fn pages(&self) -> Option<u32> {
        lock(&self.incoming).pages()
    }

    /// Waits until whole bytes can be read without waiting, or the stream has ended.
    pub(crate) fn wait_for_first(self: &Arc<Self>) -> io::Result<()> {
        self.receive(&mut Target::Own(&mut []), Patience::Stall(None))
            .map(drop)
    }

    fn receive(
        self: &Arc<Self>,
        target: &mut Target<'_, '_>,
        patience: Patience,
    ) -> io::Result<usize> {
        loop {
            let Some(connection) = self.wait_up(patience)? else {
                return Err(io::ErrorKind::WouldBlock.into());
            };
            let patience = match patience {
                Patience::Stall(_) => {
                    Patience::Stall(Instant::now().checked_add(self.stall_timeout()))
                }
                until => until,
            };
            let mut incoming = lock(&self.incoming);
            let failure = match self.receive_from(&mut incoming, target, patience) {
                Ok(read) => return Ok(read),
                Err(failure) => failure,
            };
            drop(incoming);
            match failure {
                Failure::Stalled => return Err(io::ErrorKind::WouldBlock.into()),
                failure => self.failed(&connection, failure),
            }
        }
    }

    fn receive_from(
        self: &Arc<Self>,
        incoming: &mut Incoming,
        target: &mut Target<'_, '_>,
        patience: Patience,
    ) -> Result<usize, Failure> {
        loop {
            if !incoming.waiting().is_empty() {
                return Ok(incoming.deliver(target));
            }
            if incoming.has_ended() {
                return Ok(0);
            }
            let connection = incoming
                .receiver
                .as_ref()
                .ok_or(Failure::Absent)?
                .connection()
                .clone();
            let is_announced = incoming.is_announced();
            let mut stalled = || {
                if connection.silent_for() > super::SILENCE {
                    return Err(Failure::Connection(io::ErrorKind::TimedOut.into()));
                }
                // In the middle of a frame the peer's own patience decides.
                match patience.has_ended() && !is_announced {
                    true => Err(Failure::Stalled),
                    false => Ok(()),
                }
            };
            // Reads of the socket come back at long intervals only.
            if let Patience::Until(_) = patience
                && !incoming.has_bytes(match is_announced {
                    true => super::LOOK,
                    false => patience.left().min(super::LOOK),
                })
            {
                stalled()?;
                continue;
            }
            match incoming.receive(Some(target), &mut stalled)? {
                Event::Bytes(read) => {
                    self.progress(incoming, false);
                    return Ok(read);
                }
                Event::Header => self.heard(incoming),
                Event::End => {
                    self.heard(incoming);
                    self.progress(incoming, true);
                    return Ok(0);
                }
                Event::Abort => {
                    self.close(StreamError::Aborted);
                    return Err(Failure::Absent);
                }
            }
        }
    }

    /// Publishes what has been received, and tells the peer when it is time.
    fn progress(&self, incoming: &Incoming, at_once: bool) {
        let received = incoming.received();
        self.received.store(received, Ordering::Release);
        let untold = received.saturating_sub(self.told.load(Ordering::Relaxed));
        if at_once || untold >= TELL_EVERY {
            self.tell();
        }
    }

    /// Takes what a header says of our own direction.
    fn heard(&self, incoming: &Incoming) {
        let peer_has = incoming.peer_has();
        let mut link = lock(&self.link);
        link.troubled = None;
        let before = self.acknowledged.swap(peer_has, Ordering::AcqRel);
        if before != peer_has {
            self.changed.notify_all();
            if let Some(receiver) = &incoming.receiver {
                let path = receiver.connection().path;
                self.session
                    .delivered(path, peer_has.saturating_sub(before));
            }
        }
    }

    /// Sends what has been received as a frame of its own, if that needs no wait.
    pub(crate) fn tell(&self) {
        let Ok(mut outgoing) = self.outgoing.try_lock() else {
            // Whoever has the lock sends frames, which tell it too.
            return;
        };
        let received = self.received.load(Ordering::Acquire);
        let next = outgoing.window.next();
        let Some(sender) = &mut outgoing.sender else {
            return;
        };
        if !sender.connection().is_writable() {
            return;
        }
        let header = Header::empty(Kind::Acknowledge, next, received);
        let result =
            sender.send_header(
                &header.encode(),
                &mut || Err(io::ErrorKind::TimedOut.into()),
            );
        match result {
            Ok(()) => self.told.store(received, Ordering::Relaxed),
            Err(error) => {
                let connection = sender.connection();
                debug!("{}: {error}", connection.name);
                // Nothing may follow a part of a frame. Whoever reads learns of it.
                connection.shut_down();
            }
        }
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    // Writing.

    /// Writes `head` and then a copy of the guest's pages: what is sent again must be what was sent.
    pub(crate) fn send_memory(
        self: &Arc<Self>,
        head: &[u8],
        pages: &[VolatileSlice<'_>],
    ) -> io::Result<()> {
        let left = Left::new(&[], pages);
        let mut copy: Buffer = vec![0; left.bytes()].into();
        let mut end = 0;
        for slice in pages {
            end += slice.copy_to(&mut copy[end..]);
        }
        self.write_packet(head, &mut copy, end, None)
    }

    /// Writes `head` and then `tail`, as copies.
    pub(crate) fn write_both(self: &Arc<Self>, head: &[u8], tail: &[u8]) -> io::Result<()> {
        let check = self.session.config.check;
        if head.len() + tail.len() <= SMALL {
            let both = [head, tail].concat();
            if both.is_empty() {
                return Ok(());
            }
            let mut outgoing = self.room(both.len())?;
            outgoing
                .window
                .push_copy(&both, Sums::of(&both, check))
                .map_err(io::Error::other)?;
            return self.send(outgoing, 1);
        }
        for piece in [head, tail]
            .into_iter()
            .flat_map(|bytes| bytes.chunks(PIECE))
        {
            let mut outgoing = self.room(piece.len())?;
            outgoing
                .window
                .push_copy(piece, Sums::of(piece, check))
                .map_err(io::Error::other)?;
            self.send(outgoing, 1)?;
        }
        Ok(())
    }

    /// Whether packets go with a checksum of their pages.
    pub(crate) fn is_checked(&self) -> bool {
        self.session.config.check
    }

    /// What carries the stream now, or carried it last, for messages.
    pub(crate) fn carrier(&self) -> String {
        match &lock(&self.link).state {
            State::Up(connection) => connection.name.clone(),
            State::Down { .. } | State::Closed(_) => self.session.peer.clone(),
        }
    }

    /// The round trip of the connection that carries the stream now.
    pub(crate) fn round_trip(&self) -> Option<Duration> {
        match &lock(&self.link).state {
            State::Up(connection) => connection.round_trip(),
            State::Down { .. } | State::Closed(_) => None,
        }
    }

    /// Writes a packet: `head`, and the first `len` bytes of `payload`, which may be exchanged for another buffer of the same
    /// length. `pages` is the checksum of the pages, where the payload encodes them.
    pub(crate) fn write_packet(
        self: &Arc<Self>,
        head: &[u8],
        payload: &mut Buffer,
        len: usize,
        pages: Option<u32>,
    ) -> io::Result<()> {
        if len == 0 || len > MAX_LEN {
            return self.write_both(head, &payload[..len.min(payload.len())]);
        }
        let check = self.session.config.check;
        // While the window may be full: the processor has the bytes.
        let sums = Sums {
            check: check.then(|| crc32c::crc32c(&payload[..len])),
            pages: pages.filter(|_| check),
        };
        let mut outgoing = self.room(head.len() + len)?;
        outgoing
            .window
            .push_copy(head, Sums::of(head, check))
            .map_err(io::Error::other)?;
        // A buffer is kept as a whole, so that a small payload would take more room than the window counts: twice at most.
        let pushed = match len >= SWAP && len >= payload.len() / 2 {
            true => outgoing.window.push_buffer(payload, len, sums),
            false => outgoing.window.push_copy(&payload[..len], sums),
        };
        pushed.map_err(io::Error::other)?;
        self.send(outgoing, 2)
    }

    /// Writes the end of our direction.
    pub(crate) fn finish(self: &Arc<Self>) {
        let Ok(mut outgoing) = self.room(0) else {
            return;
        };
        if outgoing.window.push_end().is_ok() {
            // If it cannot be sent now, it is sent on the next connection.
            let _ = self.send(outgoing, 1);
        }
    }

    /// Bytes that the peer has not acknowledged.
    pub(crate) fn queued(&self) -> Option<usize> {
        Some(self.outgoing.try_lock().ok()?.window.unacknowledged())
    }

    /// The outgoing half, once there is room for `len` bytes.
    fn room(self: &Arc<Self>, len: usize) -> io::Result<MutexGuard<'_, Outgoing>> {
        let limit = self.session.stream_window();
        let mut mark = self.mark();
        loop {
            if let State::Closed(error) = &lock(&self.link).state {
                return Err(error.to_io());
            }
            let mut outgoing = lock(&self.outgoing);
            let unacknowledged = outgoing.window.unacknowledged();
            // Buffers should come back while they are in a cache.
            if unacknowledged >= COLLECT {
                drop(outgoing);
                self.collect(Duration::ZERO);
                outgoing = lock(&self.outgoing);
            }
            let acknowledged = self.acknowledged.load(Ordering::Acquire);
            if let Err(error) = outgoing.window.acknowledge(acknowledged) {
                drop(outgoing);
                self.close(StreamError::Acknowledge(error));
                continue;
            }
            let unacknowledged = outgoing.window.unacknowledged();
            if unacknowledged == 0 || unacknowledged + len <= limit {
                return Ok(outgoing);
            }
            drop(outgoing);
            if acknowledged != mark.0 || !self.is_up() {
                mark = (acknowledged, Instant::now());
            }
            let patience = self.stall_timeout();
            if mark.1.elapsed() > patience {
                let seconds = patience.as_secs();
                self.close(StreamError::Stalled { seconds });
                continue;
            }
            self.wait_for_acknowledgement();
        }
    }

    /// Sends the last `count` frames of the window, which keeps them: a failure costs the connection and no more.
    fn send(
        self: &Arc<Self>,
        mut outgoing: MutexGuard<'_, Outgoing>,
        count: usize,
    ) -> io::Result<()> {
        let received = self.received.load(Ordering::Acquire);
        let Outgoing { sender, window } = &mut *outgoing;
        let Some(sender) = sender else {
            return Ok(());
        };
        let connection = sender.connection().clone();
        let mut mark = self.mark();
        let result = sender.send(window.last(count), received, &mut || {
            self.blocked(&connection, &mut mark)
        });
        // Nothing may follow a part of a frame.
        if result.is_err() {
            connection.shut_down();
        }
        drop(outgoing);
        match result {
            Ok(()) => self.told.store(received, Ordering::Relaxed),
            Err(error) => self.failed(&connection, Failure::Connection(error)),
        }
        Ok(())
    }

    /// What the peer has, and now.
    fn mark(&self) -> (u64, Instant) {
        (self.acknowledged.load(Ordering::Acquire), Instant::now())
    }

    /// The kernel has taken nothing for a while: whether to go on. `mark` is when the peer had something new last.
    fn blocked(
        self: &Arc<Self>,
        connection: &Arc<Connection>,
        mark: &mut (u64, Instant),
    ) -> io::Result<()> {
        if !self.is_carried_by(connection) {
            return Err(io::ErrorKind::NotConnected.into());
        }
        self.collect(Duration::ZERO);
        let (now, patience) = (self.mark(), self.stall_timeout());
        if now.0 != mark.0 {
            *mark = now;
        } else if mark.1.elapsed() > patience {
            let seconds = patience.as_secs();
            self.close(StreamError::Stalled { seconds });
            return Err(io::ErrorKind::TimedOut.into());
        }
        match connection.silent_for() > super::SILENCE && !connection.is_readable(Duration::ZERO) {
            true => Err(io::ErrorKind::TimedOut.into()),
            false => Ok(()),
        }
    }

    /// Reads what has come of acknowledgements, unless a reader does; waits for one if nothing is there.
    pub(crate) fn collect(self: &Arc<Self>, timeout: Duration) -> bool {
        let mut incoming = match self.incoming.try_lock() {
            Ok(incoming) => incoming,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        let is_dropped = self.is_dropped.load(Ordering::Acquire);
        let Some(connection) = incoming.receiver.as_ref().map(|it| it.connection().clone()) else {
            return false;
        };
        let mut wait = timeout;
        loop {
            let waits = incoming.is_announced() || !incoming.waiting().is_empty();
            if (waits && !is_dropped)
                || incoming.has_ended() && !incoming.is_announced() && !incoming.has_bytes(wait)
            {
                return !waits;
            }
            if !incoming.has_bytes(wait) {
                return true;
            }
            wait = Duration::ZERO;
            // What has come of a frame that nobody reads is not kept: it comes again.
            let mut stalled = || match is_dropped {
                true => Err(Failure::Connection(io::ErrorKind::TimedOut.into())),
                false => Err(Failure::Stalled),
            };
            let mut nowhere = [0; 4096];
            let mut target = Target::Own(&mut nowhere);
            // Nobody reads any more: what still comes is dropped.
            let target = is_dropped.then_some(&mut target);
            match incoming.receive(target, &mut stalled) {
                Ok(Event::Bytes(_)) => self.progress(&incoming, false),
                Ok(Event::Header) => self.heard(&incoming),
                Ok(Event::End) => {
                    self.heard(&incoming);
                    self.progress(&incoming, true);
                }
                Ok(Event::Abort) => {
                    drop(incoming);
                    self.close(StreamError::Aborted);
                    return true;
                }
                Err(Failure::Stalled) => return true,
                Err(failure) => {
                    drop(incoming);
                    self.failed(&connection, failure);
                    return true;
                }
            }
        }
    }

    fn wait_for_acknowledgement(self: &Arc<Self>) {
        if self.is_up() && self.collect(super::LOOK) {
            return;
        }
        let link = lock(&self.link);
        if matches!(link.state, State::Closed(_)) {
            return;
        }
        // Short: a reader may have seen the acknowledgement between the check and this wait.
        let _ = self.changed.wait_timeout(link, RECHECK);
    }
}

/// How long a reader waits for bytes; for ever where no end is set.
#[derive(Clone, Copy)]
enum Patience {
    /// Then the peer has stalled. It is set once there is a connection: a peer without one has not.
    Stall(Option<Instant>),
    /// Then the reader has something else to do.
    Until(Option<Instant>),
}

impl Patience {
    fn left(self) -> Duration {
        let (Self::Stall(end) | Self::Until(end)) = self;
        end.map_or(Duration::MAX, left)
    }

    fn has_ended(self) -> bool {
        self.left().is_zero()
    }
}

/// Received bytes after which the peer is told.
const TELL_EVERY: u64 = 256 << 10;

/// Unacknowledged bytes from which on a writer looks for acknowledgements.
const COLLECT: usize = 256 << 10;

/// What is copied into one frame together.
const SMALL: usize = 64 << 10;

/// Payloads from this length on are not copied.
const SWAP: usize = 128 << 10;

/// What longer writes are cut into.
const PIECE: usize = 512 << 10;

const RECHECK: Duration = Duration::from_millis(20);

/// How long the first connection of a stream may take at least.
const OPENING: Duration = Duration::from_secs(10);

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// What becomes of the stream.
impl Carried {
    /// The connection that carries the stream; waits for one while there is none. `None` when it has not come while
    /// the reader would wait.
    fn wait_up(&self, patience: Patience) -> io::Result<Option<Arc<Connection>>> {
        let mut link = lock(&self.link);
        loop {
            let Link {
                state,
                troubled,
                was_up,
                is_attaching,
                ..
            } = &mut *link;
            match state {
                State::Up(connection) => return Ok(Some(connection.clone())),
                State::Closed(error) => return Err(error.to_io()),
                State::Down { cause } => {
                    let limit = self.session.config.reconnect_timeout;
                    let limit = if *was_up && !*is_attaching {
                        limit
                    } else {
                        limit.max(OPENING)
                    };
                    let since = *troubled.get_or_insert_with(Instant::now);
                    let left = limit.saturating_sub(since.elapsed());
                    if left.is_zero() {
                        let error = StreamError::Lost {
                            cause: cause.clone(),
                            seconds: limit.as_secs(),
                        };
                        *state = State::Closed(error);
                        continue;
                    }
                    let left = match patience {
                        Patience::Stall(_) => left,
                        Patience::Until(_) if patience.has_ended() => return Ok(None),
                        Patience::Until(_) => left.min(patience.left()),
                    };
                    let waited = self.changed.wait_timeout(link, left);
                    link = waited.map_or_else(|poisoned| poisoned.into_inner().0, |(link, _)| link);
                }
            }
        }
    }

    /// What a failure on `connection` means for the stream.
    fn failed(self: &Arc<Self>, connection: &Arc<Connection>, failure: Failure) {
        match failure {
            Failure::Absent | Failure::Stalled => {}
            Failure::Connection(error) => self.lost(connection, chain(&error).to_string()),
            Failure::Protocol(violation) => self.close(StreamError::Violation(violation)),
            Failure::Corrupt(corruption) => {
                let frames = &self.session().corrupt_frames;
                frames.fetch_add(1, Ordering::Relaxed);
                // A peer that only acknowledges stays at its offset: then these tell whether it is the same frame again.
                let acknowledged = match corruption {
                    Corruption::Header(_) => self.acknowledged.load(Ordering::Acquire),
                    Corruption::Bytes { .. } => 0,
                };
                let at = (self.received.load(Ordering::Acquire), acknowledged);
                let was_at = lock(&self.link).corrupt_at.replace(at);
                if was_at == Some(at) {
                    let path = connection.name.clone();
                    self.close(StreamError::Corrupt { path, corruption });
                    return;
                }
                warn!("{}: {corruption}; asking for it again", connection.name);
                self.lost(connection, corruption.to_string());
            }
        }
    }

    /// `connection` is of no use any more. The client dials another one.
    fn lost(self: &Arc<Self>, connection: &Arc<Connection>, cause: String) {
        connection.shut_down();
        let mut link = lock(&self.link);
        if !matches!(&link.state, State::Up(current) if Arc::ptr_eq(current, connection)) {
            return;
        }
        let limit = self.session.config.reconnect_timeout;
        if limit.is_zero() {
            drop(link);
            let cause = cause.into();
            self.close(StreamError::Lost { cause, seconds: 0 });
            return;
        }
        link.troubled.get_or_insert_with(Instant::now);
        info!(
            "stream {}: {} was lost: {cause}",
            self.number, connection.name
        );
        link.state = State::Down {
            cause: cause.as_str().into(),
        };
        drop(link);
        self.changed.notify_all();
        self.session.lost(self, connection.path);
    }

    /// Ends the stream for good. The first reason stays.
    pub(crate) fn close(&self, reason: StreamError) {
        let mut link = lock(&self.link);
        let connection = match &link.state {
            State::Closed(_) => return,
            State::Up(connection) => Some(connection.clone()),
            State::Down { .. } => None,
        };
        debug!("stream {}: {reason}", self.number);
        let is_ours = matches!(reason, StreamError::ShutDown);
        link.state = State::Closed(reason);
        drop(link);
        self.changed.notify_all();
        if let Some(connection) = &connection {
            if is_ours {
                self.abort();
            }
            connection.shut_down();
        }
        self.session.forget(self);
    }

    /// Tells the peer that the stream was given up, if that takes no wait: else it finds out when it dials.
    fn abort(&self) {
        let Ok(mut outgoing) = self.outgoing.try_lock() else {
            return;
        };
        let header = Header::empty(Kind::Abort, outgoing.window.next(), 0);
        let Some(sender) = &mut outgoing.sender else {
            return;
        };
        let mut stalled = || Err(io::ErrorKind::TimedOut.into());
        let told = sender.connection().is_writable()
            && sender.send_header(&header.encode(), &mut stalled).is_ok();
        if told {
            let _ = sender.finish();
        }
    }

    /// Nobody uses the stream any more: it stays until the peer has what was finished, else it is given up.
    fn abandon(&self) {
        self.is_dropped.store(true, Ordering::Release);
        let outgoing = lock(&self.outgoing);
        let is_finished = outgoing.window.has_ended();
        drop(outgoing);
        if !is_finished || self.is_done() {
            self.close(StreamError::ShutDown);
        }
    }

    /// Claims the introduction of a new stream: true for the first caller.
    pub(crate) fn claim_introduction(&self) -> bool {
        !self.is_introduced.swap(true, Ordering::AcqRel)
    }

    /// Waits until the peer has all that was written; false if that takes too long, or the stream ends before.
    pub(crate) fn drain(self: &Arc<Self>, timeout: Duration) -> bool {
        let began = Instant::now();
        while !self.is_done() {
            let left = timeout.saturating_sub(began.elapsed());
            if left.is_zero() || self.is_closed() {
                // The last acknowledgement may have come just before the end.
                return self.is_done();
            }
            // Another thread reads it, or it has no connection.
            if !self.collect(left.min(super::LOOK)) {
                thread::sleep(Duration::from_millis(5));
            }
        }
        true
    }

    /// Whether the peer has all that was written.
    fn is_done(&self) -> bool {
        let mut outgoing = lock(&self.outgoing);
        let acknowledged = self.acknowledged.load(Ordering::Acquire);
        let _ = outgoing.window.acknowledge(acknowledged);
        outgoing.window.is_empty()
    }

    /// Regular work: heartbeats, acknowledgements that nobody reads, silence, and the end of what was dropped.
    pub(crate) fn look_after(self: &Arc<Self>) {
        // Nobody may be waiting for it; a stream that is lost must be forgotten all the same.
        let connection = match self.wait_up(Patience::Until(Some(Instant::now()))) {
            Ok(Some(connection)) => connection,
            Ok(None) => return,
            Err(_) => return self.session.forget(self),
        };
        let unread = !self.collect(Duration::ZERO) && connection.is_readable(Duration::ZERO);
        if connection.silent_for() > super::SILENCE && !unread {
            self.lost(
                &connection,
                format!("nothing came for {} s", super::SILENCE.as_secs()),
            );
            return;
        }
        if connection.idle_for() >= super::TICK {
            self.tell();
        }
        if self.is_dropped.load(Ordering::Acquire) && self.is_done() {
            self.close(StreamError::ShutDown);
        }
    }

    /// Bytes that the peer has received.
    pub(crate) fn delivered(&self) -> u64 {
        self.acknowledged.load(Ordering::Relaxed)
    }

    /// The path that carries it, if one does.
    pub(crate) fn path(&self) -> Option<usize> {
        match &lock(&self.link).state {
            State::Up(connection) => Some(connection.path),
            State::Down { .. } | State::Closed(_) => None,
        }
    }

    fn is_up(&self) -> bool {
        matches!(lock(&self.link).state, State::Up(_))
    }

    fn is_carried_by(&self, connection: &Arc<Connection>) -> bool {
        matches!(&lock(&self.link).state, State::Up(current) if Arc::ptr_eq(current, connection))
    }

    pub(crate) fn is_closed(&self) -> bool {
        matches!(lock(&self.link).state, State::Closed(_))
    }

    /// Why the stream has no connection, and since when.
    pub(crate) fn trouble(&self) -> Option<(Arc<str>, Instant)> {
        let link = lock(&self.link);
        match (&link.state, link.troubled) {
            (State::Down { cause }, since) => {
                Some((cause.clone(), since.unwrap_or_else(Instant::now)))
            }
            _ => None,
        }
    }

    pub(crate) fn stall_timeout(&self) -> Duration {
        Duration::from_millis(self.stall_timeout.load(Ordering::Relaxed))
    }

    pub(crate) fn set_stall_timeout(&self, timeout: Duration) {
        self.stall_timeout.store(millis(timeout), Ordering::Relaxed);
    }

    /// Begins to put another connection in the place of the one there is, if there is one: from here on nothing more is
    /// received, so that what the peer is told stays true. `None` if the stream has ended.
    pub(crate) fn attach(self: &Arc<Self>) -> Option<Attaching<'_>> {
        // Whoever still sends again on the old one would keep its turn until it is found silent.
        if let State::Up(old) = &lock(&self.link).state {
            old.shut_down();
        }
        let turn = lock(&self.attaching);
        let mut link = lock(&self.link);
        match &link.state {
            State::Closed(_) => return None,
            State::Up(old) => {
                old.shut_down();
                link.troubled.get_or_insert_with(Instant::now);
                link.state = State::Down {
                    cause: "another connection takes its place".into(),
                };
            }
            State::Down { .. } => {}
        }
        link.is_attaching = true;
        drop(link);
        let mut incoming = lock(&self.incoming);
        incoming.replace(None);
        let received = incoming.received();
        drop(incoming);
        lock(&self.outgoing).sender = None;
        Some(Attaching {
            carried: self,
            received,
            _turn: turn,
        })
    }
}

/// A stream that is between two connections.
pub(crate) struct Attaching<'a> {
    carried: &'a Arc<Carried>,
    pub(crate) received: u64,
    _turn: MutexGuard<'a, ()>,
}

impl Drop for Attaching<'_> {
    fn drop(&mut self) {
        lock(&self.carried.link).is_attaching = false;
    }
}

impl Attaching<'_> {
    /// Whether the stream can go on with a peer that has received this much.
    pub(crate) fn accepts(&self, peer_has: u64) -> Result<(), AcknowledgeError> {
        lock(&self.carried.outgoing).window.acknowledge(peer_has)?;
        self.carried.acknowledged.store(peer_has, Ordering::Release);
        Ok(())
    }

    /// Goes on over a new connection, and sends again what the peer does not have.
    pub(crate) fn go_on(self, receiver: Receiver, mut sender: Sender) {
        let carried = self.carried;
        let connection = sender.connection().clone();
        lock(&carried.incoming).replace(Some(receiver));
        let mut outgoing = lock(&carried.outgoing);
        let mut link = lock(&carried.link);
        if matches!(link.state, State::Closed(_)) {
            connection.shut_down();
            return;
        }
        link.state = State::Up(connection.clone());
        link.was_up = true;
        drop(link);
        carried.changed.notify_all();
        // Readers go on meanwhile, so that two ends that both send again do not wait for each other.
        let mut frames = outgoing.window.frames();
        let mut mark = carried.mark();
        let mut result = Ok(());
        while result.is_ok() {
            let mut next = frames.by_ref().take(1).peekable();
            if next.peek().is_none() {
                break;
            }
            let received = carried.received.load(Ordering::Acquire);
            result = sender.send(next, received, &mut || {
                carried.blocked(&connection, &mut mark)
            });
        }
        drop(frames);
        if result.is_err() {
            connection.shut_down();
        }
        outgoing.sender = Some(sender);
        drop(outgoing);
        match result {
            // Where nothing was to be sent again, too, the peer sees that the connection works.
            Ok(()) => carried.tell(),
            Err(error) => carried.failed(&connection, Failure::Connection(error)),
        }
    }
}
