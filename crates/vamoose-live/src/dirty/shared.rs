//! A dirty log that the VMM feeds itself, for what neither KVM nor page tables see: writes of device emulation,
//! of direct I/O, of another process that maps the same memory.
//!
//! There is no flag for whether a migration runs. A mark is one atomic OR whether or not a migration
//! runs, and [`start`](DirtyLog::start) throws away what was marked before. With a flag, a device could write, find it
//! still down and drop the mark, while the migration that just raised it reads the page as it was before. An
//! OR and a swap of the same word have an order: the swap either comes after the mark, and then
//! the data is seen by the thread that swapped, or before it, and then the mark stays.

use super::{COLLECT_BYTES, DirtyLog, DirtyLogError};
use crate::Ram;

#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(feature = "loom"))]
use std::sync::atomic::{AtomicU64, Ordering};

/// A dirty log that the VMM feeds itself, from any thread at any time.
#[derive(Debug)]
pub struct SharedBitmap {
    blocks: Vec<Pages>,
    page_size: u64,
}

#[derive(Debug)]
struct Pages {
    words: Box<[AtomicU64]>,
    count: usize,
}

impl SharedBitmap {
    /// A log for `ram`, with nothing marked.
    pub fn new(ram: &Ram) -> Self {
        let pages = |index| {
            let count = ram.pages(index);
            let words = (0..count.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
            Pages { words, count }
        };
        Self {
            blocks: (0..ram.blocks().len()).map(pages).collect(),
            page_size: ram.page_size() as u64,
        }
    }

    /// Marks the pages of `block` that the `len` bytes at `offset` lie in. To be called **after** they were
    /// written. Neither blocks nor allocates; bytes outside of the block are ignored.
    pub fn mark(&self, block: usize, offset: u64, len: u64) {
        let Some(pages) = self.blocks.get(block) else {
            return;
        };
        if len == 0 {
            return;
        }
        let page = |byte: u64| usize::try_from(byte / self.page_size).unwrap_or(usize::MAX);
        let first = page(offset);
        let end = page(offset.saturating_add(len - 1))
            .saturating_add(1)
            .min(pages.count);
        let mut from = first;
        while from < end {
            let until = end.min((from / 64 + 1) * 64);
            let ones = (u64::MAX >> (64 - (until - from))) << (from % 64);
            // Release: the thread that takes the bit sees what was written before. It has to be done even if the bit
            // is set already, because it was set for an earlier write.
            pages.words[from / 64].fetch_or(ones, Ordering::Release);
            from = until;
        }
    }

    fn pages(&self, block: usize) -> &[AtomicU64] {
        self.blocks
            .get(block)
            .map_or(&[][..], |pages| &pages.words[..])
    }
}

impl DirtyLog for SharedBitmap {
    fn start(&self) -> Result<(), DirtyLogError> {
        for block in 0..self.blocks.len() {
            self.pages(block).iter().for_each(|word| {
                take(word);
            });
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
        let words = self.pages(block).iter().skip(first_page / 64);
        for (dirty, word) in dirty.iter_mut().zip(words) {
            let taken = take(word);
            if taken != 0 {
                *dirty |= taken;
            }
        }
        Ok(())
    }

    /// `collect` has cleared already.
    fn clear(&self, _: usize, _: usize, _: &[u64]) -> Result<(), DirtyLogError> {
        Ok(())
    }

    /// Marks are still counted, until `start` discards them.
    fn stop(&self) -> Result<(), DirtyLogError> {
        Ok(())
    }
}

fn take(word: &AtomicU64) -> u64 {
    // Most words are 0 in most rounds, and looking does not take the cache line away from the writers.
    if word.load(Ordering::Relaxed) == 0 {
        return 0;
    }
    word.swap(0, Ordering::Acquire)
}
