//! What DSA can do: a function per operation, and the rules that its descriptors follow.
//!
//! ```
//! # use idxd::{Record, dsa};
//! # let (page, record) = ([0_u8; 4096], Record::default());
//! // Is this page all zeros? The record's result shows it.
//! let descriptor = dsa::compare_pattern(page.as_ptr() as u64, 4096, 0, record.address())
//!     .blocking_on_fault(false)
//!     .descriptor();
//! ```
//! Addresses are this process's, sizes bytes; `record` is the address of a [`Record`](crate::Record). Source of the
//! layouts: `struct dsa_hw_desc` of `linux/idxd.h`.

use crate::{
    Descriptor, Flags, opcode,
    operation::{Bare, Nothing, Operation, Reads, Writes},
    rules::{Aligned, Apart, DeltaSize, Rules, Size, span},
};

/// Does nothing but write its record: shows that a queue is alive.
pub const fn noop(record: u64) -> Operation<Nothing> {
    Operation::new(opcode::NOOP, record, EMPTY)
}

/// Does the `count` descriptors at `list`, side by side unless they are fenced. At least two, at most the queue's
/// [`max_batch`](crate::Limits::max_batch); `list` is a multiple of 64. No batch and no drain may be among them.
/// The list is read some time after submission.
pub const fn batch(list: u64, count: u32, record: u64) -> Operation<Bare> {
    let descriptor = Descriptor {
        address_1: list,
        size: count,
        ..EMPTY
    };
    Operation::new(opcode::BATCH, record, descriptor)
}

/// Completes when all that this process gave the queue before has completed. Not in a batch.
pub const fn drain(record: u64) -> Operation<Bare> {
    Operation::new(opcode::DRAIN, record, EMPTY)
}

/// Copies. The areas may overlap, if the device's capabilities allow it (GENCAP bit 1): then the record's
/// result is from which end a copy that ended with a page fault had begun.
pub const fn memmove(source: u64, destination: u64, size: u32, record: u64) -> Operation<Writes> {
    Operation::new(opcode::MEMMOVE, record, transfer(source, destination, size))
}

/// Fills `destination` with the little-endian bytes of `pattern`, again and again.
pub const fn fill(pattern: u64, destination: u64, size: u32, record: u64) -> Operation<Writes> {
    Operation::new(opcode::FILL, record, transfer(pattern, destination, size))
}

/// Compares two areas. The record's result is 0 if they are equal and 1 if not; both are success.
pub const fn compare(first: u64, second: u64, size: u32, record: u64) -> Operation<Reads> {
    Operation::new(opcode::COMPARE, record, transfer(first, second, size))
}

/// Compares an area with the little-endian bytes of `pattern`, again and again. The result is as that of
/// [`compare`]. With a pattern of zero this finds zero pages.
pub const fn compare_pattern(
    source: u64,
    size: u32,
    pattern: u64,
    record: u64,
) -> Operation<Reads> {
    Operation::new(
        opcode::COMPARE_PATTERN,
        record,
        transfer(source, pattern, size),
    )
}

/// CRC-32C of an area, into the record. With a seed of zero that is the usual CRC-32C, and the result of one piece is
/// the seed of the next: the device inverts both (assumed, after SPDK's `lib/idxd`, whose raw CRC is the complement).
pub const fn crc(source: u64, size: u32, seed: u32, record: u64) -> Operation<Reads> {
    let descriptor = Descriptor {
        operands: [seed as u64, 0, 0],
        ..transfer(source, 0, size)
    };
    Operation::new(opcode::CRC, record, descriptor)
}

/// A copy whose CRC-32C goes into the record; see [`copy_crc`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyCrc {
    /// From where.
    pub source: u64,
    /// To where; the areas do not overlap.
    pub destination: u64,
    /// Bytes.
    pub size: u32,
    /// As for [`crc`].
    pub seed: u32,
}

/// Copies, and computes the CRC-32C of what it copied.
pub const fn copy_crc(copy: CopyCrc, record: u64) -> Operation<Writes> {
    let descriptor = Descriptor {
        operands: [copy.seed as u64, 0, 0],
        ..transfer(copy.source, copy.destination, copy.size)
    };
    Operation::new(opcode::COPY_CRC, record, descriptor)
}

/// Which difference is wanted; see [`create_delta`]. All addresses are multiples of 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreateDelta {
    /// What it was.
    pub original: u64,
    /// What it is.
    pub modified: u64,
    /// Bytes of either: a multiple of 8, at most 512 KiB.
    pub size: u32,
    /// Where the delta record goes.
    pub delta: u64,
    /// Most bytes of the delta record: a multiple of 10, at least 80.
    pub max_delta_size: u32,
}

/// Writes the difference of two areas: for each 8-byte word that differs 10 bytes, its index (16 bits) and its new
/// content. The record's result is 0 if they are equal, 1 if there is a delta, 2 if it does not fit (assumed), and
/// the record has the delta's size.
pub const fn create_delta(difference: CreateDelta, record: u64) -> Operation<Writes> {
    let descriptor = Descriptor {
        operands: [difference.delta, difference.max_delta_size as u64, 0],
        ..transfer(difference.original, difference.modified, difference.size)
    };
    Operation::new(opcode::CREATE_DELTA, record, descriptor)
}

/// Which difference is to be applied; see [`apply_delta`]. Addresses are multiples of 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ApplyDelta {
    /// The delta record.
    pub delta: u64,
    /// Its bytes: a multiple of 10, not zero.
    pub delta_size: u32,
    /// What it is applied to; it does not overlap with the delta.
    pub destination: u64,
    /// Bytes of the destination: a multiple of 8, at most 512 KiB.
    pub size: u32,
}

