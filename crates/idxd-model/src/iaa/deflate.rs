//! The compressor's two halves: a match finder that turns bytes into literals and copies, and what takes those,
//! which either counts them (the statistics for a Huffman code) or writes them as bits.
//!
//! What runs for every token is `inline(always)`: tests are built with few optimisations, which leave it out.

use super::symbols::{
    DISTANCE_RANGES, DISTANCES, END_OF_BLOCK, FIRST_LENGTH, LENGTH_RANGES, LITERALS, LONGEST,
    SHORTEST, WINDOW, of_distance, of_length,
};

/// Why there is no compressed data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// A symbol was needed that has no code.
    NoCode,
    /// It does not fit.
    TooLong,
}

/// What takes literals and copies.
pub(super) trait Tokens {
    fn literal(&mut self, byte: u8) -> Result<(), Failure>;
    /// `length` is 3 to 258, `distance` 1 to 4096.
    fn copy(&mut self, length: usize, distance: usize) -> Result<(), Failure>;
}

/// Finds symbols for `input`.
pub(super) fn tokenize(input: &[u8], tokens: &mut impl Tokens) -> Result<(), Failure> {
    let mut history = History::new(input);
    let (mut at, mut misses) = (0, 0_u32);
    while at < input.len() {
        let (length, distance) = match is_worth_a_search(misses) {
            true => history.longest(at),
            false => (0, 0),
        };
        if length < SHORTEST {
            tokens.literal(input[at])?;
            history.insert(at);
            at += 1;
            misses += 1;
        } else {
            misses = 0;
            tokens.copy(length, distance)?;
            let end = at + length;
            // What comes next is found by the last places of a long copy, and those of a run are all the same.
            let from = at.max(end.saturating_sub(REMEMBERED));
            (from..end).for_each(|place| history.insert(place));
            at = end;
        }
    }
    Ok(())
}

/// After so many literals the data is taken for noise.
const NOISE: u32 = 64;

/// In noise only every fourth place is looked at: a long copy is found one of the next times as well.
fn is_worth_a_search(misses: u32) -> bool {
    misses < NOISE || misses.is_multiple_of(4)
}

/// Places of a copy that are remembered.
const REMEMBERED: usize = 64;
/// Places that are compared before the best is good enough.
const TRIES: usize = 12;
/// A copy that is long enough to look no further.
const GOOD: usize = 64;
const HASH_BITS: u32 = 12;

/// Where three bytes have been seen before: chains of places with the same hash, the latest first.
struct History<'a> {
    input: &'a [u8],
    /// Latest place of each hash, plus one; zero is none.
    heads: Box<[u32]>,
    /// The place before, plus one, for each place of the window.
    before: Box<[u32]>,
}

impl<'a> History<'a> {
    fn new(input: &'a [u8]) -> Self {
        Self {
            input,
            heads: vec![0; 1 << HASH_BITS].into(),
            before: vec![0; WINDOW].into(),
        }
    }

    /// Length (zero if there is none) and distance of the longest copy found for `at`, which is not yet inserted.
    #[inline(always)]
    fn longest(&self, at: usize) -> (usize, usize) {
        let ahead = &self.input[at..self.input.len().min(at + LONGEST)];
        let Some(hash) = hash(ahead) else {
            return (0, 0);
        };
        let mut best = (0, 0);
        let mut next = self.heads[hash] as usize;
        for _ in 0..TRIES {
            let Some(place) = next.checked_sub(1) else {
                break;
            };
            // A place of an older window: its chain has been written over. Only earlier ones are next to come.
            if place >= at || at - place > WINDOW {
                break;
            }
            // Only if the byte after the best's last is the same can it be longer.
            if self.input.get(place + best.0) == ahead.get(best.0) {
                let length = common(&self.input[place..], ahead);
                if length > best.0 {
                    best = (length, at - place);
                    if length >= GOOD.min(ahead.len()) {
                        break;
                    }
                }
            }
            next = self.before[place % WINDOW] as usize;
        }
        best
    }

    #[inline(always)]
    fn insert(&mut self, at: usize) {
        if let Some(hash) = hash(&self.input[at..]) {
            self.before[at % WINDOW] = self.heads[hash];
            // An input is shorter than 4 GiB: its size is a descriptor's.
            self.heads[hash] = u32::try_from(at + 1).unwrap_or(0);
        }
    }
}

#[inline(always)]
fn hash(ahead: &[u8]) -> Option<usize> {
    let [a, b, c] = *ahead.first_chunk()?;
    let word = u32::from_le_bytes([a, b, c, 0]);
    Some((word.wrapping_mul(0x9e37_79b1) >> (32 - HASH_BITS)) as usize)
}

/// How many bytes are the same at the beginning of both.
fn common(one: &[u8], other: &[u8]) -> usize {
    let (words, _) = one.as_chunks::<8>();
    let (others, _) = other.as_chunks::<8>();
    let mut same = 0;
    for (word, other) in words.iter().zip(others) {
        let difference = u64::from_le_bytes(*word) ^ u64::from_le_bytes(*other);
        if difference != 0 {
            return same + difference.trailing_zeros() as usize / 8;
        }
        same += 8;
    }
    let rest = one[same..].iter().zip(&other[same..]);
    same + rest.take_while(|(one, other)| one == other).count()
}

/// Counts symbols.
pub(super) struct Histogram {
    literals: [u32; LITERALS],
    distances: [u32; DISTANCES],
}

