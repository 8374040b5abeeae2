//! vm-memory's own dirty bitmap as a log: what the VMM writes through `GuestMemoryMmap<AtomicBitmap>`.

use std::sync::Arc;

use vm_memory::{GuestRegionMmap, bitmap::AtomicBitmap};

use super::{DirtyLog, DirtyLogError};
use crate::Ram;

/// The writes of this process through `vm-memory`, which marks them in an [`AtomicBitmap`] of each region. It sees no
/// writes of vCPUs: to be [merged](super::Merged) with a log that does.
#[derive(Debug)]
pub struct VmMemoryLog(Vec<Arc<GuestRegionMmap<AtomicBitmap>>>);

const LOG: &str = "vm-memory";

impl VmMemoryLog {
    /// The log of `ram`, whose blocks are `regions`, in the same order.
    ///
    /// # Errors
    /// [`DirtyLogError::Setup`] if they are not: each bitmap has a bit for each page of its block.
    pub fn new(
        ram: &Ram,
        regions: Vec<Arc<GuestRegionMmap<AtomicBitmap>>>,
    ) -> Result<Self, DirtyLogError> {
        let blocks = ram.blocks().len();
        let fits = |(index, region): (usize, &Arc<GuestRegionMmap<AtomicBitmap>>)| {
            region.bitmap().len() == ram.pages(index)
        };
        if regions.len() != blocks || !regions.iter().enumerate().all(fits) {
            let reason = format!("its regions are not the {blocks} RAM blocks, with their pages");
            return Err(DirtyLogError::Setup { log: LOG, reason });
        }
        Ok(Self(regions))
    }
}

impl DirtyLog for VmMemoryLog {
    fn start(&self) -> Result<(), DirtyLogError> {
        for region in &self.0 {
            region.bitmap().reset();
        }
        Ok(())
    }

    fn collect(&self, block: usize, _: usize, dirty: &mut [u64]) -> Result<(), DirtyLogError> {
        let words = self
            .0
            .get(block)
            .map(|region| region.bitmap().get_and_reset());
        for (dirty, word) in dirty.iter_mut().zip(words.into_iter().flatten()) {
            *dirty |= word;
        }
        Ok(())
    }

    /// Writes are marked on, until `start` discards them.
    fn stop(&self) -> Result<(), DirtyLogError> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

    use super::*;
    use crate::RamBlock;

    #[test]
    fn what_is_written_through_vm_memory_is_found_once() {
        const PAGE: u64 = 4096;
        let ranges = [
            (GuestAddress(0), 0x10_0000),
            (GuestAddress(1 << 32), 0x8000),
        ];
        let regions: Vec<_> = ranges.into_iter().map(region).collect();
        let blocks = regions
            .iter()
            .enumerate()
            .map(|(index, region)| RamBlock::new(&format!("ram{index}"), region.clone()).unwrap());
        let ram = Ram::new(blocks.collect()).unwrap();
        let memory = GuestMemoryMmap::from_arc_regions(regions.clone()).unwrap();
        let log = VmMemoryLog::new(&ram, regions.clone()).unwrap();
        memory.write_slice(&[1; 10], GuestAddress(0)).unwrap();
        log.start().unwrap();
        memory
            .write_slice(&[1; 2], GuestAddress(70 * PAGE - 1))
            .unwrap();
        memory
            .write_obj(7_u64, GuestAddress((1 << 32) + PAGE))
            .unwrap();
        let collected = |block| {
            let mut words = [0; 4];
            log.collect(block, 0, &mut words).unwrap();
            crate::dirty::pages_in(0, &words).collect::<Vec<_>>()
        };
        assert_eq!(collected(0), [69, 70]);
        assert_eq!(collected(1), [1]);
        assert!(collected(0).is_empty());
        let swapped = regions.into_iter().rev().collect();
        assert!(VmMemoryLog::new(&ram, swapped).is_err());
    }

    fn region((address, len): (GuestAddress, usize)) -> Arc<GuestRegionMmap<AtomicBitmap>> {
        Arc::new(GuestRegionMmap::from_range(address, len, None).unwrap())
    }
}
