//! Which pages were sent before: a bit per page.

use std::collections::HashMap;

use multifd::BlockName;

/// The pages sent, by RAM block.
#[derive(Default)]
pub(super) struct Sent {
    blocks: Vec<BlockName>,
    /// By block and chunk number.
    chunks: HashMap<(u32, u64), Box<Chunk>>,
}

/// The bits of 4096 neighbouring pages.
type Chunk = [u64; CHUNK_WORDS];
const CHUNK_WORDS: usize = 64;
const CHUNK_PAGES: u64 = 64 * CHUNK_WORDS as u64;

/// Guests have a dozen blocks.
const MOST_BLOCKS: usize = 1024;

/// Enough for 16 TiB in pages of 4 KiB; takes half a gigabyte. Pages beyond count as never sent.
const MOST_CHUNKS: usize = 1 << 20;

impl Sent {
    /// Number of the block with this name; `None` if there are too many blocks.
    pub(super) fn block(&mut self, name: &BlockName) -> Option<u32> {
        let known = self.blocks.iter().position(|known| known == name);
        let index = known.or_else(|| {
            (self.blocks.len() < MOST_BLOCKS).then(|| {
                self.blocks.push(*name);
                self.blocks.len() - 1
            })
        });
        u32::try_from(index?).ok()
    }

    /// Records that a page is sent; returns whether it was sent before.
    pub(super) fn insert(&mut self, block: u32, page: u64) -> bool {
        let key = (block, page / CHUNK_PAGES);
        let is_full = self.chunks.len() >= MOST_CHUNKS;
        let chunk = match self.chunks.get_mut(&key) {
            Some(chunk) => chunk,
            None if is_full => return false,
            None => self
                .chunks
                .entry(key)
                .or_insert_with(|| [0; CHUNK_WORDS].into()),
        };
        let within = page % CHUNK_PAGES;
        // Fits: less than the words of a chunk.
        let word = &mut chunk[usize::try_from(within / 64).unwrap_or_default()];
        let bit = 1 << (within % 64);
        let was_sent = *word & bit != 0;
        *word |= bit;
        was_sent
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::{collection::vec, prelude::*};

    use super::*;

    proptest! {
        #[test]
        fn matches_a_set(
            pages in vec((0..3_u32, prop_oneof![0..9000_u64, u64::MAX / 4096 - 9000..=u64::MAX / 4096]), 0..300),
        ) {
            let (mut sent, mut model) = (Sent::default(), HashSet::new());
            for (block, page) in pages {
                prop_assert_eq!(sent.insert(block, page), !model.insert((block, page)));
            }
        }
    }

    #[test]
    fn blocks_are_numbered_up_to_a_limit() {
        let name = |number: usize| BlockName::new(format!("block{number}").as_bytes()).unwrap();
        let mut sent = Sent::default();
        assert_eq!(sent.block(&name(0)), Some(0));
        assert_eq!(sent.block(&name(1)), Some(1));
        assert_eq!(sent.block(&name(0)), Some(0));
        for number in 2..MOST_BLOCKS {
            assert!(sent.block(&name(number)).is_some());
        }
        assert_eq!(sent.block(&name(MOST_BLOCKS)), None);
    }
}
