//! Compression as IAA does it: a match finder that turns bytes into symbols of DEFLATE (RFC 1951, 3.2.5), and a writer of bits.
//!
//! Functions that run for every symbol are `inline(always)`, because tests are built with few optimisations.

/// Bytes that IAA's compressor and decompressor can reach back.
pub(super) const WINDOW: usize = 4096;
/// Places in an AECS of the end of a block, and of the first symbols for lengths and distances.
const END_OF_BLOCK: usize = 256;
const FIRST_LENGTH: usize = 257;
const FIRST_DISTANCE: usize = 288;
/// Shortest and longest copy. The longest has a symbol of its own, although the one before it could express it too.
const SHORTEST: usize = 3;
const LONGEST: usize = 258;
const SYMBOL_OF_LONGEST: usize = 285;

/// A symbol, and the bits behind its code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Symbol {
    pub(super) index: usize,
    extra: usize,
    extra_bits: u32,
}

impl Symbol {
    pub(super) const END_OF_BLOCK: Self = Self::plain(END_OF_BLOCK);

    const fn plain(index: usize) -> Self {
        Self {
            index,
            extra: 0,
            extra_bits: 0,
        }
    }

    fn of_length(length: usize) -> Self {
        match length {
            LONGEST => Self::plain(SYMBOL_OF_LONGEST),
            _ => Self::of_range(FIRST_LENGTH, length - SHORTEST, 2),
        }
    }

    fn of_distance(distance: usize) -> Self {
        Self::of_range(FIRST_DISTANCE, distance - 1, 1)
    }

    /// The symbol of a value where 2^`log` symbols each stand for ranges of the same size, the next ones for twice as large ones.
    fn of_range(first: usize, value: usize, log: u32) -> Self {
        let extra_bits = value.max(1 << log).ilog2() - log;
        Self {
            index: first + ((extra_bits as usize) << log) + (value >> extra_bits),
            extra: value & ((1 << extra_bits) - 1),
            extra_bits,
        }
    }
}

/// The symbols for `input`.
pub(super) fn symbols(input: &[u8]) -> Vec<Symbol> {
    let mut symbols = Vec::new();
    // The last place of each hash of three bytes, plus one; zero is none.
    let mut last = vec![0; 1 << HASH_BITS];
    let mut at = 0;
    while at < input.len() {
        let ahead = &input[at..input.len().min(at + LONGEST)];
        let before = hash(ahead).map_or(0, |hash| std::mem::replace(&mut last[hash], at + 1));
        let before = before.checked_sub(1).filter(|before| at - before <= WINDOW);
        let length = before.map_or(0, |before| common(&input[before..], ahead));
        match before {
            Some(before) if length >= SHORTEST => {
                symbols.push(Symbol::of_length(length));
                symbols.push(Symbol::of_distance(at - before));
                at += length;
            }
            _ => {
                symbols.push(Symbol::plain(input[at].into()));
                at += 1;
            }
        }
    }
    symbols
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

/// Why there is no compressed data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// A symbol was needed that has no code.
    NoCode,
    /// It does not fit.
    TooLong,
}

/// Writes bits, at most `limit` bytes.
pub(super) struct Writer {
    limit: usize,
    output: Vec<u8>,
    /// Bits that are no whole word yet, fewer than 32 between two calls.
    pending: u64,
    count: u32,
}

impl Writer {
    pub(super) fn new(limit: usize) -> Self {
        Self {
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

    /// A symbol, whose code has its place in an AECS: bits 14:0 the code as RFC 1951 numbers it, bits 18:15 its length, 0 if there is
    /// none.
    #[inline(always)]
    pub(super) fn symbol(&mut self, symbol: Symbol, code: u32) -> Result<(), Failure> {
        let length = code >> 15 & 15;
        if length == 0 {
            return Err(Failure::NoCode);
        }
        // Its first bit comes first.
        let code = (code & 0x7fff).reverse_bits() >> (32 - length);
        let bits = u64::from(code) | (symbol.extra as u64) << length;
        self.put(bits, length + symbol.extra_bits)
    }

    /// Writes the bits that are left.
    pub(super) fn finish(&mut self) -> Result<(), Failure> {
        let bytes = self.pending.to_le_bytes();
        let whole = self.count.div_ceil(8) as usize;
        self.output.extend_from_slice(&bytes[..whole]);
        self.check()
    }

    /// The output as far as it fits.
    pub(super) fn output(&self) -> &[u8] {
        &self.output[..self.output.len().min(self.limit)]
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
        }
        self.check()
    }

    #[inline(always)]
    fn check(&self) -> Result<(), Failure> {
        match self.output.len() <= self.limit {
            true => Ok(()),
            false => Err(Failure::TooLong),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_symbols_are_those_of_the_rfc() {
        let symbol = |index, extra, extra_bits| Symbol {
            index,
            extra,
            extra_bits,
        };
        for (length, expected) in [
            (3, symbol(257, 0, 0)),
            (10, symbol(264, 0, 0)),
            (12, symbol(265, 1, 1)),
            (67, symbol(277, 0, 4)),
            (257, symbol(284, 30, 5)),
            (258, symbol(285, 0, 0)),
        ] {
            assert_eq!(Symbol::of_length(length), expected, "{length}");
        }
        for (distance, expected) in [
            (1, symbol(288, 0, 0)),
            (4, symbol(291, 0, 0)),
            (6, symbol(292, 1, 1)),
            (3073, symbol(311, 0, 10)),
            (4096, symbol(311, 1023, 10)),
        ] {
            assert_eq!(Symbol::of_distance(distance), expected, "{distance}");
        }
    }
}
