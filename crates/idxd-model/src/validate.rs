//! Validation of a descriptor before its execution: written from the specification, independently of the driver's builders,
//! so that the two check each other.
//!
//! Sources: DSA 3.0, 5.4 and 5.5 (tables 5-3 to 5-5), 5.8.1, 8.1.3 and 8.3; IAA 2.1, 4.1, 4.2 and 6.1. A device checks
//! in any order (DSA 3.0, 5.4): of a descriptor with two mistakes either may be reported. What the documents leave open
//! is listed at the top of the crate.
//!
//! The model has the operations and flags that the driver uses, and rejects all others, even where a device has them.

#[cfg(test)]
mod tests;

use super::dsa::Outcome;
use idxd::{Descriptor, Flags, Kind, Limits, opcode};

/// Status codes of `linux/idxd.h`, that the model itself reports.
pub(super) mod status {
    pub(crate) const SUCCESS: u8 = 0x01;
    pub(crate) const PAGE_FAULT: u8 = 0x03;
    pub(crate) const PAGE_REQUEST_REFUSED: u8 = 0x04;
    pub(crate) const BATCH_FAILED: u8 = 0x05;
    pub(crate) const BATCH_LIST_FAULT: u8 = 0x06;
    pub(crate) const OPCODE: u8 = 0x10;
    pub(crate) const FLAGS: u8 = 0x11;
    pub(crate) const RESERVED: u8 = 0x12;
    pub(crate) const SIZE: u8 = 0x13;
    pub(crate) const DESCRIPTOR_COUNT: u8 = 0x14;
    pub(crate) const OVERLAP: u8 = 0x16;
    pub(crate) const LIST_ALIGNMENT: u8 = 0x18;
    pub(crate) const RECORD_ALIGNMENT: u8 = 0x1b;
    pub(crate) const ADDRESS_ALIGNMENT: u8 = 0x1c;
    /// Bit 7: the fault was on a write.
    pub(crate) const ON_WRITE: u8 = 0x80;
}

/// Checks everything that does not need memory. The error is what the record reports. IAA's own flags and its AECS are
/// checked where they are used.
pub(super) fn validate(
    descriptor: &Descriptor,
    limits: &Limits,
    is_member: bool,
) -> Result<(), Outcome> {
    let code = descriptor.opcode();
    let Some(rules) = rules(descriptor, limits) else {
        return bad(status::OPCODE);
    };
    // A batch contains neither batches nor drains (DSA 3.0, 5.4).
    let is_nested = is_member && matches!(code, opcode::BATCH | opcode::DRAIN);
    if is_nested || !limits.operations.has(code) {
        return bad(status::OPCODE);
    }

    let flags = descriptor.flags().0;
    let wrong = flags & !rules.flags | rules.required & !flags;
    if wrong != 0 {
        return Err(Outcome {
            flags: wrong,
            ..Outcome::status(status::FLAGS)
        });
    }
    if has_reserved(descriptor, limits.kind, &rules) {
        return bad(status::RESERVED);
    }
    if !descriptor
        .record
        .is_multiple_of(limits.kind.record_alignment())
    {
        return bad(status::RECORD_ALIGNMENT);
    }
    check_sizes(descriptor, limits, &rules)
}