/// Makes of an original, in place, what it was compared with when the delta was created.
pub const fn apply_delta(difference: ApplyDelta, record: u64) -> Operation<Writes> {
    let descriptor = Descriptor {
        operands: [difference.delta_size as u64, 0, 0],
        ..transfer(difference.delta, difference.destination, difference.size)
    };
    Operation::new(opcode::APPLY_DELTA, record, descriptor)
}

/// What a descriptor of `opcode` may hold; `None` for an operation that this crate does not know.
///
/// The flags are those of the masks in Intel's DML. That traffic classes follow the addresses an operation has is
/// assumed.
pub const fn rules(opcode: u8) -> Option<Rules> {
    Some(match opcode {
        opcode::NOOP => Rules {
            flags: RECORD.with(Flags::FENCE),
            in_batch: true,
            ..NOTHING
        },
        opcode::BATCH => Rules {
            flags: RECORD.with(TRAFFIC_1),
            used: ADDRESS_1 | SIZE,
            size: Size::Descriptors,
            aligned: &[Aligned {
                byte: 16,
                multiple: 64,
            }],
            ..NOTHING
        },
        // The addresses are read back, where the device can (GENCAP bit 9).
        opcode::DRAIN => Rules {
            flags: RECORD.with(TRAFFIC_1).with(TRAFFIC_2),
            used: ADDRESS_1 | ADDRESS_2,
            ..NOTHING
        },
        opcode::MEMMOVE | opcode::FILL => TRANSFERS,
        opcode::COMPARE | opcode::COMPARE_PATTERN => Rules {
            flags: READ_FLAGS.with(TRAFFIC_2).with(Flags::CHECK_RESULT),
            expected_result: Some(40),
            ..TRANSFERS
        },
        opcode::CREATE_DELTA => Rules {
            flags: WRITE_FLAGS.with(TRAFFIC_3).with(Flags::CHECK_RESULT),
            used: TRANSFER | span(40, 12),
            expected_result: Some(56),
            size: Size::Words,
            delta_size: Some(DeltaSize {
                operand: 1,
                least: 80,
            }),
            aligned: &[WORD_1, WORD_2, WORD_3],
            ..TRANSFERS
        },
        opcode::APPLY_DELTA => Rules {
            used: TRANSFER | span(40, 4),
            size: Size::Words,
            delta_size: Some(DeltaSize {
                operand: 0,
                least: 10,
            }),
            apart: Apart::DeltaAndDestination,
            aligned: &[WORD_1, WORD_2],
            ..TRANSFERS
        },
        opcode::CRC => Rules {
            flags: READ_FLAGS.with(TRAFFIC_3).with(CRC_FLAGS),
            used: ADDRESS_1 | SIZE | SEED,
            ..TRANSFERS
        },
        opcode::COPY_CRC => Rules {
            flags: WRITE_FLAGS.with(TRAFFIC_3).with(CRC_FLAGS),
            used: TRANSFER | SEED,
            apart: Apart::SourceAndDestination,
            ..TRANSFERS
        },
        _ => return None,
    })
}

const EMPTY: Descriptor = transfer(0, 0, 0);

const fn transfer(address_1: u64, address_2: u64, size: u32) -> Descriptor {
    Descriptor {
        pasid: 0,
        control: 0,
        record: 0,
        address_1,
        address_2,
        size,
        interrupt: 0,
        operation_flags: 0,
        operands: [0; 3],
    }
}

/// Record, interrupt, and the record's steering tag and traffic class: every operation has them.
const RECORD: Flags = Flags::RECORD_VALID
    .with(Flags::RECORD_REQUESTED)
    .with(Flags::INTERRUPT)
    .with(Flags(1 << 5))
    .with(Flags(1 << 12));
const TRAFFIC_1: Flags = Flags(1 << 9);
const TRAFFIC_2: Flags = Flags(1 << 10);
const TRAFFIC_3: Flags = Flags(1 << 11);
/// The seed stands in memory; no inversion or reflection; no reflection of the data.
const CRC_FLAGS: Flags = Flags(0b111 << 16);
const READ_FLAGS: Flags = RECORD
    .with(Flags::FENCE)
    .with(Flags::BLOCK_ON_FAULT)
    .with(TRAFFIC_1);
const WRITE_FLAGS: Flags = READ_FLAGS
    .with(Flags::CACHE)
    .with(TRAFFIC_2)
    .with(Flags::STRICT_ORDERING)
    .with(Flags::DESTINATION_READBACK)
    .with(Flags(1 << 15));

const ADDRESS_1: u64 = span(16, 8);
const ADDRESS_2: u64 = span(24, 8);
const SIZE: u64 = span(32, 4);
const TRANSFER: u64 = ADDRESS_1 | ADDRESS_2 | SIZE;
/// The seed and the address where it may stand instead.
const SEED: u64 = span(40, 4) | span(48, 8);

const NOTHING: Rules = Rules::nothing(RECORD);
const TRANSFERS: Rules = Rules {
    flags: WRITE_FLAGS,
    in_batch: true,
    used: TRANSFER,
    size: Size::Bytes,
    ..NOTHING
};

/// Both addresses and the first operand, of deltas.
const WORD_1: Aligned = Aligned {
    byte: 16,
    multiple: 8,
};
const WORD_2: Aligned = Aligned {
    byte: 24,
    multiple: 8,
};
const WORD_3: Aligned = Aligned {
    byte: 40,
    multiple: 8,
};
