//! Descriptors of IAA's operations.
//!
//! ```text
//!   compress     with the fixed codes, which an AECS has
//!   decompress   any raw DEFLATE stream whose matches reach back 4 KiB at most
//! ```
//! Compression is raw DEFLATE (RFC 1951), without a zlib or gzip wrapper. Compression reads its codes from an AECS
//! (analytics engine configuration and state), see [`CompressAecs`]. The device only reads the AECS, so one serves any
//! number of descriptors at a time.
//!
//! Sources: IAA 2.1, 3.2 to 3.4, 3.10 and 6; `struct iax_hw_desc` of `linux/idxd.h`.

mod aecs;

pub use aecs::CompressAecs;

use crate::{Descriptor, Flags, opcode};

/// Bytes of history that matches can reach back to: a stream with a larger window cannot be decompressed.
pub const WINDOW: usize = 4096;

/// Arguments of [`compress`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compress {
    /// Address of the input.
    pub source: u64,
    /// Bytes of the input.
    pub size: u32,
    /// Address of the output, which must not overlap with the input.
    pub destination: u64,
    /// Most bytes of output.
    pub destination_size: u32,
    /// Address of a [`CompressAecs`].
    pub aecs: u64,
}

/// Compresses into one block, with the codes of the AECS. The record has the output's size.
/// Output that does not fit is [an error](crate::status::IaaOutcome::does_not_fit).
pub const fn compress(compress: Compress, record: u64) -> Descriptor {
    Descriptor {
        address_1: compress.source,
        address_2: compress.destination,
        size: compress.size,
        operation_flags: FLUSH | END_OF_BLOCK,
        operands: [
            compress.aecs,
            pair(compress.destination_size, CompressAecs::SIZE),
            0,
        ],
        ..Descriptor::new(opcode::COMPRESS, record)
    }
    .with(Flags::READ_AECS)
}

/// Arguments of [`decompress`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decompress {
    /// Address of a whole stream of raw DEFLATE.
    pub source: u64,
    /// Bytes of the stream.
    pub size: u32,
    /// Address of the output, which must not overlap with the input.
    pub destination: u64,
    /// Most bytes of output.
    pub destination_size: u32,
}

/// Decompresses a whole stream, up to the end of a block that is marked as the last, and fails if there is none. The
/// device ignores what follows in the source. The record has the output's size, which is to be checked,
/// but not how much of the source was read (IAA 2.1, 6.2.4).
pub const fn decompress(decompress: Decompress, record: u64) -> Descriptor {
    Descriptor {
        address_1: decompress.source,
        address_2: decompress.destination,
        size: decompress.size,
        operation_flags: ENABLE | FLUSH | STOP_AT_END | CHECK_END | END_OF_LAST_BLOCK,
        operands: [0, pair(decompress.destination_size, 0), 0],
        ..Descriptor::new(opcode::DECOMPRESS, record)
    }
}

/// Most bytes of output (offset 48) and bytes of the second source (52) in one operand.
const fn pair(destination_size: u32, aecs_size: u32) -> u64 {
    destination_size as u64 | (aecs_size as u64) << 32
}

// Flags of compression and decompression (offset 38).
const ENABLE: u16 = 1 << 0;
const FLUSH: u16 = 1 << 1;
/// Of compression: ends the block after the data.
const END_OF_BLOCK: u16 = 1 << 2;
const STOP_AT_END: u16 = 1 << 2;
const CHECK_END: u16 = 1 << 3;
const END_OF_LAST_BLOCK: u16 = 1 << 4;
