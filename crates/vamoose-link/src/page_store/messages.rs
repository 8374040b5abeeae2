//! The messages of a destination with a page store, on the way back of a channel's stream.
//!
//! ```text
//!   0     kind     1 keys    2 list                 3 verdict
//!   1..3  count    48        of fingerprints        of pages that were not found
//!   3..   bytes    keys      4 · count              2 · count: indices among the references of the packet, and their number: see below
//! ```
//!
//! Numbers are big endian. There is a verdict for each packet with references or bases, in the order of the packets on the channel. If
//! a base was not found, the number of references, as an index, stands for all encoded pages.

use std::io;

use vamoose_codec::shared::Fingerprint;

use super::fingerprint::{KEYS_LEN, Keys};
use crate::Stream;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    Keys(Keys),
    List(Vec<Fingerprint>),
    Verdict(Vec<u16>),
}

/// Most fingerprints in a list, so that a verdict does not wait for long behind it. A packet has fewer references.
pub(super) const MOST_LISTED: usize = 4096;

const HEAD: usize = 3;

impl Message {
    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, count, bytes) = match self {
            Self::Keys(keys) => (1, KEYS_LEN, keys.encode().to_vec()),
            Self::List(list) => {
                let bytes = list.iter().flat_map(|it| it.to_be_bytes());
                (2, list.len(), bytes.collect())
            }
            Self::Verdict(missing) => {
                let bytes = missing.iter().flat_map(|it| it.to_be_bytes());
                (3, missing.len(), bytes.collect())
            }
        };
        let [high, low] = u16::try_from(count).unwrap_or(u16::MAX).to_be_bytes();
        [&[kind, high, low][..], &bytes].concat()
    }

    /// Waits for the next message. `None` if the stream has ended.
    pub(super) fn read(stream: &Stream) -> io::Result<Option<Self>> {
        let mut head = [0; HEAD];
        match stream.read_full(&mut head)? {
            0 => return Ok(None),
            HEAD => {}
            _ => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
        let [kind, high, low] = head;
        let count = usize::from(u16::from_be_bytes([high, low]));
        let len = match kind {
            1 if count == KEYS_LEN => count,
            2 if count <= MOST_LISTED => 4 * count,
            3 if count <= MOST_LISTED => 2 * count,
            _ => {
                return Err(io::Error::other(
                    "the peer sent a malformed message about its page store",
                ));
            }
        };
        let mut bytes = vec![0; len];
        if stream.read_full(&mut bytes)? < len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(Some(match (kind, bytes.first_chunk()) {
            (1, Some(keys)) => Self::Keys(Keys::decode(keys)),
            (2, _) => {
                let list = bytes.as_chunks().0.iter();
                Self::List(list.map(|it| Fingerprint::from_be_bytes(*it)).collect())
            }
            _ => {
                let missing = bytes.as_chunks().0.iter();
                Self::Verdict(missing.map(|it| u16::from_be_bytes(*it)).collect())
            }
        }))
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Write as _, os::unix::net::UnixStream};

    use proptest::{collection::vec, prelude::*};

    use super::*;

    fn message() -> impl Strategy<Value = Message> {
        prop_oneof![
            any::<[u8; 16]>().prop_map(|part| {
                let mut bytes = [9; KEYS_LEN];
                bytes[8..24].copy_from_slice(&part);
                Message::Keys(Keys::decode(&bytes))
            }),
            vec(any::<u32>(), 0..100).prop_map(Message::List),
            vec(any::<u16>(), 0..100).prop_map(Message::Verdict),
        ]
    }

    proptest! {
        #[test]
        fn messages_arrive(sent in vec(message(), 0..5), cut in any::<bool>()) {
            let (mut near, far) = UnixStream::pair().unwrap();
            let far = Stream::from(far);
            let mut bytes: Vec<_> = sent.iter().flat_map(Message::encode).collect();
            if cut {
                bytes.pop();
            }
            near.write_all(&bytes).unwrap();
            drop(near);
            let mut received = Vec::new();
            let end = loop {
                match Message::read(&far) {
                    Ok(Some(message)) => received.push(message),
                    end => break end.map(|_| ()),
                }
            };
            let whole = if cut { sent.len().saturating_sub(1) } else { sent.len() };
            prop_assert_eq!(&received[..], &sent[..whole]);
            prop_assert_eq!(end.is_err(), cut && !sent.is_empty());
        }
    }

    #[test]
    fn malformed_messages_are_refused() {
        for head in [[0, 0, 0], [4, 0, 1], [1, 0, 47], [2, 0x10, 1], [3, 0x10, 1]] {
            let (mut near, far) = UnixStream::pair().unwrap();
            near.write_all(&head).unwrap();
            assert!(Message::read(&Stream::from(far)).is_err(), "{head:?}");
        }
    }
}
