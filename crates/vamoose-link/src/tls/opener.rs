//! Opens received records.
//!
//! ```text
//! read(2) ─> received ─┬─ the record fits ──> opened straight into the caller's memory
//!                      └─ it does not ──────> opened in place, handed out in pieces
//! ```
//!
//! Every byte of a record, including its header, is authenticated together with the record's number before any of it is used, so
//! that no record can be dropped, repeated or reordered. Any violation ends the connection. Key updates are not supported:
//! [`Sealer`](super::Sealer) needs none.

use std::{
    io::{self, Read as _},
    ops::Range,
};

use aws_lc_rs::aead::Aad;
use rustls::AlertDescription;

use super::record::{
    ALERT, CLOSE_NOTIFY, DATA, HANDSHAKE, HEADER_LEN, MAX_BODY, MAX_CONTENT, RecordKey, TAG_LEN,
};
use super::sealer::{MAX_RECORDS, worn};
use crate::{Socket, socket::uninterrupted};

/// The receiving direction of a connection.
pub(crate) struct Opener {
    key: RecordKey,
    received: Vec<u8>,
    /// The part of `received` that has not been opened.
    closed: Range<usize>,
    /// The part of `received` that has been opened and not handed out.
    opened: Range<usize>,
    /// Empty records since the last one with content.
    empty: u32,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    /// The peer has announced the end.
    Closed,
    Broken,
}

/// Limit of one read(2).
const BUFFER: usize = 256 << 10;

/// Limit of consecutive empty records. They are useless, and each costs time.
const MAX_EMPTY: u32 = 16;

impl Opener {
    pub(super) fn new(key: RecordKey) -> Self {
        Self {
            key,
            received: vec![0; BUFFER],
            closed: 0..0,
            opened: 0..0,
            empty: 0,
            state: State::Open,
        }
    }

    /// Whether the peer's key is nearly used up.
    pub(crate) fn is_worn(&self) -> bool {
        self.key.sequence() >= worn(MAX_RECORDS)
    }

    /// Reads into `out`: at least one byte, or none when the peer has announced the end. The rest of `out` may be overwritten.
    ///
    /// # Errors
    /// `WouldBlock` when nothing came for the socket's receive timeout: the call may be repeated. `UnexpectedEof` when the
    /// connection ended without a close_notify, `InvalidData` when a record has been changed in transit, and the system's. No
    /// call succeeds after one of these.
    pub(crate) fn read(&mut self, socket: &Socket, out: &mut [u8]) -> io::Result<usize> {
        match self.state {
            State::Open => {}
            State::Closed => return Ok(0),
            State::Broken => {
                let broken = "the connection has failed before";
                return Err(io::Error::new(io::ErrorKind::NotConnected, broken));
            }
        }
        let read = self.read_open(socket, out);
        if let Err(error) = &read
            && error.kind() != io::ErrorKind::WouldBlock
        {
            self.state = State::Broken;
        }
        read
    }

    /// Whether [`Opener::read`] has bytes without a system call.
    pub(crate) fn buffered(&self) -> bool {
        !self.opened.is_empty() || self.state == State::Open && self.has_record()
    }

