//! What a descriptor may hold: the one table, per device, of what each operation allows.
//!
//! The tables themselves are [`dsa::rules`] and [`iaa::rules`]. The driver builds descriptors that keep to them, and
//! the device model refuses those that do not, as a device does:
//!
//! ```text
//!   opcode ─ flags ─ reserved bytes ─ sizes ─ overlap ─ alignment          the first that is wrong is the status
//!    0x10    0x11        0x12      0x13-0x15   0x16   0x18,0x1b,0x1c       (IAA: 0x30 for its own flags)
//! ```
//! That a device looks in this order is assumed; a descriptor with one mistake gets the same answer in any order.
//! Assumed as well: that a fence outside of a batch and blocking on faults where the queue does not allow it count as
//! flags that are not allowed, and that batches and drains within a batch are operations that are not available.
//! Sources: the per-operation flag masks and checks of Intel's DML, the descriptors of Intel's QPL, `linux/idxd.h`.

use thiserror::Error;

use crate::{Descriptor, Flags, Kind, Limits, dsa, iaa};

/// What an operation's descriptor may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Flags that may be set.
    pub flags: Flags,
    /// Whether it may be a member of a batch.
    pub in_batch: bool,
    /// IAA: bits of [`Descriptor::operation_flags`] that may be set.
    pub operation_flags: u16,
    /// Bytes from 16 on that may be something else than zero: bit N is byte N.
    pub used: u64,
    /// Byte that may only be something else than zero with [`Flags::CHECK_RESULT`]: the expected result.
    pub expected_result: Option<u8>,
    /// What [`Descriptor::size`] counts.
    pub size: Size,
    /// Where the size of a delta record stands, and the smallest it may be.
    pub delta_size: Option<DeltaSize>,
    /// Which areas may not overlap.
    pub apart: Apart,
    /// Fields that have to be multiples of something.
    pub aligned: &'static [Aligned],
}

impl Rules {
    /// An operation on nothing, with these flags.
    pub(crate) const fn nothing(flags: Flags) -> Self {
        Self {
            flags,
            in_batch: false,
            operation_flags: 0,
            used: 0,
            expected_result: None,
            size: Size::None,
            delta_size: None,
            apart: Apart::No,
            aligned: &[],
        }
    }
}

/// What [`Descriptor::size`] counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// Nothing: it is zero.
    None,
    /// Descriptors of a batch: two at least, at most what queue and device take.
    Descriptors,
    /// Bytes: one at least, at most what the queue takes.
    Bytes,
    /// Bytes of deltas: as `Bytes`, a multiple of 8, and at most 512 KiB, as offsets are 16 bits of 8-byte words.
    Words,
}

/// Where the size of a delta record stands in a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaSize {
    /// The operand whose low half it is.
    pub operand: usize,
    /// The least that it may be, in bytes. It is always a multiple of 10, as each difference is 10 bytes.
    pub least: u32,
}

/// Which areas of an operation may not overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Apart {
    /// They may.
    No,
    /// Source and destination, both of the descriptor's size.
    SourceAndDestination,
    /// The delta record and what it is applied to.
    DeltaAndDestination,
    /// IAA: source and destination, which has a size of its own.
    InputAndOutput,
}

/// A field that has to be a multiple of something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aligned {
    /// The field's first byte.
    pub byte: usize,
    /// Of what it is a multiple: a power of two, 64 at most.
    pub multiple: u8,
}

/// Where a descriptor is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a work queue, submitted by itself.
    Queue,
    /// In a batch's list.
    Batch,
}

/// Why a device would refuse a descriptor.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum Violation {
    /// The operation is unknown, not one of the queue's, or may not stand in a batch.
    #[error("the operation is not available here")]
    Opcode,
    /// Flags that the operation, the queue or the place does not allow.
    #[error("flags {:#08x} are not allowed here", .0.0)]
    Flags(Flags),
    /// A byte that has to be zero.
    #[error("a field that has to be zero is not")]
    Reserved,
    /// The number of bytes.
    #[error("the size is zero, too large, or not a multiple of what it has to be")]
    Size,
    /// The number of a batch's descriptors.
    #[error("a batch has too few or too many descriptors")]
    Count,
    /// The size of a delta record.
    #[error("the size of the delta record is too small or not a multiple of 10")]
    DeltaSize,
    /// Areas that overlap.
    #[error("source and destination overlap")]
    Overlap,
    /// A batch's list.
    #[error("the address of a batch's list is not a multiple of 64")]
    ListAlignment,
    /// The record.
    #[error("the address of the completion record is misaligned")]
    RecordAlignment,
    /// Any other address, or the size of an AECS.
    #[error("an address or the size of an AECS is misaligned")]
    Alignment,
    /// IAA: flags of the operation.
    #[error("the operation's own flags {0:#06x} are not allowed")]
    OperationFlags(u16),
}

