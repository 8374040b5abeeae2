//! What the operations of DSA do: functions of a descriptor and of memory.
//!
//! A page that is missing ends an operation. What lies before it is done, and the record counts it.

#[cfg(test)]
mod tests;

use super::{
    config::Work,
    memory::{Fault, Memory},
    validate::status,
};
use idxd::{Descriptor, Flags, RecordImage, opcode};

/// TRANSL_FETCH of `linux/idxd.h`: has the translations of an area at hand for operations that follow. Version 2 on.
pub(super) const TRANSLATION_FETCH: u8 = 0x0a;

/// What an operation came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    pub(super) status: u8,
    pub(super) result: u8,
    /// Bytes, where they are defined.
    pub(super) completed: Option<u32>,
    pub(super) fault: Option<u64>,
    /// What the record has at offset 16.
    pub(super) extra: Option<u32>,
}

impl Outcome {
    pub(super) fn status(status: u8) -> Self {
        Self {
            status,
            ..Self::default()
        }
    }

    fn result(result: u8) -> Self {
        Self {
            status: status::SUCCESS,
            result,
            ..Self::default()
        }
    }

    /// What was `done` of the operation when it faulted.
    fn fault(fault: Fault, done: usize) -> Self {
        let write = if fault.write { status::ON_WRITE } else { 0 };
        Self {
            status: status::PAGE_FAULT | write,
            completed: Some(count(done)),
            fault: Some(fault.address),
            ..Self::default()
        }
    }

    /// The record of it, zeros in the fields that it does not set.
    pub(super) fn image(&self) -> RecordImage {
        let mut image = RecordImage::default();
        image.words[0] = u64::from(self.status)
            | u64::from(self.result) << 8
            | u64::from(self.completed.unwrap_or(0)) << 32;
        image.words[1] = self.fault.unwrap_or(0);
        image.words[2] = u64::from(self.extra.unwrap_or(0));
        image
    }
}

/// Executes `descriptor`, which is valid and no batch.
pub(super) fn execute(descriptor: &Descriptor, memory: &mut dyn Memory, work: &Work) -> Outcome {
    let outcome = match descriptor.opcode() {
        opcode::NOOP | opcode::DRAIN => Outcome::result(0),
        opcode::MEMMOVE => copy(descriptor, memory),
        opcode::FILL => fill(descriptor, memory),
        opcode::COMPARE => compare(descriptor, memory),
        opcode::COMPARE_PATTERN => compare_pattern(descriptor, memory, work),
        opcode::CREATE_DELTA => create_delta(descriptor, memory),
        opcode::APPLY_DELTA => apply_delta(descriptor, memory),
        opcode::CRC | opcode::COPY_CRC => crc(descriptor, memory),
        TRANSLATION_FETCH => fetch(descriptor, memory),
        _ => Outcome::status(status::OPCODE),
    };
    if outcome.status == status::SUCCESS && descriptor.flags().has(Flags::CHECK_RESULT) {
        checked(descriptor, outcome)
    } else {
        outcome
    }
}

/// Bytes that are worked on at once: never beyond a page, so that a fault counts what lies before it.
const PIECE: usize = 4096;

/// A buffer that no operand is longer than.
type Piece = [u8; PIECE];

/// The pieces of `size` bytes: offset and length.
fn pieces(size: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..size)
        .step_by(PIECE)
        .map(move |at| (at, PIECE.min(size - at)))
}

/// Whether the result is what the descriptor expects (flag CR).
fn checked(descriptor: &Descriptor, mut outcome: Outcome) -> Outcome {
    let expected = match descriptor.opcode() {
        // A mask of results: bit N allows result N (assumption 11), which is 2 at most.
        opcode::CREATE_DELTA => descriptor.low(2) >> outcome.result & 1 == 1,
        // The other bits are not looked at: assumption 23.
        _ => descriptor.low(0) & 1 == u32::from(outcome.result),
    };
    if !expected {
        outcome.status = status::PREDICATE_FALSE;
    }
    outcome
}

