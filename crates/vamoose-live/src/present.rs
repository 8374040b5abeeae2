//! Finds untouched memory without touching it.
//!
//! Reading an untouched page makes the kernel allocate or map one, so a scan for zeros would be expensive. The
//! alternative depends on the kind of memory:
//!
//! | memory | source of information | pages that may be non-zero |
//! |---|---|---|
//! | private, anonymous | PAGEMAP_SCAN, before Linux 6.7 /proc/self/pagemap | pages in memory or swapped, but not the shared page of zeros |
//! | shared mapping of a memfd or file in tmpfs | the file, for its holes | pages with data in the file, written through any mapping |
//! | filled when it is touched, by a userfaultfd or the VMM | nothing | everything |
//! | anything else | nothing | everything |

use std::{
    io,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use rustix::{
    fs::{SeekFrom, seek},
    io::Errno,
};
use vm_memory::FileOffset;

use crate::{
    Ram, RamBlock,
    dirty::{ones, set_pages},
    mapping::Backing,
    sys::pagemap::{Found, POPULATED, Pagemap, Query, ZERO},
};

/// Finds memory that was touched.
pub(crate) struct Touched {
    backings: Vec<Backing>,
    untouched: Arc<AtomicU64>,
    /// A failure has been reported, and is not reported again.
    reported: AtomicBool,
}

impl Touched {
    /// For memory whose blocks have these backings.
    pub(crate) fn new(backings: Vec<Backing>) -> Self {
        Self {
            backings,
            untouched: Arc::default(),
            reported: AtomicBool::new(false),
        }
    }

    /// Number of searched pages that were never touched.
    pub(crate) fn untouched(&self) -> &Arc<AtomicU64> {
        &self.untouched
    }

    /// Which of `pages` of block `index` of `ram` may hold something other than zeros, a bit for each; all of them if
    /// there is no way to know.
    ///
    /// A page that is written for the first time during the search may be missing from the result. The dirty log, which has to
    /// watch the page before, has it.
    pub(crate) fn find(&self, ram: &Ram, index: usize, pages: Range<usize>) -> Vec<u64> {
        let (block, page_size) = (&ram.blocks()[index], ram.page_size());
        let mut words = vec![0; pages.len().div_ceil(64)];
        let backing = self.backings.get(index).unwrap_or(&Backing::Other);
        let asked = match (backing, block.file()) {
            (Backing::Anonymous { .. }, _) => in_page_tables(block, &pages, page_size, &mut words),
            // In tmpfs the pages that are mapped are the file. Elsewhere the answer may come from a server or a disk
            // without the latest writes; hugetlbfs has no answer.
            (Backing::SharedFile, Some(file)) => in_file(file, &pages, page_size, &mut words),
            _ => {
                set_pages(&mut words, 0..pages.len());
                Ok(())
            }
        };
        if let Err(error) = asked {
            if !self.reported.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    block = %block.name(), %error,
                    "cannot tell which pages were ever touched: all are read"
                );
            }
            set_pages(&mut words, 0..pages.len());
        }
        let untouched = pages.len() - ones(&words);
        self.untouched
            .fetch_add(untouched as u64, Ordering::Relaxed);
        words
    }
}

fn in_page_tables(
    block: &RamBlock,
    pages: &Range<usize>,
    page_size: usize,
    words: &mut [u64],
) -> io::Result<()> {
    let pagemap = Pagemap::open()?;
    let start = block.address() + pages.start * page_size;
    let addresses = start..start + pages.len() * page_size;
    let query = Query {
        any: POPULATED,
        none: ZERO,
        ..Query::default()
    };
    let page = |address| (address - start) / page_size;
    let mut each = |run: Range<usize>| set_pages(words, page(run.start)..page(run.end));
    match pagemap.scan(addresses.clone(), query, &mut Found::new(), &mut each) {
        Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
            pagemap.populated(addresses, page_size, each)
        }
        scanned => scanned,
    }
}

