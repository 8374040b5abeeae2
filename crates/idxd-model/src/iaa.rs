//! What IAA's operations do, in software: COMPRESS, DECOMPRESS and CRC64 of one descriptor, from its checks to its
//! completion record.
//!
//! ```text
//!  descriptor ─► checks ─► AECS ─► source ─┬─► deflate ─┬─► destination ─► AECS ─► record
//!                                          └─► inflate ─┘
//!       0x10 … 0x30 ◄─┘     0x03 ◄──────────── 0x0a, 0x0b ───────── 0x83 ◄─┘
//! ```
//! Structures and codes are those of `linux/idxd.h` and of Intel's QPL. The transfer limit, the opcodes of a work
//! queue and DRAIN are the scheduler's. The model is of the first version of the device as a migration uses it:
//!
//! | answered with                    | what                                                                        |
//! |----------------------------------|-----------------------------------------------------------------------------|
//! | 0x30 (compression flag)          | 16-bit order, mini-blocks, dictionaries, header generation                  |
//! | 0x0a, code 22 (bad AECS)         | DECOMPRESS with an AECS to read, or one that would have to be written       |
//!
//! Assumed, because no public source states it: a size of zero, and one that no AECS has, is 0x13; a word of
//! reserved bytes that is not zero is 0x12; flags of CRC64 that do not exist are 0x30; overlap of source and
//! destination is 0x16; a destination holds what fits when an operation fails; valid bits of the last byte are
//! counted modulo eight; CRC seeds are finished checksums; without the flush flag whole bytes are written and the
//! rest is left in the AECS; a COMPRESS that overflows writes no AECS; a suppressed output has the size it would
//! have had, and the same limit; a stream ends with its last block, whether or not it is to stop there.

mod checksum;
mod deflate;
mod inflate;
mod symbols;
#[cfg(test)]
mod tests;

use checksum::{crc32, crc64, xor16};
use deflate::{Codes, Encoder, End, Histogram, Tail, tokenize};
use inflate::{Ending, Inflated, inflate};

use super::memory::{Fault, Memory};
use idxd::{Descriptor, Flags, RecordImage, opcode};

/// Executes `descriptor`, and returns what the device writes into its completion record.
pub(crate) fn execute(descriptor: &Descriptor, memory: &mut dyn Memory) -> RecordImage {
    let outcome = match descriptor.opcode() {
        opcode::NOOP => nothing(descriptor),
        opcode::COMPRESS => compress(descriptor, memory),
        opcode::DECOMPRESS => decompress(descriptor, memory),
        opcode::CRC64 => checksum(descriptor, memory),
        _ => Err(Failure::Refused(status::OPCODE)),
    };
    match outcome {
        Ok(report) => report.record(status::SUCCESS, 0),
        Err(failure) => failure.record(),
    }
}

fn nothing(descriptor: &Descriptor) -> Result<Report, Failure> {
    check_flags(descriptor, 0)?;
    check_reserved(
        descriptor.address_1
            | descriptor.address_2
            | u64::from(descriptor.size)
            | u64::from(descriptor.operation_flags)
            | descriptor.operands.iter().fold(0, |all, word| all | word),
    )?;
    Ok(Report::default())
}

