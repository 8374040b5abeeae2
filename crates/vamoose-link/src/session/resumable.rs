//! Drives a session stream: bytes in both directions that continue over the next connection when one breaks.
//!
//! [`StreamState`] decides; the threads that read and write carry out its effects:
//!
//! ```text
//!  reader ── incoming (lock) ── read ──> on_header, on_data ─┐                     ┌─> effects: shut down, dial, wake
//!                                                            ├─ core (lock, short) ┤
//!  writer ── write_packet ── outgoing (lock) ── send <───────┘                     └─> frames that are lent
//! ```
//!
//! `incoming` and `outgoing` are held during I/O; `core` never is. The lock order is `attaching`, `incoming`, `outgoing`,
//! `core`; with `core` held, `incoming` is only tried. A writer that waits for room reads acknowledgements itself unless a reader
//! does.

use std::{
    fmt, io,
    ops::{Deref, DerefMut},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use tracing::{debug, info, warn};
use vamoose_session::{
    frame::{HEADER_LEN, MAX_LEN},
    stream::{ConnectionId, FrameEvent, Link, Progress, Seen, StreamError, StreamState, Timeouts},
    window::{AcknowledgeError, Buffer, PushError, Sums},
};
use vm_memory::VolatileSlice;

use super::{
    Shared as Session,
    connection::{Connection, NewConnection, Sender},
    incoming::{Failure, Incoming, Target},
};
use crate::{
    chain, left, lock,
    memory::{Left, total_len},
    pages::copy_from_guest,
    stream::Delivery,
    timeouts::LOOK,
    try_lock,
};

/// User's handle of a stream. Dropping it ends the stream. If [`finish`](crate::Stream::finish) was called, everything written
/// before still arrives.
pub struct Resumable(Arc<ResumableStream>);

/// A stream, shared by its users and its session.
pub(crate) struct ResumableStream {
    pub(crate) number: u32,
    session: Arc<Session>,
    attaching: Mutex<()>,
    incoming: Mutex<Incoming>,
    /// `None` while there is no connection.
    outgoing: Mutex<Option<Sender>>,
    core: Mutex<Core>,
    changed: Condvar,
    /// The server has passed the stream on to its user, or is about to.
    is_introduced: AtomicBool,
    /// A working connection is being replaced.
    is_replacing: AtomicBool,
}

/// The state machine, and what the same lock protects.
struct Core {
    state: StreamState,
    /// The current connection.
    connection: Option<Arc<Connection>>,
    /// Number of threads waiting for the peer.
    waiting: usize,
    /// How often a reader has released the incoming half.
    turns: u64,
    /// On which connection an acknowledgement could not be sent, and why.
    broken: Option<(ConnectionId, io::Error)>,
}

/// Error of reads and writes on a stream that has ended.
fn to_io(error: &StreamError) -> io::Error {
    let kind = match error {
        StreamError::ShutDown => io::ErrorKind::NotConnected,
        StreamError::Aborted | StreamError::Refused { .. } => io::ErrorKind::ConnectionReset,
        StreamError::Corrupt { .. } | StreamError::Violation(_) | StreamError::Acknowledge(_) => {
            io::ErrorKind::InvalidData
        }
        StreamError::Stalled { .. } => io::ErrorKind::TimedOut,
        _ => io::ErrorKind::ConnectionAborted,
    };
    io::Error::new(kind, error.clone())
}

impl Resumable {
    pub(crate) fn new(stream: Arc<ResumableStream>) -> Self {
        Self(stream)
    }

    pub(crate) fn stream(&self) -> &Arc<ResumableStream> {
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
        self.0.update(StreamState::abandon);
    }
}

impl ResumableStream {
    /// A stream that waits for its first connection.
    pub(crate) fn new(number: u32, session: Arc<Session>, stall_timeout: Duration) -> Self {
        let timeouts = Timeouts {
            reconnect: session.reconnect_timeout(),
            stall: stall_timeout,
        };
        Self {
            number,
            session,
            attaching: Mutex::default(),
            incoming: Mutex::default(),
            outgoing: Mutex::default(),
            core: Mutex::new(Core {
                state: StreamState::new(0, timeouts, Instant::now()),
                connection: None,
                waiting: 0,
                turns: 0,
                broken: None,
            }),
            changed: Condvar::new(),
            is_introduced: AtomicBool::new(false),
            is_replacing: AtomicBool::new(false),
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

    /// As [`read`](Self::read), into guest memory.
    pub(crate) fn receive_memory(self: &Arc<Self>, left: &mut Left<'_>) -> io::Result<usize> {
        self.receive(&mut Target::Guest(left), Patience::Stall(None))
    }

    /// Checksum of the pages in the frame read last.
    pub(crate) fn pages(&self) -> Option<u32> {
        self.incoming(true).pages()
    }

    /// Waits until intact bytes can be read at once, or the stream has ended.
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
            if !self.wait_until_readable(patience)? {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let patience = match patience {
                Patience::Stall(_) => {
                    Patience::Stall(Instant::now().checked_add(self.stall_timeout()))
                }
                until => until,
            };
            let mut incoming = self.incoming(true);
            let connection = incoming.connection();
            let result = self.receive_from(&mut incoming, target, patience);
            drop(incoming);
            match (result, connection) {
                (Ok(read), _) => return Ok(read),
                (Err(Failure::Stalled), _) => return Err(io::ErrorKind::WouldBlock.into()),
                (Err(Failure::HeldUp(wait)), _) => {
                    if patience.has_ended() {
                        return Err(io::ErrorKind::WouldBlock.into());
                    }
                    let wait = wait.min(patience.left());
                    drop(self.changed.wait_timeout(lock(&self.core), wait));
                }
                (Err(Failure::Connection(error)), Some(connection)) => {
                    self.lost(connection.id, &error)
                }
                (Err(_), _) => {}
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
            let core = lock(&self.core);
            let (has_ended, announced) = (core.state.has_peer_ended(), core.state.announced());
            let acknowledges_if_idle = announced.is_none() && core.state.acknowledges_if_idle();
            drop(core);
            if has_ended {
                return Ok(0);
            }
            if acknowledges_if_idle && !incoming.has_bytes(Duration::ZERO) {
                lock(&self.core).state.on_idle();
                self.acknowledge();
            }
            let connection = incoming.connection().ok_or(Failure::Absent)?;
            let mut stalled = || {
                if connection.seen().is_silent() {
                    return Err(Failure::Connection(io::ErrorKind::TimedOut.into()));
                }
                // A Unix socket cannot be closed for reads without the peer's notice.
                if !lock(&self.core).state.is_carried_by(connection.id) {
                    return Err(Failure::Absent);
                }
                // In the middle of a frame the connection's timeouts decide.
                match patience.has_ended() && announced.is_none() {
                    true => Err(Failure::Stalled),
                    false => Ok(()),
                }
            };
            // Reads of the socket come back at long intervals only.
            if let Patience::Until(_) = patience
                && !incoming.has_bytes(match announced {
                    Some(_) => LOOK,
                    None => patience.left().min(LOOK),
                })
            {
                stalled()?;
                continue;
            }
            if let Some(header) = announced {
                incoming.keep_to(&self.session.arrivals, &header)?;
                let unverified = incoming.read_data(&header, target, &mut stalled)?;
                if self.on_data(&connection, unverified.sum) {
                    return Ok(incoming.accept(&header, &unverified, target));
                }
                incoming.discard();
                return Err(Failure::Absent);
            }
            let header = incoming.read_header(&mut stalled)?;
            match self.on_header(&connection, &header) {
                FrameEvent::Data(_) | FrameEvent::Acknowledgement => {}
                FrameEvent::End => return Ok(0),
                FrameEvent::Nothing => return Err(Failure::Absent),
            }
        }
    }

    fn on_header(
        self: &Arc<Self>,
        connection: &Connection,
        header: &[u8; HEADER_LEN],
    ) -> FrameEvent {
        let mut core = lock(&self.core);
        let before = core.state.acknowledged();
        let (id, name) = (connection.id, &connection.name);
        let came = core.state.on_header(id, header, name, Instant::now());
        let delivered = core.state.acknowledged().saturating_sub(before);
        if came != FrameEvent::Nothing && self.session.on_report(core.state.peer_report()) {
            core.state.hurry();
        }
        let is_due = core.state.wants_to_acknowledge();
        self.carry_out(core);
        if delivered > 0 {
            self.session.delivered(connection.path, delivered);
        }
        if is_due {
            self.acknowledge();
        }
        came
    }

    fn on_data(self: &Arc<Self>, connection: &Connection, sum: u32) -> bool {
        let mut core = lock(&self.core);
        let (id, name) = (connection.id, &connection.name);
        let is_right = core.state.on_data(id, sum, name, Instant::now());
        let is_due = core.state.wants_to_acknowledge();
        self.carry_out(core);
        if is_due {
            self.acknowledge();
        }
        is_right
    }

    /// Locks the incoming half, for a reader or for a thread that only collects acknowledgements.
    fn incoming(&self, is_reader: bool) -> IncomingGuard<'_> {
        self.guarded(lock(&self.incoming), is_reader)
    }

    fn try_incoming(&self) -> Option<IncomingGuard<'_>> {
        let incoming = try_lock(&self.incoming)?;
        Some(self.guarded(incoming, false))
    }

    fn guarded<'a>(
        &'a self,
        incoming: MutexGuard<'a, Incoming>,
        is_reader: bool,
    ) -> IncomingGuard<'a> {
        let turn = Turn {
            stream: self,
            is_reader,
        };
        IncomingGuard {
            incoming,
            _turn: turn,
        }
    }

    /// Reads pending acknowledgements unless a reader does; waits for one if there is none. False if only a reader can proceed.
    fn collect(self: &Arc<Self>, timeout: Duration) -> bool {
        let incoming = self.try_incoming();
        incoming.is_some_and(|mut incoming| self.collect_from(&mut incoming, timeout))
    }

    fn collect_from(self: &Arc<Self>, incoming: &mut Incoming, timeout: Duration) -> bool {
        let Some(connection) = incoming.connection() else {
            return false;
        };
        let mut wait = timeout;
        for _ in 0..COLLECTED_AT_ONCE {
            let core = lock(&self.core);
            let (announced, has_ended) = (core.state.announced(), core.state.has_peer_ended());
            let is_abandoned = core.state.is_abandoned();
            drop(core);
            let waits = announced.is_some() || !incoming.waiting().is_empty();
            if waits && !is_abandoned {
                return false;
            }
            if !incoming.has_bytes(wait) {
                return !(has_ended && waits);
            }
            wait = Duration::ZERO;
            // Without a reader, a partial frame is not kept: the peer sends it again.
            let mut stalled = || match is_abandoned {
                true => Err(Failure::Connection(io::ErrorKind::TimedOut.into())),
                false => Err(Failure::Stalled),
            };
            let result = match announced {
                // The user has dropped the stream: its data is dropped.
                Some(header) => {
                    let mut nowhere = [0; 4096];
                    let mut target = Target::Own(&mut nowhere);
                    let read = incoming.read_data(&header, &mut target, &mut stalled);
                    read.map(|unverified| {
                        let is_right = self.on_data(&connection, unverified.sum);
                        incoming.discard();
                        is_right
                    })
                }
                None => incoming
                    .read_header(&mut stalled)
                    .map(|header| self.on_header(&connection, &header) != FrameEvent::Nothing),
            };
            match result {
                Ok(true) => {}
                Ok(false) | Err(Failure::Stalled | Failure::Absent | Failure::HeldUp(_)) => {
                    return true;
                }
                Err(Failure::Connection(error)) => {
                    self.lost(connection.id, &error);
                    return true;
                }
            }
        }
        true
    }

    // Writing.

    /// Writes `head` and a copy of the guest's pages: frames sent again must not have changed.
    pub(crate) fn send_memory(
        self: &Arc<Self>,
        head: &[u8],
        pages: &[VolatileSlice<'_>],
    ) -> io::Result<()> {
        let mut copy: Buffer = vec![0; total_len(pages)].into();
        let end = copy_from_guest(pages, &mut copy).len();
        self.write_packet(head, &mut copy, end, None)
    }

    /// Writes `head` and then `tail`, as copies.
    pub(crate) fn write_both(self: &Arc<Self>, head: &[u8], tail: &[u8]) -> io::Result<()> {
        let check = self.session.config.check;
        let write = |bytes: &[u8]| {
            let sums = Sums::of(bytes, check);
            self.write(bytes.len(), |state| state.write_copy(bytes, sums))
        };
        let is_split = !head.is_empty() && !tail.is_empty();
        if is_split && head.len() + tail.len() <= SMALL {
            return write(&[head, tail].concat());
        }
        let pieces = [head, tail].into_iter();
        pieces
            .flat_map(|bytes| bytes.chunks(PIECE))
            .try_for_each(write)
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
        // Before waiting for room: the bytes are in a cache.
        let sums = Sums {
            check: check.then(|| crc32c::crc32c(&payload[..len])),
            pages: pages.filter(|_| check),
        };
        let head_sums = Sums::of(head, check);
        self.write(head.len() + len, |state| {
            state.write_copy(head, head_sums)?;
            // The window keeps whole buffers: a payload must fill at least half of its buffer.
            match len >= SWAP && len >= payload.len() / 2 {
                true => state.write_buffer(payload, len, sums),
                false => state.write_copy(&payload[..len], sums),
            }
        })
    }

    /// Writes the end of our direction. If it cannot be sent now, it is sent on the next connection.
    pub(crate) fn finish(self: &Arc<Self>) {
        let _ = self.write(0, StreamState::finish);
    }

    /// Waits for room for `len` bytes, pushes frames into the window, and sends them.
    fn write(
        self: &Arc<Self>,
        len: usize,
        push: impl FnOnce(&mut StreamState) -> Result<(), PushError>,
    ) -> io::Result<()> {
        let mut core = self.wait_for_room(len)?;
        push(&mut core.state).map_err(io::Error::other)?;
        drop(core);
        self.send();
        Ok(())
    }

    /// The state, once there is room for `len` bytes.
    fn wait_for_room(self: &Arc<Self>, len: usize) -> io::Result<MutexGuard<'_, Core>> {
        let bounds = self.session.bounds();
        // Buffers should come back while they are in a cache, and a peer's limit may have changed.
        let is_limited = self.session.reported_share.load(Ordering::Relaxed) != 0;
        if is_limited || lock(&self.core).state.unacknowledged() >= COLLECT {
            self.collect(Duration::ZERO);
        }
        let (mut progress, mut seen_turn) = (None, None);
        loop {
            let mut core = lock(&self.core);
            if let Link::Closed(error) = core.state.link() {
                return Err(to_io(error));
            }
            if core.state.has_room(len, bounds) {
                return Ok(core);
            }
            let now = Instant::now();
            let progress = progress.get_or_insert_with(|| core.state.progress(now));
            match core.state.end_if_stalled(progress, now) {
                true => self.carry_out(core),
                false => self.wait_for_peer(core, &mut seen_turn, LOOK),
            }
        }
    }

    /// Waits until the state may have changed: reads acknowledgements unless a reader does. `seen_turn` is the value of `turns` at
    /// which only a reader could take the next bytes; until `turns` changes, reading here is useless.
    fn wait_for_peer<'a>(
        self: &'a Arc<Self>,
        mut core: MutexGuard<'a, Core>,
        seen_turn: &mut Option<u64>,
        timeout: Duration,
    ) {
        let turn = core.turns;
        // A reader that lets go later than this finds `waiting` counted.
        if core.connection.is_some()
            && *seen_turn != Some(turn)
            && let Some(mut incoming) = self.try_incoming()
        {
            drop(core);
            let can_go_on = self.collect_from(&mut incoming, timeout);
            *seen_turn = (!can_go_on).then_some(turn);
            return;
        }
        core.waiting += 1;
        let waited = self.changed.wait_timeout(core, timeout);
        waited.unwrap_or_else(PoisonError::into_inner).0.waiting -= 1;
    }

    /// Sends all frames that are due. A failure only costs the connection.
    fn send(self: &Arc<Self>) {
        let mut outgoing = lock(&self.outgoing);
        self.send_on(&mut outgoing);
        drop(outgoing);
        self.acknowledge();
    }

    fn send_on(self: &Arc<Self>, outgoing: &mut Option<Sender>) {
        while let Some(sender) = outgoing {
            let id = sender.connection().id;
            let Some(transmit) = self.reporting().state.poll_transmit(id) else {
                return;
            };
            let (connection, mut progress) = (sender.connection().clone(), None);
            let result = sender.send(&transmit, &mut |_| self.blocked(&connection, &mut progress));
            (lock(&self.core).state).on_transmitted(transmit, result.is_ok());
            if let Err(error) = result {
                // Nothing may follow a partial frame.
                *outgoing = None;
                self.lost(id, &error);
            }
        }
    }

    /// Called when the kernel has not taken everything for a while. An error ends the send.
    fn blocked(
        self: &Arc<Self>,
        connection: &Connection,
        progress: &mut Option<Progress>,
    ) -> io::Result<()> {
        self.collect(Duration::ZERO);
        let now = Instant::now();
        let mut core = lock(&self.core);
        if !core.state.is_carried_by(connection.id) {
            return Err(io::ErrorKind::NotConnected.into());
        }
        let progress = progress.get_or_insert_with(|| core.state.progress(now));
        let is_stalled = core.state.end_if_stalled(progress, now);
        self.carry_out(core);
        match is_stalled || connection.seen().is_silent() {
            true => Err(io::ErrorKind::TimedOut.into()),
            false => Ok(()),
        }
    }

    /// Sends a due acknowledgement if that does not block. The holder of `outgoing` checks again after releasing it.
    fn acknowledge(self: &Arc<Self>) {
        while lock(&self.core).state.wants_to_acknowledge() {
            let Some(mut outgoing) = try_lock(&self.outgoing) else {
                return;
            };
            let Some(sender) = outgoing.as_mut().filter(|it| it.connection().is_writable()) else {
                return;
            };
            let id = sender.connection().id;
            let Some(transmit) = self.reporting().state.poll_acknowledgement(id) else {
                return;
            };
            let result = sender.send(&transmit, &mut |_| Err(io::ErrorKind::TimedOut.into()));
            (lock(&self.core).state).on_transmitted(transmit, result.is_ok());
            if let Err(error) = result {
                // Nothing may follow a partial frame. A reader finds the peer's reason, if there is one.
                sender.connection().shut_down();
                lock(&self.core).broken = Some((id, error));
                *outgoing = None;
                return;
            }
        }
    }

    /// The state, with what its next frames report.
    fn reporting(&self) -> MutexGuard<'_, Core> {
        let (urgency, share) = self.session.report();
        let mut core = lock(&self.core);
        core.state.report_pace(urgency, share);
        core
    }

    /// Sends a frame for what it reports.
    pub(crate) fn report_now(self: &Arc<Self>) {
        lock(&self.core).state.hurry();
        self.acknowledge();
    }

    // What becomes of the stream.

    /// Sets how long the stream may be without a connection.
    pub(crate) fn set_reconnect_timeout(self: &Arc<Self>, timeout: Duration) {
        self.update(|state| state.set_reconnect_timeout(timeout));
    }

    /// Applies an event to the state and carries out the effects.
    fn update<T>(self: &Arc<Self>, event: impl FnOnce(&mut StreamState) -> T) -> T {
        let mut core = lock(&self.core);
        let result = event(&mut core.state);
        self.carry_out(core);
        result
    }

    fn carry_out(self: &Arc<Self>, mut core: MutexGuard<'_, Core>) {
        let effects = core.state.take_effects();
        let gone = match effects.disconnect {
            true => core.connection.take(),
            false => None,
        };
        let link = match effects.disconnect || effects.ended {
            true => Some(core.state.link().clone()),
            false => None,
        };
        let is_undelivered = effects.ended && core.state.is_undelivered();
        drop(core);
        if effects.changed {
            self.changed.notify_all();
        }
        if effects.corrupt {
            self.session.corrupt_frames.fetch_add(1, Ordering::Relaxed);
        }
        let number = self.number;
        match (&link, &gone) {
            (Some(Link::Down { cause }), Some(connection)) => {
                let name = &connection.name;
                match effects.corrupt {
                    true => warn!("{name}: {cause}; asking for it again"),
                    false => info!("stream {number}: {name} was lost: {cause}"),
                }
            }
            (Some(Link::Closed(reason)), _) => debug!("stream {number}: {reason}"),
            _ => {}
        }
        if let Some(connection) = &gone {
            if effects.abort {
                self.abort(connection.id);
            }
            connection.shut_down();
            if effects.reconnect {
                self.session.lost(self, connection.path);
            }
        }
        if effects.ended {
            self.session.ended(self, is_undelivered);
        }
    }

    fn lost(self: &Arc<Self>, id: ConnectionId, error: &io::Error) {
        let cause = chain(error).to_string();
        self.update(|state| state.on_connection_lost(id, &cause, Instant::now()));
    }

    /// Ends the stream for good. The first reason stays.
    pub(crate) fn close(self: &Arc<Self>, reason: StreamError) {
        self.update(|state| state.close(reason));
    }

    /// Tells the peer that the stream was given up, if that does not block. Otherwise the peer learns it on its next dial.
    fn abort(&self, id: ConnectionId) {
        let Some(mut outgoing) = try_lock(&self.outgoing) else {
            return;
        };
        let Some(sender) = outgoing.as_mut().filter(|it| it.connection().id == id) else {
            return;
        };
        let header = lock(&self.core).state.abort();
        let mut stalled = |_| Err(io::ErrorKind::TimedOut.into());
        let told = sender.connection().is_writable()
            && sender.send_pieces(&[&header], &mut stalled).is_ok();
        if told {
            let _ = sender.finish();
        }
    }

    /// Waits until there is something to read from: a connection, or what came before the peer's end. False when `patience` has
    /// ended before.
    fn wait_until_readable(self: &Arc<Self>, patience: Patience) -> io::Result<bool> {
        let mut core = lock(&self.core);
        loop {
            match core.state.link() {
                Link::Up(_) => return Ok(true),
                Link::Closed(error @ StreamError::ShutDown) => return Err(to_io(error)),
                // Whatever became of the stream since, a peer that has ended it has sent everything.
                _ if core.state.has_peer_ended() => return Ok(true),
                Link::Closed(error) => return Err(to_io(error)),
                Link::Down { .. } => {}
            }
            let now = Instant::now();
            core.state.on_timeout(now, None);
            if core.state.is_closed() {
                self.carry_out(core);
                core = lock(&self.core);
                continue;
            }
            let left = core.state.next_timeout(now);
            let left = left.map_or(LOOK, |end| end.saturating_duration_since(now));
            let left = match patience {
                Patience::Stall(_) => left,
                Patience::Until(_) if patience.has_ended() => return Ok(false),
                Patience::Until(_) => left.min(patience.left()),
            };
            let waited = self.changed.wait_timeout(core, left);
            core = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits until the peer has everything written. False after `timeout`, or if the stream ends before.
    pub(crate) fn drain(self: &Arc<Self>, timeout: Duration) -> bool {
        let began = Instant::now();
        let mut seen_turn = None;
        loop {
            let core = lock(&self.core);
            let left = timeout.saturating_sub(began.elapsed());
            if core.state.is_done() || core.state.is_closed() || left.is_zero() {
                return core.state.is_done();
            }
            self.wait_for_peer(core, &mut seen_turn, left.min(LOOK));
        }
    }

    /// Periodic work: heartbeats, acknowledgements that no reader collects, silence, the end of dropped streams.
    pub(crate) fn look_after(self: &Arc<Self>) {
        let connection = lock(&self.core).connection.clone();
        let seen = connection.as_ref().map(|connection| Seen {
            has_unread: !self.collect(Duration::ZERO) && connection.is_readable(Duration::ZERO),
            ..connection.seen()
        });
        let broken = lock(&self.core).broken.take();
        if let Some((id, error)) = broken {
            self.lost(id, &error);
        }
        let trip = connection.and_then(|connection| connection.round_trip());
        self.update(|state| {
            let now = Instant::now();
            state.on_timeout(now, seen);
            if let Some(trip) = trip {
                state.on_round_trip(trip, now);
            }
        });
        self.acknowledge();
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// Whether packets go with a checksum of their pages.
    pub(crate) fn is_checked(&self) -> bool {
        self.session.config.check
    }

    /// Reports to the peer how long the reader waits, see [`StreamState::report_wait`].
    pub(crate) fn report_wait(&self, share: f64) {
        lock(&self.core).state.report_wait(share);
    }

    /// How long the peer's reader waits, see [`StreamState::peer_wait`].
    pub(crate) fn peer_wait(&self) -> Option<f64> {
        lock(&self.core).state.peer_wait()
    }

    /// The connection that carries the stream.
    fn connection(&self) -> Option<Arc<Connection>> {
        lock(&self.core).connection.clone()
    }

    /// Name of the current connection, for messages.
    pub(crate) fn connection_name(&self) -> String {
        self.connection()
            .map_or_else(|| self.session.peer.clone(), |it| it.name.clone())
    }

    /// Round-trip time of the current connection.
    pub(crate) fn round_trip(&self) -> Option<Duration> {
        self.connection()?.round_trip()
    }

    /// Path of the current connection, if there is one.
    pub(crate) fn path(&self) -> Option<usize> {
        Some(self.connection()?.path)
    }

    /// What the peer has received, with the acknowledgements that have come.
    pub(crate) fn delivery(self: &Arc<Self>) -> Option<Delivery> {
        self.collect(Duration::ZERO);
        let arrived = self.session.delivered_bytes()?;
        let unacknowledged = lock(&self.core).state.unacknowledged();
        let round_trip = self.round_trip().unwrap_or_default();
        Some(Delivery {
            arrived,
            unacknowledged,
            round_trip,
        })
    }

    /// Bytes that the peer has received.
    pub(crate) fn delivered(&self) -> u64 {
        lock(&self.core).state.acknowledged()
    }

    pub(crate) fn is_closed(&self) -> bool {
        lock(&self.core).state.is_closed()
    }

    /// Whether the stream was finished, and lost before the peer had everything.
    pub(crate) fn is_undelivered(&self) -> bool {
        lock(&self.core).state.is_undelivered()
    }

    /// Why the stream has no connection, and since when.
    pub(crate) fn trouble(&self) -> Option<(Arc<str>, Instant)> {
        lock(&self.core).state.trouble(Instant::now())
    }

    pub(crate) fn stall_timeout(&self) -> Duration {
        lock(&self.core).state.stall_timeout()
    }

    pub(crate) fn set_stall_timeout(&self, timeout: Duration) {
        lock(&self.core).state.set_stall_timeout(timeout);
    }

    /// Claims the introduction of a new stream: true for the first caller.
    pub(crate) fn claim_introduction(&self) -> bool {
        !self.is_introduced.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn is_introduced(&self) -> bool {
        self.is_introduced.load(Ordering::Acquire)
    }

    /// Whether the current connection must be replaced soon, because its keys are nearly used up.
    pub(crate) fn is_worn(&self) -> bool {
        self.connection().is_some_and(|it| it.is_worn())
    }

    /// Claims the replacement of a working connection. If true, the caller must replace it and then call
    /// [`replaced`](Self::replaced).
    pub(crate) fn claim_replacement(&self) -> bool {
        !self.is_replacing.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn replaced(&self) {
        self.is_replacing.store(false, Ordering::Release);
    }

    /// Begins to replace the current connection, if there is one. From here on nothing more is received on it, so that the offset
    /// told to the peer stays true. A lost connection is ended now; a working one when its successor is attached, as its end would
    /// look like a failure to the peer. `None` if the stream has ended.
    pub(crate) fn attach(self: &Arc<Self>, old: OldConnection) -> Option<Attaching<'_>> {
        // Before `attaching` is locked: a thread that still resends on the old connection would hold the lock until the
        // connection is found silent. The state changes before the connection ends, so that its end is no loss.
        let mut core = lock(&self.core);
        if !core.state.begin_attach(Instant::now()) {
            return None;
        }
        let replaced = self.detach(core);
        if let Some(connection) = &replaced {
            old.end(connection);
        }
        let turn = lock(&self.attaching);
        // Another attempt may have been faster.
        if let Some(connection) = self.detach(lock(&self.core)) {
            connection.shut_down();
        }
        let attaching = Attaching {
            stream: self,
            received: {
                let mut incoming = self.incoming(true);
                incoming.replace(None);
                lock(&self.core).state.received()
            },
            replaced,
            _turn: turn,
        };
        *lock(&self.outgoing) = None;
        (!self.is_closed()).then_some(attaching)
    }

    /// Detaches the current connection, if there is one.
    fn detach(&self, mut core: MutexGuard<'_, Core>) -> Option<Arc<Connection>> {
        core.state.detach(Instant::now());
        // The caller and the lines below carry out the effects.
        core.state.take_effects();
        let connection = core.connection.take();
        drop(core);
        self.changed.notify_all();
        connection
    }
}

/// Whether a connection that is being replaced still works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OldConnection {
    /// Lost, or so it seems to the peer.
    Lost,
    /// Works until its successor is attached.
    Working,
}

impl OldConnection {
    fn end(self, connection: &Connection) {
        match self {
            Self::Lost => connection.shut_down(),
            Self::Working => connection.stop_reading(),
        }
    }
}

/// The incoming half while it is in use.
struct IncomingGuard<'a> {
    // Dropped first: a thread that `_turn` wakes must be able to lock it.
    incoming: MutexGuard<'a, Incoming>,
    _turn: Turn<'a>,
}

impl Deref for IncomingGuard<'_> {
    type Target = Incoming;

    fn deref(&self) -> &Incoming {
        &self.incoming
    }
}

