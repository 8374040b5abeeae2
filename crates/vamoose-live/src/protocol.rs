//! What the live engine adds to [`handover`]'s protocol: how connections begin, and a description of the guest.
//!
//! There is one **control** connection, and one connection for each **channel**, which carries multifd packets. They are streams of
//! one session, or plain sockets:
//!
//! ```text
//!  control:  handover's preamble, which names the attempt, then its messages: lines of JSON
//!  channel:  multifd's initial packet, with the attempt's id for a uuid, then multifd packets
//! ```
//!
//! The order of the messages, with the channels' packets in double lines:
//!
//! ```text
//!  source                                                          destination
//!     ── prepare (RAM blocks, page size, packet size, channels) ────>  compares them with its own
//!     <──────────────────────────────── preparing, once a second ──  while it makes its memory zero
//!     <───────────────── prepared (its incarnation), or refused ──
//!     ══ pages of round 1 ═══ SYNC 1 ═══════════════════════════════>
//!     <─────────────────────────────────────────────────── synced 1 ──  when all channels had their SYNC
//!     ══ … until the rest fits into the downtime limit …
//!  pauses the guest
//!     ══ the last pages ═════ SYNC n ═══ last SYNC ═════════════════>   a channel that ends without it was cut
//!     <─────────────────────────────────────────────────── synced n ──
//!     ── state (length), the state ─────────────────────────────────>  every channel has ended: no page
//!     <───────────────────────────────────────────────────── loaded ──  can be written any more
//!     ── commit ────────────────────────────────────────────────────>
//!     <─────────────────────────────────────────────────── starting ──
//!     <──────────────────────────────────────────────────── running ──  the guest runs
//!     ── settled ───────────────────────────────────────────────────>  the source will not ask again
//! ```
//!
//! Because the source waits for `synced` before it continues, no page of a round can overtake one of the
//! round before on another channel.
//!
//! # Where the guest is
//! [`handover::Source`] and [`handover::Destination`] decide that; see its documentation for how, and why two
//! guests never run. Before `commit`, every failure leaves the guest at the source. After a lost connection behind it the
//! source dials again with the same attempt's id, until it is answered or the settle time is over. The
//! destination waits for `commit` for the settle time, and answers for a while longer; about attempts that have failed
//! it answers as long as it lives. Neither side keeps a journal: the guest ends with its process, so no other
//! process could continue.
//!
//! # Versions
//! [`handover`] negotiates them. The control protocol of the first releases began with "VLIV": its sources are refused with
//! a message that they understand.

use std::{
    io::{self, Read as _},
    sync::Arc,
    time::Duration,
};

use handover::{
    AttemptId, ConnectionKind, FrameError, Lines, MAX_LINE, PREAMBLE_LEN, PREAMBLE_MAGIC, Preamble,
    encode,
};
use multifd::{INITIAL_LEN, Initial, InitialError, Layout, MAGIC};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use thiserror::Error;
use vamoose_link::{Stream, is_stall, millis};

use crate::{Ram, SourceConfig, error::Mismatch, source::CHANNELS};

/// Number of the SYNC that is the last packet of a channel.
pub const LAST_SYNC: u64 = u64::MAX;

/// The first bytes of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// A control connection of this attempt.
    Control(AttemptId),
    /// A channel; its uuid is the attempt's id.
    Channel(Initial),
    /// A control connection of a release whose protocol is not supported any more. The rest of it has not been read.
    Old,
}

impl Opening {
    /// Reads the first bytes of a connection.
    ///
    /// # Errors
    /// When the connection breaks, or belongs to another protocol.
    pub fn read(stream: &Stream) -> Result<Self, ProtocolError> {
        let mut bytes = [0; INITIAL_LEN];
        let (magic, rest) = bytes.split_at_mut(4);
        read_exactly(stream, magic)?;
        let found = u32::from_be_bytes([magic[0], magic[1], magic[2], magic[3]]);
        if found == MAGIC {
            read_exactly(stream, rest)?;
            return Ok(Self::Channel(Initial::parse(&bytes)?));
        }
        if magic == OLD_MAGIC {
            return Ok(Self::Old);
        }
        if PREAMBLE_MAGIC.starts_with(magic) {
            read_exactly(stream, &mut rest[..PREAMBLE_LEN - 4])?;
        }
        match bytes.first_chunk().and_then(Preamble::parse) {
            Some(Preamble {
                kind: ConnectionKind::Control,
                attempt,
            }) => Ok(Self::Control(attempt)),
            _ => Err(ProtocolError::Foreign { found }),
        }
    }