fn compress(descriptor: &Descriptor, memory: &mut dyn Memory) -> Result<Report, Failure> {
    let flags = CompressFlags::of(descriptor)?;
    check_flags(descriptor, SECOND_SOURCE_FLAGS | Flags::CRC32C.0)?;
    check_reserved(descriptor.operands[2])?;
    let space = Space::of(descriptor)?;
    let aecs = Aecs::of(descriptor, CompressState::SIZES)?;

    let mut state = match aecs.read {
        Some(address) => CompressState(read(memory, address, aecs.size)?),
        None => CompressState::empty(),
    };
    let input = read(memory, descriptor.address_1, descriptor.size)?;
    let mut report = Report {
        completed: descriptor.size,
        crc: crc32(is_castagnoli(descriptor), state.crc(), &input),
        xor: xor16(state.xor(), &input),
        ..Report::default()
    };

    if flags.statistics {
        let mut histogram = Histogram::new();
        tokenize(&input, flags.literals_only, &mut histogram).map_err(Failure::of_compress)?;
        let bytes = histogram.bytes();
        if bytes.len() > space.limit() {
            return Err(Failure::of_compress(deflate::Failure::TooLong));
        }
        memory.write(descriptor.address_2, &bytes)?;
        report.output = low_32(bytes.len());
    } else {
        let codes = state.codes();
        let mut encoder = Encoder::new(&codes, space.limit());
        let tail = encode(&mut encoder, &state, &input, &flags);
        memory.write(descriptor.address_2, encoder.output())?;
        let tail = tail?;
        report.output = low_32(encoder.output().len());
        report.last_bits = tail.last_bits;
        state.set_accumulator(tail.left);
    }
    if let Some((address, WriteBack::Always)) = aecs.write {
        state.set_checksums(report.crc, report.xor);
        memory.write(address, &state.0)?;
    }
    Ok(report)
}

fn encode(
    encoder: &mut Encoder<'_>,
    state: &CompressState,
    input: &[u8],
    flags: &CompressFlags,
) -> Result<Tail, Failure> {
    let (accumulator, bits) = state.accumulator().ok_or_else(Failure::bad_aecs)?;
    encoder
        .bits(accumulator, bits)
        .and_then(|()| tokenize(input, flags.literals_only, encoder))
        .and_then(|()| encoder.finish(flags.end, flags.flush))
        .map_err(Failure::of_compress)
}

fn decompress(descriptor: &Descriptor, memory: &mut dyn Memory) -> Result<Report, Failure> {
    let flags = DecompressFlags::of(descriptor)?;
    check_flags(descriptor, SECOND_SOURCE_FLAGS | Flags::CRC32C.0)?;
    check_reserved(descriptor.operands[2])?;
    let space = Space::of(descriptor)?;
    let aecs = Aecs::of(descriptor, &DECOMPRESS_AECS_SIZES)?;
    if let Some(address) = aecs.read {
        read(memory, address, aecs.size)?;
        return Err(Failure::bad_aecs());
    }

    let input = read(memory, descriptor.address_1, descriptor.size)?;
    let Inflated {
        output,
        consumed,
        result,
    } = inflate(&input, space.limit(), flags.ending);
    if !flags.suppress_output {
        memory.write(descriptor.address_2, &output)?;
    }
    let report = Report {
        completed: low_32(consumed),
        output: low_32(output.len()),
        crc: crc32(is_castagnoli(descriptor), 0, &output),
        xor: xor16(0, &output),
        ..Report::default()
    };
    match (result, aecs.write) {
        (Err(inflate::Failure::Malformed(malformed)), _) => {
            Err(Failure::Analytics(malformed as u8, report))
        }
        (Err(inflate::Failure::TooLong), None) => Err(Failure::Overflow(report)),
        (Ok(()), None | Some((_, WriteBack::OnOverflow))) => Ok(report),
        (_, Some(_)) => Err(Failure::bad_aecs()),
    }
}

fn checksum(descriptor: &Descriptor, memory: &mut dyn Memory) -> Result<Report, Failure> {
    const INVERT: u16 = 1 << 14;
    const REFLECT: u16 = 1 << 15;
    if descriptor.operation_flags & !(INVERT | REFLECT) != 0 {
        return Err(Failure::Refused(status::COMPRESSION_FLAGS));
    }
    check_flags(descriptor, 0)?;
    check_reserved(descriptor.address_2 | descriptor.operands[0] | descriptor.operands[1])?;
    check_size(descriptor.size)?;
    let input = read(memory, descriptor.address_1, descriptor.size)?;
    Ok(Report {
        completed: descriptor.size,
        crc64: crc64(
            descriptor.operands[2],
            descriptor.operation_flags & REFLECT != 0,
            descriptor.operation_flags & INVERT != 0,
            &input,
        ),
        ..Report::default()
    })
}

