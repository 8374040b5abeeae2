//! A connection of which it is not known yet what it is.

use std::{sync::Arc, time::Instant};

use multifd::{INITIAL_LEN, MAGIC};
use tracing::debug;
use vamoose_link::Stream;

use crate::RelayError;

/// A connection, and what has been read of its first bytes.
pub(crate) struct Opening {
    pub(crate) stream: Arc<Stream>,
    pub(crate) bytes: [u8; INITIAL_LEN],
    pub(crate) got: usize,
    pub(crate) since: Instant,
}

/// The length of the magic that every connection begins with.
const MAGIC_LEN: usize = 4;

/// A handshake, of any version that is in use.
const TLS: [u8; 2] = [0x16, 3];

impl Opening {
    pub(crate) fn new(stream: Arc<Stream>) -> Self {
        Self {
            stream,
            bytes: [0; INITIAL_LEN],
            got: 0,
            since: Instant::now(),
        }
    }

    /// Reads what has come; false when the connection has ended.
    pub(crate) fn read(&mut self) -> Result<bool, RelayError> {
        let wanted = self.wanted();
        let now = Some(Instant::now());
        match self
            .stream
            .read_until(&mut self.bytes[self.got..wanted], now)
        {
            Ok(Some(0)) => return Ok(false),
            Ok(Some(read)) => self.got += read,
            Ok(None) => {}
            Err(error) => {
                debug!("a connection failed: {error}");
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether all bytes have come that identify it.
    pub(crate) fn is_complete(&self) -> bool {
        self.got == self.wanted() && !self.is_tls()
    }

    pub(crate) fn is_tls(&self) -> bool {
        self.got >= TLS.len() && self.bytes.starts_with(&TLS)
    }

    pub(crate) fn magic(&self) -> Option<[u8; MAGIC_LEN]> {
        let magic = self.bytes.first_chunk().copied();
        magic.filter(|_| self.got >= MAGIC_LEN)
    }

    pub(crate) fn is_channel(&self) -> bool {
        self.magic() == Some(MAGIC.to_be_bytes())
    }

    /// Bytes that identify it.
    pub(crate) fn wanted(&self) -> usize {
        if self.is_channel() {
            INITIAL_LEN
        } else {
            MAGIC_LEN
        }
    }
}
