//! Logs that others fill, in addresses of the guest's physical memory: the back-ends of vhost-user, in memory that they share with
//! the VMM, and VFIO's devices, by an ioctl of the VMM.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use vm_memory::{GuestAddress, VolatileMemory};

use super::{DirtyLog, DirtyLogError, KvmSlot, failed, masks, pages_in, set_pages};
use crate::{Ram, Region};

/// Where the guest has a part of a RAM block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Start in the guest's physical memory.
    pub address: GuestAddress,
    /// Index in [`Ram`] of the RAM block.
    pub block: usize,
    /// Offset in the block, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

impl From<KvmSlot> for Place {
    fn from(slot: KvmSlot) -> Self {
        Self {
            address: GuestAddress(slot.guest_phys_addr),
            block: slot.block,
            offset: slot.offset,
            len: slot.len,
        }
    }
}

impl Place {
    /// The part of the `len` bytes at `address` that lies here: its offset in the block, and its length.
    pub(super) fn part(&self, address: GuestAddress, len: u64) -> Option<(u64, u64)> {
        let (first, wanted) = (self.address.0, address.0);
        let start = wanted.max(first);
        let end = wanted
            .saturating_add(len)
            .min(first.saturating_add(self.len));
        let len = end.checked_sub(start).filter(|len| *len > 0)?;
        Some((self.offset.checked_add(start - first)?, len))
    }
}

/// A log with a bit for each 4 KiB of the guest's physical memory.
pub trait PhysicalLog: Send + Sync {
    /// Switches logging on or off. Nothing by default: for writers that always log.
    ///
    /// # Errors
    /// When the writers cannot be reached.
    fn switch(&self, on: bool) -> io::Result<()> {
        let _ = on;
        Ok(())
    }

    /// Takes the bits of `pages` pages of 4 KiB from `address` on: sets those of written pages in `words`, of which the first bit is
    /// the page at `address`, and clears them in the log, in one step, so that a write meanwhile is found now or the next
    /// time. The bits of other pages stay.
    ///
    /// # Errors
    /// When the log cannot be read. The migration has to end.
    fn take(&self, address: GuestAddress, pages: usize, words: &mut [u64]) -> io::Result<()>;
}

/// Bytes of guest memory for a bit, in the logs of vhost-user and, as its least, of VFIO.
const LOG_PAGE: u64 = 4096;

/// Pages that are taken at a time: 1 GiB.
const PAGES: usize = 1 << 18;

/// A [`PhysicalLog`] as a dirty log of RAM blocks, to be [merged](super::Merged) with the log of the vCPUs.
#[derive(Debug)]
pub struct Placed<L> {
    log: L,
    places: Vec<Place>,
    page_size: u64,
}

const LOG: &str = "of other writers";

impl<L: PhysicalLog> Placed<L> {
    /// The log of `ram`, whose blocks the guest has at `places`. What lies in no place is not logged.
    pub fn new(log: L, ram: &Ram, places: impl IntoIterator<Item = impl Into<Place>>) -> Self {
        Self {
            log,
            places: places.into_iter().map(Into::into).collect(),
            page_size: ram.page_size() as u64,
        }
    }

    /// Calls `each` with the offset in `block` of each written page.
    fn take(&self, block: usize, mut each: impl FnMut(u64)) -> Result<(), DirtyLogError> {
        for place in self.places.iter().filter(|place| place.block == block) {
            let pages = usize::try_from(place.len.div_ceil(LOG_PAGE)).unwrap_or(usize::MAX);
            for first in (0..pages).step_by(PAGES) {
                let pages = PAGES.min(pages - first);
                let start = first as u64 * LOG_PAGE;
                let address = GuestAddress(place.address.0.saturating_add(start));
                let mut words = vec![0; pages.div_ceil(64)];
                let taken = self.log.take(address, pages, &mut words);
                taken.map_err(failed(LOG, "taking its bits"))?;
                let offset = place.offset.saturating_add(start);
                pages_in(0, &words).for_each(|page| each(offset + page as u64 * LOG_PAGE));
            }
        }
        Ok(())
    }
}

impl<L: PhysicalLog> DirtyLog for Placed<L> {
    fn start(&self) -> Result<(), DirtyLogError> {
        self.log
            .switch(true)
            .map_err(failed(LOG, "switching it on"))?;
        // What was written before has no meaning.
        self.places
            .iter()
            .try_for_each(|place| self.take(place.block, |_| ()))
    }

    fn collect(
        &self,
        block: usize,
        first_page: usize,
        dirty: &mut [u64],
    ) -> Result<(), DirtyLogError> {
        self.take(block, |offset| {
            let page = usize::try_from(offset / self.page_size).ok();
            if let Some(page) = page.and_then(|page| page.checked_sub(first_page)) {
                set_pages(dirty, page..page + 1);
            }
        })
    }