impl Violation {
    /// The status with which either device reports it.
    pub const fn code(&self) -> u8 {
        match self {
            Self::Opcode => 0x10,
            Self::Flags(_) => 0x11,
            Self::Reserved => 0x12,
            Self::Size => 0x13,
            Self::Count => 0x14,
            Self::DeltaSize => 0x15,
            Self::Overlap => 0x16,
            Self::ListAlignment => 0x18,
            Self::RecordAlignment => 0x1b,
            Self::Alignment => 0x1c,
            Self::OperationFlags(_) => 0x30,
        }
    }
}

/// Whether a device behind a queue with `limits` would begin with `descriptor`, found in `place`.
///
/// # Errors
/// The first rule that it breaks.
pub fn check(descriptor: &Descriptor, limits: &Limits, place: Place) -> Result<(), Violation> {
    let opcode = descriptor.opcode();
    let rules = match limits.kind {
        Kind::Dsa => dsa::rules(opcode),
        Kind::Iaa => iaa::rules(opcode),
    };
    let known = limits.operations.has(opcode);
    match rules {
        Some(rules) if known && (rules.in_batch || place == Place::Queue) => {
            rules.check(descriptor, limits, place)
        }
        _ => Err(Violation::Opcode),
    }
}

impl Rules {
    fn check(
        &self,
        descriptor: &Descriptor,
        limits: &Limits,
        place: Place,
    ) -> Result<(), Violation> {
        self.check_flags(descriptor, limits, place)?;
        self.check_reserved(descriptor)?;
        self.check_sizes(descriptor, limits)?;
        if self.overlaps(descriptor) {
            return Err(Violation::Overlap);
        }
        self.check_alignment(descriptor, limits)
    }

    fn check_flags(
        &self,
        descriptor: &Descriptor,
        limits: &Limits,
        place: Place,
    ) -> Result<(), Violation> {
        let mut allowed = self.flags.0;
        if place == Place::Queue {
            allowed &= !Flags::FENCE.0;
        }
        if !limits.block_on_fault {
            allowed &= !Flags::BLOCK_ON_FAULT.0;
        }
        let invalid = descriptor.flags().0 & !allowed;
        if invalid != 0 {
            return Err(Violation::Flags(Flags(invalid)));
        }
        let invalid = descriptor.operation_flags & !self.operation_flags;
        match (invalid, limits.kind) {
            (0, _) => Ok(()),
            (_, Kind::Iaa) => Err(Violation::OperationFlags(invalid)),
            (_, Kind::Dsa) => Err(Violation::Reserved),
        }
    }

    fn check_reserved(&self, descriptor: &Descriptor) -> Result<(), Violation> {
        let mut used = self.used | HEAD;
        if let Some(byte) = self.expected_result
            && descriptor.flags().has(Flags::CHECK_RESULT)
        {
            used |= 1 << byte;
        }
        let clean = descriptor
            .bytes()
            .iter()
            .enumerate()
            .all(|(at, byte)| *byte == 0 || used >> at & 1 == 1);
        if clean {
            Ok(())
        } else {
            Err(Violation::Reserved)
        }
    }

    fn check_sizes(&self, descriptor: &Descriptor, limits: &Limits) -> Result<(), Violation> {
        let size = descriptor.size;
        let fits = size != 0 && u64::from(size) <= limits.max_transfer;
        match self.size {
            // That it is zero has been seen to with the reserved bytes.
            Size::None => {}
            Size::Descriptors => {
                let most = limits.max_batch.map_or(0, |most| most.get());
                if size < 2 || size > most {
                    return Err(Violation::Count);
                }
            }
            Size::Bytes if !fits => return Err(Violation::Size),
            Size::Words if !fits || !size.is_multiple_of(8) || size > MAX_DELTA => {
                return Err(Violation::Size);
            }
            Size::Bytes | Size::Words => {}
        }
        if let Some(rule) = self.delta_size {
            let size = descriptor.low(rule.operand);
            if size < rule.least || !size.is_multiple_of(10) {
                return Err(Violation::DeltaSize);
            }
        }
        Ok(())
    }

    fn overlaps(&self, descriptor: &Descriptor) -> bool {
        let size = descriptor.size;
        let (first, second) = match self.apart {
            Apart::No => return false,
            Apart::SourceAndDestination => (size, size),
            Apart::DeltaAndDestination => (descriptor.low(0), size),
            Apart::InputAndOutput => (size, descriptor.low(1)),
        };
        let ends_before = |start: u64, size: u32, next: u64| {
            start
                .checked_add(u64::from(size))
                .is_some_and(|end| end <= next)
        };
        let (a, b) = (descriptor.address_1, descriptor.address_2);
        !ends_before(a, first, b) && !ends_before(b, second, a)
    }

    fn check_alignment(&self, descriptor: &Descriptor, limits: &Limits) -> Result<(), Violation> {
        // A multiple of 64 at most: the lowest byte of a field decides.
        let bytes = descriptor.bytes();
        let mut wrong = self
            .aligned
            .iter()
            .filter(|field| !bytes[field.byte].is_multiple_of(field.multiple));
        if wrong.next().is_some() {
            return Err(match self.size {
                Size::Descriptors => Violation::ListAlignment,
                _ => Violation::Alignment,
            });
        }
        let wants_record = descriptor.flags().has(Flags::RECORD_VALID);
        if wants_record
            && !descriptor
                .record
                .is_multiple_of(limits.kind.record_alignment())
        {
            return Err(Violation::RecordAlignment);
        }
        Ok(())
    }
}

