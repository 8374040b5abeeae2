//! Initial content of the memory.

use std::{fs::File, io, os::unix::fs::FileExt, path::PathBuf};

use fastrand::Rng;

use crate::memory::{Memory, PAGE, PAGE_BYTES};

/// Bytes filled at a time.
const CHUNK: usize = 1 << 20;

/// Initial content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Nothing: untouched pages stay untouched.
    Untouched,
    /// Zeros that are written, so that every page is present.
    Zero,
    /// A mixture similar to a working guest. Of 8 pages, 2 are zeros, 3 resemble text, 2 a heap with pointers, and 1 is noise.
    /// The same address always has the same content.
    Mixed,
    /// The bytes of a file, repeated.
    File(PathBuf),
}

/// Fills all of `memory`. Call this before a guest is made in the memory.
///
/// # Errors
/// If the file cannot be read, or is empty.
pub fn fill(memory: &Memory, fill: &Fill) -> io::Result<()> {
    match fill {
        Fill::Untouched => Ok(()),
        Fill::Zero => in_chunks(memory, |_, _| Ok(())),
        Fill::Mixed => in_chunks(memory, |start, chunk| {
            for (page, address) in chunk
                .chunks_exact_mut(PAGE_BYTES)
                .zip((start..).step_by(PAGE_BYTES))
            {
                mixed_page(address / PAGE, page);
            }
            Ok(())
        }),
        Fill::File(path) => {
            let file = File::open(path)?;
            let len = file.metadata()?.len();
            if len == 0 {
                return Err(io::Error::other(format!("{} is empty", path.display())));
            }
            in_chunks(memory, |start, chunk| repeat(&file, len, start, chunk))
        }
    }
}

/// Calls `content` with each chunk's address and a buffer of zeros, and copies the buffer into the memory.
fn in_chunks(
    memory: &Memory,
    content: impl Fn(u64, &mut [u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    for block in memory.blocks() {
        for start in block.range().step_by(CHUNK) {
            let len = usize::try_from(block.range().end - start).unwrap_or(CHUNK);
            let chunk = &mut buffer[..len.min(CHUNK)];
            chunk.fill(0);
            content(start, chunk)?;
            if let Some(slice) = memory.slice(start, chunk.len()) {
                slice.copy_from(chunk);
            }
        }
    }
    Ok(())
}

/// The bytes from `start` of the endless repetition of a file of `len` bytes.
fn repeat(file: &File, len: u64, start: u64, bytes: &mut [u8]) -> io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        if let Some(period) = usize::try_from(len).ok().filter(|len| *len <= filled) {
            // The whole file is in the buffer already.
            let copied = (filled - filled % period).min(bytes.len() - filled);
            bytes.copy_within(filled % period..filled % period + copied, filled);
            filled += copied;
        } else {
            let at = (start + filled as u64) % len;
            let left = usize::try_from(len - at).unwrap_or(usize::MAX);
            let end = bytes.len().min(filled.saturating_add(left));
            file.read_exact_at(&mut bytes[filled..end], at)?;
            filled = end;
        }
    }
    Ok(())
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
    use std::io::Write;

    use proptest::prelude::*;

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
        fill(&memory, &Fill::Untouched).unwrap();
        assert_eq!(memory.touched(&(0..memory.len())), []);
        fill(&memory, &Fill::Zero).unwrap();
        let blocks: Vec<_> = memory.blocks().iter().map(|block| block.range()).collect();
        assert_eq!(memory.touched(&(0..memory.len())), blocks);
        assert!(bytes_of(&memory).iter().all(|byte| *byte == 0));
    }

    #[test]
    fn mixed_is_the_same_every_time_and_a_quarter_zeros() {
        let fresh = || {
            let memory = Memory::new(Backing::Memfd, (8 << 20) + PAGE).unwrap();
            fill(&memory, &Fill::Mixed).unwrap();
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

    #[test]
    fn a_file_that_is_not_there_or_empty_is_an_error() {
        let memory = Memory::new(Backing::Anonymous, 1 << 20).unwrap();
        let empty = tempfile::NamedTempFile::new().unwrap();
        assert!(fill(&memory, &Fill::File(empty.path().into())).is_err());
        let path = empty.path().with_extension("absent");
        assert!(fill(&memory, &Fill::File(path)).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn a_file_goes_on_across_chunks_and_blocks(
            len in prop_oneof![1_usize..9, 4000..5000_usize, 1_000_000..3_000_000_usize],
        ) {
            let content: Vec<u8> = (0..len).map(|n| u8::try_from(n * n % 251).unwrap()).collect();
            let mut file = tempfile::NamedTempFile::new().unwrap();
            file.write_all(&content).unwrap();
            let memory = Memory::new(Backing::Anonymous, 8 << 20).unwrap();
            fill(&memory, &Fill::File(file.path().into())).unwrap();
            let expected = content.iter().cycle().take(8 << 20);
            prop_assert!(bytes_of(&memory).iter().eq(expected));
        }
    }
}