/// Values of a record's first byte.
mod status {
    pub(super) const SUCCESS: u8 = 0x01;
    pub(super) const PAGE_FAULT: u8 = 0x03;
    pub(super) const ANALYTICS_ERROR: u8 = 0x0a;
    pub(super) const OUTPUT_OVERFLOW: u8 = 0x0b;
    pub(super) const OPCODE: u8 = 0x10;
    pub(super) const FLAGS: u8 = 0x11;
    pub(super) const RESERVED: u8 = 0x12;
    pub(super) const SIZE: u8 = 0x13;
    pub(super) const OVERLAP: u8 = 0x16;
    pub(super) const ALIGNMENT: u8 = 0x1c;
    pub(super) const COMPRESSION_FLAGS: u8 = 0x30;
    /// Beside a page fault's: it was a write.
    pub(super) const WRITE: u8 = 0x80;
}

/// Error codes of an [`ANALYTICS_ERROR`](status::ANALYTICS_ERROR) that are not those of [`inflate::Malformed`].
mod error {
    pub(super) const BAD_AECS: u8 = 22;
    pub(super) const OUTPUT_TOO_SMALL: u8 = 25;
    pub(super) const NO_CODE: u8 = 30;
}

/// What an operation reports about itself.
#[derive(Clone, Copy, Debug, Default)]
struct Report {
    completed: u32,
    output: u32,
    last_bits: u8,
    xor: u16,
    crc: u32,
    crc64: u64,
}

impl Report {
    fn record(self, status: u8, error: u8) -> RecordImage {
        let mut words = [0; 8];
        words[0] = u64::from(status) | u64::from(error) << 8 | u64::from(self.completed) << 32;
        words[3] =
            u64::from(self.output) | u64::from(self.last_bits) << 32 | u64::from(self.xor) << 48;
        words[4] = u64::from(self.crc);
        words[5] = self.crc64;
        RecordImage { words }
    }
}

/// Why an operation was not done, or not to its end.
enum Failure {
    /// The descriptor is wrong, with the status for the violation.
    Refused(u8),
    /// These flags are not the operation's.
    Flags(u32),
    Fault(Fault),
    /// An error code, and how far it went.
    Analytics(u8, Report),
    /// The destination is full.
    Overflow(Report),
}

impl Failure {
    fn bad_aecs() -> Self {
        Self::Analytics(error::BAD_AECS, Report::default())
    }

    fn of_compress(failure: deflate::Failure) -> Self {
        let code = match failure {
            deflate::Failure::NoCode => error::NO_CODE,
            deflate::Failure::TooLong => error::OUTPUT_TOO_SMALL,
        };
        Self::Analytics(code, Report::default())
    }

