//! The operations of IAA: COMPRESS and DECOMPRESS of one valid descriptor.
//!
//! ```text
//!  descriptor ─► flags, AECS ─► source ─┬─► deflate ─┬─► destination ─► record
//!                                       └─► inflate ─┘
//!      0x30, 0x1c … ◄─┘    0x03 ◄──────── 0x0a, 0x0b ────── 0x83 ◄─┘
//! ```
//! Sources: IAA 2.1, 3.3 to 3.6, 4 and 6. The [`validate`](crate::validate) module checks what both kinds of device have;
//! DRAIN is the scheduler's. The model has what the driver uses of the first generation of the device (7.2.2): one block
//! with the codes of an AECS, statistics, and whole streams. It answers other flags of (de)compression with status 0x30,
//! also those that a device has.
//!
//! Assumed, because the specification does not state it: when an operation fails, the destination has as much of the
//! output as fits.

mod aecs;
mod deflate;
mod inflate;
mod symbols;
#[cfg(test)]
mod tests;

use aecs::Aecs;
use deflate::{Encoder, Histogram, tokenize};
use inflate::inflate;

use super::{
    memory::{Fault, Memory},
    validate::status,
};
use idxd::{Descriptor, RecordImage, opcode};

/// Executes `descriptor`, and returns the contents of its completion record.
pub(crate) fn execute(descriptor: &Descriptor, memory: &mut dyn Memory) -> RecordImage {
    let outcome = match descriptor.opcode() {
        opcode::COMPRESS => compress(descriptor, memory),
        opcode::DECOMPRESS => decompress(descriptor, memory),
        _ => Err(Failure::Refused(status::OPCODE)),
    };
    match outcome {
        Ok(output) => record(status::SUCCESS, 0, output),
        Err(failure) => failure.record(),
    }
}

// Flags of the operations (offset 38).
const STATISTICS: u16 = 0x01;
/// Flush, and end the block.
const BLOCK: u16 = 0x06;
/// Enable, flush, stop at the end of the last block, which has to be there.
const STREAM: u16 = 0x1f;

fn compress(descriptor: &Descriptor, memory: &mut dyn Memory) -> Result<usize, Failure> {
    match descriptor.operation_flags {
        STATISTICS => statistics(descriptor, memory),
        BLOCK => encode(descriptor, memory),
        _ => Err(Failure::Refused(OPERATION_FLAGS)),
    }
}

fn statistics(descriptor: &Descriptor, memory: &mut dyn Memory) -> Result<usize, Failure> {
    let input = read(memory, descriptor.address_1, descriptor.size)?;
    let mut histogram = Histogram::new();
    tokenize(&input, &mut histogram).map_err(Failure::of_compress)?;
    let bytes = histogram.bytes();
    if bytes.len() > limit(descriptor) {
        return Err(Failure::of_compress(deflate::Failure::TooLong));
    }
    write(memory, descriptor, &bytes)?;
    Ok(bytes.len())
}

fn encode(descriptor: &Descriptor, memory: &mut dyn Memory) -> Result<usize, Failure> {
    let (address, size) = (descriptor.operands[0], descriptor.high(1));
    if !address.is_multiple_of(32) {
        return Err(Failure::Refused(status::ADDRESS_ALIGNMENT));
    }
    if size != Aecs::SIZE {
        return Err(Failure::Refused(status::SIZE));
    }
    let aecs = Aecs(read(memory, address, size)?);
    let input = read(memory, descriptor.address_1, descriptor.size)?;
    let codes = aecs.codes();
    let (header, bits) = aecs.accumulator().ok_or(Failure::Analytics(BAD_AECS, 0))?;
    let mut encoder = Encoder::new(&codes, limit(descriptor));
    let encoded = encoder
        .bits(header, bits)
        .and_then(|()| tokenize(&input, &mut encoder))
        .and_then(|()| encoder.finish());
    write(memory, descriptor, encoder.output())?;
    encoded.map_err(Failure::of_compress)?;
    Ok(encoder.output().len())
}

fn decompress(descriptor: &Descriptor, memory: &mut dyn Memory) -> Result<usize, Failure> {
    if descriptor.operation_flags != STREAM {
        return Err(Failure::Refused(OPERATION_FLAGS));
    }
    let input = read(memory, descriptor.address_1, descriptor.size)?;
    let (output, result) = inflate(&input, limit(descriptor));
    write(memory, descriptor, &output)?;
    match result {
        Ok(()) => Ok(output.len()),
        Err(inflate::Failure::TooLong) => Err(Failure::Overflow(output.len())),
        Err(inflate::Failure::Malformed) => Err(Failure::Analytics(MALFORMED, output.len())),
    }
}

// Statuses of IAA alone.
const ANALYTICS_ERROR: u8 = 0x0a;
const OUTPUT_OVERFLOW: u8 = 0x0b;
const OPERATION_FLAGS: u8 = 0x30;

// Error codes of an analytics error. The model reports the first one, "unexpected end of the stream", for all that can be
// wrong with a stream.
const MALFORMED: u8 = 15;
const BAD_AECS: u8 = 22;
const OUTPUT_TOO_SMALL: u8 = 25;
const NO_CODE: u8 = 30;

/// The record of an operation that wrote `output` bytes.
fn record(status: u8, error: u8, output: usize) -> RecordImage {
    let mut words = [0; 8];
    words[0] = u64::from(status) | u64::from(error) << 8;
    words[3] = u64::from(low_32(output));
    RecordImage { words }
}

/// Why an operation was not done, or not completely.
enum Failure {
    /// The descriptor is invalid, with this status.
    Refused(u8),
    /// A page is missing; with the number of bytes of output written before.
    Fault(Fault, u32),
    /// An error code, and bytes of output.
    Analytics(u8, usize),
    /// The destination is full; with its number of bytes.
    Overflow(usize),
}

impl Failure {
    fn of_compress(failure: deflate::Failure) -> Self {
        let code = match failure {
            deflate::Failure::NoCode => NO_CODE,
            deflate::Failure::TooLong => OUTPUT_TOO_SMALL,
        };
        Self::Analytics(code, 0)
    }

    fn record(self) -> RecordImage {
        match self {
            Self::Refused(status) => record(status, 0, 0),
            Self::Fault(fault, completed) => {
                let write = if fault.write { status::ON_WRITE } else { 0 };
                let mut record = record(status::PAGE_FAULT | write, 0, 0);
                record.words[0] |= u64::from(completed) << 32;
                record.words[1] = fault.address;
                record
            }
            Self::Analytics(code, output) => record(ANALYTICS_ERROR, code, output),
            Self::Overflow(output) => record(OUTPUT_OVERFLOW, 0, output),
        }
    }
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault, 0)
    }
}

/// Most bytes of output.
fn limit(descriptor: &Descriptor) -> usize {
    descriptor.low(1) as usize
}

/// Reads in parts, so that an invalid size does not allocate more memory than can be read.
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

fn write(memory: &mut dyn Memory, descriptor: &Descriptor, output: &[u8]) -> Result<(), Failure> {
    memory
        .write(descriptor.address_2, output)
        .map_err(|fault| Failure::Fault(fault, low_32(fault.done)))
}

/// A length that a descriptor's 32 bits bound.
fn low_32(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}
