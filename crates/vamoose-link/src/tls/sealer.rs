//! Seals sent bytes into records.
//!
//! ```text
//! short first piece (head) ─ a record of its own if a piece of 8 KiB or more comes next: the peer reads it separately, too
//! pieces of 8 KiB and more ─ sealed from where they are into the batch: no copy
//! shorter ones, remainders ─ copied into the batch until a record is full, sealed there
//! batch of 8 records ─> write(2)
//! ```
//!
//! A key seals at most [`MAX_RECORDS`], which are 128 GiB: then [`Sealer::send`] fails. A session replaces the connection
//! before that ([`Sealer::is_worn`]), so that a change of keys within a connection is not needed.

use std::io::{self, IoSlice};

use aws_lc_rs::aead::Aad;

use super::record::{
    ALERT, CLOSE_NOTIFY, DATA, HEADER_LEN, MAX_CONTENT, RecordKey, TAG_LEN, header,
};
use crate::Socket;

/// The sending direction of a connection.
pub(crate) struct Sealer {
    key: RecordKey,
    max_records: u64,
    batch: Vec<u8>,
    /// Bytes of finished records in `batch`.
    sealed: usize,
    /// Content bytes of the unsealed record behind them.
    open: usize,
    /// Closed, or a call has failed, and the peer may have received a partial record: nothing can follow.
    is_over: bool,
}

/// Full records of AES-GCM under one key: 2^24.5 keep the margin of RFC 8446 (5.5), and this is well below. Other ciphers
/// could seal more.
pub(super) const MAX_RECORDS: u64 = 1 << 23;

/// Records after which a key is worn. The rest suffices while the connection is replaced.
pub(super) fn worn(max_records: u64) -> u64 {
    max_records / 4 * 3
}

/// Full records in a batch: enough to make the system call cheap, few enough for the second-level cache.
const RECORDS: usize = 8;
const FULL_RECORD: usize = HEADER_LEN + MAX_CONTENT + 1 + TAG_LEN;

/// Length from which a piece gets a record of its own. Below it, a record costs more than a copy.
const DIRECT: usize = 8 << 10;

impl Sealer {
    pub(super) fn new(key: RecordKey) -> Self {
        Self {
            key,
            max_records: MAX_RECORDS,
            batch: vec![0; RECORDS * FULL_RECORD],
            sealed: 0,
            open: 0,
            is_over: false,
        }
    }

    /// Seals `pieces` one after another and writes all of it. `stalled` is called with the number of bytes taken whenever
    /// the kernel has not taken everything within the socket's send timeout, and decides whether to go on.
    ///
    /// # Errors
    /// The system's, or that of `stalled`; `QuotaExceeded` when the key has sealed as many records as it may. No call
    /// succeeds after one that has failed.
    pub(crate) fn send(
        &mut self,
        socket: &Socket,
        pieces: &[&[u8]],
        stalled: &mut dyn FnMut(usize) -> io::Result<()>,
    ) -> io::Result<()> {
        self.unless_broken(|sealer| {
            let mut out = Out { socket, stalled };
            for piece in pieces {
                sealer.push(&mut out, piece)?;
            }
            sealer.close_record(DATA)?;
            sealer.write(&mut out)
        })
    }

    /// Announces the end to the peer.
    ///
    /// # Errors
    /// As [`Sealer::send`].
    pub(crate) fn close(
        &mut self,
        socket: &Socket,
        stalled: &mut dyn FnMut(usize) -> io::Result<()>,
    ) -> io::Result<()> {
        const WARNING: u8 = 1;
        self.unless_broken(|sealer| {
            let mut out = Out { socket, stalled };
            sealer.room(&mut out, 2)?;
            let start = sealer.sealed + HEADER_LEN;
            sealer.batch[start..][..2].copy_from_slice(&[WARNING, CLOSE_NOTIFY]);
            sealer.open = 2;
            sealer.close_record(ALERT)?;
            sealer.write(&mut out)
        })?;
        self.is_over = true;
        Ok(())
    }

    /// Whether the key has sealed most of the records that it may: then its connection should be replaced.
    pub(crate) fn is_worn(&self) -> bool {
        self.key.sequence() >= worn(self.max_records)
    }

