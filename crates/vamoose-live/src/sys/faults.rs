//! Userfaultfd for missing pages: a thread that touches one waits until it is filled.

use std::{
    fs::OpenOptions,
    io,
    ops::Range,
    os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd},
};

use linux_raw_sys::{
    general::{
        UFFD_EVENT_PAGEFAULT, UFFDIO_REGISTER_MODE_MISSING, uffdio_copy, uffdio_range,
        uffdio_zeropage,
    },
    ioctl::{UFFDIO_COPY, UFFDIO_WAKE, UFFDIO_ZEROPAGE},
};
use rustix::mm::{UserfaultfdFlags, userfaultfd};
use vm_memory::VolatileSlice;

use super::userfaultfd::Userfaultfd;

/// A userfaultfd that delivers the faults of missing pages, those of the kernel as well: KVM touches guest memory from there.
/// When it is closed, missing pages read as zeros.
#[derive(Debug)]
pub(crate) struct Faults(Userfaultfd);

/// `USERFAULTFD_IOC_NEW` of /dev/userfaultfd (Linux 6.1).
const NEW: libc::Ioctl = 0xaa00;

/// `struct uffd_msg`: the kind of event is its first byte; the address of a page fault is at 16.
const EVENT_LEN: usize = 32;
const ADDRESS: Range<usize> = 16..24;

/// Events that are read at a time.
const EVENTS: usize = 64;

impl Faults {
    /// # Errors
    /// `EPERM` if this process may not: it takes `vm.unprivileged_userfaultfd`, `CAP_SYS_PTRACE` or access to /dev/userfaultfd.
    pub(crate) fn open() -> io::Result<Self> {
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
        // SAFETY: the file descriptor is used by this module only, which documents the effect of each request.
        let faults = match unsafe { userfaultfd(flags) } {
            Ok(fd) => fd,
            Err(error) => Self::from_device(flags).map_err(|_| error)?,
        };
        let faults = Self(Userfaultfd(faults));
        faults.0.choose(0)?;
        Ok(faults)
    }

    fn from_device(flags: UserfaultfdFlags) -> io::Result<OwnedFd> {
        use std::os::fd::AsRawFd;
        let device = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/userfaultfd")?;
        // SAFETY: the request takes flags, and makes a file descriptor.
        let fd = unsafe { libc::ioctl(device.as_raw_fd(), NEW, flags.bits()) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: it is new, and nobody else's.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// From here on, a thread that touches a missing page of `addresses` waits until the page is filled, or the memory
    /// [unregistered](Self::unregister).
    pub(crate) fn register(&self, addresses: &Range<usize>) -> io::Result<()> {
        let ioctls = self
            .0
            .register_for(UFFDIO_REGISTER_MODE_MISSING, addresses)?;
        // Huge pages cannot be filled with zeros, nor in parts.
        if ioctls >> (UFFDIO_ZEROPAGE & 0xff) & 1 == 0 {
            self.unregister(addresses)?;
            return Err(io::ErrorKind::Unsupported.into());
        }
        Ok(())
    }

    /// Missing pages of `addresses` read as zeros again, and who waits for one goes on.
    pub(crate) fn unregister(&self, addresses: &Range<usize>) -> io::Result<()> {
        self.0.unregister(addresses.clone())
    }

    /// Fills the missing `page` with `bytes`, in one step, and wakes who waits for it. False if the page is not missing.
    pub(crate) fn fill(&self, page: &VolatileSlice<'_>, bytes: &[u8]) -> io::Result<bool> {
        if bytes.len() != page.len() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.resolve(page, || {
            let mut argument = uffdio_copy {
                dst: address(page),
                src: bytes.as_ptr().addr() as u64,
                len: bytes.len() as u64,
                mode: 0,
                copy: 0,
            };
            // SAFETY: the request takes this argument. The kernel reads the bytes, which are as long, and writes memory that
            // the slice may write, and only where nothing is.
            unsafe { super::ioctl(self.as_fd(), UFFDIO_COPY, &mut argument) }
        })
    }

    /// As [`fill`](Self::fill), with zeros.
    pub(crate) fn fill_zero(&self, page: &VolatileSlice<'_>) -> io::Result<bool> {
        self.resolve(page, || {
            let mut argument = uffdio_zeropage {
                range: slice_range(page),
                mode: 0,
                zeropage: 0,
            };
            // SAFETY: the request takes this argument; the memory is the slice's, and only filled where nothing is.
            unsafe { super::ioctl(self.as_fd(), UFFDIO_ZEROPAGE, &mut argument) }
        })
    }

    fn resolve(
        &self,
        page: &VolatileSlice<'_>,
        mut fill: impl FnMut() -> io::Result<u32>,
    ) -> io::Result<bool> {
        loop {
            match fill() {
                Ok(_) => return Ok(true),
                // The address space is being changed.
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
                Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {
                    let mut argument = slice_range(page);
                    // SAFETY: the request takes this argument, and only makes threads look at the page again.
                    unsafe { super::ioctl(self.as_fd(), UFFDIO_WAKE, &mut argument) }?;
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// The addresses of new faults; none if there are none.
    pub(crate) fn read(&self) -> io::Result<impl Iterator<Item = usize>> {
        let mut events = [0; EVENTS * EVENT_LEN];
        let read = match rustix::io::read(self, &mut events) {
            Ok(read) => read,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => 0,
            Err(error) => return Err(error.into()),
        };
        let addresses = (0..read / EVENT_LEN).filter_map(move |event| {
            let event = &events[event * EVENT_LEN..][..EVENT_LEN];
            let is_fault = u32::from(event[0]) == UFFD_EVENT_PAGEFAULT;
            let address = event[ADDRESS].try_into().ok().filter(|_| is_fault)?;
            usize::try_from(u64::from_ne_bytes(address)).ok()
        });
        Ok(addresses)
    }
}

impl AsFd for Faults {
    /// Readable when there are faults.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.0.as_fd()
    }
}

fn address(page: &VolatileSlice<'_>) -> u64 {
    page.ptr_guard_mut().as_ptr().addr() as u64
}

fn slice_range(page: &VolatileSlice<'_>) -> uffdio_range {
    uffdio_range {
        start: address(page),
        len: page.len() as u64,
    }
}
