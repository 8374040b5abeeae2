//! Userfaultfd: what both kinds of it share, and asynchronous write protection: the kernel itself lifts the protection of a page that
//! is written, and no fault is ever delivered.

use std::{
    io,
    ops::Range,
    os::fd::{AsFd, OwnedFd},
};

use linux_raw_sys::{
    general::{
        UFFD_API, UFFD_FEATURE_PAGEFAULT_FLAG_WP, UFFD_FEATURE_WP_ASYNC,
        UFFD_FEATURE_WP_HUGETLBFS_SHMEM, UFFD_FEATURE_WP_UNPOPULATED, UFFD_USER_MODE_ONLY,
        UFFDIO_REGISTER_MODE_WP, uffdio_api, uffdio_range, uffdio_register, uffdio_writeprotect,
    },
    ioctl::{UFFDIO_API, UFFDIO_REGISTER, UFFDIO_UNREGISTER, UFFDIO_WAKE, UFFDIO_WRITEPROTECT},
};
use rustix::mm::{UserfaultfdFlags, userfaultfd};

/// An open userfaultfd. Closing it ends the protection of all memory that is registered with it.
#[derive(Debug)]
pub(crate) struct Userfaultfd(pub(super) OwnedFd);

/// Faults are for writes, also to shared memory, huge pages, and pages that are absent (PAGEMAP_SCAN requires it). The kernel lifts
/// the protection itself.
const FEATURES: u32 = UFFD_FEATURE_PAGEFAULT_FLAG_WP
    | UFFD_FEATURE_WP_HUGETLBFS_SHMEM
    | UFFD_FEATURE_WP_UNPOPULATED
    | UFFD_FEATURE_WP_ASYNC;

/// `UFFDIO_WRITEPROTECT_MODE_WP`.
const PROTECT: u64 = 1;

impl Userfaultfd {
    /// A userfaultfd for faults of user mode, which needs no privilege. The kernel's own writes for a process are found all the
    /// same: only faults that are delivered would have to be refused.
    ///
    /// # Errors
    /// `ENOSYS` if the kernel is built without, `EPERM` if a filter forbids it.
    pub(crate) fn open() -> io::Result<Self> {
        let flags = UserfaultfdFlags::CLOEXEC
            | UserfaultfdFlags::NONBLOCK
            | UserfaultfdFlags::from_bits_retain(UFFD_USER_MODE_ONLY);
        // SAFETY: the file descriptor is used by this module only, which documents the effect of each request.
        Ok(Self(unsafe { userfaultfd(flags) }?))
    }

    /// Chooses asynchronous write protection. Once, before anything else.
    ///
    /// # Errors
    /// `EINVAL` before Linux 6.7.
    pub(crate) fn choose_async_write_protection(&self) -> io::Result<()> {
        self.choose(FEATURES)
    }

    /// Registers `addresses` for write protection.
    pub(crate) fn register(&self, addresses: Range<usize>) -> io::Result<()> {
        self.register_for(UFFDIO_REGISTER_MODE_WP, &addresses)
            .map(drop)
    }

    /// Write-protects all of `addresses`, and marks absent pages, which allocates their page tables.
    pub(crate) fn write_protect(&self, addresses: Range<usize>) -> io::Result<()> {
        let mut argument = uffdio_writeprotect {
            range: range(&addresses),
            mode: PROTECT,
        };
        // SAFETY: the request takes this argument; the protection is asynchronous, so that writes get slower and
        // nothing else.
        unsafe { super::ioctl(self.0.as_fd(), UFFDIO_WRITEPROTECT, &mut argument) }.map(drop)
    }

    /// Undoes [`register`](Self::register), and any protection.
    pub(crate) fn unregister(&self, addresses: Range<usize>) -> io::Result<()> {
        let mut argument = range(&addresses);
        // SAFETY: the request takes this argument, and gives memory back its ordinary faults.
        unsafe { super::ioctl(self.0.as_fd(), UFFDIO_UNREGISTER, &mut argument) }?;
        // A thread that began to wait meanwhile has been seen to wait on.
        // SAFETY: the request takes this argument, and only wakes threads, which look at their page again.
        unsafe { super::ioctl(self.0.as_fd(), UFFDIO_WAKE, &mut argument) }.map(drop)
    }
}

impl Userfaultfd {
    /// Chooses `features`. Once, before anything else.
    pub(super) fn choose(&self, features: u32) -> io::Result<()> {
        let mut argument = uffdio_api {
            api: UFFD_API.into(),
            features: features.into(),
            ioctls: 0,
        };
        // SAFETY: the request takes this argument, and is about this file descriptor alone.
        unsafe { super::ioctl(self.0.as_fd(), UFFDIO_API, &mut argument) }.map(drop)
    }

    /// Registers `addresses` in this mode; returns a bit for each request that the memory allows.
    pub(super) fn register_for(&self, mode: u32, addresses: &Range<usize>) -> io::Result<u64> {
        let mut argument = uffdio_register {
            range: range(addresses),
            mode: mode.into(),
            ioctls: 0,
        };
        // SAFETY: the request takes this argument. Threads may wait for missing pages; nothing reads anything else than before.
        unsafe { super::ioctl(self.0.as_fd(), UFFDIO_REGISTER, &mut argument) }?;
        Ok(argument.ioctls)
    }
}

fn range(addresses: &Range<usize>) -> uffdio_range {
    uffdio_range {
        start: addresses.start as u64,
        len: addresses.len() as u64,
    }
}
