//! The live engine's part of [`handover`]'s protocol: the first bytes of connections, and a description of the guest.
//!
//! There is one **control** connection, and one connection per **channel**, which carries multifd packets. All are streams of
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
//!     ── state part (length), the part ──────────────────────────────>  any number of them, after any round
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
//! In a post-copy the guest switches over before all of its memory is there. The device state begins with the pages that are missing
//! at the destination, and nothing has the guest before `commit`, as ever. The pages follow it on further streams, that are opened
//! before the state is sent: one for pages on demand, and one in the background for each channel.
//!
//! ```text
//!  pauses the guest
//!     ══ last SYNC ═════════════════════════════════════════════════>   all channels end
//!     ── state (length), the missing pages, the state ──────────────>
//!     <───────────────────────────────────────────────────── loaded ──  who touches a missing page waits for it
//!     ── commit ── … ── settled ────────────────────────────────────>   as above: the guest runs there
//!     <─────────────────────────────────────────── demand: a page ───  touched, and missing
//!     ══ demand: that page ═════════════════════════════════════════>
//!     ══ background: all missing pages ══ SYNC ══ last SYNC ════════>
//!     <────────────────────────────────────────── demand: complete ──  nothing is missing
//! ```
//!
//! A failure behind `commit` never gives the guest back: it has run at the destination, and its memory is in two parts.
//!
//! Because the source waits for `synced` before it continues, no page of a round can overtake a page of the
//! previous round on another channel.
//!
//! # Where the guest is
//! [`handover::Source`] and [`handover::Destination`] decide that; crate `handover` documents how, and why two
//! guests never run. Before `commit`, every failure leaves the guest at the source. If a connection is lost after `commit`, the
//! source dials again with the id of the same attempt, until it is answered or the settle time is over. The
//! destination waits for `commit` for the settle time, and answers for a while longer. It answers for failed attempts
//! as long as it lives. Neither side keeps a journal: the guest ends with its process, so no other
//! process could continue.
//!
//! # Versions
//! [`handover`] negotiates them.

use std::time::Duration;

use handover::{AttemptId, ConnectionKind, PREAMBLE_LEN, PREAMBLE_MAGIC, Preamble};
use multifd::{INITIAL_LEN, Initial, InitialError, Layout, MAGIC};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use vamoose_link::{Conversation, ConversationError, millis};

use crate::{Ram, SourceConfig, dirty::Bitmap, error::Mismatch, source::CHANNELS};

/// Number of the SYNC that ends a channel.
pub const LAST_SYNC: u64 = u64::MAX;

/// Purpose of a connection, determined by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A control connection of this attempt.
    Control(AttemptId),
    /// A channel; its uuid is the attempt's id.
    Channel(Initial),
}

impl Purpose {
    /// Reads the first bytes of a connection, and nothing behind them.
    ///
    /// # Errors
    /// When the connection breaks, or belongs to another protocol.
    pub fn read(connection: &mut Conversation) -> Result<Self, UnknownConnection> {
        const MAGIC_LEN: usize = 4;
        let mut bytes = connection.receive_bytes(MAGIC_LEN)?;
        let is_channel = bytes == MAGIC.to_be_bytes();
        let len = match is_channel {
            true => INITIAL_LEN,
            false if PREAMBLE_MAGIC.starts_with(&bytes) => PREAMBLE_LEN,
            false => MAGIC_LEN,
        };
        bytes.extend(connection.receive_bytes(len - MAGIC_LEN)?);
        if let (true, Some(initial)) = (is_channel, bytes.first_chunk()) {
            return Ok(Self::Channel(Initial::parse(initial)?));
        }
        match bytes.first_chunk().and_then(Preamble::parse) {
            Some(Preamble {
                kind: ConnectionKind::Control,
                attempt,
            }) => Ok(Self::Control(attempt)),
            _ if bytes.starts_with(&TLS) || bytes.starts_with(b"VAMOOSE\x01") => {
                Err(UnknownConnection::Session)
            }
            _ => Err(UnknownConnection::Foreign(bytes)),
        }
    }
}

/// A connection that is not one of a live migration.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum UnknownConnection {
    #[error(transparent)]
    Conversation(#[from] ConversationError),
    #[error("it is one of a session, and this destination takes plain connections")]
    Session,
    #[error("it begins with {0:02x?}, which is not a live migration")]
    Foreign(Vec<u8>),
    #[error("malformed initial packet of a channel")]
    Channel(#[from] InitialError),
}

/// The first bytes of a client that speaks TLS.
const TLS: [u8; 2] = [0x16, 0x03];

/// The first bytes of a control connection.
pub(crate) fn control_preamble(attempt: AttemptId) -> [u8; PREAMBLE_LEN] {
    let kind = ConnectionKind::Control;
    Preamble { kind, attempt }.to_bytes()
}

/// A source's fields in `prepare`: its guest, and how the guest will be sent.
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
    /// Pages may follow the guest: the device state begins with the pages that are missing.
    #[serde(default)]
    pub post_copy: bool,
    /// What [`SourceGuest::describe`](crate::SourceGuest::describe) has returned.
    #[serde(default)]
    pub description: Vec<u8>,
}

