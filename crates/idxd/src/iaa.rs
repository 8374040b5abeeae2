//! What IAA can do: a function per operation, and the rules that its descriptors follow.
//!
//! ```text
//!   one pass    AECS with fixed or canned codes ──► compress
//!   two passes  statistics ──► Histogram ──► AECS with codes of its own ──► compress
//!   back        decompress: any raw DEFLATE stream whose matches reach back 4 KiB at most
//!   canned      Header ──► load_codes ──► DecompressAecs ──► decompress_canned
//! ```
//! Compression is raw DEFLATE (RFC 1951), without a zlib or gzip wrapper. An AECS (analytics engine configuration and
//! state) is what compression reads its codes from, see [`CompressAecs`]. It is only read here, so one serves any
//! number of descriptors at a time.
//!
//! A canned stream, one without a block header, saves a page its header where both sides hold the same codes:
//!
//! ```
//! # use idxd::{Record, iaa::*};
//! # let (page, mut stream, mut back, record) = ([0_u8; 4096], [0_u8; 4095], [0_u8; 4096], Record::default());
//! let codes = Codes::of(&Histogram::new().covering());
//! let aecs = CompressAecs::canned(&codes);
//! let compression = compress(
//!     Compress {
//!         source: page.as_ptr() as u64,
//!         size: 4096,
//!         destination: stream.as_mut_ptr() as u64,
//!         destination_size: 4095,
//!         aecs: aecs.address(),
//!         end: End::Block,
//!     },
//!     record.address(),
//! );
//! // Once for any number of pages: the device turns the header into tables.
//! let (header, mut tables) = (codes.header(true), DecompressAecs::new());
//! let loading = load_codes(&header, tables.address(), record.address());
//! // When that has succeeded:
//! # let output_size = 0;
//! let decompression = decompress_canned(
//!     Decompress {
//!         source: stream.as_ptr() as u64,
//!         size: output_size,
//!         destination: back.as_mut_ptr() as u64,
//!         destination_size: 4096,
//!     },
//!     tables.address(),
//!     record.address(),
//! );
//! ```
//! [`offload`](crate::offload) does not use them: its streams are read by QEMU, which knows complete streams only, and
//! those it receives have their headers. Any inflate understands a canned stream with the header put in front of it
//! ([`Header::prepend`]). Nor does it go on where an output was full ([`decompress_piece`]): a page that is longer than
//! its place is an error there.
//!
//! Sources: IAA 2.1, 3.2 to 3.4, 3.10 and 6; `struct iax_hw_desc` of `linux/idxd.h`.

mod aecs;
mod decompress;
mod huffman;

pub use aecs::{CompressAecs, Histogram};
pub use decompress::DecompressAecs;
pub use huffman::{Code, Codes, DISTANCES, Header, LITERALS};

use crate::{
    Descriptor, Flags, Limits, opcode,
    operation::{Analyses, Bare, Operation, Produces},
    rules::{
        ADDRESS_1, ADDRESS_2, AecsSize, Aligned, Apart, NEEDS_RECORD, RECORD, Rules, SIZE, Size,
        TRAFFIC_1, TRAFFIC_2, TRAFFIC_3, span,
    },
    status::{IaaOutcome, IaaStatus},
};

/// Bytes of history that matches can reach back: a stream with a larger window cannot be decompressed.
pub const WINDOW: usize = 4096;

/// Does nothing but write its record: shows that a queue is alive.
pub const fn noop(record: u64) -> Operation<Bare> {
    Operation::new(opcode::NOOP, record, EMPTY)
}

/// Completes when all that this process gave the queue before has completed; of a dedicated queue, all that it has
/// (DSA 3.0, 3.12).
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

impl Decompress {
    /// What is left of the stream where the output was full, for another output of `destination_size` bytes; `None` if
    /// `outcome` says anything else.
    pub fn rest(
        self,
        outcome: &IaaOutcome,
        destination: u64,
        destination_size: u32,
    ) -> Option<Self> {
        if outcome.status != IaaStatus::OutputOverflow {
            return None;
        }
        Some(Self {
            source: self.source.checked_add(outcome.completed.into())?,
            size: self.size.checked_sub(outcome.completed)?,
            destination,
            destination_size,
        })
    }
}

/// Decompresses a whole stream in one go, up to the end of a block that is marked as the last, and fails if there is
/// none. What follows in the source is ignored. The record has the output's size, which is to be checked, and its CRC,
/// but not how much of the source was taken (IAA 2.1, 6.2.4).
pub const fn decompress(decompress: Decompress, record: u64) -> Operation<Produces> {
    inflate(decompress, WHOLE_STREAM, [0, 0], record)
}

