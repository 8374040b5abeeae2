//! One end of a stream, without I/O, clock or threads: what has arrived, what is acknowledged, and what becomes of the
//! stream when its connection breaks. Its user reports events and carries out what it asks for.
//!
//! ```text
//!            events                                                      effects
//!  on_header, on_data        ┌──────────────────────────────┐
//!  ────────────────────────> │ received ── told             │ poll_transmit: frames lent, or an acknowledgement
//!  write_packet, finish      │ window: acknowledged .. next │ ──────────────────────────────────────────────────>
//!  ────────────────────────> │ link: Up ─> Down ─> Closed   │ take_effects: disconnect, reconnect, ended, changed
//!  on_connection, _lost,     │        ^──────┘              │ ──────────────────────────────────────────────────>
//!  on_timeout                └──────────────────────────────┘ next_timeout
//! ```
//!
//! Payloads never pass through it. A user that has received a header reads the bytes to where they are wanted, sums them
//! up meanwhile, and gives them to a reader only if [`StreamState::on_data`] says so. Frames that are to be sent are lent out of the
//! window ([`Transmit`]), so that no lock is held while they go to the system.
//!
//! Connections are numbered. An event of a connection that is not the current one changes nothing: what came on it comes
//! again.
//!
//! # Timeouts
//! | constant or setting | of | counted from | what it ends |
//! |---|---|---|---|
//! | [`HEARTBEAT`] | a connection | the last byte sent | the pause: an acknowledgement is sent |
//! | [`SILENCE`] | a connection | the last byte that came, unless some wait unread | the connection |
//! | [`Timeouts::reconnect`] | a stream that was up | the first loss since a frame came | the stream |
//! | [`OPENING`] | a stream that was never up, or is being attached; if longer than `reconnect` | the same | the stream |
//! | [`Timeouts::stall`] | a writer | the last byte that the peer acknowledged | the stream |

use std::{
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

use thiserror::Error;

use crate::{
    frame::{FrameError, HEADER_LEN, Header, Kind},
    handshake::Refusal,
    window::{AcknowledgeError, Buffer, Frame, Loan, PushError, Sums, Window},
};

/// An end that has sent nothing for this long sends an acknowledgement.
pub const HEARTBEAT: Duration = Duration::from_secs(1);

/// A connection on which nothing came for this long is given up.
pub const SILENCE: Duration = Duration::from_secs(4);

/// How long the first connection of a stream, or one that is being attached, may take at least.
pub const OPENING: Duration = Duration::from_secs(10);

/// Received bytes after which the peer is told.
pub const TELL_EVERY: u64 = 256 << 10;

/// Received bytes after which the peer is told if nothing more has come: its window may be full.
pub const TELL_IDLE: u64 = 4 << 10;

/// Timeouts that users choose.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// How long a stream may be without progress before it is lost.
    pub reconnect: Duration,
    /// How long the peer may leave bytes unacknowledged while a writer waits.
    pub stall: Duration,
}

/// Number of a connection of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionId(u64);

/// One end of a stream.
#[derive(Debug)]
pub struct StreamState {
    timeouts: Timeouts,
    window: Window,
    incoming: Incoming,
    link: Link,
    last_connection: ConnectionId,
    /// Since when there was no progress; `None` while all is well.
    troubled: Option<Instant>,
    /// Where a frame was corrupt last: what had been received, and acknowledged by the peer.
    corrupt_at: Option<(u64, u64)>,
    was_up: bool,
    /// Attempts to attach a connection that are under way.
    attaching: usize,
    /// No user is left: what was finished still goes out.
    is_abandoned: bool,
    allowance: Allowance,
    effects: Effects,
}

/// The direction from the peer.
#[derive(Debug)]
struct Incoming {
    /// All bytes before this offset have come, and were right.
    received: u64,
    /// What of it the peer has been told.
    told: u64,
    wants_tell: bool,
    /// A frame of data whose header has come, and whose bytes have not.
    announced: Option<Header>,
    has_ended: bool,
}

/// What carries the stream.
#[derive(Clone, Debug)]
pub enum Link {
    /// This connection.
    Up(ConnectionId),
    /// None, as the last one ended for this reason.
    Down {
        /// Why.
        cause: Arc<str>,
    },
    /// The stream has ended.
    Closed(StreamError),
}

