//! The memory of a guest: named blocks, seen as one range of addresses.

use std::{
    fs::File,
    io,
    ops::Range,
    os::unix::fs::FileExt,
    sync::{Arc, atomic::Ordering},
};

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;
use rustix::{
    fs::{MemfdFlags, SeekFrom},
    mm::{Advice, MapFlags, ProtFlags, madvise},
};
use serde::{Deserialize, Serialize};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory, VolatileSlice};

/// Bytes in a page of a guest.
pub const PAGE: u64 = PAGE_BYTES as u64;

/// The same, as a length in memory.
pub(crate) const PAGE_BYTES: usize = 4096;

/// Size of the large pages that the guest's page tables map. The length of every block but the last is a multiple of it.
pub(crate) const LARGE_PAGE: u64 = 2 << 20;

/// Type of the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Backing {
    /// Private memory
    Anonymous,
    /// A shared mapping of a memfd
    Memfd,
    /// A shared mapping of 2 MiB pages from the host's pool (vm.nr_hugepages)
    Hugetlb,
}

/// Guest memory. A clone is the same memory.
#[derive(Clone, Debug)]
pub struct Memory {
    blocks: Vec<Block>,
}

/// A part of the memory, with the name under which it is migrated.
#[derive(Clone, Debug)]
pub struct Block {
    name: String,
    region: Arc<MmapRegion>,
    /// First address of the block.
    start: u64,
}

impl Memory {
    /// `bytes` of memory that was never touched, in the block `ram.low` and, if that is 8 MiB or more, a second block `ram.high`.
    ///
    /// # Errors
    /// If `bytes` is 0 or not a multiple of the page size (2 MiB for hugetlb), or the host has no more memory.
    pub fn new(backing: Backing, bytes: u64) -> Result<Self> {
        let low = low_bytes(bytes);
        let mut blocks = vec![("ram.low".to_owned(), map("ram.low", backing, low)?)];
        if bytes > low {
            let region = map("ram.high", backing, bytes - low)?;
            blocks.push(("ram.high".to_owned(), region));
        }
        Self::from_regions(blocks)
    }

    /// Memory made of mappings of the caller, in this order.
    ///
    /// # Errors
    /// If there are none, one is not made of whole pages, or one other than the last is not a multiple of 2 MiB.
    pub fn from_regions(regions: Vec<(String, Arc<MmapRegion>)>) -> Result<Self> {
        let last = regions.len().checked_sub(1);
        let last = last.context("a guest without memory")?;
        let mut start = 0;
        let mut blocks = Vec::with_capacity(regions.len());
        for (index, (name, region)) in regions.into_iter().enumerate() {
            let unit = if index == last { PAGE } else { LARGE_PAGE };
            let len = check_length(&name, region.size() as u64, unit)?;
            blocks.push(Block {
                name,
                region,
                start,
            });
            start += len;
        }
        Ok(Self { blocks })
    }

    /// Its blocks, in their order.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Bytes in all blocks.
    pub fn len(&self) -> u64 {
        self.blocks.last().map_or(0, |block| block.range().end)
    }

    /// Always false: memory is never empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// `len` bytes from address `start`; `None` unless all of them are in one block.
    pub(crate) fn slice(&self, start: u64, len: usize) -> Option<VolatileSlice<'_>> {
        let (block, offset) = self.block_at(start)?;
        block.region.get_slice(offset, len).ok()
    }

    /// The word at an address that is a multiple of 8; `None` outside of the memory.
    #[inline]
    pub(crate) fn load(&self, address: u64) -> Option<u64> {
        let (block, offset) = self.block_at(address)?;
        let slice = block.region.as_volatile_slice();
        slice.load(offset, Ordering::Relaxed).ok()
    }

    /// Sets the word at an address that is a multiple of 8; `None` outside of the memory.
    #[inline]
    pub(crate) fn store(&self, address: u64, word: u64) -> Option<()> {
        let (block, offset) = self.block_at(address)?;
        let slice = block.region.as_volatile_slice();
        slice.store(word, offset, Ordering::Relaxed).ok()
    }

    /// The parts of `range` (whole pages) that may contain anything but zeros. Untouched pages are left out as far as the host
    /// knows them, so that reading does not touch them. No part spans two blocks.
    pub(crate) fn touched(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let mut parts = Vec::new();
        for block in &self.blocks {
            let start = range.start.max(block.range().start);
            let end = range.end.min(block.range().end);
            if start < end {
                let within = start - block.start..end - block.start;
                // If the host does not know, everything is read.
                let touched = block.touched(&within).unwrap_or_else(|_| vec![within]);
                let touched = touched.into_iter();
                parts.extend(touched.map(|it| it.start + block.start..it.end + block.start));
            }
        }
        parts
    }

    /// The block of an address, and the offset in the block.
    #[inline]
    fn block_at(&self, address: u64) -> Option<(&Block, usize)> {
        let mut blocks = self.blocks.iter();
        let block = blocks.find(|block| block.range().contains(&address))?;
        Some((block, usize::try_from(address - block.start).ok()?))
    }
}

