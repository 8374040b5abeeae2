//! Userfaultfd with asynchronous write protection: the kernel itself lifts the protection of a page that is
//! written; no fault is ever delivered.

use std::{
    io,
    ops::Range,
    os::fd::{AsFd, FromRawFd, OwnedFd},
};

use rustix::ioctl::{Opcode, opcode};

/// An open userfaultfd. Closing it ends the protection of all memory that is registered with it.
#[derive(Debug)]
pub(crate) struct Userfaultfd(OwnedFd);

/// `struct uffdio_api`.
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_range`.
#[repr(C)]
struct Addresses {
    start: u64,
    len: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
struct Register {
    range: Addresses,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_writeprotect`.
#[repr(C)]
struct WriteProtect {
    range: Addresses,
    mode: u64,
}

const UFFD_USER_MODE_ONLY: libc::c_int = 1;
const UFFD_API: u64 = 0xaa;

/// Faults are about writes; on shared memory too, and on huge pages.
const UFFD_FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
const UFFD_FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
/// Pages that are not there yet can be protected. PAGEMAP_SCAN insists on it.
const UFFD_FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
/// The kernel lifts the protection itself.
const UFFD_FEATURE_WP_ASYNC: u64 = 1 << 15;

const UFFDIO_API: Opcode = opcode::read_write::<Api>(0xaa, 0x3f);
const UFFDIO_REGISTER: Opcode = opcode::read_write::<Register>(0xaa, 0x00);
const UFFDIO_UNREGISTER: Opcode = opcode::read::<Addresses>(0xaa, 0x01);
const UFFDIO_WRITEPROTECT: Opcode = opcode::read_write::<WriteProtect>(0xaa, 0x06);
#[cfg(test)]
const MODE_MISSING: u64 = 1 << 0;
const MODE_WP: u64 = 1 << 1;
const WRITEPROTECT_MODE_WP: u64 = 1 << 0;

impl Userfaultfd {
    /// A userfaultfd for faults of user mode, which needs no privilege. Writes of the kernel on behalf of a
    /// process are found all the same: their faults would have to be refused only if they were
    /// delivered.
    ///
    /// # Errors
    /// `ENOSYS` if the kernel is built without, `EPERM` if a filter forbids it.
    pub(crate) fn open() -> io::Result<Self> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | UFFD_USER_MODE_ONLY;
        // SAFETY: the call takes flags and makes a file descriptor.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        match i32::try_from(fd) {
            // SAFETY: the kernel has just made it, and it has no other owner.
            Ok(fd) if fd >= 0 => Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) })),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Chooses asynchronous write protection. Once, before anything else.
    ///
    /// # Errors
    /// `EINVAL` before Linux 6.7.
    pub(crate) fn choose_async_write_protection(&self) -> io::Result<()> {
        let mut argument = Api {
            api: UFFD_API,
            features: UFFD_FEATURE_PAGEFAULT_FLAG_WP
                | UFFD_FEATURE_WP_HUGETLBFS_SHMEM
                | UFFD_FEATURE_WP_UNPOPULATED
                | UFFD_FEATURE_WP_ASYNC,
            ioctls: 0,
        };
        // SAFETY: the request takes this argument, and is about this file descriptor alone.
        unsafe { super::ioctl(self.0.as_fd(), UFFDIO_API, &mut argument) }.map(drop)
    }

    /// Registers `addresses` for write protection.
    pub(crate) fn register(&self, addresses: Range<usize>) -> io::Result<()> {
        let mut argument = Register {
            range: addresses.into(),
            mode: MODE_WP,
            ioctls: 0,
        };
        // SAFETY: the request takes this argument. No thread waits for a fault in this memory, since the
        // protection is asynchronous.
        unsafe { super::ioctl(self.0.as_fd(), UFFDIO_REGISTER, &mut argument) }.map(drop)
    }

    /// Makes threads that touch a missing page of `addresses` wait until it is filled.
    #[cfg(test)]
    pub(crate) fn register_missing(&self, addresses: Range<usize>) -> io::Result<()> {
        let mut argument = Register {
            range: addresses.into(),
            mode: MODE_MISSING,
            ioctls: 0,
        };
        // SAFETY: the request takes this argument. A test that touches such a page waits, and nothing else happens.
        unsafe { super::ioctl(self.0.as_fd(), UFFDIO_REGISTER, &mut argument) }.map(drop)
    }

    /// Write-protects all of `addresses`, and marks absent pages, which allocates their page tables.
    pub(crate) fn write_protect(&self, addresses: Range<usize>) -> io::Result<()> {
        let mut argument = WriteProtect {
            range: addresses.into(),
            mode: WRITEPROTECT_MODE_WP,
        };
        // SAFETY: the request takes this argument; the protection is asynchronous, so that writes get slower and
        // nothing else.
        unsafe { super::ioctl(self.0.as_fd(), UFFDIO_WRITEPROTECT, &mut argument) }.map(drop)
    }

    /// Undoes [`register`](Self::register), and any protection.
    pub(crate) fn unregister(&self, addresses: Range<usize>) -> io::Result<()> {
        let mut argument = Addresses::from(addresses);
        // SAFETY: the request takes this argument, and gives memory back its ordinary faults.
        unsafe { super::ioctl(self.0.as_fd(), UFFDIO_UNREGISTER, &mut argument) }.map(drop)
    }
}

impl From<Range<usize>> for Addresses {
    fn from(range: Range<usize>) -> Self {
        Self {
            start: range.start as u64,
            len: range.len() as u64,
        }
    }
}
