//! What a source and a destination say to each other, besides the pages.
//!
//! One **control** connection, and one connection for each **channel**, which carries multifd packets. Both
//! begin with four bytes that tell which of them it is:
//!
//! ```text
//!  control:  "VLIV", version (4 bytes), migration id (16 bytes), then messages
//!  channel:  multifd's initial packet, with the migration id for a uuid, then multifd packets
//!  message:  length (4 bytes), JSON; behind the message `state`, the device state itself
//! ```
//!
//! The whole conversation, the channels' part in double lines:
//!
//! ```text
//!  source                                                          destination
//!     ── hello (RAM blocks, page size, packet size, channels) ──────>  compares them with its own
//!     <──────────────────────────────── accepted, or refused (why) ──  its memory reads as zeros now
//!     ══ pages of round 1 ═══ SYNC 1 ═══════════════════════════════>
//!     <─────────────────────────────────────────────────── synced 1 ──  when all channels had their SYNC
//!     ══ … until what is left fits into the downtime limit …
//!  pauses the guest
//!     ══ the last pages ═════ SYNC n ═══ last SYNC ═════════════════>   what ends without that one was cut
//!     <─────────────────────────────────────────────────── synced n ──
//!     ── state (length), the state ─────────────────────────────────>  every channel has ended: no page
//!     <───────────────────────────────────────────────────── loaded ──  can be written any more
//!     ── commit ────────────────────────────────────────────────────>
//!     <─────────────────────────────────────────────────── starting ──
//!     <──────────────────────────────────────────────────── running ──  the guest runs
//!     ── settled ───────────────────────────────────────────────────>  nobody will ask again
//! ```
//!
//! Because the source waits for `synced` before it goes on, no page of a round can overtake one of the
//! round before on another channel.
//!
//! # Who has the guest
//! Until the source sends `commit` the guest is the source's: whatever fails, it resumes there. From then on it
//! resumes only when it is certain that the guest has never run at the destination. After a lost
//! connection it dials again, as often as it takes, with the same migration id, and repeats `commit`:
//!
//! - `starting` or `running`: the guest is the destination's.
//! - `aborted`: the destination will never run it. The source resumes.
//! - Nobody listens any more: the destination's process is gone, or has given up. It listens as long as it may run
//!   the guest and says `starting` before it does. If it has closed every connection on which it was told `commit`, without
//!   that word, the guest has never run there: the source resumes. If one of them went silent instead, the word may
//!   have been lost, and the source cannot know.
//! - No answer at all for the settle time: the source cannot know either. The guest stays paused
//!   ([`SourceError::InDoubt`](crate::SourceError::InDoubt)), never two run.
//!
//! The destination waits for the source's word for the settle time, and answers questions for a while longer:
//! it stops listening only when the source has stopped asking. A proxy or a firewall between the hosts must
//! not refuse connections in the name of a destination that lives.
//!
//! # Versions
//! A destination refuses every version but its own. A message may get new fields, which need a default; anything
//! else is a new version.

use std::{fmt, io, time::Duration};

use multifd::{INITIAL_LEN, Initial, InitialError, MAGIC};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use thiserror::Error;
use transfer::{Stream, is_stall};

/// Version of the conversation.
pub const VERSION: u32 = 1;

/// Number of the SYNC that is the last packet of a channel.
pub const LAST_SYNC: u64 = u64::MAX;

/// Names one attempt to migrate, on both hosts.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct MigrationId(pub(crate) [u8; 16]);

impl MigrationId {
    /// A name that nobody else has, or can guess.
    pub(crate) fn random() -> io::Result<Self> {
        let mut bytes = [0; 16];
        getrandom(&mut bytes, GetRandomFlags::empty())?;
        Ok(Self(bytes))
    }
}

