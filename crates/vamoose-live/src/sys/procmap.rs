//! The page size of a mapping of this process, without a visit to its pages: PROCMAP_QUERY.

use std::{fs::File, io, os::fd::AsFd};

use linux_raw_sys::general::procmap_query;
use rustix::ioctl::{Opcode, opcode};

/// An open /proc/self/maps.
#[derive(Debug)]
pub(crate) struct Procmap(File);

const PROCMAP_QUERY: Opcode = opcode::read_write::<procmap_query>(b'f', 17);

impl Procmap {
    pub(crate) fn open() -> io::Result<Self> {
        File::open("/proc/self/maps").map(Self)
    }

    /// The size of pages of the mapping at `address`, as smaps has it in `KernelPageSize`.
    ///
    /// # Errors
    /// `ENOTTY` before Linux 6.11, `ENOENT` if nothing is mapped there.
    pub(crate) fn page_size(&self, address: usize) -> io::Result<u64> {
        // SAFETY: the structure consists of integers.
        let mut query: procmap_query = unsafe { std::mem::zeroed() };
        query.size = size_of_val(&query) as u64;
        query.query_addr = address as u64;
        // SAFETY: the request takes this argument. No name and no build id are wanted: their sizes are 0.
        unsafe { super::ioctl(self.0.as_fd(), PROCMAP_QUERY, &mut query) }?;
        Ok(query.vma_page_size)
    }
}
