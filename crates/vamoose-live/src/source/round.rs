//! A round: the pages to send, divided among the channels.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::{Bitmap, dirty::pages_in};

/// Pages that all channels send together.
pub(super) struct Round {
    pub(super) number: u64,
    dirty: Vec<Bitmap>,
    chunks: usize,
    next: AtomicUsize,
}

/// Some neighbouring pages of a block, of which those set are to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunk<'a> {
    pub(super) block: usize,
    /// A multiple of 64.
    pub(super) first_page: usize,
    pub(super) words: &'a [u64],
}

/// Words of a chunk: 4 MiB of memory. Small enough to divide a short round evenly, large enough for a system call each.
const CHUNK_WORDS: usize = 16;

impl Round {
    /// A round of the pages that are set in `dirty`, a bitmap for each block.
    pub(super) fn new(number: u64, dirty: Vec<Bitmap>) -> Self {
        let chunks = dirty.iter().map(chunks_of).sum();
        Self {
            number,
            dirty,
            chunks,
            next: AtomicUsize::new(0),
        }
    }

    /// Takes a chunk in which there are pages to send; each is taken once. `None` when all are taken.
    pub(super) fn take(&self) -> Option<Chunk<'_>> {
        loop {
            // The bitmaps were handed over together with the round: nothing else hangs on this counter.
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= self.chunks {
                return None;
            }
            let chunk = self.chunk(index)?;
            if chunk.words.iter().any(|word| *word != 0) {
                return Some(chunk);
            }
        }
    }

    fn chunk(&self, mut index: usize) -> Option<Chunk<'_>> {
        for (block, dirty) in self.dirty.iter().enumerate() {
            let chunks = chunks_of(dirty);
            if index < chunks {
                let first = index * CHUNK_WORDS;
                let end = dirty.words().len().min(first + CHUNK_WORDS);
                return Some(Chunk {
                    block,
                    first_page: first * 64,
                    words: &dirty.words()[first..end],
                });
            }
            index -= chunks;
        }
        None
    }
}

fn chunks_of(dirty: &Bitmap) -> usize {
    dirty.words().len().div_ceil(CHUNK_WORDS)
}

impl Chunk<'_> {
    /// The pages to send, in their order.
    pub(super) fn pages(&self) -> impl Iterator<Item = usize> {
        pages_in(self.first_page, self.words)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use proptest::{collection::vec, prelude::*};

    use super::*;

    proptest! {
        #[test]
        fn every_dirty_page_is_taken_once(
            blocks in vec((1..9000_usize, vec(0..9000_usize, 0..30)), 1..4),
            channels in 1..5_usize,
        ) {
            let dirty: Vec<Bitmap> = blocks.iter().map(|(pages, set)| {
                let mut bitmap = Bitmap::new(*pages);
                set.iter().for_each(|page| bitmap.set(*page));
                bitmap
            }).collect();
            let round = Round::new(1, dirty.clone());
            let mut taken: Vec<(usize, usize)> = thread::scope(|scope| {
                let channels: Vec<_> = (0..channels).map(|_| scope.spawn(|| {
                    let mut taken = Vec::new();
                    while let Some(chunk) = round.take() {
                        assert!(chunk.first_page.is_multiple_of(64));
                        taken.extend(chunk.pages().map(|page| (chunk.block, page)));
                    }
                    taken
                })).collect();
                channels.into_iter().flat_map(|channel| channel.join().unwrap()).collect()
            });
            taken.sort_unstable();
            let all = dirty.iter().enumerate().flat_map(|(block, dirty)| dirty.iter().map(move |page| (block, page)));
            prop_assert!(taken.into_iter().eq(all));
        }
    }
}
