//! A digest of a guest's memory, which shows whether two memories are equal.

use std::{io, os::unix::fs::FileExt as _};

use anyhow::{Context as _, Result};
use twox_hash::XxHash3_128;
use vamoose_live::{Ram, RamBlock};

const PIECE: usize = 1 << 20;

/// The digest of all of `ram`, which must not be written at the same time. In hexadecimal, as JSON has no numbers of 128 bits.
pub(crate) fn digest(ram: &Ram) -> Result<String> {
    let mut buffer = vec![0; PIECE];
    let mut hash = XxHash3_128::new();
    for block in ram.blocks() {
        hash.write(block.name().to_string().as_bytes());
        for start in (0..block.len()).step_by(PIECE) {
            let piece = &mut buffer[..PIECE.min(block.len() - start)];
            read(block, start, piece)
                .with_context(|| format!("cannot read RAM at {}+{start:#x}", block.name()))?;
            hash.write(piece);
        }
    }
    Ok(format!("{:032x}", hash.finish_128()))
}

/// Reads memory at `start` of the block. The memory of a file is read from the file, because reading untouched memory through the
/// mapping would allocate it.
fn read(block: &RamBlock, start: usize, into: &mut [u8]) -> io::Result<()> {
    if let Some(file) = block.file() {
        return file.file().read_exact_at(into, file.start() + start as u64);
    }
    let memory = block.memory().subslice(start, into.len());
    memory.map_err(io::Error::other)?.copy_to(into);
    Ok(())
}

#[cfg(test)]
mod tests {
    use testguest::{Backing, Fill, Memory, fill};

    use super::*;
    use crate::guest::ram_of;

    fn memory(backing: Backing) -> (Memory, Ram) {
        let memory = Memory::new(backing, (10 << 20) + 4096).unwrap();
        let ram = ram_of(&memory).unwrap();
        (memory, ram)
    }

    #[test]
    fn digest_does_not_depend_on_the_backing() {
        let (anonymous, here) = memory(Backing::Anonymous);
        fill(&anonymous, Fill::Mixed);
        let (memfd, there) = memory(Backing::Memfd);
        assert_ne!(digest(&here).unwrap(), digest(&there).unwrap());
        fill(&memfd, Fill::Mixed);
        assert_eq!(digest(&here).unwrap(), digest(&there).unwrap());
    }

    #[test]
    fn last_byte_changes_the_digest() {
        let (_memory, ram) = memory(Backing::Anonymous);
        let before = digest(&ram).unwrap();
        let high = &ram.blocks()[1];
        let last = high.memory().subslice(high.len() - 1, 1).unwrap();
        last.copy_from(&[1_u8]);
        assert_ne!(digest(&ram).unwrap(), before);
    }

    #[test]
    fn other_blocks_have_another_digest() {
        let (_memory, ram) = memory(Backing::Anonymous);
        let small = Memory::new(Backing::Anonymous, 1 << 20).unwrap();
        let small = ram_of(&small).unwrap();
        assert_ne!(digest(&ram).unwrap(), digest(&small).unwrap());
    }
}
