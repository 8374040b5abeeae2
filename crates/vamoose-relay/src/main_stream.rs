//! The main stream: a relay forwards its bytes without interpreting them, except for its marks (`syncs`).

use std::{
    io,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use tracing::{Span, info};
use vamoose_link::{ByteReader, ByteWriter, MethodChoice, Pacer, Stats, Stream, is_stall, lock};

use crate::{Direction, Outcome, RelayError, return_path::ReturnPath};

/// The state of a main stream, from which the migration's outcome is derived.
#[derive(Default)]
pub(crate) struct MainState {
    return_path: AtomicBool,
    shut_under_way: AtomicBool,
    last_byte: AtomicU8,
    last_sent: Mutex<Option<Instant>>,
}

impl MainState {
    /// Whether closing the main stream now aborts the migration: the destination has not reported the result of loading, or the
    /// stream is incomplete.
    ///
    /// The report counts from its arrival here: the source may close the stream when it has received the report, before the
    /// thread that delivered the report has noted that.
    pub(crate) fn is_broken_off(&self) -> bool {
        !self.shut_under_way.load(Ordering::Acquire)
            && (self.return_path.load(Ordering::Acquire) || !self.is_at_end())
    }

    /// Records a piece of the forward direction. Its last byte shows whether the stream is complete.
    pub(crate) fn received(&self, piece: &[u8]) {
        if let Some(last) = piece.last() {
            self.last_byte.store(*last, Ordering::Release);
        }
    }

    /// Records that all received bytes have been sent.
    pub(crate) fn sent(&self) {
        *lock(&self.last_sent) = Some(Instant::now());
    }

    /// When the last bytes were sent to the destination.
    pub(crate) fn last_sent(&self) -> Option<Instant> {
        *lock(&self.last_sent)
    }

    /// The outcome of a migration whose main stream was closed by both ends without a report that the guest has been loaded.
    pub(crate) fn verdict(&self) -> Result<Outcome, RelayError> {
        if self.is_broken_off() {
            return Err(RelayError::MainClosed(Direction::Forward));
        }
        Ok(Outcome::Unconfirmed)
    }

    /// The description of the device state, in JSON, is the last thing on a main stream.
    fn is_at_end(&self) -> bool {
        self.last_byte.load(Ordering::Acquire) == b'}'
    }
}

/// Writes bytes to the receiver of a [`Pump`].
pub(crate) type Write<'a> = &'a mut dyn FnMut(&[u8]) -> Result<(), RelayError>;

/// Observes the bytes that go through a [`Pump`].
pub(crate) trait Witness {
    /// Forwards the whole piece, in one or several parts.
    fn pass(&mut self, piece: &[u8], write: Write<'_>) -> Result<(), RelayError> {
        write(piece)
    }

    /// Whether to forward the stream's end.
    fn ends(&self) -> bool {
        true
    }
}

/// Follows the return path of a main stream; calls `on_shut` with the destination's loading code when the source has
/// received it.
pub(crate) struct ReturnWitness<'a, F> {
    path: ReturnPath,
    state: &'a MainState,
    ends: [&'a Stream; 2],
    stats: &'a Stats,
    on_shut: F,
}

/// How long the streams of a guest under post-copy may be without a connection. A migration that is given up leaves the guest without
/// its memory.
pub(crate) const KEEP_TRYING: Duration = Duration::from_secs(3600);

impl<'a, F: FnMut(u32)> ReturnWitness<'a, F> {
    pub(crate) fn new(
        state: &'a MainState,
        ends: [&'a Stream; 2],
        stats: &'a Stats,
        on_shut: F,
    ) -> Self {
        Self {
            path: ReturnPath::default(),
            state,
            ends,
            stats,
            on_shut,
        }
    }

    /// After the switch there is nothing to fall back to.
    fn keep_trying(&self) {
        info!("the guest runs at the destination, and fetches its memory (post-copy)");
        self.stats.note_post_copy();
        for session in self.ends.iter().filter_map(|end| end.session()) {
            session.keep_trying(KEEP_TRYING);
        }
    }
}

impl<F: FnMut(u32)> Witness for ReturnWitness<'_, F> {
    fn pass(&mut self, piece: &[u8], write: Write<'_>) -> Result<(), RelayError> {
        let code = self.path.feed(piece);
        if self.path.asks_for_pages() && !self.stats.is_under_post_copy() {
            self.keep_trying();
        }
        let (state, spoke) = (self.state, self.path.spoke());
        if spoke {
            self.stats.note_answer();
        }
        state.return_path.store(spoke, Ordering::Release);
        state
            .shut_under_way
            .fetch_or(code.is_some(), Ordering::AcqRel);
        write(piece)?;
        if let Some(code) = code {
            (self.on_shut)(code);
        }
        Ok(())
    }
}

/// One direction of a main stream, or of another connection.
pub(crate) struct Pump<'a> {
    pub(crate) direction: Direction,
    from: ByteReader,
    to: ByteWriter,
    pacer: Option<&'a Pacer>,
}