/// A RAM block that both sides must have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockShape {
    /// Its name.
    pub name: String,
    /// Its length in bytes.
    pub len: u64,
}

impl PrepareDetails {
    pub(crate) fn new(
        ram: &Ram,
        layout: Layout,
        config: &SourceConfig,
        description: Vec<u8>,
    ) -> Self {
        let number = |value| u32::try_from(value).unwrap_or(u32::MAX);
        Self {
            blocks: block_shapes(ram),
            page_size: number(layout.page_size()),
            packet_bytes: number(layout.packet_bytes()),
            channels: config.channels,
            settle_ms: millis(config.settle_time),
            post_copy: config.post_copy,
            description,
        }
    }

    /// Checks that the source's guest can run in `ram`; returns the layout of its packets, and the index in `ram` of each block.
    pub(crate) fn check(&self, ram: &Ram) -> Result<(Layout, Vec<usize>), Mismatch> {
        if !CHANNELS.contains(&self.channels) {
            return Err(Mismatch::Channels(self.channels));
        }
        let blocks = check_shape(&self.blocks, self.page_size, ram)?;
        let layout = Layout::new(self.page_size)?.with_packet_bytes(self.packet_bytes)?;
        Ok((layout, blocks))
    }

    /// How many streams of pages there may be.
    pub(crate) fn page_streams(&self) -> u8 {
        page_streams(self.channels, self.post_copy)
    }

    pub(crate) fn settle_time(&self) -> Duration {
        Duration::from_millis(self.settle_ms)
    }
}

/// Checks that `ram` has these RAM blocks, in pages of `theirs` bytes; returns the index in it of each.
pub(crate) fn check_shape(
    blocks: &[BlockShape],
    theirs: u32,
    ram: &Ram,
) -> Result<Vec<usize>, Mismatch> {
    let ours = ram.page_size();
    if theirs as usize != ours {
        return Err(Mismatch::PageSize { theirs, ours });
    }
    let names: Vec<_> = ram
        .blocks()
        .iter()
        .map(|block| block.name().to_string())
        .collect();
    for (block, name) in ram.blocks().iter().zip(&names) {
        let (name, ours) = (name.clone(), block.len() as u64);
        let mut same_name = blocks.iter().filter(|theirs| theirs.name == name);
        match (same_name.next().map(|theirs| theirs.len), same_name.next()) {
            (Some(theirs), None) if theirs == ours => {}
            (Some(theirs), None) => return Err(Mismatch::BlockLen { name, theirs, ours }),
            (None, _) => return Err(Mismatch::BlockMissing(name)),
            (_, Some(_)) => return Err(Mismatch::BlockTwice(name)),
        }
    }
    let index = |theirs: &BlockShape| {
        let known = names.iter().position(|name| *name == theirs.name);
        known.ok_or_else(|| Mismatch::BlockUnknown(theirs.name.clone()))
    };
    blocks.iter().map(index).collect()
}

/// The RAM blocks of `ram`.
pub(crate) fn block_shapes(ram: &Ram) -> Vec<BlockShape> {
    let blocks = ram.blocks().iter().map(|block| BlockShape {
        name: block.name().to_string(),
        len: block.len() as u64,
    });
    blocks.collect()
}

/// How many streams of pages a migration has, numbered from 0: the channels, and for post-copy as many in the background and one
/// for pages on demand, which is the last.
pub(crate) fn page_streams(channels: u8, post_copy: bool) -> u8 {
    match post_copy {
        true => channels.saturating_mul(2).saturating_add(1),
        false => channels,
    }
}

/// What a destination sends on the stream of pages on demand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "want", rename_all = "kebab-case")]
pub enum Request {
    /// This page, now.
    Page {
        /// Index of the RAM block, as in `prepare`.
        block: usize,
        /// Number of the page in the block.
        page: usize,
    },
    /// Nothing: all pages are there.
    Complete,
}

/// The pages that are missing, as they precede the device state: the length, and a bit for each page of each block.
pub(crate) fn missing_bytes(missing: &[Bitmap]) -> Vec<u8> {
    let words = missing.iter().flat_map(Bitmap::words);
    let bitmap = words.flat_map(|word| word.to_le_bytes());
    let len: usize = missing.iter().map(|bitmap| bitmap.words().len() * 8).sum();
    let mut bytes = (len as u64).to_be_bytes().to_vec();
    bytes.extend(bitmap);
    bytes
}

