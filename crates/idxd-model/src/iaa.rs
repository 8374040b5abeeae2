//! What IAA's operations do, in software: COMPRESS, DECOMPRESS and CRC64 of one descriptor, from its checks to its
//! completion record.
//!
//! ```text
//!  descriptor ─► checks ─► AECS ─► source ─┬─► deflate ─┬─► destination ─► AECS ─► record
//!                                          └─► inflate ─┘
//!       0x10 … 0x30 ◄─┘     0x03 ◄──────────── 0x0a, 0x0b ───────── 0x83 ◄─┘
//! ```
//! Sources: IAA 2.1, 3.2 to 3.6, 4 and 6. The transfer limit, the opcodes of a work queue and DRAIN are the
//! scheduler's. The model is of the first generation of the device (7.2.2) as a migration uses it:
//!
//! | answered with                    | what                                                                        |
//! |----------------------------------|-----------------------------------------------------------------------------|
//! | 0x30 (compression flag)          | 16-bit order and mini-blocks, which the device has; what later ones have    |
//! | 0x0a, code 22 (bad AECS)         | an AECS of DECOMPRESS of the second format, or one that drops bytes         |
//!
//! Without the flush flag the device leaves a partial word of output in the AECS (6.3.2.1, 6.3.5.1), of up to 64 bits;
//! the model leaves a partial byte of COMPRESS, and nothing of DECOMPRESS.
//!
//! Assumed, because the specification does not state it: a destination holds what fits when an operation fails; an
//! operation with an analytics error writes no AECS (stated for a COMPRESS that does not fit, 3.4.2); a suppressed
//! output has the size it would have had, and the same limit; after a stop at the end of a block an AECS goes on with
//! another header.

mod aecs;
mod checksum;
mod deflate;
mod inflate;
mod state;
mod symbols;
#[cfg(test)]
mod tests;

use aecs::{Aecs, CompressState, WriteBack};
use checksum::{crc32, crc64, xor16};
use deflate::{Encoder, End, Histogram, Tail, tokenize};
use inflate::{Ending, inflate};
use state::Saved;

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
        // Nothing is left to be continued (IAA 2.1, 6.2.4).
        Ok(report) => Report {
            completed: 0,
            ..report
        }
        .record(status::SUCCESS, 0),
        Err(failure) => failure.record(),
    }
}

