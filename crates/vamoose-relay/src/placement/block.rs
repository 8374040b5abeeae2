//! The memory of a RAM block, mapped a second time.

use std::{
    fs::File,
    io,
    ops::Range,
    os::unix::fs::FileExt as _,
    sync::atomic::{AtomicU64, Ordering},
};

use multifd::{BlockName, Layout};
use rustix::{
    fs::{SeekFrom, seek},
    io::Errno,
};
use vamoose_link::populate;
use vm_memory::{
    FileOffset, MmapRegion, VolatileMemory as _, VolatileSlice, mmap::MmapRegionError,
};

use super::PlaceError;

/// A RAM block of QEMU's.
pub(crate) struct Block {
    pub(super) name: BlockName,
    memory: MmapRegion,
    /// Bit by bit the pages whose memory is known to be there: they were written through this mapping.
    there: Box<[AtomicU64]>,
    page_size: usize,
    /// What it is mapped from, and where in it the block begins.
    file: File,
    start: u64,
}

impl Block {
    /// The block `name` at `start` of `file`, `len` bytes.
    pub(super) fn map(
        name: BlockName,
        file: File,
        start: u64,
        len: usize,
        layout: Layout,
    ) -> Result<Self, MmapRegionError> {
        let for_mapping = file.try_clone().map_err(MmapRegionError::Mmap)?;
        let page_size = layout.page_size();
        Ok(Self {
            name,
            memory: MmapRegion::from_file(FileOffset::new(for_mapping, start), len)?,
            there: (0..len.div_ceil(page_size).div_ceil(64))
                .map(|_| AtomicU64::new(0))
                .collect(),
            page_size,
            file,
            start,
        })
    }

    /// Whether the system can provide memory in advance.
    pub(super) fn check_kernel(&self) -> io::Result<()> {
        // Of no byte: it is refused only if it is not known.
        let nothing = self.memory.get_slice(0, 0).map_err(io::Error::other)?;
        populate(&nothing)
    }

    /// Finds the memory of the pages at `offsets`, into `pages`, and makes sure that there is some.
    pub(super) fn provide<'a>(
        &'a self,
        offsets: &[u64],
        pages: &mut Vec<VolatileSlice<'a>>,
    ) -> Result<(), PlaceError> {
        pages.clear();
        for run in self.runs(offsets) {
            let (run, is_there) = run?;
            let slice = self.slice(&run)?;
            if !is_there {
                self.populate(&run, &slice)?;
            }
            pages.push(slice);
        }
        Ok(())
    }

    /// Makes the pages at `offsets` zeros, without touching those that are.
    pub(super) fn clear(&self, offsets: &[u64]) -> Result<(), PlaceError> {
        for run in self.runs(offsets) {
            let (run, is_there) = run?;
            if !is_there && self.is_hole(&run) {
                continue;
            }
            for start in run.step_by(self.page_size) {
                let page = start..start + self.page_size;
                if !self.is_zero(&page, is_there)? {
                    self.write_zeros(&page, is_there)?;
                }
            }
        }
        Ok(())
    }

    /// By the file, not the mapping, where memory may not be there: a look at a page must not provide some.
    fn is_zero(&self, page: &Range<usize>, is_there: bool) -> Result<bool, PlaceError> {
        let mut buffer = [0; PIECE];
        for piece in pieces(page) {
            let content = &mut buffer[..piece.len()];
            if is_there {
                self.slice(&piece)?.copy_to(content);
            } else {
                let at = self.start + piece.start as u64;
                let read = self.file.read_exact_at(content, at);
                read.map_err(|error| self.missing(error))?;
            }
            if !vamoose_codec::is_zero(content) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn write_zeros(&self, page: &Range<usize>, is_there: bool) -> Result<(), PlaceError> {
        if !is_there {
            self.populate(page, &self.slice(page)?)?;
        }
        for piece in pieces(page) {
            self.slice(&piece)?.copy_from(&ZEROS[..piece.len()]);
        }
        Ok(())
    }

    /// Whether the file has nothing there, so that it reads as zeros. (Huge pages have no holes that could be seen.)
    fn is_hole(&self, run: &Range<usize>) -> bool {
        match seek(&self.file, SeekFrom::Data(self.start + run.start as u64)) {
            Ok(data) => data >= self.start + run.end as u64,
            Err(error) => error == Errno::NXIO,
        }
    }

    /// The pages at `offsets` as runs of bytes that lie together, each with whether its memory is known to be there.
    fn runs<'a>(
        &'a self,
        offsets: &'a [u64],
    ) -> impl Iterator<Item = Result<(Range<usize>, bool), PlaceError>> + 'a {
        let mut rest = offsets;
        std::iter::from_fn(move || {
            let (first, behind) = rest.split_first()?;
            rest = behind;
            let mut run = match self.page(*first) {
                Ok(page) => page,
                Err(error) => return Some(Err(error)),
            };
            let is_there = self.is_there(&run);
            while let Some((next, behind)) = rest.split_first()
                && *next == run.end as u64
                && let Ok(page) = self.page(*next)
                && self.is_there(&page) == is_there
            {
                run.end = page.end;
                rest = behind;
            }
            Some(Ok((run, is_there)))
        })
    }

    /// The page at `offset`, which a source has named.
    fn page(&self, offset: u64) -> Result<Range<usize>, PlaceError> {
        let len = self.memory.size();
        let start = usize::try_from(offset).ok();
        let page = start.and_then(|start| Some(start..start.checked_add(self.page_size)?));
        page.filter(|page| page.end <= len)
            .ok_or_else(|| PlaceError::Offset {
                offset,
                block: self.name.to_string(),
                len,
            })
    }

    fn slice(&self, run: &Range<usize>) -> Result<VolatileSlice<'_>, PlaceError> {
        let slice = self.memory.get_slice(run.start, run.len());
        slice.map_err(|error| self.missing(io::Error::other(error)))
    }

    fn populate(&self, run: &Range<usize>, slice: &VolatileSlice<'_>) -> Result<(), PlaceError> {
        populate(slice).map_err(|error| self.missing(error))?;
        for page in run.clone().step_by(self.page_size) {
            let (word, bit) = self.bit(page);
            // Orders nothing: a SYNC is between two packets that name the same page.
            word.fetch_or(bit, Ordering::Relaxed);
        }
        Ok(())
    }

    fn is_there(&self, page: &Range<usize>) -> bool {
        let (word, bit) = self.bit(page.start);
        word.load(Ordering::Relaxed) & bit != 0
    }

    fn bit(&self, start: usize) -> (&AtomicU64, u64) {
        let page = start / self.page_size;
        (&self.there[page / 64], 1 << (page % 64))
    }

    fn missing(&self, error: io::Error) -> PlaceError {
        PlaceError::Memory {
            block: self.name.to_string(),
            error,
        }
    }
}

