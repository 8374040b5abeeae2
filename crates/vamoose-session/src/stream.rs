//! One end of a stream as a state machine, without I/O, clock or threads. It tracks what has arrived and what is acknowledged, and
//! decides what happens when the connection breaks. The caller reports events and carries out effects.
//!
//! ```text
//!            events                                                      effects
//!  on_header, on_data        ┌──────────────────────────────┐
//!  ────────────────────────> │ received ── acknowledged     │ poll_transmit: frames lent, or an acknowledgement
//!  write_copy, _buffer,      │ window: acknowledged .. next │ ──────────────────────────────────────────────────>
//!  finish ─────────────────> │ link: Up ─> Down ─> Closed   │ take_effects: what to close, dial, send, wake
//!  on_connection, _lost,     │        ^──────┘              │ ──────────────────────────────────────────────────>
//!  on_timeout                └──────────────────────────────┘ next_timeout
//! ```
//!
//! Received payloads never pass through the state. After a header the caller reads the payload into its destination, computes the
//! checksum on the way, and delivers the payload only if [`StreamState::on_data`] returns true. Frames to be sent are lent out of
//! the window ([`Transmit`]), so that no lock is held during a system call.
//!
//! Connections are numbered. Events of any connection but the current one are ignored: the peer sends those bytes again.
//!
//! # Timeouts
//! | constant or setting | of | counted from | on expiry |
//! |---|---|---|---|
//! | [`HEARTBEAT`] | a connection | the last byte sent | an acknowledgement is sent |
//! | [`SILENCE`] | a connection | the last byte that came, unless some wait unread | the connection is given up |
//! | [`Timeouts::reconnect`] | a stream that had a connection | the first loss after the last received frame | the stream ends |
//! | the longer of [`OPENING`] and `reconnect` | a stream that never had a connection, or for which one is being attached | the first loss after the last received frame, or the creation | the stream ends |
//! | [`Timeouts::stall`] | a writer | the beginning of its wait, or the peer's last acknowledgement; time without a connection does not count | the stream ends |

use std::{
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

use thiserror::Error;

use crate::{
    frame::{FrameError, HEADER_LEN, Header, Kind, Report, Urgency},
    handshake::Refusal,
    window::{AcknowledgeError, Buffer, Frame, Loan, PushError, Sums, Window},
};

/// Idle time after which an end sends an acknowledgement.
pub const HEARTBEAT: Duration = Duration::from_secs(1);

/// Time without received bytes after which a connection is given up.
pub const SILENCE: Duration = Duration::from_secs(4);

/// Minimum time allowed for a stream's first connection, and for one that is being attached.
pub const OPENING: Duration = Duration::from_secs(10);

/// Received bytes after which they are acknowledged.
pub const ACKNOWLEDGE_EVERY: u64 = 256 << 10;

/// Received bytes after which they are acknowledged if nothing more has come: the peer's window may be full.
pub const ACKNOWLEDGE_IDLE: u64 = 4 << 10;

/// Timeouts chosen by the caller.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// Time after which the stream is given up, from the first loss of a connection after the last received frame.
    pub reconnect: Duration,
    /// Time without an acknowledgement after which a waiting writer fails.
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
    /// The first loss of a connection after the last received frame, or the creation if no frame has come yet.
    troubled: Option<Instant>,
    /// What identifies the last corrupt frame: the offset received here and, for a corrupt header, the offset that the peer has
    /// acknowledged.
    corrupt_at: Option<(u64, u64)>,
    /// Reported to the peer, and by the peer.
    report: Report,
    peer_report: Report,
    was_up: bool,
    /// Number of running attempts to attach a connection.
    attaching: usize,
    /// The caller has dropped the stream: a finished stream is still delivered.
    is_abandoned: bool,
    allowance: Allowance,
    effects: Effects,
}

/// The direction from the peer.
#[derive(Debug, Default)]
struct Incoming {
    /// Offset up to which everything has arrived intact.
    received: u64,
    /// Offset up to which the peer has been sent an acknowledgement.
    acknowledged: u64,
    acknowledgement_due: bool,
    /// Data frame whose header has arrived and whose payload has not.
    announced: Option<Header>,
    has_ended: bool,
}

