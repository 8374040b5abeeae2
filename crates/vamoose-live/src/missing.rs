//! Guest memory of which pages are missing while the guest runs already: who touches one waits until it is filled.
//!
//! ```text
//!  guest touches a missing page ──> userfaultfd ──> serve: tells which page
//!  pages from a source, or a file ──> fill ──> the page is there, and the guest goes on
//! ```
//! Pages that are not missing and have never been touched are filled with zeros when they are touched.
//!
//! The userfaultfd is never closed while pages are missing: they would read as zeros. If they cannot be had any more, whoever
//! touches one waits until the process ends.

use std::{
    io,
    ops::Range,
    sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
};

use rustix::event::{PollFd, PollFlags};
use thiserror::Error;
use vamoose_link::{Hangup, wait_until};
use vm_memory::VolatileSlice;

use crate::{
    Ram, RamBlock,
    dirty::{Bitmap, count},
    mapping::backings,
    sys::{faults::Faults, memory::Punch},
};

/// Memory that cannot be filled while the guest runs.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum MissingPagesError {
    #[error(
        "userfaultfd is not to be had: it takes CAP_SYS_PTRACE, access to /dev/userfaultfd, or vm.unprivileged_userfaultfd=1"
    )]
    Userfaultfd(#[source] io::Error),
    #[error("guest memory must not be given back to the system, as its configuration says")]
    Pinned,
    #[error(
        "pages of RAM block `{block}` cannot be missing while the guest runs: it takes private or shared memory in pages of the base size, registered with no other userfaultfd"
    )]
    Block { block: String, source: io::Error },
}

/// A bit for each page of each block, which threads share.
pub(crate) struct AtomicPages(Vec<Box<[AtomicU64]>>);

impl AtomicPages {
    pub(crate) fn new(bitmaps: &[Bitmap]) -> Self {
        let words = |bitmap: &Bitmap| {
            let words = bitmap.words().iter();
            words.map(|word| AtomicU64::new(*word)).collect()
        };
        Self(bitmaps.iter().map(words).collect())
    }

    pub(crate) fn get(&self, block: usize, page: usize) -> bool {
        let word = self.0.get(block).and_then(|words| words.get(page / 64));
        word.is_some_and(|word| word.load(Ordering::Acquire) >> (page % 64) & 1 == 1)
    }

    /// Sets a page that is there; whether it was set before.
    pub(crate) fn set(&self, block: usize, page: usize) -> bool {
        let bit = 1 << (page % 64);
        self.0[block][page / 64].fetch_or(bit, Ordering::AcqRel) & bit != 0
    }

    /// Unsets a page that is there; whether it was set before.
    pub(crate) fn unset(&self, block: usize, page: usize) -> bool {
        let bit = 1 << (page % 64);
        self.0[block][page / 64].fetch_and(!bit, Ordering::AcqRel) & bit != 0
    }
}

/// The missing pages of a guest.
pub(crate) struct Missing {
    faults: Faults,
    ram: Ram,
    pages: AtomicPages,
    left: AtomicUsize,
    /// Missing pages must never read as zeros.
    is_kept: AtomicBool,
}

impl Missing {
    /// Whether pages of `ram` can be missing.
    ///
    /// # Errors
    /// Why they cannot.
    pub(crate) fn check(ram: &Ram) -> Result<(), MissingPagesError> {
        let faults = Faults::open().map_err(MissingPagesError::Userfaultfd)?;
        punches(ram)?;
        register(&faults, ram)?;
        unregister(&faults, ram);
        Ok(())
    }

    /// Has the pages of `ram` that are set in `missing`, a bitmap for each block, be missing from here on. All others keep their
    /// content.
    ///
    /// # Errors
    /// When the memory does not allow that. Pages may have lost their content.
    pub(crate) fn new(ram: &Ram, missing: &[Bitmap]) -> Result<Self, MissingPagesError> {
        let faults = Faults::open().map_err(MissingPagesError::Userfaultfd)?;
        let punches = punches(ram)?;
        // First: khugepaged makes a huge page of memory that is not registered, with zeros for what is missing in it.
        register(&faults, ram)?;
        for ((block, pages), punch) in ram.blocks().iter().zip(missing).zip(punches) {
            drop_pages(block, pages, ram.page_size(), punch)
                .map_err(|source| refused(block, source))?;
        }
        Ok(Self {
            faults,
            ram: ram.clone(),
            pages: AtomicPages::new(missing),
            left: AtomicUsize::new(count(missing)),
            is_kept: AtomicBool::new(false),
        })
    }

    /// How many pages are missing.
    pub(crate) fn left(&self) -> usize {
        self.left.load(Ordering::Acquire)
    }

    pub(crate) fn is_missing(&self, block: usize, page: usize) -> bool {
        self.pages.get(block, page)
    }