    fn record(self) -> RecordImage {
        let nothing = Report::default();
        match self {
            Self::Refused(status) => nothing.record(status, 0),
            Self::Flags(wrong) => {
                let mut record = nothing.record(status::FLAGS, 0);
                record.words[2] = u64::from(wrong);
                record
            }
            Self::Fault(fault) => {
                let write = if fault.write { status::WRITE } else { 0 };
                let mut record = nothing.record(status::PAGE_FAULT | write, 0);
                record.words[1] = fault.address;
                record
            }
            Self::Analytics(code, report) => report.record(status::ANALYTICS_ERROR, code),
            Self::Overflow(report) => report.record(status::OUTPUT_OVERFLOW, 0),
        }
    }
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

/// COMPRESS's own flags.
struct CompressFlags {
    statistics: bool,
    flush: bool,
    end: End,
    literals_only: bool,
}

impl CompressFlags {
    fn of(descriptor: &Descriptor) -> Result<Self, Failure> {
        let flags = descriptor.operation_flags;
        if flags & !0x1f != 0 {
            return Err(Failure::Refused(status::COMPRESSION_FLAGS));
        }
        Ok(Self {
            statistics: flags & 1 << 0 != 0,
            flush: flags & 1 << 1 != 0,
            end: match flags >> 2 & 3 {
                0 => End::Open,
                1 => End::Block,
                2 => End::Stored { last: false },
                _ => End::Stored { last: true },
            },
            literals_only: flags & 1 << 4 != 0,
        })
    }
}

/// DECOMPRESS's own flags.
struct DecompressFlags {
    suppress_output: bool,
    ending: Ending,
}

impl DecompressFlags {
    fn of(descriptor: &Descriptor) -> Result<Self, Failure> {
        const ENABLE: u16 = 1 << 0;
        const IGNORED_HIGH: u16 = 1 << 14;
        const KNOWN: u16 = 0x1f | 7 << 6 | 1 << 9 | IGNORED_HIGH;
        let flags = descriptor.operation_flags;
        if flags & !KNOWN != 0 || flags & ENABLE == 0 {
            return Err(Failure::Refused(status::COMPRESSION_FLAGS));
        }
        let ignored_high = if flags & IGNORED_HIGH != 0 { 8 } else { 0 };
        Ok(Self {
            suppress_output: flags & 1 << 9 != 0,
            ending: Ending {
                ignored_bits: usize::from(flags >> 6 & 7) + ignored_high,
                stop: flags & 1 << 2 != 0,
                check: flags & 1 << 3 != 0,
                last_block: flags & 1 << 4 != 0,
            },
        })
    }
}

/// The destination.
struct Space(u32);

impl Space {
    fn of(descriptor: &Descriptor) -> Result<Self, Failure> {
        let size = descriptor.low(1);
        check_size(descriptor.size)?;
        check_size(size)?;
        let source_end = descriptor.address_1.saturating_add(descriptor.size.into());
        let end = descriptor.address_2.saturating_add(size.into());
        if descriptor.address_1 < end && descriptor.address_2 < source_end {
            return Err(Failure::Refused(status::OVERLAP));
        }
        Ok(Self(size))
    }

    fn limit(&self) -> usize {
        self.0 as usize
    }
}

/// Flags of the second source: whether it is read and written, its steering tag, and the toggle.
const SECOND_SOURCE_FLAGS: u32 = 0x1f << 16 | Flags::AECS_TOGGLE.0;

/// Sizes of a DECOMPRESS AECS: without and with history.
const DECOMPRESS_AECS_SIZES: [u32; 2] = [0x4e0, 0x1500];

/// Where the AECS is. If it is both read and written, there are two, and the toggle selects which is which.
struct Aecs {
    size: u32,
    read: Option<u64>,
    write: Option<(u64, WriteBack)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum WriteBack {
    Always,
    OnOverflow,
}

impl Aecs {
    fn of(descriptor: &Descriptor, sizes: &[u32]) -> Result<Self, Failure> {
        const READ_MASK: u32 = 3 << 16;
        const WRITE_MASK: u32 = 3 << 18;
        let flags = descriptor.flags();
        let reads = match flags.0 & READ_MASK {
            0 => false,
            read if read == Flags::READ_AECS.0 => true,
            // A second input is not theirs.
            wrong => return Err(Failure::Flags(wrong)),
        };
        let back = match (flags.0 & WRITE_MASK) >> 18 {
            0 => None,
            1 => Some(WriteBack::Always),
            2 => Some(WriteBack::OnOverflow),
            _ => return Err(Failure::Flags(WRITE_MASK)),
        };
        let (first, size) = (descriptor.operands[0], descriptor.high(1));
        if !reads && back.is_none() {
            check_reserved(first | u64::from(size))?;
            return Ok(Self {
                size,
                read: None,
                write: None,
            });
        }
        if !first.is_multiple_of(32) || !size.is_multiple_of(32) {
            return Err(Failure::Refused(status::ALIGNMENT));
        }
        if !sizes.contains(&size) {
            return Err(Failure::Refused(status::SIZE));
        }
        let second = first.wrapping_add(size.into());
        let (read, write) = match (reads && back.is_some(), flags.has(Flags::AECS_TOGGLE)) {
            (false, _) => (first, first),
            (true, false) => (first, second),
            (true, true) => (second, first),
        };
        Ok(Self {
            size,
            read: reads.then_some(read),
            write: back.map(|back| (write, back)),
        })
    }
}

/// A COMPRESS AECS.
///
/// ```text
///  0     4     8          28              32            288              1440        1560
/// ┌─────┬─────┬──────────┬───────────────┬─────────────┬────────────────┬───────────┬─────┐
/// │ CRC │ XOR │ reserved │ bits that are │ accumulator │ literals' and  │ distances'│     │
/// │     │     │          │ accumulated   │ (256 bytes) │ lengths' codes │ codes     │     │
/// └─────┴─────┴──────────┴───────────────┴─────────────┴────────────────┴───────────┴─────┘
/// ```
struct CompressState(Vec<u8>);

impl CompressState {
    const SIZES: &[u32] = &[1568];
    const XOR: usize = 4;
    const BITS: usize = 28;
    const ACCUMULATOR: std::ops::Range<usize> = 32..288;
    const LITERALS: usize = 288;
    const DISTANCES: usize = 1440;

