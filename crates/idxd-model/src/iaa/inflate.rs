//! Raw DEFLATE (RFC 1951) as IAA's decompressor reads it: with 4 KiB of history, and its own names for what is
//! wrong with a stream.
//!
//! Code lengths are not repeated across the border of the two alphabets, although RFC 1951 allows that (IAA 2.1, 4.4.2,
//! error codes 4 and 6). Assumed, because neither document states it: an incomplete code is no error until one of its
//! unused words turns up.
//!
//! A library does not do here: none reports the device's error codes, nor rejects matches beyond 4 KiB. What runs for
//! every token is `inline(always)`: tests are built with few optimisations, which leave it out.

use std::sync::LazyLock;

use super::symbols::{
    DISTANCE_RANGES, DISTANCES, END_OF_BLOCK, FIRST_LENGTH, LENGTH_RANGES, LITERALS, WINDOW,
};

/// Why there is not all of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// It does not fit.
    TooLong,
    /// The stream is wrong.
    Malformed(Malformed),
}

/// IAA's error codes for streams (IAA 2.1, 4.4.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Malformed {
    /// A word that the code for code lengths does not have.
    LengthCode = 2,
    /// The first code length repeats one before it, of literals and lengths.
    FirstLiteralRepeats = 3,
    /// The same, of distances.
    FirstDistanceRepeats = 4,
    /// No literal or length has a code.
    NoLiteralCodes = 5,
    /// More code lengths than announced, of literals and lengths.
    LiteralCount = 6,
    /// The same, of distances.
    DistanceCount = 7,
    /// More words than there are, in the code for code lengths.
    LengthCodes = 8,
    /// The same, for literals and lengths.
    LiteralCodes = 9,
    /// The same, for distances.
    DistanceCodes = 10,
    /// A word that the code for literals and lengths does not have.
    LiteralCode = 11,
    /// A word that the code for distances does not have.
    DistanceCode = 12,
    /// Block type 3.
    BlockType = 13,
    /// The two lengths of a stored block do not match.
    StoredLength = 14,
    /// The input does not end with the end of a block.
    NoEnd = 15,
    /// Further back than the history goes.
    BeyondHistory = 17,
    /// Further back than the first byte.
    BeforeStart = 18,
    /// More than 286 codes announced for literals and lengths.
    TooManyLiteralCodes = 35,
    /// More than 30 codes announced for distances.
    TooManyDistanceCodes = 36,
}

/// Decompresses `input`, up to the end of its last block, into at most `limit` bytes. Returns the output as far as it goes.
pub(super) fn inflate(input: &[u8], limit: usize) -> (Vec<u8>, Result<(), Failure>) {
    let mut inflater = Inflater {
        input,
        at: 0,
        end: 8 * input.len(),
        output: Vec::new(),
        limit,
    };
    let result = inflater.blocks();
    (inflater.output, result)
}

impl From<Malformed> for Failure {
    fn from(malformed: Malformed) -> Self {
        Self::Malformed(malformed)
    }
}

/// Lengths of the codes for literals and lengths, then of those for distances: with the two symbols of each that stand
/// for nothing, but have words in the fixed codes.
type CodeLengths = [u8; FIRST_DISTANCE + 32];

/// Where distances begin.
const FIRST_DISTANCE: usize = 288;

struct Inflater<'a> {
    input: &'a [u8],
    /// Bits that have been read, and how many there are.
    at: usize,
    end: usize,
    output: Vec<u8>,
    limit: usize,
}

