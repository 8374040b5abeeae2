//! Capabilities and limits of a work queue, as reported by the kernel or defined by a test.

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

/// The opcodes that a device or a work queue takes: bit N is opcode N.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Operations(pub [u64; 4]);

impl Operations {
    /// Whether `opcode` is included.
    pub const fn has(&self, opcode: u8) -> bool {
        self.0[opcode as usize / 64] >> (opcode % 64) & 1 == 1
    }

    /// These operations and `opcode`.
    #[must_use]
    pub const fn with(mut self, opcode: u8) -> Self {
        self.0[opcode as usize / 64] |= 1 << (opcode % 64);
        self
    }

    /// These operations without `opcode`.
    #[must_use]
    pub const fn without(mut self, opcode: u8) -> Self {
        self.0[opcode as usize / 64] &= !(1 << (opcode % 64));
        self
    }
}

/// Capabilities of a device besides its operations: the register GENCAP (DSA 3.0, 9.2.2), `gen_cap` in sysfs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Capabilities(pub u64);

impl Capabilities {
    /// A DSA of the first generation (Sapphire Rapids).
    pub const FIRST_DSA: Self = Self(0x40_915f_0107);
    /// An IAA of the first generation.
    pub const FIRST_IAA: Self = Self(0x7_1f10_901f_0105);

    /// Whether bit `bit` is set.
    pub const fn has(self, bit: u32) -> bool {
        self.0 >> bit & 1 == 1
    }

    /// Whether descriptors may have the flag for output to the processor's cache.
    pub const fn cache_control(self) -> bool {
        self.has(2)
    }

    /// The flag for output to the processor's cache, for output that is read soon. No flag for a device without cache
    /// control, which rejects it (DSA 3.0, 8.1.3.1; IAA 2.1, 6.1.3).
    pub const fn cache_flag(self) -> Flags {
        if self.cache_control() {
            Flags::CACHE
        } else {
            Flags(0)
        }
    }
}

/// Limits of one shared work queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The device behind it.
    pub kind: Kind,
    /// Number of entries.
    pub size: u32,
    /// Number of entries that a process may fill.
    pub threshold: u32,
    /// Most descriptors of a batch; `None` without batches (IAA).
    pub max_batch: Option<NonZeroU32>,
    /// Most bytes of one descriptor.
    pub max_transfer: u64,
    /// Opcodes that it accepts.
    pub operations: Operations,
    /// The device's version: 0x100 is the first.
    pub version: u32,
    /// The device's other capabilities; none if the kernel does not report them.
    pub capabilities: Capabilities,
}
