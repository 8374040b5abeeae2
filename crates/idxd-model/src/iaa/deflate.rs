//! The compressor's two halves: a match finder that turns bytes into literals and copies, and their consumers: a histogram
//! for a Huffman code, and an encoder.
//!
//! Functions that run for every token are `inline(always)`, because tests are built with few optimisations.

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

/// A consumer of literals and copies.
pub(super) trait Tokens {
    fn literal(&mut self, byte: u8) -> Result<(), Failure>;
    /// `length` is 3 to 258, `distance` 1 to 4096.
    fn copy(&mut self, length: usize, distance: usize) -> Result<(), Failure>;
}

/// Finds symbols for `input`.
pub(super) fn tokenize(input: &[u8], tokens: &mut impl Tokens) -> Result<(), Failure> {
    // The last place of each hash of three bytes, plus one; zero is none.
    let mut last = vec![0; 1 << HASH_BITS];
    let mut at = 0;
    while at < input.len() {
        let ahead = &input[at..input.len().min(at + LONGEST)];
        let before = match hash(ahead) {
            Some(hash) => std::mem::replace(&mut last[hash], at + 1).checked_sub(1),
            None => None,
        };
        let length = match before.filter(|before| at - before <= WINDOW) {
            Some(before) => common(&input[before..], ahead),
            None => 0,
        };
        match before {
            Some(before) if length >= SHORTEST => {
                tokens.copy(length, at - before)?;
                at += length;
            }
            _ => {
                tokens.literal(input[at])?;
                at += 1;
            }
        }
    }
    Ok(())
}

const HASH_BITS: u32 = 12;

#[inline(always)]
fn hash(ahead: &[u8]) -> Option<usize> {
    let [a, b, c] = *ahead.first_chunk()?;
    let word = u32::from_le_bytes([a, b, c, 0]);
    Some((word.wrapping_mul(0x9e37_79b1) >> (32 - HASH_BITS)) as usize)
}

/// Length of the common prefix.
fn common(one: &[u8], other: &[u8]) -> usize {
    let same = one.iter().zip(other);
    same.take_while(|(one, other)| one == other).count()
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

    /// The bytes in memory.
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

    /// Ends the block.
    pub(super) fn finish(&mut self) -> Result<(), Failure> {
        self.symbol(self.codes.literals[END_OF_BLOCK], 0, 0)?;
        let bytes = self.pending.to_le_bytes();
        let whole = self.count.div_ceil(8) as usize;
        self.output.extend_from_slice(&bytes[..whole]);
        if self.output.len() > self.limit {
            return Err(Failure::TooLong);
        }
        Ok(())
    }

    /// The output as far as it fits.
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
