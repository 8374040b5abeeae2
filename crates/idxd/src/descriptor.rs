//! The 64 bytes that specify an operation of a device.
//!
//! ```text
//!  0      4            7        8                16          24          32     36          38           40             64
//! ┌──────┬────────────┬────────┬────────────────┬───────────┬───────────┬──────┬───────────┬────────────┬──────────────┐
//! │PASID │ flags (24) │ opcode │ record address │ address 1 │ address 2 │ size │ interrupt │ operation  │ operation's  │
//! │(zero)│            │        │                │           │           │      │  (zero)   │ flags (IAA)│ own          │
//! └──────┴────────────┴────────┴────────────────┴───────────┴───────────┴──────┴───────────┴────────────┴──────────────┘
//! ```
//! Source: the kernel's uapi header `linux/idxd.h` (`struct dsa_hw_desc`, `struct iax_hw_desc`). The typed
//! builders of [`dsa`](crate::dsa) and [`iaa`](crate::iaa) fill these in.

/// A descriptor of DSA or of IAA in the device's format: little endian, with the alignment that a batch's list needs.
///
/// It contains plain addresses. A descriptor does nothing until it is submitted, and the caller of
/// [`Submit::submit`](crate::Submit::submit) is responsible for the addresses.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    zerocopy::FromBytes,
    zerocopy::Immutable,
    zerocopy::IntoBytes,
)]
#[repr(C, align(64))]
pub struct Descriptor {
    /// Address space and privilege. Zero: the processor (ENQCMD) or the work queue supplies them.
    pub pasid: u32,
    /// Bits 23:0 are [`Flags`], bits 31:24 the opcode.
    pub control: u32,
    /// Address of the completion record.
    pub record: u64,
    /// Source, pattern or list, depending on the operation.
    pub address_1: u64,
    /// Destination, second source or pattern, depending on the operation.
    pub address_2: u64,
    /// Bytes to work on, or the number of a batch's descriptors.
    pub size: u32,
    /// Interrupt handle. Zero: a process has no interrupts, and without that flag the field is reserved.
    pub interrupt: u16,
    /// IAA only: flags of the operation.
    pub operation_flags: u16,
    /// Operands of some operations; zero if unused.
    pub operands: [u64; 3],
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<Descriptor>() == 64 && align_of::<Descriptor>() == 64);
    assert!(offset_of!(Descriptor, control) == 4);
    assert!(offset_of!(Descriptor, record) == 8);
    assert!(offset_of!(Descriptor, address_1) == 16);
    assert!(offset_of!(Descriptor, address_2) == 24);
    assert!(offset_of!(Descriptor, size) == 32);
    assert!(offset_of!(Descriptor, interrupt) == 36);
    assert!(offset_of!(Descriptor, operation_flags) == 38);
    assert!(offset_of!(Descriptor, operands) == 40);
};

impl Descriptor {
    /// An operation without operands that always writes a record.
    pub const fn new(opcode: u8, record: u64) -> Self {
        let flags = Flags::RECORD_VALID.with(Flags::RECORD_REQUESTED);
        Self {
            pasid: 0,
            control: Self::control_of(opcode, flags),
            record,
            address_1: 0,
            address_2: 0,
            size: 0,
            interrupt: 0,
            operation_flags: 0,
            operands: [0; 3],
        }
    }

    /// This descriptor with further flags. A device rejects a flag that the operation does not define, even a harmless
    /// one: cache control on a comparison is an error.
    #[must_use]
    pub const fn with(mut self, flags: Flags) -> Self {
        self.control |= flags.0 & Flags::MASK;
        self
    }

    /// Operation code, byte 7.
    pub const fn opcode(&self) -> u8 {
        (self.control >> 24) as u8
    }

    /// The 24 bits of flags.
    pub const fn flags(&self) -> Flags {
        Flags(self.control & Flags::MASK)
    }

    /// Bits 31:0 of operand `index` at offset `40 + 8 * index`; see [`Descriptor::operands`].
    pub const fn low(&self, index: usize) -> u32 {
        (self.operands[index] & 0xffff_ffff) as u32
    }

    /// Bits 63:32 of operand `index`.
    pub const fn high(&self, index: usize) -> u32 {
        (self.operands[index] >> 32) as u32
    }

    /// The descriptor as it stands in memory.
    pub fn bytes(&self) -> [u8; 64] {
        zerocopy::transmute!(*self)
    }

    /// The descriptor that stands in memory as `bytes`.
    pub fn from_bytes(bytes: [u8; 64]) -> Self {
        zerocopy::transmute!(bytes)
    }

    /// [`Descriptor::control`] for this opcode and these flags.
    pub const fn control_of(opcode: u8, flags: Flags) -> u32 {
        ((opcode as u32) << 24) | (flags.0 & Flags::MASK)
    }
}

/// Bits 23:0 of a descriptor's second word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(pub u32);

impl Flags {
    const MASK: u32 = 0x00ff_ffff;

    /// The record's address is valid (CRAV).
    pub const RECORD_VALID: Self = Self(1 << 2);
    /// A record is always written, not only for an error (RCR).
    pub const RECORD_REQUESTED: Self = Self(1 << 3);
    /// Output goes to the processor's cache rather than to memory (CC).
    pub const CACHE: Self = Self(1 << 8);
    /// IAA: the second source is an AECS.
    pub const READ_AECS: Self = Self(1 << 16);

    /// These flags and `other`.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether all of `other` are set.
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// Operation codes, as in the uapi header.
pub mod opcode {
    /// Both: does nothing but write a record.
    pub const NOOP: u8 = 0x00;
    /// DSA: a list of descriptors.
    pub const BATCH: u8 = 0x01;
    /// Both: completes when everything before it has.
    pub const DRAIN: u8 = 0x02;
    /// DSA: copy.
    pub const MEMMOVE: u8 = 0x03;
    /// DSA: compare with a pattern.
    pub const COMPARE_PATTERN: u8 = 0x06;
    /// IAA: inflate.
    pub const DECOMPRESS: u8 = 0x42;
    /// IAA: deflate, or the statistics for it.
    pub const COMPRESS: u8 = 0x43;
}