impl DerefMut for IncomingGuard<'_> {
    fn deref_mut(&mut self) -> &mut Incoming {
        &mut self.incoming
    }
}

/// Wakes threads that wait for the peer when the incoming half is released.
struct Turn<'a> {
    stream: &'a ResumableStream,
    is_reader: bool,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut core = lock(&self.stream.core);
        core.turns += u64::from(self.is_reader);
        if core.waiting > 0 {
            self.stream.changed.notify_all();
        }
    }
}

/// How long a reader waits for bytes; forever without an end.
#[derive(Clone, Copy)]
enum Patience {
    /// Until the peer has stalled. Counted from when there is a connection: a peer without one does not stall.
    Stall(Option<Instant>),
    /// Until the reader has something else to do.
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

/// Unacknowledged bytes from which a writer collects acknowledgements.
const COLLECT: usize = 256 << 10;

/// Limit for the frames that a thread reads which only collects acknowledgements: it has other work.
const COLLECTED_AT_ONCE: usize = 256;

/// Limit up to which head and tail are copied into one frame.
const SMALL: usize = 64 << 10;

/// Payloads of at least this length are not copied.
const SWAP: usize = 128 << 10;

/// Frame length into which longer writes are split.
const PIECE: usize = 512 << 10;

/// A stream between two connections.
pub(crate) struct Attaching<'a> {
    stream: &'a Arc<ResumableStream>,
    pub(crate) received: u64,
    /// Kept until the peer knows the new connection.
    replaced: Option<Arc<Connection>>,
    _turn: MutexGuard<'a, ()>,
}

