//! Memory that was never touched, found without touching it.
//!
//! Reading an untouched page makes the kernel allocate or map one, so that a scan for zeros costs as much as the
//! memory that it looks for is not worth. What there is instead depends on the kind of memory:
//!
//! | memory | asked | may hold something |
//! |---|---|---|
//! | private, anonymous | PAGEMAP_SCAN, before Linux 6.7 /proc/self/pagemap | pages in memory or swapped, but not the shared page of zeros |
//! | shared mapping of a memfd or file in tmpfs | the file, for its holes | what the file has data for, through any mapping |
//! | filled when it is touched, by a userfaultfd or the VMM | nothing | everything |
//! | anything else | nothing | everything |

use std::{io, ops::Range};

use rustix::{
    fs::{SeekFrom, seek},
    io::Errno,
};
use vm_memory::FileOffset;

use crate::{
    Bitmap, RamBlock,
    mapping::Backing,
    sys::pagemap::{Found, PRESENT, Pagemap, Query, SWAPPED, ZERO},
};

/// The pages of `block`, which is memory of the kind `backing`, that may hold something other than zeros. All of them
/// if there is no way to know.
///
/// A page that is written for the first time while this looks is in the result or not; the dirty log, which has
/// to be started before, has it.
pub(crate) fn present(block: &RamBlock, backing: Backing, page_size: usize) -> Bitmap {
    let pages = block.len() / page_size;
    let asked = match (backing, block.file()) {
        (Backing::Anonymous { .. }, _) => in_page_tables(block, page_size),
        // In tmpfs the pages that are mapped are the file. Elsewhere the answer may come from a server or a disk
        // without the latest writes; hugetlbfs has no answer.
        (Backing::SharedFile, Some(file)) => in_file(file, pages, page_size),
        _ => Ok(whole(pages)),
    };
    asked.unwrap_or_else(|error| {
        tracing::warn!(
            block = %block.name(), %error,
            "cannot tell which pages were ever touched: all are read"
        );
        whole(pages)
    })
}

fn whole(pages: usize) -> Bitmap {
    let mut bitmap = Bitmap::new(pages);
    bitmap.set_range(0, pages);
    bitmap
}

fn in_page_tables(block: &RamBlock, page_size: usize) -> io::Result<Bitmap> {
    let pagemap = Pagemap::open()?;
    match by_scan(&pagemap, block, page_size) {
        Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => {
            by_entries(&pagemap, block, page_size)
        }
        scanned => scanned,
    }
}

fn by_scan(pagemap: &Pagemap, block: &RamBlock, page_size: usize) -> io::Result<Bitmap> {
    let mut present = Bitmap::new(block.len() / page_size);
    let query = Query {
        any: PRESENT | SWAPPED,
        none: ZERO,
        ..Query::default()
    };
    let addresses = addresses(block);
    let start = addresses.start;
    pagemap.scan(addresses, query, &mut Found::new(), |run| {
        present.set_range((run.start - start) / page_size, run.len() / page_size);
    })?;
    Ok(present)
}

fn by_entries(pagemap: &Pagemap, block: &RamBlock, page_size: usize) -> io::Result<Bitmap> {
    let mut present = Bitmap::new(block.len() / page_size);
    let addresses = addresses(block);
    let start = addresses.start;
    pagemap.populated(addresses, page_size, |page| {
        present.set((page.start - start) / page_size);
    })?;
    Ok(present)
}

/// Moves the position of the file, which means nothing to a file that is mapped.
fn in_file(file: &FileOffset, pages: usize, page_size: usize) -> io::Result<Bitmap> {
    let mut present = Bitmap::new(pages);
    let page = |offset: u64| {
        let page = (offset - file.start()) / page_size as u64;
        usize::try_from(page).unwrap_or(pages).min(pages)
    };
    let end = file.start() + (pages * page_size) as u64;
    let mut offset = file.start();
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
        let until = page(hole.saturating_add(page_size as u64 - 1));
        present.set_range(page(data), until - page(data));
        // A hole right where there was data is a race with another thread that punches it: continue behind it.
        offset = hole.max(data + 1);
    }
    Ok(present)
}

