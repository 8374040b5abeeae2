//! The memory of a RAM block: the file that QEMU has mapped.
//!
//! Pages are written to the file by system calls. For 4 KiB pages that costs less than the faults of a second mapping,
//! and no fault can end this process. Huge pages cannot be written by system calls: they are mapped, and populated first.

use std::{
    fs::File,
    io,
    ops::Range,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    sync::atomic::{AtomicU64, Ordering},
};

use multifd::{BlockName, Layout};
use rustix::{
    fs::{FsWord, SeekFrom, fstatfs, seek},
    io::Errno,
};
use vamoose_link::populate;
use vm_memory::{FileOffset, MmapRegion, VolatileMemory as _};

use super::PlaceError;

/// A RAM block of QEMU's.
pub(crate) struct Block {
    pub(super) name: BlockName,
    /// The file, the block's offset in it, and its length.
    file: File,
    start: u64,
    len: usize,
    page_size: usize,
    /// A mapping of huge pages.
    huge: Option<MmapRegion>,
    /// The file reports its holes reliably. A file system on a disk or a server may not know the latest writes.
    has_holes: bool,
    /// QEMU has created the file, which was zeros when the migration began.
    is_fresh: bool,
    /// A bit per page: written as a normal page, and not zeroed since.
    written: Box<[AtomicU64]>,
}

impl Block {
    /// The block `name` at `start` of `file`, `len` bytes.
    pub(super) fn open(
        name: BlockName,
        file: File,
        start: u64,
        len: usize,
        layout: Layout,
    ) -> io::Result<Self> {
        let page_size = layout.page_size();
        let kind = fstatfs(&file)?.f_type;
        let huge = match kind {
            HUGETLBFS => Some(map(&file, start, len)?),
            _ => None,
        };
        Ok(Self {
            name,
            is_fresh: false,
            file,
            start,
            len,
            page_size,
            huge,
            has_holes: kind == TMPFS,
            written: (0..len.div_ceil(page_size).div_ceil(64))
                .map(|_| AtomicU64::new(0))
                .collect(),
        })
    }

    /// Sets whether QEMU has created the file.
    pub(super) fn fresh(self, is_fresh: bool) -> Self {
        Self { is_fresh, ..self }
    }

    /// Whether all of the memory is allocated. Huge pages are reserved.
    pub(super) fn is_preallocated(&self) -> io::Result<bool> {
        let metadata = self.file.metadata()?;
        let allocated = metadata.blocks().saturating_mul(512);
        Ok(self.huge.is_some() || allocated >= metadata.len())
    }

    /// Writes `pages` to `offsets`, in this order.
    pub(super) fn write(&self, offsets: &[u64], pages: &[u8]) -> Result<(), PlaceError> {
        let mut rest = pages;
        for run in self.runs(offsets) {
            let (run, is_written) = run?;
            let (bytes, behind) = rest.split_at(run.len().min(rest.len()));
            self.write_run(&run, is_written, bytes)?;
            rest = behind;
        }
        for offset in offsets {
            self.set_written(*offset, true);
        }
        Ok(())
    }

    /// Writes `bytes` to `run`, all of whose pages were written before, or none.
    fn write_run(
        &self,
        run: &Range<usize>,
        is_written: bool,
        bytes: &[u8],
    ) -> Result<(), PlaceError> {
        let written = match &self.huge {
            None => self.file.write_all_at(bytes, self.start + run.start as u64),
            Some(memory) => write_huge(memory, run, is_written, bytes),
        };
        written.map_err(|error| self.missing(error))
    }

    /// Makes the pages at `offsets` zeros, without touching pages that are zero. With `is_shared`, QEMU may have written
    /// pages, too.
    pub(super) fn clear(&self, offsets: &[u64], is_shared: bool) -> Result<(), PlaceError> {
        let is_fresh = self.is_fresh && !is_shared;
        for run in self.runs(offsets) {
            let (run, is_written) = run?;
            if !is_written && (is_fresh || self.is_hole(&run)) {
                continue;
            }
            if is_written {
                self.write_zeros(&run, true)?;
                for page in run.step_by(self.page_size) {
                    self.set_written(page as u64, false);
                }
            } else {
                self.clear_what_is_not_zero(&run)?;
            }
        }
        Ok(())
    }