    /// Fills a page with `bytes`, if it is missing; `None` is for zeros. Whether that was the last one.
    pub(crate) fn fill(&self, block: usize, page: usize, bytes: Option<&[u8]>) -> io::Result<bool> {
        if !self.is_missing(block, page) {
            return Ok(false);
        }
        self.put(block, page, bytes)?;
        let filled = self.pages.unset(block, page);
        Ok(filled && self.left.fetch_sub(1, Ordering::AcqRel) == 1)
    }

    /// Has pages that are not missing be zero for those who touch them, and calls `wanted` with those that are, until it fails or
    /// `stop` is hung up. A page may be wanted several times.
    pub(crate) fn serve<E: From<io::Error>>(
        &self,
        stop: &Hangup,
        mut wanted: impl FnMut(usize, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        loop {
            let mut fds = [
                PollFd::new(&self.faults, PollFlags::IN),
                PollFd::new(stop, PollFlags::IN),
            ];
            wait_until(&mut fds, None)?;
            if stop.is_hung_up() {
                return Ok(());
            }
            for address in self.faults.read()? {
                let Some((block, page)) = self.page_at(address) else {
                    continue;
                };
                if self.is_missing(block, page) {
                    wanted(block, page)?;
                } else {
                    self.put(block, page, None)?;
                }
            }
        }
    }

    /// Memory is as any other again. Only when nothing is missing, or nobody will rely on the content.
    pub(crate) fn release(&self) {
        unregister(&self.faults, &self.ram);
    }

    /// Whether pages that are missing when this is dropped are missing for ever: who touches one waits. For a guest that has
    /// begun to run.
    pub(crate) fn keep_until_filled(&self, is_kept: bool) {
        self.is_kept.store(is_kept, Ordering::Release);
    }

    fn put(&self, block: usize, page: usize, bytes: Option<&[u8]>) -> io::Result<()> {
        let slice = page_of(&self.ram, block, page)?;
        match bytes {
            Some(bytes) => self.faults.fill(&slice, bytes),
            None => self.faults.fill_zero(&slice),
        }
        .map(drop)
    }

    /// The block and the page in it at an address of this process.
    fn page_at(&self, address: usize) -> Option<(usize, usize)> {
        let blocks = self.ram.blocks();
        let index = blocks
            .iter()
            .position(|block| block.addresses().contains(&address))?;
        let offset = address - blocks[index].address();
        Some((index, offset / self.ram.page_size()))
    }
}

impl Drop for Missing {
    fn drop(&mut self) {
        if self.is_kept.load(Ordering::Acquire) && self.left() > 0 {
            let kept = rustix::io::fcntl_dupfd_cloexec(&self.faults, 0).map(std::mem::forget);
            if let Err(error) = kept {
                tracing::error!(%error, "missing pages will read as zeros");
            }
        }
    }
}

/// The memory of a page.
fn page_of(ram: &Ram, block: usize, page: usize) -> io::Result<VolatileSlice<'_>> {
    let size = ram.page_size();
    let block = ram.blocks().get(block).ok_or(io::ErrorKind::InvalidInput)?;
    let slice = block.memory().subslice(page.saturating_mul(size), size);
    slice.map_err(io::Error::other)
}

fn register(faults: &Faults, ram: &Ram) -> Result<(), MissingPagesError> {
    for (index, block) in ram.blocks().iter().enumerate() {
        if let Err(source) = faults.register(&block.addresses()) {
            for block in &ram.blocks()[..index] {
                let _ = faults.unregister(&block.addresses());
            }
            return Err(refused(block, source));
        }
    }
    Ok(())
}

fn unregister(faults: &Faults, ram: &Ram) {
    for block in ram.blocks() {
        if let Err(error) = faults.unregister(&block.addresses()) {
            tracing::warn!(%error, "memory stays registered with a userfaultfd");
        }
    }
}

/// How pages of each block are dropped.
fn punches(ram: &Ram) -> Result<Vec<Punch>, MissingPagesError> {
    let blocks = ram.blocks().iter().zip(backings(ram));
    let punches = blocks.map(|(block, backing)| {
        let punch = Punch::of(backing).filter(|punch| punch.unit() == ram.page_size());
        punch.ok_or_else(|| refused(block, io::ErrorKind::Unsupported.into()))
    });
    punches.collect()
}

fn refused(block: &RamBlock, source: io::Error) -> MissingPagesError {
    let block = block.name().to_string();
    MissingPagesError::Block { block, source }
}

/// Drops `pages` of `block`, so that they are missing.
fn drop_pages(block: &RamBlock, pages: &Bitmap, size: usize, punch: Punch) -> io::Result<()> {
    let mut run = 0..0;
    for page in pages.iter().chain([usize::MAX]) {
        if page != run.end {
            drop_run(block, run, size, punch)?;
            run = page..page;
        }
        run.end = page.saturating_add(1);
    }
    Ok(())
}

fn drop_run(block: &RamBlock, run: Range<usize>, size: usize, punch: Punch) -> io::Result<()> {
    if run.is_empty() {
        return Ok(());
    }
    let memory = block.memory().subslice(run.start * size, run.len() * size);
    punch.punch(memory.map_err(io::Error::other)?)
}