/// What a user has to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Effects {
    /// Shut the connection down that was the current one.
    pub disconnect: bool,
    /// Find another connection, if this end is the one that dials.
    pub reconnect: bool,
    /// The stream has ended: forget it.
    pub ended: bool,
    /// This end has given the stream up: send [`StreamState::abort`] before the connection is shut down.
    pub abort: bool,
    /// Wake threads that wait for a connection, room or the end.
    pub changed: bool,
    /// A frame without its checksum has come.
    pub corrupt: bool,
}

/// What a header brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Came {
    /// Bytes follow: read them, and then call [`StreamState::on_data`].
    Data(Header),
    /// How much the peer has received.
    Acknowledgement,
    /// The stream's end.
    End,
    /// Nothing of use: the connection is not the current one, or not any more.
    Nothing,
}

/// Frames to be sent on a connection; [`StreamState::on_transmitted`] takes them back.
#[derive(Debug)]
pub struct Transmit {
    connection: ConnectionId,
    loan: Loan,
    received: u64,
    offset: u64,
}

/// When a writer's peer has acknowledged something last.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    acknowledged: u64,
    since: Instant,
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
    NoThread { error: std::io::ErrorKind },
    #[error("the connection was lost ({cause}) and not back after {seconds} s")]
    Lost { cause: Arc<str>, seconds: u64 },
    #[error("the connection was lost ({cause}), and the peer refuses to go on: {refusal}")]
    Refused { cause: Arc<str>, refusal: Refusal },
    #[error(
        "twice in a row on {path}: {corruption}; this path, or the memory of a host, changes what it carries"
    )]
    Corrupt {
        path: Arc<str>,
        corruption: Corruption,
    },
    #[error("the peer breaks the protocol: {0}")]
    Violation(Violation),
    #[error("the peer breaks the protocol: {0}")]
    Acknowledge(AcknowledgeError),
    #[error("timed out after {seconds} s: the peer has stopped reading")]
    Stalled { seconds: u64 },
}

/// A frame that was changed on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum Corruption {
    #[error("{0}")]
    Header(FrameError),
    #[error(
        "{len} bytes at offset {offset} were changed on their way: their checksum is {found:#010x}, not {expected:#010x}"
    )]
    Bytes {
        offset: u64,
        len: usize,
        found: u32,
        expected: u32,
    },
}

/// What a correct peer does not send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum Violation {
    #[error("{0}")]
    Frame(FrameError),
    #[error("a frame at offset {found} where {expected} comes next")]
    Gap { found: u64, expected: u64 },
    #[error("data behind the end of the stream")]
    BehindEnd,
}

impl StreamState {
    /// A stream without a connection, which begins at offset `first` in both directions.
    pub fn new(first: u64, timeouts: Timeouts, now: Instant) -> Self {
        Self {
            timeouts,
            window: Window::new(first),
            incoming: Incoming {
                received: first,
                told: first,
                wants_tell: false,
                announced: None,
                has_ended: false,
            },
            link: Link::Down {
                cause: "it was never there".into(),
            },
            last_connection: ConnectionId(0),
            troubled: Some(now),
            corrupt_at: None,
            was_up: false,
            attaching: 0,
            is_abandoned: false,
            allowance: Allowance::default(),
            effects: Effects::default(),
        }
    }

    /// What the user has to do since the last call.
    pub fn take_effects(&mut self) -> Effects {
        mem::take(&mut self.effects)
    }

    /// What carries the stream.
    pub fn link(&self) -> &Link {
        &self.link
    }

    /// Whether this connection carries the stream.
    pub fn is_carried_by(&self, connection: ConnectionId) -> bool {
        matches!(self.link, Link::Up(current) if current == connection)
    }

    /// Whether the stream has ended.
    pub fn is_closed(&self) -> bool {
        matches!(self.link, Link::Closed(_))
    }

    /// Why the stream has no connection, and since when it has made no progress.
    pub fn trouble(&self, now: Instant) -> Option<(Arc<str>, Instant)> {
        match &self.link {
            Link::Down { cause } => Some((cause.clone(), self.troubled.unwrap_or(now))),
            Link::Up(_) | Link::Closed(_) => None,
        }
    }

    /// How long a writer waits for its peer.
    pub fn set_stall_timeout(&mut self, timeout: Duration) {
        self.timeouts.stall = timeout;
    }

