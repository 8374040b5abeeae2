//! Digests of guest memory, piece by piece, so that a difference has a place.

use std::{collections::BTreeMap, io, os::unix::fs::FileExt as _};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;
use vamoose_live::{Ram, RamBlock};

/// Digests of all of a guest's memory: of each block, by its name, 128 bits for each piece of 1 MiB. In hexadecimal: JSON
/// has no numbers of this size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Digest(BTreeMap<String, Vec<String>>);

const PIECE: usize = 1 << 20;

impl Digest {
    /// Reads all of `ram`, which must not be written meanwhile.
    pub(crate) fn of(ram: &Ram) -> Result<Self> {
        let mut buffer = vec![0; PIECE];
        let blocks = ram.blocks().iter().map(|block| {
            let name = block.name().to_string();
            let pieces = (0..block.len())
                .step_by(PIECE)
                .map(|start| {
                    let piece = &mut buffer[..PIECE.min(block.len() - start)];
                    read(block, start, piece)?;
                    Ok(format!("{:032x}", XxHash3_128::oneshot(piece)))
                })
                .collect::<io::Result<_>>()
                .with_context(|| format!("cannot read RAM block `{name}`"))?;
            Ok((name, pieces))
        });
        Ok(Self(blocks.collect::<Result<_>>()?))
    }

    /// Where the memory `there` is another one, in words; `None` if it is the same.
    pub(crate) fn difference(&self, there: &Self) -> Option<String> {
        let blocks = |digest: &Self| -> Vec<_> {
            let blocks = digest.0.iter();
            blocks
                .map(|(name, pieces)| format!("{name}: {} MiB", pieces.len()))
                .collect()
        };
        let (ours, theirs) = (blocks(self), blocks(there));
        if ours != theirs {
            return Some(format!("its blocks are {ours:?} here and {theirs:?} there"));
        }
        let both = self.0.iter().zip(there.0.values());
        let differences: Vec<_> = both
            .filter_map(|((name, here), there)| difference(name, here, there))
            .collect();
        (!differences.is_empty()).then(|| differences.join(", "))
    }
}

/// Where a block is another one, that has as many pieces.
fn difference(name: &str, here: &[String], there: &[String]) -> Option<String> {
    let pairs = here.iter().zip(there).enumerate();
    let mut differ = pairs.filter(|(_, (here, there))| here != there);
    let (first, _) = differ.next()?;
    Some(format!(
        "{} of {} MiB of `{name}` differ, the first at offset {:#x}",
        1 + differ.count(),
        here.len(),
        first * PIECE
    ))
}

/// Reads memory at `start` of the block. A file is read as such: through the mapping, reading
/// what was never written would allocate it.
fn read(block: &RamBlock, start: usize, into: &mut [u8]) -> io::Result<()> {
    match block.file() {
        Some(file) => file.file().read_exact_at(into, file.start() + start as u64),
        None => {
            let memory = block.memory();
            let piece = memory
                .subslice(start, into.len())
                .map_err(io::Error::other)?;
            piece.copy_to(into);
            Ok(())
        }
    }
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
    fn memory_is_the_same_whatever_it_is_made_of() {
        let (anonymous, ram) = memory(Backing::Anonymous);
        fill(&anonymous, &Fill::Mixed).unwrap();
        let here = Digest::of(&ram).unwrap();
        let (memfd, ram) = memory(Backing::Memfd);
        assert!(here.difference(&Digest::of(&ram).unwrap()).is_some());
        fill(&memfd, &Fill::Mixed).unwrap();
        assert_eq!(here.difference(&Digest::of(&ram).unwrap()), None);
    }

    #[test]
    fn one_byte_is_found_in_its_place() {
        let (_memory, ram) = memory(Backing::Anonymous);
        let before = Digest::of(&ram).unwrap();
        let high = &ram.blocks()[1];
        let last = high.memory().subslice(high.len() - 1, 1).unwrap();
        last.copy_from(&[1_u8]);
        assert_eq!(
            before.difference(&Digest::of(&ram).unwrap()).unwrap(),
            "1 of 9 MiB of `ram.high` differ, the first at offset 0x800000"
        );
    }

    #[test]
    fn other_blocks_are_a_difference() {
        let (_memory, ram) = memory(Backing::Anonymous);
        let small = Memory::new(Backing::Anonymous, 1 << 20).unwrap();
        let (here, there) = (
            Digest::of(&ram).unwrap(),
            Digest::of(&ram_of(&small).unwrap()).unwrap(),
        );
        let difference = here.difference(&there).unwrap();
        assert!(difference.contains("ram.high"), "{difference}");
    }

    #[test]
    fn reading_does_not_allocate_a_file() {
        let (memory, ram) = memory(Backing::Memfd);
        Digest::of(&ram).unwrap();
        for block in memory.blocks() {
            let file = block.region().file_offset().unwrap();
            let blocks = std::os::unix::fs::MetadataExt::blocks(&file.file().metadata().unwrap());
            assert_eq!(blocks, 0, "{}", block.name());
        }
    }
}
