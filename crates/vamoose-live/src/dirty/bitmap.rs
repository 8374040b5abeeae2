//! A bit for each page of a RAM block.

use std::ops::Range;

use crate::Ram;

/// The pages of one RAM block, a bit each; page 64·i + j is bit j of word i.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    words: Vec<u64>,
    pages: usize,
}

impl Bitmap {
    /// `pages` pages, none of them set.
    pub fn new(pages: usize) -> Self {
        Self {
            words: vec![0; pages.div_ceil(64)],
            pages,
        }
    }

    /// A bitmap for each block of `ram`, with no page set.
    pub(crate) fn for_blocks(ram: &Ram) -> Vec<Self> {
        let blocks = 0..ram.blocks().len();
        blocks.map(|block| Self::new(ram.pages(block))).collect()
    }

    /// The words. Bits beyond the last page are never set.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Changes the words, as [`collect`](super::DirtyLog::collect) does. Bits beyond the last page are ignored.
    pub fn change<T>(&mut self, change: impl FnOnce(&mut [u64]) -> T) -> T {
        let result = change(&mut self.words);
        self.trim();
        result
    }

    /// The words to be changed; [`trim`](Bitmap::trim) them afterwards.
    pub(crate) fn words_mut(&mut self) -> &mut [u64] {
        &mut self.words
    }

    /// Sets `page`. A page beyond the last is ignored.
    pub fn set(&mut self, page: usize) {
        if page < self.pages {
            self.words[page / 64] |= 1 << (page % 64);
        }
    }

    /// Whether `page` is set.
    pub fn get(&self, page: usize) -> bool {
        page < self.pages && self.words[page / 64] >> (page % 64) & 1 == 1
    }

    /// How many pages are set.
    pub fn count(&self) -> usize {
        ones(&self.words)
    }

    /// Unsets all pages.
    pub fn clear(&mut self) {
        self.words.fill(0);
    }

    /// The pages that are set, in their order.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        pages_in(0, &self.words)
    }

    /// Unsets bits beyond the last page.
    pub(crate) fn trim(&mut self) {
        let used = self.pages % 64;
        if used > 0
            && let Some(last) = self.words.last_mut()
        {
            *last &= u64::MAX >> (64 - used);
        }
    }
}

/// How many pages are set in all `bitmaps`.
pub(crate) fn count(bitmaps: &[Bitmap]) -> usize {
    bitmaps.iter().map(Bitmap::count).sum()
}

/// How many pages are set in `words`.
pub(crate) fn ones(words: &[u64]) -> usize {
    words.iter().map(|word| word.count_ones() as usize).sum()
}

/// Sets the bits of `pages`. Bits beyond `words` are ignored.
pub(crate) fn set_pages(words: &mut [u64], pages: Range<usize>) {
    let pages = pages.start..pages.end.min(words.len() * 64);
    masks(pages).for_each(|(word, mask)| words[word] |= mask);
}

/// The bits of `pages`: the index of each word, and its mask.
pub(crate) fn masks(pages: Range<usize>) -> impl Iterator<Item = (usize, u64)> {
    let Range { mut start, end } = pages;
    std::iter::from_fn(move || {
        let (word, bit) = (start / 64, start % 64);
        let count = end.checked_sub(start)?.min(64 - bit);
        start += count;
        (count > 0).then(|| (word, (u64::MAX >> (64 - count)) << bit))
    })
}

/// The pages that are set in `words`, whose first bit is page `first_page`.
pub(crate) fn pages_in(first_page: usize, words: &[u64]) -> impl Iterator<Item = usize> {
    words.iter().enumerate().flat_map(move |(index, &word)| {
        let mut left = word;
        std::iter::from_fn(move || {
            let bit = left.trailing_zeros() as usize;
            (left != 0).then(|| {
                left &= left - 1;
                first_page + index * 64 + bit
            })
        })
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::{collection::vec, prelude::*};

    use super::*;

    proptest! {
        #[test]
        fn a_bitmap_is_a_set_of_pages(
            pages in 1..500_usize,
            single in vec(0..600_usize, 0..40),
            ranges in vec((0..600_usize, 0..200_usize), 0..4),
            words in vec(any::<u64>(), 0..9),
        ) {
            let (mut bitmap, mut model) = (Bitmap::new(pages), BTreeSet::new());
            for &page in &single {
                bitmap.set(page);
                model.insert(page);
            }
            for &(first, count) in &ranges {
                bitmap.change(|words| set_pages(words, first..first + count));
                model.extend(first..first + count);
            }
            bitmap.change(|mine| mine.iter_mut().zip(&words).for_each(|(mine, word)| *mine |= word));
            for (index, word) in words.iter().enumerate() {
                model.extend((0..64).filter(|bit| word >> bit & 1 == 1).map(|bit| index * 64 + bit));
            }
            model.retain(|&page| page < pages);
            prop_assert!(bitmap.iter().eq(model.iter().copied()));
            prop_assert_eq!(bitmap.count(), model.len());
            prop_assert!((0..600).all(|page| bitmap.get(page) == model.contains(&page)));
        }
    }
}
