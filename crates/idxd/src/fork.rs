//! Tells the process that opened a work queue from its forked children.
//!
//! The device works in the address space of the process that opened the queue, and a forked child gets no copy of the
//! portal. So a child must use neither. A page that the kernel clears in the child distinguishes the two processes at the
//! price of a load; a process id takes a system call, and can be reused.

use std::{
    ptr::{self, NonNull},
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::{
    io::Errno,
    mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap},
};

/// A mark that is cleared in a forked child.
#[derive(Debug)]
pub(crate) struct Mark {
    page: Mapping,
}

const PAGE: usize = 4096;
const HERE: u64 = 1;

impl Mark {
    pub(crate) fn new() -> Result<Self, Errno> {
        let page = Mapping::new(PAGE, Advice::LinuxWipeOnFork)?;
        let mark = Self { page };
        mark.word().store(HERE, Ordering::Relaxed);
        Ok(mark)
    }

    /// Whether this process was forked from the one that made the mark.
    pub(crate) fn is_in_child(&self) -> bool {
        self.word().load(Ordering::Relaxed) != HERE
    }

    pub(crate) fn word(&self) -> &AtomicU64 {
        // SAFETY: mapped as long as `self` is, aligned, and all zeros are a valid value.
        unsafe { self.page.start.cast().as_ref() }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.page.unmap();
    }
}

/// Populated anonymous memory. Dropping it does not unmap it; its owner does.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub(crate) start: NonNull<u8>,
    pub(crate) bytes: usize,
}

// SAFETY: plain memory, to which its owner controls access.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes` bytes of zeros. `in_child` says what a forked child has in their place.
    pub(crate) fn new(bytes: usize, in_child: Advice) -> Result<Self, Errno> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), bytes, protection, flags) }?;
        let mut mapping = Self {
            start: NonNull::new(start.cast()).ok_or(Errno::NOMEM)?,
            bytes,
        };
        // SAFETY: the mapping's own range, to which nothing refers yet.
        let advised = unsafe { madvise(start, bytes, in_child) };
        if let Err(error) = advised {
            mapping.unmap();
            return Err(error);
        }
        Ok(mapping)
    }

    /// Called once, when nothing refers to the memory any more.
    pub(crate) fn unmap(&mut self) {
        // SAFETY: the mapping's own range, once; its owner is being dropped, or nothing has ever used it.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert_eq!(unmapped, Ok(()), "a range that was mapped");
    }
}
