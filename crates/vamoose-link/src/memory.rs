//! System calls without a safe interface, mostly on guest memory: the only unsafe code of this crate.
//!
//! A guest writes its memory at any time, so there must be no reference to it, not even to copy from. The kernel gets addresses
//! instead, in system calls that read or write the memory. Every block below is sound for these reasons:
//!
//! 1. An address comes from a [`VolatileSlice`], whose creator guarantees that the memory is mapped for its
//!    lifetime and that all other access is volatile, or from a Rust slice that outlives the call.
//!    (With vm-memory's feature `xen`, which maps memory for each access, the call fails with `EFAULT`.)
//! 2. The kernel checks addresses and lengths: unmapped or write-protected memory is `EFAULT`.
//! 3. Structures passed to the kernel are on this stack, and the kernel keeps no pointer to them.
//!
//! With MSG_ZEROCOPY the kernel keeps reading the *pages* behind the addresses after the call. It pins
//! them, so even unmapping is harmless. [`zero_copy`](crate::zero_copy) handles that later bytes may be sent.
#![allow(
    unsafe_code,
    reason = "addresses of guest memory in system calls, by the rules above"
)]

use std::{
    io, mem,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
    ptr,
    time::Duration,
};

use vm_memory::VolatileSlice;

/// The rest of a transfer: bytes of this process, then guest memory.
#[derive(Clone, Copy)]
pub(crate) struct Left<'a> {
    header: &'a [u8],
    pages: &'a [VolatileSlice<'a>],
    /// Bytes of the first slice that have been transferred.
    skip: usize,
    /// All bytes left.
    bytes: usize,
}

/// Sends that the kernel has released: numbers `first` to `last`, which may wrap around.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Notification {
    pub(crate) first: u32,
    pub(crate) last: u32,
    /// The kernel made a copy after all.
    pub(crate) copied: bool,
}

/// Sends as much of `left` as one call takes. `flags` are those of sendmsg(2).
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    left: &Left<'_>,
    flags: libc::c_int,
) -> io::Result<usize> {
    let mut iovecs = Iovecs::of(left);
    let message = iovecs.message();
    // SAFETY: `message` and the iovecs that it points to live until the call returns (3), and so does the
    // memory they point to, which is only read (1, 2).
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, flags | libc::MSG_NOSIGNAL) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// Receives into the slices of `left`, as much as one call does; 0 when the peer has closed.
///
/// Neither MSG_WAITALL nor SO_RCVLOWAT has a measurable benefit; the former would blur the stall
/// timeout, and the latter would delay short headers.
pub(crate) fn receive(socket: BorrowedFd<'_>, left: &Left<'_>) -> io::Result<usize> {
    let left = Left {
        header: &[],
        ..*left
    };
    let mut iovecs = Iovecs::of(&left);
    let mut message = iovecs.message();
    // SAFETY: As in `send`; only memory of `VolatileSlice`s is written, since the header has been
    // left out, and these allow writes (1).
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, 0) };
    usize::try_from(received).map_err(|_| io::Error::last_os_error())
}

/// Progress of a TCP connection (tcp_info, tcp(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TcpProgress {
    /// Bytes that the peer's kernel has acknowledged.
    pub(crate) acknowledged: u64,
    /// Time with bytes to send or to be acknowledged.
    pub(crate) busy: Duration,
    /// Smoothed round-trip time.
    pub(crate) round_trip: Duration,
}

/// Reads the progress of a TCP connection; `None` before Linux 4.10.
pub(crate) fn tcp_progress(socket: BorrowedFd<'_>) -> Option<TcpProgress> {
    /// Offsets in the structure, which the C libraries do not declare completely.
    const RTT: usize = 68;
    const BYTES_ACKED: usize = 120;
    const BUSY_TIME: usize = 168;
    let mut info = [0; BUSY_TIME + 8];
    let len = option(socket, libc::IPPROTO_TCP, libc::TCP_INFO, &mut info).ok()?;
    let number = |at: usize| {
        let bytes = info.get(at..at + 8)?.try_into().ok()?;
        Some(u64::from_ne_bytes(bytes))
    };
    let round_trip = u32::from_ne_bytes(info.get(RTT..RTT + 4)?.try_into().ok()?);
    let progress = TcpProgress {
        round_trip: Duration::from_micros(round_trip.into()),
        acknowledged: number(BYTES_ACKED)?,
        busy: Duration::from_micros(number(BUSY_TIME)?),
    };
    (len == info.len()).then_some(progress)
}

/// Bounds the unsent bytes of a TCP socket, roughly.
pub(crate) fn bound_unsent(socket: BorrowedFd<'_>, bytes: u32) -> io::Result<()> {
    let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    set_option(socket, libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, bytes)
}

