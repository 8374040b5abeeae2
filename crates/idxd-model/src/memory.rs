//! This process's memory, as a device sees it: by address, and with page faults.
//!
//! A device reports a fault at a bad address. So the model accesses memory by `process_vm_readv` and `process_vm_writev` on
//! its own process, which return EFAULT where a load would be a SIGSEGV. Tests make single pages absent or read-only by the
//! map [`Pages`].

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// Bytes of a page.
pub const PAGE: u64 = 4096;

/// Memory that a device reads and writes.
pub(crate) trait Memory {
    /// Fills `buffer` from `address` on.
    ///
    /// # Errors
    /// A page is not mapped; the bytes before it have been read.
    fn read(&mut self, address: u64, buffer: &mut [u8]) -> Result<(), Fault>;

    /// Writes `bytes` to `address`.
    ///
    /// # Errors
    /// A page is not mapped or read-only; the bytes before it have been written.
    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), Fault>;
}

/// An access that could not be translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// Bytes that were read or written before it.
    pub(crate) done: usize,
    /// Address of the fault.
    pub(crate) address: u64,
    /// Whether it was a write.
    pub(crate) write: bool,
}

/// Access of devices to one page of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Page {
    /// The process's own memory: if that is not mapped, the access faults all the same.
    Present,
    /// Reads succeed, writes fault.
    ReadOnly,
    /// Every access faults.
    Absent,
}

/// Pages that a test has changed, for all devices of a model. At first everything is [`Page::Present`].
#[derive(Debug, Default)]
pub struct Pages {
    map: Mutex<BTreeMap<u64, Page>>,
    /// Whether any page was ever set: spares the lock.
    used: AtomicBool,
}

impl Pages {
    /// Makes the pages that `length` bytes from `address` on touch behave as `page`.
    pub fn set(&self, address: u64, length: u64, page: Page) {
        let mut map = self.map.lock().unwrap_or_else(PoisonError::into_inner);
        self.used.store(true, Ordering::Release);
        let end = address.saturating_add(length.max(1)).div_ceil(PAGE);
        map.extend((address / PAGE..end).map(|number| (number, page)));
    }

    fn are_used(&self) -> bool {
        self.used.load(Ordering::Acquire)
    }

    /// Whether an access to page `number` succeeds.
    fn allow(&self, number: u64, write: bool) -> bool {
        let map = self.map.lock().unwrap_or_else(PoisonError::into_inner);
        match map.get(&number) {
            None | Some(Page::Present) => true,
            Some(Page::ReadOnly) => !write,
            Some(Page::Absent) => false,
        }
    }
}

/// The memory as one operation sees it.
#[derive(Debug)]
pub(super) struct View<'a> {
    pub(super) pages: &'a Pages,
    /// An injected fault: accesses from this address on fail, reads or (`true`) writes.
    pub(super) injected: Option<(u64, bool)>,
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
        let plain = !self.pages.are_used() && self.injected.is_none();
        if plain && access(address, 0..length) {
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
        if self.pages.are_used() && !self.pages.allow(at / PAGE, write) {
            return Err(fault);
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

    /// Writes a completion record: the status, which is one byte, after everything else.
    pub(super) fn write_record(&mut self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.each(address, bytes.len(), true, |at, range| {
            let bytes = &bytes[range];
            // Other processors see these stores in their order.
            write_process(at + 1, &bytes[1..]) && write_process(at, &bytes[..1])
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
            write_process(at, &bytes[range])
        })
    }
}

/// Whether all of `buffer` could be read.
fn read_process(address: u64, buffer: &mut [u8]) -> bool {
    let (local, remote) = ends(buffer.as_mut_ptr(), address, buffer.len());
    // SAFETY: the kernel writes to `buffer` only, and checks itself whether the other side is readable.
    let read = unsafe {
        libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0)
    };
    usize::try_from(read) == Ok(buffer.len())
}

/// Whether all of `bytes` could be written.
fn write_process(address: u64, bytes: &[u8]) -> bool {
    let (local, remote) = ends(bytes.as_ptr().cast_mut(), address, bytes.len());
    // SAFETY: the kernel reads `bytes`. It writes to memory that a descriptor names, to which no one has a reference,
    // as the submitter has promised (`Submit::submit`). The kernel checks itself whether the memory is mapped.
    let written = unsafe {
        libc::process_vm_writev(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0)
    };
    usize::try_from(written) == Ok(bytes.len())
}

fn ends(local: *mut u8, remote: u64, length: usize) -> (libc::iovec, libc::iovec) {
    let end = |start| libc::iovec {
        iov_base: start,
        iov_len: length,
    };
    let remote = usize::try_from(remote).unwrap_or(usize::MAX);
    (
        end(local.cast()),
        end(std::ptr::without_provenance_mut(remote)),
    )
}