    /// The first bytes of a control connection.
    pub(crate) fn control(attempt: AttemptId) -> [u8; PREAMBLE_LEN] {
        let kind = ConnectionKind::Control;
        Preamble { kind, attempt }.to_bytes()
    }
}

const OLD_MAGIC: [u8; 4] = *b"VLIV";

/// Refuses a source of an old release, with a message of its protocol.
pub(crate) fn refuse_old(stream: &Stream) -> io::Result<()> {
    const REFUSED: &[u8] = br#"{"say":"refused","cause":"the destination is of a newer release: install the same release of vamoose on both hosts"}"#;
    let len = u32::try_from(REFUSED.len()).unwrap_or(u32::MAX);
    stream.write_both(&len.to_be_bytes(), REFUSED)?;
    stream.finish();
    // Read what it has sent: the system would reset the connection otherwise, and the answer might be lost.
    io::copy(&mut (&mut &*stream).take(MAX_LINE as u64), &mut io::sink())?;
    Ok(())
}

/// What a source adds to `prepare`: its guest, and how it will be sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct PrepareDetails {
    /// The guest's RAM blocks.
    pub blocks: Vec<BlockShape>,
    /// Bytes in a page.
    pub page_size: u32,
    /// Most bytes of pages in a packet.
    pub packet_bytes: u32,
    /// Channels that the source will open.
    pub channels: u8,
    /// How long the source asks after `commit` where the guest is, in milliseconds.
    pub settle_ms: u64,
}

/// A RAM block, as both sides must have it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockShape {
    /// Its name.
    pub name: String,
    /// Its length in bytes.
    pub len: u64,
}

impl PrepareDetails {
    pub(crate) fn new(ram: &Ram, layout: Layout, config: &SourceConfig) -> Self {
        let number = |value| u32::try_from(value).unwrap_or(u32::MAX);
        let blocks = ram.blocks().iter().map(|block| BlockShape {
            name: block.name().to_string(),
            len: block.len() as u64,
        });
        Self {
            blocks: blocks.collect(),
            page_size: number(layout.page_size()),
            packet_bytes: number(layout.packet_bytes()),
            channels: config.channels,
            settle_ms: millis(config.settle_time),
        }
    }

    /// Checks that the source's guest can run in `ram`; returns the layout of its packets.
    pub(crate) fn check(&self, ram: &Ram) -> Result<Layout, Mismatch> {
        let (theirs, ours) = (self.page_size, ram.page_size());
        if theirs as usize != ours {
            return Err(Mismatch::PageSize { theirs, ours });
        }
        if !CHANNELS.contains(&self.channels) {
            return Err(Mismatch::Channels(self.channels));
        }
        for block in ram.blocks() {
            let (name, ours) = (block.name().to_string(), block.len() as u64);
            let mut same_name = self.blocks.iter().filter(|theirs| theirs.name == name);
            match (same_name.next().map(|theirs| theirs.len), same_name.next()) {
                (Some(theirs), None) if theirs == ours => {}
                (Some(theirs), None) => return Err(Mismatch::BlockLen { name, theirs, ours }),
                (None, _) => return Err(Mismatch::BlockMissing(name)),
                (_, Some(_)) => return Err(Mismatch::BlockTwice(name)),
            }
        }
        let known = |name: &str| {
            ram.blocks()
                .iter()
                .any(|block| block.name().to_string() == name)
        };
        match self.blocks.iter().find(|theirs| !known(&theirs.name)) {
            Some(theirs) => Err(Mismatch::BlockUnknown(theirs.name.clone())),
            None => Ok(Layout::new(theirs)?.with_packet_bytes(self.packet_bytes)?),
        }
    }

    pub(crate) fn settle_time(&self) -> Duration {
        Duration::from_millis(self.settle_ms)
    }
}