/// Like [`decompress`], but goes on where the output is full: that is `piece` 0 of the stream, and after each
/// [`OutputOverflow`](IaaStatus::OutputOverflow) comes the next one, with the [rest](Decompress::rest) of it. What is
/// left of the input may be nothing.
///
/// `aecs` is the address of two [`DecompressAecs`], one after the other, which the device uses by turns. The record's
/// CRC is that of the output of all pieces so far.
pub const fn decompress_piece(
    decompress: Decompress,
    aecs: u64,
    piece: u32,
    record: u64,
) -> Operation<Produces> {
    let aecs = [aecs, DecompressAecs::SIZE as u64];
    let operation = inflate(decompress, WHOLE_STREAM, aecs, record).with(WRITE_AECS_ON_OVERFLOW);
    match piece {
        0 => operation,
        _ if piece.is_multiple_of(2) => operation.with(Flags::READ_AECS),
        _ => operation.with(Flags::READ_AECS.with(Flags::AECS_TOGGLE)),
    }
}

/// Makes tables of the codes that a block's `header` describes, for [`decompress_canned`], and writes them to the
/// [`DecompressAecs`] at `aecs`.
pub fn load_codes(header: &Header, aecs: u64, record: u64) -> Operation<Produces> {
    let bits = header.bits();
    let nothing = Decompress {
        source: header.bytes().as_ptr() as u64,
        size: bits.div_ceil(8).into(),
        destination: 0,
        destination_size: 0,
    };
    let ignored = (bits.next_multiple_of(8) - bits) << IGNORED_BITS;
    let aecs = [aecs, DecompressAecs::SIZE_WITHOUT_HISTORY.into()];
    inflate(nothing, SUPPRESS_OUTPUT | ignored, aecs, record)
        .with(Flags::WRITE_AECS.with(Flags::AECS_TOGGLE))
}

/// Decompresses a canned stream, the data of one block without its header, with the codes that were
/// [loaded](load_codes) into the [`DecompressAecs`] at `aecs`. It has to end with the end of the block.
pub const fn decompress_canned(
    decompress: Decompress,
    aecs: u64,
    record: u64,
) -> Operation<Produces> {
    let aecs = [aecs, DecompressAecs::SIZE_WITHOUT_HISTORY as u64];
    inflate(decompress, FLUSH | STOP_AT_END | CHECK_END, aecs, record).with(Flags::READ_AECS)
}

