//! The memory of a RAM block: the file that QEMU has mapped.
//!
//! Pages are written to the file by system calls. For 4 KiB pages that costs less than the faults of a second mapping,
//! and no fault can end this process. Huge pages cannot be written by system calls: they are mapped, and populated first.

use std::{
    fs::File,
    io,
    num::NonZeroUsize,
    ops::Range,
    os::unix::fs::{FileExt as _, MetadataExt as _},
};

use multifd::{BlockName, Layout};
use rustix::{
    fs::{FsWord, SeekFrom, fstatfs, seek},
    io::Errno,
};
use vamoose_link::populate;
use vm_memory::{FileOffset, MmapRegion, VolatileMemory as _, bitmap::AtomicBitmap};

use super::PlaceError;

/// The memory of one RAM block.
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
    /// Pages that were written as normal pages, and not zeroed since.
    written: AtomicBitmap,
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
            written: AtomicBitmap::new(
                len,
                NonZeroUsize::new(page_size).unwrap_or(NonZeroUsize::MIN),
            ),
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
            self.written.set_addr_range(run.start, run.len());
            rest = behind;
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
                self.written.reset_addr_range(run.start, run.len());
            } else {
                self.clear_nonzero_pages(&run)?;
            }
        }
        Ok(())
    }

    /// Reads pages that were not written here, and clears those that are not zeros.
    fn clear_nonzero_pages(&self, run: &Range<usize>) -> Result<(), PlaceError> {
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
            let is_written = self.written.is_addr_set(run.start);
            while let Some((next, behind)) = rest.split_first()
                && *next == run.end as u64
                && let Ok(page) = self.page(*next)
                && self.written.is_addr_set(page.start) == is_written
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
    // With no bytes, this fails only if the kernel does not support it.
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
pub(super) mod tests;