fn copy(descriptor: &Descriptor, memory: &mut dyn Memory) -> Outcome {
    let (from, to, size) = (
        descriptor.address_1,
        descriptor.address_2,
        length(descriptor),
    );
    let backward = from < to && to < from.wrapping_add(size as u64);
    let mut buffer: Piece = [0; PIECE];
    for (offset, length) in pieces(size) {
        let done = offset;
        // From the end if the destination would otherwise eat the source.
        let at = if backward {
            size - offset - length
        } else {
            offset
        } as u64;
        let buffer = &mut buffer[..length];
        let read = memory.read(from.wrapping_add(at), buffer);
        let whole = match read {
            Ok(()) => length,
            // What lies behind a fault is the part that counts when going backward.
            Err(_) if backward => 0,
            Err(fault) => fault.done,
        };
        if backward && let Err(fault) = write_whole(memory, to.wrapping_add(at), &buffer[..whole]) {
            return Outcome {
                result: 1,
                ..Outcome::fault(fault, done)
            };
        }
        let written = match backward {
            true => Ok(()),
            false => memory.write(to.wrapping_add(at), &buffer[..whole]),
        };
        let (fault, more) = match (read, written) {
            (Ok(()), Ok(())) => continue,
            (_, Err(fault)) => (fault, fault.done),
            (Err(fault), Ok(())) => (fault, whole),
        };
        return Outcome {
            result: u8::from(backward),
            ..Outcome::fault(fault, done + more)
        };
    }
    Outcome::result(0)
}

/// Writes all or nothing: what was written of a piece that does not count may have been source.
fn write_whole(memory: &mut dyn Memory, to: u64, bytes: &[u8]) -> Result<(), Fault> {
    let mut before: Piece = [0; PIECE];
    memory.read(to, &mut before[..bytes.len()])?;
    memory.write(to, bytes).inspect_err(|fault| {
        // It was writable just now; if it is no more, nothing can be reported.
        let _ = memory.write(to, &before[..fault.done]);
    })
}

fn fill(descriptor: &Descriptor, memory: &mut dyn Memory) -> Outcome {
    let pattern = repeated(descriptor.address_1);
    for (at, length) in pieces(length(descriptor)) {
        let to = descriptor.address_2.wrapping_add(at as u64);
        if let Err(fault) = memory.write(to, &pattern[..length]) {
            return Outcome::fault(fault, at + fault.done);
        }
    }
    Outcome::result(0)
}

fn compare(descriptor: &Descriptor, memory: &mut dyn Memory) -> Outcome {
    let (mut first, mut second): (Piece, Piece) = ([0; PIECE], [0; PIECE]);
    for (at, length) in pieces(length(descriptor)) {
        let one = memory.read(
            descriptor.address_1.wrapping_add(at as u64),
            &mut first[..length],
        );
        let readable = one.map_or_else(|fault| fault.done, |()| length);
        let two = memory.read(
            descriptor.address_2.wrapping_add(at as u64),
            &mut second[..readable],
        );
        let both = two.map_or_else(|fault| fault.done, |()| readable);
        if let Some(differs) = difference(&first[..both], &second[..both]) {
            return compared(Some(at + differs));
        }
        if let Err(fault) = two.and(one) {
            return Outcome::fault(fault, at + both);
        }
    }
    compared(None)
}

fn compare_pattern(descriptor: &Descriptor, memory: &mut dyn Memory, work: &Work) -> Outcome {
    let size = length(descriptor);
    let end = match work {
        Work::Oracle(same) if same(descriptor.address_1, descriptor.size) => None,
        Work::Oracle(_) => Some(compared(Some(0))),
        Work::Ends if size > 128 => {
            let last = (size - 57) & !7;
            look::<64>(descriptor, memory, 0, 64)
                .or_else(|| look::<64>(descriptor, memory, last, size - last))
        }
        Work::Ends | Work::All => {
            pieces(size).find_map(|(at, length)| look::<PIECE>(descriptor, memory, at, length))
        }
    };
    end.unwrap_or_else(|| compared(None))
}

