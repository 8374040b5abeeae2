//! This process's memory, as a device sees it: by address, and with page faults.
//!
//! A device does not crash at a bad address, it reports a fault. So the model reaches memory through
//! `process_vm_readv` and `process_vm_writev` on its own process, which answer EFAULT where a load would be a
//! SIGSEGV. On top of it lies a map of [`Pages`] in which a test makes single pages go, come and change.

use std::{
    collections::BTreeMap,
    fmt,
    ops::Range,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use super::nanoseconds;

/// Bytes of a page, in which translations come and go.
pub const PAGE: u64 = 4096;

/// What a device reads from and writes to.
pub(crate) trait Memory {
    /// Fills `buffer` from `address` on.
    ///
    /// # Errors
    /// A page that is not there; what lies before it has been read.
    fn read(&mut self, address: u64, buffer: &mut [u8]) -> Result<(), Fault>;

    /// Writes `bytes` to `address`.
    ///
    /// # Errors
    /// A page that is not there or may not be written; what lies before it has been written.
    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), Fault>;
}

/// An access that could not be translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// Bytes that were read or written before it.
    pub(crate) done: usize,
    /// Address that is missing.
    pub(crate) address: u64,
    /// Whether it was to be written.
    pub(crate) write: bool,
}

/// What devices find at one page of this process, whatever is really there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Page {
    /// The process's own memory: if that is not mapped, the access faults all the same.
    Present,
    /// Reads are right, writes fault.
    ReadOnly,
    /// Faults for ever. An operation that blocks on faults ends with status 0x04, another with 0x03.
    Absent,
    /// Faults at first, and is present this long after the first fault. An operation that blocks on faults waits.
    Resolvable(Duration),
    /// Present for so many accesses, absent afterwards.
    FlipsAfter(u32),
}

/// What tests make of this process's memory, for all devices of a model. At first everything is
/// [`Page::Present`].
#[derive(Default)]
pub struct Pages {
    map: Mutex<BTreeMap<u64, Entry>>,
    /// Whether anything was ever set: spares the lock.
    used: AtomicBool,
}

#[derive(Default)]
struct Entry {
    state: State,
    before: Vec<Box<dyn FnOnce() + Send>>,
}

#[derive(Clone, Copy, Debug, Default)]
enum State {
    #[default]
    Present,
    ReadOnly,
    Absent,
    Resolvable(u64),
    /// Present from this time on.
    Resolving(u64),
    Flips(u32),
}

impl Pages {
    /// Makes the pages that `length` bytes from `address` on touch behave as `page`.
    pub fn set(&self, address: u64, length: u64, page: Page) {
        let state = match page {
            Page::Present => State::Present,
            Page::ReadOnly => State::ReadOnly,
            Page::Absent => State::Absent,
            Page::Resolvable(after) => State::Resolvable(nanoseconds(after)),
            Page::FlipsAfter(accesses) => State::Flips(accesses),
        };
        let mut map = self.map.lock().unwrap_or_else(PoisonError::into_inner);
        self.used.store(true, Ordering::Release);
        let end = address.saturating_add(length.max(1)).div_ceil(PAGE);
        for number in address / PAGE..end {
            map.entry(number).or_default().state = state;
        }
    }

    /// Calls `action` just before a device accesses the page of `address` the next time: memory that changes under
    /// a running operation. A device accesses a page in one go, or in several. `action` must not use the model.
    pub fn before_access(&self, address: u64, action: impl FnOnce() + Send + 'static) {
        let mut map = self.map.lock().unwrap_or_else(PoisonError::into_inner);
        self.used.store(true, Ordering::Release);
        map.entry(address / PAGE)
            .or_default()
            .before
            .push(Box::new(action));
    }

    /// Asks for what is missing of the pages that `length` bytes from `address` on touch: how long until the last of
    /// them is there. What never comes is not waited for.
    pub(crate) fn request(&self, address: u64, length: u64, now: u64) -> u64 {
        if !self.used.load(Ordering::Acquire) {
            return 0;
        }
        let mut map = self.map.lock().unwrap_or_else(PoisonError::into_inner);
        let end = address.saturating_add(length).div_ceil(PAGE);
        let mut longest = 0;
        for (_, entry) in map.range_mut(address / PAGE..end) {
            if let State::Resolvable(after) = entry.state {
                entry.state = State::Resolving(now.saturating_add(after));
            }
            if let State::Resolving(at) = entry.state {
                longest = longest.max(at.saturating_sub(now));
            }
        }
        longest
    }