    /// How long a writer waits for its peer.
    pub fn stall_timeout(&self) -> Duration {
        self.timeouts.stall
    }

    // Connections.

    /// Another connection is to take the place of the current one, if there is one; [`end_attach`](Self::end_attach) must follow.
    /// Before the peer is told [`received`](Self::received), the user must have ended all reads of the old one. False if the
    /// stream has ended: then nothing must follow.
    pub fn begin_attach(&mut self, now: Instant) -> bool {
        if self.is_closed() {
            return false;
        }
        self.detach(now);
        self.attaching += 1;
        true
    }

    /// The current connection, if there is one, is being replaced, which is no loss: nothing more is received on it.
    pub fn detach(&mut self, now: Instant) {
        if let Link::Up(_) = self.link {
            self.go_down("another connection takes its place".into(), now);
        }
    }

    /// An attempt to attach a connection is over.
    pub fn end_attach(&mut self) {
        self.attaching = self.attaching.saturating_sub(1);
    }

    /// The peer resumes and has received this much.
    ///
    /// # Errors
    /// When it cannot have.
    pub fn accepts(&mut self, peer_has: u64) -> Result<(), AcknowledgeError> {
        self.acknowledge(peer_has)
    }

    /// A connection carries the stream from now on: all that is not acknowledged is sent on it. `None` if the stream has ended.
    pub fn on_connection(&mut self) -> Option<ConnectionId> {
        if self.is_closed() {
            return None;
        }
        self.last_connection.0 += 1;
        self.link = Link::Up(self.last_connection);
        self.was_up = true;
        self.incoming.announced = None;
        // The handshake has said it.
        self.incoming.told = self.incoming.received;
        // Where nothing is sent again, too, the peer sees that the connection works.
        self.incoming.wants_tell = true;
        self.window.rewind();
        self.effects.changed = true;
        Some(self.last_connection)
    }

    /// A connection is of no use any more.
    pub fn on_connection_lost(&mut self, connection: ConnectionId, cause: &str, now: Instant) {
        if !self.is_carried_by(connection) {
            return;
        }
        if self.timeouts.reconnect.is_zero() {
            let cause = cause.into();
            return self.close(StreamError::Lost { cause, seconds: 0 });
        }
        self.go_down(cause.into(), now);
        self.effects.reconnect = true;
    }

    fn go_down(&mut self, cause: Arc<str>, now: Instant) {
        self.troubled.get_or_insert(now);
        self.link = Link::Down { cause };
        self.effects.disconnect = true;
        self.effects.changed = true;
    }

    /// Ends the stream for good. The first reason stays.
    pub fn close(&mut self, reason: StreamError) {
        let was_up = match self.link {
            Link::Closed(_) => return,
            Link::Up(_) => true,
            Link::Down { .. } => false,
        };
        self.effects.abort = was_up && matches!(reason, StreamError::ShutDown);
        self.effects.disconnect |= was_up;
        self.effects.reconnect = false;
        self.effects.ended = true;
        self.effects.changed = true;
        self.link = Link::Closed(reason);
    }

    /// No user is left: the stream stays until the peer has what was finished, else it is given up.
    pub fn abandon(&mut self) {
        self.is_abandoned = true;
        if !self.window.has_ended() || self.is_done() {
            self.close(StreamError::ShutDown);
        }
    }

    /// Whether no user is left: data that still comes is dropped.
    pub fn is_abandoned(&self) -> bool {
        self.is_abandoned
    }

    /// When the stream is lost, if it gets no connection.
    pub fn next_timeout(&self, now: Instant) -> Option<Instant> {
        match self.link {
            Link::Down { .. } => self.troubled.unwrap_or(now).checked_add(self.limit()),
            Link::Up(_) | Link::Closed(_) => None,
        }
    }

    /// How long the stream may be without progress.
    fn limit(&self) -> Duration {
        match self.was_up && self.attaching == 0 {
            true => self.timeouts.reconnect,
            false => self.timeouts.reconnect.max(OPENING),
        }
    }