/// `page` in pieces that are compared and cleared at once.
fn pieces(page: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = page.end;
    let starts = page.clone().step_by(PIECE);
    starts.map(move |start| start..end.min(start + PIECE))
}

const PIECE: usize = 4096;
const ZEROS: [u8; PIECE] = [0; PIECE];

#[cfg(test)]
pub(crate) mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    const PAGES: usize = 16;
    const PAGE: usize = 4096;
    /// The block is not at the beginning of its file.
    const START: u64 = PAGE as u64;

    /// A block of a file that holds `content`.
    pub(crate) fn block(content: &[u8]) -> Block {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(START + content.len() as u64).unwrap();
        for (page, content) in content.chunks(PAGE).enumerate() {
            if content.iter().any(|byte| *byte != 0) {
                file.write_all_at(content, START + (page * PAGE) as u64)
                    .unwrap();
            }
        }
        let name = BlockName::new(b"mem").unwrap();
        Block::map(name, file, START, content.len(), Layout::X86).unwrap()
    }

    /// What the file holds.
    pub(crate) fn content(block: &Block) -> Vec<u8> {
        let mut content = vec![0; block.memory.size()];
        block.file.read_exact_at(&mut content, START).unwrap();
        content
    }

    fn allocated(block: &Block) -> u64 {
        std::os::unix::fs::MetadataExt::blocks(&block.file.metadata().unwrap()) * 512
    }

    fn write(block: &Block, offsets: &[u64], byte: u8) {
        let mut slices = Vec::new();
        block.provide(offsets, &mut slices).unwrap();
        let len: usize = slices.iter().map(VolatileSlice::len).sum();
        assert_eq!(len, offsets.len() * PAGE);
        for slice in slices {
            slice.copy_from(&vec![byte; slice.len()]);
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Write(Vec<u64>, u8),
        Clear(Vec<u64>),
    }

    fn step() -> impl Strategy<Value = Step> {
        let offset = (0..PAGES as u64).prop_map(|page| page * PAGE as u64);
        let offsets = || vec(offset.clone(), 1..PAGES);
        prop_oneof![
            (offsets(), any::<u8>()).prop_map(|(offsets, byte)| Step::Write(offsets, byte)),
            offsets().prop_map(Step::Clear),
        ]
    }

    proptest! {
        #[test]
        fn the_file_is_what_was_written(
            before in vec(0..3_u8, PAGES),
            steps in vec(step(), 1..20),
        ) {
            let mut model: Vec<u8> = before.iter().flat_map(|byte| [*byte; PAGE]).collect();
            let block = block(&model);
            for step in steps {
                let (offsets, byte) = match &step {
                    Step::Write(offsets, byte) => {
                        write(&block, offsets, *byte);
                        (offsets, *byte)
                    }
                    Step::Clear(offsets) => {
                        block.clear(offsets).unwrap();
                        (offsets, 0)
                    }
                };
                for offset in offsets {
                    let start = usize::try_from(*offset).unwrap();
                    model[start..start + PAGE].fill(byte);
                }
                prop_assert_eq!(&content(&block), &model);
            }
        }
    }

    #[test]
    fn clearing_what_was_never_written_takes_no_memory() {
        let block = block(&[0; 4 * PAGE]);
        block.clear(&[0, 0x1000, 0x3000]).unwrap();
        assert_eq!(allocated(&block), 0);
        write(&block, &[0x1000], 7);
        assert_eq!(allocated(&block), PAGE as u64);
    }

    #[test]
    fn one_byte_that_is_not_zero_is_cleared() {
        let mut before = vec![0; 2 * PAGE];
        before[2 * PAGE - 1] = 1;
        let block = block(&before);
        block.clear(&[0x1000]).unwrap();
        assert!(content(&block).iter().all(|byte| *byte == 0));
    }

    #[test]
    fn a_page_outside_is_refused() {
        let block = block(&[0; 2 * PAGE]);
        for offset in [0x2000, u64::MAX - 0xfff, 1 << 63] {
            let mut slices = Vec::new();
            for result in [
                block.provide(&[0x1000, offset], &mut slices),
                block.clear(&[offset]),
            ] {
                assert!(
                    matches!(result, Err(PlaceError::Offset { .. })),
                    "{result:?}"
                );
            }
        }
    }
}
