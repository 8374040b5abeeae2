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
    /// How often the kernel retries a descriptor that comes by `write`, beyond the first time
    /// (`enqcmds_retries` in sysfs; 32 by default).
    pub write_retries: u32,
}

impl Config {
    /// One DSA, see [`DeviceConfig::dsa`].
    pub fn dsa() -> Self {
        Self::devices(Kind::Dsa, 1)
    }

    /// One IAA, see [`DeviceConfig::iaa`].
    pub fn iaa() -> Self {
        Self::devices(Kind::Iaa, 1)
    }

    /// `count` typical devices.
    pub fn devices(kind: Kind, count: usize) -> Self {
        let device = match kind {
            Kind::Dsa => DeviceConfig::dsa(),
            Kind::Iaa => DeviceConfig::iaa(),
        };
        Self {
            devices: vec![device; count],
            speeds: Speeds::default(),
            faults: Faults::default(),
            seed: 0,
            work: Work::All,
            write_retries: 32,
        }
    }

    /// The limits of one work queue, to change them.
    pub fn limits_mut(&mut self, device: usize, queue: usize) -> Option<&mut Limits> {
        self.queue_mut(device, queue).map(|queue| &mut queue.limits)
    }

    /// One work queue, to change it.
    pub fn queue_mut(&mut self, device: usize, queue: usize) -> Option<&mut QueueConfig> {
        let device = self.devices.get_mut(device)?;
        let mut queues = device.groups.iter_mut().flat_map(|group| &mut group.queues);
        queues.nth(queue)
    }
}

/// One device. Its work queues are numbered through its groups.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// Which device.
    pub kind: Kind,
    /// Its groups: engines, and the work queues that they serve.
    pub groups: Vec<GroupConfig>,
}

impl DeviceConfig {
    /// A DSA of the first generation in Sapphire Rapids, as administrators set it up: four engines in one group
    /// with one shared work queue of 128 entries, batches to 128, transfers to 2 MiB, no blocking on faults.
    pub fn dsa() -> Self {
        let operations = [
            opcode::NOOP,
            opcode::BATCH,
            opcode::DRAIN,
            opcode::MEMMOVE,
            opcode::FILL,
            opcode::COMPARE_PATTERN,
        ];
        Self::typical(Kind::Dsa, 4, NonZeroU32::new(128), &operations)
    }

    /// An IAA of the first generation: eight engines in one group with one shared work queue of 128 entries,
    /// transfers to 2 MiB.
    pub fn iaa() -> Self {
        let operations = [
            opcode::NOOP,
            opcode::DRAIN,
            opcode::DECOMPRESS,
            opcode::COMPRESS,
            opcode::CRC64,
        ];
        Self::typical(Kind::Iaa, 8, None, &operations)
    }

    fn typical(kind: Kind, engines: usize, max_batch: Option<NonZeroU32>, opcodes: &[u8]) -> Self {
        let operations = opcodes
            .iter()
            .fold(Operations::default(), |all, opcode| all.with(*opcode));
        let limits = Limits {
            kind,
            mode: Mode::Shared,
            size: 128,
            threshold: 128,
            max_batch,
            max_transfer: 2 << 20,
            block_on_fault: false,
            operations,
            version: 0x100,
            capabilities: match kind {
                Kind::Dsa => Capabilities::FIRST_DSA,
                Kind::Iaa => Capabilities::FIRST_IAA,
            },
            numa_node: Some(0),
        };
        let queues = vec![QueueConfig {
            limits,
            priority: 10,
            prs_disable: false,
        }];
        Self {
            kind,
            groups: vec![GroupConfig { engines, queues }],
        }
    }
}

/// Engines, and the work queues that they serve.
#[derive(Clone, Debug)]
pub struct GroupConfig {
    /// How many engines.
    pub engines: usize,
    /// The work queues.
    pub queues: Vec<QueueConfig>,
}

/// One work queue.
#[derive(Clone, Debug)]
pub struct QueueConfig {
    /// What it takes.
    pub limits: Limits,
    /// 1 to 15: its share of the engines, against the other queues of its group.
    pub priority: u32,
    /// Page requests are not made (`prs_disable`): what is missing under a record or a batch's list is not waited
    /// for. Otherwise it is, whatever descriptors ask for (DSA 3.0, 8.1.3).
    pub prs_disable: bool,
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
    /// Bytes per second that DSA moves, fills or compares; also IAA's CRC.
    pub transfer: u64,
    /// Bytes per second that IAA compresses.
    pub compress: u64,
    /// Bytes per second that IAA inflates, of the output, taken as twice the input (assumed).
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
