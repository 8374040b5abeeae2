//! Digests of pieces of guest memory, which show where two memories differ.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::unix::fs::FileExt as _,
};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash3_128;
use vamoose_live::{Ram, RamBlock};

/// A digest of each piece of a guest's memory, by the piece's place: `BLOCK+0xOFFSET`. 128 bits in hexadecimal, as JSON has no
/// numbers of this size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Digest(BTreeMap<String, String>);

const PIECE: usize = 1 << 20;

impl Digest {
    /// Reads all of `ram`, which must not be written at the same time.
    pub(crate) fn of(ram: &Ram) -> Result<Self> {
        let mut buffer = vec![0; PIECE];
        let mut pieces = BTreeMap::new();
        for block in ram.blocks() {
            for start in (0..block.len()).step_by(PIECE) {
                let place = format!("{}+{start:#x}", block.name());
                let piece = &mut buffer[..PIECE.min(block.len() - start)];
                read(block, start, piece).with_context(|| format!("cannot read RAM at {place}"))?;
                pieces.insert(place, format!("{:032x}", XxHash3_128::oneshot(piece)));
            }
        }
        Ok(Self(pieces))
    }

    /// How the memory `there` differs; `None` if it is the same.
    pub(crate) fn difference(&self, there: &Self) -> Option<String> {
        let places: BTreeSet<&String> = self.0.keys().chain(there.0.keys()).collect();
        let count = places.len();
        let mut differ = places
            .into_iter()
            .filter(|place| self.0.get(*place) != there.0.get(*place));
        let first = differ.next()?;
        let differ = 1 + differ.count();
        Some(format!(
            "{differ} of {count} MiB differ, one of them at {first}"
        ))
    }
}

/// Reads memory at `start` of the block. The memory of a file is read from the file, because reading untouched memory through the
/// mapping would allocate it.
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
            "1 of 11 MiB differ, one of them at ram.high+0x800000"
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