/// The `len` bytes from `first` on, as they stand in [`Rules::used`].
pub(crate) const fn span(first: u32, len: u32) -> u64 {
    ((1 << len) - 1) << first
}

/// 16-bit offsets of 8-byte words reach so far.
const MAX_DELTA: u32 = 512 << 10;

/// Control and record (4 to 15) are in every descriptor, as are IAA's operation flags (38, 39), which have a rule of
/// their own. The address space (0 to 3) is set by the processor or the kernel.
const HEAD: u64 = span(4, 12) | span(38, 2);

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use proptest::prelude::*;

    use super::*;
    use crate::{Mode, Operations};

    fn descriptors() -> impl Strategy<Value = Descriptor> {
        let head = (
            prop_oneof![Just(0), any::<u32>()],
            any::<u32>(),
            any::<u64>(),
        );
        let tail = (any::<u32>(), any::<u16>(), any::<u16>(), any::<[u64; 3]>());
        (head, any::<u64>(), any::<u64>(), tail).prop_map(
            |((pasid, control, record), address_1, address_2, tail)| {
                let (size, interrupt, operation_flags, operands) = tail;
                Descriptor {
                    pasid,
                    control,
                    record,
                    address_1,
                    address_2,
                    size,
                    interrupt,
                    operation_flags,
                    operands,
                }
            },
        )
    }

    fn limits(kind: Kind) -> Limits {
        Limits {
            kind,
            mode: Mode::Shared,
            size: 8,
            threshold: 8,
            max_batch: NonZeroU32::new(32),
            max_transfer: u64::from(u32::MAX),
            block_on_fault: true,
            operations: Operations([!0; 4]),
            version: 0x100,
            numa_node: None,
        }
    }

    proptest! {
        #[test]
        fn the_bytes_are_those_in_memory(descriptor in descriptors()) {
            let pointer = std::ptr::from_ref(&descriptor).cast::<[u8; 64]>();
            // SAFETY: a descriptor is 64 bytes without padding (asserted where it is defined), and lives on.
            let memory = unsafe { *pointer };
            prop_assert_eq!(descriptor.bytes(), memory);
        }

        #[test]
        fn any_descriptor_can_be_checked(descriptor in descriptors(), opcode in 0_u8..0x60) {
            let control = Descriptor::control_of(opcode, descriptor.flags());
            for kind in [Kind::Dsa, Kind::Iaa] {
                for place in [Place::Queue, Place::Batch] {
                    let checked = check(&Descriptor { control, ..descriptor }, &limits(kind), place);
                    if let Err(violation) = checked {
                        prop_assert!((0x10..=0x30).contains(&violation.code()));
                    }
                }
            }
        }

        /// What the table does not name is refused, byte by byte.
        #[test]
        fn no_operation_uses_bytes_that_it_does_not_name(opcode in 0_u8..0x60, at in 16_usize..64, value in 1_u8..) {
            for (kind, rules) in [(Kind::Dsa, dsa::rules(opcode)), (Kind::Iaa, iaa::rules(opcode))] {
                let Some(rules) = rules else { continue };
                let named = (rules.used | HEAD) >> at & 1 == 1;
                let mut words = [0_u64; 8];
                words[at / 8] |= u64::from(value) << (8 * (at % 8));
                let [_, record, address_1, address_2, counts, operands @ ..] = words;
                let descriptor = Descriptor {
                    control: Descriptor::control_of(opcode, Flags::default()),
                    record,
                    address_1,
                    address_2,
                    size: u32::try_from(counts & 0xffff_ffff).unwrap(),
                    interrupt: u16::try_from(counts >> 32 & 0xffff).unwrap(),
                    operation_flags: u16::try_from(counts >> 48).unwrap(),
                    operands,
                    ..Descriptor::default()
                };
                let checked = check(&descriptor, &limits(kind), Place::Queue);
                prop_assert_eq!(checked == Err(Violation::Reserved), !named || kind == Kind::Dsa && at / 2 == 19);
            }
        }
    }

    #[test]
    fn areas_may_touch_but_not_overlap() {
        let rules = Rules {
            apart: Apart::SourceAndDestination,
            ..dsa::rules(crate::opcode::MEMMOVE).unwrap()
        };
        let overlaps = |address_1, address_2, size| {
            rules.overlaps(&Descriptor {
                address_1,
                address_2,
                size,
                ..Descriptor::default()
            })
        };
        assert!(!overlaps(0, 16, 16));
        assert!(!overlaps(16, 0, 16));
        assert!(overlaps(0, 15, 16));
        assert!(overlaps(15, 0, 16));
        assert!(overlaps(8, 8, 1));
        // An area that wraps around is nowhere apart.
        assert!(overlaps(u64::MAX - 3, u64::MAX - 1, 8));
    }
}
