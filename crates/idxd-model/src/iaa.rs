//! The operations of IAA: COMPRESS and DECOMPRESS of one valid descriptor.
//!
//! ```text
//!  descriptor ─► flags, AECS ─► source ─┬─► deflate ─┬─► destination ─► record
//!                                       └─► inflate ─┘
//!      0x30, 0x1c … ◄─┘    0x03 ◄──────── 0x0a, 0x0b ────── 0x83 ◄─┘
//! ```
//! Sources: IAA 2.1, 3.3 to 3.6, 4 and 6. The [`validate`](crate::validate) module checks what both kinds of device have;
//! DRAIN is the scheduler's. The model has what the driver uses of the first generation of the device (7.2.2): one block
//! with the codes of an AECS, and whole streams. It answers other flags of (de)compression with status 0x30,
//! also those that a device has.
//!
//! Assumed, because the specification does not state it: when an operation fails, the destination has as much of the
//! output as fits.

mod deflate;
mod inflate;
#[cfg(test)]
mod tests;

use deflate::{Symbol, Writer, symbols};
use inflate::inflate;

use super::{dsa::Outcome, memory::Memory, validate::status};
use idxd::{Descriptor, RecordImage, opcode};

/// Executes `descriptor`, and returns the contents of its completion record.
pub(crate) fn execute(descriptor: &Descriptor, memory: &mut dyn Memory) -> RecordImage {
    let ended = match descriptor.opcode() {
        opcode::COMPRESS => encode(descriptor, memory),
        opcode::DECOMPRESS => decompress(descriptor, memory),
        _ => Err(Outcome::status(status::OPCODE)),
    };
    let outcome = match ended {
        Ok(output) => Outcome {
            output,
            ..Outcome::status(status::SUCCESS)
        },
        Err(outcome) => outcome,
    };
    outcome.image()
}

// Flags of the operations (offset 38).
/// Flush, and end the block.
const BLOCK: u16 = 0x06;
/// Enable, flush, stop at the end of the last block, which has to be there.
const STREAM: u16 = 0x1f;

/// Compresses with the codes of an AECS:
///
/// ```text
///  0     4     8          28              32            288              1440        1560
/// ┌─────┬─────┬──────────┬───────────────┬─────────────┬────────────────┬───────────┬─────┐
/// │ CRC │ XOR │ reserved │ bits that are │ accumulator │ literals' and  │ distances'│     │
/// │     │     │          │ accumulated   │ (256 bytes) │ lengths' codes │ codes     │     │
/// └─────┴─────┴──────────┴───────────────┴─────────────┴────────────────┴───────────┴─────┘
/// ```
/// The model has no checksums. Returns the bytes of output.
fn encode(descriptor: &Descriptor, memory: &mut dyn Memory) -> Result<usize, Outcome> {
    const AECS: u32 = 1568;
    const BITS: usize = 28;
    const ACCUMULATOR: usize = 32;
    const CODES: usize = 288;
    if descriptor.operation_flags != BLOCK {
        return Err(Outcome::status(OPERATION_FLAGS));
    }
    let (address, size) = (descriptor.operands[0], descriptor.high(1));
    if !address.is_multiple_of(32) {
        return Err(Outcome::status(status::ADDRESS_ALIGNMENT));
    }
    if size != AECS {
        return Err(Outcome::status(status::SIZE));
    }
    let aecs = read(memory, address, size)?;
    let word = |at: usize| {
        let word = aecs[at..].first_chunk();
        word.map_or(0, |word| u32::from_le_bytes(*word))
    };
    let input = read(memory, descriptor.address_1, descriptor.size)?;
    let (bits, accumulator) = (word(BITS), &aecs[ACCUMULATOR..CODES]);
    if bits as usize > 8 * accumulator.len() {
        return Err(failed(BAD_AECS, 0));
    }
    let mut writer = Writer::new(limit(descriptor));
    let mut encode = || {
        writer.bits(accumulator, bits)?;
        for symbol in symbols(&input).into_iter().chain([Symbol::END_OF_BLOCK]) {
            writer.symbol(symbol, word(CODES + 4 * symbol.index))?;
        }
        writer.finish()
    };
    let encoded = encode();
    let written = write(memory, descriptor, writer.output())?;
    match encoded {
        Ok(()) => Ok(written),
        Err(deflate::Failure::NoCode) => Err(failed(NO_CODE, 0)),
        Err(deflate::Failure::TooLong) => Err(failed(OUTPUT_TOO_SMALL, 0)),
    }
}

fn decompress(descriptor: &Descriptor, memory: &mut dyn Memory) -> Result<usize, Outcome> {
    if descriptor.operation_flags != STREAM {
        return Err(Outcome::status(OPERATION_FLAGS));
    }
    let input = read(memory, descriptor.address_1, descriptor.size)?;
    let (output, result) = inflate(&input, limit(descriptor));
    let output = write(memory, descriptor, &output)?;
    match result {
        Ok(()) => Ok(output),
        Err(inflate::Failure::TooLong) => Err(Outcome {
            output,
            ..Outcome::status(OUTPUT_OVERFLOW)
        }),
        Err(inflate::Failure::Malformed) => Err(failed(MALFORMED, output)),
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

/// An analytics error, after so many bytes of output.
fn failed(code: u8, output: usize) -> Outcome {
    Outcome {
        result: code,
        output,
        ..Outcome::status(ANALYTICS_ERROR)
    }
}

/// Most bytes of output.
fn limit(descriptor: &Descriptor) -> usize {
    descriptor.low(1) as usize
}

/// Reads in parts, so that an invalid size does not allocate more memory than can be read.
fn read(memory: &mut dyn Memory, address: u64, size: u32) -> Result<Vec<u8>, Outcome> {
    const PART: usize = 1 << 20;
    let size = size as usize;
    let mut bytes = Vec::new();
    while bytes.len() < size {
        let from = bytes.len();
        bytes.resize(size.min(from + PART), 0);
        memory
            .read(address.wrapping_add(from as u64), &mut bytes[from..])
            .map_err(|fault| Outcome::fault(fault, 0))?;
    }
    Ok(bytes)
}

/// Returns how many bytes it writes.
fn write(
    memory: &mut dyn Memory,
    descriptor: &Descriptor,
    output: &[u8],
) -> Result<usize, Outcome> {
    let written = memory.write(descriptor.address_2, output);
    written.map_err(|fault| Outcome::fault(fault, fault.done))?;
    Ok(output.len())
}