    /// Time has passed. `seen` is what the current connection has seen, if there is one.
    pub fn on_timeout(&mut self, now: Instant, seen: Option<Seen>) {
        if let Link::Down { cause } = &self.link {
            let since = *self.troubled.get_or_insert(now);
            let limit = self.limit();
            if now.saturating_duration_since(since) >= limit {
                let (cause, seconds) = (cause.clone(), limit.as_secs());
                self.close(StreamError::Lost { cause, seconds });
            }
            return;
        }
        let Some(seen) = seen.filter(|seen| self.is_carried_by(seen.connection)) else {
            return;
        };
        if seen.is_silent() {
            let cause = format!("nothing came for {} s", SILENCE.as_secs());
            return self.on_connection_lost(seen.connection, &cause, now);
        }
        self.incoming.wants_tell |= seen.idle_for >= HEARTBEAT;
        if self.is_abandoned && self.is_done() {
            self.close(StreamError::ShutDown);
        }
    }

    // Receiving.

    /// All bytes before this offset have come, and were right.
    pub fn received(&self) -> u64 {
        self.incoming.received
    }

    /// Whether the peer has ended its direction.
    pub fn has_peer_ended(&self) -> bool {
        self.incoming.has_ended
    }

    /// The header of data whose bytes have not been read: nothing behind it can be seen before.
    pub fn announced(&self) -> Option<Header> {
        self.incoming.announced
    }

    /// Whether [`on_idle`](Self::on_idle) would tell the peer something: only then it is worth a look.
    pub fn tells_if_idle(&self) -> bool {
        self.untold() >= TELL_IDLE
    }

    /// Nothing more has come for now.
    pub fn on_idle(&mut self) {
        self.incoming.wants_tell |= self.tells_if_idle();
    }

    fn untold(&self) -> u64 {
        self.incoming.received.saturating_sub(self.incoming.told)
    }

    /// A header has come. `path` names what carries the connection, for messages.
    pub fn on_header(
        &mut self,
        connection: ConnectionId,
        bytes: &[u8; HEADER_LEN],
        path: &str,
        now: Instant,
    ) -> Came {
        if !self.is_carried_by(connection) {
            return Came::Nothing;
        }
        let header = match Header::decode(bytes) {
            Ok(header) => header,
            Err(error @ FrameError::Header { .. }) => {
                return self.corrupt(connection, Corruption::Header(error), path, now);
            }
            Err(error) => return self.violated(Violation::Frame(error)),
        };
        match header.kind {
            Kind::Data | Kind::End if self.incoming.has_ended => {
                return self.violated(Violation::BehindEnd);
            }
            Kind::Data | Kind::End if header.offset != self.incoming.received => {
                return self.violated(Violation::Gap {
                    found: header.offset,
                    expected: self.incoming.received,
                });
            }
            Kind::Abort => {
                self.close(StreamError::Aborted);
                return Came::Nothing;
            }
            Kind::Data | Kind::End | Kind::Acknowledge => {}
        }
        self.troubled = None;
        if let Err(error) = self.acknowledge(header.received) {
            self.close(StreamError::Acknowledge(error));
            return Came::Nothing;
        }
        match header.kind {
            Kind::Data => {
                self.incoming.announced = Some(header);
                Came::Data(header)
            }
            Kind::End => {
                self.incoming.has_ended = true;
                self.incoming.received = header.end();
                self.incoming.wants_tell = true;
                Came::End
            }
            Kind::Acknowledge | Kind::Abort => Came::Acknowledgement,
        }
    }

    /// The bytes behind the last header have come; `sum` is their CRC-32C, if they are checked. Whether they are right: if not,
    /// nobody may see them.
    pub fn on_data(
        &mut self,
        connection: ConnectionId,
        sum: u32,
        path: &str,
        now: Instant,
    ) -> bool {
        if !self.is_carried_by(connection) {
            return false;
        }
        let Some(header) = self.incoming.announced.take() else {
            return false;
        };
        if let Some(expected) = header.check
            && sum != expected
        {
            let corruption = Corruption::Bytes {
                offset: header.offset,
                len: header.len,
                found: sum,
                expected,
            };
            self.corrupt(connection, corruption, path, now);
            return false;
        }
        self.incoming.received = header.end();
        self.incoming.wants_tell |= self.untold() >= TELL_EVERY;
        true
    }

    fn violated(&mut self, violation: Violation) -> Came {
        self.close(StreamError::Violation(violation));
        Came::Nothing
    }

