//! What IAA can do: a function per operation, and the rules that its descriptors follow.
//!
//! ```text
//!   one pass    AECS with fixed or canned codes ──► compress
//!   two passes  statistics ──► Histogram ──► AECS with codes of its own ──► compress
//!   back        decompress: any raw DEFLATE stream whose matches reach back 4 KiB at most
//! ```
//! Compression is raw DEFLATE (RFC 1951), without a zlib or gzip wrapper. An AECS (analytics engine configuration and
//! state) is what compression reads its codes from, see [`CompressAecs`]. It is only read here, so one serves any
//! number of descriptors at a time.
//!
//! A canned stream, one without a block header, is decoded by putting the header in front of it
//! ([`Header::prepend`]), which any inflate then understands. That the device could do so with an AECS of decoder
//! tables is left out: their layout differs between generations and is not published.
//!
//! Sources: `struct iax_hw_desc` of `linux/idxd.h`; flags of the operations, sizes and alignments: Intel's QPL.

mod aecs;
mod huffman;

pub use aecs::{CompressAecs, Histogram};
pub use huffman::{Code, Codes, DISTANCES, Header, LITERALS};

use crate::{
    Descriptor, Flags, opcode,
    operation::{Analyses, Bare, Operation, Produces},
    rules::{Aligned, Apart, Rules, Size, span},
};

/// Bytes of history that matches can reach back: a stream with a larger window cannot be decompressed.
pub const WINDOW: usize = 4096;

/// Does nothing but write its record: shows that a queue is alive.
pub const fn noop(record: u64) -> Operation<Bare> {
    Operation::new(opcode::NOOP, record, EMPTY)
}

/// Completes when all that this process gave the queue before has completed.
pub const fn drain(record: u64) -> Operation<Bare> {
    Operation::new(opcode::DRAIN, record, EMPTY)
}

/// What is to be compressed; see [`compress`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compress {
    /// The input.
    pub source: u64,
    /// Its bytes.
    pub size: u32,
    /// Where the output goes; it does not overlap with the input.
    pub destination: u64,
    /// Most bytes of output.
    pub destination_size: u32,
    /// Address of a [`CompressAecs`].
    pub aecs: u64,
    /// What is written after the data.
    pub end: End,
}

/// What compression writes after the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// End of block. The stream is complete if the AECS's header marked the block as the last.
    Block = 1,
    /// End of block and an empty stored block that is not the last: aligned to bytes, more can follow.
    EmptyStored = 2,
    /// End of block and an empty stored block that is the last, where the header did not mark it.
    FinalStored = 3,
}

/// Compresses in one go, with the codes of the AECS. The record has the output's size, and the CRC of the input.
/// Output that does not fit is [an error](crate::status::IaaOutcome::does_not_fit).
pub const fn compress(compress: Compress, record: u64) -> Operation<Produces> {
    let descriptor = Descriptor {
        address_1: compress.source,
        address_2: compress.destination,
        size: compress.size,
        operation_flags: FLUSH | (compress.end as u16) << 2,
        operands: [
            compress.aecs,
            pair(compress.destination_size, CompressAecs::SIZE),
            0,
        ],
        ..EMPTY
    };
    Operation::new(opcode::COMPRESS, record, descriptor).with(Flags::READ_AECS)
}

/// Counts which literals, lengths and distances compression of `size` bytes would use, and writes a [`Histogram`].
pub const fn statistics(
    source: u64,
    size: u32,
    histogram: u64,
    record: u64,
) -> Operation<Produces> {
    let descriptor = Descriptor {
        address_1: source,
        address_2: histogram,
        size,
        operation_flags: STATISTICS,
        operands: [0, pair(Histogram::SIZE, 0), 0],
        ..EMPTY
    };
    Operation::new(opcode::COMPRESS, record, descriptor)
}

/// What is to be decompressed; see [`decompress`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decompress {
    /// A whole stream of raw DEFLATE.
    pub source: u64,
    /// Its bytes.
    pub size: u32,
    /// Where the output goes; it does not overlap with the input.
    pub destination: u64,
    /// Most bytes of output.
    pub destination_size: u32,
}

/// Decompresses a whole stream in one go: it has to end with the end of a block marked as the last. The record
/// has the output's size, which is to be checked, and its CRC.
pub const fn decompress(decompress: Decompress, record: u64) -> Operation<Produces> {
    let descriptor = Descriptor {
        address_1: decompress.source,
        address_2: decompress.destination,
        size: decompress.size,
        operation_flags: ENABLE | FLUSH | STOP_AT_END | CHECK_END | END_OF_LAST_BLOCK,
        operands: [0, pair(decompress.destination_size, 0), 0],
        ..EMPTY
    };
    Operation::new(opcode::DECOMPRESS, record, descriptor)
}