    fn empty() -> Self {
        Self(vec![0; 1568])
    }

    fn word(&self, at: usize) -> u32 {
        let word = self.0.get(at..).and_then(|bytes| bytes.first_chunk());
        word.map_or(0, |word| u32::from_le_bytes(*word))
    }

    fn set_word(&mut self, at: usize, word: u32) {
        if let Some(place) = self.0[at..].first_chunk_mut() {
            *place = word.to_le_bytes();
        }
    }

    fn crc(&self) -> u32 {
        self.word(0)
    }

    fn xor(&self) -> u16 {
        (self.word(Self::XOR) & 0xffff) as u16
    }

    fn set_checksums(&mut self, crc: u32, xor: u16) {
        self.set_word(0, crc);
        self.set_word(Self::XOR, xor.into());
    }

    /// What comes before the data, and how many bits of it; unless those are more than fit.
    fn accumulator(&self) -> Option<(&[u8], u32)> {
        let bits = self.word(Self::BITS);
        let accumulator = &self.0[Self::ACCUMULATOR];
        (bits as usize <= 8 * accumulator.len()).then_some((accumulator, bits))
    }

    fn set_accumulator(&mut self, (byte, bits): (u8, u32)) {
        self.set_word(Self::BITS, bits);
        let accumulator = &mut self.0[Self::ACCUMULATOR];
        accumulator.fill(0);
        accumulator[0] = byte;
    }

    fn codes(&self) -> Codes {
        let words = |from: usize| (from..).step_by(4).map(|at| self.word(at));
        Codes::new(words(Self::LITERALS), words(Self::DISTANCES))
    }
}

/// All flags have to be those of any operation, or of this one.
fn check_flags(descriptor: &Descriptor, own: u32) -> Result<(), Failure> {
    /// Block on fault, record, interrupt, steering tag of the record, cache, traffic classes, ordering, readback and
    /// steering tag of the destination.
    const COMMON: u32 = 0xff3e;
    match descriptor.flags().0 & !(COMMON | own) {
        0 => Ok(()),
        wrong => Err(Failure::Flags(wrong)),
    }
}

fn check_reserved(word: u64) -> Result<(), Failure> {
    match word {
        0 => Ok(()),
        _ => Err(Failure::Refused(status::RESERVED)),
    }
}

fn check_size(size: u32) -> Result<(), Failure> {
    match size {
        0 => Err(Failure::Refused(status::SIZE)),
        _ => Ok(()),
    }
}

fn is_castagnoli(descriptor: &Descriptor) -> bool {
    descriptor.flags().has(Flags::CRC32C)
}

/// Reads in parts, so that a size that was made up costs no more memory than there is to read.
fn read(memory: &mut dyn Memory, address: u64, size: u32) -> Result<Vec<u8>, Fault> {
    const PART: usize = 1 << 20;
    let size = size as usize;
    let mut bytes = Vec::new();
    while bytes.len() < size {
        let from = bytes.len();
        bytes.resize(size.min(from + PART), 0);
        memory.read(address.wrapping_add(from as u64), &mut bytes[from..])?;
    }
    Ok(bytes)
}

/// A length that a descriptor's 32 bits bound.
fn low_32(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}
