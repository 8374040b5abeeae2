//! Initial content of the memory.

use clap::ValueEnum;
use fastrand::Rng;

use crate::memory::{Memory, PAGE, PAGE_BYTES};

/// Bytes filled at a time.
const CHUNK: usize = 1 << 20;

/// Initial content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Fill {
    /// Nothing: untouched pages stay untouched.
    Untouched,
    /// Zeros that are written, so that every page is present.
    Zero,
    /// A mixture similar to a working guest. Of 8 pages, 2 are zeros, 3 resemble text, 2 a heap with pointers, and 1 is noise.
    /// The same address always has the same content.
    Mixed,
}

/// Fills all of `memory`. Call this before a guest is made in the memory.
pub fn fill(memory: &Memory, fill: Fill) {
    match fill {
        Fill::Untouched => {}
        Fill::Zero => in_chunks(memory, |_, _| ()),
        Fill::Mixed => in_chunks(memory, |start, chunk| {
            let pages = chunk.chunks_exact_mut(PAGE_BYTES);
            for (page, address) in pages.zip((start..).step_by(PAGE_BYTES)) {
                mixed_page(address / PAGE, page);
            }
        }),
    }
}

/// Calls `content` with each chunk's address and a buffer of zeros, and copies the buffer into the memory.
fn in_chunks(memory: &Memory, content: impl Fn(u64, &mut [u8])) {
    let mut buffer = vec![0; CHUNK];
    for block in memory.blocks() {
        for start in block.range().step_by(CHUNK) {
            let len = usize::try_from(block.range().end - start).unwrap_or(CHUNK);
            let chunk = &mut buffer[..len.min(CHUNK)];
            chunk.fill(0);
            content(start, chunk);
            if let Some(slice) = memory.slice(start, chunk.len()) {
                slice.copy_from(chunk);
            }
        }
    }
}

/// Fills a page of zeros.
fn mixed_page(number: u64, page: &mut [u8]) {
    const WORDS: [&str; 24] = [
        "the ", "error ", "kernel: ", "return ", "static ", "= ", "0x", "device ", "\n", "lib/",
        "of ", "value ", "0000", "usr/", "struct ", "i", "page ", "(", ") ", "\n\t", "12", "if ",
        "null ", ".so\0",
    ];
    let mut random = Rng::with_seed(number);
    match random.u8(..8) {
        0 | 1 => {}
        2..=4 => {
            let mut rest = page;
            while !rest.is_empty() {
                let word = WORDS[random.usize(..WORDS.len())].as_bytes();
                let len = word.len().min(rest.len());
                rest[..len].copy_from_slice(&word[..len]);
                rest = &mut rest[len..];
            }
        }
        5 | 6 => {
            let heap = 0x7f00_0000_0000 + (random.u64(..1 << 12) << 24);
            for word in page.as_chunks_mut::<8>().0 {
                let value = match random.u8(..8) {
                    0..=2 => 0,
                    3..=5 => heap + random.u64(..1 << 20) * 16,
                    6 => random.u64(..1000),
                    _ => random.u64(..1 << 32),
                };
                *word = value.to_le_bytes();
            }
        }
        _ => random.fill(page),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Backing;

    fn bytes_of(memory: &Memory) -> Vec<u8> {
        let mut bytes = Vec::new();
        for block in memory.blocks() {
            let range = block.range();
            let mut part = vec![0; block.region().size()];
            let slice = memory.slice(range.start, part.len()).unwrap();
            slice.copy_to(&mut part);
            bytes.extend(part);
        }
        bytes
    }

    #[test]
    fn untouched_and_zero_differ_only_in_being_there() {
        let memory = Memory::new(Backing::Anonymous, 8 << 20).unwrap();
        fill(&memory, Fill::Untouched);
        assert_eq!(memory.touched(&(0..memory.len())), []);
        fill(&memory, Fill::Zero);
        let blocks: Vec<_> = memory.blocks().iter().map(|block| block.range()).collect();
        assert_eq!(memory.touched(&(0..memory.len())), blocks);
        assert!(bytes_of(&memory).iter().all(|byte| *byte == 0));
    }

    #[test]
    fn mixed_is_the_same_every_time_and_a_quarter_zeros() {
        let fresh = || {
            let memory = Memory::new(Backing::Memfd, (8 << 20) + PAGE).unwrap();
            fill(&memory, Fill::Mixed);
            bytes_of(&memory)
        };
        let bytes = fresh();
        assert!(bytes == fresh());
        let pages = bytes.chunks(PAGE_BYTES);
        let zeros = pages
            .filter(|page| page.iter().all(|byte| *byte == 0))
            .count();
        assert!((400..620).contains(&zeros), "{zeros} of 2049");
    }
}
