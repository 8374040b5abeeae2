//! What Intel's DSA can do for a migration: look for zero pages at the source, copy pages at the destination.
//!
//! A device only saves the processor work. The processor does everything that a device refuses, is late with, or gets wrong in a
//! way that it notices. Without any device the processor does everything.

mod copy;
mod zero;

use std::sync::Arc;

use idxd::offload::Devices;
use vamoose_codec::Verify;

pub use idxd::offload::OffloadCounters;

pub(crate) use self::{
    copy::DsaCopy,
    zero::{DsaScan, ZeroScan},
};

/// Looking for zero pages with DSAs.
#[derive(Clone, Debug)]
pub struct DsaDetection {
    /// The devices: work queues of DSAs, opened for batches of pages.
    pub devices: Arc<Devices>,
    /// How many of the pages that a device reports as zero the processor checks: one in 64 with [`Verify::Sample`].
    pub verify: Verify,
}

/// How decoded pages are copied into guest memory. Pages of method none are read from the socket directly into guest memory,
/// without a copy.
#[derive(Clone, Debug, Default)]
pub enum PageCopy {
    /// By the processor.
    #[default]
    Cpu,
    /// By DSAs and the processor together. It pays for memory that is present (populated by the VMM, or written
    /// in an earlier round). An untouched page causes a fault, and the processor copies it then. A device whose
    /// pages are all untouched is not used for a while.
    Dsa(Arc<Devices>),
}

/// Devices, and their counters before this migration. If several migrations share devices, each
/// counts the work for all of them.
#[derive(Debug)]
pub(crate) struct Account {
    devices: Arc<Devices>,
    before: OffloadCounters,
}

impl Account {
    pub(crate) fn open(devices: &Arc<Devices>) -> Self {
        Self {
            devices: devices.clone(),
            before: devices.work(),
        }
    }

    pub(crate) fn read(&self) -> OffloadCounters {
        self.devices.work().since(self.before)
    }
}
