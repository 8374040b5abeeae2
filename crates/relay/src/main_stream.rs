//! The main stream: bytes that a relay forwards and does not understand.

use std::{
    io::{self, Read, Write},
    sync::atomic::{AtomicBool, AtomicU8, Ordering},
};

use tracing::warn;
use transfer::{Pacer, Stats, Stream};

use crate::{Direction, Outcome, RelayError, return_path::ReturnPath};

/// What the bytes of a main stream have shown so far, for who must judge how it ended.
#[derive(Default)]
pub(crate) struct MainState {
    return_path: AtomicBool,
    last_byte: AtomicU8,
}

impl MainState {
    /// Takes note of bytes that went to the destination.
    pub(crate) fn sent(&self, piece: &[u8]) {
        if let Some(last) = piece.last() {
            self.last_byte.store(*last, Ordering::Relaxed);
        }
    }

    /// Takes note of what the destination has said.
    pub(crate) fn return_path_spoke(&self, path: &ReturnPath) {
        self.return_path.store(path.spoke(), Ordering::Relaxed);
    }

    /// Whether the return path is in use, on which the destination must say how loading went.
    pub(crate) fn has_return_path(&self) -> bool {
        self.return_path.load(Ordering::Relaxed)
    }

    /// How a migration ended in which both ends closed the main stream and the destination has not
    /// said that it loaded the guest.
    pub(crate) fn verdict(&self) -> Result<Outcome, RelayError> {
        // The description of the device state, in JSON, is the last thing on a main stream.
        let is_complete = self.last_byte.load(Ordering::Relaxed) == b'}';
        if self.has_return_path() || !is_complete {
            return Err(RelayError::MainClosed {
                direction: Direction::Forward,
            });
        }
        warn!(
            "everything was delivered, but without a return path nobody confirms that the \
             destination has loaded the guest: set the return-path capability on the source"
        );
        Ok(Outcome::Unconfirmed)
    }
}

/// Forwards bytes until the sender has no more, then tells the receiver so. `look` sees every
/// piece after it has been delivered.
pub(crate) fn pump(
    direction: Direction,
    from: &Stream,
    to: &Stream,
    stats: &Stats,
    pacer: Option<&Pacer>,
    mut look: impl FnMut(&[u8]),
) -> Result<(), RelayError> {
    let mut buffer = vec![0; PIECE];
    loop {
        let piece = match (&*from).read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => &buffer[..read],
            // A main stream may be silent for as long as it likes.
            Err(error) if is_transient(&error) => continue,
            Err(error) => return Err(RelayError::MainRead { direction, error }),
        };
        if let Some(pacer) = pacer {
            pacer.wait_for(piece.len());
        }
        (&*to)
            .write_all(piece)
            .map_err(|error| RelayError::MainWrite { direction, error })?;
        if direction == Direction::Forward {
            stats.add_received(piece.len());
            stats.add_sent(piece.len());
        }
        look(piece);
    }
    to.finish();
    Ok(())
}

/// Large enough for a migration without multifd to be cheap.
const PIECE: usize = 128 * 1024;

fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}