/// Compares up to `N` bytes from offset `at`, a multiple of eight, with the pattern; returns the outcome if that
/// ends the operation.
fn look<const N: usize>(
    descriptor: &Descriptor,
    memory: &mut dyn Memory,
    at: usize,
    length: usize,
) -> Option<Outcome> {
    let mut buffer = [0; N];
    let buffer = &mut buffer[..length];
    let read = memory.read(descriptor.address_1.wrapping_add(at as u64), buffer);
    let whole = read.map_or_else(|fault| fault.done, |()| length);
    let pattern = descriptor.address_2.to_le_bytes();
    let (words, _) = buffer[..whole].as_chunks();
    let word = words.iter().position(|word| *word != pattern);
    let equal = word.unwrap_or(words.len()) * 8;
    if let Some(differs) = difference(&buffer[equal..whole], &pattern) {
        return Some(compared(Some(at + equal + differs)));
    }
    read.err()
        .map(|fault| Outcome::fault(fault, at + fault.done))
}

/// The first byte at which two buffers differ, as far as both reach.
fn difference(first: &[u8], second: &[u8]) -> Option<usize> {
    let mut bytes = first.iter().zip(second);
    bytes.position(|(one, two)| one != two)
}

/// What a comparison reports: the first byte that differs, 0 if none does.
fn compared(differs: Option<usize>) -> Outcome {
    Outcome {
        completed: Some(count(differs.unwrap_or(0))),
        ..Outcome::result(u8::from(differs.is_some()))
    }
}

/// Entries of a delta record: the index of eight bytes, and the eight bytes.
const ENTRY: usize = 10;

fn create_delta(descriptor: &Descriptor, memory: &mut dyn Memory) -> Outcome {
    let (delta, most) = (descriptor.operands[0], descriptor.low(1));
    let (mut first, mut second): (Piece, Piece) = ([0; PIECE], [0; PIECE]);
    let mut written: u32 = 0;
    for (at, length) in pieces(length(descriptor)) {
        let one = memory.read(
            descriptor.address_1.wrapping_add(at as u64),
            &mut first[..length],
        );
        let two = memory.read(
            descriptor.address_2.wrapping_add(at as u64),
            &mut second[..length],
        );
        let done = |read: Result<(), Fault>| read.map_or_else(|fault| fault.done, |()| length);
        let whole = done(one).min(done(two)) & !7;
        let words = first[..whole]
            .chunks(8)
            .zip(second[..whole].chunks(8))
            .enumerate();
        for (word, (_, new)) in words.filter(|(_, (old, new))| old != new) {
            let here = at + word * 8;
            if written + 10 > most {
                return Outcome {
                    completed: Some(count(here)),
                    extra: Some(written),
                    ..Outcome::result(2)
                };
            }
            let mut entry = [0; ENTRY];
            entry[..2].copy_from_slice(&u16::try_from(here / 8).unwrap_or(u16::MAX).to_le_bytes());
            entry[2..].copy_from_slice(new);
            if let Err(fault) = memory.write(delta.wrapping_add(u64::from(written)), &entry) {
                return interrupted(fault, here, written);
            }
            written += 10;
        }
        if let Err(fault) = one.and(two) {
            return interrupted(fault, at + whole, written);
        }
    }
    Outcome {
        extra: Some(written),
        ..Outcome::result(u8::from(written > 0))
    }
}

/// A CREATE_DELTA that faulted after `done` bytes of its sources, with so many bytes of delta `written`.
fn interrupted(fault: Fault, done: usize, written: u32) -> Outcome {
    Outcome {
        result: u8::from(written > 0),
        extra: Some(written),
        ..Outcome::fault(fault, done)
    }
}