/// Connection of a stream.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the comments of the variants say it")]
pub enum Link {
    /// This connection.
    Up(ConnectionId),
    /// No connection: the last one ended for this reason.
    Down { cause: Arc<str> },
    /// The stream has ended.
    Closed(StreamError),
}

/// Work for the caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Effects {
    /// Shut down the connection that was current.
    pub disconnect: bool,
    /// Find another connection, if this end is the client.
    pub reconnect: bool,
    /// The stream is closed: forget it.
    pub ended: bool,
    /// This end has given up the stream: send [`StreamState::abort`] before the connection is shut down.
    pub abort: bool,
    /// Wake threads that wait for a connection, room or the end.
    pub changed: bool,
    /// A frame with a wrong checksum has arrived.
    pub corrupt: bool,
}

/// Meaning of a received header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameEvent {
    /// A payload follows: read it, and then call [`StreamState::on_data`].
    Data(Header),
    /// The peer acknowledges what it has received.
    Acknowledgement,
    /// The peer has ended its direction.
    End,
    /// Nothing to do: the connection is not, or no longer, the current one, or the header has just ended it or the stream.
    Nothing,
}

/// Frames to be sent on a connection; [`StreamState::on_transmitted`] takes them back.
#[derive(Debug)]
pub struct Transmit {
    loan: Loan,
    received: u64,
    report: Report,
    offset: u64,
}

/// Progress of the peer while a writer waits.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    acknowledged: u64,
    since: Instant,
}

/// Why a stream has ended.
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
    #[error("there has been no connection for {seconds} s ({cause})")]
    Lost { cause: Arc<str>, seconds: u64 },
    #[error("the connection was lost ({cause}), and the peer refuses to go on: {refusal}")]
    Refused { cause: Arc<str>, refusal: Refusal },
    #[error(
        "data was corrupted twice in a row on {path}: {corruption}; this network path, or the memory of a host, is faulty"
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

/// A frame changed in transit.
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

/// Violation of the protocol by the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum Violation {
    #[error("{0}")]
    Frame(FrameError),
    #[error("a frame at offset {found} where {expected} comes next")]
    Gap { found: u64, expected: u64 },
    #[error("data after the end of the stream")]
    BehindEnd,
}

impl StreamState {
    /// A stream without a connection. Both directions begin at offset `first`.
    pub fn new(first: u64, timeouts: Timeouts, now: Instant) -> Self {
        Self {
            timeouts,
            window: Window::new(first),
            incoming: Incoming {
                received: first,
                acknowledged: first,
                ..Incoming::default()
            },
            link: Link::Down {
                cause: "there was none before".into(),
            },
            last_connection: ConnectionId(0),
            troubled: Some(now),
            corrupt_at: None,
            report: Report::default(),
            peer_report: Report::default(),
            was_up: false,
            attaching: 0,
            is_abandoned: false,
            allowance: Allowance::default(),
            effects: Effects::default(),
        }
    }

    /// Takes the work that has accumulated since the last call.
    pub fn take_effects(&mut self) -> Effects {
        mem::take(&mut self.effects)
    }

    /// Connection of the stream.
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

    /// Sets the time that a writer waits for its peer.
    pub fn set_stall_timeout(&mut self, timeout: Duration) {
        self.timeouts.stall = timeout;
    }

    /// Sets how long the stream may be without a connection.
    pub fn set_reconnect_timeout(&mut self, timeout: Duration) {
        self.timeouts.reconnect = timeout;
    }

    /// Time that a writer waits for its peer.
    pub fn stall_timeout(&self) -> Duration {
        self.timeouts.stall
    }

    // Connections.

    /// Begins to replace the current connection, if there is one. Returns false if the stream has ended; otherwise
    /// [`end_attach`](Self::end_attach) must follow. The caller must end all reads of the old connection before it tells the peer
    /// [`received`](Self::received).
    pub fn begin_attach(&mut self, now: Instant) -> bool {
        if self.is_closed() {
            return false;
        }
        self.detach(now);
        self.attaching += 1;
        true
    }

