//! What Intel's DSA can do for a migration: look for zero pages at the source, copy pages at the destination.
//!
//! A device only saves the processor work. The processor does everything that a device refuses, is late with, or gets wrong in a
//! way that it notices. Without any device the processor does everything.

#[cfg(not(feature = "dsa"))]
mod absent;
#[cfg(feature = "dsa")]
mod zero;

use std::sync::Arc;

use vamoose_codec::Verify;
use vm_memory::VolatileSlice;

#[cfg(not(feature = "dsa"))]
pub use self::absent::{Devices, OffloadCounters, WrongVerdict};
#[cfg(feature = "dsa")]
pub use idxd::offload::{Devices, OffloadCounters, WrongVerdict};

#[cfg(not(feature = "dsa"))]
pub(crate) use self::absent::DsaScan;
#[cfg(feature = "dsa")]
pub(crate) use self::zero::DsaScan;

use crate::sys::memory::is_zero;

/// Looking for zero pages with DSAs.
#[derive(Clone, Debug)]
pub struct DsaDetection {
    /// The devices: work queues of DSAs, opened for batches of pages.
    pub devices: Arc<Devices>,
    /// How many of the pages that a device reports as zero the processor checks: one in 64 with [`Verify::Sample`].
    pub verify: Verify,
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

/// Finds the zero pages of batches, for one thread.
///
/// ```text
///   start(1)  start(2)  finish(1)  …  start(3)  finish(2)  …     finish(n)
///                          └ encode 1, send 1      └ encode 2, send 2
/// ```
/// A device works on a batch between the two calls, while the caller has other work.
#[derive(Debug)]
pub(crate) enum ZeroScan {
    /// The processor, at the end of a batch: the pages are read then anyway.
    Cpu,
    /// DSAs, and the processor for pages for which these are late, fail, or are absent.
    Dsa(DsaScan),
}

impl ZeroScan {
    /// Starts the scan of `pages`, the next batch. Does not wait.
    pub(crate) fn start(&mut self, pages: &[VolatileSlice<'_>]) {
        if let Self::Dsa(scan) = self {
            scan.start(pages);
        }
    }

    /// Sets for each of `pages` whether all of its bytes are zero. They are the pages of the oldest unfinished batch. The verdict
    /// on a page that is written between start and end may be either: the page is in the dirty log, and is sent again.
    ///
    /// If there are fewer `verdicts`, the remaining pages are not scanned.
    ///
    /// # Errors
    /// When a wrong verdict of a device was found. Verdicts of earlier batches may be wrong then.
    pub(crate) fn finish(
        &mut self,
        pages: &[VolatileSlice<'_>],
        verdicts: &mut [bool],
    ) -> Result<(), WrongVerdict> {
        match self {
            Self::Dsa(scan) => scan.finish(pages, verdicts),
            Self::Cpu => {
                for (page, verdict) in pages.iter().zip(verdicts) {
                    *verdict = is_zero(page);
                }
                Ok(())
            }
        }
    }
}
