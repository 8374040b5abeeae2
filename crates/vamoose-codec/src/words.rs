//! Words taken apart: in each block of pages, the first bytes of all 8-byte words, then their second bytes, and so on, as Blosc and HDF5
//! do for numbers.
//!
//! Rows of a database and arrays of numbers are words that are alike in most of their bytes. Next to each other, these bytes compress
//! better; code, text and objects compress worse. So a [`Trial`] compares both forms of a packet now and then.
//!
//! ```text
//!   block        a0 a1 … a7 b0 b1 … b7 c0 …
//!   taken apart  a0 b0 c0 … a1 b1 c1 … a7 b7 c7 …
//! ```

/// Bytes whose words are taken apart together: the smallest page of any guest.
const BLOCK: usize = 4096;
const WORD: usize = 8;
/// Bytes of the words that are transposed at once.
const SQUARE: usize = WORD * WORD;

/// Takes the words of `pages` apart. Both have the same length; what is no whole block is copied.
pub(crate) fn take_apart(pages: &[u8], apart: &mut [u8]) {
    let (blocks, rest) = pages.as_chunks::<BLOCK>();
    let (planes, last) = apart.as_chunks_mut::<BLOCK>();
    for (block, planes) in blocks.iter().zip(planes) {
        for (words, at) in block
            .as_chunks::<SQUARE>()
            .0
            .iter()
            .zip((0..).step_by(WORD))
        {
            let (words, _) = words.as_chunks::<WORD>();
            let mut square = [0; WORD];
            for (row, word) in square.iter_mut().zip(words) {
                *row = u64::from_le_bytes(*word);
            }
            transpose(&mut square);
            for (plane, row) in planes.chunks_exact_mut(BLOCK / WORD).zip(square) {
                plane[at..at + WORD].copy_from_slice(&row.to_le_bytes());
            }
        }
    }
    last.copy_from_slice(rest);
}

/// Reverts [`take_apart`].
pub(crate) fn put_together(apart: &[u8], pages: &mut [u8]) {
    let (planes, rest) = apart.as_chunks::<BLOCK>();
    let (blocks, last) = pages.as_chunks_mut::<BLOCK>();
    for (block, planes) in blocks.iter_mut().zip(planes) {
        let squares = block.as_chunks_mut::<SQUARE>().0;
        for (words, at) in squares.iter_mut().zip((0..).step_by(WORD)) {
            let mut square = [0; WORD];
            for (row, plane) in square.iter_mut().zip(planes.chunks_exact(BLOCK / WORD)) {
                *row = u64::from_le_bytes(plane[at..].first_chunk().copied().unwrap_or_default());
            }
            transpose(&mut square);
            for (word, row) in words.as_chunks_mut::<WORD>().0.iter_mut().zip(square) {
                *word = row.to_le_bytes();
            }
        }
    }
    last.copy_from_slice(rest);
}

/// Byte `j` of row `i` becomes byte `i` of row `j`: halves are exchanged, then quarters, then bytes.
fn transpose(rows: &mut [u64; WORD]) {
    for (distance, mask) in [
        (4, 0x0000_0000_ffff_ffff),
        (2, 0x0000_ffff_0000_ffff),
        (1, 0x00ff_00ff_00ff_00ff),
    ] {
        for row in (0..WORD).filter(|row| row & distance == 0) {
            let swapped = (rows[row] >> (8 * distance) ^ rows[row + distance]) & mask;
            rows[row + distance] ^= swapped;
            rows[row] ^= swapped << (8 * distance);
        }
    }
}

/// Finds out whether packets become smaller with their words taken apart, by encoding one of up to 64 in both forms. Neighbouring
/// packets are alike.
#[derive(Debug, Default)]
pub(crate) struct Trial {
    wins: bool,
    /// Sizes in both forms: means of the last trials.
    whole: usize,
    apart: usize,
    /// Packets between the last two trials, and until the next one.
    interval: u32,
    left: u32,
}

const SHORTEST: u32 = 4;
const LONGEST: u32 = 64;

impl Trial {
    /// Whether the next packet is to be encoded in both forms. The result must be [told](Self::tell) then.
    pub(crate) fn is_due(&mut self) -> bool {
        let is_due = self.left == 0;
        self.left = self.left.saturating_sub(1);
        is_due
    }

    /// Whether packets are smaller with their words taken apart.
    pub(crate) fn wins(&self) -> bool {
        self.wins
    }

    /// A packet has these sizes in both forms.
    pub(crate) fn tell(&mut self, whole: usize, apart: usize) {
        let mean = |mean: usize, size| match mean {
            0 => size,
            mean => usize::midpoint(mean, size),
        };
        self.whole = mean(self.whole, whole);
        self.apart = mean(self.apart, apart);
        self.wins = is_worth_it(self.whole, self.apart);
        self.interval = match (self.wins, is_worth_it(whole, apart)) {
            (true, _) => 2 * SHORTEST,
            (false, true) => SHORTEST,
            (false, false) => (2 * self.interval).clamp(SHORTEST, LONGEST),
        };
        self.left = self.interval;
    }
}

/// To take words apart must save 3 %.
fn is_worth_it(whole: usize, apart: usize) -> bool {
    apart < whole - whole / 32
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    proptest! {
        #[test]
        fn words_come_together_again(seed: [u8; 32], blocks in 0..4_usize, rest in 0..100_usize) {
            let pages: Vec<_> = seed.into_iter().cycle().zip(0_u32..)
                .map(|(byte, at)| byte ^ at.wrapping_mul(0x9e37_79b9).to_be_bytes()[0])
                .take(blocks * BLOCK + rest)
                .collect();
            let (mut apart, mut back) = (vec![0; pages.len()], vec![0; pages.len()]);
            take_apart(&pages, &mut apart);
            put_together(&apart, &mut back);
            prop_assert_eq!(back, pages);
        }

        /// Both forms are the definition in the module's documentation.
        #[test]
        fn bytes_of_words_are_in_planes(pages in vec(any::<u8>(), BLOCK..=BLOCK)) {
            let mut apart = vec![0; BLOCK];
            take_apart(&pages, &mut apart);
            for (at, byte) in pages.iter().enumerate() {
                prop_assert_eq!(apart[at % WORD * (BLOCK / WORD) + at / WORD], *byte);
            }
        }
    }

    /// The numbers of packets, of so many, that are tried.
    fn tried(packets: usize, sizes: impl Fn(usize) -> (usize, usize)) -> (Vec<usize>, Trial) {
        let mut trial = Trial::default();
        let mut tried = Vec::new();
        for packet in 0..packets {
            if trial.is_due() {
                let (whole, apart) = sizes(packet);
                trial.tell(whole, apart);
                tried.push(packet);
            }
        }
        (tried, trial)
    }

    #[test]
    fn trials_become_rare_while_they_lose() {
        let (tried, trial) = tried(1000, |_| (1000, 980));
        assert!(!trial.wins());
        assert_eq!(tried[..5], [0, 5, 14, 31, 64]);
        assert!(tried.len() < 25, "{tried:?}");
    }

    #[test]
    fn a_form_that_wins_is_kept_until_it_loses() {
        let (kept, trial) = tried(100, |_| (1000, 700));
        assert!(trial.wins());
        assert_eq!(kept[..3], [0, 9, 18]);
        let (_, trial) = tried(100, |packet| (1000, if packet < 50 { 700 } else { 1400 }));
        assert!(!trial.wins());
        let (_, trial) = tried(200, |packet| (1000, if packet < 50 { 1400 } else { 700 }));
        assert!(trial.wins());
    }
}
