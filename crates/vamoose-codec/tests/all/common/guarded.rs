//! Memory that ends where a codec's slices end: C and assembly do not see Rust's bounds.

use std::{ptr, slice};

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

/// Most bytes of a [`Guarded`].
const ROOM: usize = 1 << 20;

const PAGE: usize = 4096;

/// Memory between two pages that cannot be touched.
pub(crate) struct Guarded(*mut u8);

impl Guarded {
    pub(crate) fn new() -> Self {
        let (all, none) = (ProtFlags::READ | ProtFlags::WRITE, MprotectFlags::empty());
        // SAFETY: a new mapping wherever there is room; its first and last page, which are unused,
        // are then closed.
        unsafe {
            let len = ROOM + 2 * PAGE;
            let at = mmap_anonymous(ptr::null_mut(), len, all, MapFlags::PRIVATE).unwrap();
            mprotect(at, PAGE, none).unwrap();
            mprotect(at.byte_add(ROOM + PAGE), PAGE, none).unwrap();
            Self(at.cast())
        }
    }

    /// `len` bytes at the start or the end of the memory.
    pub(crate) fn slice(&mut self, len: usize, at_end: bool) -> &mut [u8] {
        assert!(len <= ROOM);
        let skip = PAGE + if at_end { ROOM - len } else { 0 };
        // SAFETY: within the open part of the mapping, and borrowed from its only owner.
        unsafe { slice::from_raw_parts_mut(self.0.add(skip), len) }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length; the borrows of it have ended.
        unsafe { munmap(self.0.cast(), ROOM + 2 * PAGE) }.unwrap();
    }
}