impl fmt::Debug for MigrationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// What the first bytes of a connection say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// A control connection.
    Control {
        /// The version that the source speaks.
        version: u32,
        /// The attempt that it is about.
        id: MigrationId,
    },
    /// A channel; its uuid is the migration's id.
    Channel(Initial),
}

impl Opening {
    /// Reads the first bytes of a connection.
    ///
    /// # Errors
    /// When the connection breaks, or is none of ours.
    pub fn read(stream: &Stream) -> Result<Self, ProtocolError> {
        let mut bytes = [0; INITIAL_LEN];
        read_exactly(stream, &mut bytes[..4])?;
        let magic = word(&bytes, 0);
        match magic {
            CONTROL_MAGIC => {
                read_exactly(stream, &mut bytes[4..CONTROL_OPENING_LEN])?;
                let mut id = [0; 16];
                id.copy_from_slice(&bytes[8..CONTROL_OPENING_LEN]);
                Ok(Self::Control {
                    version: word(&bytes, 4),
                    id: MigrationId(id),
                })
            }
            MAGIC => {
                read_exactly(stream, &mut bytes[4..])?;
                Ok(Self::Channel(Initial::parse(&bytes)?))
            }
            found => Err(ProtocolError::Stranger { found }),
        }
    }

    /// The first bytes of a control connection.
    pub(crate) fn control(id: MigrationId) -> [u8; CONTROL_OPENING_LEN] {
        let mut bytes = [0; CONTROL_OPENING_LEN];
        bytes[..4].copy_from_slice(&CONTROL_MAGIC.to_be_bytes());
        bytes[4..8].copy_from_slice(&VERSION.to_be_bytes());
        bytes[8..].copy_from_slice(&id.0);
        bytes
    }
}

const CONTROL_MAGIC: u32 = u32::from_be_bytes(*b"VLIV");
const CONTROL_OPENING_LEN: usize = 24;

/// What a source says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "kebab-case")]
pub enum SourceMessage {
    /// What is to be migrated.
    Hello(Hello),
    /// The device state follows.
    State {
        /// Its length in bytes.
        len: u64,
    },
    /// The guest is the destination's now: run it.
    Commit,
    /// The source knows that it runs, and has forgotten it.
    Settled,
    /// The guest stays at the source.
    Abort {
        /// Why.
        cause: String,
    },
}

/// The first message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Hello {
    /// The guest's RAM blocks.
    pub blocks: Vec<BlockShape>,
    /// Bytes in a page.
    pub page_size: u32,
    /// Most bytes of pages in a packet.
    pub packet_bytes: u32,
    /// Channels that the source will open.
    pub channels: u8,
    /// For how long the source asks, once it has committed, in milliseconds.
    pub settle_ms: u64,
}

impl Hello {
    pub(crate) fn settle_time(&self) -> Duration {
        Duration::from_millis(self.settle_ms)
    }
}

/// A RAM block, as both sides must have it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockShape {
    /// Its name.
    pub name: String,
    /// Its length in bytes.
    pub len: u64,
}

/// What a destination says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "kebab-case")]
pub enum DestinationMessage {
    /// The source may send.
    Accepted,
    /// It may not.
    Refused {
        /// Why.
        cause: String,
    },
    /// All pages of a round have been written.
    Synced {
        /// The round's number.
        round: u64,
    },
    /// The device state has been loaded.
    Loaded,
    /// The guest is about to run here.
    Starting,
    /// It runs.
    Running,
    /// It has never run here and never will.
    Aborted {
        /// Why.
        cause: String,
    },
}