    /// Reads pages that were not written here, and clears those that are not zeros.
    fn clear_what_is_not_zero(&self, run: &Range<usize>) -> Result<(), PlaceError> {
        let mut buffer = [0; PIECE];
        for piece in pieces(run, PIECE) {
            let content = &mut buffer[..piece.len()];
            let at = self.start + piece.start as u64;
            let read = self.file.read_exact_at(content, at);
            read.map_err(|error| self.missing(error))?;
            if vamoose_codec::is_zero(content) {
                continue;
            }
            for (page, content) in pieces(&piece, SMALL_PAGE).zip(content.chunks(SMALL_PAGE)) {
                if !vamoose_codec::is_zero(content) {
                    self.write_zeros(&page, false)?;
                }
            }
        }
        Ok(())
    }

    fn write_zeros(&self, run: &Range<usize>, is_written: bool) -> Result<(), PlaceError> {
        let mut pieces = pieces(run, PIECE);
        pieces.try_for_each(|piece| self.write_run(&piece, is_written, &ZEROS[..piece.len()]))
    }

    /// Whether the file has a hole there, which reads as zeros.
    fn is_hole(&self, run: &Range<usize>) -> bool {
        if !self.has_holes {
            return false;
        }
        match seek(&self.file, SeekFrom::Data(self.start + run.start as u64)) {
            Ok(data) => data >= self.start + run.end as u64,
            Err(error) => error == Errno::NXIO,
        }
    }

    /// The pages at `offsets` as contiguous runs of bytes, each with whether its pages were written.
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
            let is_written = self.is_written(run.start);
            while let Some((next, behind)) = rest.split_first()
                && *next == run.end as u64
                && let Ok(page) = self.page(*next)
                && self.is_written(page.start) == is_written
            {
                run.end = page.end;
                rest = behind;
            }
            Some(Ok((run, is_written)))
        })
    }

    /// Checks an offset from the source, and returns its page.
    fn page(&self, offset: u64) -> Result<Range<usize>, PlaceError> {
        let start = usize::try_from(offset).ok();
        let page = start.and_then(|start| Some(start..start.checked_add(self.page_size)?));
        page.filter(|page| page.end <= self.len)
            .ok_or_else(|| PlaceError::Offset {
                offset,
                block: self.name.to_string(),
                len: self.len,
            })
    }

    fn is_written(&self, start: usize) -> bool {
        let page = start / self.page_size;
        self.written[page / 64].load(Ordering::Relaxed) & (1 << (page % 64)) != 0
    }

    /// Marks a page. Relaxed ordering suffices: a SYNC separates two packets with the same page.
    fn set_written(&self, offset: u64, is_written: bool) {
        let page = usize::try_from(offset).unwrap_or(usize::MAX) / self.page_size;
        let (word, bit) = (&self.written[page / 64], 1 << (page % 64));
        if is_written {
            word.fetch_or(bit, Ordering::Relaxed);
        } else {
            word.fetch_and(!bit, Ordering::Relaxed);
        }
    }

    fn missing(&self, error: io::Error) -> PlaceError {
        PlaceError::Memory {
            block: self.name.to_string(),
            error,
        }
    }
}

/// From linux/magic.h.
const HUGETLBFS: FsWord = 0x9584_58f6;
const TMPFS: FsWord = 0x0102_1994;

fn map(file: &File, start: u64, len: usize) -> io::Result<MmapRegion> {
    let at = FileOffset::new(file.try_clone()?, start);
    let memory = MmapRegion::from_file(at, len).map_err(io::Error::other)?;
    // Of no byte: this is refused only if the kernel does not know it.
    populate(&memory.get_slice(0, 0).map_err(io::Error::other)?)?;
    Ok(memory)
}