/// A control connection that failed, or on which the peer does not follow the protocol.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ProtocolError {
    #[error("the connection broke")]
    Io(#[from] io::Error),
    #[error("the connection ended after {got} of {wanted} bytes")]
    Truncated { got: usize, wanted: usize },
    #[error("the connection ended in the middle of a message")]
    Cut,
    /// Nothing came for the stall timeout, in the middle of a message.
    #[error("timed out after {seconds} s in the middle of a message")]
    Stalled { seconds: u64 },
    /// Nothing came for the stall timeout.
    #[error("timed out after {seconds} s waiting for a message")]
    TimedOut { seconds: u64 },
    /// A peer of another protocol.
    #[error("the connection begins with {found:#010x}, which is not a live migration")]
    Foreign { found: u32 },
    /// A source of a release whose protocol is not supported any more.
    #[error("a source of an older release: install the same release of vamoose on both hosts")]
    Old,
    /// A channel's first bytes.
    #[error("malformed initial packet of a channel")]
    Channel(#[from] InitialError),
    #[error(transparent)]
    Frame(#[from] FrameError),
}

impl ProtocolError {
    fn stalled(stream: &Stream) -> Self {
        let seconds = stream.stall_timeout().as_secs();
        Self::Stalled { seconds }
    }

    /// Whether the peer's system has reset the connection.
    pub(crate) fn is_reset(&self) -> bool {
        let reset = [io::ErrorKind::ConnectionReset, io::ErrorKind::BrokenPipe];
        matches!(self, Self::Io(error) if reset.contains(&error.kind()))
    }
}

pub(crate) fn send(stream: &Stream, message: &impl Serialize) -> Result<(), ProtocolError> {
    stream.write_both(&encode(message)?, &[])?;
    Ok(())
}

/// A control connection, message by message.
pub struct Messages {
    stream: Arc<Stream>,
    lines: Lines,
}

impl Messages {
    /// Of a connection whose first bytes have been read or written.
    pub fn new(stream: Arc<Stream>) -> Self {
        let lines = Lines::default();
        Self { stream, lines }
    }

    pub(crate) fn send(&self, message: &impl Serialize) -> Result<(), ProtocolError> {
        send(&self.stream, message)
    }

    pub(crate) fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// Receives a message, however long it takes to arrive; `None` when the connection has ended.
    ///
    /// # Errors
    /// When the connection breaks, or what comes is no message.
    pub fn receive<T: DeserializeOwned>(&mut self) -> Result<Option<T>, ProtocolError> {
        loop {
            match self.receive_soon() {
                // Between two messages there may be a long round.
                Err(ProtocolError::TimedOut { .. }) => {}
                result => return result,
            }
        }
    }

    /// As [`Messages::receive`], but the message has to begin within the stall timeout.
    pub(crate) fn receive_soon<T: DeserializeOwned>(&mut self) -> Result<Option<T>, ProtocolError> {
        let mut buffer = [0; 4096];
        loop {
            if let Some(message) = self.lines.next_message()? {
                return Ok(Some(message));
            }
            let in_message = self.lines.is_in_message();
            match (&mut &*self.stream).read(&mut buffer) {
                Ok(0) if in_message => return Err(ProtocolError::Cut),
                Ok(0) => return Ok(None),
                Ok(len) => self.lines.push(&buffer[..len]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if in_message && is_stall(&error) => {
                    return Err(ProtocolError::stalled(&self.stream));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let seconds = self.stream.stall_timeout().as_secs();
                    return Err(ProtocolError::TimedOut { seconds });
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Receives the `len` bytes of device state behind the last message. The length is not trusted: memory grows
    /// with the bytes received.
    pub(crate) fn receive_state(&mut self, len: usize) -> Result<Vec<u8>, ProtocolError> {
        let mut state = self.lines.take_rest(len);
        while state.len() < len {
            let start = state.len();
            state.resize(len.min(start + (1 << 20)), 0);
            let got = read_some(&self.stream, &mut state[start..])?;
            if start + got < state.len() {
                let (got, wanted) = (start + got, len);
                return Err(ProtocolError::Truncated { got, wanted });
            }
        }
        Ok(state)
    }
}

fn read_exactly(stream: &Stream, buffer: &mut [u8]) -> Result<(), ProtocolError> {
    let (got, wanted) = (read_some(stream, buffer)?, buffer.len());
    if got < wanted {
        return Err(ProtocolError::Truncated { got, wanted });
    }
    Ok(())
}

/// Reads until `buffer` is full or the connection ends.
fn read_some(stream: &Stream, buffer: &mut [u8]) -> Result<usize, ProtocolError> {
    stream.read_full(buffer).map_err(|error| {
        if is_stall(&error) {
            return ProtocolError::stalled(stream);
        }
        error.into()
    })
}

/// An id that no other attempt or process has, and that cannot be guessed.
pub(crate) fn random_id() -> io::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    getrandom(&mut bytes, GetRandomFlags::empty())?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use handover::{DestinationMessage, Prepare, SourceMessage, from_details, to_details};
    use proptest::{collection::vec, prelude::*};

    use super::*;

    /// What a peer that sends `bytes` and closes is understood as.
    fn received<T>(bytes: &[u8], read: impl FnOnce(Arc<Stream>) -> T) -> T {
        let (ours, theirs) = UnixStream::pair().unwrap();
        Stream::from(theirs).write_both(bytes, &[]).unwrap();
        read(Arc::new(Stream::from(ours)))
    }

    fn opening(bytes: &[u8]) -> Result<Opening, ProtocolError> {
        received(bytes, |stream| Opening::read(&stream))
    }

    fn details() -> impl Strategy<Value = PrepareDetails> {
        let block =
            ("[a-z.@0-9]{1,20}", any::<u64>()).prop_map(|(name, len)| BlockShape { name, len });
        (
            vec(block, 0..5),
            any::<u32>(),
            any::<u32>(),
            any::<u8>(),
            any::<u64>(),
        )
            .prop_map(|(blocks, page_size, packet_bytes, channels, settle_ms)| {
                PrepareDetails {
                    blocks,
                    page_size,
                    packet_bytes,
                    channels,
                    settle_ms,
                }
            })
    }

    proptest! {
        #[test]
        fn details_arrive(sent in details()) {
            let prepare = SourceMessage::Prepare(Prepare::new(to_details(&sent).unwrap()));
            let bytes = encode(&prepare).unwrap();
            let message = received(&bytes, |stream| Messages::new(stream).receive()).unwrap();
            let Some(SourceMessage::Prepare(prepare)) = message else {
                panic!("not understood");
            };
            prop_assert_eq!(from_details::<PrepareDetails>(prepare.details).unwrap(), sent);
        }

        #[test]
        fn the_state_and_what_follows_arrive(state in vec(any::<u8>(), 0..10_000)) {
            let len = state.len() as u64;
            let mut bytes = encode(&SourceMessage::State { len }).unwrap();
            bytes.extend(&state);
            bytes.extend(encode(&SourceMessage::Settled).unwrap());
            received(&bytes, |stream| {
                let mut messages = Messages::new(stream);
                let first: Option<SourceMessage> = messages.receive().unwrap();
                assert_eq!(first, Some(SourceMessage::State { len }));
                assert_eq!(messages.receive_state(state.len()).unwrap(), state);
                assert_eq!(messages.receive().unwrap(), Some(SourceMessage::Settled));
                assert_eq!(messages.receive::<SourceMessage>().unwrap(), None);
            });
        }

        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes in vec(any::<u8>(), 0..200)) {
            let first = received(&bytes, |stream| Messages::new(stream).receive::<DestinationMessage>());
            prop_assert_eq!(matches!(first, Ok(None)), bytes.is_empty());
            let _ = opening(&bytes);
        }
    }

    #[test]
    fn openings_are_told_apart() {
        let id = AttemptId([7; 16]);
        let control = Opening::control(id);
        assert_eq!(opening(&control).unwrap(), Opening::Control(id));
        let initial = Initial::new(id.0, 2, 3).unwrap();
        let channel = opening(&initial.to_bytes()).unwrap();
        assert_eq!(channel, Opening::Channel(initial));
        let data = Preamble {
            kind: ConnectionKind::Data,
            attempt: id,
        };
        for other in [&b"GET / HTTP/1.1\r\n"[..], b"VAMP", &data.to_bytes()] {
            let foreign = opening(other);
            assert!(matches!(foreign, Err(ProtocolError::Foreign { .. })));
        }
        let cut = opening(&control[..20]);
        assert!(matches!(
            cut,
            Err(ProtocolError::Truncated {
                got: 16,
                wanted: 20
            })
        ));
    }

    #[test]
    fn a_source_of_an_old_release_is_refused_in_its_words() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (ours, mut theirs) = (Stream::from(ours), theirs);
        let hello = b"VLIV\0\0\0\x01some migration's\0\0\0\x0f{\"say\":\"hello\"}";
        io::Write::write_all(&mut theirs, hello).unwrap();
        assert_eq!(Opening::read(&ours).unwrap(), Opening::Old);
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        refuse_old(&ours).unwrap();
        let mut answer = Vec::new();
        theirs.read_to_end(&mut answer).unwrap_or_default();
        let (len, json) = answer.split_first_chunk().unwrap();
        assert_eq!(u32::from_be_bytes(*len) as usize, json.len());
        let answer: serde_json::Value = serde_json::from_slice(json).unwrap();
        assert_eq!(answer["say"], "refused");
        assert!(answer["cause"].as_str().unwrap().contains("newer release"));
    }

    #[test]
    fn lengths_are_believed_only_within_bounds() {
        let long = vec![b' '; MAX_LINE + 1];
        // More than the socket takes in one go.
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| Stream::from(theirs).write_both(&long, &[]));
            let mut messages = Messages::new(Arc::new(Stream::from(ours)));
            let long = messages.receive::<SourceMessage>();
            assert!(matches!(
                long,
                Err(ProtocolError::Frame(FrameError::TooLong))
            ));
        });
        let state = received(b"short", |stream| {
            Messages::new(stream).receive_state(1 << 40)
        });
        assert!(matches!(
            state,
            Err(ProtocolError::Truncated {
                got: 5,
                wanted: 0x100_0000_0000
            })
        ));
    }
}
