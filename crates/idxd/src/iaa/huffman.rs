//! Huffman codes of DEFLATE (RFC 1951), and the block header that describes them to a decoder.
//!
//! ```text
//!   counts ──► lengths, 15 bits at most ──► canonical codes ──► AECS
//!                         └──► runs of lengths ──► Header:
//!
//!   │ last? │ 10 │ literals - 257 │ distances - 1 │ codes' codes - 4 │ 3 bits each │ the lengths, coded …
//!      1      2          5               5                 4
//! ```
//! Every code is complete: each pattern of bits has a meaning. If fewer than two symbols occur, unused symbols get codes as
//! well, because not all decoders follow the RFC's rules for incomplete codes.

use super::Histogram;

/// Symbols of the first alphabet: literals, end of block (256), and lengths of matches.
pub const LITERALS: usize = 286;
/// Symbols of the second alphabet: distances of matches.
pub const DISTANCES: usize = 30;

/// One symbol's code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Code {
    /// The bits as a number, as RFC 1951 has it: a stream has the most significant one first.
    pub bits: u16,
    /// How many they are: 15 at most, 0 for a symbol without a code.
    pub len: u8,
}

/// The codes of a block's two alphabets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Codes {
    literals: [Code; LITERALS],
    distances: [Code; DISTANCES],
    fixed: bool,
}

impl Codes {
    /// The fixed codes of the format (RFC 1951, 3.2.6).
    pub fn fixed() -> Self {
        // The alphabet has two more symbols than can occur; their codes are the last ones.
        let mut lengths = [8; 288];
        lengths[144..256].fill(9);
        lengths[256..280].fill(7);
        let mut literals = [Code::default(); LITERALS];
        literals.copy_from_slice(&canonical(&lengths)[..LITERALS]);
        Self {
            literals,
            distances: canonical(&[5; DISTANCES]),
            fixed: true,
        }
    }

    /// The best codes for `histogram`. The end of a block always has a code. Data with symbols that the histogram lacks
    /// cannot be compressed with these codes: see [`Histogram::covering`].
    pub fn of(histogram: &Histogram) -> Self {
        let mut literals = histogram.literals;
        literals[END_OF_BLOCK] = literals[END_OF_BLOCK].max(1);
        Self {
            literals: canonical(&lengths(&literals, MAX_LENGTH)),
            distances: canonical(&lengths(&histogram.distances, MAX_LENGTH)),
            fixed: false,
        }
    }

    /// Codes of literals, end of block, and lengths of matches.
    pub const fn literals(&self) -> &[Code; LITERALS] {
        &self.literals
    }

    /// Codes of distances.
    pub const fn distances(&self) -> &[Code; DISTANCES] {
        &self.distances
    }

    /// Header of a block with these codes. `last` marks the stream's last block.
    pub fn header(&self, last: bool) -> Header {
        let mut header = Header::default();
        header.push(u32::from(last), 1);
        if self.fixed {
            header.push(0b01, 2);
            return header;
        }
        header.push(0b10, 2);

        let literals = used(&self.literals, 257);
        let distances = used(&self.distances, 1);
        // No run goes from one to the other: RFC 1951 allows it, the device does not (IAA 2.1, 4.4.2: 4 and 6).
        let runs: Vec<Run> = [literals, distances].into_iter().flat_map(runs).collect();
        let mut counts = [0; LENGTH_CODES];
        for run in &runs {
            counts[usize::from(run.symbol)] += 1;
        }
        let codes = canonical(&lengths(&counts, MAX_LENGTH_OF_LENGTHS));
        let order = LENGTH_ORDER.map(|symbol| codes[symbol]);
        let order = used(&order, 4);

        header.push(count(literals.len() - 257), 5);
        header.push(count(distances.len() - 1), 5);
        header.push(count(order.len() - 4), 4);
        for code in order {
            header.push(u32::from(code.len), 3);
        }
        for run in runs {
            header.push_code(codes[usize::from(run.symbol)]);
            header.push(run.extra, run.extra_bits);
        }
        header
    }
}

/// The bits of a block before its data.
///
/// It is 1654 bits at most, so that it fits the 256 bytes that an AECS has for it: 74 bits, and at most 316 lengths,
/// for which the best code of 19 symbols is no worse than 5 bits each; and no run takes more than its lengths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    bytes: [u8; 256],
    bits: u16,
}

impl Header {
    /// Number of bits.
    pub const fn bits(&self) -> u16 {
        self.bits
    }