    fn corrupt(
        &mut self,
        connection: ConnectionId,
        corruption: Corruption,
        path: &str,
        now: Instant,
    ) -> Came {
        self.effects.corrupt = true;
        // A peer that only acknowledges stays at its offset: then these tell whether it is the same frame again.
        let acknowledged = match corruption {
            Corruption::Header(_) => self.window.acknowledged(),
            Corruption::Bytes { .. } => 0,
        };
        let at = (self.incoming.received, acknowledged);
        if self.corrupt_at.replace(at) == Some(at) {
            let path = path.into();
            self.close(StreamError::Corrupt { path, corruption });
        } else {
            self.on_connection_lost(connection, &corruption.to_string(), now);
        }
        Came::Nothing
    }

    // Sending.

    /// The peer has all before this offset.
    pub fn acknowledged(&self) -> u64 {
        self.window.acknowledged()
    }

    /// Bytes that the peer has not acknowledged.
    pub fn unacknowledged(&self) -> usize {
        self.window.unacknowledged()
    }

    /// Whether the peer has all that was written.
    pub fn is_done(&self) -> bool {
        self.window.is_empty()
    }

    /// Whether the end was written and the stream is lost before the peer has acknowledged all. A stream that one of the ends has
    /// given up, or that has ended at the peer, is not lost.
    pub fn is_undelivered(&self) -> bool {
        let is_lost = match &self.link {
            Link::Closed(StreamError::Refused { refusal, .. }) => *refusal != Refusal::Ended,
            Link::Closed(StreamError::ShutDown | StreamError::Aborted) => false,
            Link::Closed(_) => true,
            Link::Up(_) | Link::Down { .. } => false,
        };
        is_lost && self.window.has_ended() && !self.is_done()
    }

    fn acknowledge(&mut self, received: u64) -> Result<(), AcknowledgeError> {
        if self.window.acknowledge(received)? {
            self.effects.changed = true;
        }
        Ok(())
    }

    /// Whether `len` bytes more may be written now, of which `bounds` are not acknowledged at most.
    pub fn has_room(&self, len: usize, bounds: Bounds) -> bool {
        let unacknowledged = self.unacknowledged();
        unacknowledged == 0 || unacknowledged + len <= self.allowance.limit(bounds)
    }

    /// The connection's round trip, asked for now and then: the window follows what is delivered in one.
    pub fn on_round_trip(&mut self, round_trip: Duration, now: Instant) {
        self.allowance
            .follow(self.window.acknowledged(), round_trip, now);
    }

    /// A writer begins to wait.
    pub fn progress(&self, now: Instant) -> Progress {
        Progress {
            acknowledged: self.acknowledged(),
            since: now,
        }
    }

    /// Whether the peer has acknowledged nothing for the stall timeout, since when a writer waits. Then the stream has ended.
    /// A peer without a connection does not stall.
    pub fn is_stalled(&mut self, progress: &mut Progress, now: Instant) -> bool {
        let is_up = matches!(self.link, Link::Up(_));
        if progress.acknowledged != self.acknowledged() || !is_up {
            *progress = self.progress(now);
        }
        let is_stalled = now.saturating_duration_since(progress.since) > self.timeouts.stall;
        if is_stalled {
            let seconds = self.timeouts.stall.as_secs();
            self.close(StreamError::Stalled { seconds });
        }
        is_stalled
    }

    /// Writes a frame with a copy of `bytes`, of which there are 1 to [`MAX_LEN`](crate::frame::MAX_LEN).
    ///
    /// # Errors
    /// As [`Window::push_copy`].
    pub fn write_copy(&mut self, bytes: &[u8], sums: Sums) -> Result<(), PushError> {
        self.window.push_copy(bytes, sums)
    }

    /// Writes a frame with the first `len` bytes of `buffer`, which is exchanged for another one.
    ///
    /// # Errors
    /// As [`Window::push_buffer`].
    pub fn write_buffer(
        &mut self,
        buffer: &mut Buffer,
        len: usize,
        sums: Sums,
    ) -> Result<(), PushError> {
        self.window.push_buffer(buffer, len, sums)
    }

    /// Writes the end of this direction.
    ///
    /// # Errors
    /// When it was written before.
    pub fn finish(&mut self) -> Result<(), PushError> {
        self.window.push_end()
    }

