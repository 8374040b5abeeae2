//! How a device checks a descriptor before it does anything: an oracle of its own, so that the builders of
//! the crate and the model check each other.
//!
//! Sources: the status codes of `linux/idxd.h`, the flags of each operation as in the tables of Intel's DML
//! (`core/validation`) and the sizes that SPDK's `lib/idxd` and accel-config's tests keep to.

#[cfg(test)]
mod tests;

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
    pub(crate) const ADDRESS_ALIGNMENT: u8 = 0x1c;
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
    let bad = |status| Err(Invalid { status, flags: 0 });
    let code = descriptor.opcode();
    let Some(rules) = rules(limits.kind, code) else {
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
    let mut wrong = flags.0 & !allowed;
    if flags.has(Flags::RECORD_REQUESTED) && !flags.has(Flags::RECORD_VALID) {
        wrong |= Flags::RECORD_REQUESTED.0;
    }
    if wrong != 0 {
        return Err(Invalid {
            status: status::FLAGS,
            flags: wrong,
        });
    }
    if descriptor.interrupt != 0 {
        return bad(status::INTERRUPT_HANDLE);
    }
    if reserved(descriptor, limits.kind, &rules) {
        return bad(status::RESERVED);
    }
    sizes(descriptor, limits, &rules)
}

/// What one operation allows.
struct Rules {
    flags: u32,
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
}

/// Record and interrupt, with the record's steering tag and traffic class.
const RECORD: u32 =
    Flags::RECORD_VALID.0 | Flags::RECORD_REQUESTED.0 | Flags::INTERRUPT.0 | 1 << 5 | 1 << 12;
/// Traffic classes of the first address, of two, of three.
const CLASS: [u32; 3] = [1 << 9, 3 << 9, 7 << 9];
const WORKS: u32 = RECORD | Flags::FENCE.0 | Flags::BLOCK_ON_FAULT.0;
const WRITES: u32 =
    WORKS | Flags::CACHE.0 | Flags::STRICT_ORDERING.0 | Flags::DESTINATION_READBACK.0 | 1 << 15;
const CHECKS: u32 = Flags::CHECK_RESULT.0;
/// How CRCs take seed, inversion and reflection.
const CRC: u32 = 7 << 16;
/// Second source, its steering, CRC-32C, toggle.
const AECS: u32 = 0x7f << 16;

fn rules(kind: Kind, code: u8) -> Option<Rules> {
    const NONE: [bool; 2] = [false, false];
    const ONE: [bool; 2] = [true, false];
    const TWO: [bool; 2] = [true, true];
    let [one, two, three] = CLASS;
    let (flags, size, addresses, operands) = match (kind, code) {
        (_, opcode::NOOP) => (RECORD | Flags::FENCE.0, Size::None, NONE, 0),
        // Addresses that are read back first.
        (Kind::Dsa, opcode::DRAIN) => (RECORD | two, Size::None, TWO, 0),
        (Kind::Iaa, opcode::DRAIN) => (RECORD, Size::None, NONE, 0),
        (Kind::Dsa, opcode::BATCH) => (RECORD | one, Size::Members, ONE, 0),
        (Kind::Dsa, opcode::MEMMOVE | opcode::FILL) => (WRITES | two, Size::Bytes, TWO, 0),
        (Kind::Dsa, opcode::COMPARE | opcode::COMPARE_PATTERN) => {
            (WORKS | CHECKS | two, Size::Bytes, TWO, 0x1)
        }
        (Kind::Dsa, opcode::CREATE_DELTA) => (WRITES | CHECKS | three, Size::Delta, TWO, 0x1_0fff),
        (Kind::Dsa, opcode::APPLY_DELTA) => (WRITES | two, Size::Delta, TWO, 0xf),
        (Kind::Dsa, opcode::CRC) => (WORKS | three | CRC, Size::Bytes, ONE, 0xff0f),
        (Kind::Dsa, opcode::COPY_CRC) => (WRITES | three | CRC, Size::Bytes, TWO, 0xff0f),
        (Kind::Iaa, opcode::DECOMPRESS | opcode::COMPRESS) => (
            WRITES & !Flags::FENCE.0 | three | AECS,
            Size::Bytes,
            TWO,
            0xff_ffff,
        ),
        (Kind::Iaa, opcode::CRC64) => {
            (WORKS & !Flags::FENCE.0 | three, Size::Bytes, ONE, 0xff_0000)
        }
        _ => return None,
    };
    Some(Rules {
        flags,
        size,
        addresses,
        operands,
    })
}

/// Whether a field that has to be zero is not.
fn reserved(descriptor: &Descriptor, kind: Kind, rules: &Rules) -> bool {
    let operands = descriptor
        .operands
        .iter()
        .flat_map(|word| word.to_le_bytes());
    // The expected result is reserved unless it is asked for (assumed).
    let expected = match descriptor.opcode() {
        _ if descriptor.flags().has(Flags::CHECK_RESULT) => None,
        opcode::COMPARE | opcode::COMPARE_PATTERN => Some(0),
        opcode::CREATE_DELTA => Some(16),
        _ => None,
    };
    let operand = operands.enumerate().any(|(at, byte)| {
        let used = rules.operands >> at & 1 == 1 && !(kind == Kind::Dsa && expected == Some(at));
        byte != 0 && !used
    });
    let addresses = [descriptor.address_1, descriptor.address_2];
    let address = addresses
        .iter()
        .zip(rules.addresses)
        .any(|(it, used)| *it != 0 && !used);
    operand
        || address
        || descriptor.pasid & 0x7ff0_0000 != 0
        || (kind == Kind::Dsa && descriptor.operation_flags != 0)
        || (rules.size == Size::None && descriptor.size != 0)
}

fn sizes(descriptor: &Descriptor, limits: &Limits, rules: &Rules) -> Result<(), Invalid> {
    let bad = |status| Err(Invalid { status, flags: 0 });
    let size = u64::from(descriptor.size);
    let (first, second) = (descriptor.address_1, descriptor.address_2);
    match rules.size {
        Size::None => return Ok(()),
        Size::Members => {
            let most = limits.max_batch.map_or(0, |most| most.get());
            if !(2..=most).contains(&descriptor.size) {
                return bad(status::DESCRIPTOR_COUNT);
            }
            if !first.is_multiple_of(64) {
                return bad(status::LIST_ALIGNMENT);
            }
            return Ok(());
        }
        Size::Bytes | Size::Delta if size == 0 || size > limits.max_transfer => {
            return bad(status::TRANSFER_SIZE);
        }
        Size::Bytes => {}
        Size::Delta => {
            if !size.is_multiple_of(8) || size > 512 << 10 {
                return bad(status::TRANSFER_SIZE);
            }
        }
    }
    match descriptor.opcode() {
        opcode::CREATE_DELTA => {
            let (delta, most) = (descriptor.operands[0], u64::from(descriptor.low(1)));
            if most < 80 || !most.is_multiple_of(10) {
                return bad(status::DELTA_SIZE);
            }
            if !(first | second | delta).is_multiple_of(8) {
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
            if !(first | second).is_multiple_of(8) {
                return bad(status::ADDRESS_ALIGNMENT);
            }
            if overlap(first, delta, second, size) {
                return bad(status::OVERLAP);
            }
        }
        opcode::COPY_CRC if overlap(first, size, second, size) => return bad(status::OVERLAP),
        _ => {}
    }
    Ok(())
}

fn overlap(first: u64, first_size: u64, second: u64, second_size: u64) -> bool {
    first < second.saturating_add(second_size) && second < first.saturating_add(first_size)
}