fn addresses(block: &RamBlock) -> Range<usize> {
    block.address()..block.address() + block.len()
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
    use crate::{Ram, Region, mapping, sys::userfaultfd::Userfaultfd};

    /// Not a multiple of 64, and enough for several page tables.
    const PAGES: usize = 5000;
    const WRITTEN: [usize; 6] = [0, 1, 64, 511, 2048, PAGES - 1];

    #[test]
    fn anonymous_memory_has_what_was_written() {
        let block = anonymous();
        assert_eq!(found(&block).count(), 0);
        // An untouched page that was looked for is still untouched, and one that was read holds zeros.
        read(&block, 17);
        read(&block, 3000);
        assert_eq!(found(&block).count(), 0);
        WRITTEN.iter().for_each(|&page| write(&block, page));
        assert!(found(&block).iter().eq(WRITTEN));
    }

    #[test]
    fn a_kernel_without_pagemap_scan_says_the_same() {
        let block = anonymous();
        WRITTEN.iter().for_each(|&page| write(&block, page));
        let pagemap = Pagemap::open().unwrap();
        let entries = by_entries(&pagemap, &block, page_size()).unwrap();
        assert_eq!(entries, by_scan(&pagemap, &block, page_size()).unwrap());
        // It cannot identify the shared page of zeros, and is on the safe side.
        read(&block, 17);
        assert!(by_entries(&pagemap, &block, page_size()).unwrap().get(17));
    }

    #[test]
    fn a_memfd_has_what_anybody_wrote() {
        let file = memfd();
        let (block, elsewhere) = (map(&file, libc::MAP_SHARED), map(&file, libc::MAP_SHARED));
        assert_eq!(found(&block).count(), 0);
        for (nth, &page) in WRITTEN.iter().enumerate() {
            write([&block, &elsewhere][nth % 2], page);
        }
        assert!(found(&block).iter().eq(WRITTEN));
        // Written without a mapping: right before the block in its file, its tenth page, right behind it.
        for page in [2, 3 + 10, 3 + PAGES] {
            rustix::io::pwrite(file.file(), &[1], (page * page_size()) as u64).unwrap();
        }
        let mut expected = WRITTEN.to_vec();
        expected.insert(2, 10);
        assert!(found(&block).iter().eq(expected));
    }

    #[test]
    fn memory_that_nothing_is_known_of_is_present() {
        let shared_without_a_file = MmapRegionBuilder::new(PAGES * page_size())
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        for block in [
            map(&memfd(), libc::MAP_PRIVATE),
            ram_block(shared_without_a_file.build().unwrap()),
        ] {
            assert_eq!(found(&block).count(), PAGES);
        }
    }

    #[test]
    fn memory_that_is_filled_when_it_is_touched_is_present() {
        let opened = Userfaultfd::open().and_then(|userfaultfd| {
            userfaultfd.choose_async_write_protection()?;
            Ok(userfaultfd)
        });
        let userfaultfd = match opened {
            Ok(userfaultfd) => userfaultfd,
            Err(error) => return lab::skipped(&format!("userfaultfd: {error}")).unwrap(),
        };
        for block in [anonymous(), map(&memfd(), libc::MAP_SHARED)] {
            let registered = userfaultfd.register_missing(addresses(&block));
            registered.unwrap();
            assert_eq!(found(&block).count(), PAGES);
        }
    }

    #[test]
    fn memory_that_the_vmm_fills_when_it_is_touched_is_present() {
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
        assert_eq!(found(&block).count(), PAGES);
    }

    /// The answer of a file system that is asked byte by byte, not page by page.
    #[test]
    fn a_page_is_present_for_a_single_byte_of_data() {
        let file = File::from(memfd_create("short", MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&file, 1).unwrap();
        rustix::io::pwrite(&file, &[1], 0).unwrap();
        let data = in_file(&FileOffset::new(file, 0), 3, page_size()).unwrap();
        assert!(data.iter().eq([0]));
    }

    fn anonymous() -> RamBlock {
        ram_block(MmapRegion::new(PAGES * page_size()).unwrap())
    }

    fn found(block: &RamBlock) -> Bitmap {
        let ram = Ram::new(vec![block.clone()]).unwrap();
        present(block, mapping::backings(&ram)[0], page_size())
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
