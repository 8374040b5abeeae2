//! What a descriptor may hold: the one table, per device, of what each operation allows.
//!
//! The tables themselves are [`dsa::rules`] and [`iaa::rules`]. The driver builds descriptors that keep to them, and
//! the device model refuses those that do not, as a device does:
//!
//! ```text
//!   opcode ─ flags ─ IAA's own flags ─ reserved bytes ─ alignment ───── sizes ──── overlap
//!    0x10    0x11      0x30, 0x31          0x12      0x18,0x1b,0x1c   0x13-0x15     0x16
//! ```
//! The first that is wrong is reported here. A device looks in any order, and at different times in different ones
//! (DSA 3.0, 5.4; IAA 2.1, 4.1): only a descriptor with one mistake gets the same answer everywhere. Whether an
//! interrupt handle is valid (0x19) only the device knows.
//!
//! Sources: DSA 3.0, 5.4 and 5.5 (tables 5-3 to 5-5), 8.1.3 and 8.3; IAA 2.1, 4.1, 4.2 and 6.1.3 to 6.3.6. Assumed:
//! that the size of a delta record, which "should" be a multiple of 10 (DSA 3.0, 8.3.8), has to be one.

use thiserror::Error;

use crate::{Capabilities, Descriptor, Flags, Kind, Limits, dsa, iaa};

/// What a descriptor may hold, by its operation, its flags, and what the device can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    /// Flags that may be set.
    pub flags: Flags,
    /// Of each of these, one flag at least has to be set.
    pub needed: &'static [Flags],
    /// Whether it may be a member of a batch.
    pub in_batch: bool,
    /// IAA: bits of [`Descriptor::operation_flags`] that may be set.
    pub operation_flags: u16,
    /// IAA: those of them that have to be.
    pub needed_operation_flags: u16,
    /// IAA: whether bytes 56 to 59 are more flags. The first generation has none that may be set.
    pub second_flags: bool,
    /// Bytes from 16 on that may be something else than zero: bit N is byte N.
    pub used: u64,
    /// What [`Descriptor::size`] counts.
    pub size: Size,
    /// Where the size of a delta record stands, and the smallest it may be.
    pub delta_size: Option<DeltaSize>,
    /// IAA: the size that an AECS may have, if there is one.
    pub aecs: Option<AecsSize>,
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
            needed: &[],
            in_batch: false,
            operation_flags: 0,
            needed_operation_flags: 0,
            second_flags: false,
            used: 0,
            size: Size::None,
            delta_size: None,
            aecs: None,
            apart: Apart::No,
            aligned: &[],
        }
    }

    /// A drain, which is the same for both devices (DSA 3.0, 8.3.3; IAA 2.1, 6.3.1). It may name addresses that are
    /// read back where the device can do that.
    pub(crate) const fn drain(descriptor: &Descriptor, limits: &Limits) -> Self {
        const BACK_1: Flags = Flags(1 << 16);
        const BACK_2: Flags = Flags(1 << 17);
        const WITHOUT_IMPLICIT: Flags = Flags(0b11 << 18);
        const NEEDED: &[Flags] = &[Flags::RECORD_REQUESTED.with(Flags::INTERRUPT)];
        let mut rules = Self {
            needed: NEEDED,
            ..Self::nothing(RECORD.with(WITHOUT_IMPLICIT))
        };
        if limits.capabilities.drain_readback() {
            rules.flags = rules.flags.with(BACK_1).with(BACK_2);
            if descriptor.flags().has(BACK_1) {
                rules.flags = rules.flags.with(TRAFFIC_1);
                rules.used |= ADDRESS_1;
            }
            if descriptor.flags().has(BACK_2) {
                rules.flags = rules.flags.with(TRAFFIC_2);
                rules.used |= ADDRESS_2;
            }
        }
        rules
    }
}

/// What [`Descriptor::size`] counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// Nothing: it is zero.
    None,
    /// Descriptors of a batch: two at least, or one where the device takes that, at most what queue and device take.
    Descriptors,
    /// Bytes: one at least, at most what the queue takes.
    Bytes,
    /// Bytes of deltas: as `Bytes`, and at most 512 KiB, as offsets are 16 bits of 8-byte words.
    Words,
    /// IAA: bytes of input. Those of the output are a limit of their own; only one of the two may be zero.
    Input,
}

/// Where the size of a delta record stands in a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaSize {
    /// The operand whose low half it is.
    pub operand: usize,
    /// The least that it may be, in bytes. It is always a multiple of 10, as each difference is 10 bytes, and at most
    /// what the queue takes.
    pub least: u32,
}

/// How large an AECS may be, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AecsSize {
    /// The least.
    pub least: u32,
    /// The most.
    pub most: u32,
}