/// Populates the memory of `slice` for writing. Where the system cannot provide it (a full file system, no huge page left), this is
/// an error, while a write would be a SIGBUS. Since Linux 5.14; `EINVAL` before.
///
/// # Errors
/// The system's.
pub fn populate(slice: &VolatileSlice<'_>) -> io::Result<()> {
    let guard = slice.ptr_guard_mut();
    // SAFETY: This changes no byte of the memory, which is mapped (1); the kernel checks the address (2).
    let result = unsafe {
        libc::madvise(
            guard.as_ptr().cast(),
            slice.len(),
            libc::MADV_POPULATE_WRITE,
        )
    };
    done(result)
}

/// Has the C library return blocks of this many bytes and more to the system as soon as they are freed, for the rest of the process. It
/// would keep them otherwise: of memory that is taken and freed all the time, in pieces of all lengths, as much again.
pub(crate) fn return_freed(bytes: u32) {
    let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    // SAFETY: it sets a number, under a lock, and changes nothing that is allocated.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, bytes)
    };
    #[cfg(not(target_env = "gnu"))]
    let _ = bytes;
}

/// Takes over a descriptor passed by the parent process.
///
/// # Errors
/// When there is no open file of this number.
pub(crate) fn passed(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: fcntl takes any number, and fails for one that is no open file.
    let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created it, so this is its only owner.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// User and process at the other end of a unix socket, as of when it connected or began to listen. (Not by rustix, whose
/// process id must not be 0, as that of a peer in another namespace is.)
pub(crate) fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<libc::ucred> {
    let mut credentials = [0; size_of::<libc::ucred>()];
    option(
        socket,
        libc::SOL_SOCKET,
        libc::SO_PEERCRED,
        &mut credentials,
    )?;
    read(&credentials).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Enables MSG_ZEROCOPY on a socket.
pub(crate) fn allow_zero_copy(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_option(socket, libc::SOL_SOCKET, libc::SO_ZEROCOPY, 1)
}

/// Sets a socket option whose value is an int.
fn set_option(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    const LEN: libc::socklen_t = 4;
    const { assert!(size_of::<libc::c_int>() == LEN as usize) };
    let value = ptr::from_ref(&value).cast();
    // SAFETY: The value is an int of `LEN` bytes, read during the call.
    done(unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, value, LEN) })
}

/// Reads a socket option into `value`. Returns the number of bytes that the kernel has written.
fn option(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    name: libc::c_int,
    value: &mut [u8],
) -> io::Result<usize> {
    let mut len = libc::socklen_t::try_from(value.len()).map_err(io::Error::other)?;
    let value = value.as_mut_ptr().cast();
    // SAFETY: The kernel writes at most `len` bytes, the length of `value`, and `len` itself, during the call (3).
    done(unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, value, &raw mut len) })?;
    usize::try_from(len).map_err(io::Error::other)
}

/// The result of a system call that returns 0 or -1.
fn done(result: libc::c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Takes one message from the socket's error queue and passes its notifications to `each`; false when
/// the queue is empty. Never waits.
pub(crate) fn read_error_queue(
    socket: BorrowedFd<'_>,
    each: &mut dyn FnMut(Notification),
) -> io::Result<bool> {
    let mut control = Control([0; CONTROL_LEN]);
    // SAFETY: All zeros are a msghdr without any buffer.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = CONTROL_LEN as _;
    // SAFETY: `message` points to `control` only, which the kernel may fill up to its length (3).
    let result = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_ERRQUEUE) };
    if result < 0 {
        return match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            error => Err(error),
        };
    }
    if message.msg_flags & libc::MSG_CTRUNC != 0 {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "a message in the socket's error queue was cut short",
        ));
    }
    #[allow(clippy::unnecessary_cast, reason = "a u32 in some C libraries")]
    let len = message.msg_controllen as usize;
    parse_errors(&control.0[..len.min(CONTROL_LEN)], each)?;
    Ok(true)
}

