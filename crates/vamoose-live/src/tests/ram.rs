//! Guest memory of every kind, for unit tests.

use std::{fs::File, sync::Arc};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vm_memory::{FileOffset, MmapRegion, VolatileSlice, mmap::MmapRegionBuilder};

use crate::{Ram, RamBlock, Region};

pub(crate) const HUGE_PAGE: usize = 2 << 20;

pub(crate) fn anonymous(len: usize) -> Ram {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    ram("ram", map(len, flags).unwrap())
}

/// Blocks of these lengths.
pub(crate) fn blocks(lens: impl Iterator<Item = usize>) -> Ram {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let blocks = lens.enumerate().map(|(number, len)| {
        RamBlock::new(&format!("ram{number}"), Arc::new(map(len, flags).unwrap())).unwrap()
    });
    Ram::new(blocks.collect()).unwrap()
}

/// Addresses only: memory of any length, of which few pages are touched.
pub(crate) fn reserved(len: usize) -> Ram {
    blocks(std::iter::once(len))
}

pub(crate) fn shared_anonymous(len: usize) -> Ram {
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    ram("shared anonymous", map(len, flags).unwrap())
}

pub(crate) fn memfd(len: usize) -> Ram {
    let file = file(len, MemfdFlags::CLOEXEC);
    ram("memfd", map_file(&file, len, libc::MAP_SHARED).unwrap())
}

/// A shared mapping of a memfd of which the VMM has no file descriptor any more.
pub(crate) fn closed_memfd(len: usize) -> Ram {
    let file = file(len, MemfdFlags::CLOEXEC);
    let region = map_file(&file, len, libc::MAP_SHARED).unwrap();
    ram("closed memfd", NoFile(region))
}

/// A private mapping of a file that is full of bytes other than zero; the VMM names the file if `named`.
pub(crate) fn private_file(len: usize, named: bool) -> Ram {
    let file = file(len, MemfdFlags::CLOEXEC);
    rustix::io::pwrite(file.file(), &vec![0x11; len], 0).unwrap();
    let region = map_file(&file, len, libc::MAP_PRIVATE).unwrap();
    if named {
        ram("private file", region)
    } else {
        ram("unnamed private file", NoFile(region))
    }
}

/// The two kinds of memory in huge pages of 2 MiB: private, and a memfd. None where the host has too few: skipped then.
pub(crate) fn in_huge_pages(len: usize) -> Vec<Ram> {
    let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let (private, memfd) = (
        map(len, private),
        map_file(&file(len, flags), len, libc::MAP_SHARED),
    );
    let (Some(private), Some(memfd)) = (private, memfd) else {
        let pages = 2 * len / HUGE_PAGE;
        lab::skipped(&format!(
            "needs {pages} free huge pages of 2 MiB (vm.nr_hugepages)"
        ))
        .unwrap();
        return Vec::new();
    };
    vec![
        ram("private huge pages", private),
        ram("memfd of huge pages", memfd),
    ]
}

fn ram(name: &str, region: impl Region + 'static) -> Ram {
    Ram::new(vec![RamBlock::new(name, Arc::new(region)).unwrap()]).unwrap()
}

fn file(len: usize, flags: MemfdFlags) -> FileOffset {
    let file = File::from(memfd_create("ram", flags).unwrap());
    ftruncate(&file, len as u64).unwrap();
    FileOffset::new(file, 0)
}

fn map(len: usize, flags: i32) -> Option<MmapRegion> {
    build(MmapRegionBuilder::new(len), flags)
}

fn map_file(file: &FileOffset, len: usize, flags: i32) -> Option<MmapRegion> {
    build(
        MmapRegionBuilder::new(len).with_file_offset(file.clone()),
        flags,
    )
}

fn build(builder: MmapRegionBuilder, flags: i32) -> Option<MmapRegion> {
    let builder = builder.with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE);
    builder.with_mmap_flags(flags).build().ok()
}

/// A mapping whose file the VMM does not name.
struct NoFile(MmapRegion);

impl Region for NoFile {
    fn memory(&self) -> VolatileSlice<'_> {
        self.0.memory()
    }

    fn file(&self) -> Option<&FileOffset> {
        None
    }
}