/// Which areas of an operation may not overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Apart {
    /// They may.
    No,
    /// Source and destination, both of the descriptor's size.
    SourceAndDestination,
    /// A delta record that is written, as large as it may become, and either source.
    DeltaAndSources,
    /// The delta record and what it is applied to.
    DeltaAndDestination,
    /// IAA: source, destination, which has a size of its own, and the AECS, if there is one.
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
    /// Flags that the operation, the queue, the device or the place does not allow, or that are missing.
    #[error("flags {:#08x} are not allowed here, or missing", .0.0)]
    Flags(Flags),
    /// A byte that has to be zero.
    #[error("a field that has to be zero is not")]
    Reserved,
    /// The number of bytes.
    #[error("a size is zero, too large, or none that an AECS has")]
    Size,
    /// The number of a batch's descriptors.
    #[error("a batch has too few or too many descriptors")]
    Count,
    /// The size of a delta record.
    #[error("the size of the delta record is too small, too large, or not a multiple of 10")]
    DeltaSize,
    /// Areas that overlap.
    #[error("areas overlap")]
    Overlap,
    /// A batch's list.
    #[error("the address of a batch's list is not a multiple of 64")]
    ListAlignment,
    /// The record.
    #[error("the address of the completion record is misaligned")]
    RecordAlignment,
    /// Any other address, or the size of an AECS or of what is compared for a delta.
    #[error("an address or a size is misaligned")]
    Alignment,
    /// IAA: flags of the operation.
    #[error("the operation's own flags {0:#06x} are not allowed, or missing")]
    OperationFlags(u16),
    /// IAA: the second flags of a compression.
    #[error("the operation's second flags {0:#010x} are not allowed")]
    SecondFlags(u32),
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
            Self::SecondFlags(_) => 0x31,
        }
    }
}