    /// Detaches the current connection, if there is one, without asking for another. Nothing more is received on it, and the time without
    /// a connection counts from here.
    pub fn detach(&mut self, now: Instant) {
        if let Link::Up(_) = self.link {
            self.go_down("another connection takes its place".into(), now);
        }
    }

    /// Ends an attempt to attach a connection.
    pub fn end_attach(&mut self) {
        self.attaching = self.attaching.saturating_sub(1);
    }

    /// Applies the offset from which a resuming peer wants to continue.
    ///
    /// # Errors
    /// When the peer cannot have received that much.
    pub fn on_resume_offset(&mut self, peer_has: u64) -> Result<(), AcknowledgeError> {
        self.acknowledge(peer_has)
    }

    /// Attaches a connection, on which everything unacknowledged is sent again. `None` if the stream has ended.
    pub fn on_connection(&mut self) -> Option<ConnectionId> {
        if self.is_closed() {
            return None;
        }
        self.last_connection.0 += 1;
        self.link = Link::Up(self.last_connection);
        self.was_up = true;
        self.incoming.announced = None;
        // The handshake has told the peer this offset.
        self.incoming.acknowledged = self.incoming.received;
        // So that the peer sees that the connection works even if there is nothing to send again.
        self.incoming.acknowledgement_due = true;
        self.window.rewind();
        self.effects.changed = true;
        Some(self.last_connection)
    }

    /// Reports the loss of a connection.
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

    /// Reports that the caller has dropped the stream. A finished stream stays until the peer has all of it; others are given up.
    pub fn abandon(&mut self) {
        self.is_abandoned = true;
        if !self.window.has_ended() || self.is_done() {
            self.close(StreamError::ShutDown);
        }
    }

    /// Whether the caller has dropped the stream: data that still arrives is dropped.
    pub fn is_abandoned(&self) -> bool {
        self.is_abandoned
    }

    /// Time at which the stream is lost unless it gets a connection.
    pub fn next_timeout(&self, now: Instant) -> Option<Instant> {
        match self.link {
            Link::Down { .. } => self.troubled.unwrap_or(now).checked_add(self.limit()),
            Link::Up(_) | Link::Closed(_) => None,
        }
    }

    /// Time that the stream may be without progress.
    fn limit(&self) -> Duration {
        match self.was_up && self.attaching == 0 {
            true => self.timeouts.reconnect,
            false => self.timeouts.reconnect.max(OPENING),
        }
    }