/// Moves the position of the file, which means nothing to a file that is mapped.
fn in_file(
    file: &FileOffset,
    pages: &Range<usize>,
    page_size: usize,
    words: &mut [u64],
) -> io::Result<()> {
    let start = file.start() + (pages.start * page_size) as u64;
    let end = start + (pages.len() * page_size) as u64;
    let page = |offset: u64| {
        let page = (offset - start) / page_size as u64;
        usize::try_from(page).unwrap_or(usize::MAX)
    };
    let mut offset = start;
    while offset < end {
        let data = match seek(file.file(), SeekFrom::Data(offset)) {
            Ok(data) => data,
            // No data from here to the end of the file.
            Err(Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let hole = seek(file.file(), SeekFrom::Hole(data))?;
        if data >= end {
            break;
        }
        // To the end of the page that the last byte is in: a file's blocks may be smaller than pages.
        let until = page(hole.min(end).saturating_add(page_size as u64 - 1));
        set_pages(words, page(data)..until.min(pages.len()));
        // A hole right where there was data is a race with another thread that punches it: continue behind it.
        offset = hole.max(data + 1);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{fs::File, sync::Arc};

    use rustix::{
        fs::{MemfdFlags, ftruncate, memfd_create},
        param::page_size,
    };
    use vm_memory::{Bytes, MmapRegion, VolatileSlice, mmap::MmapRegionBuilder};

    use super::*;
    use crate::{Region, dirty::pages_in, mapping, sys::faults::Faults};

    /// Not a multiple of 64, and enough for several page tables.
    const PAGES: usize = 5000;
    const WRITTEN: [usize; 6] = [0, 1, 64, 511, 2048, PAGES - 1];

    #[test]
    fn anonymous_memory_has_what_was_written() {
        let block = anonymous();
        assert_eq!(found(&block).len(), 0);
        // An untouched page that was looked for is still untouched, and one that was read holds zeros.
        read(&block, 17);
        read(&block, 3000);
        assert_eq!(found(&block).len(), 0);
        WRITTEN.iter().for_each(|&page| write(&block, page));
        assert!(found(&block).into_iter().eq(WRITTEN));
    }

    #[test]
    fn pagemap_entries_agree_with_pagemap_scan() {
        let block = anonymous();
        WRITTEN.iter().for_each(|&page| write(&block, page));
        let (pagemap, start) = (Pagemap::open().unwrap(), block.address());
        let page = |address| (address - start) / page_size();
        let entries = || {
            pages_found(|words| {
                pagemap.populated(block.addresses(), page_size(), |run| {
                    set_pages(words, page(run.start)..page(run.end));
                })
            })
        };
        assert_eq!(entries(), found(&block));
        // They cannot identify the shared page of zeros, and are on the safe side.
        read(&block, 17);
        assert!(entries().contains(&17));
    }

    #[test]
    fn a_memfd_has_what_anybody_wrote() {
        let file = memfd();
        let (block, elsewhere) = (map(&file, libc::MAP_SHARED), map(&file, libc::MAP_SHARED));
        assert_eq!(found(&block).len(), 0);
        for (nth, &page) in WRITTEN.iter().enumerate() {
            write([&block, &elsewhere][nth % 2], page);
        }
        assert!(found(&block).into_iter().eq(WRITTEN));
        // Written without a mapping: right before the block in its file, its tenth page, right behind it.
        for page in [2, 3 + 10, 3 + PAGES] {
            rustix::io::pwrite(file.file(), &[1], (page * page_size()) as u64).unwrap();
        }
        let mut expected = WRITTEN.to_vec();
        expected.insert(2, 10);
        assert!(found(&block).into_iter().eq(expected));
    }

    #[test]
    fn unknown_memory_is_present() {
        let shared_without_a_file = MmapRegionBuilder::new(PAGES * page_size())
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        for block in [
            map(&memfd(), libc::MAP_PRIVATE),
            ram_block(shared_without_a_file.build().unwrap()),
        ] {
            assert_eq!(found(&block).len(), PAGES);
        }
    }

    #[test]
    fn memory_filled_by_userfaultfd_is_present() {
        let faults = match Faults::open() {
            Ok(faults) => faults,
            Err(error) => return lab::skipped(&format!("userfaultfd: {error}")).unwrap(),
        };
        for block in [anonymous(), map(&memfd(), libc::MAP_SHARED)] {
            faults.register(&block.addresses()).unwrap();
            assert_eq!(found(&block).len(), PAGES);
        }
    }

    #[test]
    fn memory_filled_by_the_vmm_is_present() {
        struct Lazy(MmapRegion);

        impl Region for Lazy {
            fn memory(&self) -> VolatileSlice<'_> {
                self.0.memory()
            }

            fn file(&self) -> Option<&FileOffset> {
                None
            }

            fn is_filled_lazily(&self) -> bool {
                true
            }
        }

        let region = Lazy(MmapRegion::new(PAGES * page_size()).unwrap());
        let block = RamBlock::new("lazy", Arc::new(region)).unwrap();
        assert_eq!(found(&block).len(), PAGES);
    }

    /// The answer of a file system that is asked byte by byte, not page by page.
    #[test]
    fn a_page_is_present_for_a_single_byte_of_data() {
        let file = File::from(memfd_create("short", MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&file, 1).unwrap();
        rustix::io::pwrite(&file, &[1], 0).unwrap();
        let file = FileOffset::new(file, 0);
        let data = pages_found(|words| in_file(&file, &(0..3), page_size(), words));
        assert_eq!(data, [0]);
    }

    fn anonymous() -> RamBlock {
        ram_block(MmapRegion::new(PAGES * page_size()).unwrap())
    }

    /// Looks for all of it at once and in parts, which is the same.
    fn found(block: &RamBlock) -> Vec<usize> {
        let ram = Ram::new(vec![block.clone()]).unwrap();
        let touched = Touched::new(mapping::backings(&ram));
        let find = |pages: Range<usize>| {
            let words = touched.find(&ram, 0, pages.clone());
            assert_eq!(words.len(), pages.len().div_ceil(64));
            pages_in(pages.start, &words).collect::<Vec<_>>()
        };
        let all = find(0..PAGES);
        let untouched = touched.untouched().load(Ordering::Relaxed);
        assert_eq!(untouched, (PAGES - all.len()) as u64);
        let parts = [0..64, 64..2048, 2048..PAGES].into_iter().flat_map(find);
        assert!(parts.eq(all.iter().copied()));
        all
    }

    fn pages_found(find: impl FnOnce(&mut [u64]) -> io::Result<()>) -> Vec<usize> {
        let mut words = [0; PAGES.div_ceil(64)];
        find(&mut words).unwrap();
        pages_in(0, &words).collect()
    }

    /// A block that begins at the fourth page of its file, which continues behind it.
    fn memfd() -> FileOffset {
        let file = File::from(memfd_create("ram", MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&file, ((PAGES + 10) * page_size()) as u64).unwrap();
        FileOffset::new(file, 3 * page_size() as u64)
    }

    fn map(file: &FileOffset, flags: i32) -> RamBlock {
        let builder = MmapRegionBuilder::new(PAGES * page_size())
            .with_file_offset(file.clone())
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(flags);
        ram_block(builder.build().unwrap())
    }

    #[allow(unsafe_code, reason = "advice for memory that a test has mapped")]
    fn ram_block(region: MmapRegion) -> RamBlock {
        let no_huge_pages = rustix::mm::Advice::LinuxNoHugepage;
        // SAFETY: it is mapped, and nothing in it changes.
        unsafe { rustix::mm::madvise(region.as_ptr().cast(), region.size(), no_huge_pages) }
            .unwrap();
        RamBlock::new("ram", Arc::new(region)).unwrap()
    }

    fn write(block: &RamBlock, page: usize) {
        let memory = block.memory();
        memory.write_obj(1_u8, page * page_size() + 99).unwrap();
    }

    fn read(block: &RamBlock, page: usize) {
        let byte: u8 = block.memory().read_obj(page * page_size()).unwrap();
        assert_eq!(byte, 0);
    }
}