/// Splits what [`missing_bytes`] precedes: the missing pages, if pages are to follow the guest, and the device state. The source's
/// blocks are those of `ram` in the order `blocks`. `None` if this is not what `ram` can have.
pub(crate) fn split_missing(
    ram: &Ram,
    blocks: &[usize],
    bytes: &[u8],
) -> Option<(Option<Vec<Bitmap>>, Vec<u8>)> {
    let (len, bytes) = bytes.split_first_chunk()?;
    let len = usize::try_from(u64::from_be_bytes(*len)).ok()?;
    let (mut bitmap, state) = bytes.split_at_checked(len)?;
    if len == 0 {
        return Some((None, state.to_vec()));
    }
    let mut missing = Bitmap::for_blocks(ram);
    for block in blocks {
        let block = missing.get_mut(*block)?;
        for word in block.words_mut() {
            let (first, rest) = bitmap.split_first_chunk()?;
            (*word, bitmap) = (u64::from_le_bytes(*first), rest);
        }
        block.trim();
    }
    bitmap.is_empty().then(|| (Some(missing), state.to_vec()))
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixStream, sync::Arc};

    use handover::{Prepare, SourceMessage, encode, from_details, to_details};
    use proptest::{collection::vec, prelude::*};
    use vamoose_link::Stream;

    use super::*;

    /// What a peer that sends `bytes` and closes is understood as.
    fn received<T>(bytes: &[u8], read: impl FnOnce(&mut Conversation) -> T) -> T {
        let (ours, theirs) = UnixStream::pair().unwrap();
        Stream::from(theirs).write_both(bytes, &[]).unwrap();
        read(&mut Conversation::new(Arc::new(Stream::from(ours))))
    }

    fn purpose(bytes: &[u8]) -> Result<Purpose, UnknownConnection> {
        received(bytes, Purpose::read)
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
            any::<bool>(),
            any::<Vec<u8>>(),
        )
            .prop_map(
                |(blocks, page_size, packet_bytes, channels, settle_ms, post_copy, description)| {
                    PrepareDetails {
                        blocks,
                        page_size,
                        packet_bytes,
                        channels,
                        settle_ms,
                        post_copy,
                        description,
                    }
                },
            )
    }

    proptest! {
        #[test]
        fn details_arrive(sent in details()) {
            let prepare = SourceMessage::Prepare(Prepare::new(to_details(&sent).unwrap()));
            let bytes = encode(&prepare).unwrap();
            let message = received(&bytes, Conversation::receive).unwrap();
            let SourceMessage::Prepare(prepare) = message else {
                panic!("not understood");
            };
            prop_assert_eq!(from_details::<PrepareDetails>(prepare.details).unwrap(), sent);
        }

        #[test]
        fn missing_pages_arrive_before_the_state(
            pages in vec(vec(0..300_usize, 0..40), 2),
            state in vec(any::<u8>(), 0..40),
            cut in any::<usize>(),
            is_turned in any::<bool>(),
        ) {
            let ram = crate::test_ram::blocks([300 * 4096, 64 * 4096].into_iter());
            let mut missing = Bitmap::for_blocks(&ram);
            for (bitmap, pages) in missing.iter_mut().zip(&pages) {
                pages.iter().for_each(|page| bitmap.set(*page));
            }
            let order = if is_turned { [1, 0] } else { [0, 1] };
            let mut bytes = missing_bytes(&order.map(|block| missing[block].clone()));
            let without_state = bytes.len();
            bytes.extend(&state);
            prop_assert_eq!(split_missing(&ram, &order, &bytes), Some((Some(missing), state)));
            prop_assert_eq!(split_missing(&ram, &order, &bytes[..cut % without_state]), None);
        }

        #[test]
        fn any_bytes_have_a_purpose_or_none(bytes in vec(any::<u8>(), 0..200)) {
            let _ = purpose(&bytes);
        }
    }

    #[test]
    fn connections_are_told_apart() {
        let id = AttemptId([7; 16]);
        let control = control_preamble(id);
        assert_eq!(purpose(&control).unwrap(), Purpose::Control(id));
        let initial = Initial::new(id.0, 2, 3).unwrap();
        let channel = purpose(&initial.to_bytes()).unwrap();
        assert_eq!(channel, Purpose::Channel(initial));
        let data = Preamble {
            kind: ConnectionKind::Data,
            attempt: id,
        };
        for other in [&b"GET / HTTP/1.1\r\n"[..], b"VAMP", &data.to_bytes()] {
            let foreign = purpose(other);
            assert!(matches!(foreign, Err(UnknownConnection::Foreign(_))));
        }
        let cut = purpose(&control[..20]).unwrap_err();
        assert_eq!(cut.to_string(), "the connection ended after 16 of 20 bytes");
    }
}
