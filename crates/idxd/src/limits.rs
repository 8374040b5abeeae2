//! Capabilities and limits of a work queue, as the kernel reports them or a test defines them.

use std::num::NonZeroU32;

use crate::Flags;

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

    /// Whether a descriptor may ask that its output goes to the processor's cache.
    pub const fn cache_control(self) -> bool {
        self.has(2)
    }

    /// The flag for output to the processor's cache, which is right when the output is read soon; no flag where the
    /// device lacks that: there the flag is an error (DSA 3.0, 8.1.3.1; IAA 2.1, 6.1.3).
    pub const fn cache_flag(self) -> Flags {
        if self.cache_control() {
            Flags::CACHE
        } else {
            Flags(0)
        }
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
    /// Opcodes that it takes.
    pub operations: Operations,
    /// The device's version: 0x100 is the first.
    pub version: u32,
    /// What the device can do besides; nothing where the kernel does not say.
    pub capabilities: Capabilities,
    /// NUMA node of the device, where it has one.
    pub numa_node: Option<u32>,
}
