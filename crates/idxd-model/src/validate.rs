//! How a device checks a descriptor before it does anything: an oracle of its own, so that the builders of
//! the crate and the model check each other.
//!
//! Sources: DSA 3.0, 5.4 and 5.5 (tables 5-3 to 5-5), 5.8.1, 8.1.3 and 8.3; IAA 2.1, 4.1, 4.2 and 6.1. A device checks
//! in any order (DSA 3.0, 5.4): of a descriptor with two mistakes either may be reported. What the documents leave open
//! is in the list of assumptions.
//!
//! Not here are flags that are of no use to a migration, even where GENCAP has them: patterns of 16 bytes, CRCs of 64
//! bits, and the continuation of batches.

#[cfg(test)]
mod tests;

use super::dsa::TRANSLATION_FETCH;
use idxd::{Descriptor, Flags, Kind, Limits, opcode};

/// Status codes of `linux/idxd.h`, as far as the model gives them itself.
pub(super) mod status {
    pub(crate) const SUCCESS: u8 = 0x01;
    pub(crate) const PREDICATE_FALSE: u8 = 0x02;
    pub(crate) const PAGE_FAULT: u8 = 0x03;
    pub(crate) const PAGE_REQUEST_REFUSED: u8 = 0x04;
    pub(crate) const BATCH_FAILED: u8 = 0x05;
    pub(crate) const BATCH_LIST_FAULT: u8 = 0x06;
    pub(crate) const DELTA_ORDER: u8 = 0x07;
    pub(crate) const DELTA_RANGE: u8 = 0x08;
    pub(crate) const OPCODE: u8 = 0x10;
    pub(crate) const FLAGS: u8 = 0x11;
    pub(crate) const RESERVED: u8 = 0x12;
    pub(crate) const TRANSFER_SIZE: u8 = 0x13;
    pub(crate) const DESCRIPTOR_COUNT: u8 = 0x14;
    pub(crate) const DELTA_SIZE: u8 = 0x15;
    pub(crate) const OVERLAP: u8 = 0x16;
    pub(crate) const LIST_ALIGNMENT: u8 = 0x18;
    pub(crate) const INTERRUPT_HANDLE: u8 = 0x19;
    pub(crate) const RECORD_ALIGNMENT: u8 = 0x1b;
    pub(crate) const ADDRESS_ALIGNMENT: u8 = 0x1c;
    pub(crate) const HARDWARE_ERROR: u8 = 0x20;
    /// Bit 7: the fault was on a write.
    pub(crate) const ON_WRITE: u8 = 0x80;
}

/// Why a descriptor is not executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Invalid {
    pub(super) status: u8,
    /// The flags that are not allowed, with status 0x11.
    pub(super) flags: u32,
}

/// Checks everything that can be checked without memory.
pub(super) fn validate(
    descriptor: &Descriptor,
    limits: &Limits,
    member: bool,
) -> Result<(), Invalid> {
    let code = descriptor.opcode();
    let Some(rules) = rules(descriptor, limits) else {
        return bad(status::OPCODE);
    };
    // No batches and no drains inside a batch: assumption 8.
    if !limits.operations.has(code) || (member && matches!(code, opcode::BATCH | opcode::DRAIN)) {
        return bad(status::OPCODE);
    }

    let flags = descriptor.flags();
    let mut allowed = rules.flags;
    if !member {
        allowed &= !Flags::FENCE.0;
    }
    if !limits.block_on_fault {
        allowed &= !Flags::BLOCK_ON_FAULT.0;
    }
    let mut wrong = flags.0 & !allowed | rules.required & !flags.0;
    if code == opcode::DRAIN && flags.0 & (Flags::RECORD_REQUESTED.0 | Flags::INTERRUPT.0) == 0 {
        wrong |= Flags::RECORD_REQUESTED.0;
    }
    if wrong != 0 {
        return Err(Invalid {
            status: status::FLAGS,
            flags: wrong,
        });
    }
    if flags.has(Flags::INTERRUPT) {
        // No entry of the interrupt table has the process's address space, the first one neither.
        return bad(status::INTERRUPT_HANDLE);
    }
    if reserved(descriptor, limits.kind, &rules) {
        return bad(status::RESERVED);
    }
    if !descriptor
        .record
        .is_multiple_of(limits.kind.record_alignment())
    {
        return bad(status::RECORD_ALIGNMENT);
    }
    sizes(descriptor, limits, &rules)
}

