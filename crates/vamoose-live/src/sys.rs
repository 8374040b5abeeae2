//! System calls for which there is no crate: userfaultfd's asynchronous write protection, PAGEMAP_SCAN, PROCMAP_QUERY, KVM's
//! dirty logs on file descriptors of the VMM. Also what reads and gives back guest memory by address.

#![allow(
    unsafe_code,
    reason = "ioctls take addresses; each call has its proof at the block"
)]

pub(crate) mod faults;
pub(crate) mod kvm;
pub(crate) mod memory;
pub(crate) mod pagemap;
pub(crate) mod procmap;
pub(crate) mod userfaultfd;

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

use rustix::ioctl::Opcode;

/// `ioctl(2)` with an argument by reference; returns its (non-negative) result.
///
/// # Safety
/// `request` must be one whose argument is a `T`, read and perhaps written by the kernel, and which is sound for what
/// the argument refers to.
unsafe fn ioctl<T>(fd: BorrowedFd<'_>, request: Opcode, argument: &mut T) -> io::Result<u32> {
    // SAFETY: the argument is a live, exclusive reference of the type that the request takes, as the caller
    // promises.
    let result = unsafe {
        libc::ioctl(
            fd.as_raw_fd(),
            request as libc::Ioctl,
            std::ptr::from_mut(argument),
        )
    };
    u32::try_from(result).map_err(|_| io::Error::last_os_error())
}
