//! A guest that is being restored from a snapshot: each page gets its content when it is touched for the first time.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
    sync::atomic::{AtomicBool, Ordering},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    ioctl::{Opcode, opcode},
};
use vamoose_live::Ram;

use super::PAGE;

/// Fills all memory of a guest on demand.
pub(crate) struct Snapshot {
    userfaultfd: OwnedFd,
    addresses: Vec<std::ops::Range<usize>>,
    stop: AtomicBool,
}

/// `struct uffdio_api`.
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_register`.
#[repr(C)]
struct Register {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_copy`.
#[repr(C)]
struct Copy {
    to: u64,
    from: u64,
    len: u64,
    mode: u64,
    copied: i64,
}

const UFFDIO_API: Opcode = opcode::read_write::<Api>(0xaa, 0x3f);
const UFFDIO_REGISTER: Opcode = opcode::read_write::<Register>(0xaa, 0x00);
const UFFDIO_COPY: Opcode = opcode::read_write::<Copy>(0xaa, 0x03);
const MODE_MISSING: u64 = 1;

/// `struct uffd_msg`: of a page fault, the address is its third word.
const MESSAGE_WORDS: usize = 4;

impl Snapshot {
    /// Takes over the memory of `ram`, which was never touched.
    ///
    /// # Errors
    /// Where this process may not resolve page faults of the kernel, or there is no userfaultfd.
    pub(crate) fn of(ram: &Ram) -> io::Result<Self> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: the call takes flags and makes a file descriptor.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        let fd = i32::try_from(fd).unwrap();
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made it and nothing else refers to it.
        let userfaultfd = unsafe { OwnedFd::from_raw_fd(fd) };
        let blocks = ram.blocks().iter();
        let snapshot = Self {
            userfaultfd,
            addresses: blocks
                .map(|block| block.address()..block.address() + block.len())
                .collect(),
            stop: AtomicBool::new(false),
        };
        let mut api = Api {
            api: 0xaa,
            features: 0,
            ioctls: 0,
        };
        snapshot.ioctl(UFFDIO_API, &mut api)?;
        for addresses in &snapshot.addresses {
            let mut register = Register {
                start: addresses.start as u64,
                len: addresses.len() as u64,
                mode: MODE_MISSING,
                ioctls: 0,
            };
            snapshot.ioctl(UFFDIO_REGISTER, &mut register)?;
        }
        Ok(snapshot)
    }

    /// What the page `page` of any block is full of.
    pub(crate) fn content(page: usize) -> u8 {
        u8::try_from(page % 255).unwrap() + 1
    }

    /// Fills pages until it is stopped.
    pub(crate) fn serve(&self) {
        while !self.stop.load(Ordering::Relaxed) {
            let mut fds = [PollFd::new(&self.userfaultfd, PollFlags::IN)];
            let soon = Timespec {
                tv_sec: 0,
                tv_nsec: 20_000_000,
            };
            poll(&mut fds, Some(&soon)).unwrap();
            let mut message = [0; MESSAGE_WORDS * 8];
            if rustix::io::read(&self.userfaultfd, &mut message) == Ok(message.len()) {
                let words = message.as_chunks().0;
                self.fill(usize::try_from(u64::from_ne_bytes(words[2])).unwrap());
            }
        }
    }

    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    fn fill(&self, address: usize) {
        let mut blocks = self.addresses.iter();
        let block = blocks.find(|block| block.contains(&address)).unwrap();
        let page = (address - block.start) / PAGE;
        let content = [Self::content(page); PAGE];
        let mut copy = Copy {
            to: (block.start + page * PAGE) as u64,
            from: content.as_ptr().expose_provenance() as u64,
            len: PAGE as u64,
            mode: 0,
            copied: 0,
        };
        match self.ioctl(UFFDIO_COPY, &mut copy) {
            // Two threads may have touched it.
            Err(error) if error.raw_os_error() != Some(libc::EEXIST) => panic!("{error}"),
            _ => {}
        }
    }

    fn ioctl<T>(&self, request: Opcode, argument: &mut T) -> io::Result<()> {
        let fd = self.userfaultfd.as_fd().as_raw_fd();
        // SAFETY: each request is called with its own argument. What it fills is memory of a guest that nothing has a
        // reference to, with bytes that are borrowed meanwhile.
        match unsafe { libc::ioctl(fd, request as libc::Ioctl, std::ptr::from_mut(argument)) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}
