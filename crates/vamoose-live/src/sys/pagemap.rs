//! The page tables of this process, through /proc/self/pagemap.

use std::{
    fs::File,
    io,
    ops::Range,
    os::{fd::AsFd, unix::fs::FileExt},
};

use linux_raw_sys::general::{
    PAGE_IS_PFNZERO, PAGE_IS_PRESENT, PAGE_IS_SWAPPED, PAGE_IS_WRITTEN, PM_SCAN_CHECK_WPASYNC,
    PM_SCAN_WP_MATCHING, page_region, pm_scan_arg,
};
use rustix::ioctl::{Opcode, opcode};

/// Properties of a page: a set of the flags below.
pub(crate) type Categories = u32;

/// Not write-protected by userfaultfd, so written since it was protected. Also set for an absent page.
pub(crate) const WRITTEN: Categories = PAGE_IS_WRITTEN;
/// In the page table: present, or anything else that has an entry (swapped, migrating, a mark that it is write-protected).
pub(crate) const POPULATED: Categories = PAGE_IS_PRESENT | PAGE_IS_SWAPPED;
/// The page of zeros that all processes share.
pub(crate) const ZERO: Categories = PAGE_IS_PFNZERO;

/// An open /proc/self/pagemap.
#[derive(Debug)]
pub(crate) struct Pagemap(File);

/// Which pages to find: those with all flags of `all`, none of `none` and, unless it is empty, one of `any`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Query {
    pub(crate) all: Categories,
    pub(crate) any: Categories,
    pub(crate) none: Categories,
    /// Also write-protect the pages that are found, atomically with the search. Only for memory registered with
    /// a userfaultfd in asynchronous mode: anything else is an error.
    pub(crate) write_protect: bool,
}

/// The kernel's output buffer, which is reused.
pub(crate) struct Found(Vec<page_region>);

const PAGEMAP_SCAN: Opcode = opcode::read_write::<pm_scan_arg>(b'f', 16);

/// Bytes of a page's entry in the file.
const ENTRY_BYTES: usize = 8;
const ENTRY_SWAPPED: u64 = 1 << 62;
const ENTRY_PRESENT: u64 = 1 << 63;

impl Found {
    /// A buffer for what one call may find: 24 KiB, so that the cost of a call is small beside its work.
    pub(crate) fn new() -> Self {
        let empty = page_region {
            start: 0,
            end: 0,
            categories: 0,
        };
        Self(vec![empty; 1024])
    }
}

impl Pagemap {
    pub(crate) fn open() -> io::Result<Self> {
        File::open("/proc/self/pagemap").map(Self)
    }

    /// Calls `each` with the addresses of every run of pages in `addresses` that `query` matches, in their order.
    ///
    /// # Errors
    /// `ENOTTY` before Linux 6.7. With [`Query::write_protect`], some pages may have been protected without being reported.
    pub(crate) fn scan(
        &self,
        addresses: Range<usize>,
        query: Query,
        found: &mut Found,
        mut each: impl FnMut(Range<usize>),
    ) -> io::Result<()> {
        let (mut start, end) = (addresses.start as u64, addresses.end as u64);
        while start < end {
            let mut argument = pm_scan_arg {
                size: size_of::<pm_scan_arg>() as u64,
                flags: if query.write_protect {
                    (PM_SCAN_WP_MATCHING | PM_SCAN_CHECK_WPASYNC).into()
                } else {
                    0
                },
                start,
                end,
                walk_end: 0,
                vec: found.0.as_mut_ptr().addr() as u64,
                vec_len: found.0.len() as u64,
                max_pages: 0,
                category_inverted: query.none.into(),
                category_mask: (query.all | query.none).into(),
                category_anyof_mask: query.any.into(),
                return_mask: (query.all | query.any).into(),
            };
            // SAFETY: the request takes this argument. The kernel writes at most `vec_len` regions to `vec`, which
            // is as long and is borrowed exclusively. Protecting pages makes writes to them slower,
            // and changes nothing else, because only memory with asynchronous protection is accepted.
            let count = unsafe { super::ioctl(self.0.as_fd(), PAGEMAP_SCAN, &mut argument) }?;
            for region in &found.0[..(count as usize).min(found.0.len())] {
                each(address(region.start)..address(region.end));
            }
            // It stops early when the vector is full, and never without progress.
            if argument.walk_end <= start {
                return Err(io::Error::other("PAGEMAP_SCAN makes no progress"));
            }
            start = argument.walk_end;
        }
        Ok(())
    }

    /// Calls `each` for every page of `addresses` that is present or swapped, also on kernels without PAGEMAP_SCAN.
    /// The shared page of zeros cannot be distinguished from others.
    pub(crate) fn populated(
        &self,
        addresses: Range<usize>,
        page_size: usize,
        mut each: impl FnMut(Range<usize>),
    ) -> io::Result<()> {
        let mut buffer = vec![0; 64 << 10];
        let mut page = addresses.start;
        while page < addresses.end {
            let wanted = (addresses.end - page) / page_size * ENTRY_BYTES;
            let entries = &mut buffer[..wanted.min(64 << 10)];
            let offset = (page / page_size * ENTRY_BYTES) as u64;
            self.0.read_exact_at(entries, offset)?;
            for entry in entries.as_chunks().0 {
                if u64::from_ne_bytes(*entry) & (ENTRY_PRESENT | ENTRY_SWAPPED) != 0 {
                    each(page..page + page_size);
                }
                page += page_size;
            }
        }
        Ok(())
    }
}

#[allow(
    clippy::cast_possible_truncation,
    reason = "an address of this process, that the kernel was given as usize"
)]
fn address(value: u64) -> usize {
    value as usize
}
