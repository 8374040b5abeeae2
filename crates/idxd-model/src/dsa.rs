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

/// What an operation came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    pub(super) status: u8,
    pub(super) result: u8,
    /// Bytes, where they are defined.
    pub(super) completed: Option<u32>,
    pub(super) fault: Option<u64>,
    /// The flags that were invalid.
    pub(super) flags: u32,
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
        image.words[2] = u64::from(self.flags);
        image
    }
}

/// Executes `descriptor`, which is valid and no batch.
pub(super) fn execute(descriptor: &Descriptor, memory: &mut dyn Memory, work: &Work) -> Outcome {
    let outcome = match descriptor.opcode() {
        opcode::NOOP | opcode::DRAIN => Outcome::result(0),
        opcode::MEMMOVE => copy(descriptor, memory),
        opcode::FILL => fill(descriptor, memory),
        opcode::COMPARE_PATTERN => compare_pattern(descriptor, memory, work),
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

/// Whether the result is what the descriptor expects (flag CR). Only bit 0 of that counts (DSA 3.0, 8.3.7).
fn checked(descriptor: &Descriptor, mut outcome: Outcome) -> Outcome {
    if descriptor.low(0) & 1 != u32::from(outcome.result) {
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

fn compare_pattern(descriptor: &Descriptor, memory: &mut dyn Memory, work: &Work) -> Outcome {
    let size = length(descriptor);
    let end = match work {
        Work::Oracle(same) if same(descriptor.address_1, descriptor.size) => None,
        Work::Oracle(_) => Some(compared(Some(0))),
        Work::All => {
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
