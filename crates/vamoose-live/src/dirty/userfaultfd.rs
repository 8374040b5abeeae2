//! The page tables of this process as a dirty log: userfaultfd write protection in asynchronous mode (Linux 6.7).
//!
//! Pages are write-protected. The first write to one faults, and the kernel lifts the protection and continues it;
//! no handler is needed. `collect` asks PAGEMAP_SCAN for the pages without protection, which protects them again in
//! the same step, so that there is nothing to clear later.
//!
//! # Absent pages
//! Pages that were never touched cost as little as possible, and are not reported. There are two kinds of memory:
//!
//! - **Private anonymous**: a page without an entry in the page tables holds zeros, so only pages with one count, and no
//!   entries are made for the rest. A page that is read before it is ever written (then it maps the shared page of zeros)
//!   is found once although nothing changed. It is protected in `watch`, by the threads that read it.
//! - **Everything else**: an entry may be missing because a *written* page was evicted. So `start` marks each
//!   page without one, which takes 2 MiB of page tables per GiB, and a page without a mark was written.
//!
//! # Short calls
//! While the kernel protects a range, it removes the range from the tables of every KVM guest that maps it, and a guest that
//! touches the range waits. So each call protects only a [part](STEP).

use std::{
    io,
    ops::Range,
    sync::{PoisonError, RwLock},
};

use super::{COLLECT_BYTES, DirtyLog, DirtyLogError, set_pages};
use crate::{
    Ram, RamBlock,
    mapping::{Anonymous, anonymous},
    parallel::aligned_parts,
    sys::{
        pagemap::{Found, POPULATED, Pagemap, Query, WRITTEN},
        userfaultfd::Userfaultfd,
    },
};

/// Logs writes through the page tables of this process. For any memory, with or without KVM.
///
/// # Recorded writes
/// Every write through the mappings that the log was made for: of this process's threads, of the kernel for it
/// (`read(2)` into guest memory), and of a KVM guest, whose tables follow. Writes through other mappings of a shared file are
/// not recorded, nor writes of hardware or the kernel to pages that they have pinned before (VFIO, direct I/O, registered
/// buffers of io_uring). The VMM marks those in a [`SharedBitmap`](super::SharedBitmap) after the write. Giving memory back
/// (`madvise`, punching holes) is not recorded either, nor are writes of forked children.
///
/// # Costs
/// A fault for the first write to a page in each round. Transparent huge pages are split when they are first
/// written, because the log counts pages of the base size, and stay split until khugepaged collapses them after
/// `stop`. A huge page of hugetlbfs cannot be split: one write makes all of its base pages dirty. Shared memory
/// takes 2 MiB of page tables per GiB even where it was never touched.
///
/// # Requirements
/// Linux 6.7 with userfaultfd, and /proc. No privilege, with any value of `vm.unprivileged_userfaultfd`: the log asks for
/// faults of user mode only, and the kernel's own faults are resolved all the same, because no fault is ever delivered. No other
/// userfaultfd may be registered on the memory.
#[derive(Debug)]
pub struct UserfaultLog {
    ram: Ram,
    pagemap: Pagemap,
    /// Written by `start` and `stop` only.
    running: RwLock<Option<Running>>,
}

/// The state between `start` and `stop`.
#[derive(Debug)]
struct Running {
    userfaultfd: Userfaultfd,
    /// Whether each block is anonymous, which determines when and how its pages are protected.
    blocks: Vec<Anonymous>,
}

const LOG: &str = "userfaultfd";

/// Bytes of a call that protects memory: some milliseconds, where all of it was written.
const STEP: usize = 64 << 20;

impl UserfaultLog {
    /// A log for `ram`, whose mappings it keeps alive.
    ///
    /// # Errors
    /// [`DirtyLogError::Unsupported`] if the kernel is older than 6.7, is built without userfaultfd or does not
    /// let this process have one, or if there is no /proc.
    pub fn new(ram: &Ram) -> Result<Self, DirtyLogError> {
        open_userfaultfd()?;
        let pagemap = Pagemap::open().map_err(|error| {
            unsupported(format!("/proc/self/pagemap cannot be opened: {error}"))
        })?;
        Ok(Self {
            ram: ram.clone(),
            pagemap,
            running: RwLock::new(None),
        })
    }

    fn register(&self) -> Result<Running, DirtyLogError> {
        let mut running = Running {
            userfaultfd: open_userfaultfd()?,
            blocks: Vec::with_capacity(self.ram.blocks().len()),
        };
        for (index, block) in self.ram.blocks().iter().enumerate() {
            let anonymous = anonymous(block).map_err(failed("reading /proc/self/maps"))?;
            let addresses = self.addresses(index);
            let registered = running.userfaultfd.register(addresses.clone());
            registered.map_err(failed(
                "UFFDIO_REGISTER (EBUSY: another userfaultfd has this memory)",
            ))?;
            match anonymous {
                // In `watch`, window by window.
                Anonymous::BasePages => {}
                // Huge pages cannot be protected in parts, so a window of any size would not do.
                Anonymous::HugePages => self.protect(anonymous, addresses, drop)?,
                Anonymous::No => {
                    for part in aligned_parts(addresses, step(anonymous)) {
                        let protected = running.userfaultfd.write_protect(part);
                        protected.map_err(failed("UFFDIO_WRITEPROTECT"))?;
                    }
                }
            }
            running.blocks.push(anonymous);
        }
        Ok(running)
    }

