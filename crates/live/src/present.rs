//! Memory that was never touched, found without touching it.
//!
//! Reading an untouched page makes the kernel allocate or map one, so that a scan for zeros costs as much as the
//! memory that it looks for is not worth. What there is instead depends on the kind of memory:
//!
//! | memory | asked | may hold something |
//! |---|---|---|
//! | private, anonymous | PAGEMAP_SCAN, before Linux 6.7 /proc/self/pagemap | pages in memory or swapped, but not the shared page of zeros |
//! | shared mapping of a memfd or file in tmpfs | the file, for its holes | what the file has data for, whoever wrote it |
//! | anything else | nothing | everything |

use std::{io, ops::Range};

use rustix::{
    fs::{SeekFrom, fstatfs, seek},
    io::Errno,
};
use vm_memory::FileOffset;

use crate::{
    Bitmap, RamBlock,
    mapping::{Backing, backing},
    sys::pagemap::{Found, PRESENT, Pagemap, Query, SWAPPED, ZERO},
};

/// `f_type` of tmpfs, which is also where memfds are.
const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;

/// The pages of `block` that may hold something other than zeros. All of them if there is no way to know.
///
/// A page that is written for the first time while this looks is in the result or not; the dirty log, which has to be started
/// before, has it.
pub(crate) fn present(block: &RamBlock, page_size: usize) -> Bitmap {
    let pages = block.len() / page_size;
    let asked = backing(block).and_then(|backing| match (backing, block.file()) {
        (Backing::Anonymous, _) => in_page_tables(block, page_size),
        (Backing::SharedFile, Some(file)) => in_file(file, pages, page_size),
        _ => Ok(whole(pages)),
    });
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
    // In tmpfs the pages that are mapped are the file. Elsewhere the answer may come from a server or a disk that
    // has not heard of the latest writes; hugetlbfs has no answer.
    if fstatfs(file.file())?.f_type != TMPFS_MAGIC {
        return Ok(whole(pages));
    }
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
        // A hole right where there was data would be a race with somebody who punches it: go on behind.
        offset = hole.max(data + 1);
    }
    Ok(present)
}

fn addresses(block: &RamBlock) -> Range<usize> {
    block.address()..block.address() + block.len()
}