impl Block {
    /// The name under which the block is migrated.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its mapping.
    pub fn region(&self) -> &Arc<MmapRegion> {
        &self.region
    }

    /// Its addresses (see the [crate](crate#addresses)).
    pub fn range(&self) -> Range<u64> {
        self.start..self.start + self.region.size() as u64
    }

    fn touched(&self, within: &Range<u64>) -> io::Result<Vec<Range<u64>>> {
        match self.region.file_offset() {
            Some(file) => data_of_file(file, within),
            None => {
                let first = self.region.as_ptr().addr() as u64;
                let pages = present_pages(first + within.start..first + within.end)?;
                Ok(pages
                    .into_iter()
                    .map(|part| part.start - first..part.end - first)
                    .collect())
            }
        }
    }
}

/// Size of `ram.low`: all of a memory below 8 MiB, otherwise a quarter, rounded down to 2 MiB and at most 1 GiB, so that it lies below
/// the PCI hole.
fn low_bytes(bytes: u64) -> u64 {
    const MOST: u64 = 1 << 30;
    if bytes < 4 * LARGE_PAGE {
        return bytes;
    }
    (bytes / 4 / LARGE_PAGE * LARGE_PAGE).min(MOST)
}

fn check_length(name: &str, len: u64, unit: u64) -> Result<u64> {
    ensure!(
        len > 0 && len.is_multiple_of(unit),
        "`{name}`: {len} bytes are not a number of pages of {unit} bytes"
    );
    Ok(len)
}

fn map(name: &str, backing: Backing, bytes: u64) -> Result<Arc<MmapRegion>> {
    let large = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let (unit, memfd) = match backing {
        Backing::Anonymous => (PAGE, None),
        Backing::Memfd => (PAGE, Some(MemfdFlags::CLOEXEC)),
        Backing::Hugetlb => (LARGE_PAGE, Some(MemfdFlags::CLOEXEC | large)),
    };
    check_length(name, bytes, unit)?;
    let region = match memfd {
        None => map_anonymous(bytes),
        Some(flags) => map_memfd(name, flags, bytes),
    };
    let what = || format!("`{name}`: cannot map {bytes} bytes of memory ({backing:?})");
    region.map(Arc::new).with_context(what)
}

fn map_anonymous(bytes: u64) -> io::Result<MmapRegion> {
    let size = usize::try_from(bytes).map_err(io::Error::other)?;
    let region = MmapRegion::new(size).map_err(io::Error::other)?;
    advise_huge_pages(&region);
    Ok(region)
}

/// Asks for huge pages, as QEMU does. A kernel without them refuses.
#[allow(unsafe_code, reason = "madvise(2)")]
fn advise_huge_pages(region: &MmapRegion) {
    // SAFETY: the range is exactly the mapping, which lives as long as `region`, and the advice changes no content.
    let advised = unsafe { madvise(region.as_ptr().cast(), region.size(), Advice::LinuxHugepage) };
    // Without huge pages, small pages are used.
    let _ = advised;
}

fn map_memfd(name: &str, flags: MemfdFlags, bytes: u64) -> io::Result<MmapRegion> {
    let size = usize::try_from(bytes).map_err(io::Error::other)?;
    let file = File::from(rustix::fs::memfd_create(name, flags)?);
    file.set_len(bytes)?;
    // Without MAP_NORESERVE, which `MmapRegion::from_file` has: a pool of huge pages that is too small
    // is an error here, instead of a SIGBUS at some write.
    MmapRegion::build(
        Some(FileOffset::new(file, 0)),
        size,
        (ProtFlags::READ | ProtFlags::WRITE).bits().cast_signed(),
        MapFlags::SHARED.bits().cast_signed(),
    )
    .map_err(io::Error::other)
}

