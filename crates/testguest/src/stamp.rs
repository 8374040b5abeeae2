//! Stamps and their sums: the writes of a vCPU, in Rust. `kvm.rs` has the same code as machine code.

use std::ops::Range;

use anyhow::{Result, ensure};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::{
    config::{Config, Pattern},
    memory::{Memory, PAGE, PAGE_BYTES},
};

/// Words of 8 bytes in a page.
const WORDS: u64 = PAGE / 8;

/// The generator of stamps, a full-period LCG (the constants of Knuth's MMIX).
pub(crate) const MULTIPLIER: u64 = 6_364_136_223_846_793_005;
pub(crate) const INCREMENT: u64 = 1_442_695_040_888_963_407;

/// The lowest bit of a stamp that selects the word. Higher bits select the page; lower bits are hardly random.
pub(crate) const WORD_SHIFT: u32 = 20;

/// The constants of a vCPU's writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Course {
    /// The address of the vCPU's first word in the first page.
    pub(crate) first_word: u64,
    /// Number of pages of the working set.
    pub(crate) pages: u64,
    /// Mask of a byte offset within the vCPU's words of a page.
    pub(crate) word_mask: u64,
    /// Whether pages are written in order instead of at random.
    pub(crate) sequential: bool,
}

/// The progress of a vCPU's writes; its bytes are the saved state of a vCPU that is a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
pub(crate) struct Progress {
    /// The last stamp.
    pub(crate) stamp: u64,
    /// The page of the last write, if the pages are written one after the other.
    pub(crate) cursor: u64,
    /// The sum that the vCPU's words should have.
    pub(crate) sum: u64,
    /// Writes so far.
    pub(crate) writes: u64,
}

impl Course {
    /// The course of vCPU `index`.
    pub(crate) fn new(config: &Config, index: u8) -> Self {
        let words = words_per_vcpu(config);
        let Range { start, end } = config.working_set();
        Self {
            first_word: start + u64::from(index) * words * 8,
            pages: (end - start) / PAGE,
            word_mask: (words - 1) * 8,
            sequential: config.pattern == Pattern::Sequential,
        }
    }

    /// One write of a page. `None` if the memory does not have the page, which [`Config::check`] excludes.
    pub(crate) fn write(&self, memory: &Memory, progress: &mut Progress) -> Option<()> {
        progress.stamp = progress
            .stamp
            .wrapping_mul(MULTIPLIER)
            .wrapping_add(INCREMENT);
        let stamp = progress.stamp;
        let page = if self.sequential {
            progress.cursor += 1;
            if progress.cursor >= self.pages {
                progress.cursor = 0;
            }
            progress.cursor
        } else {
            multiply_high(stamp, self.pages)
        };
        let word = self.first_word + page * PAGE + ((stamp >> WORD_SHIFT) & self.word_mask);
        let old = memory.load(word)?;
        memory.store(word, stamp)?;
        let change = stamp.wrapping_sub(old).wrapping_mul(word + 1);
        progress.sum = progress.sum.wrapping_add(change);
        progress.writes += 1;
        Some(())
    }
}

impl Progress {
    /// Checks that the page is within `course`.
    pub(crate) fn check(&self, course: &Course) -> Result<()> {
        let (page, pages) = (self.cursor, course.pages);
        ensure!(page < pages, "page {page} of {pages}");
        Ok(())
    }

    /// The progress of vCPU `index` before its first write. `sum` is the sum of the vCPU's words in the present memory.
    pub(crate) fn new(course: &Course, index: u8, vcpus: u8, sum: u64) -> Self {
        Self {
            // Far apart in the generator's sequence.
            stamp: (u64::from(index) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
            cursor: course.pages * u64::from(index) / u64::from(vcpus),
            sum,
            writes: 0,
        }
    }
}

/// The sum of each vCPU's words over the working set as it is now.
pub(crate) fn sums(config: &Config) -> Vec<u64> {
    let words = usize::try_from(words_per_vcpu(config)).unwrap_or(usize::MAX);
    let mut sums = vec![0_u64; usize::from(config.vcpus)];
    let mut copy = [0_u8; PAGE_BYTES];
    let parts = config.memory.touched(&config.working_set());
    for address in parts.into_iter().flat_map(|part| part.step_by(PAGE_BYTES)) {
        let Some(slice) = config.memory.slice(address, copy.len()) else {
            continue;
        };
        slice.copy_to(&mut copy);
        let values = copy.as_chunks().0;
        let mut weight = address + 1;
        for (sum, values) in sums.iter_mut().zip(values.chunks(words)) {
            for value in values {
                let value = u64::from_le_bytes(*value);
                *sum = sum.wrapping_add(value.wrapping_mul(weight));
                weight += 8;
            }
        }
    }
    sums
}

/// A power of two, so that a mask finds a word.
fn words_per_vcpu(config: &Config) -> u64 {
    WORDS / u64::from(config.vcpus).next_power_of_two()
}

/// The upper half of a product.
fn multiply_high(a: u64, b: u64) -> u64 {
    u64::try_from((u128::from(a) * u128::from(b)) >> 64).unwrap_or(0)
}