impl Inflater<'_> {
    fn blocks(&mut self) -> Result<(), Failure> {
        loop {
            let header = self.header(3)?;
            match header >> 1 {
                0 => self.stored()?,
                1 => self.coded(&FIXED.0, &FIXED.1)?,
                2 => {
                    let (literals, distances) = self.tables()?;
                    self.coded(&literals, &distances)?;
                }
                _ => return Err(Malformed::BlockType.into()),
            }
            if header & 1 == 1 {
                return Ok(());
            }
        }
    }

    fn stored(&mut self) -> Result<(), Failure> {
        while !self.at.is_multiple_of(8) {
            self.header(1)?;
        }
        let length = self.header(16)?;
        if self.header(16)? != length ^ 0xffff {
            return Err(Malformed::StoredLength.into());
        }
        let length = length as usize;
        let ahead = &self.input[self.at / 8..];
        let there = &ahead[..length.min(ahead.len())];
        let fits = there.len().min(self.limit - self.output.len());
        self.output.extend_from_slice(&there[..fits]);
        if fits < there.len() {
            return Err(Failure::TooLong);
        }
        self.at += 8 * fits;
        if fits < length {
            return Err(Malformed::NoEnd.into());
        }
        Ok(())
    }

    /// The tokens of a block.
    fn coded(&mut self, literals: &Table, distances: &Table) -> Result<(), Failure> {
        loop {
            let bits = self.peek();
            let (symbol, mut used) = self.decode(literals, bits, 0, Malformed::LiteralCode)?;
            if symbol < 256 {
                self.has(used)?;
                if self.output.len() == self.limit {
                    return Err(Failure::TooLong);
                }
                self.output.push((symbol & 0xff) as u8);
                self.at += used as usize;
                continue;
            }
            let symbol = usize::from(symbol);
            if symbol == END_OF_BLOCK {
                self.has(used)?;
                self.at += used as usize;
                return Ok(());
            }
            // The longest token has 48 bits, of at least 57 that were looked at.
            let Some(range) = LENGTH_RANGES.get(symbol - FIRST_LENGTH) else {
                return Err(Malformed::LiteralCode.into());
            };
            let length = usize::from(range.base) + extra(bits >> used, range.extra);
            used += u32::from(range.extra);
            self.has(used)?;
            let (symbol, more) = self.decode(distances, bits, used, Malformed::DistanceCode)?;
            used += more;
            let Some(range) = DISTANCE_RANGES.get(usize::from(symbol)) else {
                return Err(Malformed::DistanceCode.into());
            };
            let distance = usize::from(range.base) + extra(bits >> used, range.extra);
            used += u32::from(range.extra);
            self.has(used)?;
            if distance > WINDOW {
                return Err(Malformed::BeyondHistory.into());
            }
            if distance > self.output.len() {
                return Err(Malformed::BeforeStart.into());
            }
            self.at += used as usize;
            self.copy(length, distance)?;
        }
    }

    /// A copy whose distance is not beyond the start.
    fn copy(&mut self, length: usize, distance: usize) -> Result<(), Failure> {
        let from = self.output.len() - distance;
        let fits = length.min(self.limit - self.output.len());
        let mut left = fits;
        while left > 0 {
            // A copy may overlap itself: then what it repeats gets longer with each round.
            let part = left.min(self.output.len() - from);
            self.output.extend_from_within(from..from + part);
            left -= part;
        }
        if fits < length {
            return Err(Failure::TooLong);
        }
        Ok(())
    }

    /// The codes that a dynamic block's header describes.
    fn tables(&mut self) -> Result<(Table, Table), Failure> {
        const ORDER: [usize; 19] = [
            16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15,
        ];
        let counts = self.header(14)?;
        let literals = 257 + (counts & 31) as usize;
        let distances = 1 + (counts >> 5 & 31) as usize;
        if literals > LITERALS {
            return Err(Malformed::TooManyLiteralCodes.into());
        }
        if distances > DISTANCES {
            return Err(Malformed::TooManyDistanceCodes.into());
        }
        let mut lengths = [0; 19];
        for symbol in &ORDER[..4 + (counts >> 10) as usize] {
            lengths[*symbol] = (self.header(3)? & 7) as u8;
        }
        let code = Table::new(&lengths).ok_or(Malformed::LengthCodes)?;

        let mut all: CodeLengths = [0; _];
        let (of_literals, of_distances) = all.split_at_mut(FIRST_DISTANCE);
        self.lengths(
            &code,
            &mut of_literals[..literals],
            [Malformed::FirstLiteralRepeats, Malformed::LiteralCount],
        )?;
        self.lengths(
            &code,
            &mut of_distances[..distances],
            [Malformed::FirstDistanceRepeats, Malformed::DistanceCount],
        )?;
        let (literals, distances) = all.split_at(FIRST_DISTANCE);
        if literals.iter().all(|length| *length == 0) {
            return Err(Malformed::NoLiteralCodes.into());
        }
        Ok((
            Table::new(literals).ok_or(Malformed::LiteralCodes)?,
            Table::new(distances).ok_or(Malformed::DistanceCodes)?,
        ))
    }

    /// The lengths of one alphabet's codes. They begin with no repetition and end with none that goes further, which
    /// are the two errors.
    fn lengths(
        &mut self,
        code: &Table,
        lengths: &mut [u8],
        [first, count]: [Malformed; 2],
    ) -> Result<(), Failure> {
        let mut at = 0;
        while at < lengths.len() {
            let (symbol, used) = self.decode(code, self.peek(), 0, Malformed::LengthCode)?;
            self.has(used)?;
            self.at += used as usize;
            let (length, times) = match symbol {
                16 => {
                    let before = at.checked_sub(1).ok_or(first)?;
                    (lengths[before], 3 + self.header(2)?)
                }
                17 => (0, 3 + self.header(3)?),
                18 => (0, 11 + self.header(7)?),
                length => ((length & 15) as u8, 1),
            };
            lengths
                .get_mut(at..at + times as usize)
                .ok_or(count)?
                .fill(length);
            at += times as usize;
        }
        Ok(())
    }

    /// The next `count` bits (at most 16) of a header.
    fn header(&mut self, count: u32) -> Result<u32, Failure> {
        self.has(count)?;
        let bits = self.peek() & ((1 << count) - 1);
        self.at += count as usize;
        Ok((bits & 0xffff) as u32)
    }

    /// A symbol after `skipped` of the next `bits`, and the length of its word.
    #[inline(always)]
    fn decode(
        &self,
        table: &Table,
        bits: u64,
        skipped: u32,
        unknown: Malformed,
    ) -> Result<(u16, u32), Failure> {
        match table.decode(bits >> skipped) {
            Some(found) => Ok(found),
            // Perhaps a word whose end is missing.
            None if self.has(skipped + table.longest()).is_err() => Err(Malformed::NoEnd.into()),
            None => Err(unknown.into()),
        }
    }

    /// Whether there are `count` bits.
    #[inline(always)]
    fn has(&self, count: u32) -> Result<(), Failure> {
        if self.end - self.at < count as usize {
            return Err(Malformed::NoEnd.into());
        }
        Ok(())
    }

    /// At least 57 bits from here on; beyond the input's end they are zeros.
    #[inline(always)]
    fn peek(&self) -> u64 {
        let ahead = &self.input[self.at / 8..];
        let word = match ahead.first_chunk() {
            Some(word) => u64::from_le_bytes(*word),
            None => ahead
                .iter()
                .rfold(0, |word, byte| word << 8 | u64::from(*byte)),
        };
        word >> (self.at % 8)
    }
}

