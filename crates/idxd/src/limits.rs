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
    /// NUMA node of the device, where it has one.
    pub numa_node: Option<u32>,
}
