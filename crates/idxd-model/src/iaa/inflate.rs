//! Raw DEFLATE (RFC 1951) as IAA's decompressor reads it: with 4 KiB of history, and its own names for what is
//! wrong with a stream.
//!
//! What RFC 1951 leaves open is assumed: an incomplete code is no error until one of its unused words turns up, and
//! code lengths may be repeated across the border of the two alphabets.
//!
//! What runs for every token is `inline(always)`: tests are built with few optimisations, which leave it out.

use std::sync::LazyLock;

use super::symbols::{
    DISTANCE_RANGES, DISTANCES, END_OF_BLOCK, FIRST_LENGTH, LENGTH_RANGES, LITERALS, WINDOW,
};

/// What the end of the input means.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ending {
    /// Bits at the input's end that are not there.
    pub(super) ignored_bits: usize,
    /// Nothing is read beyond the end of a block.
    pub(super) stop: bool,
    /// The last that is read must be the end of a block.
    pub(super) check: bool,
    /// Only the last block's end is meant.
    pub(super) last_block: bool,
}

/// What became of a stream.
#[derive(Debug)]
pub(super) struct Inflated {
    pub(super) output: Vec<u8>,
    /// Bytes of the input that were read, the last one perhaps in part.
    pub(super) consumed: usize,
    pub(super) result: Result<(), Failure>,
}

/// Why there is not all of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// It does not fit.
    TooLong,
    /// The stream is wrong.
    Malformed(Malformed),
}

/// IAA's error codes for streams; their source is Intel's QPL (`status.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Malformed {
    /// The input ends in a block's header.
    HeaderCut = 1,
    /// A word that the code for code lengths does not have.
    LengthCode = 2,
    /// The first code length repeats one before it.
    NothingToRepeat = 3,
    /// No literal or length has a code.
    NoLiteralCodes = 5,
    /// More code lengths than announced.
    TooManyLengths = 7,
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

/// Inflates `input` into at most `limit` bytes.
pub(super) fn inflate(input: &[u8], limit: usize, ending: Ending) -> Inflated {
    let mut inflater = Inflater {
        input,
        at: 0,
        end: (8 * input.len()).saturating_sub(ending.ignored_bits),
        output: Vec::with_capacity(limit.min(1 << 16)),
        limit,
    };
    let result = match inflater.blocks(ending) {
        Ok(()) => Ok(()),
        Err(Halt::Failed(failure)) => Err(failure),
        Err(Halt::Cut) if ending.check => Err(Failure::Malformed(Malformed::NoEnd)),
        Err(Halt::Cut) => Ok(()),
    };
    Inflated {
        output: inflater.output,
        consumed: inflater.at.div_ceil(8),
        result,
    }
}

/// Why reading stops before its end.
enum Halt {
    /// The input ends in a block's data.
    Cut,
    Failed(Failure),
}

impl From<Malformed> for Halt {
    fn from(malformed: Malformed) -> Self {
        Self::Failed(Failure::Malformed(malformed))
    }
}

struct Inflater<'a> {
    input: &'a [u8],
    /// Bits that have been read, and how many there are.
    at: usize,
    end: usize,
    output: Vec<u8>,
    limit: usize,
}