    /// Protects the pages of `addresses`, and calls `each` with the addresses of those that were not.
    fn protect(
        &self,
        anonymous: Anonymous,
        addresses: Range<usize>,
        mut each: impl FnMut(Range<usize>),
    ) -> Result<(), DirtyLogError> {
        let query = Query {
            all: WRITTEN,
            any: match anonymous {
                Anonymous::No => 0,
                Anonymous::BasePages | Anonymous::HugePages => POPULATED,
            },
            write_protect: true,
            ..Query::default()
        };
        let mut found = Found::new();
        for part in aligned_parts(addresses, step(anonymous)) {
            let scanned = self.pagemap.scan(part, query, &mut found, &mut each);
            scanned.map_err(failed("PAGEMAP_SCAN"))?;
        }
        Ok(())
    }

    /// Whether `block` is anonymous; `None` for an unknown block.
    fn anonymous(&self, block: usize) -> Result<Option<Anonymous>, DirtyLogError> {
        let running = self.running.read().unwrap_or_else(PoisonError::into_inner);
        match running.as_ref() {
            Some(running) => Ok(running.blocks.get(block).copied()),
            None => Err(DirtyLogError::Setup {
                log: LOG,
                reason: "collected before it was started".into(),
            }),
        }
    }

    /// The addresses of those of `pages` that `block` has.
    fn addresses_of(&self, block: usize, pages: Range<usize>) -> Range<usize> {
        let (all, page_size) = (self.addresses(block), self.ram.page_size());
        let address = |page: usize| {
            let offset = page.saturating_mul(page_size);
            all.start.saturating_add(offset).min(all.end)
        };
        address(pages.start)..address(pages.end)
    }

    fn addresses(&self, block: usize) -> Range<usize> {
        let block = self.ram.blocks().get(block);
        block.map_or(0..0, RamBlock::addresses)
    }
}

impl DirtyLog for UserfaultLog {
    fn start(&self) -> Result<(), DirtyLogError> {
        let mut running = self.running.write().unwrap_or_else(PoisonError::into_inner);
        // The memory can be registered with one userfaultfd only.
        *running = None;
        *running = Some(self.register()?);
        Ok(())
    }

    fn watch(&self, block: usize, pages: Range<usize>) -> Result<(), DirtyLogError> {
        match self.anonymous(block)? {
            Some(base @ Anonymous::BasePages) => {
                self.protect(base, self.addresses_of(block, pages), drop)
            }
            _ => Ok(()),
        }
    }

    fn pages_per_collect(&self) -> usize {
        COLLECT_BYTES / self.ram.page_size()
    }

    fn collect(
        &self,
        block: usize,
        first_page: usize,
        dirty: &mut [u64],
    ) -> Result<(), DirtyLogError> {
        let Some(anonymous) = self.anonymous(block)? else {
            return Ok(());
        };
        let pages = first_page..first_page.saturating_add(dirty.len() * 64);
        let addresses = self.addresses_of(block, pages);
        let (start, page_size) = (addresses.start, self.ram.page_size());
        self.protect(anonymous, addresses, |run| {
            set_pages(
                dirty,
                (run.start - start) / page_size..(run.end - start) / page_size,
            );
        })
    }

    fn stop(&self) -> Result<(), DirtyLogError> {
        let mut running = self.running.write().unwrap_or_else(PoisonError::into_inner);
        let Some(running) = running.take() else {
            return Ok(());
        };
        // Closing alone is not enough: a child that has not called exec yet has a copy of the file descriptor.
        let mut result = Ok(());
        for index in 0..running.blocks.len() {
            let ended = running.userfaultfd.unregister(self.addresses(index));
            result = result.and(ended);
        }
        result.map_err(failed("UFFDIO_UNREGISTER"))
    }
}

/// Bytes of a call: whole huge pages of every size.
fn step(anonymous: Anonymous) -> usize {
    match anonymous {
        Anonymous::BasePages => STEP,
        Anonymous::No | Anonymous::HugePages => COLLECT_BYTES,
    }
}

fn open_userfaultfd() -> Result<Userfaultfd, DirtyLogError> {
    let userfaultfd = Userfaultfd::open().map_err(|error| match error.raw_os_error() {
        Some(libc::ENOSYS) => unsupported("this kernel is built without userfaultfd".into()),
        Some(libc::EPERM | libc::EACCES) => unsupported(
            "this process may not call userfaultfd(2): a seccomp filter or security module forbids it".into(),
        ),
        _ => failed("userfaultfd")(error),
    })?;
    let chosen = userfaultfd.choose_async_write_protection();
    chosen.map_err(|error| match error.raw_os_error() {
        Some(libc::EINVAL) => unsupported(
            "this kernel has no asynchronous write protection: it takes Linux 6.7 or later".into(),
        ),
        _ => failed("UFFDIO_API")(error),
    })?;
    Ok(userfaultfd)
}

fn unsupported(reason: String) -> DirtyLogError {
    DirtyLogError::Unsupported { log: LOG, reason }
}

fn failed(call: &'static str) -> impl FnOnce(io::Error) -> DirtyLogError {
    super::failed(LOG, call)
}
