//! A bit for each page of a RAM block.

use std::ops::Range;

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

    /// The number of pages.
    pub fn len(&self) -> usize {
        self.pages
    }

    /// Whether it is a bitmap of no pages; see [`Bitmap::count`] for whether any is set.
    pub fn is_empty(&self) -> bool {
        self.pages == 0
    }

    /// The words. Bits beyond the last page are never set.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Changes the words, as [`collect`](super::DirtyLog::collect) does; bits beyond the last page are ignored.
    pub fn change<T>(&mut self, change: impl FnOnce(&mut [u64]) -> T) -> T {
        let result = change(&mut self.words);
        self.trim();
        result
    }

    /// The words to be changed; [`trim`](Bitmap::trim) them afterwards.
    pub(crate) fn words_mut(&mut self) -> &mut [u64] {
        &mut self.words
    }

    /// Sets `page`, if there is such a page.
    pub fn set(&mut self, page: usize) {
        if page < self.pages {
            self.words[page / 64] |= 1 << (page % 64);
        }
    }

    /// Sets `count` pages from `first` on, as far as there are such pages.
    pub fn set_range(&mut self, first: usize, count: usize) {
        let end = first.saturating_add(count).min(self.pages);
        set_pages(&mut self.words, first..end);
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

/// How many pages are set in `words`.
pub(crate) fn ones(words: &[u64]) -> usize {
    words.iter().map(|word| word.count_ones() as usize).sum()
}

/// Sets the bits of `pages`, as far as there are such bits.
pub(crate) fn set_pages(words: &mut [u64], pages: Range<usize>) {
    let end = pages.end.min(words.len() * 64);
    let mut page = pages.start;
    while page < end {
        let until = end.min((page / 64 + 1) * 64);
        let ones = u64::MAX >> (64 - (until - page));
        words[page / 64] |= ones << (page % 64);
        page = until;
    }
}

/// The pages that are set in `words`, of which the first bit is page `first_page`.
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
                bitmap.set_range(first, count);
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
