//! Configuration of a model.

use std::{fmt, num::NonZeroU32, sync::Arc, time::Duration};

use super::faults::Faults;
use idxd::{Capabilities, Kind, Limits, Operations, opcode};

/// Configuration of a [`Model`](super::Model).
#[derive(Clone, Debug)]
pub struct Config {
    /// The devices, which are identified by their index.
    pub devices: Vec<DeviceConfig>,
    /// Speed of the devices.
    pub speeds: Speeds,
    /// Random faults.
    pub faults: Faults,
    /// Random seed.
    pub seed: u64,
    /// How COMPARE_PATTERN is executed.
    pub work: Work,
}

impl Config {
    /// One DSA of the first generation in Sapphire Rapids, as administrators set it up: four engines, one shared work
    /// queue of 128 entries, batches to 128, transfers to 2 MiB.
    pub fn dsa() -> Self {
        Self::devices(Kind::Dsa, 1)
    }

    /// One IAA of the first generation: eight engines, one shared work queue of 128 entries, transfers to 2 MiB.
    pub fn iaa() -> Self {
        Self::devices(Kind::Iaa, 1)
    }

    /// `count` typical devices.
    pub fn devices(kind: Kind, count: usize) -> Self {
        let device = DeviceConfig {
            kind,
            engines: match kind {
                Kind::Dsa => 4,
                Kind::Iaa => 8,
            },
            queues: vec![typical(kind)],
        };
        Self {
            devices: vec![device; count],
            speeds: Speeds::default(),
            faults: Faults::default(),
            seed: 0,
            work: Work::All,
        }
    }
}

/// One device.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// DSA or IAA.
    pub kind: Kind,
    /// Number of engines, which serve all work queues.
    pub engines: usize,
    /// Limits of each work queue.
    pub queues: Vec<Limits>,
}

/// Limits of a work queue of 128 entries.
pub(super) fn typical(kind: Kind) -> Limits {
    let (opcodes, max_batch, capabilities): (&[u8], _, _) = match kind {
        Kind::Dsa => (
            &[
                opcode::NOOP,
                opcode::BATCH,
                opcode::DRAIN,
                opcode::MEMMOVE,
                opcode::COMPARE_PATTERN,
            ],
            NonZeroU32::new(128),
            Capabilities::FIRST_DSA,
        ),
        Kind::Iaa => (
            &[
                opcode::NOOP,
                opcode::DRAIN,
                opcode::DECOMPRESS,
                opcode::COMPRESS,
            ],
            None,
            Capabilities::FIRST_IAA,
        ),
    };
    Limits {
        kind,
        size: 128,
        threshold: 128,
        max_batch,
        max_transfer: 2 << 20,
        operations: opcodes
            .iter()
            .fold(Operations::default(), |all, opcode| all.with(*opcode)),
        version: 0x100,
        capabilities,
    }
}

/// Speed of a device, which all its engines share.
///
/// The defaults are orders of magnitude from publications about Sapphire Rapids ("A Quantitative Analysis and
/// Guidelines of Data Streaming Accelerator", ASPLOS 2024; QEMU's commit f6fe9fea99 for compression): measurements
/// with a model are statements about the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speeds {
    /// Time from the end of the transfer to the record.
    pub latency: Duration,
    /// Bytes per second that DSA copies or compares.
    pub transfer: u64,
    /// Bytes per second that IAA compresses.
    pub compress: u64,
    /// Bytes per second that IAA decompresses, of the output, taken as twice the input (assumed).
    pub decompress: u64,
}

impl Default for Speeds {
    fn default() -> Self {
        Self {
            latency: Duration::from_micros(1),
            transfer: 30_000_000_000,
            compress: 4_000_000_000,
            decompress: 30_000_000_000,
        }
    }
}

impl Speeds {
    /// The same, slower by `factor`.
    #[must_use]
    pub fn slower(mut self, factor: u32) -> Self {
        self.latency = self.latency.saturating_mul(factor);
        for rate in [&mut self.transfer, &mut self.compress, &mut self.decompress] {
            *rate = (*rate / u64::from(factor.max(1))).max(1);
        }
        self
    }
}

/// How COMPARE_PATTERN is executed. Benchmarks measure the processor, which should not do the device's work as well.
#[derive(Clone)]
pub enum Work {
    /// By reading the memory.
    All,
    /// By a function of address and length that returns whether the bytes are the pattern.
    Oracle(Arc<dyn Fn(u64, u32) -> bool + Send + Sync>),
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::All => "All",
            Self::Oracle(_) => "Oracle",
        })
    }
}
