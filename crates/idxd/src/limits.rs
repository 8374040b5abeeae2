//! What a work queue can do, as its driver reports or a test defines.

use std::num::NonZeroU32;

/// The device behind a work queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Data Streaming Accelerator: moves, fills, compares.
    Dsa,
    /// In-Memory Analytics Accelerator: compresses and decompresses.
    Iaa,
}

impl Kind {
    /// Alignment that a completion record needs, in bytes.
    pub const fn record_alignment(self) -> u64 {
        match self {
            Self::Dsa => 32,
            Self::Iaa => 64,
        }
    }
}

/// How a work queue takes descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// From many processes: ENQCMD, which returns whether the descriptor was accepted.
    Shared,
    /// From one process: MOVDIR64B, which returns nothing. What is too much is lost.
    Dedicated,
}

/// The opcodes that a device or a work queue takes: bit N is opcode N.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Operations(pub [u64; 4]);

impl Operations {
    /// Whether `opcode` is one of them.
    pub const fn has(&self, opcode: u8) -> bool {
        self.0[opcode as usize / 64] >> (opcode % 64) & 1 == 1
    }

    /// These and `opcode`.
    #[must_use]
    pub const fn with(mut self, opcode: u8) -> Self {
        self.0[opcode as usize / 64] |= 1 << (opcode % 64);
        self
    }

    /// These without `opcode`.
    #[must_use]
    pub const fn without(mut self, opcode: u8) -> Self {
        self.0[opcode as usize / 64] &= !(1 << (opcode % 64));
        self
    }
}

/// What a device can do besides its operations: the register GENCAP (DSA 3.0, 9.2.2), as sysfs shows it in `gen_cap`.
///
/// Bits 10 (fill with 16 bytes), 11 (64-bit CRC) and 15 (batch continuation) stand for flags that no builder of this
/// crate sets; the [rules](crate::rules) refuse these flags anyway. With bit 12 the record tells which operand faulted,
/// and may withhold the address (8.2.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Capabilities(pub u64);

impl Capabilities {
    /// Of a DSA of the first generation, as Sapphire Rapids reports them.
    pub const FIRST_DSA: Self = Self(0x40_915f_0107);
    /// Of an IAA of the first generation.
    pub const FIRST_IAA: Self = Self(0x7_1f10_901f_0105);

    /// Whether bit `bit` is set.
    pub const fn has(self, bit: u32) -> bool {
        self.0 >> bit & 1 == 1
    }

    /// Whether source and destination of a copy may overlap.
    pub const fn overlapping_copy(self) -> bool {
        self.has(1)
    }

    /// Whether a descriptor may ask that its output goes to the processor's cache.
    pub const fn cache_control(self) -> bool {
        self.has(2)
    }

    /// Whether a descriptor may ask for writes to durable memory by themselves, from version 3 on.
    pub const fn durable_writes(self) -> bool {
        self.has(5)
    }

    /// Whether a descriptor may ask that its destination is read back.
    pub const fn destination_readback(self) -> bool {
        self.has(8)
    }

    /// Whether a descriptor of DSA that writes to memory may ask for that in order. (Bit 54 says the same of writes to
    /// other devices.)
    pub const fn strict_ordering(self) -> bool {
        !self.has(53)
    }

    /// Whether a drain may name addresses that are read back.
    pub const fn drain_readback(self) -> bool {
        self.has(9)
    }

    /// Whether a batch may have one descriptor only.
    pub const fn single_batch(self) -> bool {
        self.has(52)
    }
}

/// What one work queue takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The device behind it.
    pub kind: Kind,
    /// How it takes descriptors.
    pub mode: Mode,
    /// Entries.
    pub size: u32,
    /// Entries that the portal of a process may fill; of a dedicated queue all.
    pub threshold: u32,
    /// Most descriptors of a batch; `None` where there are no batches (IAA).
    pub max_batch: Option<NonZeroU32>,
    /// Most bytes of one descriptor.
    pub max_transfer: u64,
    /// Whether a descriptor may ask to wait for page faults.
    pub block_on_fault: bool,
    /// Opcodes that it takes.
    pub operations: Operations,
    /// The device's version: 0x100 is the first.
    pub version: u32,
    /// What the device can do besides; nothing where the kernel does not say.
    pub capabilities: Capabilities,
    /// NUMA node of the device, where it has one.
    pub numa_node: Option<u32>,
}