    fn stop(&self) -> Result<(), DirtyLogError> {
        self.log
            .switch(false)
            .map_err(failed(LOG, "switching it off"))
    }
}

/// The log that vhost-user's back-ends share with the VMM (`VHOST_USER_SET_LOG_BASE`): memory with a bit for each 4 KiB.
///
/// The VMM gives it to its back-ends, and switches them to logging (`VHOST_F_LOG_ALL`) before the migration begins.
pub struct VhostLog(Arc<dyn Region>);

impl VhostLog {
    /// The log in `memory`, which begins with the page at guest address 0.
    pub fn new(memory: Arc<dyn Region>) -> Self {
        Self(memory)
    }
}

impl PhysicalLog for VhostLog {
    fn take(&self, address: GuestAddress, pages: usize, words: &mut [u64]) -> io::Result<()> {
        let memory = self.0.memory();
        let first = usize::try_from(address.0 / LOG_PAGE).map_err(io::Error::other)?;
        for (word, mask) in masks(first..first.saturating_add(pages)) {
            let shared = memory
                .get_atomic_ref::<AtomicU64>(word.saturating_mul(8))
                .map_err(|_| io::Error::other("it is too short for the guest's memory"))?;
            // Most words are 0.
            if shared.load(Ordering::Relaxed) == 0 {
                continue;
            }
            // Bytes in the order of their addresses, bits from the lowest.
            let taken = u64::from_le(shared.fetch_and(!mask.to_le(), Ordering::AcqRel)) & mask;
            for page in pages_in(word * 64, &[taken]) {
                set_pages(words, page - first..page - first + 1);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, MmapRegion};

    use super::*;
    use crate::test_ram;

    const PAGE: u64 = 4096;

    /// Two blocks, the second of which begins in the middle of a byte of the log, at two places.
    fn places() -> [Place; 3] {
        [(0, 0, 0, 5), (5, 1, 0, 100), (1000, 1, 100, 28)].map(|(page, block, first, pages)| {
            Place {
                address: GuestAddress(page * PAGE),
                block,
                offset: first * PAGE,
                len: pages * PAGE,
            }
        })
    }

    fn collected(log: &dyn DirtyLog, block: usize) -> Vec<usize> {
        let mut words = [0; 3];
        log.collect(block, 0, &mut words).unwrap();
        pages_in(0, &words).collect()
    }

    #[test]
    fn a_shared_log_is_taken_block_by_block() {
        let ram = test_ram::blocks([5 * 4096, 128 * 4096].into_iter());
        let memory = Arc::new(MmapRegion::<()>::new(4096).unwrap());
        let log = Placed::new(VhostLog::new(memory.clone()), &ram, places());
        // As a back-end does, which sets the bits of bytes.
        let mark = |page: usize| {
            let slice = memory.memory();
            let byte: u8 = slice.read_obj(page / 8).unwrap();
            slice.write_obj(byte | 1 << (page % 8), page / 8).unwrap();
        };
        mark(3);
        log.start().unwrap();
        assert!(collected(&log, 0).is_empty());
        // The last page of block 0, the first of block 1, one that is in no block, and the second place.
        [4, 5, 63, 64, 500, 1000, 1027].into_iter().for_each(mark);
        assert_eq!(collected(&log, 0), [4]);
        assert_eq!(collected(&log, 1), [0, 58, 59, 100, 127]);
        assert!(collected(&log, 1).is_empty());
        log.stop().unwrap();
    }

    #[test]
    fn a_log_that_is_too_short_is_an_error() {
        let ram = test_ram::blocks([5 * 4096, 128 * 4096].into_iter());
        let memory = Arc::new(MmapRegion::<()>::new(8).unwrap());
        let log = Placed::new(VhostLog::new(memory), &ram, places());
        let error = log.collect(1, 0, &mut [0; 3]).unwrap_err();
        assert!(matches!(error, DirtyLogError::System { .. }), "{error}");
    }

    #[test]
    fn bytes_at_a_guest_address_are_marked_in_their_blocks() {
        let ram = test_ram::blocks([5 * 4096, 128 * 4096].into_iter());
        let log = crate::dirty::SharedBitmap::new(&ram).placed(places());
        log.mark_at(GuestAddress(4 * PAGE + 4095), 2);
        log.mark_at(GuestAddress(1027 * PAGE), u64::MAX);
        log.mark_at(GuestAddress(500 * PAGE), PAGE);
        assert_eq!(collected(&log, 0), [4]);
        assert_eq!(collected(&log, 1), [0, 127]);
    }
}
