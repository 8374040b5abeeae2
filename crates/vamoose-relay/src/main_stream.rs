//! The main stream: a relay forwards its bytes without interpreting them, except for its marks (`syncs`).

use std::{
    io::{self, Read as _, Write as _},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    thread,
    time::Instant,
};

use tracing::Span;
use vamoose_link::{Pacer, Stats, Stream, is_stall, lock};

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
pub(crate) type Write<'a> = &'a dyn Fn(&[u8]) -> Result<(), RelayError>;

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
    on_shut: F,
}

impl<'a, F: FnMut(u32)> ReturnWitness<'a, F> {
    pub(crate) fn new(state: &'a MainState, on_shut: F) -> Self {
        Self {
            path: ReturnPath::default(),
            state,
            on_shut,
        }
    }
}

impl<F: FnMut(u32)> Witness for ReturnWitness<'_, F> {
    fn pass(&mut self, piece: &[u8], write: Write<'_>) -> Result<(), RelayError> {
        let code = self.path.feed(piece);
        let (state, spoke) = (self.state, self.path.spoke());
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

/// One direction of a main stream.
pub(crate) struct Pump<'a> {
    pub(crate) direction: Direction,
    from: Arc<Stream>,
    to: Arc<Stream>,
    stats: &'a Stats,
    pacer: Option<&'a Pacer>,
}

impl<'a> Pump<'a> {
    pub(crate) fn new(
        direction: Direction,
        from: &Arc<Stream>,
        to: &Arc<Stream>,
        stats: &'a Stats,
        pacer: Option<&'a Pacer>,
    ) -> Self {
        Self {
            direction,
            from: from.clone(),
            to: to.clone(),
            stats,
            pacer,
        }
    }

    /// Forwards bytes until the sender ends, then forwards the end, unless the witness objects.
    pub(crate) fn run(&self, witness: &mut impl Witness) -> Result<(), RelayError> {
        let mut buffer = vec![0; PIECE];
        loop {
            let piece = match (&*self.from).read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => &buffer[..read],
                // A main stream may be idle for any time.
                Err(error) if is_transient(&error) => continue,
                Err(error) => return Err(RelayError::MainRead(self.direction, error)),
            };
            if let Some(pacer) = self.pacer {
                // Does not wait behind pages: the end of the main stream must be noticed at once.
                pacer.charge(piece.len());
            }
            witness.pass(piece, &|part| self.write(part))?;
            if self.direction == Direction::Forward {
                self.stats.add_received(piece.len());
                self.stats.add_sent(piece.len());
            }
        }
        if witness.ends() {
            self.to.finish();
        }
        Ok(())
    }

    fn write(&self, part: &[u8]) -> Result<(), RelayError> {
        let written = (&*self.to).write_all(part);
        written.map_err(|error| match is_stall(&error) {
            true => RelayError::MainStalled(self.direction, self.to.stall_timeout()),
            false => RelayError::MainWrite(self.direction, error),
        })
    }
}

/// Connects two connections in both directions. When one direction breaks, so does the other.
pub(crate) fn forward(
    near: &Arc<Stream>,
    far: &Arc<Stream>,
    stats: &Stats,
    mut there: impl Witness,
    mut back: impl Witness + Send,
) -> Result<(), RelayError> {
    fn one_way(pump: &Pump<'_>, witness: &mut impl Witness) -> Result<(), RelayError> {
        let passed = pump.run(witness);
        if passed.is_err() {
            pump.from.shut_down();
            pump.to.shut_down();
        }
        passed
    }
    let pump_there = Pump::new(Direction::Forward, near, far, stats, None);
    let pump_back = Pump::new(Direction::Back, far, near, stats, None);
    let span = Span::current();
    thread::scope(|scope| {
        let back = scope.spawn(move || span.in_scope(|| one_way(&pump_back, &mut back)));
        let forward = one_way(&pump_there, &mut there);
        // A thread that panicked has no error to add.
        forward.and(back.join().unwrap_or(Ok(())))
    })
}

/// Ignores the bytes.
pub(crate) struct NoWitness;

impl Witness for NoWitness {}

/// Large enough for a migration without multifd to be cheap.
const PIECE: usize = 128 * 1024;

/// Whether to retry: a connection may be idle for any time.
fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}