/// Writes to huge pages, which are populated unless they were written before.
fn write_huge(
    memory: &MmapRegion,
    run: &Range<usize>,
    is_written: bool,
    bytes: &[u8],
) -> io::Result<()> {
    let slice = memory.get_slice(run.start, run.len());
    let slice = slice.map_err(io::Error::other)?;
    if !is_written {
        populate(&slice)?;
    }
    slice.copy_from(bytes);
    Ok(())
}

/// `run` in pieces of `len` bytes. The last may be shorter.
fn pieces(run: &Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = run.end;
    let starts = run.clone().step_by(len);
    starts.map(move |start| start..end.min(start + len))
}

/// Bytes that are read or cleared at a time: they fit into a processor's cache.
const PIECE: usize = 64 << 10;
const SMALL_PAGE: usize = 4096;
static ZEROS: [u8; PIECE] = [0; PIECE];

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
        let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        let file = file.as_file().try_clone().unwrap();
        file.set_len(START + content.len() as u64).unwrap();
        for (page, content) in content.chunks(PAGE).enumerate() {
            if content.iter().any(|byte| *byte != 0) {
                file.write_all_at(content, START + (page * PAGE) as u64)
                    .unwrap();
            }
        }
        let name = BlockName::new(b"mem").unwrap();
        let len = content.len();
        Block::open(name, file, START, len, Layout::X86).unwrap()
    }

    /// What the file holds.
    pub(crate) fn content(block: &Block) -> Vec<u8> {
        let mut content = vec![0; block.len];
        block.file.read_exact_at(&mut content, START).unwrap();
        content
    }

    fn allocated(block: &Block) -> u64 {
        std::os::unix::fs::MetadataExt::blocks(&block.file.metadata().unwrap()) * 512
    }

    fn write(block: &Block, offsets: &[u64], byte: u8) {
        let pages = vec![byte; offsets.len() * PAGE];
        block.write(offsets, &pages).unwrap();
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
            before in prop_oneof![vec(0..3_u8, PAGES), Just(vec![0; PAGES])],
            is_fresh: bool,
            steps in vec(step(), 1..20),
        ) {
            let mut model: Vec<u8> = before.iter().flat_map(|byte| [*byte; PAGE]).collect();
            let is_fresh = is_fresh && before.iter().all(|byte| *byte == 0);
            let block = block(&model).fresh(is_fresh);
            for step in steps {
                let (offsets, byte) = match &step {
                    Step::Write(offsets, byte) => {
                        write(&block, offsets, *byte);
                        (offsets, *byte)
                    }
                    Step::Clear(offsets) => {
                        block.clear(offsets, false).unwrap();
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
        block.clear(&[0, 0x1000, 0x3000], false).unwrap();
        assert_eq!(allocated(&block), 0);
        write(&block, &[0x1000], 7);
        assert_eq!(allocated(&block), PAGE as u64);
    }

    #[test]
    fn one_byte_that_is_not_zero_is_cleared() {
        let mut before = vec![0; 2 * PAGE];
        before[2 * PAGE - 1] = 1;
        let block = block(&before);
        block.clear(&[0x1000], false).unwrap();
        assert!(content(&block).iter().all(|byte| *byte == 0));
    }

    #[test]
    fn what_others_may_have_written_is_looked_at() {
        let block = block(&[1; PAGE]).fresh(true);
        block.clear(&[0], false).unwrap();
        assert_eq!(content(&block)[0], 1);
        block.clear(&[0], true).unwrap();
        assert_eq!(content(&block)[0], 0);
    }

    #[test]
    fn a_page_outside_is_refused() {
        let block = block(&[0; 2 * PAGE]);
        for offset in [0x2000, u64::MAX - 0xfff, 1 << 63] {
            for result in [
                block.write(&[0x1000, offset], &[1; 2 * PAGE]),
                block.clear(&[offset], false),
            ] {
                assert!(
                    matches!(result, Err(PlaceError::Offset { .. })),
                    "{result:?}"
                );
            }
        }
    }
}
