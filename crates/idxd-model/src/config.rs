//! Which devices a model has.

use std::{fmt, num::NonZeroU32, sync::Arc, time::Duration};

use super::faults::Faults;
use idxd::{Capabilities, Kind, Limits, Mode, Operations, opcode};

/// What a [`Model`](super::Model) is made of.
#[derive(Clone, Debug)]
pub struct Config {
    /// The devices; they are named by their place.
    pub devices: Vec<DeviceConfig>,
    /// How fast they are.
    pub speeds: Speeds,
    /// What goes wrong by itself.
    pub faults: Faults,
    /// Random seed.
    pub seed: u64,
    /// How much of the work is really done.
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

    /// The limits of one work queue, to change them.
    pub fn limits_mut(&mut self, device: usize, queue: usize) -> Option<&mut Limits> {
        self.devices.get_mut(device)?.queues.get_mut(queue)
    }
}

/// One device.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// Which device.
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
        mode: Mode::Shared,
        size: 128,
        threshold: 128,
        max_batch,
        max_transfer: 2 << 20,
        operations: opcodes
            .iter()
            .fold(Operations::default(), |all, opcode| all.with(*opcode)),
        version: 0x100,
        capabilities,
        numa_node: Some(0),
    }
}

/// How fast a device is. All its engines together share its throughput.
///
/// The defaults are orders of magnitude from publications about Sapphire Rapids ("A Quantitative Analysis and
/// Guidelines of Data Streaming Accelerator", ASPLOS 2024; QEMU's commit f6fe9fea99 for compression): what is
/// measured with a model is a statement about the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speeds {
    /// From the end of the transfer to the record.
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
    /// The same, `factor` times slower in everything.
    #[must_use]
    pub fn slower(mut self, factor: u32) -> Self {
        self.latency = self.latency.saturating_mul(factor);
        for rate in [&mut self.transfer, &mut self.compress, &mut self.decompress] {
            *rate = (*rate / u64::from(factor.max(1))).max(1);
        }
        self
    }
}

/// How much of the work is really done: the processor that does it is the one whose relief is to be measured.
#[derive(Clone)]
pub enum Work {
    /// All of it.
    All,
    /// COMPARE_PATTERN asks, with address and length, whether the bytes are the pattern.
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
