//! Divides a connection of a session without TLS into messages, as far as faults need them.
//!
//! ```text
//!  source       Hello, Attach (stream 0 is the control stream), frames: a preamble, lines of JSON, or pages
//!  destination  Answer, Welcome, frames
//! ```
//! Each message is written at once, so it has a frame of its own. Frames are sent again when a stream continues over another
//! connection.

use lab::middlebox::Direction;
use serde_json::Value;
use vamoose_session::frame::{HEADER_LEN, Header};
use vamoose_session::handshake::{ATTACH_LEN, Attach, HELLO_LEN};

/// What a piece of a connection is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Handshake,
    /// The part of the handshake that attaches the connection to the stream of this number.
    Attach(u32),
    /// Messages of the control stream, such as `request:commit`: usually one, and none in a heartbeat.
    Messages(Vec<String>),
    /// Anything else.
    Bytes,
}

/// Finds the pieces of one direction of a connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Splitter {
    direction: Direction,
    next: Next,
}

/// What the next bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Hello,
    Attach,
    Frames,
    /// This is no session.
    Unknown,
}

/// The length of what precedes the messages of a control stream.
const PREAMBLE: usize = 24;

impl Splitter {
    pub(super) fn new(direction: Direction) -> Self {
        Self {
            direction,
            next: Next::Hello,
        }
    }

    /// The piece at the beginning of `bytes` and its length, if it is complete. `is_control` is known after the handshake.
    pub(super) fn split(&mut self, bytes: &[u8], is_control: bool) -> Option<(usize, Kind)> {
        let len = match self.next {
            Next::Hello => HELLO_LEN,
            Next::Attach => ATTACH_LEN,
            Next::Frames if is_control => match Header::decode(bytes.first_chunk()?) {
                Ok(header) => HEADER_LEN + header.len,
                Err(_) => {
                    self.next = Next::Unknown;
                    bytes.len()
                }
            },
            Next::Frames | Next::Unknown => bytes.len(),
        };
        let piece = bytes.get(..len).filter(|piece| !piece.is_empty())?;
        let kind = match self.next {
            Next::Hello => {
                self.next = Next::Attach;
                Kind::Handshake
            }
            Next::Attach => {
                self.next = Next::Frames;
                self.attach(piece)
            }
            Next::Frames if is_control => Kind::Messages(self.messages(piece)),
            Next::Frames | Next::Unknown => Kind::Bytes,
        };
        Some((len, kind))
    }

    fn attach(&self, bytes: &[u8]) -> Kind {
        let attach = bytes.first_chunk().map(Attach::decode);
        match (self.direction, attach) {
            (Direction::ToListener, Some(Ok(attach))) => Kind::Attach(attach.stream),
            _ => Kind::Handshake,
        }
    }

    fn messages(&self, frame: &[u8]) -> Vec<String> {
        let (header, mut payload) = frame.split_at(HEADER_LEN);
        let is_first = header
            .first_chunk()
            .is_some_and(|header| Header::decode(header).is_ok_and(|header| header.offset == 0));
        let side = match self.direction {
            Direction::ToListener => "request",
            Direction::ToDialler => "answer",
        };
        if side == "request" && is_first {
            payload = payload.get(PREAMBLE..).unwrap_or_default();
        }
        let lines = payload.split(|byte| *byte == b'\n');
        let messages = lines.filter_map(|line| {
            let message: Value = serde_json::from_slice(line).ok()?;
            Some(format!("{side}:{}", message[side].as_str()?))
        });
        messages.collect()
    }
}

#[cfg(test)]
pub(super) mod tests;