/// A connection on which the peer does not speak as agreed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// The connection broke.
    #[error("the connection broke: {0}")]
    Io(#[from] io::Error),
    /// The connection ended in the middle of something.
    #[error("the connection ended after {got} of {wanted} bytes")]
    Truncated {
        /// Bytes that came.
        got: usize,
        /// Bytes that were due.
        wanted: usize,
    },
    /// Nothing came for the stall timeout, in the middle of something.
    #[error("the peer stopped in the middle of a message")]
    Stalled,
    /// Nothing came for the stall timeout.
    #[error("the peer does not answer")]
    Silent,
    /// Somebody who does not speak this protocol at all.
    #[error("a connection begins with {found:#010x}: no live migration")]
    Stranger {
        /// Its first four bytes.
        found: u32,
    },
    /// A channel's first bytes.
    #[error("bad channel: {0}")]
    Channel(#[from] InitialError),
    /// A message that is too long to be one.
    #[error("a message of {len} bytes, at most {MAX_MESSAGE} are allowed")]
    MessageLength {
        /// The length on the wire.
        len: u32,
    },
    /// A message that nobody understands.
    #[error("not a message: {0}")]
    Message(#[from] serde_json::Error),
}

/// Most bytes of a message: enough for the names and lengths of all RAM blocks that there can be.
pub const MAX_MESSAGE: usize = 1 << 20;

/// Sends a message.
pub(crate) fn send(stream: &Stream, message: &impl Serialize) -> Result<(), ProtocolError> {
    let json = serde_json::to_vec(message)?;
    let len = u32::try_from(json.len()).unwrap_or(u32::MAX);
    if json.len() > MAX_MESSAGE {
        return Err(ProtocolError::MessageLength { len });
    }
    stream.write_both(&len.to_be_bytes(), &json)?;
    Ok(())
}

/// Receives a message, however long it takes to begin; `None` when the connection has ended.
///
/// # Errors
/// When the connection breaks, or what comes is no message.
pub fn receive<T: DeserializeOwned>(stream: &Stream) -> Result<Option<T>, ProtocolError> {
    loop {
        match receive_soon(stream) {
            // Between two messages there may be a long round.
            Err(ProtocolError::Silent) => {}
            result => return result,
        }
    }
}

/// As [`receive`], but the message has to begin within the stall timeout.
pub(crate) fn receive_soon<T: DeserializeOwned>(
    stream: &Stream,
) -> Result<Option<T>, ProtocolError> {
    let mut len = [0; 4];
    match stream.read_full(&mut len[..1]) {
        Ok(0) => return Ok(None),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            return Err(ProtocolError::Silent);
        }
        Err(error) => return Err(error.into()),
    }
    read_exactly(stream, &mut len[1..])?;
    let len = u32::from_be_bytes(len);
    if len as usize > MAX_MESSAGE {
        return Err(ProtocolError::MessageLength { len });
    }
    let mut json = vec![0; len as usize];
    read_exactly(stream, &mut json)?;
    Ok(Some(serde_json::from_slice(&json)?))
}

/// Receives `len` bytes of device state. The length is the peer's word: memory grows with the bytes that really come.
pub(crate) fn receive_state(stream: &Stream, len: usize) -> Result<Vec<u8>, ProtocolError> {
    let mut state = Vec::new();
    while state.len() < len {
        let start = state.len();
        state.resize(len.min(start + (1 << 20)), 0);
        read_exactly(stream, &mut state[start..])?;
    }
    Ok(state)
}

fn read_exactly(stream: &Stream, buffer: &mut [u8]) -> Result<(), ProtocolError> {
    match stream.read_full(buffer) {
        Ok(got) if got == buffer.len() => Ok(()),
        Ok(got) => Err(ProtocolError::Truncated {
            got,
            wanted: buffer.len(),
        }),
        Err(error) if is_stall(&error) => Err(ProtocolError::Stalled),
        Err(error) => Err(error.into()),
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes[at..]
        .first_chunk()
        .map_or(0, |bytes| u32::from_be_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use proptest::{collection::vec, prelude::*};

    use super::*;

    fn pair() -> (Stream, Stream) {
        let (a, b) = UnixStream::pair().unwrap();
        (Stream::Unix(a), Stream::Unix(b))
    }

    /// What a peer that sends `bytes` and closes is understood as.
    fn heard<T>(bytes: &[u8], read: impl FnOnce(&Stream) -> T) -> T {
        let (ours, theirs) = pair();
        theirs.write_both(bytes, &[]).unwrap();
        drop(theirs);
        read(&ours)
    }

    fn source_messages() -> impl Strategy<Value = SourceMessage> {
        let block =
            ("[a-z.@0-9]{1,20}", any::<u64>()).prop_map(|(name, len)| BlockShape { name, len });
        let hello = (
            vec(block, 0..5),
            any::<u32>(),
            any::<u32>(),
            any::<u8>(),
            any::<u64>(),
        )
            .prop_map(|(blocks, page_size, packet_bytes, channels, settle_ms)| {
                SourceMessage::Hello(Hello {
                    blocks,
                    page_size,
                    packet_bytes,
                    channels,
                    settle_ms,
                })
            });
        prop_oneof![
            hello,
            any::<u64>().prop_map(|len| SourceMessage::State { len }),
            Just(SourceMessage::Commit),
            Just(SourceMessage::Settled),
            ".{0,40}".prop_map(|cause| SourceMessage::Abort { cause }),
        ]
    }

    fn destination_messages() -> impl Strategy<Value = DestinationMessage> {
        prop_oneof![
            Just(DestinationMessage::Accepted),
            ".{0,40}".prop_map(|cause| DestinationMessage::Refused { cause }),
            any::<u64>().prop_map(|round| DestinationMessage::Synced { round }),
            Just(DestinationMessage::Loaded),
            Just(DestinationMessage::Starting),
            Just(DestinationMessage::Running),
            ".{0,40}".prop_map(|cause| DestinationMessage::Aborted { cause }),
        ]
    }

    proptest! {
        #[test]
        fn messages_arrive(to in vec(source_messages(), 0..4), back in vec(destination_messages(), 0..4)) {
            let (ours, theirs) = pair();
            for message in &to {
                send(&ours, message).unwrap();
            }
            for message in &back {
                send(&theirs, message).unwrap();
            }
            for message in &to {
                prop_assert_eq!(&receive::<SourceMessage>(&theirs).unwrap().unwrap(), message);
            }
            for message in &back {
                prop_assert_eq!(&receive::<DestinationMessage>(&ours).unwrap().unwrap(), message);
            }
        }

        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes in vec(any::<u8>(), 0..200)) {
            let first = heard(&bytes, receive::<SourceMessage>);
            prop_assert_eq!(matches!(first, Ok(None)), bytes.is_empty());
            let _ = heard(&bytes, Opening::read);
        }
    }

    #[test]
    fn openings_are_told_apart() {
        let id = MigrationId([7; 16]);
        let control = heard(&Opening::control(id), Opening::read).unwrap();
        let version = VERSION;
        assert_eq!(control, Opening::Control { version, id });
        let initial = Initial::new(id.0, 2, 3).unwrap();
        let channel = heard(&initial.to_bytes(), Opening::read).unwrap();
        assert_eq!(channel, Opening::Channel(initial));
        let stranger = heard(b"GET / HTTP/1.1\r\n", Opening::read);
        assert!(matches!(
            stranger,
            Err(ProtocolError::Stranger { found: 0x4745_5420 })
        ));
        let cut = heard(&Opening::control(id)[..20], Opening::read);
        assert!(matches!(
            cut,
            Err(ProtocolError::Truncated {
                got: 16,
                wanted: 20
            })
        ));
    }

    #[test]
    fn lengths_are_believed_only_within_bounds() {
        let long = heard(&u32::MAX.to_be_bytes(), receive::<SourceMessage>);
        assert!(matches!(
            long,
            Err(ProtocolError::MessageLength { len: u32::MAX })
        ));
        let state = heard(b"short", |stream| receive_state(stream, 1 << 40));
        assert!(matches!(
            state,
            Err(ProtocolError::Truncated { got: 5, .. })
        ));
    }
}