    /// Reports that time has passed. `seen` is the state of the current connection, if there is one.
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
        self.incoming.acknowledgement_due |= seen.idle_for >= HEARTBEAT;
        if self.is_abandoned && self.is_done() {
            self.close(StreamError::ShutDown);
        }
    }

    // Receiving.

    /// Offset up to which everything has arrived intact.
    pub fn received(&self) -> u64 {
        self.incoming.received
    }

    /// Whether the peer has ended its direction.
    pub fn has_peer_ended(&self) -> bool {
        self.incoming.has_ended
    }

    /// Header of a data frame whose payload has not been read. Later frames cannot be read before the payload.
    pub fn announced(&self) -> Option<Header> {
        self.incoming.announced
    }

    /// Whether [`on_idle`](Self::on_idle) would cause an acknowledgement.
    pub fn acknowledges_if_idle(&self) -> bool {
        self.unacknowledged_received() >= ACKNOWLEDGE_IDLE
    }

    /// Reports that no more bytes have arrived for now.
    pub fn on_idle(&mut self) {
        self.incoming.acknowledgement_due |= self.acknowledges_if_idle();
    }

    fn unacknowledged_received(&self) -> u64 {
        self.incoming
            .received
            .saturating_sub(self.incoming.acknowledged)
    }

    /// Reports a received header. `path` names the connection in messages.
    pub fn on_header(
        &mut self,
        connection: ConnectionId,
        bytes: &[u8; HEADER_LEN],
        path: &str,
        now: Instant,
    ) -> FrameEvent {
        if !self.is_carried_by(connection) {
            return FrameEvent::Nothing;
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
                return FrameEvent::Nothing;
            }
            Kind::Data | Kind::End | Kind::Acknowledge => {}
        }
        self.troubled = None;
        self.peer_report = header.report;
        if let Err(error) = self.acknowledge(header.received) {
            self.close(StreamError::Acknowledge(error));
            return FrameEvent::Nothing;
        }
        match header.kind {
            Kind::Data => {
                self.incoming.announced = Some(header);
                FrameEvent::Data(header)
            }
            Kind::End => {
                self.incoming.has_ended = true;
                self.incoming.received = header.end();
                self.incoming.acknowledgement_due = true;
                FrameEvent::End
            }
            Kind::Acknowledge | Kind::Abort => FrameEvent::Acknowledgement,
        }
    }

    /// Reports the payload of the last header; `sum` is its CRC-32C, if payloads are checked. Returns whether the payload is
    /// intact: otherwise the caller must not deliver it.
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
        self.incoming.acknowledgement_due |= self.unacknowledged_received() >= ACKNOWLEDGE_EVERY;
        true
    }

    fn violated(&mut self, violation: Violation) -> FrameEvent {
        self.close(StreamError::Violation(violation));
        FrameEvent::Nothing
    }

    fn corrupt(
        &mut self,
        connection: ConnectionId,
        corruption: Corruption,
        path: &str,
        now: Instant,
    ) -> FrameEvent {
        self.effects.corrupt = true;
        // Two corrupt headers at the same received offset may be different frames if the peer only acknowledges: the acknowledged
        // offset distinguishes these. The offset of a data frame identifies it on its own.
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
        FrameEvent::Nothing
    }

    // Sending.

    /// Offset up to which the peer has acknowledged.
    pub fn acknowledged(&self) -> u64 {
        self.window.acknowledged()
    }

    /// Reports to the peer that the reader at this end waits for the network for this share of its time.
    pub fn report_wait(&mut self, share: f64) {
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "1 to 255"
        )]
        let waited = (1.0 + 254.0 * share.clamp(0.0, 1.0)) as u8;
        self.report.waited = waited;
    }

    /// The share of its time that the peer's reader waits for the network, if the peer reports it.
    pub fn peer_wait(&self) -> Option<f64> {
        let share = self.peer_report.waited.checked_sub(1)?;
        Some(f64::from(share) / 254.0)
    }

    /// Reports to the peer the urgency of what is sent, and what is to be received at most: see [`Report`].
    pub fn report_pace(&mut self, urgency: Urgency, share: u32) {
        (self.report.urgency, self.report.share) = (urgency, share);
    }

    /// What the peer has reported last.
    pub fn peer_report(&self) -> Report {
        self.peer_report
    }

    /// Sends an acknowledgement as soon as possible: it has news.
    pub fn hurry(&mut self) {
        self.incoming.acknowledgement_due = true;
    }

    /// Number of unacknowledged bytes.
    pub fn unacknowledged(&self) -> usize {
        self.window.unacknowledged()
    }

    /// Whether the peer has acknowledged everything written.
    pub fn is_done(&self) -> bool {
        self.window.is_empty()
    }

    /// Whether a finished stream was lost before the peer acknowledged all of it. A stream given up by either end, or ended at the
    /// peer, is not lost.
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

    /// Whether `len` more bytes may be written now. `bounds` limit the unacknowledged bytes; below [`ACKNOWLEDGE_IDLE`] of these, any
    /// `len` may be written.
    pub fn has_room(&self, len: usize, bounds: Bounds) -> bool {
        let unacknowledged = self.unacknowledged();
        // An idle peer acknowledges fewer bytes than this only with its next heartbeat. The writer must not wait for that.
        (unacknowledged as u64) < ACKNOWLEDGE_IDLE
            || unacknowledged + len <= self.allowance.limit(bounds)
    }

    /// Reports the connection's round-trip time. The allowance follows the bytes delivered per round trip.
    pub fn on_round_trip(&mut self, round_trip: Duration, now: Instant) {
        self.allowance
            .follow(self.window.acknowledged(), round_trip, now);
    }

    /// The progress of the peer when a writer begins to wait, for [`end_if_stalled`](Self::end_if_stalled).
    pub fn progress(&self, now: Instant) -> Progress {
        Progress {
            acknowledged: self.acknowledged(),
            since: now,
        }
    }

    /// Ends the stream if the peer has acknowledged nothing for the stall timeout while a writer waited, and returns whether it did.
    /// Time without a connection does not count.
    pub fn end_if_stalled(&mut self, progress: &mut Progress, now: Instant) -> bool {
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

    /// The next frames to be sent on `connection`, or an acknowledgement that is due. Earlier frames must have been given back.
    pub fn poll_transmit(&mut self, connection: ConnectionId) -> Option<Transmit> {
        if !self.is_carried_by(connection) {
            return None;
        }
        match self.window.lend() {
            Some(loan) => Some(self.transmit(loan)),
            None => self.poll_acknowledgement(connection),
        }
    }

    /// An acknowledgement that is due. It may go between any two frames.
    pub fn poll_acknowledgement(&mut self, connection: ConnectionId) -> Option<Transmit> {
        let is_due = self.incoming.acknowledgement_due && self.is_carried_by(connection);
        is_due.then(|| self.transmit(Loan::default()))
    }

    /// Whether [`poll_acknowledgement`](Self::poll_acknowledgement) has something to send.
    pub fn wants_to_acknowledge(&self) -> bool {
        self.incoming.acknowledgement_due && matches!(self.link, Link::Up(_))
    }

    fn transmit(&mut self, loan: Loan) -> Transmit {
        self.incoming.acknowledgement_due = false;
        Transmit {
            loan,
            received: self.incoming.received,
            report: self.report,
            offset: self.window.unsent(),
        }
    }

    /// Takes frames back. If they were not sent completely, the caller must also report their connection as lost.
    pub fn on_transmitted(&mut self, transmit: Transmit, is_sent: bool) {
        self.window.give_back(transmit.loan);
        if is_sent {
            self.incoming.acknowledged = self.incoming.acknowledged.max(transmit.received);
        }
    }

    /// The frame that tells the peer that this end has dropped the stream.
    pub fn abort(&self) -> [u8; HEADER_LEN] {
        Header::empty(Kind::Abort, self.window.unsent(), 0).encode()
    }
}

