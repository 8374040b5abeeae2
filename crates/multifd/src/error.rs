//! Errors of a peer, with field and value.
#![allow(missing_docs, reason = "the messages say it")]

use thiserror::Error;

use crate::{
    INITIAL_LEN, MAGIC, MAX_CHANNELS, MAX_DEVICE_STATE_PAYLOAD, PACKET_BYTES, PACKET_BYTES_RANGE,
    VERSION, flags::KNOWN_FLAGS,
};

/// The first 64 bytes of a data channel are not those of a multifd channel.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum InitialError {
    /// Not a multifd channel at all.
    #[error(
        "magic of the channel's first {INITIAL_LEN} bytes is {found:#010x}, expected {MAGIC:#010x}"
    )]
    Magic { found: u32 },
    /// A format that does not exist yet.
    #[error("version of the channel's first {INITIAL_LEN} bytes is {found}, expected {VERSION}")]
    Version { found: u32 },
    #[error("channel id {channel} is not below the announced number of channels, {announced}")]
    ChannelId { channel: u8, announced: u8 },
    /// A builder was given a number of channels that no byte can count.
    #[error("{channels} channels cannot be announced, at most {MAX_CHANNELS} can")]
    Channels { channels: usize },
}

/// Sizes, in bytes, for which there is no multifd format.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayoutError {
    #[error("page size {page_size} is not a power of two from 1024 to {PACKET_BYTES}")]
    PageSize { page_size: u32 },
    #[error(
        "packet size {packet_bytes} is not a power of two from {} to {}, or less than a page of {page_size}",
        PACKET_BYTES_RANGE.start(),
        PACKET_BYTES_RANGE.end()
    )]
    PacketBytes { packet_bytes: u32, page_size: u32 },
}

/// A packet header that a correct peer cannot have sent. Numbers are those on the wire: lengths in bytes, an offset from
/// the start of the RAM block.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum PacketError {
    #[error(
        "packet magic is {found:#010x}, expected {MAGIC:#010x}: the stream is corrupt or out of step"
    )]
    Magic { found: u32 },
    /// A format that does not exist yet.
    #[error("packet version is {found}, expected {VERSION}")]
    Version { found: u32 },
    #[error("packet flags {flags:#x} hold unknown bits (known: {KNOWN_FLAGS:#x})")]
    UnknownFlags { flags: u32 },
    #[error("packet flags {flags:#x} do not name one compression method")]
    AmbiguousMethod { flags: u32 },
    /// Device state never carries a SYNC or a method.
    #[error("packet flags {flags:#x} mix device state with a SYNC or a compression method")]
    MixedDeviceState { flags: u32 },
    #[error(
        "normal_pages {normal} + zero_pages {zero} is beyond the offset table of {page_count} pages"
    )]
    Pages {
        normal: u32,
        zero: u32,
        page_count: usize,
    },
    /// A payload longer than any receiver's buffer.
    #[error("next_packet_size is {len} bytes, a packet's payload is at most {max}")]
    PayloadTooLong { len: u32, max: usize },
    #[error("next_packet_size is 0 in a packet with {normal} normal pages")]
    PayloadMissing { normal: u32 },
    #[error("next_packet_size is {len} bytes for {normal} uncompressed pages, expected {expected}")]
    RawPayload {
        len: u32,
        normal: u32,
        expected: usize,
    },
    #[error("offset[{index}] is {offset:#x}, not a multiple of the page size {page_size}")]
    Offset {
        index: usize,
        offset: u64,
        page_size: u32,
    },
    /// A RAM block name without an end, or without a beginning in a packet with pages.
    #[error("the RAM block name is {problem}")]
    BlockName { problem: &'static str },
    #[error(
        "next_packet_size of device state is {len} bytes, at most {MAX_DEVICE_STATE_PAYLOAD} are taken"
    )]
    DeviceStateTooLong { len: u32 },
    /// A header buffer of the wrong length: the caller's mistake, not the peer's.
    #[error("a header of {found} bytes was given where {expected} are needed")]
    HeaderLength { found: usize, expected: usize },
}