fn apply_delta(descriptor: &Descriptor, memory: &mut dyn Memory) -> Outcome {
    let mut last = None;
    for at in (0..descriptor.low(0)).step_by(ENTRY) {
        let mut entry = [0; ENTRY];
        let done = at as usize;
        if let Err(fault) =
            memory.read(descriptor.address_1.wrapping_add(u64::from(at)), &mut entry)
        {
            return Outcome::fault(fault, done);
        }
        let word = u16::from_le_bytes([entry[0], entry[1]]);
        if last.is_some_and(|last| word <= last) {
            return Outcome {
                completed: Some(at),
                ..Outcome::status(status::DELTA_ORDER)
            };
        }
        last = Some(word);
        let offset = u64::from(word) * 8;
        if offset + 8 > u64::from(descriptor.size) {
            return Outcome {
                completed: Some(at),
                ..Outcome::status(status::DELTA_RANGE)
            };
        }
        if let Err(fault) = memory.write(descriptor.address_2.wrapping_add(offset), &entry[2..]) {
            return Outcome::fault(fault, done);
        }
    }
    Outcome::result(0)
}

/// CRC-32C, and the copy that goes with it.
fn crc(descriptor: &Descriptor, memory: &mut dyn Memory) -> Outcome {
    let flags = descriptor.flags().0;
    let (seed_in_memory, plain, unreflected) = (
        flags >> 16 & 1 == 1,
        flags >> 17 & 1 == 1,
        flags >> 18 & 1 == 1,
    );
    let mut seed = descriptor.low(0);
    if seed_in_memory {
        let mut bytes = [0; 4];
        if let Err(fault) = memory.read(descriptor.operands[1], &mut bytes) {
            return Outcome::fault(fault, 0);
        }
        seed = u32::from_le_bytes(bytes);
    }
    let mut sum = if plain { seed } else { !seed.reverse_bits() };
    let value = |sum: u32| Some(if plain { sum } else { (!sum).reverse_bits() });
    let mut buffer: Piece = [0; PIECE];
    for (at, length) in pieces(length(descriptor)) {
        let read = memory.read(
            descriptor.address_1.wrapping_add(at as u64),
            &mut buffer[..length],
        );
        let mut whole = read.map_or_else(|fault| fault.done, |()| length);
        let mut written = Ok(());
        if descriptor.opcode() == opcode::COPY_CRC {
            written = memory.write(
                descriptor.address_2.wrapping_add(at as u64),
                &buffer[..whole],
            );
            whole = written.map_or_else(|fault| fault.done, |()| whole);
        }
        for byte in &buffer[..whole] {
            let byte = if unreflected {
                *byte
            } else {
                byte.reverse_bits()
            };
            sum = sum << 8 ^ CRC32C[usize::from((sum >> 24) as u8 ^ byte)];
        }
        if let Err(fault) = written.and(read) {
            return Outcome {
                extra: value(sum),
                ..Outcome::fault(fault, at + whole)
            };
        }
    }
    Outcome {
        extra: value(sum),
        ..Outcome::result(0)
    }
}

/// The remainders of all bytes by Castagnoli's polynomial, highest bit first.
const CRC32C: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte: u32 = 0;
    while byte < 256 {
        let (mut sum, mut bit) = (byte << 24, 0);
        while bit < 8 {
            sum = if sum >> 31 == 1 {
                sum << 1 ^ 0x1edc_6f41
            } else {
                sum << 1
            };
            bit += 1;
        }
        table[byte as usize] = sum;
        byte += 1;
    }
    table
};

/// Has a look at one byte of every page: that a translation is at hand is not seen otherwise.
fn fetch(descriptor: &Descriptor, memory: &mut dyn Memory) -> Outcome {
    let stride = (descriptor.low(1) as usize).max(PIECE);
    let within = descriptor.address_1 % PIECE as u64;
    let before = usize::try_from(within).unwrap_or(0);
    for at in (0..before + length(descriptor)).step_by(stride) {
        let page = (descriptor.address_1 - within).wrapping_add(at as u64);
        if let Err(fault) = memory.read(page, &mut [0]) {
            return Outcome::fault(fault, at.saturating_sub(before));
        }
    }
    Outcome::result(0)
}

fn length(descriptor: &Descriptor) -> usize {
    usize::try_from(descriptor.size).unwrap_or(usize::MAX)
}

fn count(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

fn repeated(pattern: u64) -> Piece {
    let mut bytes: Piece = [0; PIECE];
    for word in bytes.chunks_exact_mut(8) {
        word.copy_from_slice(&pattern.to_le_bytes());
    }
    bytes
}
