//! The mapped portal: one ENQCMD for each descriptor, no system call.

use std::{
    fs::File,
    io,
    ptr::NonNull,
    sync::atomic::{AtomicUsize, Ordering},
};

use rustix::{
    io::Errno,
    mm::{MapFlags, ProtFlags, mmap, munmap},
};

use super::{Transport, instructions};
use crate::{Descriptor, Refusal, Submitted};

/// The driver maps one page: the limited portal.
const PAGE: usize = 4096;
/// A descriptor.
const STEP: usize = size_of::<Descriptor>();

/// A work queue's portal in this process's memory.
#[derive(Debug)]
pub(super) struct Mapped {
    page: NonNull<u8>,
    /// Index of the next address to write to. Any address of the page works, but writes to the same one might combine.
    next: AtomicUsize,
}

// SAFETY: the page belongs to no thread, and the device takes descriptors from several at once.
unsafe impl Send for Mapped {}
// SAFETY: as above; the place to write is taken by an atomic.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// Maps the portal of `file`; `None` if the kernel forbids it. The mapping keeps the queue open when the file is closed.
    pub(super) fn of(file: &File) -> io::Result<Option<Self>> {
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let page =
            match unsafe { mmap(std::ptr::null_mut(), PAGE, ProtFlags::WRITE, flags, file, 0) } {
                Err(Errno::PERM) => return Ok(None),
                page => page?,
            };
        let page = NonNull::new(page.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Some(Self {
            page,
            next: AtomicUsize::new(0),
        }))
    }

    /// Reserves `count` addresses, and returns the index of the first one.
    fn places(&self, count: usize) -> usize {
        self.next.fetch_add(count, Ordering::Relaxed)
    }

    fn place(&self, index: usize) -> *mut u8 {
        let offset = index.wrapping_mul(STEP) % PAGE;
        // SAFETY: within the page.
        unsafe { self.page.as_ptr().add(offset) }
    }
}

impl Transport for Mapped {
    unsafe fn submit(&self, descriptors: &[Descriptor]) -> Submitted {
        // The memory that the descriptors refer to must be visible before the descriptors.
        instructions::sfence();
        let first = self.places(descriptors.len());
        for (index, descriptor) in descriptors.iter().enumerate() {
            let place = self.place(first.wrapping_add(index));
            // SAFETY: `open` has checked for the instruction; the place is aligned and within the portal,
            // which is mapped as long as `self` is; the rest is the caller's promise.
            if !unsafe { instructions::enqcmd(place, descriptor) } {
                return Submitted {
                    accepted: index,
                    refusal: Some(Refusal::Full),
                };
            }
        }
        Submitted {
            accepted: descriptors.len(),
            refusal: None,
        }
    }

    fn abandon(self: Box<Self>) {
        // The child has no copy of the mapping (VM_DONTCOPY); another mapping may be at its address.
        std::mem::forget(self);
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the page was mapped by `of`, and no one has a reference to it. An error would mean that it is
        // not mapped, which does no harm.
        let _ = unsafe { munmap(self.page.as_ptr().cast(), PAGE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_portal_comes_and_goes() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(PAGE as u64).unwrap();
        let mapped = Mapped::of(&file).unwrap().unwrap();
        let first = mapped.places(63);
        let places: Vec<usize> = (first..first + 65)
            .map(|index| mapped.place(index) as usize)
            .collect();
        let page = mapped.page.as_ptr() as usize;
        assert!(
            places
                .iter()
                .all(|place| place % STEP == 0 && (page..page + PAGE).contains(place))
        );
        assert_eq!((places[1] - places[0], places[64]), (STEP, places[0]));
        assert_eq!(mapped.places(1), 63);
    }

    #[test]
    fn the_kernel_may_forbid_it() {
        use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

        // A sealed file is refused with the driver's own EPERM.
        let file = memfd_create("portal", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        let file = File::from(file);
        file.set_len(PAGE as u64).unwrap();
        fcntl_add_seals(&file, SealFlags::WRITE).unwrap();
        assert!(Mapped::of(&file).unwrap().is_none());
    }

    #[test]
    fn a_failed_mapping_reports_the_error() {
        let error = Mapped::of(&File::open("/dev/null").unwrap()).unwrap_err();
        assert!(error.raw_os_error().is_some());
        let read_only = File::open("/proc/self/exe").unwrap();
        let error = Mapped::of(&read_only).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    }
}
