//! Framing of the control connection: a message is a line of JSON.
//!
//! Raw bytes follow the message `state`: [`Lines::take_rest`] returns those that were read together with the line.

use serde::{Serialize, de::DeserializeOwned};
use thiserror::Error;

/// Most bytes of a line: enough for the names and lengths of the largest number of RAM blocks.
pub const MAX_LINE: usize = 1 << 20;

/// Bytes that are not a message.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum FrameError {
    /// A line without an end.
    #[error("a message of more than {MAX_LINE} bytes")]
    TooLong,
    /// A line that is not a message of this protocol.
    #[error("malformed control message")]
    Malformed(#[from] serde_json::Error),
}

/// The bytes of a message.
///
/// # Errors
/// When it is longer than [`MAX_LINE`], or holds what JSON cannot.
pub fn encode(message: &impl Serialize) -> Result<Vec<u8>, FrameError> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    if line.len() > MAX_LINE {
        return Err(FrameError::TooLong);
    }
    Ok(line)
}

/// Splits received bytes into messages. The bytes may arrive in pieces of any size.
#[derive(Debug, Default)]
pub struct Lines {
    received: Vec<u8>,
    /// Length of the prefix that is known to contain no end of a line.
    searched: usize,
}

impl Lines {
    /// Takes the next bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.received.extend_from_slice(bytes);
    }

    /// The next message; `None` until all of it has been pushed.
    ///
    /// # Errors
    /// When the line is too long or not a message. Its bytes are dropped; close the connection.
    pub fn next_message<T: DeserializeOwned>(&mut self) -> Result<Option<T>, FrameError> {
        let unseen = &self.received[self.searched..];
        let Some(end) = unseen.iter().position(|byte| *byte == b'\n') else {
            self.searched = self.received.len();
            if self.searched >= MAX_LINE {
                self.received = Vec::new();
                self.searched = 0;
                return Err(FrameError::TooLong);
            }
            return Ok(None);
        };
        let end = self.searched + end;
        self.searched = 0;
        if end >= MAX_LINE {
            self.received.drain(..=end);
            return Err(FrameError::TooLong);
        }
        let message = serde_json::from_slice(&self.received[..end]);
        self.received.drain(..=end);
        Ok(Some(message?))
    }

    /// Whether part of a message has come.
    pub fn is_in_message(&self) -> bool {
        !self.received.is_empty()
    }

    /// Takes at most `len` bytes that follow the last message.
    pub fn take_rest(&mut self, len: usize) -> Vec<u8> {
        self.searched = 0;
        let len = len.min(self.received.len());
        self.received.drain(..len).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;
    use crate::{DestinationMessage, SourceMessage, message::tests as messages};

    proptest! {
        #[test]
        fn messages_arrive_in_any_pieces(
            sent in vec(messages::from_destination(), 0..5),
            pieces in vec(1_usize..50, 1..10),
        ) {
            let bytes: Vec<u8> = sent.iter().flat_map(|message| encode(message).unwrap()).collect();
            let (mut lines, mut received, mut left) = (Lines::default(), Vec::new(), &bytes[..]);
            for size in pieces.iter().cycle() {
                if left.is_empty() {
                    break;
                }
                let (piece, rest) = left.split_at(left.len().min(*size));
                lines.push(piece);
                left = rest;
                while let Some(message) = lines.next_message::<DestinationMessage>().unwrap() {
                    received.push(message);
                }
            }
            prop_assert_eq!(received, sent);
            prop_assert!(!lines.is_in_message());
        }

        #[test]
        fn the_source_is_understood(sent in messages::from_source()) {
            let mut lines = Lines::default();
            lines.push(&encode(&sent).unwrap());
            prop_assert_eq!(lines.next_message::<SourceMessage>().unwrap(), Some(sent));
        }

        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes in vec(any::<u8>(), 0..200)) {
            let mut lines = Lines::default();
            lines.push(&bytes);
            for _ in 0..=bytes.len() {
                if let Ok(None) = lines.next_message::<SourceMessage>() {
                    break;
                }
            }
            prop_assert!(!lines.take_rest(usize::MAX).contains(&b'\n'));
        }
    }

    #[test]
    fn a_line_without_an_end_is_an_error() {
        let mut lines = Lines::default();
        let piece = [b'x'; 4096];
        let error = loop {
            lines.push(&piece);
            if let Err(error) = lines.next_message::<SourceMessage>() {
                break error;
            }
            assert!(lines.received.len() < 2 * MAX_LINE);
        };
        assert!(matches!(error, FrameError::TooLong));
    }

    #[test]
    fn bytes_behind_a_message_stay() {
        let mut lines = Lines::default();
        let mut bytes = encode(&SourceMessage::State { len: 5 }).unwrap();
        bytes.extend(b"st\nte");
        lines.push(&bytes);
        assert!(lines.next_message::<SourceMessage>().unwrap().is_some());
        assert_eq!(lines.take_rest(3), b"st\n");
        assert_eq!(lines.take_rest(3), b"te");
    }
}