impl Drop for Attaching<'_> {
    fn drop(&mut self) {
        if let Some(replaced) = &self.replaced {
            replaced.shut_down();
        }
        lock(&self.stream.core).state.end_attach();
    }
}

impl Attaching<'_> {
    /// Whether the stream can continue with a peer that has received this much.
    pub(crate) fn accepts(self, peer_has: u64) -> Result<Self, AcknowledgeError> {
        self.stream
            .update(|state| state.on_resume_offset(peer_has))?;
        Ok(self)
    }

    /// Continues over a new connection, on the client's path `path`, and sends again what the peer does not have.
    pub(crate) fn go_on(mut self, new: NewConnection, path: usize, name: String) -> io::Result<()> {
        new.end_handshake()?;
        let stream = self.stream;
        let mut incoming = stream.incoming(true);
        let mut outgoing = lock(&stream.outgoing);
        let mut core = lock(&stream.core);
        let Some(id) = core.state.on_connection() else {
            return Ok(());
        };
        let (receiver, sender) = new.split(id, path, name);
        core.connection = Some(sender.connection().clone());
        incoming.replace(Some(receiver));
        *outgoing = Some(sender);
        stream.carry_out(core);
        // Readers go on meanwhile: two ends that both resend must not wait for each other.
        drop(incoming);
        if let Some(replaced) = self.replaced.take() {
            replaced.shut_down();
        }
        stream.send_on(&mut outgoing);
        drop(outgoing);
        stream.acknowledge();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        thread,
    };

    use super::*;
    use crate::{Address, Keys, Listener, Security, Session, SessionConfig, Sessions, Stream};

    const LIMIT: Duration = Duration::from_secs(60);

    fn pair(
        address: &str,
        near: SessionConfig,
        far: SessionConfig,
    ) -> (Sessions, Session, Stream, Stream) {
        let listener = Listener::bind(&address.parse().unwrap(), LIMIT).unwrap();
        let to: Address = listener.address().clone();
        let sessions = Sessions::new(vec![listener], far).unwrap();
        let (session, near) = Session::dial(vec![to.into()], near).unwrap();
        (&near).write_all(b"here").unwrap();
        let far = sessions.next(LIMIT).unwrap().stream;
        (&far).read_exact(&mut [0; 4]).unwrap();
        (sessions, session, near, far)
    }

    fn resumable(stream: &Stream) -> &Arc<ResumableStream> {
        match stream {
            Stream::Resumable(stream) => stream.stream(),
            Stream::Socket(_) => panic!("a socket"),
        }
    }

    fn wait_until(mut is_so: impl FnMut() -> bool) {
        let end = Instant::now() + LIMIT;
        while !is_so() {
            assert!(Instant::now() < end, "timed out");
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// A key protects so many records and no more: where a loss ends a stream, too, the connection is replaced before.
    #[test]
    fn connection_is_replaced_before_its_key_is_used_up() {
        const RECORDS: u64 = 400;
        let directory = tempfile::tempdir().unwrap();
        let key = Keys::generate(directory.path()).unwrap();
        let config = SessionConfig {
            reconnect_timeout: Duration::ZERO,
            ..SessionConfig::new(Security::Keys(Keys {
                directory: directory.path().to_owned(),
                trusted: Some(vec![key]),
            }))
        };
        let unix = format!("unix:{}", directory.path().join("socket").display());
        for address in ["tcp:127.0.0.1:0", &unix] {
            let (_sessions, _session, near, far) = pair(address, config.clone(), config.clone());
            thread::scope(|scope| {
                // It waits on the old connection while that is replaced.
                let reader = scope.spawn(|| (&near).read_exact(&mut [0; 1]));
                let stream = resumable(&near);
                let first = stream.connection().unwrap();
                let mut outgoing = lock(&stream.outgoing);
                outgoing.as_mut().unwrap().limit_records(RECORDS);
                drop(outgoing);
                let write = |records: u64| {
                    for _ in 0..records {
                        (&near).write_all(b"x").unwrap();
                        (&far).read_exact(&mut [0; 1]).unwrap();
                    }
                };
                write(RECORDS / 4 * 3 + 1);
                wait_until(|| {
                    let now = stream.connection();
                    now.is_some_and(|now| !Arc::ptr_eq(&now, &first))
                });
                write(RECORDS);
                (&far).write_all(b"y").unwrap();
                reader.join().unwrap().unwrap();
            });
        }
    }

    /// The peer's window is much smaller than this end's: it waits for no heartbeat.
    #[test]
    fn writer_with_a_small_window_makes_progress() {
        const LEN: usize = 8 << 20;
        let far = SessionConfig::new(Security::Insecure);
        let near = SessionConfig {
            window: 256 << 10,
            ..far.clone()
        };
        let (_sessions, session, near, far) = pair("tcp:127.0.0.1:0", near, far);
        let began = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| {
                for piece in vec![7; LEN].chunks(5000) {
                    (&near).write_all(piece).unwrap();
                }
                near.finish();
            });
            // A reader has the acknowledgements for the writer.
            let reader = scope.spawn(|| (&near).read_exact(&mut [0; 1]));
            let mut read = Vec::new();
            (&far).read_to_end(&mut read).unwrap();
            assert_eq!(read.len(), LEN);
            (&far).write_all(b"y").unwrap();
            reader.join().unwrap().unwrap();
        });
        assert!(near.drain(LIMIT) && session.drain(LIMIT));
        // By heartbeats alone it would take minutes.
        assert!(began.elapsed() < LIMIT);
    }

    #[test]
    fn session_remembers_a_stream_that_was_lost() {
        let config = SessionConfig {
            reconnect_timeout: Duration::ZERO,
            ..SessionConfig::new(Security::Insecure)
        };
        let (_sessions, session, near, _far) = pair("tcp:127.0.0.1:0", config.clone(), config);
        // Nobody reads it there.
        (&near).write_all(b"more").unwrap();
        near.finish();
        let stream = resumable(&near);
        stream.connection().unwrap().shut_down();
        wait_until(|| stream.is_closed());
        assert!(!session.drain(LIMIT));
    }

    /// The reader is busy elsewhere while the peer ends the stream and is gone: the reader learns of the end, not of the loss.
    #[test]
    fn slow_reader_gets_the_peers_end() {
        let config = SessionConfig::new(Security::Insecure);
        let (_sessions, _session, near, far) = pair("tcp:127.0.0.1:0", config.clone(), config);
        (&far).write_all(b"bytes").unwrap();
        (&near).read_exact(&mut [0; 5]).unwrap();
        far.finish();
        drop(far);
        wait_until(|| resumable(&near).is_closed());
        assert_eq!((&near).read(&mut [0; 5]).unwrap(), 0);
    }

    /// Its user has read a part of a frame, finished and dropped the stream; the peer still sends.
    #[test]
    fn dropped_stream_takes_frames_behind_a_partly_read_one() {
        let config = SessionConfig::new(Security::Insecure);
        let (_sessions, _session, near, far) = pair("tcp:127.0.0.1:0", config.clone(), config);
        // While the peer has a partly read frame, it does not see the end.
        (&near).write_all(b"not read at once").unwrap();
        (&far).read_exact(&mut [0; 4]).unwrap();
        near.finish();
        let (first, second) = (b"partly read", b"more");
        (&far).write_all(first).unwrap();
        (&near).read_exact(&mut [0; 6]).unwrap();
        let stream = resumable(&near).clone();
        drop(near);
        (&far).write_all(second).unwrap();
        let sent = first.len() + second.len();
        wait_until(|| usize::try_from(lock(&stream.core).state.received()) == Ok(sent));
        let mut rest = Vec::new();
        (&far).read_to_end(&mut rest).unwrap();
        assert_eq!(rest, b"read at once");
        wait_until(|| stream.is_closed());
    }

    /// The thread that drains it has other streams to watch.
    #[test]
    fn abandoned_stream_is_drained_in_parts() {
        let config = SessionConfig::new(Security::Insecure);
        let (_sessions, _session, near, far) = pair("tcp:127.0.0.1:0", config.clone(), config);
        let stream = resumable(&near).clone();
        // The peer does not read it, and so does not see the end of the stream, which stays.
        (&near).write_all(b"unread").unwrap();
        near.finish();
        let mut incoming = stream.incoming(false);
        drop(near);
        for _ in 0..COLLECTED_AT_ONCE {
            (&far).write_all(b"x").unwrap();
        }
        let all = COLLECTED_AT_ONCE as u64;
        let received = || lock(&stream.core).state.received();
        assert!(stream.collect_from(&mut incoming, LIMIT));
        assert!((1..all).contains(&received()), "{}", received());
        drop(incoming);
        wait_until(|| received() == all);
    }

    /// An acknowledgement could not be sent, and the reader does not read on: the connection is replaced all the same.
    #[test]
    fn connection_that_cannot_be_written_is_lost_without_a_reader() {
        let config = SessionConfig::new(Security::Insecure);
        let (_sessions, session, near, far) = pair("tcp:127.0.0.1:0", config.clone(), config);
        // A frame that nobody here takes.
        (&far).write_all(b"bytes").unwrap();
        let stream = resumable(&near);
        wait_until(|| {
            let mut incoming = stream.incoming(true);
            let connection = incoming.connection().unwrap();
            let header = incoming.read_header(&mut || Ok(())).unwrap();
            !matches!(
                stream.on_header(&connection, &header),
                FrameEvent::Acknowledgement
            )
        });
        let mut outgoing = lock(&stream.outgoing);
        outgoing.as_mut().unwrap().finish().unwrap();
        drop(outgoing);
        let before = session.reconnects();
        wait_until(|| session.reconnects() > before);
        (&near).read_exact(&mut [0; 5]).unwrap();
    }
}
