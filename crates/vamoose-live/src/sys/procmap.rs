//! A question about one mapping of this process, without a visit to its pages: PROCMAP_QUERY.

use std::{fs::File, io, os::fd::AsFd};

use rustix::ioctl::{Opcode, opcode};

/// An open /proc/self/maps.
#[derive(Debug)]
pub(crate) struct Procmap(File);

/// `struct procmap_query`.
#[derive(Default)]
#[repr(C)]
struct Query {
    size: u64,
    query_flags: u64,
    query_address: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_address: u64,
    build_id_address: u64,
}

const PROCMAP_QUERY: Opcode = opcode::read_write::<Query>(b'f', 17);

impl Procmap {
    pub(crate) fn open() -> io::Result<Self> {
        File::open("/proc/self/maps").map(Self)
    }

    /// The size of pages of the mapping at `address`, as smaps has it in `KernelPageSize`.
    ///
    /// # Errors
    /// `ENOTTY` before Linux 6.11, `ENOENT` if nothing is mapped there.
    pub(crate) fn page_size(&self, address: usize) -> io::Result<u64> {
        let mut query = Query {
            size: size_of::<Query>() as u64,
            query_address: address as u64,
            ..Query::default()
        };
        // SAFETY: the request takes this argument. No name and no build id are wanted: their sizes are 0.
        unsafe { super::ioctl(self.0.as_fd(), PROCMAP_QUERY, &mut query) }?;
        Ok(query.vma_page_size)
    }
}
