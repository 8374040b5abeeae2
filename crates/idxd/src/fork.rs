//! Tells the process that opened a work queue from its forked children.
//!
//! The device works in the address space of the process that opened the queue, and a forked child gets no copy of the
//! portal. So a child must use neither. A page that the kernel clears in the child distinguishes the two processes at the
//! price of a load; a process id takes a system call, and can be reused.

use std::{
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::{
    io::Errno,
    mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap},
};

const PAGE: usize = 4096;
const HERE: u64 = 1;

/// A mark that is cleared in a forked child.
#[derive(Debug)]
pub(crate) struct Mark {
    page: NonNull<AtomicU64>,
}

// SAFETY: the page belongs to no thread.
unsafe impl Send for Mark {}
// SAFETY: it is an atomic.
unsafe impl Sync for Mark {}

impl Mark {
    pub(crate) fn new() -> Result<Self, Errno> {
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let page = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            mmap_anonymous(std::ptr::null_mut(), PAGE, protection, MapFlags::PRIVATE)?
        };
        let mark = Self {
            page: NonNull::new(page.cast()).ok_or(Errno::INVAL)?,
        };
        // SAFETY: the mapping is this value's own; the advice changes it in a child only.
        unsafe { madvise(page, PAGE, Advice::LinuxWipeOnFork)? };
        mark.word().store(HERE, Ordering::Relaxed);
        Ok(mark)
    }

    /// Whether this process was forked from the one that made the mark.
    pub(crate) fn is_of_a_parent(&self) -> bool {
        self.word().load(Ordering::Relaxed) != HERE
    }

    fn word(&self) -> &AtomicU64 {
        // SAFETY: mapped as long as `self` is, aligned, and all zeros are a valid value.
        unsafe { self.page.as_ref() }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, here or in the parent, and no one has a reference to it. An error would mean
        // that it is not mapped, which does no harm.
        let _ = unsafe { munmap(self.page.as_ptr().cast(), PAGE) };
    }
}

#[cfg(test)]
impl Mark {
    /// As the kernel does in a child.
    pub(crate) fn wipe(&mut self) {
        self.word().store(0, Ordering::Relaxed);
    }
}