/// Which CRC is wanted; see [`crc64`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crc64 {
    /// The data.
    pub source: u64,
    /// Its bytes.
    pub size: u32,
    /// The polynomial.
    pub polynomial: u64,
    /// Whether the CRC begins with ones and ends inverted.
    pub inverted: bool,
    /// Whether bytes are taken from their most significant bit on.
    pub most_significant_first: bool,
}

/// CRC-64 of an area, into [the record](crate::status::IaaOutcome::crc64).
pub const fn crc64(crc: Crc64, record: u64) -> Operation<Analyses> {
    let inverted = if crc.inverted { INVERT_CRC } else { 0 };
    let order = if crc.most_significant_first {
        CRC_BIG_ENDIAN
    } else {
        0
    };
    let descriptor = Descriptor {
        address_1: crc.source,
        size: crc.size,
        operation_flags: inverted | order,
        operands: [0, 0, crc.polynomial],
        ..EMPTY
    };
    Operation::new(opcode::CRC64, record, descriptor)
}

/// What a descriptor of `opcode` may hold; `None` for an operation that this crate does not know.
///
/// The flags of (de)compression are those of the first generation: no dictionary and no header by the device. Which
/// of the flags that DSA has too are allowed is assumed.
pub const fn rules(opcode: u8) -> Option<Rules> {
    Some(match opcode {
        opcode::NOOP | opcode::DRAIN => NOTHING,
        opcode::COMPRESS => Rules {
            flags: TRANSFER_FLAGS,
            operation_flags: 0x01ff,
            used: TRANSFER,
            size: Size::Bytes,
            apart: Apart::InputAndOutput,
            aligned: AECS,
            ..NOTHING
        },
        opcode::DECOMPRESS => Rules {
            flags: TRANSFER_FLAGS,
            operation_flags: 0x5fff,
            used: TRANSFER,
            size: Size::Bytes,
            apart: Apart::InputAndOutput,
            aligned: AECS,
            ..NOTHING
        },
        opcode::CRC64 => Rules {
            flags: COMMON_FLAGS.with(Flags::BLOCK_ON_FAULT),
            operation_flags: INVERT_CRC | CRC_BIG_ENDIAN,
            used: span(16, 8) | span(32, 4) | span(56, 8),
            size: Size::Bytes,
            ..NOTHING
        },
        _ => return None,
    })
}

const EMPTY: Descriptor = Descriptor {
    pasid: 0,
    control: 0,
    record: 0,
    address_1: 0,
    address_2: 0,
    size: 0,
    interrupt: 0,
    operation_flags: 0,
    operands: [0; 3],
};

/// Most bytes of output (offset 48) and bytes of the second source (52) in one operand.
const fn pair(destination_size: u32, aecs_size: u32) -> u64 {
    destination_size as u64 | (aecs_size as u64) << 32
}

// Flags of compression and decompression (offset 38).
const STATISTICS: u16 = 1 << 0;
const ENABLE: u16 = 1 << 0;
const FLUSH: u16 = 1 << 1;
const STOP_AT_END: u16 = 1 << 2;
const CHECK_END: u16 = 1 << 3;
const END_OF_LAST_BLOCK: u16 = 1 << 4;
const INVERT_CRC: u16 = 1 << 14;
const CRC_BIG_ENDIAN: u16 = 1 << 15;

/// Record, interrupt, and the record's steering tag and traffic class.
const COMMON_FLAGS: Flags = Flags::RECORD_VALID
    .with(Flags::RECORD_REQUESTED)
    .with(Flags::INTERRUPT)
    .with(Flags(1 << 5))
    .with(Flags(0b1111 << 9));
/// Page faults and cache; all that concerns the AECS; which CRC.
const TRANSFER_FLAGS: Flags = COMMON_FLAGS
    .with(Flags::BLOCK_ON_FAULT)
    .with(Flags::CACHE)
    .with(Flags::STRICT_ORDERING)
    .with(Flags::DESTINATION_READBACK)
    .with(Flags(1 << 15))
    .with(Flags::READ_AECS)
    .with(Flags(0b11 << 18))
    .with(Flags(1 << 20))
    .with(Flags::CRC32C)
    .with(Flags::AECS_TOGGLE);

/// Source, destination, size, AECS, most bytes of output, bytes of the AECS.
const TRANSFER: u64 = span(16, 20) | span(40, 16);

const AECS: &[Aligned] = &[
    Aligned {
        byte: 40,
        multiple: 32,
    },
    Aligned {
        byte: 52,
        multiple: 32,
    },
];

const NOTHING: Rules = Rules::nothing(COMMON_FLAGS);
