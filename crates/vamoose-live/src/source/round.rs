//! A round: the pages to send, shared out among the channels, and how fast it went.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use vamoose_link::Snapshot;

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

/// Words of a chunk: 4 MiB of memory. Small enough to share a short round out fairly, large enough for a system call each.
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

/// How fast memory moves and how fast the guest writes it.
#[derive(Debug, Default)]
pub(super) struct Rate {
    /// Bytes of normal pages per second; 0 as long as nobody knows.
    page_bytes: f64,
    wire_bytes: f64,
    pages: f64,
    /// From the last page's sending to the destination's word that all are there, and back.
    dirty_pages: f64,
    /// Normal pages of the last round.
    last_normal: u64,
}

/// Less than this in a round says nothing about the link: it fits into the sockets' buffers.
const LEAST_SAMPLE: u64 = 4 << 20;

/// Assumed until a round was long enough to measure: a tenth of a slow link, so that a guest is not paused for a guess.
const UNKNOWN_BANDWIDTH: f64 = 1e6;

impl Rate {
    pub(super) fn round_sent(&mut self, before: Snapshot, after: Snapshot, took: Duration) {
        let seconds = took.as_secs_f64().max(1e-6);
        let normal = after.normal_pages - before.normal_pages;
        self.last_normal = normal;
        let page_bytes = after.page_bytes - before.page_bytes;
        if page_bytes >= LEAST_SAMPLE || self.page_bytes == 0.0 && page_bytes > 0 {
            self.page_bytes = page_bytes as f64 / seconds;
            self.wire_bytes = (after.wire_bytes - before.wire_bytes) as f64 / seconds;
            let pages = normal + (after.zero_pages - before.zero_pages);
            self.pages = pages as f64 / seconds;
        }
    }

    pub(super) fn guest_dirtied(&mut self, pages: usize, within: Duration) {
        self.dirty_pages = pages as f64 / within.as_secs_f64().max(1e-6);
    }

    /// How long `pages` pages take, if none of them is zero.
    pub(super) fn time_for(&self, pages: usize, page_size: usize) -> Option<Duration> {
        let bandwidth = self.page_bytes.max(UNKNOWN_BANDWIDTH);
        Duration::try_from_secs_f64((pages * page_size) as f64 / bandwidth).ok()
    }

    /// Whether the guest has dirtied more than half of what the last round moved.
    pub(super) fn guest_outruns(&self, dirty: usize) -> bool {
        dirty as u64 > self.last_normal / 2
    }

    pub(super) fn dirty_pages_per_second(&self) -> u64 {
        whole(self.dirty_pages)
    }

    pub(super) fn page_bytes_per_second(&self) -> u64 {
        whole(self.page_bytes)
    }

    pub(super) fn pages_per_second(&self) -> u64 {
        whole(self.pages)
    }

    pub(super) fn wire_mbps(&self) -> f64 {
        self.wire_bytes * 8.0 / 1e6
    }
}

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a rate is positive, and the cast saturates"
)]
fn whole(rate: f64) -> u64 {
    rate as u64
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
