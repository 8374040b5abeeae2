//! What a peer can get wrong, by field and value.

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
    Magic {
        /// The value on the wire.
        found: u32,
    },
    /// A format that does not exist yet.
    #[error("version of the channel's first {INITIAL_LEN} bytes is {found}, expected {VERSION}")]
    Version {
        /// The value on the wire.
        found: u32,
    },
    /// The announced number of channels contradicts the channel's own id.
    #[error("channel id {channel} is not below the announced number of channels, {announced}")]
    ChannelId {
        /// The channel's id.
        channel: u8,
        /// The number of channels that the peer announced.
        announced: u8,
    },
    /// A builder was given a number of channels that no byte can count.
    #[error("{channels} channels cannot be announced, at most {MAX_CHANNELS} can")]
    Channels {
        /// The number asked for.
        channels: usize,
    },
}

/// Sizes for which there is no multifd format.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayoutError {
    /// Of a page.
    #[error("page size {page_size} is not a power of two from 1024 to {PACKET_BYTES}")]
    PageSize {
        /// The size asked for, in bytes.
        page_size: u32,
    },
    /// Of a packet.
    #[error(
        "packet size {packet_bytes} is not a power of two from {} to {}, or less than a page of {page_size}",
        PACKET_BYTES_RANGE.start(),
        PACKET_BYTES_RANGE.end()
    )]
    PacketBytes {
        /// The size asked for, in bytes.
        packet_bytes: u32,
        /// The size of a page, in bytes.
        page_size: u32,
    },
}

/// A packet header that a correct peer cannot have sent.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum PacketError {
    /// The stream is out of step, or was never a multifd channel.
    #[error(
        "packet magic is {found:#010x}, expected {MAGIC:#010x}: the stream is corrupt or out of step"
    )]
    Magic {
        /// The value on the wire.
        found: u32,
    },
    /// A format that does not exist yet.
    #[error("packet version is {found}, expected {VERSION}")]
    Version {
        /// The value on the wire.
        found: u32,
    },
    /// Flag bits without a known meaning.
    #[error("packet flags {flags:#x} hold unknown bits (known: {KNOWN_FLAGS:#x})")]
    UnknownFlags {
        /// The whole flags field.
        flags: u32,
    },
    /// The method bits are those of no method, or of more than one.
    #[error("packet flags {flags:#x} do not name one compression method")]
    AmbiguousMethod {
        /// The whole flags field.
        flags: u32,
    },
    /// Device state never carries a SYNC or a method.
    #[error("packet flags {flags:#x} mix device state with a SYNC or a compression method")]
    MixedDeviceState {
        /// The whole flags field.
        flags: u32,
    },
    /// More normal pages than the offset table has room for.
    #[error("normal_pages is {normal}, beyond the offset table of {page_count} pages")]
    NormalPages {
        /// The value on the wire.
        normal: u32,
        /// The table's length in pages.
        page_count: usize,
    },
    /// Normal and zero pages together exceed the offset table.
    #[error(
        "normal_pages {normal} + zero_pages {zero} is beyond the offset table of {page_count} pages"
    )]
    ZeroPages {
        /// Number of normal pages on the wire.
        normal: u32,
        /// Number of zero pages on the wire.
        zero: u32,
        /// The table's length in pages.
        page_count: usize,
    },
    /// A payload longer than any receiver's buffer.
    #[error("next_packet_size is {len} bytes, a packet's payload is at most {max}")]
    PayloadTooLong {
        /// The value on the wire, bytes.
        len: u32,
        /// The largest payload, bytes.
        max: usize,
    },
    /// Normal pages without a byte of payload.
    #[error("next_packet_size is 0 in a packet with {normal} normal pages")]
    PayloadMissing {
        /// Number of normal pages.
        normal: u32,
    },
    /// Raw pages whose payload is not exactly as long as the pages.
    #[error("next_packet_size is {len} bytes for {normal} uncompressed pages, expected {expected}")]
    RawPayload {
        /// The value on the wire, bytes.
        len: u32,
        /// Number of normal pages.
        normal: u32,
        /// `normal` pages in bytes.
        expected: usize,
    },
    /// A page offset that is no multiple of the page size.
    #[error("offset[{index}] is {offset:#x}, not a multiple of the page size {page_size}")]
    Offset {
        /// Position in the offset table.
        index: usize,
        /// The value on the wire, bytes from the start of the RAM block.
        offset: u64,
        /// The configured page size, bytes.
        page_size: u32,
    },
    /// A RAM block name without an end, or without a beginning in a packet with pages.
    #[error("the RAM block name is {problem}")]
    BlockName {
        /// `empty`, `too long` or `not NUL-terminated`.
        problem: &'static str,
    },
    /// Device state larger than any device is known to send at once.
    #[error(
        "next_packet_size of device state is {len} bytes, at most {MAX_DEVICE_STATE_PAYLOAD} are taken"
    )]
    DeviceStateTooLong {
        /// The value on the wire, bytes.
        len: u32,
    },
    /// A header buffer of the wrong length: the caller's mistake, not the peer's.
    #[error("a header of {found} bytes was given where {expected} are needed")]
    HeaderLength {
        /// Bytes given.
        found: usize,
        /// Bytes needed.
        expected: usize,
    },
}