    /// The bytes, whose bits are used from the least significant on; unused bits of the last byte are zero.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.bits.div_ceil(8))]
    }

    fn push(&mut self, value: u32, bits: u8) {
        for bit in 0..bits {
            if value >> bit & 1 == 1 {
                self.bytes[usize::from(self.bits / 8)] |= 1 << (self.bits % 8);
            }
            self.bits += 1;
        }
    }

    fn push_code(&mut self, code: Code) {
        for bit in (0..code.len).rev() {
            self.push(u32::from(code.bits >> bit & 1), 1);
        }
    }
}

impl Default for Header {
    fn default() -> Self {
        Self {
            bytes: [0; 256],
            bits: 0,
        }
    }
}

/// The canonical codes of `lengths`: shorter ones first, and in the order of the symbols (RFC 1951, 3.2.2).
fn canonical<const N: usize>(lengths: &[u8; N]) -> [Code; N] {
    let mut codes = lengths.map(|len| Code { bits: 0, len });
    let mut next = 0;
    for len in 1..=MAX_LENGTH {
        next <<= 1;
        for code in codes.iter_mut().filter(|code| code.len == len) {
            code.bits = next;
            next += 1;
        }
    }
    codes
}

/// Lengths of the best complete code for symbols that occur `counts` times, with no length above `limit`.
///
/// This is package-merge (Larmore and Hirschberg, 1990): level by level, the symbols are merged with pairs of what
/// the level before has, all by weight. Of the last level the cheapest `2n - 2` are taken; each pair among them takes
/// two from the level before, and so on. A symbol is as long as it was taken often.
fn lengths<const N: usize>(counts: &[u32; N], limit: u8) -> [u8; N] {
    let mut lengths = [0; N];
    let symbols = by_count(counts);
    let levels = levels(&symbols, limit);

    let mut taken = 2 * symbols.len() - 2;
    for level in levels.iter().rev() {
        let of_symbols = level[..taken].iter().filter(|item| !item.pair).count();
        for (_, symbol) in &symbols[..of_symbols] {
            lengths[*symbol] += 1;
        }
        taken = 2 * (taken - of_symbols);
    }
    lengths
}

/// Weight and index of the symbols that get a code, lightest first: those that occur, but at least two.
fn by_count<const N: usize>(counts: &[u32; N]) -> Vec<(u64, usize)> {
    let occurring = counts.iter().filter(|count| **count != 0).count();
    let mut missing = 2_usize.saturating_sub(occurring);
    let mut symbols = Vec::with_capacity(N);
    for (symbol, count) in counts.iter().enumerate() {
        if *count != 0 {
            symbols.push((u64::from(*count), symbol));
        } else if missing != 0 {
            missing -= 1;
            symbols.push((0, symbol));
        }
    }
    symbols.sort_unstable();
    symbols
}

/// What one level of package-merge can take: a symbol, or a pair of the level before.
#[derive(Clone, Copy)]
struct Item {
    weight: u64,
    pair: bool,
}

fn levels(symbols: &[(u64, usize)], limit: u8) -> Vec<Vec<Item>> {
    let mut levels: Vec<Vec<Item>> = Vec::with_capacity(usize::from(limit));
    for _ in 0..limit {
        let symbols = symbols.iter().map(|(weight, _)| Item {
            weight: *weight,
            pair: false,
        });
        let pairs = levels.last().into_iter().flat_map(|before| {
            before.chunks_exact(2).map(|two| Item {
                weight: two[0].weight + two[1].weight,
                pair: true,
            })
        });
        let mut level: Vec<Item> = symbols.chain(pairs).collect();
        // Stable: symbols stay in their order.
        level.sort_by_key(|item| item.weight);
        levels.push(level);
    }
    levels
}

/// The codes up to the last that is used, but `least` at least.
fn used(codes: &[Code], least: usize) -> &[Code] {
    let last = codes.iter().rposition(|code| code.len != 0);
    &codes[..last.map_or(least, |last| (last + 1).max(least))]
}

/// A symbol of the code for lengths, and the bits that come with it.
struct Run {
    symbol: u8,
    extra: u32,
    extra_bits: u8,
}

