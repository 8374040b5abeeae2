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
//! Addresses are this process's, sizes bytes; `record` is the address of a [`Record`](crate::Record). Sources: DSA 3.0,
//! 8.3; `struct dsa_hw_desc` of `linux/idxd.h`.

use crate::{
    Descriptor, Flags, Limits, opcode,
    operation::{Bare, Nothing, Operation, Reads, Writes},
    rules::{
        ADDRESS_1, ADDRESS_2, Aligned, Apart, DeltaSize, NEEDS_RECORD, RECORD, Rules, SIZE, Size,
        TRAFFIC_1, TRAFFIC_2, TRAFFIC_3, span,
    },
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

/// Completes when all that this process gave the queue before has completed; of a dedicated queue, all that it has
/// (DSA 3.0, 3.12). Not in a batch.
pub const fn drain(record: u64) -> Operation<Bare> {
    Operation::new(opcode::DRAIN, record, EMPTY)
}

/// Copies. The areas may overlap, if the device [can do that](crate::Capabilities::overlapping_copy): then the record's
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
/// the seed of the next: the device inverts both (DSA 3.0, 8.3.12).
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

/// Which difference is wanted; see [`create_delta`]. Both areas begin at multiples of 8.
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
    /// Most bytes of the delta record: a multiple of 10, at least 80, and no more than the queue takes. None of them
    /// overlaps with either area.
    pub max_delta_size: u32,
}

/// Writes the difference of two areas: for each 8-byte word that differs 10 bytes, its index (16 bits) and its new
/// content. The record's result is 0 if they are equal, 1 if there is a delta, 2 if it does not fit (DSA 3.0, 8.3.8),
/// and the record has the delta's size.
pub const fn create_delta(difference: CreateDelta, record: u64) -> Operation<Writes> {
    let descriptor = Descriptor {
        operands: [difference.delta, difference.max_delta_size as u64, 0],
        ..transfer(difference.original, difference.modified, difference.size)
    };
    Operation::new(opcode::CREATE_DELTA, record, descriptor)
}

/// Which difference is to be applied; see [`apply_delta`]. The destination begins at a multiple of 8.
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

/// What `descriptor` may hold, by its operation, its flags, and what `limits` says of the device; `None` for an
/// operation that this crate does not know.
///
/// Flags and fields of DSA 2.0 and 3.0 that no builder here sets are taken as reserved: 16-byte patterns, 64-bit CRCs,
/// the continuation of batches.
pub const fn rules(descriptor: &Descriptor, limits: &Limits) -> Option<Rules> {
    Some(match descriptor.opcode() {
        opcode::NOOP => Rules {
            in_batch: true,
            ..Rules::nothing(RECORD.with(Flags::FENCE))
        },
        opcode::BATCH => Rules {
            used: ADDRESS_1 | SIZE,
            size: Size::Descriptors,
            aligned: &[Aligned {
                byte: 16,
                multiple: 64,
            }],
            ..Rules::nothing(RECORD.with(TRAFFIC_1))
        },
        opcode::DRAIN => Rules::drain(descriptor, limits),
        opcode::MEMMOVE => Rules {
            flags: WRITE_FLAGS.with(TRAFFIC_1),
            apart: if limits.capabilities.overlapping_copy() {
                Apart::No
            } else {
                Apart::SourceAndDestination
            },
            ..TRANSFERS
        },
        opcode::FILL => TRANSFERS,
        opcode::COMPARE => Rules {
            flags: COMPARE_FLAGS.with(TRAFFIC_2),
            ..COMPARES
        },
        opcode::COMPARE_PATTERN => COMPARES,
        opcode::CREATE_DELTA => Rules {
            flags: WRITE_FLAGS
                .with(TRAFFIC_1)
                .with(TRAFFIC_3)
                .with(Flags::CHECK_RESULT),
            needed: NEEDS_RECORD,
            // With the expected results, which without a check, and beyond three bits, are ignored (8.3.8).
            used: TRANSFER | span(40, 12) | span(56, 1),
            size: Size::Words,
            delta_size: Some(DeltaSize {
                operand: 1,
                least: 80,
            }),
            apart: Apart::DeltaAndSources,
            aligned: &[WORD_1, WORD_2, WORDS],
            ..TRANSFERS
        },
        opcode::APPLY_DELTA => Rules {
            flags: WRITE_FLAGS.with(TRAFFIC_1),
            used: TRANSFER | span(40, 4),
            size: Size::Words,
            delta_size: Some(DeltaSize {
                operand: 0,
                least: 10,
            }),
            apart: Apart::DeltaAndDestination,
            aligned: &[WORD_2, WORDS],
            ..TRANSFERS
        },
        opcode::CRC => crc_rules(
            descriptor,
            Rules {
                flags: READ_FLAGS.with(TRAFFIC_1),
                used: ADDRESS_1 | SIZE,
                ..TRANSFERS
            },
        ),
        opcode::COPY_CRC => crc_rules(
            descriptor,
            Rules {
                flags: WRITE_FLAGS.with(TRAFFIC_1),
                apart: Apart::SourceAndDestination,
                ..TRANSFERS
            },
        ),
        _ => return None,
    })
}

/// `rules` with those for a seed: it stands in the descriptor, or in memory at an address of its own (8.3.12).
const fn crc_rules(descriptor: &Descriptor, rules: Rules) -> Rules {
    let (flags, seed) = if descriptor.flags().has(SEED_IN_MEMORY) {
        (rules.flags.with(TRAFFIC_3), span(48, 8))
    } else {
        (rules.flags, span(40, 4))
    };
    Rules {
        flags: flags.with(CRC_FLAGS),
        needed: NEEDS_RECORD,
        used: rules.used | seed,
        aligned: &[Aligned {
            byte: 48,
            multiple: 4,
        }],
        ..rules
    }
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

/// Source and pattern are read, or only sources.
const READ_FLAGS: Flags = RECORD.with(Flags::FENCE).with(Flags::BLOCK_ON_FAULT);
/// With a destination, which is the second address.
const WRITE_FLAGS: Flags = READ_FLAGS
    .with(Flags::CACHE)
    .with(TRAFFIC_2)
    .with(Flags::STRICT_ORDERING)
    .with(Flags::DESTINATION_READBACK);
const COMPARE_FLAGS: Flags = READ_FLAGS.with(TRAFFIC_1).with(Flags::CHECK_RESULT);
const SEED_IN_MEMORY: Flags = Flags(1 << 16);
/// The seed stands in memory; no inversion or reflection; no reflection of the data.
const CRC_FLAGS: Flags = SEED_IN_MEMORY.with(Flags(0b11 << 17));

const TRANSFER: u64 = ADDRESS_1 | ADDRESS_2 | SIZE;

const TRANSFERS: Rules = Rules {
    in_batch: true,
    used: TRANSFER,
    size: Size::Bytes,
    ..Rules::nothing(WRITE_FLAGS)
};
const COMPARES: Rules = Rules {
    flags: COMPARE_FLAGS,
    needed: NEEDS_RECORD,
    // With the expected result, which without a check, and beyond one bit, is ignored (8.3.6).
    used: TRANSFER | span(40, 1),
    ..TRANSFERS
};

/// Both addresses and the size, of deltas. The delta record itself lies anywhere (5.8.1, status 0x1c; 8.3.8, 8.3.9).
const WORD_1: Aligned = Aligned {
    byte: 16,
    multiple: 8,
};
const WORD_2: Aligned = Aligned {
    byte: 24,
    multiple: 8,
};
const WORDS: Aligned = Aligned {
    byte: 32,
    multiple: 8,
};