impl<'a> Left<'a> {
    pub(crate) fn new(header: &'a [u8], pages: &'a [VolatileSlice<'a>]) -> Self {
        Self {
            header,
            pages,
            skip: 0,
            bytes: header.len() + total_len(pages),
        }
    }

    /// Bytes left.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies as many of `bytes` to the pages as fit; returns their number.
    pub(crate) fn fill(&self, bytes: &[u8]) -> usize {
        let mut filled = 0;
        let mut skip = self.skip;
        for slice in self.pages {
            let len = (slice.len() - skip).min(bytes.len() - filled);
            // Inside the slice, so it cannot fail.
            if let Ok(slice) = slice.subslice(skip, len) {
                slice.copy_from(&bytes[filled..filled + len]);
            }
            filled += len;
            skip = 0;
        }
        filled
    }

    /// Passes the first `len` bytes of the remaining pages to `each`, as they are in memory now.
    pub(crate) fn for_each(&self, len: usize, each: &mut dyn FnMut(&[u8])) {
        let mut piece = [0; 4096];
        let (mut left, mut skip) = (len, self.skip);
        for slice in self.pages {
            let mut rest = (slice.len() - skip).min(left);
            left -= rest;
            while rest > 0 {
                let len = rest.min(piece.len());
                // Inside the slice, so it cannot fail.
                if let Ok(slice) = slice.subslice(skip, len) {
                    slice.copy_to(&mut piece[..len]);
                }
                each(&piece[..len]);
                rest -= len;
                skip += len;
            }
            skip = 0;
        }
    }

    /// Removes the `done` bytes of one call, at most [`Left::bytes`].
    pub(crate) fn advance(&mut self, done: usize) {
        self.bytes = self.bytes.saturating_sub(done);
        let of_header = done.min(self.header.len());
        self.header = &self.header[of_header..];
        self.skip += done - of_header;
        while let Some((first, rest)) = self.pages.split_first()
            && self.skip >= first.len()
        {
            self.skip -= first.len();
            self.pages = rest;
        }
    }
}

/// Bytes in all of `slices`.
pub(crate) fn total_len(slices: &[VolatileSlice<'_>]) -> usize {
    slices.iter().map(VolatileSlice::len).sum()
}

/// Pieces in one system call: a header and 1 MiB of separate pages. More (the system's limit is 1024) would only need more
/// stack; a call for each MiB costs nothing.
const MAX_IOVECS: usize = 257;

/// Pieces of memory, by address, for one system call.
struct Iovecs {
    list: [libc::iovec; MAX_IOVECS],
    len: usize,
}

impl Iovecs {
    /// The beginning of `left`, as much as fits. Slices adjacent in memory become one piece.
    fn of(left: &Left<'_>) -> Self {
        let mut iovecs = Self {
            list: [libc::iovec {
                iov_base: ptr::null_mut(),
                iov_len: 0,
            }; MAX_IOVECS],
            len: 0,
        };
        iovecs.push(left.header.as_ptr().cast_mut(), left.header.len());
        let mut skip = left.skip;
        for slice in left.pages {
            let guard = slice.ptr_guard_mut();
            // Inside the slice: `advance` skips no more than that.
            if !iovecs.push(guard.as_ptr().wrapping_add(skip), slice.len() - skip) {
                break;
            }
            skip = 0;
        }
        iovecs
    }

    fn push(&mut self, base: *mut u8, len: usize) -> bool {
        if len == 0 {
            return true;
        }
        if let Some(last) = self.list[..self.len].last_mut()
            && last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == base
        {
            last.iov_len += len;
            return true;
        }
        let Some(free) = self.list.get_mut(self.len) else {
            return false;
        };
        free.iov_base = base.cast();
        free.iov_len = len;
        self.len += 1;
        true
    }

    /// A message of these pieces, valid while `self` is.
    fn message(&mut self) -> libc::msghdr {
        // SAFETY: All zeros are a msghdr without any buffer.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_iov = self.list.as_mut_ptr();
        message.msg_iovlen = self.len as _;
        message
    }
}

/// Room for a message's control data: an extended error with the address of its origin is 32 to 48
/// bytes behind a header of 16, and the kernel may add a timestamp.
const CONTROL_LEN: usize = 256;

#[repr(align(8))]
struct Control([u8; CONTROL_LEN]);

/// Passes the notifications in the control messages `control` to `each`. Any other error is an error.
fn parse_errors(control: &[u8], each: &mut dyn FnMut(Notification)) -> io::Result<()> {
    let mut rest = control;
    while let Some(header) = read::<libc::cmsghdr>(rest) {
        #[allow(clippy::unnecessary_cast, reason = "a u32 in some C libraries")]
        let len = (header.cmsg_len as usize).clamp(size_of::<libc::cmsghdr>(), rest.len());
        let (message, _) = rest.split_at(len);
        rest = &rest[len.next_multiple_of(size_of::<usize>()).min(rest.len())..];
        if !matches!(
            (header.cmsg_level, header.cmsg_type),
            (libc::SOL_IP, libc::IP_RECVERR) | (libc::SOL_IPV6, libc::IPV6_RECVERR)
        ) {
            continue;
        }
        let data = message.get(size_of::<libc::cmsghdr>()..).unwrap_or(&[]);
        let Some(error) = read::<libc::sock_extended_err>(data) else {
            continue;
        };
        if error.ee_origin == SO_EE_ORIGIN_ZEROCOPY && error.ee_errno == 0 {
            each(Notification {
                first: error.ee_info,
                last: error.ee_data,
                copied: error.ee_code & SO_EE_CODE_ZEROCOPY_COPIED != 0,
            });
        } else if let Ok(errno @ 1..) = i32::try_from(error.ee_errno) {
            return Err(io::Error::from_raw_os_error(errno));
        }
    }
    Ok(())
}

/// From linux/errqueue.h; not in libc.
const SO_EE_ORIGIN_ZEROCOPY: u8 = 5;
const SO_EE_CODE_ZEROCOPY_COPIED: u8 = 1;

/// A structure of the kernel.
///
/// # Safety
/// Any bytes must be a value of the type.
unsafe trait Plain: Copy {}

// SAFETY: Made of integers.
unsafe impl Plain for libc::cmsghdr {}
// SAFETY: Made of integers.
unsafe impl Plain for libc::sock_extended_err {}
// SAFETY: Made of integers.
unsafe impl Plain for libc::ucred {}

/// The structure at the start of `bytes`, if they are long enough.
fn read<T: Plain>(bytes: &[u8]) -> Option<T> {
    let bytes = bytes.get(..size_of::<T>())?;
    // SAFETY: There are as many bytes as `T` has, any bytes are a valid `T`, and they need not be aligned.
    Some(unsafe { ptr::read_unaligned(bytes.as_ptr().cast()) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A control message with `data`, padded as the kernel does.
    fn message(level: libc::c_int, kind: libc::c_int, data: &[u8]) -> Vec<u8> {
        let len = size_of::<libc::cmsghdr>() + data.len();
        let mut bytes = len.to_ne_bytes().to_vec();
        bytes.extend_from_slice(&level.to_ne_bytes());
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(data);
        bytes.resize(len.next_multiple_of(size_of::<usize>()), 0);
        bytes
    }

    /// An extended error, and the address behind it.
    fn error(errno: u32, origin: u8, code: u8, first: u32, last: u32) -> Vec<u8> {
        let mut bytes = errno.to_ne_bytes().to_vec();
        bytes.extend_from_slice(&[origin, 0, code, 0]);
        bytes.extend_from_slice(&first.to_ne_bytes());
        bytes.extend_from_slice(&last.to_ne_bytes());
        bytes.extend_from_slice(&[0; 16]);
        bytes
    }

    fn parse(control: &[u8]) -> io::Result<Vec<Notification>> {
        let mut found = Vec::new();
        parse_errors(control, &mut |notification| found.push(notification))?;
        Ok(found)
    }

    #[test]
    fn every_notification_of_a_message_is_found() {
        let control = [
            message(libc::SOL_SOCKET, libc::SCM_TIMESTAMP, &[7; 17]),
            message(libc::SOL_IP, libc::IP_RECVERR, &error(0, 5, 0, 3, 9)),
            message(
                libc::SOL_IPV6,
                libc::IPV6_RECVERR,
                &error(0, 5, 1, u32::MAX, 0),
            ),
        ]
        .concat();
        let [first, second] = parse(&control).unwrap()[..] else {
            panic!("there are two");
        };
        assert_eq!((first.first, first.last, first.copied), (3, 9, false));
        assert_eq!(
            (second.first, second.last, second.copied),
            (u32::MAX, 0, true)
        );
        // Truncated anywhere, only complete notifications are found.
        for len in 0..control.len() {
            assert!(parse(&control[..len]).unwrap().len() <= 2);
        }
    }

    #[test]
    fn other_errors_are_errors() {
        let control = message(
            libc::SOL_IP,
            libc::IP_RECVERR,
            &error(libc::EHOSTUNREACH.unsigned_abs(), 2, 0, 0, 0),
        );
        let error = parse(&control).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EHOSTUNREACH));
    }

    #[test]
    fn adjacent_slices_are_one_piece() {
        let mut memory = vec![0; 8 * 4096];
        let memory = VolatileSlice::from(&mut memory[..]);
        let page = |index: usize| memory.subslice(index * 4096, 4096).unwrap();
        let pages = [page(0), page(1), page(2), page(5), page(6), page(4)];
        let lens = |left: &Left<'_>| {
            let iovecs = Iovecs::of(left);
            let pieces = iovecs.list[..iovecs.len].iter();
            pieces.map(|piece| piece.iov_len).collect::<Vec<_>>()
        };
        let mut left = Left::new(b"header", &pages);
        assert_eq!(lens(&left), [6, 3 * 4096, 2 * 4096, 4096]);
        left.advance(6 + 4096 + 1);
        assert_eq!(lens(&left), [2 * 4096 - 1, 2 * 4096, 4096]);
        left.advance(2 * 4096 - 1);
        assert_eq!(lens(&left), [2 * 4096, 4096]);
        left.advance(3 * 4096);
        assert_eq!((lens(&left), left.bytes()), (vec![], 0));
    }
}