/// What one operation allows.
struct Rules {
    flags: u32,
    /// Flags that it cannot do without.
    required: u32,
    size: Size,
    /// Which of the two addresses mean something.
    addresses: [bool; 2],
    /// Of the operands' 24 bytes, those that may be set: one bit each.
    operands: u32,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Size {
    /// There is none; it has to be zero.
    None,
    Bytes,
    Members,
    /// Bytes in eights, to 512 KiB.
    Delta,
    /// Bytes, of which the output has a number of its own: either may be zero.
    Stream,
}

/// What an operation needs whose result is in the record.
const RESULT: u32 = Flags::RECORD_VALID.0 | Flags::RECORD_REQUESTED.0;
/// Traffic class of the record.
const RECORD_CLASS: u32 = 1 << 12;
/// Traffic classes of the three addresses.
const CLASS: [u32; 3] = [1 << 9, 1 << 10, 1 << 11];
const CHECKS: u32 = Flags::CHECK_RESULT.0;
/// A CRC's seed is in memory.
const SEED_ADDRESS: u32 = 1 << 16;
/// How CRCs take inversion and reflection.
const CRC: u32 = 3 << 17;
/// The two addresses that a DRAIN reads back.
const READBACK: [u32; 2] = [1 << 16, 1 << 17];
/// What a DRAIN does not read back.
const SUPPRESS: u32 = 3 << 18;
/// A stride between the translations that are fetched.
const STRIDE: u32 = 1 << 16;
/// An AECS is written if the output is full.
const WRITE_ON_OVERFLOW: u32 = 1 << 19;

/// Bits of GENCAP (DSA 3.0, 9.2.2).
const OVERLAPPING_COPY: u32 = 1;
const CACHE_CONTROL: u32 = 2;
const DURABLE_WRITES: u32 = 5;
const FETCH_STRIDE: u32 = 7;
const DESTINATION_READBACK: u32 = 8;
const DRAIN_READBACK: u32 = 9;
const SINGLE_BATCH: u32 = 52;
const NO_STRICT_ORDERING: u32 = 53;

fn rules(descriptor: &Descriptor, limits: &Limits) -> Option<Rules> {
    const NONE: [bool; 2] = [false, false];
    const ONE: [bool; 2] = [true, false];
    const TWO: [bool; 2] = [true, true];
    let [one, two, three] = CLASS;
    let flags = descriptor.flags().0;
    let any = |of: u32| flags & of != 0;
    let can = |bit| limits.capabilities.has(bit);
    let is_dsa = limits.kind == Kind::Dsa;

    let of_record = when(
        any(Flags::RECORD_VALID.0),
        Flags::RECORD_REQUESTED.0 | RECORD_CLASS,
    );
    let record = Flags::RECORD_VALID.0 | Flags::INTERRUPT.0 | of_record;
    let works = record | Flags::BLOCK_ON_FAULT.0 | when(is_dsa, Flags::FENCE.0);
    let is_unordered = is_dsa && can(NO_STRICT_ORDERING);
    let writes =
        works | when(!is_unordered, Flags::STRICT_ORDERING.0) | cache_control(flags, limits);
    let (flags, required, size, addresses, operands) = match (limits.kind, descriptor.opcode()) {
        (Kind::Dsa, opcode::NOOP) => (record | Flags::FENCE.0, 0, Size::None, NONE, 0),
        (Kind::Iaa, opcode::NOOP) => (record, 0, Size::None, NONE, 0),
        (_, opcode::DRAIN) => {
            let back = READBACK.map(|flag| can(DRAIN_READBACK) && any(flag));
            let classes = when(back[0], one) | when(back[1], two);
            let reads = when(can(DRAIN_READBACK), READBACK[0] | READBACK[1]);
            (record | SUPPRESS | reads | classes, 0, Size::None, back, 0)
        }
        (Kind::Dsa, opcode::BATCH) => (record | one, 0, Size::Members, ONE, 0),
        (Kind::Dsa, opcode::MEMMOVE) => (writes | one | two, 0, Size::Bytes, TWO, 0),
        (Kind::Dsa, opcode::FILL) => (writes | two, 0, Size::Bytes, TWO, 0),
        (Kind::Dsa, opcode::COMPARE) => (works | CHECKS | one | two, RESULT, Size::Bytes, TWO, 0x1),
        (Kind::Dsa, opcode::COMPARE_PATTERN) => {
            (works | CHECKS | one, RESULT, Size::Bytes, TWO, 0x1)
        }
        (Kind::Dsa, opcode::CREATE_DELTA) => {
            let all = one | two | three;
            (writes | CHECKS | all, RESULT, Size::Delta, TWO, 0x1_0fff)
        }
        (Kind::Dsa, opcode::APPLY_DELTA) => (writes | one | two, 0, Size::Delta, TWO, 0xf),
        (Kind::Dsa, TRANSLATION_FETCH) if limits.version >= 0x200 => {
            let has_stride = can(FETCH_STRIDE) && any(STRIDE);
            let flags = works | when(can(FETCH_STRIDE), STRIDE);
            let stride = when(has_stride, 0x0f00);
            (flags, 0, Size::Bytes, ONE, stride)
        }
        (Kind::Dsa, code @ (opcode::CRC | opcode::COPY_CRC)) => {
            let (class, seed) = match any(SEED_ADDRESS) {
                true => (three, 0xff00),
                false => (0, 0xf),
            };
            let of_crc = SEED_ADDRESS | CRC | class | one;
            match code {
                opcode::CRC => (works | of_crc, RESULT, Size::Bytes, ONE, seed),
                _ => (writes | of_crc | two, RESULT, Size::Bytes, TWO, seed),
            }
        }
        (Kind::Iaa, code @ (opcode::DECOMPRESS | opcode::COMPRESS)) => {
            // Codes are read from an AECS, unless none are needed for statistics, which then have none.
            let always = Flags::WRITE_AECS.0;
            let (reads, back) = match code {
                opcode::DECOMPRESS if any(always) => (Flags::READ_AECS.0, always),
                opcode::DECOMPRESS => (Flags::READ_AECS.0, WRITE_ON_OVERFLOW),
                _ if descriptor.operation_flags & 1 == 1 => (0, 0),
                _ => (Flags::READ_AECS.0, always),
            };
            let second = reads | back;
            let of_second = when(any(second), Flags::AECS_TOGGLE.0 | three);
            let needs_codes = code == opcode::COMPRESS;
            (
                writes | one | two | Flags::CRC32C.0 | second | of_second,
                RESULT | when(needs_codes, reads),
                Size::Stream,
                TWO,
                0xff_ffff,
            )
        }
        (Kind::Iaa, opcode::CRC64) => (works | one, RESULT, Size::Bytes, ONE, 0xff_0000),
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

/// Those of the flags for cache control that are allowed together with the others (DSA 3.0, table 8-4, of which IAA has
/// the half without the third).
fn cache_control(flags: u32, limits: &Limits) -> u32 {
    let can = |bit| limits.capabilities.has(bit);
    let (first, second, third) = (Flags::CACHE.0, Flags::DESTINATION_READBACK.0, 1 << 5);
    // Revision 3.0 defines the third one (appendix F).
    let has_third = limits.kind == Kind::Dsa && limits.version >= 0x300;
    match (flags & third != 0 && has_third, flags & (first | second)) {
        (false, _) => when(can(CACHE_CONTROL), first) | when(can(DESTINATION_READBACK), second),
        (true, 0) => when(can(DURABLE_WRITES), third),
        (true, only) if only == second => when(can(DESTINATION_READBACK), second | third),
        (true, _) => 0,
    }
}

fn when(condition: bool, bits: u32) -> u32 {
    if condition { bits } else { 0 }
}

/// Whether a field that has to be zero is not.
fn reserved(descriptor: &Descriptor, kind: Kind, rules: &Rules) -> bool {
    let operands = descriptor
        .operands
        .iter()
        .flat_map(|word| word.to_le_bytes());
    let operand = operands
        .enumerate()
        .any(|(at, byte)| byte != 0 && rules.operands >> at & 1 == 0);
    let addresses = [descriptor.address_1, descriptor.address_2];
    let address = addresses
        .iter()
        .zip(rules.addresses)
        .any(|(it, used)| *it != 0 && !used);
    operand
        || address
        || descriptor.interrupt != 0
        || (descriptor.record != 0 && !descriptor.flags().has(Flags::RECORD_VALID))
        || descriptor.pasid & 0x7ff0_0000 != 0
        || (kind == Kind::Dsa && descriptor.operation_flags != 0)
        || (rules.size == Size::None && (descriptor.size != 0 || descriptor.operation_flags != 0))
}

fn sizes(descriptor: &Descriptor, limits: &Limits, rules: &Rules) -> Result<(), Invalid> {
    let size = u64::from(descriptor.size);
    let (first, second) = (descriptor.address_1, descriptor.address_2);
    match rules.size {
        Size::None => return Ok(()),
        Size::Members => {
            let most = limits.max_batch.map_or(0, |most| most.get());
            let least = match limits.capabilities.has(SINGLE_BATCH) {
                true => 1,
                false => 2,
            };
            if !(least..=most).contains(&descriptor.size) {
                return bad(status::DESCRIPTOR_COUNT);
            }
            if !first.is_multiple_of(64) {
                return bad(status::LIST_ALIGNMENT);
            }
            return Ok(());
        }
        Size::Stream => {
            let (output, aecs) = (u64::from(descriptor.low(1)), u64::from(descriptor.high(1)));
            // Both zero: IAA 2.1, 6.1.7.
            return match size.max(output) == 0 || size.max(output).max(aecs) > limits.max_transfer {
                true => bad(status::TRANSFER_SIZE),
                false => Ok(()),
            };
        }
        Size::Bytes | Size::Delta if size == 0 || size > limits.max_transfer => {
            return bad(status::TRANSFER_SIZE);
        }
        Size::Bytes => {}
        Size::Delta if size > 512 << 10 => return bad(status::TRANSFER_SIZE),
        Size::Delta if !size.is_multiple_of(8) => return bad(status::ADDRESS_ALIGNMENT),
        Size::Delta => {}
    }
    match descriptor.opcode() {
        opcode::CREATE_DELTA => {
            let (delta, most) = (descriptor.operands[0], u64::from(descriptor.low(1)));
            if most < 80 || !most.is_multiple_of(10) || most > limits.max_transfer {
                return bad(status::DELTA_SIZE);
            }
            // The record itself lies anywhere, here and there.
            if !(first | second).is_multiple_of(8) {
                return bad(status::ADDRESS_ALIGNMENT);
            }
            if overlap(first, size, delta, most) || overlap(second, size, delta, most) {
                return bad(status::OVERLAP);
            }
        }
        opcode::APPLY_DELTA => {
            let delta = u64::from(descriptor.low(0));
            if delta == 0 || !delta.is_multiple_of(10) || delta > limits.max_transfer {
                return bad(status::DELTA_SIZE);
            }
            if !second.is_multiple_of(8) {
                return bad(status::ADDRESS_ALIGNMENT);
            }
            if overlap(first, delta, second, size) {
                return bad(status::OVERLAP);
            }
        }
        // Without its flag the address is zero.
        opcode::CRC | opcode::COPY_CRC if !descriptor.operands[1].is_multiple_of(4) => {
            return bad(status::ADDRESS_ALIGNMENT);
        }
        opcode::COPY_CRC if overlap(first, size, second, size) => return bad(status::OVERLAP),
        TRANSLATION_FETCH if first.checked_add(size - 1).is_none() => {
            return bad(status::TRANSFER_SIZE);
        }
        TRANSLATION_FETCH if descriptor.flags().0 & STRIDE != 0 => {
            let stride = descriptor.low(1);
            if stride < 4096 || !stride.is_power_of_two() {
                return bad(status::ADDRESS_ALIGNMENT);
            }
        }
        opcode::MEMMOVE
            if !limits.capabilities.has(OVERLAPPING_COPY) && overlap(first, size, second, size) =>
        {
            return bad(status::OVERLAP);
        }
        _ => {}
    }
    Ok(())
}

fn overlap(first: u64, first_size: u64, second: u64, second_size: u64) -> bool {
    first < second.saturating_add(second_size) && second < first.saturating_add(first_size)
}

fn bad(status: u8) -> Result<(), Invalid> {
    Err(Invalid { status, flags: 0 })
}