impl<'a> Pump<'a> {
    /// Of a main stream, whose bytes are forwarded as they are.
    pub(crate) fn new(
        direction: Direction,
        from: &Arc<Stream>,
        to: &Arc<Stream>,
        stats: &Arc<Stats>,
        pacer: Option<&'a Pacer>,
    ) -> Self {
        let stats = counted(direction, stats);
        Self {
            direction,
            from: ByteReader::plain(from.clone(), stats.clone()),
            to: ByteWriter::plain(to.clone(), stats),
            pacer,
        }
    }

    /// Forwards bytes until the sender ends, then forwards the end, unless the witness objects.
    pub(crate) fn run(mut self, witness: &mut impl Witness) -> Result<(), RelayError> {
        let direction = self.direction;
        loop {
            let piece = match self.from.read() {
                Ok(Some(piece)) => piece,
                Ok(None) => break,
                // A main stream may be idle for any time.
                Err(error) if is_transient(&error) => continue,
                Err(error) => return Err(RelayError::MainRead(direction, error)),
            };
            if let Some(pacer) = self.pacer {
                // Does not wait behind pages: the end of the main stream must be noticed at once.
                pacer.charge(piece.len());
            }
            let to = &mut self.to;
            witness.pass(piece, &mut |part| write(to, part, direction))?;
        }
        if witness.ends() {
            self.to.finish();
        }
        Ok(())
    }
}

/// Only what goes to the destination is counted.
fn counted(direction: Direction, stats: &Arc<Stats>) -> Option<Arc<Stats>> {
    (direction == Direction::Forward).then(|| stats.clone())
}

fn write(to: &mut ByteWriter, part: &[u8], direction: Direction) -> Result<(), RelayError> {
    let written = to.write(part);
    written.map_err(|error| match is_stall(&error) {
        true => RelayError::MainStalled(direction, to.stall_timeout()),
        false => RelayError::MainWrite(direction, error),
    })
}

/// One end of a connection that is forwarded, and the form in which the end's bytes travel.
#[derive(Clone)]
pub(crate) struct ByteEnd {
    pub(crate) stream: Arc<Stream>,
    /// In blocks: the other end of the stream is a relay that does the same.
    pub(crate) in_blocks: bool,
    /// What was read from the stream before.
    pub(crate) before: Vec<u8>,
}

impl ByteEnd {
    /// Bytes travel as they are.
    pub(crate) fn plain(stream: Arc<Stream>) -> Self {
        Self {
            stream,
            in_blocks: false,
            before: Vec::new(),
        }
    }

    fn reader(&self, stats: Option<Arc<Stats>>) -> ByteReader {
        let stream = self.stream.clone();
        match self.in_blocks {
            true => ByteReader::blocks(stream, self.before.clone(), stats),
            false => ByteReader::plain(stream, stats),
        }
    }

    fn writer(&self, method: &MethodChoice, stats: Option<Arc<Stats>>) -> ByteWriter {
        let stream = self.stream.clone();
        match self.in_blocks {
            true => ByteWriter::blocks(stream, method, stats),
            false => ByteWriter::plain(stream, stats),
        }
    }
}

/// Connects two connections in both directions, after sending `first` to `far`. When one direction breaks, so does the other.
pub(crate) fn forward(
    near: &ByteEnd,
    far: &ByteEnd,
    first: &[u8],
    (method, stats, pacer): (&MethodChoice, &Arc<Stats>, Option<&Arc<Pacer>>),
    mut there: impl Witness,
    mut back: impl Witness + Send,
) -> Result<(), RelayError> {
    let pump = |direction, from: &ByteEnd, to: &ByteEnd| {
        let stats = counted(direction, stats);
        let pacer = pacer.filter(|_| direction == Direction::Forward);
        Pump {
            direction,
            from: from.reader(stats.clone()),
            to: to.writer(method, stats).paced(pacer.cloned()),
            pacer: None,
        }
    };
    let failed = OnceLock::new();
    let end = |passed: Result<(), RelayError>| {
        if let Err(error) = passed {
            // Both directions fail then; the first error is the cause.
            let _ = failed.set(error);
            // A session's stream first: who reads a socket would forward its end as if the bytes were complete.
            let mut streams = [&near.stream, &far.stream];
            streams.sort_by_key(|stream| stream.socket().is_some());
            streams.iter().for_each(|stream| stream.shut_down());
        }
    };
    let mut pump_there = pump(Direction::Forward, near, far);
    let pump_back = pump(Direction::Back, far, near);
    let span = Span::current();
    thread::scope(|scope| {
        let back = scope.spawn(|| span.in_scope(|| end(pump_back.run(&mut back))));
        let begun = match first {
            [] => Ok(()),
            first => write(&mut pump_there.to, first, Direction::Forward),
        };
        end(begun.and_then(|()| pump_there.run(&mut there)));
        // A thread that panicked has no error to add.
        let _ = back.join();
    });
    failed.into_inner().map_or(Ok(()), Err)
}

/// Ignores the bytes.
pub(crate) struct NoWitness;

impl Witness for NoWitness {}

/// Whether to retry: a connection may be idle for any time.
fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}