impl Inflater<'_> {
    fn blocks(&mut self, ending: Ending) -> Result<(), Halt> {
        let mut ended = false;
        loop {
            if self.at == self.end {
                return if ended && !ending.last_block {
                    Ok(())
                } else {
                    Err(Halt::Cut)
                };
            }
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
            let last = header & 1 == 1;
            if last || ending.stop && !ending.last_block {
                return Ok(());
            }
            ended = true;
        }
    }

    fn stored(&mut self) -> Result<(), Halt> {
        while !self.at.is_multiple_of(8) {
            self.header(1)?;
        }
        let length = self.header(16)?;
        if self.header(16)? != length ^ 0xffff {
            return Err(Malformed::StoredLength.into());
        }
        let from = self.at / 8;
        let there = (self.end - self.at) / 8;
        let bytes = &self.input[from..from + there.min(length as usize)];
        let fits = bytes.len().min(self.limit - self.output.len());
        self.output.extend_from_slice(&bytes[..fits]);
        self.at += 8 * fits;
        if fits < bytes.len() {
            return Err(Halt::Failed(Failure::TooLong));
        }
        if bytes.len() < length as usize {
            return Err(Halt::Cut);
        }
        Ok(())
    }

    /// The tokens of a block.
    fn coded(&mut self, literals: &Table, distances: &Table) -> Result<(), Halt> {
        loop {
            let bits = self.peek();
            let (symbol, mut used) = self.decode(literals, bits, 0, Malformed::LiteralCode)?;
            if symbol < 256 {
                self.has(used)?;
                if self.output.len() == self.limit {
                    return Err(Halt::Failed(Failure::TooLong));
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
            self.copy(length, distance)?;
            self.at += used as usize;
        }
    }

    fn copy(&mut self, length: usize, distance: usize) -> Result<(), Halt> {
        if distance > WINDOW {
            return Err(Malformed::BeyondHistory.into());
        }
        let Some(from) = self.output.len().checked_sub(distance) else {
            return Err(Malformed::BeforeStart.into());
        };
        let fits = length.min(self.limit - self.output.len());
        let mut left = fits;
        while left > 0 {
            // A copy may overlap itself: then what it repeats gets longer with each round.
            let part = left.min(self.output.len() - from);
            self.output.extend_from_within(from..from + part);
            left -= part;
        }
        if fits < length {
            return Err(Halt::Failed(Failure::TooLong));
        }
        Ok(())
    }

    /// The codes that a dynamic block's header describes.
    fn tables(&mut self) -> Result<(Table, Table), Halt> {
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

        let mut lengths = [0; LITERALS + DISTANCES];
        let lengths = &mut lengths[..literals + distances];
        let mut at = 0;
        while at < lengths.len() {
            let (symbol, used) = self.length_symbol(&code)?;
            self.at += used as usize;
            let (length, times) = match symbol {
                16 => {
                    let before = at.checked_sub(1).ok_or(Malformed::NothingToRepeat)?;
                    (lengths[before], 3 + self.header(2)?)
                }
                17 => (0, 3 + self.header(3)?),
                18 => (0, 11 + self.header(7)?),
                length => ((length & 15) as u8, 1),
            };
            lengths
                .get_mut(at..at + times as usize)
                .ok_or(Malformed::TooManyLengths)?
                .fill(length);
            at += times as usize;
        }
        let (literals, distances) = lengths.split_at(literals);
        if literals.iter().all(|length| *length == 0) {
            return Err(Malformed::NoLiteralCodes.into());
        }
        Ok((
            Table::new(literals).ok_or(Malformed::LiteralCodes)?,
            Table::new(distances).ok_or(Malformed::DistanceCodes)?,
        ))
    }

    /// A symbol of the code for code lengths; where the input ends instead, it ends in a header.
    fn length_symbol(&self, code: &Table) -> Result<(u16, u32), Halt> {
        let cut = |halt| match halt {
            Halt::Cut => Malformed::HeaderCut.into(),
            failed => failed,
        };
        let (symbol, used) = self
            .decode(code, self.peek(), 0, Malformed::LengthCode)
            .map_err(cut)?;
        self.has(used).map_err(cut)?;
        Ok((symbol, used))
    }

    /// The next `count` bits (at most 16) of a header.
    fn header(&mut self, count: u32) -> Result<u32, Halt> {
        self.has(count).map_err(|_| Malformed::HeaderCut)?;
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
    ) -> Result<(u16, u32), Halt> {
        match table.decode(bits >> skipped) {
            Some(found) => Ok(found),
            // Perhaps a word whose end is missing.
            None if self.has(skipped + table.longest()).is_err() => Err(Halt::Cut),
            None => Err(unknown.into()),
        }
    }

    /// Whether there are `count` bits.
    #[inline(always)]
    fn has(&self, count: u32) -> Result<(), Halt> {
        if self.end - self.at < count as usize {
            return Err(Halt::Cut);
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

/// The codes of blocks of type 1. They are complete; two symbols of each stand for nothing.
static FIXED: LazyLock<(Table, Table)> = LazyLock::new(|| {
    let mut lengths = [8; 288];
    lengths[144..256].fill(9);
    lengths[256..280].fill(7);
    (Table::of(&lengths), Table::of(&[5; 32]))
});

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
