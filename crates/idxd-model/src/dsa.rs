//! The operations of DSA, as functions of a descriptor and of memory.
//!
//! A missing page ends an operation. The bytes before it are done, and the record counts them.

#[cfg(test)]
mod tests;

use super::{
    config::Work,
    memory::{Fault, Memory},
    validate::status,
};
use idxd::{Descriptor, RecordImage, opcode};

/// Result of an operation, also of one of IAA.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    pub(super) status: u8,
    pub(super) result: u8,
    /// Bytes completed, if defined.
    pub(super) completed: Option<u32>,
    pub(super) fault: Option<u64>,
    /// Bytes of output of IAA.
    pub(super) output: usize,
    /// The flags that are not allowed, or missing, with status 0x11.
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

    /// A page fault after `done` bytes.
    pub(super) fn fault(fault: Fault, done: usize) -> Self {
        let write = if fault.write { status::ON_WRITE } else { 0 };
        Self {
            status: status::PAGE_FAULT | write,
            completed: Some(count(done)),
            fault: Some(fault.address),
            ..Self::default()
        }
    }

    /// The record, with zeros in undefined fields.
    pub(super) fn image(&self) -> RecordImage {
        let mut image = RecordImage::default();
        image.words[0] = u64::from(self.status)
            | u64::from(self.result) << 8
            | u64::from(self.completed.unwrap_or(0)) << 32;
        image.words[1] = self.fault.unwrap_or(0);
        image.words[2] = u64::from(self.flags);
        image.words[3] = u64::from(count(self.output));
        image
    }
}

/// Executes `descriptor`, which is valid and moves or compares bytes.
pub(super) fn execute(descriptor: &Descriptor, memory: &mut dyn Memory, work: &Work) -> Outcome {
    match descriptor.opcode() {
        opcode::MEMMOVE => copy(descriptor, memory),
        opcode::COMPARE_PATTERN => compare_pattern(descriptor, memory, work),
        _ => Outcome::status(status::OPCODE),
    }
}

/// Bytes of one step: at most a page, so that a fault counts the bytes before it.
const PIECE: usize = 4096;

/// Offset and length of each piece of `size` bytes.
fn pieces(size: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..size)
        .step_by(PIECE)
        .map(move |at| (at, PIECE.min(size - at)))
}

fn copy(descriptor: &Descriptor, memory: &mut dyn Memory) -> Outcome {
    let mut buffer = [0; PIECE];
    for (at, length) in pieces(length(descriptor)) {
        let (from, to) = (
            descriptor.address_1.wrapping_add(at as u64),
            descriptor.address_2.wrapping_add(at as u64),
        );
        let read = memory.read(from, &mut buffer[..length]);
        let whole = read.map_or_else(|fault| fault.done, |()| length);
        if let Err(fault) = memory.write(to, &buffer[..whole]).and(read) {
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
        Work::All => pieces(size).find_map(|(at, length)| look(descriptor, memory, at, length)),
    };
    end.unwrap_or_else(|| compared(None))
}

/// Compares `length` bytes from offset `at`, a multiple of eight, with the pattern; returns the outcome if that ends the
/// operation.
fn look(
    descriptor: &Descriptor,
    memory: &mut dyn Memory,
    at: usize,
    length: usize,
) -> Option<Outcome> {
    let mut buffer = [0; PIECE];
    let buffer = &mut buffer[..length];
    let read = memory.read(descriptor.address_1.wrapping_add(at as u64), buffer);
    let whole = read.map_or_else(|fault| fault.done, |()| length);
    let pattern = descriptor.address_2.to_le_bytes();
    // Words first, as most comparisons find no difference.
    let words = buffer[..whole].chunks(8);
    let differs = words
        .enumerate()
        .find(|(_, word)| **word != pattern[..word.len()])
        .and_then(|(index, word)| {
            let byte = word.iter().zip(pattern).position(|(is, be)| *is != be)?;
            Some(8 * index + byte)
        });
    match (differs, read) {
        (Some(differs), _) => Some(compared(Some(at + differs))),
        (None, Err(fault)) => Some(Outcome::fault(fault, at + fault.done)),
        (None, Ok(())) => None,
    }
}

/// Result of a comparison: the offset of the first difference, 0 if there is none.
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
