//! A connection of which it is not known yet what it is.

use std::{
    io::Read as _,
    sync::Arc,
    time::{Duration, Instant},
};

use multifd::{INITIAL_LEN, MAGIC};
use rustix::event::{PollFd, PollFlags};
use tracing::debug;
use vamoose_link::{Stream, wait_for};

use crate::{RelayError, main_stream::is_transient};

/// A connection, and what has been read of its first bytes.
pub(super) struct Opening {
    pub(super) stream: Arc<Stream>,
    pub(super) bytes: [u8; INITIAL_LEN],
    pub(super) got: usize,
    pub(super) since: Instant,
}

/// The length of the magic that every connection begins with.
const MAGIC_LEN: usize = 4;

/// A handshake, of any version that is in use.
const TLS: [u8; 2] = [0x16, 3];

impl Opening {
    pub(super) fn new(stream: Arc<Stream>) -> Self {
        Self {
            stream,
            bytes: [0; INITIAL_LEN],
            got: 0,
            since: Instant::now(),
        }
    }

    /// Reads what has come; false when the connection has ended.
    pub(super) fn read(&mut self) -> Result<bool, RelayError> {
        let mut fds = [PollFd::new(&*self.stream, PollFlags::IN)];
        if !wait_for(&mut fds, Duration::ZERO).map_err(RelayError::Opening)? {
            return Ok(true);
        }
        let wanted = self.wanted();
        match (&*self.stream).read(&mut self.bytes[self.got..wanted]) {
            Ok(0) => return Ok(false),
            Ok(read) => self.got += read,
            Err(error) if is_transient(&error) => {}
            Err(error) => {
                debug!("a connection failed: {error}");
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether all bytes have come that identify it.
    pub(super) fn is_complete(&self) -> bool {
        self.got == self.wanted() && !self.is_tls()
    }

    pub(super) fn is_tls(&self) -> bool {
        self.got >= TLS.len() && self.bytes.starts_with(&TLS)
    }

    pub(super) fn magic(&self) -> Option<[u8; MAGIC_LEN]> {
        let magic = self.bytes.first_chunk().copied();
        magic.filter(|_| self.got >= MAGIC_LEN)
    }

    pub(super) fn is_channel(&self) -> bool {
        self.magic() == Some(MAGIC.to_be_bytes())
    }

    /// Bytes that identify it.
    pub(super) fn wanted(&self) -> usize {
        if self.is_channel() {
            INITIAL_LEN
        } else {
            MAGIC_LEN
        }
    }
}
