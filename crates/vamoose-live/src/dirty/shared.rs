//! A dirty log that the VMM itself marks, for writes that neither KVM nor page tables see: by device emulation,
//! direct I/O, or another process that maps the same memory.
//!
//! A mark is one atomic OR, whether or not a migration runs, and [`start`](DirtyLog::start) discards earlier marks. There is no
//! flag for a running migration: a device could write, find the flag unset and drop the mark, while the migration that just set
//! the flag reads the old page. An OR and a swap of the same word are ordered: either the swap comes after the mark, and
//! the swapping thread sees the data, or it comes before, and the mark stays.

use vm_memory::GuestAddress;

use super::{COLLECT_BYTES, DirtyLog, DirtyLogError, Place, masks};
use crate::Ram;

#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(feature = "loom"))]
use std::sync::atomic::{AtomicU64, Ordering};

/// A dirty log that the VMM itself marks, from any thread at any time.
#[derive(Debug)]
pub struct SharedBitmap {
    /// A bit for each page of each block, and the number of its pages.
    blocks: Vec<(Box<[AtomicU64]>, usize)>,
    page_size: u64,
    /// Where the guest has the blocks.
    places: Vec<Place>,
}

impl SharedBitmap {
    /// A log for `ram`, with nothing marked.
    pub fn new(ram: &Ram) -> Self {
        let blocks = (0..ram.blocks().len()).map(|index| {
            let pages = ram.pages(index);
            let words = (0..pages.div_ceil(64)).map(|_| AtomicU64::new(0));
            (words.collect(), pages)
        });
        Self {
            blocks: blocks.collect(),
            page_size: ram.page_size() as u64,
            places: Vec::new(),
        }
    }

    /// The same log, which knows where the guest has its blocks, for [`mark_at`](SharedBitmap::mark_at).
    pub fn placed(mut self, places: impl IntoIterator<Item = impl Into<Place>>) -> Self {
        self.places = places.into_iter().map(Into::into).collect();
        self
    }

    /// Marks the pages that the `len` bytes at `address` of the guest's physical memory lie in, as
    /// [`mark`](SharedBitmap::mark) does. Bytes outside of all [places](SharedBitmap::placed) are ignored.
    pub fn mark_at(&self, address: GuestAddress, len: u64) {
        for place in &self.places {
            if let Some((offset, len)) = place.part(address, len) {
                self.mark(place.block, offset, len);
            }
        }
    }

    /// Marks the pages of `block` that the `len` bytes at `offset` lie in. To be called **after** they were
    /// written. Neither blocks nor allocates; bytes outside of the block are ignored.
    pub fn mark(&self, block: usize, offset: u64, len: u64) {
        let Some((words, pages)) = self.blocks.get(block) else {
            return;
        };
        if len == 0 {
            return;
        }
        let page = |byte: u64| usize::try_from(byte / self.page_size).unwrap_or(usize::MAX);
        let first = page(offset);
        let end = page(offset.saturating_add(len - 1))
            .saturating_add(1)
            .min(*pages);
        for (word, mask) in masks(first..end) {
            // Release: the thread that takes the bit sees the bytes written before. Needed even if the bit is set already, as
            // that was for an earlier write.
            words[word].fetch_or(mask, Ordering::Release);
        }
    }
}

impl DirtyLog for SharedBitmap {
    fn start(&self) -> Result<(), DirtyLogError> {
        for word in self.blocks.iter().flat_map(|(words, _)| words) {
            take(word);
        }
        Ok(())
    }

    fn pages_per_collect(&self) -> usize {
        COLLECT_BYTES / usize::try_from(self.page_size).unwrap_or(1)
    }

    fn collect(
        &self,
        block: usize,
        first_page: usize,
        dirty: &mut [u64],
    ) -> Result<(), DirtyLogError> {
        let words = self.blocks.get(block).into_iter();
        let words = words.flat_map(|(words, _)| words).skip(first_page / 64);
        for (dirty, word) in dirty.iter_mut().zip(words) {
            let taken = take(word);
            if taken != 0 {
                *dirty |= taken;
            }
        }
        Ok(())
    }

    /// Marks are still counted, until `start` discards them.
    fn stop(&self) -> Result<(), DirtyLogError> {
        Ok(())
    }
}

fn take(word: &AtomicU64) -> u64 {
    // Most words are 0 in most rounds, and a load leaves the cache line to the writers.
    if word.load(Ordering::Relaxed) == 0 {
        return 0;
    }
    word.swap(0, Ordering::Acquire)
}
