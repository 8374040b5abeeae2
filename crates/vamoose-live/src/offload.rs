//! What Intel's DSA can do for a migration: look for zero pages at the source, copy pages at the destination.
//!
//! A device only ever saves the processor work. What it refuses, gets wrong in a way that it notices, or is late with,
//! the processor does; without any device the processor does everything.

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
    /// How many of the pages that a device calls zero are looked at by the processor as well: one in 64 with
    /// [`Verify::Sample`].
    pub verify: Verify,
}

/// Who copies pages into guest memory once they are decoded. Pages of method none are read from the socket to where
/// they belong: there is no copy.
#[derive(Clone, Debug, Default)]
pub enum PageCopy {
    /// The processor.
    #[default]
    Cpu,
    /// DSAs and the processor together. It pays with memory that is there already (populated by the VMM, or written
    /// in an earlier round): a page that was never touched is a fault, then the processor copies it, and a device that
    /// meets nothing else is left alone for a while.
    Dsa(Arc<Devices>),
}

/// Devices, and what they had done before this migration. If several migrations have the same devices at once, each
/// counts what they do for all of these.
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