/// The lengths of `codes` with repetitions shortened (RFC 1951, 3.2.7): 16 for 3 to 6 more of the same, 17 for 3 to 10
/// zeros, 18 for 11 to 138 zeros.
fn runs(codes: &[Code]) -> Vec<Run> {
    let run = |symbol, extra, extra_bits| Run {
        symbol,
        extra,
        extra_bits,
    };
    let mut runs = Vec::with_capacity(codes.len());
    for same in codes.chunk_by(|a, b| a.len == b.len) {
        let length = same[0].len;
        let mut left = same.len();
        if length != 0 {
            runs.push(run(length, 0, 0));
            left -= 1;
        }
        while left >= 3 {
            let (taken, shortened) = match (length, left) {
                (0, 11..) => {
                    let taken = left.min(138);
                    (taken, run(18, count(taken - 11), 7))
                }
                (0, _) => (left, run(17, count(left - 3), 3)),
                _ => {
                    let taken = left.min(6);
                    (taken, run(16, count(taken - 3), 2))
                }
            };
            runs.push(shortened);
            left -= taken;
        }
        runs.extend((0..left).map(|_| run(length, 0, 0)));
    }
    runs
}

/// A number of symbols: some hundreds at most.
#[expect(
    clippy::cast_possible_truncation,
    reason = "an alphabet has 286 symbols at most"
)]
const fn count(symbols: usize) -> u32 {
    symbols as u32
}

const END_OF_BLOCK: usize = 256;
const MAX_LENGTH: u8 = 15;
/// Symbols of the code for lengths, and the longest of its codes.
const LENGTH_CODES: usize = 19;
const MAX_LENGTH_OF_LENGTHS: u8 = 7;
/// The order in which a header gives the lengths of that code: the ones most likely zero last.
const LENGTH_ORDER: [usize; LENGTH_CODES] = [
    16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15,
];

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Sum of 2^-len, in units of 2^-15.
    fn kraft(lengths: &[u8]) -> u32 {
        let codes = lengths.iter().filter(|len| **len != 0);
        codes.map(|len| 1 << (15 - len)).sum()
    }

    #[test]
    fn canonical_codes_are_those_of_the_rfcs_example() {
        let lengths = [3, 3, 3, 3, 3, 2, 4, 4];
        let bits = canonical(&lengths).map(|code| code.bits);
        assert_eq!(bits, [2, 3, 4, 5, 6, 0, 14, 15]);
    }

    #[test]
    fn lengths_are_optimal_without_a_limit_in_the_way() {
        // The textbook's example: 45, 13, 12, 16, 9, 5.
        assert_eq!(lengths(&[45, 13, 12, 16, 9, 5], 15), [1, 3, 3, 3, 4, 4]);
        assert_eq!(lengths(&[0, 0, 0], 15), [1, 1, 0]);
        assert_eq!(lengths(&[0, 0, 9], 15), [1, 0, 1]);
        assert_eq!(lengths(&[0, 3, 9], 15), [0, 1, 1]);
    }

    #[test]
    fn the_limit_holds_where_huffman_would_go_deeper() {
        // Counts like Fibonacci's numbers make the deepest trees.
        let mut counts = [0_u32; 40];
        let (mut a, mut b) = (1, 1);
        for count in &mut counts {
            *count = a;
            (a, b) = (b, a + b);
        }
        for limit in [6, 7, 15] {
            let lengths = lengths(&counts, limit);
            assert_eq!(lengths.iter().max(), Some(&limit));
            assert_eq!(kraft(&lengths), 1 << 15);
        }
    }

    #[test]
    fn runs_of_any_length_are_what_they_shorten() {
        for length in [0_u8, 5] {
            for len in 1..=316 {
                let code = Code {
                    bits: 0,
                    len: length,
                };
                let mut restored = Vec::new();
                for run in runs(&vec![code; len]) {
                    let (what, times) = match run.symbol {
                        16 => (*restored.last().unwrap(), run.extra + 3),
                        17 => (0, run.extra + 3),
                        18 => (0, run.extra + 11),
                        length => (length, 1),
                    };
                    assert!(run.extra < 1 << run.extra_bits);
                    restored.extend((0..times).map(|_| what));
                }
                assert_eq!(restored, vec![length; len]);
            }
        }
    }

    proptest! {
        #[test]
        fn codes_are_complete_and_limited(
            counts in prop::array::uniform32(prop_oneof![Just(0), 0..4_u32, any::<u32>()]),
            limit in 5_u8..=15,
        ) {
            let lengths = lengths(&counts, limit);
            prop_assert_eq!(kraft(&lengths), 1 << 15);
            prop_assert!(lengths.iter().all(|len| *len <= limit));
            for (count, len) in counts.iter().zip(lengths) {
                prop_assert!(*count == 0 || len != 0);
            }
            // More frequent symbols are not longer.
            for (a, one) in counts.iter().zip(lengths) {
                for (b, other) in counts.iter().zip(lengths) {
                    prop_assert!(a <= b || one <= other || other == 0);
                }
            }
        }
    }
}
