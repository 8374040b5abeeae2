//! The codes of a compression, as it reads them from memory.
//!
//! ```text
//!  0     4     8          28              32            288              1440        1560
//! ┌─────┬─────┬──────────┬───────────────┬─────────────┬────────────────┬───────────┬─────┐
//! │ CRC │ XOR │ reserved │ bits that are │ accumulator │ literals' and  │ distances'│     │
//! │     │     │          │ accumulated   │ (256 bytes) │ lengths' codes │ codes     │     │
//! └─────┴─────┴──────────┴───────────────┴─────────────┴────────────────┴───────────┴─────┘
//! ```
//! The model has no checksums.

use super::deflate::Codes;

/// The AECS of one compression.
pub(super) struct Aecs(pub(super) Vec<u8>);

impl Aecs {
    /// Size in bytes.
    pub(super) const SIZE: u32 = 1568;
    const BITS: usize = 28;
    const ACCUMULATOR: std::ops::Range<usize> = 32..288;
    const LITERALS: usize = 288;
    const DISTANCES: usize = 1440;

    /// The bits before the data, and their number; `None` if the number is too large.
    pub(super) fn accumulator(&self) -> Option<(&[u8], u32)> {
        let bits = self.word(Self::BITS);
        let accumulator = &self.0[Self::ACCUMULATOR];
        (bits as usize <= 8 * accumulator.len()).then_some((accumulator, bits))
    }

    pub(super) fn codes(&self) -> Codes {
        let words = |from: usize| (from..).step_by(4).map(|at| self.word(at));
        Codes::new(words(Self::LITERALS), words(Self::DISTANCES))
    }

    fn word(&self, at: usize) -> u32 {
        let word = self.0.get(at..).and_then(|bytes| bytes.first_chunk());
        word.map_or(0, |word| u32::from_le_bytes(*word))
    }
}
