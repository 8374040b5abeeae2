//! The page tables of this process as a dirty log: userfaultfd write protection in asynchronous mode (Linux 6.7).
//!
//! Pages are write-protected. The first write to one faults, and the kernel lifts the protection and continues it;
//! no handler is needed. `collect` asks PAGEMAP_SCAN for the pages without protection, which protects them again in
//! the same step, so that there is nothing to clear later.
//!
//! # Pages that are not there
//! Pages that were never touched cost as little as possible, and are not found. There are two kinds of memory:
//!
//! - **Private anonymous**: a page without an entry in the page tables holds zeros, so only pages with one count, and no
//!   entries are made for the rest. A page that is read before it is ever written (then it maps the shared page of zeros)
//!   is found once although nothing changed.
//! - **Everything else**: an entry may be missing because a *written* page was evicted. So `start` marks each
//!   page without one, which takes 2 MiB of page tables per GiB, and what has lost its mark was written.

use std::{io, ops::Range, sync::Mutex};

use vamoose_link::lock;

use super::{Bitmap, DirtyLog, DirtyLogError};
use crate::{
    Ram,
    mapping::is_anonymous,
    sys::{
        pagemap::{Found, PRESENT, Pagemap, Query, SWAPPED, WRITTEN},
        userfaultfd::Userfaultfd,
    },
};

/// Logs what is written through the page tables of this process. For any memory, with or without KVM.
///
/// # What it sees
/// Every write through the mappings that the log was made for: of this process's threads, of the kernel for it
/// (`read(2)` into guest memory), and of a KVM guest, whose tables follow. Not what is written through other
/// mappings of a shared file, and not what hardware or the kernel writes to pages that they pinned before
/// (VFIO, direct I/O under way, registered buffers of io_uring). The VMM marks those when they are done, in a
/// [`SharedBitmap`](super::SharedBitmap). Nor is it a write to give memory back (`madvise`, punching holes),
/// nor does it know the children that the process forks.
///
/// # What it costs
/// A fault for the first write to a page in each round. Transparent huge pages are split when they are first
/// written, because the log counts pages of the base size, and stay split until khugepaged collapses them after
/// `stop`. A huge page of hugetlbfs cannot be split: one write makes all of its base pages dirty. Shared memory
/// takes 2 MiB of page tables per GiB even where it was never touched.
///
/// # What it needs
/// Linux 6.7 with userfaultfd, and /proc. No privilege, whatever the value of `vm.unprivileged_userfaultfd`: the log asks for
/// faults of user mode only, and the kernel's are resolved all the same, because no fault is ever delivered. No other
/// userfaultfd may be registered on the memory.
#[derive(Debug)]
pub struct UserfaultLog {
    ram: Ram,
    pagemap: Pagemap,
    running: Mutex<Option<Running>>,
}

/// What there is between `start` and `stop`.
#[derive(Debug)]
struct Running {
    userfaultfd: Userfaultfd,
    /// Of each block, what makes a page a written one.
    written: Vec<Query>,
    found: Found,
}

const LOG: &str = "userfaultfd";

impl UserfaultLog {
    /// A log for `ram`, of which it keeps the mappings alive.
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
            running: Mutex::new(None),
        })
    }

    fn protect(&self) -> Result<Running, DirtyLogError> {
        let mut running = Running {
            userfaultfd: open_userfaultfd()?,
            written: Vec::with_capacity(self.ram.blocks().len()),
            found: Found::new(),
        };
        for (index, block) in self.ram.blocks().iter().enumerate() {
            let anonymous = is_anonymous(block).map_err(failed("reading /proc/self/maps"))?;
            let addresses = self.addresses(index);
            let registered = running.userfaultfd.register(addresses.clone());
            registered.map_err(failed(
                "UFFDIO_REGISTER (EBUSY: another userfaultfd has this memory)",
            ))?;
            let query = written(anonymous);
            if anonymous {
                let ignored = self
                    .pagemap
                    .scan(addresses, query, &mut running.found, drop);
                ignored.map_err(failed("PAGEMAP_SCAN"))?;
            } else {
                let protected = running.userfaultfd.write_protect(addresses);
                protected.map_err(failed("UFFDIO_WRITEPROTECT"))?;
            }
            running.written.push(query);
        }
        Ok(running)
    }

    fn addresses(&self, block: usize) -> Range<usize> {
        self.ram
            .blocks()
            .get(block)
            .map_or(0..0, |block| block.address()..block.address() + block.len())
    }
}

impl DirtyLog for UserfaultLog {
    fn start(&self) -> Result<(), DirtyLogError> {
        let mut running = lock(&self.running);
        // The memory can be registered with one userfaultfd only.
        *running = None;
        *running = Some(self.protect()?);
        Ok(())
    }

    fn collect(&self, block: usize, dirty: &mut Bitmap) -> Result<(), DirtyLogError> {
        let mut running = lock(&self.running);
        let Some(Running { written, found, .. }) = running.as_mut() else {
            return Err(DirtyLogError::Setup {
                log: LOG,
                reason: "collected before it was started".into(),
            });
        };
        let Some(&query) = written.get(block) else {
            return Ok(());
        };
        let (addresses, page_size) = (self.addresses(block), self.ram.page_size());
        let start = addresses.start;
        let scanned = self.pagemap.scan(addresses, query, found, |run| {
            dirty.set_range((run.start - start) / page_size, run.len() / page_size);
        });
        scanned.map_err(failed("PAGEMAP_SCAN"))
    }

    /// `collect` has cleared already.
    fn clear(&self, _: usize, _: usize, _: &[u64]) -> Result<(), DirtyLogError> {
        Ok(())
    }

    fn stop(&self) -> Result<(), DirtyLogError> {
        let Some(running) = lock(&self.running).take() else {
            return Ok(());
        };
        // Closing would do, were there no copy of the file descriptor in a child that has not called exec yet.
        let mut result = Ok(());
        for index in 0..running.written.len() {
            let ended = running.userfaultfd.unregister(self.addresses(index));
            result = result.and(ended);
        }
        result.map_err(failed("UFFDIO_UNREGISTER"))
    }
}

/// What to look for in a block, see the [module](self).
fn written(anonymous: bool) -> Query {
    Query {
        all: WRITTEN,
        any: if anonymous { PRESENT | SWAPPED } else { 0 },
        write_protect: true,
        ..Query::default()
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
    move |source| DirtyLogError::System {
        log: LOG,
        call,
        source,
    }
}