    /// What an access to the page finds.
    fn access(&self, number: u64, write: bool, now: u64, block: bool) -> Found {
        let mut map = self.map.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(entry) = map.get_mut(&number) else {
            return Found::Present;
        };
        let actions = std::mem::take(&mut entry.before);
        let found = match &mut entry.state {
            State::Present => Found::Present,
            State::ReadOnly if write => Found::Absent,
            State::ReadOnly => Found::Present,
            State::Absent => Found::Absent,
            State::Resolvable(after) if block => {
                let after = *after;
                entry.state = State::Present;
                Found::After(after)
            }
            State::Resolvable(after) => {
                entry.state = State::Resolving(now.saturating_add(*after));
                Found::Absent
            }
            State::Resolving(at) if *at <= now => {
                entry.state = State::Present;
                Found::Present
            }
            State::Resolving(at) if block => {
                let after = *at - now;
                entry.state = State::Present;
                Found::After(after)
            }
            State::Resolving(_) => Found::Absent,
            State::Flips(0) => {
                entry.state = State::Absent;
                Found::Absent
            }
            State::Flips(accesses) => {
                *accesses -= 1;
                Found::Present
            }
        };
        drop(map);
        for action in actions {
            action();
        }
        found
    }
}

impl fmt::Debug for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let map = self.map.lock().unwrap_or_else(PoisonError::into_inner);
        f.debug_map()
            .entries(map.iter().map(|(number, entry)| (number, entry.state)))
            .finish()
    }
}

enum Found {
    Present,
    Absent,
    /// Present, after waiting.
    After(u64),
}

/// The memory as one operation sees it.
#[derive(Debug)]
pub(super) struct View<'a> {
    pub(super) pages: &'a Pages,
    pub(super) now: u64,
    /// The operation waits for faults.
    pub(super) block: bool,
    /// A fault that was asked for: from this address on nothing is there, for reads or for writes.
    pub(super) injected: Option<(u64, bool)>,
    /// How long the operation has waited for faults, in nanoseconds.
    pub(super) stalled: u64,
}

impl View<'_> {
    /// Does `access` page by page where pages differ.
    fn each(
        &mut self,
        address: u64,
        length: usize,
        write: bool,
        mut access: impl FnMut(u64, Range<usize>) -> bool,
    ) -> Result<(), Fault> {
        let mapped = self.pages.used.load(Ordering::Acquire);
        if !mapped && self.injected.is_none() && access(address, 0..length) {
            return Ok(());
        }
        let mut done = 0;
        while done < length {
            let at = address.wrapping_add(done as u64);
            let page = usize::try_from(PAGE - at % PAGE).unwrap_or(length);
            let end = length.min(done + page);
            self.in_page(at, done..end, write, &mut access)?;
            done = end;
        }
        Ok(())
    }

    /// Does `access` to `range`, which lies in the page of `at`.
    fn in_page(
        &mut self,
        at: u64,
        range: Range<usize>,
        write: bool,
        access: &mut impl FnMut(u64, Range<usize>) -> bool,
    ) -> Result<(), Fault> {
        let fault = Fault {
            done: range.start,
            address: at,
            write,
        };
        if self.pages.used.load(Ordering::Acquire) {
            match self.pages.access(at / PAGE, write, self.now, self.block) {
                Found::Present => {}
                Found::Absent => return Err(fault),
                Found::After(wait) => self.stalled = self.stalled.saturating_add(wait),
            }
        }
        if let Some((bad, of_writes)) = self.injected
            && of_writes == write
            && (at..at.saturating_add(range.len() as u64)).contains(&bad)
        {
            let end = range.start + usize::try_from(bad - at).unwrap_or(0);
            return Err(match end == range.start || access(at, range.start..end) {
                true => Fault {
                    done: end,
                    address: bad,
                    write,
                },
                false => fault,
            });
        }
        match access(at, range) {
            true => Ok(()),
            false => Err(fault),
        }
    }

    /// Writes a completion record of `length` bytes, so that who sees a status sees the rest too: everything
    /// behind the status first, then the status, which is one byte and so cannot be seen half.
    pub(super) fn write_record(&mut self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.each(address, bytes.len(), true, |at, range| {
            let bytes = &bytes[range];
            // The kernel copies the pieces in their order, and other processors see stores of this architecture in
            // theirs.
            write_process(&[(at + 1, &bytes[1..]), (at, &bytes[..1])])
        })
    }
}