/// The parts of a shared mapping for which the file has data.
fn data_of_file(file: &FileOffset, within: &Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let end = file.start() + within.end;
    let mut parts = Vec::new();
    let mut at = file.start() + within.start;
    while at < end {
        let data = match rustix::fs::seek(file.file(), SeekFrom::Data(at)) {
            Ok(data) if data < end => data,
            Ok(_) | Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        at = rustix::fs::seek(file.file(), SeekFrom::Hole(data))?.min(end);
        parts.push(data - file.start()..at - file.start());
    }
    Ok(parts)
}

/// The parts of private memory for which pages exist, in RAM or in swap.
fn present_pages(addresses: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    const ENTRY: u64 = 8;
    const PRESENT_OR_SWAPPED: u64 = 0b11 << 62;
    let pagemap = File::open("/proc/self/pagemap")?;
    let mut parts: Vec<Range<u64>> = Vec::new();
    let mut entries = vec![0; 64 << 10];
    let mut at = addresses.start;
    while at < addresses.end {
        let pages = ((addresses.end - at) / PAGE).min(entries.len() as u64 / ENTRY);
        let bytes = usize::try_from(pages * ENTRY).map_err(io::Error::other)?;
        pagemap.read_exact_at(&mut entries[..bytes], at / PAGE * ENTRY)?;
        for entry in entries[..bytes].as_chunks().0 {
            if u64::from_ne_bytes(*entry) & PRESENT_OR_SWAPPED != 0 {
                match parts.last_mut() {
                    Some(last) if last.end == at => last.end += PAGE,
                    _ => parts.push(at..at + PAGE),
                }
            }
            at += PAGE;
        }
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_memory_has_two_blocks_and_small_one() {
        let lens = |bytes| {
            let memory = Memory::new(Backing::Anonymous, bytes).unwrap();
            let blocks = memory.blocks().iter();
            let lens: Vec<_> = blocks
                .map(|block| (block.name().to_owned(), block.range()))
                .collect();
            assert_eq!(memory.len(), bytes);
            lens
        };
        assert_eq!(lens(1 << 20), [("ram.low".to_owned(), 0..1 << 20)]);
        assert_eq!(
            lens((10 << 20) + PAGE),
            [
                ("ram.low".to_owned(), 0..2 << 20),
                ("ram.high".to_owned(), 2 << 20..(10 << 20) + PAGE)
            ]
        );
        assert_eq!(lens(8 << 30)[0].1, 0..1 << 30);
    }

    #[test]
    fn lengths_that_are_not_pages_are_refused() {
        for (backing, bytes, unit) in [
            (Backing::Anonymous, 0, PAGE),
            (Backing::Memfd, 4097, PAGE),
            (Backing::Hugetlb, 4096, LARGE_PAGE),
        ] {
            let error = Memory::new(backing, bytes).unwrap_err();
            let named = format!("not a number of pages of {unit} bytes");
            assert!(error.to_string().contains(&named), "{error}");
        }
    }

    #[test]
    fn untouched_pages_differ_from_zero_pages() {
        for backing in [Backing::Anonymous, Backing::Memfd] {
            let memory = Memory::new(backing, 16 << 20).unwrap();
            let all = 0..memory.len();
            assert_eq!(memory.touched(&all), [], "{backing:?}");
            // On both sides of the border of the blocks: one part each.
            for page in [0, 1, (4 << 20) / PAGE - 1, (4 << 20) / PAGE] {
                memory.store(page * PAGE, 0).unwrap();
            }
            let touched = memory.touched(&all);
            // A large page under the mapping may make more of it present than was written.
            for page in [0, 1, (4 << 20) / PAGE - 1, (4 << 20) / PAGE] {
                let holders = touched.iter().filter(|part| part.contains(&(page * PAGE)));
                assert_eq!(holders.count(), 1, "{backing:?}, page {page}: {touched:?}");
            }
            let border = 4 << 20;
            assert!(
                touched
                    .iter()
                    .all(|part| part.end <= border || part.start >= border)
            );
        }
    }

    #[test]
    fn words_outside_of_the_memory_are_not_there() {
        let memory = Memory::new(Backing::Anonymous, 8 << 20).unwrap();
        assert_eq!(memory.store((8 << 20) - 8, 7), Some(()));
        assert_eq!(memory.load((8 << 20) - 8), Some(7));
        assert_eq!(memory.load(8 << 20), None);
        assert_eq!(memory.store(8 << 20, 7), None);
    }
}