const fn inflate(
    decompress: Decompress,
    operation_flags: u16,
    [aecs, aecs_size]: [u64; 2],
    record: u64,
) -> Operation<Produces> {
    let descriptor = Descriptor {
        address_1: decompress.source,
        address_2: decompress.destination,
        size: decompress.size,
        operation_flags: ENABLE | operation_flags,
        operands: [
            aecs,
            decompress.destination_size as u64 | aecs_size << 32,
            0,
        ],
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
    /// Whether the CRC is of the reflected form: bytes are taken from their least significant bit on, and the CRC's
    /// bits stand the other way round, as in CRC-64/XZ (IAA 2.1, 3.10.3). The polynomial is the normal one in any case.
    pub reflected: bool,
}

/// CRC-64 of an area, into [the record](crate::status::IaaOutcome::crc64).
pub const fn crc64(crc: Crc64, record: u64) -> Operation<Analyses> {
    let inverted = if crc.inverted { INVERT_CRC } else { 0 };
    let order = if crc.reflected { REFLECT_CRC } else { 0 };
    let descriptor = Descriptor {
        address_1: crc.source,
        size: crc.size,
        operation_flags: inverted | order,
        operands: [0, 0, crc.polynomial],
        ..EMPTY
    };
    Operation::new(opcode::CRC64, record, descriptor)
}

/// What `descriptor` may hold, by its operation and flags, and what `limits` says of the device; `None` for an
/// operation that this crate does not know.
///
/// The operations are those of the first generation: no dictionary, no header by the device, no early end, no partial
/// AECS, no CRC of decompressed data (IAA 2.1, 7.2.2).
pub const fn rules(descriptor: &Descriptor, limits: &Limits) -> Option<Rules> {
    let is_statistics = descriptor.operation_flags & STATISTICS != 0;
    Some(match descriptor.opcode() {
        opcode::NOOP => Rules::nothing(RECORD),
        opcode::DRAIN => Rules::drain(descriptor, limits),
        opcode::COMPRESS if is_statistics => Rules {
            operation_flags: 0x01ff,
            second_flags: true,
            ..TRANSFERS
        },
        opcode::COMPRESS => Rules {
            flags: TRANSFERS.flags.with(AECS_FLAGS),
            needed: &[
                Flags::RECORD_VALID,
                Flags::RECORD_REQUESTED,
                Flags::READ_AECS,
            ],
            operation_flags: 0x01ff,
            second_flags: true,
            used: TRANSFERS.used | SECOND_SOURCE,
            aecs: Some(AecsSize {
                least: CompressAecs::SIZE,
                most: CompressAecs::SIZE,
            }),
            aligned: AECS,
            ..TRANSFERS
        },
        opcode::DECOMPRESS => decompress_rules(descriptor),
        opcode::CRC64 => Rules {
            needed: NEEDS_RECORD,
            operation_flags: INVERT_CRC | REFLECT_CRC,
            used: ADDRESS_1 | SIZE | span(56, 8),
            size: Size::Bytes,
            ..Rules::nothing(RECORD.with(Flags::BLOCK_ON_FAULT).with(TRAFFIC_1))
        },
        _ => return None,
    })
}

/// An AECS may be read, and written always or if the output does not fit; the rest of it only means something then. An
/// index takes the output's place (IAA 2.1, 6.3.2.1).
const fn decompress_rules(descriptor: &Descriptor) -> Rules {
    let flags = descriptor.flags();
    let is_suppressed = descriptor.operation_flags & SUPPRESS_OUTPUT != 0;
    let rules = Rules {
        operation_flags: if is_suppressed { 0x1fff } else { 0x03ff },
        needed_operation_flags: ENABLE,
        ..TRANSFERS
    };
    let may_write = if flags.has(Flags::WRITE_AECS) {
        Flags::WRITE_AECS
    } else {
        WRITE_AECS_ON_OVERFLOW
    };
    if flags.0 & (Flags::READ_AECS.0 | Flags::WRITE_AECS.0 | WRITE_AECS_ON_OVERFLOW.0) == 0 {
        return rules;
    }
    Rules {
        flags: rules
            .flags
            .with(Flags::READ_AECS)
            .with(may_write)
            .with(Flags::AECS_TOGGLE)
            .with(TRAFFIC_3),
        used: rules.used | SECOND_SOURCE,
        aecs: Some(AecsSize {
            least: 32,
            most: 64 << 10,
        }),
        aligned: AECS,
        ..rules
    }
}

/// Address and length of what an operation accesses of its AECS: both halves where one is read and the other written,
/// one otherwise, which the toggle selects (IAA 2.1, 3.2).
pub(crate) const fn aecs_area(descriptor: &Descriptor) -> (u64, u64) {
    let (address, size) = (descriptor.operands[0], descriptor.high(1) as u64);
    let flags = descriptor.flags();
    let reads = flags.has(Flags::READ_AECS);
    let writes = flags.0 & (Flags::WRITE_AECS.0 | WRITE_AECS_ON_OVERFLOW.0) != 0;
    if reads && writes {
        return (address, 2 * size);
    }
    // Without the toggle the first half is the one that is read.
    let is_first = reads != flags.has(Flags::AECS_TOGGLE);
    (
        if is_first {
            address
        } else {
            address.saturating_add(size)
        },
        size,
    )
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
const WHOLE_STREAM: u16 = FLUSH | STOP_AT_END | CHECK_END | END_OF_LAST_BLOCK;
/// Where the number of bits stands that are missing in the input's last byte.
const IGNORED_BITS: u16 = 6;
const SUPPRESS_OUTPUT: u16 = 1 << 9;
const INVERT_CRC: u16 = 1 << 14;
const REFLECT_CRC: u16 = 1 << 15;

/// The AECS is written if the output does not fit.
const WRITE_AECS_ON_OVERFLOW: Flags = Flags(1 << 19);
/// Compression reads an AECS, may write it, and toggles.
const AECS_FLAGS: Flags = Flags::READ_AECS
    .with(Flags::WRITE_AECS)
    .with(Flags::AECS_TOGGLE)
    .with(TRAFFIC_3);

/// From source to destination, without an AECS.
const TRANSFERS: Rules = Rules {
    needed: NEEDS_RECORD,
    // Source, destination, size, most bytes of output.
    used: ADDRESS_1 | ADDRESS_2 | SIZE | span(48, 4),
    size: Size::Input,
    apart: Apart::InputAndOutput,
    ..Rules::nothing(
        RECORD
            .with(Flags::BLOCK_ON_FAULT)
            .with(Flags::CACHE)
            .with(TRAFFIC_1)
            .with(TRAFFIC_2)
            .with(Flags::STRICT_ORDERING)
            .with(Flags::DESTINATION_READBACK)
            .with(Flags::CRC32C),
    )
};

/// Address and size of the AECS.
const SECOND_SOURCE: u64 = span(40, 8) | span(52, 4);

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