    fn unless_broken(&mut self, work: impl FnOnce(&mut Self) -> io::Result<()>) -> io::Result<()> {
        if self.is_over {
            return Err(io::Error::new(
                io::ErrorKind::NotConnected,
                "the connection has failed or been closed before",
            ));
        }
        self.is_over = true;
        work(self)?;
        self.is_over = false;
        Ok(())
    }

    fn push(&mut self, out: &mut Out<'_>, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            if bytes.len() >= DIRECT {
                self.close_record(DATA)?;
                let (content, rest) = bytes.split_at(bytes.len().min(MAX_CONTENT));
                self.room(out, content.len())?;
                self.seal(Some(content), content.len(), DATA)?;
                bytes = rest;
            } else {
                self.room(out, 1)?;
                let start = self.sealed + HEADER_LEN;
                let free = &mut self.batch[start..][..MAX_CONTENT][self.open..];
                let (content, rest) = bytes.split_at(bytes.len().min(free.len()));
                free[..content.len()].copy_from_slice(content);
                self.open += content.len();
                if self.open == MAX_CONTENT {
                    self.close_record(DATA)?;
                }
                bytes = rest;
            }
        }
        Ok(())
    }

    /// Makes room for a record of `content` bytes, and for a full one if more may be added.
    fn room(&mut self, out: &mut Out<'_>, content: usize) -> io::Result<()> {
        let needed = if content < DIRECT {
            FULL_RECORD
        } else {
            HEADER_LEN + content + 1 + TAG_LEN
        };
        if self.open == 0 && self.batch.len() - self.sealed < needed {
            self.write(out)?;
        }
        Ok(())
    }

    /// Seals the open record in place, if there is one.
    fn close_record(&mut self, kind: u8) -> io::Result<()> {
        if self.open > 0 {
            self.seal(None, self.open, kind)?;
            self.open = 0;
        }
        Ok(())
    }

    /// Seals a record of `len` bytes: straight from `content`, or in place.
    fn seal(&mut self, content: Option<&[u8]>, len: usize, kind: u8) -> io::Result<()> {
        if self.key.sequence() >= self.max_records {
            return Err(io::Error::new(
                io::ErrorKind::QuotaExceeded,
                "the key of this connection has been used as often as it may: a new connection is needed",
            ));
        }
        let header = header(len).ok_or_else(sealing)?;
        let (at, out, tail) = split(&mut self.batch[self.sealed..], len);
        at.copy_from_slice(&header);
        let (key, nonce, header) = (self.key.key(), self.key.nonce(), Aad::from(header));
        let sealed = match content {
            Some(content) => {
                key.seal_out_of_place_scatter(nonce, header, content, out, &[kind], tail)
            }
            None => key.seal_in_place_scatter(nonce, header, out, &[kind], tail),
        };
        sealed.map_err(|_| sealing())?;
        self.key.advance();
        self.sealed += HEADER_LEN + len + 1 + TAG_LEN;
        Ok(())
    }

    /// Writes all records.
    fn write(&mut self, out: &mut Out<'_>) -> io::Result<()> {
        let sealed = &self.batch[..self.sealed];
        out.socket
            .write_all(&mut [IoSlice::new(sealed)], out.stalled)?;
        self.sealed = 0;
        Ok(())
    }

    /// Lowers the key's limit of records.
    #[cfg(test)]
    pub(crate) fn limit_records(&mut self, max_records: u64) {
        self.max_records = max_records;
    }
}

/// Destination of records.
struct Out<'a> {
    socket: &'a Socket,
    stalled: &'a mut dyn FnMut(usize) -> io::Result<()>,
}

/// The parts of a record: header, content, type and tag.
fn split(record: &mut [u8], content: usize) -> (&mut [u8], &mut [u8], &mut [u8]) {
    let (header, rest) = record.split_at_mut(HEADER_LEN);
    let (content, rest) = rest.split_at_mut(content);
    (header, content, &mut rest[..1 + TAG_LEN])
}

/// Error for wrong lengths, which cannot occur.
fn sealing() -> io::Error {
    io::Error::other("a record could not be sealed")
}