fn nothing(descriptor: &Descriptor) -> Result<Report, Failure> {
    check_flags(descriptor, RECORD_FLAGS)?;
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
    check_flags(descriptor, TRANSFER_FLAGS)?;
    check_reserved(descriptor.high(2).into())?;
    let space = Space::of(descriptor)?;
    let aecs = Aecs::of(descriptor, &CompressState::SIZES)?;

    let mut state = match aecs.read {
        Some(address) => CompressState(read(memory, address, aecs.size)?),
        None if flags.statistics => CompressState::empty(),
        None => return Err(Failure::Flags(aecs::READ_MASK)),
    };
    let input = read(memory, descriptor.address_1, descriptor.size)?;
    let mut report = Report {
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
        write_output(memory, descriptor, &bytes)?;
        report.output = low_32(bytes.len());
    } else {
        let codes = state.codes();
        let mut encoder = Encoder::new(&codes, space.limit());
        let tail = encode(&mut encoder, &state, &input, &flags);
        write_output(memory, descriptor, encoder.output())?;
        let tail = tail?;
        report.output = low_32(encoder.output().len());
        report.last_bits = tail.last_bits;
        state.set_accumulator(tail.left);
    }
    if let Some((address, WriteBack::Always)) = aecs.write {
        state.set_checksums(report.crc, report.xor);
        write_back(memory, address, state.written(), &report)?;
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
    check_flags(descriptor, TRANSFER_FLAGS)?;
    check_reserved(descriptor.operands[2])?;
    let space = Space::of(descriptor)?;
    let aecs = Aecs::of(descriptor, &state::SIZES)?;

    let Saved { crc, xor, state } = match aecs.read {
        Some(address) => {
            Saved::of(&read(memory, address, aecs.size)?).ok_or_else(Failure::bad_aecs)?
        }
        None => Saved::new(),
    };
    let input = read(memory, descriptor.address_1, descriptor.size)?;
    if flags.ending.ignored_bits > 8 * input.len() {
        return Err(Failure::bad_aecs());
    }
    let inflated =
        inflate(state, &input, space.limit(), flags.ending).ok_or_else(Failure::bad_aecs)?;
    let output = inflated.output();
    if !flags.suppress_output {
        write_output(memory, descriptor, output)?;
    }
    let consumed = low_32(inflated.consumed);
    let report = Report {
        output: low_32(output.len()),
        crc: crc32(is_castagnoli(descriptor), crc, output),
        xor: xor16(xor, output),
        ..Report::default()
    };
    let result = inflated.result;
    if let Err(inflate::Failure::Malformed(malformed)) = result {
        return Err(Failure::Analytics(malformed as u8, report));
    }
    if let Some((address, back)) = aecs.write
        && (back == WriteBack::Always || result.is_err())
    {
        let saved = Saved {
            crc: report.crc,
            xor: report.xor,
            state: inflated.into_state(),
        };
        write_back(memory, address, &saved.bytes(aecs.size), &report)?;
    }
    match result {
        Ok(()) => Ok(report),
        Err(_) => Err(Failure::Overflow(Report {
            completed: consumed,
            ..report
        })),
    }
}

fn checksum(descriptor: &Descriptor, memory: &mut dyn Memory) -> Result<Report, Failure> {
    const INVERT: u16 = 1 << 14;
    const REFLECT: u16 = 1 << 15;
    if descriptor.operation_flags & !(INVERT | REFLECT) != 0 {
        return Err(Failure::Refused(status::COMPRESSION_FLAGS));
    }
    check_flags(descriptor, READ_FLAGS)?;
    check_reserved(descriptor.address_2 | descriptor.operands[0] | descriptor.operands[1])?;
    if descriptor.size == 0 {
        return Err(Failure::Refused(status::SIZE));
    }
    let input = read(memory, descriptor.address_1, descriptor.size)?;
    Ok(Report {
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
    pub(super) const COMPRESSION_2_FLAGS: u8 = 0x31;
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
    /// Bytes of input that were taken where the output is full, bytes of output that were written before a page fault;
    /// otherwise none is counted (IAA 2.1, 6.2.4).
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
    /// A page is missing, and so many bytes of output have been written.
    Fault(Fault, u32),
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
            Self::Fault(fault, completed) => {
                let write = if fault.write { status::WRITE } else { 0 };
                let report = Report {
                    completed,
                    ..nothing
                };
                let mut record = report.record(status::PAGE_FAULT | write, 0);
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
        Self::Fault(fault, 0)
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
        // All of them are about what only later generations have.
        if descriptor.low(2) != 0 {
            return Err(Failure::Refused(status::COMPRESSION_2_FLAGS));
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
        const KNOWN: u16 = 0x1f | 7 << 6 | 1 << 9;
        let flags = descriptor.operation_flags;
        if flags & !KNOWN != 0 || flags & ENABLE == 0 {
            return Err(Failure::Refused(status::COMPRESSION_FLAGS));
        }
        Ok(Self {
            suppress_output: flags & 1 << 9 != 0,
            ending: Ending {
                ignored_bits: usize::from(flags >> 6 & 7),
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
        if descriptor.size == 0 && size == 0 {
            return Err(Failure::Refused(status::SIZE));
        }
        let source = (descriptor.address_1, descriptor.size);
        if aecs::overlap(source, (descriptor.address_2, size)) {
            return Err(Failure::Refused(status::OVERLAP));
        }
        Ok(Self(size))
    }

    fn limit(&self) -> usize {
        self.0 as usize
    }
}

/// Record, interrupt, and the record's traffic class.
const RECORD_FLAGS: u32 = 0x101c;
/// And block on fault and the traffic class of the source.
const READ_FLAGS: u32 = RECORD_FLAGS | 0x0202;
/// And the other traffic classes, cache, strict ordering and readback of the destination, the second source, and which
/// CRC.
const TRANSFER_FLAGS: u32 = READ_FLAGS | 0x6d00 | aecs::FLAGS | Flags::CRC32C.0;

/// The others are reserved.
fn check_flags(descriptor: &Descriptor, allowed: u32) -> Result<(), Failure> {
    match descriptor.flags().0 & !allowed {
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

fn write_output(
    memory: &mut dyn Memory,
    descriptor: &Descriptor,
    output: &[u8],
) -> Result<(), Failure> {
    memory
        .write(descriptor.address_2, output)
        .map_err(|fault| Failure::Fault(fault, low_32(fault.done)))
}

/// Writes an AECS, after all of the output.
fn write_back(
    memory: &mut dyn Memory,
    address: u64,
    aecs: &[u8],
    report: &Report,
) -> Result<(), Failure> {
    memory
        .write(address, aecs)
        .map_err(|fault| Failure::Fault(fault, report.output))
}

/// A length that a descriptor's 32 bits bound.
fn low_32(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}