impl Transmit {
    /// The frames: headers, and the bytes behind them. One at least, two at most.
    pub fn frames(&self) -> impl Iterator<Item = ([u8; HEADER_LEN], &[u8])> {
        let frames = self.loan.frames();
        let with_bytes = frames.map(|frame: &Frame| {
            let mut header = frame.header;
            (header.received, header.report) = (self.received, self.report);
            (header.encode(), frame.bytes())
        });
        let is_alone = self.loan.frames().next().is_none();
        let alone = is_alone.then(|| {
            let header = Header {
                report: self.report,
                ..Header::empty(Kind::Acknowledge, self.offset, self.received)
            };
            (header.encode(), [].as_slice())
        });
        with_bytes.chain(alone)
    }
}

/// Observed state of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// The connection.
    pub connection: ConnectionId,
    /// Time since the last received byte.
    pub silent_for: Duration,
    /// Time since the last sent byte.
    pub idle_for: Duration,
    /// Whether received bytes wait to be read: a sign of life.
    pub has_unread: bool,
}

impl Seen {
    /// Whether the connection must be given up.
    pub fn is_silent(&self) -> bool {
        self.silent_for > SILENCE && !self.has_unread
    }
}

/// Limits of a stream's unacknowledged bytes.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// On any network path.
    pub usual: usize,
    /// On a network path with a high rate and a long round trip. All streams together stay within the session's limit.
    pub most: usize,
}

/// Unacknowledged bytes that are allowed: twice the bytes delivered in a round trip, within [`Bounds`].
#[derive(Debug, Default)]
struct Allowance {
    wanted: usize,
    last: Option<(u64, Instant)>,
}

/// Minimum time over which a rate is measured.
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
        // A link may be slow for a moment only.
        self.wanted = wanted.max(self.wanted - self.wanted / 4);
    }
}