impl Memory for View<'_> {
    fn read(&mut self, address: u64, buffer: &mut [u8]) -> Result<(), Fault> {
        self.each(address, buffer.len(), false, |at, range| {
            read_process(at, &mut buffer[range])
        })
    }

    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.each(address, bytes.len(), true, |at, range| {
            write_process(&[(at, &bytes[range])])
        })
    }
}

/// Whether all of `buffer` could be read.
fn read_process(address: u64, buffer: &mut [u8]) -> bool {
    let local = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    let remote = libc::iovec {
        iov_base: std::ptr::without_provenance_mut(place(address)),
        iov_len: buffer.len(),
    };
    // SAFETY: the kernel writes to `buffer` only; whether the other side is readable it finds out itself.
    let read = unsafe {
        libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0)
    };
    usize::try_from(read) == Ok(buffer.len())
}

/// Writes the pieces, which are at most two, in their order. Whether all could be written.
fn write_process(pieces: &[(u64, &[u8])]) -> bool {
    let none = libc::iovec {
        iov_base: std::ptr::null_mut(),
        iov_len: 0,
    };
    let (mut local, mut remote) = ([none; 2], [none; 2]);
    let mut length = 0;
    for (index, (address, bytes)) in pieces.iter().enumerate() {
        local[index] = libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: bytes.len(),
        };
        remote[index] = libc::iovec {
            iov_base: std::ptr::without_provenance_mut(place(*address)),
            iov_len: bytes.len(),
        };
        length += bytes.len();
    }
    let count = pieces.len() as libc::c_ulong;
    // SAFETY: the kernel reads the pieces. What it writes to is memory that a descriptor named, and who submitted
    // that promised that no one has a reference to it (`Submit::submit`); whether it is mapped the kernel finds
    // out itself.
    let written = unsafe {
        libc::process_vm_writev(
            libc::getpid(),
            local.as_ptr(),
            count,
            remote.as_ptr(),
            count,
            0,
        )
    };
    usize::try_from(written) == Ok(length)
}

fn place(address: u64) -> usize {
    usize::try_from(address).unwrap_or(usize::MAX)
}

/// Memory that is a vector, for tests of operations.
#[cfg(test)]
pub(crate) mod fake {
    use super::{Fault, Memory};

    /// `bytes` lie at `base`; accesses elsewhere fault.
    #[derive(Debug)]
    pub(crate) struct Fake {
        pub(crate) base: u64,
        pub(crate) bytes: Vec<u8>,
    }

    impl Fake {
        fn range(
            &self,
            address: u64,
            length: usize,
            write: bool,
        ) -> (std::ops::Range<usize>, Result<(), Fault>) {
            let start = usize::try_from(address.wrapping_sub(self.base))
                .unwrap()
                .min(self.bytes.len());
            let end = (start + length).min(self.bytes.len());
            let done = end - start;
            let fault = Fault {
                done,
                address: address + done as u64,
                write,
            };
            (start..end, if done == length { Ok(()) } else { Err(fault) })
        }
    }

    impl Memory for Fake {
        fn read(&mut self, address: u64, buffer: &mut [u8]) -> Result<(), Fault> {
            let (range, result) = self.range(address, buffer.len(), false);
            buffer[..range.len()].copy_from_slice(&self.bytes[range]);
            result
        }

        fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
            let (range, result) = self.range(address, bytes.len(), true);
            let length = range.len();
            self.bytes[range].copy_from_slice(&bytes[..length]);
            result
        }
    }
}