#[inline(always)]
fn extra(bits: u64, count: u8) -> usize {
    (bits & ((1 << count) - 1) & 0xffff) as usize
}

/// Most bits of a code word.
const LONGEST_CODE: usize = 15;
/// Words of up to so many bits are found in one step.
const DIRECT_BITS: u32 = 10;

/// A Huffman code, for reading.
struct Table {
    /// By the next bits of the stream: the symbol times 16, plus the length of its word; zero where it is longer.
    direct: [u16; 1 << DIRECT_BITS],
    /// How many words there are of each length.
    counts: [u16; LONGEST_CODE + 1],
    /// All symbols, by their words.
    symbols: [u16; 288],
}

/// The codes of blocks of type 1.
static FIXED: LazyLock<(Table, Table)> = LazyLock::new(|| {
    let (literals, distances) = FIXED_LENGTHS.split_at(FIRST_DISTANCE);
    (Table::of(literals), Table::of(distances))
});

const FIXED_LENGTHS: CodeLengths = {
    let mut lengths = [5; _];
    let mut symbol = 0;
    while symbol < FIRST_DISTANCE {
        lengths[symbol] = match symbol {
            144..256 => 9,
            256..280 => 7,
            _ => 8,
        };
        symbol += 1;
    }
    lengths
};

impl Table {
    /// The code with words of these `lengths`, unless there are not as many words.
    fn new(lengths: &[u8]) -> Option<Self> {
        let mut left = 1_i32 << LONGEST_CODE;
        for length in lengths.iter().filter(|length| **length > 0) {
            left -= 1 << (LONGEST_CODE - usize::from(*length));
        }
        (left >= 0).then(|| Self::of(lengths))
    }

    fn of(lengths: &[u8]) -> Self {
        let mut table = Self {
            direct: [0; 1 << DIRECT_BITS],
            counts: [0; LONGEST_CODE + 1],
            symbols: [0; 288],
        };
        for length in lengths {
            table.counts[usize::from(*length)] += 1;
        }
        table.counts[0] = 0;

        // Per length: the next word, and the next place among the symbols.
        let mut words = [0_u16; LONGEST_CODE + 2];
        let mut places = [0_u16; LONGEST_CODE + 2];
        for length in 1..=LONGEST_CODE {
            words[length + 1] = (words[length] + table.counts[length]) << 1;
            places[length + 1] = places[length] + table.counts[length];
        }
        for (symbol, length) in (0_u16..).zip(lengths) {
            let bits = usize::from(*length);
            if bits == 0 {
                continue;
            }
            table.symbols[usize::from(places[bits])] = symbol;
            places[bits] += 1;
            if bits <= DIRECT_BITS as usize {
                let word = words[bits].reverse_bits() >> (16 - bits);
                let entries = table.direct[usize::from(word)..].iter_mut();
                for entry in entries.step_by(1 << bits) {
                    *entry = symbol << 4 | u16::from(*length);
                }
            }
            words[bits] += 1;
        }
        table
    }

    /// The symbol whose word `bits` begin with, and the length of that word.
    #[inline(always)]
    fn decode(&self, bits: u64) -> Option<(u16, u32)> {
        let entry = self.direct[(bits & ((1 << DIRECT_BITS) - 1)) as usize];
        if entry != 0 {
            return Some((entry >> 4, u32::from(entry & 15)));
        }
        self.decode_long(bits)
    }

    /// Bits of its longest word.
    fn longest(&self) -> u32 {
        let lengths = (0_u32..).zip(&self.counts);
        lengths
            .filter(|(_, count)| **count > 0)
            .map(|(length, _)| length)
            .last()
            .unwrap_or(0)
    }

    /// Bit by bit: among the words of one length, the symbols are in order.
    fn decode_long(&self, bits: u64) -> Option<(u16, u32)> {
        let (mut word, mut first, mut place) = (0, 0, 0);
        for (length, count) in (1_u32..).zip(&self.counts[1..]) {
            let count = usize::from(*count);
            word |= (bits >> (length - 1) & 1) as usize;
            if word < first + count {
                return Some((self.symbols[place + word - first], length));
            }
            place += count;
            first = (first + count) << 1;
            word <<= 1;
        }
        None
    }
}