    fn read_open(&mut self, socket: &Socket, out: &mut [u8]) -> io::Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        let mut read = self.hand_out(out);
        // All complete records, to save system calls.
        while read < out.len() && self.state == State::Open {
            let Some(body) = self.next_record()? else {
                if read > 0 {
                    break;
                }
                self.receive(socket)?;
                continue;
            };
            read += self.open(body, &mut out[read..])?;
        }
        Ok(read)
    }

    /// Copies opened bytes to `out`.
    fn hand_out(&mut self, out: &mut [u8]) -> usize {
        let bytes = self.opened.len().min(out.len());
        out[..bytes].copy_from_slice(&self.received[self.opened.start..][..bytes]);
        self.opened.start += bytes;
        bytes
    }

    fn has_record(&self) -> bool {
        // An invalid record counts, too.
        !matches!(self.peek(), Ok(None))
    }

    /// The length of the next record's body, if all of it has been received.
    fn peek(&self) -> io::Result<Option<usize>> {
        let received = &self.received[self.closed.clone()];
        let Some(([kind, _, _, high, low], rest)) = received.split_first_chunk() else {
            return Ok(None);
        };
        if *kind != DATA {
            return Err(malformed("a record without encryption"));
        }
        let body = usize::from(u16::from_be_bytes([*high, *low]));
        if body > MAX_BODY {
            return Err(malformed("a record that is too long"));
        }
        if body <= TAG_LEN {
            return Err(malformed("a record that is too short"));
        }
        Ok((body <= rest.len()).then_some(body))
    }

    /// The position of the next record's body, which counts as taken.
    fn next_record(&mut self) -> io::Result<Option<Range<usize>>> {
        let Some(len) = self.peek()? else {
            return Ok(None);
        };
        let start = self.closed.start + HEADER_LEN;
        self.closed.start = start + len;
        Ok(Some(start..start + len))
    }

    /// Opens the record at `body` into `out`, or in place if it does not fit. Returns the bytes of `out` that count.
    fn open(&mut self, body: Range<usize>, out: &mut [u8]) -> io::Result<usize> {
        let (before, rest) = self.received.split_at_mut(body.start);
        let (sealed, tag) = rest[..body.len()].split_at_mut(body.len() - TAG_LEN);
        let header = before.last_chunk::<HEADER_LEN>();
        let header = Aad::from(*header.ok_or_else(|| malformed("a record without header"))?);
        let (key, nonce) = (self.key.key(), self.key.nonce());
        let is_direct = sealed.len() <= out.len();
        let plain = if is_direct {
            let plain = &mut out[..sealed.len()];
            key.open_separate_gather(nonce, header, sealed, tag, plain)
                .map(|()| plain)
        } else {
            key.open_in_place_separate_tag(nonce, header, tag, sealed)
        };
        let plain = plain.map_err(|_| malformed("a record that has been changed on its way"))?;
        self.key.advance();
        // The type is the last byte that is not zero.
        let len = plain.iter().rposition(|byte| *byte != 0);
        let len = len.ok_or_else(|| malformed("a record without type"))?;
        let (kind, content) = (plain[len], &plain[..len]);
        if len > MAX_CONTENT {
            return Err(malformed("a record that is too long"));
        }
        match kind {
            DATA => {}
            ALERT => {
                let content = content.try_into().ok();
                self.alert(content)?;
                return Ok(0);
            }
            HANDSHAKE => return Err(malformed("a handshake message on an open connection")),
            _ => return Err(malformed("a record of unknown type")),
        }
        self.count(len)?;
        if is_direct {
            return Ok(len);
        }
        self.opened = body.start..body.start + len;
        Ok(self.hand_out(out))
    }

    fn alert(&mut self, content: Option<[u8; 2]>) -> io::Result<()> {
        match content {
            Some([_, CLOSE_NOTIFY]) => {
                self.state = State::Closed;
                Ok(())
            }
            Some([_, description]) => {
                let alert = AlertDescription::from(description);
                Err(io::Error::new(
                    io::ErrorKind::ConnectionAborted,
                    format!("the peer sent the TLS alert {alert:?}"),
                ))
            }
            None => Err(malformed("a malformed alert")),
        }
    }

    fn count(&mut self, content: usize) -> io::Result<()> {
        if content > 0 {
            self.empty = 0;
            return Ok(());
        }
        self.empty += 1;
        if self.empty > MAX_EMPTY {
            return Err(malformed("too many records without content"));
        }
        Ok(())
    }

    /// Receives available bytes. All opened bytes must have been handed out.
    fn receive(&mut self, socket: &Socket) -> io::Result<()> {
        // Moves a partial record to the front: at most one for each read.
        self.received.copy_within(self.closed.clone(), 0);
        self.closed = 0..self.closed.len();
        self.opened = 0..0;
        let free = &mut self.received[self.closed.end..];
        match uninterrupted(|| (&mut &*socket).read(free))? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            bytes => {
                self.closed.end += bytes;
                Ok(())
            }
        }
    }
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the peer sent {what}"))
}