/// Whether a device behind a queue with `limits` would begin with `descriptor`, found in `place`.
///
/// # Errors
/// The first rule that it breaks.
pub fn check(descriptor: &Descriptor, limits: &Limits, place: Place) -> Result<(), Violation> {
    let rules = match limits.kind {
        Kind::Dsa => dsa::rules(descriptor, limits),
        Kind::Iaa => iaa::rules(descriptor, limits),
    };
    let known = limits.operations.has(descriptor.opcode());
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
        self.check_operation_flags(descriptor, limits.kind)?;
        self.check_reserved(descriptor)?;
        self.check_alignment(descriptor, limits)?;
        self.check_sizes(descriptor, limits)?;
        if self.overlaps(descriptor) {
            return Err(Violation::Overlap);
        }
        Ok(())
    }

    fn check_flags(
        &self,
        descriptor: &Descriptor,
        limits: &Limits,
        place: Place,
    ) -> Result<(), Violation> {
        let flags = descriptor.flags();
        let mut allowed = self.flags.0;
        if place == Place::Queue {
            allowed &= !Flags::FENCE.0;
        }
        if !limits.block_on_fault {
            allowed &= !Flags::BLOCK_ON_FAULT.0;
        }
        if !flags.has(Flags::RECORD_VALID) {
            allowed &= !(Flags::RECORD_REQUESTED.0 | RECORD_TRAFFIC.0);
        }
        if limits.kind == Kind::Dsa && limits.version >= 0x300 && self.flags.has(Flags::CACHE) {
            allowed |= CACHE_3.0;
        }
        if limits.kind == Kind::Dsa && !limits.capabilities.strict_ordering() {
            allowed &= !Flags::STRICT_ORDERING.0;
        }
        let missing = self.needed.iter().filter(|any| flags.0 & any.0 == 0);
        let invalid = missing.fold(flags.0 & !allowed, |all, any| all | any.0)
            | undefined_cache_control(flags, limits.capabilities);
        match invalid {
            0 => Ok(()),
            _ => Err(Violation::Flags(Flags(invalid))),
        }
    }

    fn check_operation_flags(&self, descriptor: &Descriptor, kind: Kind) -> Result<(), Violation> {
        let flags = descriptor.operation_flags;
        let invalid = flags & !self.operation_flags | self.needed_operation_flags & !flags;
        match (invalid, kind) {
            (0, _) => {}
            (_, Kind::Iaa) if self.operation_flags != 0 => {
                return Err(Violation::OperationFlags(invalid));
            }
            _ => return Err(Violation::Reserved),
        }
        match descriptor.low(2) {
            second if second != 0 && self.second_flags => Err(Violation::SecondFlags(second)),
            _ => Ok(()),
        }
    }

    fn check_reserved(&self, descriptor: &Descriptor) -> Result<(), Violation> {
        let used = self.used_by(descriptor.flags());
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

    /// Bytes that may be something else than zero with these flags.
    fn used_by(&self, flags: Flags) -> u64 {
        let mut used = self.used | HEAD;
        if flags.has(Flags::RECORD_VALID) {
            used |= RECORD_ADDRESS;
        }
        if flags.has(Flags::INTERRUPT) {
            used |= INTERRUPT_HANDLE;
        }
        used
    }

    fn check_sizes(&self, descriptor: &Descriptor, limits: &Limits) -> Result<(), Violation> {
        let size = descriptor.size;
        let taken = |size: u32| u64::from(size) <= limits.max_transfer;
        let fits = match self.size {
            // That it is zero has been seen to with the reserved bytes.
            Size::None => true,
            Size::Descriptors => {
                let least = if limits.capabilities.single_batch() {
                    1
                } else {
                    2
                };
                let most = limits.max_batch.map_or(0, |most| most.get());
                if size < least || size > most {
                    return Err(Violation::Count);
                }
                true
            }
            Size::Bytes => size > 0 && taken(size),
            Size::Words => size > 0 && taken(size) && size <= MAX_DELTA,
            Size::Input => {
                let output = descriptor.low(1);
                size | output != 0 && taken(size) && taken(output)
            }
        };
        let fits_aecs = self.aecs.is_none_or(|rule| {
            let size = descriptor.high(1);
            (rule.least..=rule.most).contains(&size) && taken(size)
        });
        if !fits || !fits_aecs {
            return Err(Violation::Size);
        }
        if let Some(rule) = self.delta_size {
            let size = descriptor.low(rule.operand);
            if size < rule.least || !size.is_multiple_of(10) || !taken(size) {
                return Err(Violation::DeltaSize);
            }
        }
        Ok(())
    }

    fn overlaps(&self, descriptor: &Descriptor) -> bool {
        let size = u64::from(descriptor.size);
        let (first, second) = (descriptor.address_1, descriptor.address_2);
        let pairs = match self.apart {
            Apart::No => return false,
            Apart::SourceAndDestination => [Some(((first, size), (second, size))), None, None],
            Apart::DeltaAndSources => {
                let delta = (descriptor.operands[0], u64::from(descriptor.low(1)));
                [
                    Some((delta, (first, size))),
                    Some((delta, (second, size))),
                    None,
                ]
            }
            Apart::DeltaAndDestination => {
                let delta = (first, u64::from(descriptor.low(0)));
                [Some((delta, (second, size))), None, None]
            }
            Apart::InputAndOutput => {
                let (input, output) = ((first, size), (second, u64::from(descriptor.low(1))));
                let aecs = self.aecs.map(|_| iaa::aecs_area(descriptor));
                [
                    Some((input, output)),
                    aecs.map(|aecs| (aecs, input)),
                    aecs.map(|aecs| (aecs, output)),
                ]
            }
        };
        pairs
            .into_iter()
            .flatten()
            .any(|(one, other)| overlap(one, other))
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
        // Without a valid address it is zero.
        if !descriptor
            .record
            .is_multiple_of(limits.kind.record_alignment())
        {
            return Err(Violation::RecordAlignment);
        }
        Ok(())
    }
}

/// Those of the flags for cache control that the device lacks, or that mean nothing together (DSA 3.0, 8.1.3.1).
fn undefined_cache_control(flags: Flags, device: Capabilities) -> u32 {
    let set = flags.0 & (Flags::CACHE.0 | Flags::DESTINATION_READBACK.0 | CACHE_3.0);
    let mut undefined = set;
    if flags.has(CACHE_3) {
        // Durable writes, or writes to memory with readback; neither goes to the cache.
        let durable = set == CACHE_3.0 && device.durable_writes();
        let read_back = set == CACHE_3.with(Flags::DESTINATION_READBACK).0;
        if durable || read_back && device.destination_readback() {
            undefined = 0;
        }
        return undefined;
    }
    if device.cache_control() {
        undefined &= !Flags::CACHE.0;
    }
    if device.destination_readback() {
        undefined &= !Flags::DESTINATION_READBACK.0;
    }
    undefined
}

/// Whether two areas, each an address and a length, have a byte in common. One that wraps around is nowhere apart.
fn overlap(one: (u64, u64), other: (u64, u64)) -> bool {
    let ends_before = |(start, len): (u64, u64), (next, _): (u64, u64)| {
        start.checked_add(len).is_some_and(|end| end <= next)
    };
    one.1 > 0 && other.1 > 0 && !ends_before(one, other) && !ends_before(other, one)
}

/// The `len` bytes from `first` on, as they stand in [`Rules::used`].
pub(crate) const fn span(first: u32, len: u32) -> u64 {
    ((1 << len) - 1) << first
}

