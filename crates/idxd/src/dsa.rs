//! Descriptors of DSA's operations.
//!
//! ```
//! # use idxd::{Record, dsa};
//! # let (page, record) = ([0_u8; 4096], Record::default());
//! // Is this page all zeros? The record's result says so.
//! let descriptor = dsa::compare_pattern(page.as_ptr() as u64, 4096, 0, record.address());
//! ```
//! Addresses are those of this process, sizes are in bytes; `record` is the address of a [`Record`](crate::Record).
//! For a batch and its members, the [`Queue`](crate::Queue) that submits them fills in the address of the record: pass 0.
//! Sources: DSA 3.0, 8.3; `struct dsa_hw_desc` of `linux/idxd.h`.

use crate::{Descriptor, opcode};

/// Does nothing but write its record, which shows that a queue works.
pub const fn noop(record: u64) -> Descriptor {
    Descriptor::new(opcode::NOOP, record)
}

/// Executes the `count` descriptors at `list`, in parallel and in any order. There are at least two, and at most
/// the queue's [`max_batch`](crate::Limits::max_batch); `list` is a multiple of 64. A batch must not contain a batch or
/// a drain. The device reads the list some time after submission.
pub const fn batch(list: u64, count: u32, record: u64) -> Descriptor {
    Descriptor {
        address_1: list,
        size: count,
        ..Descriptor::new(opcode::BATCH, record)
    }
}

/// Completes when everything that this process submitted to the queue before has completed (DSA 3.0, 3.12). Not allowed in a
/// batch.
pub const fn drain(record: u64) -> Descriptor {
    Descriptor::new(opcode::DRAIN, record)
}

/// Compares an area with repetitions of the little-endian bytes of `pattern`. The record's result is 0 if they are
/// equal and 1 if not; both are success. With pattern 0 it tells whether a
/// page is all zeros.
pub const fn compare_pattern(source: u64, size: u32, pattern: u64, record: u64) -> Descriptor {
    Descriptor {
        address_1: source,
        address_2: pattern,
        size,
        ..Descriptor::new(opcode::COMPARE_PATTERN, record)
    }
}