    /// The next frames to be sent on `connection`, or an acknowledgement that is due. Only when the frames before were given back.
    pub fn poll_transmit(&mut self, connection: ConnectionId) -> Option<Transmit> {
        if !self.is_carried_by(connection) {
            return None;
        }
        match self.window.lend() {
            Some(loan) => Some(self.transmit(connection, loan)),
            None => self.poll_acknowledgement(connection),
        }
    }

    /// An acknowledgement that is due. It may go between any two frames.
    pub fn poll_acknowledgement(&mut self, connection: ConnectionId) -> Option<Transmit> {
        let is_due = self.incoming.wants_tell && self.is_carried_by(connection);
        is_due.then(|| self.transmit(connection, Loan::default()))
    }

    /// Whether [`poll_acknowledgement`](Self::poll_acknowledgement) has something to send.
    pub fn wants_to_acknowledge(&self) -> bool {
        self.incoming.wants_tell && matches!(self.link, Link::Up(_))
    }

    fn transmit(&mut self, connection: ConnectionId, loan: Loan) -> Transmit {
        self.incoming.wants_tell = false;
        Transmit {
            connection,
            loan,
            received: self.incoming.received,
            offset: self.window.unsent(),
        }
    }

    /// Frames have been sent whole, or not: then their connection must be reported as lost, too.
    pub fn on_transmitted(&mut self, transmit: Transmit, is_sent: bool) {
        self.window.give_back(transmit.loan);
        if is_sent {
            self.incoming.told = self.incoming.told.max(transmit.received);
        }
    }

    /// The frame which tells the peer that the stream was given up.
    pub fn abort(&self) -> [u8; HEADER_LEN] {
        Header::empty(Kind::Abort, self.window.unsent(), 0).encode()
    }
}

impl Transmit {
    /// The connection that they are for.
    pub fn connection(&self) -> ConnectionId {
        self.connection
    }

    /// The frames: headers, and the bytes behind them. One at least, two at most.
    pub fn frames(&self) -> impl Iterator<Item = ([u8; HEADER_LEN], &[u8])> {
        let frames = self.loan.frames();
        let with_bytes = frames.map(|frame: &Frame| {
            let mut header = frame.header;
            header.received = self.received;
            (header.encode(), frame.bytes())
        });
        let is_alone = self.loan.frames().next().is_none();
        let alone = is_alone.then(|| {
            let header = Header::empty(Kind::Acknowledge, self.offset, self.received);
            (header.encode(), [].as_slice())
        });
        with_bytes.chain(alone)
    }
}

/// What a connection has seen.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// Which.
    pub connection: ConnectionId,
    /// How long nothing has come.
    pub silent_for: Duration,
    /// How long nothing was sent.
    pub idle_for: Duration,
    /// Whether bytes have come that nobody has read yet: they are a sign of life.
    pub has_unread: bool,
}

impl Seen {
    /// Whether the connection is to be given up.
    pub fn is_silent(&self) -> bool {
        self.silent_for > SILENCE && !self.has_unread
    }
}

/// The most bytes that a stream may have unacknowledged.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// On any link.
    pub usual: usize,
    /// On a link that is fast and long. Those of all streams together are the session's.
    pub most: usize,
}

/// How much a stream may have unacknowledged: twice what is delivered in a round trip, within [`Bounds`].
#[derive(Debug, Default)]
struct Allowance {
    wanted: usize,
    last: Option<(u64, Instant)>,
}

/// A rate is measured over this time at least.
const INTERVAL: Duration = Duration::from_millis(400);

impl Allowance {
    fn limit(&self, bounds: Bounds) -> usize {
        self.wanted
            .max(bounds.usual)
            .min(bounds.most.max(bounds.usual))
    }

    fn follow(&mut self, acknowledged: u64, round_trip: Duration, now: Instant) {
        let (before, since) = *self.last.get_or_insert((acknowledged, now));
        let passed = now.saturating_duration_since(since);
        if passed < INTERVAL {
            return;
        }
        self.last = Some((acknowledged, now));
        let delivered = u128::from(acknowledged.saturating_sub(before));
        let in_a_trip = delivered * round_trip.as_nanos() / passed.as_nanos().max(1);
        let wanted = usize::try_from(in_a_trip)
            .unwrap_or(usize::MAX)
            .saturating_mul(2);
        // A link that is slow for a moment need not have become slow.
        self.wanted = wanted.max(self.wanted - self.wanted / 4);
    }
}