impl Histogram {
    /// No symbol, but one end of a block: a stream needs a code for it. That hardware counts it is assumed.
    pub(super) fn new() -> Self {
        let mut literals = [0; LITERALS];
        literals[END_OF_BLOCK] = 1;
        Self {
            literals,
            distances: [0; DISTANCES],
        }
    }

    /// As it is in memory.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let padding = [0; 2];
        [&self.literals[..], &padding, &self.distances, &padding]
            .into_iter()
            .flatten()
            .flat_map(|count| count.to_le_bytes())
            .collect()
    }
}

impl Tokens for Histogram {
    fn literal(&mut self, byte: u8) -> Result<(), Failure> {
        self.literals[usize::from(byte)] += 1;
        Ok(())
    }

    fn copy(&mut self, length: usize, distance: usize) -> Result<(), Failure> {
        self.literals[FIRST_LENGTH + of_length(length)] += 1;
        self.distances[of_distance(distance)] += 1;
        Ok(())
    }
}

/// The code words of both alphabets, as an AECS has them.
pub(super) struct Codes {
    literals: [Code; LITERALS],
    distances: [Code; DISTANCES],
}

/// A code word in the order of the stream, its first bit lowest. Without length there is none.
#[derive(Clone, Copy, Default)]
struct Code {
    bits: u16,
    length: u8,
}

impl Codes {
    /// Code words from their places in an AECS: bits 14:0 the code as RFC 1951 numbers it, bits 18:15 its length.
    pub(super) fn new(
        literals: impl Iterator<Item = u32>,
        distances: impl Iterator<Item = u32>,
    ) -> Self {
        let mut codes = Self {
            literals: [Code::default(); LITERALS],
            distances: [Code::default(); DISTANCES],
        };
        let places = codes.literals.iter_mut().zip(literals);
        for (code, word) in places.chain(codes.distances.iter_mut().zip(distances)) {
            *code = Code::new(word);
        }
        codes
    }
}

impl Code {
    fn new(word: u32) -> Self {
        let length = (word >> 15 & 15) as u8;
        let canonical = (word & 0x7fff) as u16;
        let bits = match length {
            0 => 0,
            length => canonical.reverse_bits() >> (16 - length),
        };
        Self { bits, length }
    }
}

/// Writes tokens as bits.
pub(super) struct Encoder<'a> {
    codes: &'a Codes,
    limit: usize,
    output: Vec<u8>,
    /// Bits that are no whole word yet, fewer than 32 between two calls.
    pending: u64,
    count: u32,
}

impl<'a> Encoder<'a> {
    /// For at most `limit` bytes.
    pub(super) fn new(codes: &'a Codes, limit: usize) -> Self {
        Self {
            codes,
            limit,
            output: Vec::new(),
            pending: 0,
            count: 0,
        }
    }

    /// The first `count` bits of `bytes`.
    pub(super) fn bits(&mut self, bytes: &[u8], count: u32) -> Result<(), Failure> {
        for (byte, before) in bytes.iter().zip((0..count).step_by(8)) {
            let bits = (count - before).min(8);
            self.put(u64::from(*byte) & ((1 << bits) - 1), bits)?;
        }
        Ok(())
    }

    /// Ends the block, and returns how many bits of the output's last byte are valid; zero for all of them.
    pub(super) fn finish(&mut self) -> Result<u8, Failure> {
        self.symbol(self.codes.literals[END_OF_BLOCK], 0, 0)?;
        let bytes = self.pending.to_le_bytes();
        let whole = self.count.div_ceil(8) as usize;
        self.output.extend_from_slice(&bytes[..whole]);
        if self.output.len() > self.limit {
            return Err(Failure::TooLong);
        }
        Ok((self.count & 7) as u8)
    }

    /// What there is, as far as it fits.
    pub(super) fn output(&self) -> &[u8] {
        &self.output[..self.output.len().min(self.limit)]
    }

    #[inline(always)]
    fn symbol(&mut self, code: Code, extra: usize, extra_bits: u8) -> Result<(), Failure> {
        if code.length == 0 {
            return Err(Failure::NoCode);
        }
        let bits = u64::from(code.bits) | (extra as u64) << code.length;
        self.put(bits, u32::from(code.length + extra_bits))
    }

    #[inline(always)]
    fn put(&mut self, bits: u64, count: u32) -> Result<(), Failure> {
        self.pending |= bits << self.count;
        self.count += count;
        if self.count >= 32 {
            let word = (self.pending & 0xffff_ffff) as u32;
            self.output.extend_from_slice(&word.to_le_bytes());
            self.pending >>= 32;
            self.count -= 32;
            if self.output.len() > self.limit {
                return Err(Failure::TooLong);
            }
        }
        Ok(())
    }
}

impl Tokens for Encoder<'_> {
    #[inline(always)]
    fn literal(&mut self, byte: u8) -> Result<(), Failure> {
        self.symbol(self.codes.literals[usize::from(byte)], 0, 0)
    }

    fn copy(&mut self, length: usize, distance: usize) -> Result<(), Failure> {
        let symbol = of_length(length);
        let range = LENGTH_RANGES[symbol];
        let code = self.codes.literals[FIRST_LENGTH + symbol];
        self.symbol(code, length - usize::from(range.base), range.extra)?;
        let symbol = of_distance(distance);
        let range = DISTANCE_RANGES[symbol];
        let code = self.codes.distances[symbol];
        self.symbol(code, distance - usize::from(range.base), range.extra)
    }
}