/// Record and interrupt, and the record's traffic class: every operation has them.
pub(crate) const RECORD: Flags = Flags::RECORD_VALID
    .with(Flags::RECORD_REQUESTED)
    .with(Flags::INTERRUPT)
    .with(RECORD_TRAFFIC);
/// What an operation needs whose result is its record.
pub(crate) const NEEDS_RECORD: &[Flags] = &[Flags::RECORD_VALID, Flags::RECORD_REQUESTED];
/// Traffic classes of the three addresses, and of the record.
pub(crate) const TRAFFIC_1: Flags = Flags(1 << 9);
pub(crate) const TRAFFIC_2: Flags = Flags(1 << 10);
pub(crate) const TRAFFIC_3: Flags = Flags(1 << 11);
const RECORD_TRAFFIC: Flags = Flags(1 << 12);
/// Since DSA 3.0 (appendix F); before, it is reserved.
const CACHE_3: Flags = Flags(1 << 5);

pub(crate) const ADDRESS_1: u64 = span(16, 8);
pub(crate) const ADDRESS_2: u64 = span(24, 8);
pub(crate) const SIZE: u64 = span(32, 4);

/// 16-bit offsets of 8-byte words reach so far.
const MAX_DELTA: u32 = 512 << 10;

/// Flags and opcode are in every descriptor, as are IAA's operation flags (38, 39), which have a rule of their own. The
/// address space (0 to 3) is set by the processor or the kernel.
const HEAD: u64 = span(4, 4) | span(38, 2);
const RECORD_ADDRESS: u64 = span(8, 8);
const INTERRUPT_HANDLE: u64 = span(36, 2);

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use proptest::prelude::*;

    use super::*;
    use crate::{Capabilities, Mode, Operations};

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
            capabilities: Capabilities::FIRST_DSA,
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
                        prop_assert!((0x10..=0x31).contains(&violation.code()));
                    }
                }
            }
        }

        /// What the table does not name is refused, byte by byte.
        #[test]
        fn no_operation_uses_bytes_that_it_does_not_name(
            opcode in 0_u8..0x60,
            at in 8_usize..64,
            value in 1_u8..,
            more: bool,
        ) {
            for kind in [Kind::Dsa, Kind::Iaa] {
                let more = match (more, kind) {
                    (false, _) => Flags::default(),
                    (true, Kind::Dsa) => Flags::INTERRUPT,
                    (true, Kind::Iaa) => Flags::INTERRUPT.with(Flags::READ_AECS),
                };
                let flags = Flags::RECORD_VALID.with(Flags::RECORD_REQUESTED).with(more);
                let mut words = [0_u64; 8];
                words[at / 8] |= u64::from(value) << (8 * (at % 8));
                let [_, record, address_1, address_2, counts, operands @ ..] = words;
                let descriptor = Descriptor {
                    control: Descriptor::control_of(opcode, flags),
                    record,
                    address_1,
                    address_2,
                    size: u32::try_from(counts & 0xffff_ffff).unwrap(),
                    interrupt: u16::try_from(counts >> 32 & 0xffff).unwrap(),
                    operation_flags: u16::try_from(counts >> 48).unwrap(),
                    operands,
                    ..Descriptor::default()
                };
                let rules = match kind {
                    Kind::Dsa => dsa::rules(&descriptor, &limits(kind)),
                    Kind::Iaa => iaa::rules(&descriptor, &limits(kind)),
                };
                let Some(rules) = rules else { continue };
                let checked = check(&descriptor, &limits(kind), Place::Queue);
                if let Err(Violation::Flags(_) | Violation::OperationFlags(_) | Violation::SecondFlags(_)) = checked {
                    continue;
                }
                let named = rules.used_by(flags) >> at & 1 == 1;
                // An operation flag is reserved where the operation has none.
                let has_none = kind == Kind::Dsa || rules.operation_flags == 0;
                let reserved = !named || has_none && at / 2 == 19;
                prop_assert_eq!(checked == Err(Violation::Reserved), reserved, "{:?}", checked);
            }
        }
    }

    #[test]
    fn areas_may_touch_but_not_overlap() {
        assert!(!overlap((0, 16), (16, 16)));
        assert!(!overlap((16, 16), (0, 16)));
        assert!(overlap((0, 16), (15, 16)));
        assert!(overlap((15, 16), (0, 16)));
        assert!(overlap((8, 1), (8, 1)));
        assert!(!overlap((8, 0), (0, 16)));
        // An area that wraps around is nowhere apart.
        assert!(overlap((u64::MAX - 3, 8), (u64::MAX - 1, 8)));
    }
}