/// Rules of one operation.
struct Rules {
    flags: u32,
    /// Required flags.
    required: u32,
    size: Size,
    /// Number of used addresses, 0 to 2.
    addresses: usize,
    /// Bytes of the operands that may be set: bit N is byte N of 24.
    operands: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Size {
    /// Has to be zero.
    None,
    Bytes,
    Members,
    /// Bytes of input. The output has a size of its own; one of the two may be zero.
    Stream,
}

/// Flags that an operation needs whose result is in the record.
const RESULT: u32 = Flags::RECORD_VALID.0 | Flags::RECORD_REQUESTED.0;

/// Bytes of IAA's operands (offset 40): address of the AECS, size of the output, size of the AECS.
const AECS: u32 = 0x00ff;
const OUTPUT_SIZE: u32 = 0x0f00;
const AECS_SIZE: u32 = 0xf000;

/// Bit of GENCAP (DSA 3.0, 9.2.2).
const CACHE_CONTROL: u32 = 2;

fn rules(descriptor: &Descriptor, limits: &Limits) -> Option<Rules> {
    let is_recorded = descriptor.flags().has(Flags::RECORD_VALID);
    let record = Flags::RECORD_VALID.0 | when(is_recorded, Flags::RECORD_REQUESTED.0);
    let writes = record | when(limits.capabilities.has(CACHE_CONTROL), Flags::CACHE.0);
    let (flags, required, size, addresses, operands) = match (limits.kind, descriptor.opcode()) {
        (_, opcode::NOOP) => (record, 0, Size::None, 0, 0),
        (_, opcode::DRAIN) => (record, Flags::RECORD_REQUESTED.0, Size::None, 0, 0),
        (Kind::Dsa, opcode::BATCH) => (record, 0, Size::Members, 1, 0),
        (Kind::Dsa, opcode::MEMMOVE) => (writes, 0, Size::Bytes, 2, 0),
        (Kind::Dsa, opcode::COMPARE_PATTERN) => (record, RESULT, Size::Bytes, 2, 0),
        (Kind::Iaa, opcode::DECOMPRESS) => (writes, RESULT, Size::Stream, 2, OUTPUT_SIZE),
        (Kind::Iaa, opcode::COMPRESS) => {
            let codes = Flags::READ_AECS.0;
            let operands = AECS | OUTPUT_SIZE | AECS_SIZE;
            (writes | codes, RESULT | codes, Size::Stream, 2, operands)
        }
        _ => return None,
    };
    Some(Rules {
        flags,
        required,
        size,
        addresses,
        operands,
    })
}

fn when(condition: bool, bits: u32) -> u32 {
    if condition { bits } else { 0 }
}

/// Whether a reserved field is not zero.
fn has_reserved(descriptor: &Descriptor, kind: Kind, rules: &Rules) -> bool {
    let operands = descriptor
        .operands
        .iter()
        .flat_map(|word| word.to_le_bytes());
    let operand = operands
        .enumerate()
        .any(|(at, byte)| byte != 0 && rules.operands >> at & 1 == 0);
    let addresses = [descriptor.address_1, descriptor.address_2];
    operand
        || addresses[rules.addresses..]
            .iter()
            .any(|address| *address != 0)
        || descriptor.interrupt != 0
        || (descriptor.record != 0 && !descriptor.flags().has(Flags::RECORD_VALID))
        || descriptor.pasid & 0x7ff0_0000 != 0
        || (kind == Kind::Dsa && descriptor.operation_flags != 0)
        || (rules.size == Size::None && (descriptor.size != 0 || descriptor.operation_flags != 0))
}

fn check_sizes(descriptor: &Descriptor, limits: &Limits, rules: &Rules) -> Result<(), Outcome> {
    let size = u64::from(descriptor.size);
    let (first, second) = (descriptor.address_1, descriptor.address_2);
    match rules.size {
        Size::None => Ok(()),
        Size::Members => {
            let most = limits.max_batch.map_or(0, |most| most.get());
            if !(2..=most).contains(&descriptor.size) {
                return bad(status::DESCRIPTOR_COUNT);
            }
            if !first.is_multiple_of(64) {
                return bad(status::LIST_ALIGNMENT);
            }
            Ok(())
        }
        Size::Stream => {
            let (output, aecs) = (u64::from(descriptor.low(1)), u64::from(descriptor.high(1)));
            // Not both may be zero (IAA 2.1, 6.1.7).
            if size.max(output) == 0 || size.max(output).max(aecs) > limits.max_transfer {
                return bad(status::SIZE);
            }
            if overlap((first, size), (second, output)) {
                return bad(status::OVERLAP);
            }
            Ok(())
        }
        Size::Bytes if size == 0 || size > limits.max_transfer => bad(status::SIZE),
        Size::Bytes => {
            // A device may be able to copy overlapping areas; the driver never asks for it.
            let is_copy = descriptor.opcode() == opcode::MEMMOVE;
            if is_copy && overlap((first, size), (second, size)) {
                return bad(status::OVERLAP);
            }
            Ok(())
        }
    }
}

/// Whether two areas, each an address and a length, have a byte in common.
pub(super) fn overlap(one: (u64, u64), other: (u64, u64)) -> bool {
    let end = |(address, size): (u64, u64)| address.saturating_add(size);
    let first = one.0.max(other.0);
    first < end(one) && first < end(other)
}

fn bad(status: u8) -> Result<(), Outcome> {
    Err(Outcome::status(status))
}
