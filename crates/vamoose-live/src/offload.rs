//! What Intel's DSA can do for a migration: look for zero pages at the source, copy pages at the destination.
//!
//! A device only ever saves the processor work. What it refuses, gets wrong in a way that it notices, or is late with,
//! the processor does; without any device the processor does everything.

use std::sync::Arc;

use idxd::offload::{Devices, Work};
use serde::{Deserialize, Serialize};
use vamoose_codec::Verify;

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
/// they belong: nobody copies them.
#[derive(Clone, Debug, Default)]
pub enum PageCopy {
    /// The processor.
    #[default]
    Cpu,
    /// DSAs and the processor together. It pays with memory that is there already (populated by the VMM, or written
    /// in an earlier round): a page that nobody has touched is a fault, and then the processor copies it.
    Dsa(Arc<Devices>),
}

/// What devices have done of a job, in pages, since the migration began. Whoever gives the same devices to several
/// migrations at once finds here what they have done for all of these.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Offload {
    /// The devices are software: how much they did, and how fast, says nothing about hardware.
    pub model: bool,
    /// Done by a device.
    pub by_device: u64,
    /// Done by the processor because no work queue took them.
    pub refused: u64,
    /// Done by the processor because a device failed, most often at a page that is not there.
    pub failed: u64,
    /// Done by the processor because a device was slower, or never answered.
    pub overtaken: u64,
    /// Done by both and compared.
    pub checked: u64,
}

/// Devices, and what they had done before this migration.
#[derive(Debug)]
pub(crate) struct Account {
    devices: Arc<Devices>,
    before: Work,
}

impl Account {
    pub(crate) fn open(devices: &Arc<Devices>) -> Self {
        Self {
            devices: devices.clone(),
            before: devices.work(),
        }
    }

    pub(crate) fn read(&self) -> Offload {
        let (now, before) = (self.devices.work(), self.before);
        Offload {
            model: self.devices.are_modelled(),
            by_device: now.by_device - before.by_device,
            refused: now.refused - before.refused,
            failed: now.failed - before.failed,
            overtaken: now.overtaken - before.overtaken,
            checked: now.checked - before.checked,
        }
    }
}
