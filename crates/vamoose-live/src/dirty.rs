//! Dirty logs: which pages have been written since they were last read.
//!
//! # Discipline
//! A page's bit means that the page may have changed since the migration last read it. The order of calls:
//!
//! ```text
//!  start ── watch, read, send ── collect ── clear, read, send ── collect ── clear, read, send ── … ── stop
//!             │                    │          │
//!             │                    │          └ by page, always before the page is read
//!             │                    └ adds the pages written so far to the caller's bitmap
//!             └ by page, once, before it is read for the first time
//! ```
//!
//! - Only the migration watches and clears, only between [`start`](DirtyLog::start) and [`stop`](DirtyLog::stop), and a page
//!   only **before** it reads the page. A write in between is then part of the data that was read, or is logged again. A bit
//!   cleared after reading would lose the write.
//! - A log may already clear in [`collect`](DirtyLog::collect), if its mechanism reads and clears at once. Then only the caller has
//!   the returned pages.
//! - Large memory is watched and cleared in windows of up to 1 GiB, by several threads at once, while the guest runs and other
//!   windows are read. So `start` should be short. Work whose time grows with the number of pages belongs in `watch`.
//! - A component whose writes a log does not see (device emulation with KVM's log, a vhost-user process
//!   with this process's page tables) has to mark the page in a log of its own **after** the write;
//!   [`Merged`] makes one log of several.
//! - A failed migration leaves nothing behind. `stop` ends logging, and bits that were collected or cleared before have lost their
//!   meaning. The next attempt begins with `start` and sends every page, because its destination has none. So no failure can lose
//!   a page.

mod bitmap;
mod collect;
mod kvm;
mod merged;
mod physical;
mod shared;
mod userfaultfd;
mod vm_memory_bitmap;

use std::{io, ops::Range};

use thiserror::Error;

pub use bitmap::Bitmap;
pub(crate) use bitmap::{count, masks, ones, pages_in, set_pages};
pub(crate) use collect::{clear, collect};
pub use kvm::{KvmDirtyLog, KvmSlot};
pub use merged::Merged;
pub use physical::{PhysicalLog, Place, Placed, VhostLog};
pub use shared::SharedBitmap;
pub use userfaultfd::UserfaultLog;
pub use vm_memory_bitmap::VmMemoryLog;

/// Finds the pages that were written. Blocks are named by their index in [`Ram`](crate::Ram).
///
/// All methods may be called from several threads at once; see the [module](self) for what may be called when.
pub trait DirtyLog: Send + Sync {
    /// Begins to log. Writes to a page are recorded from its [`watch`](DirtyLog::watch) on.
    ///
    /// # Errors
    /// When the mechanism cannot be set up.
    fn start(&self) -> Result<(), DirtyLogError>;

    /// From here on, writes to `pages` of `block` are recorded. Earlier writes need not be recorded. The first page is a multiple
    /// of 64, and so is the end, unless it is the end of the block. Called once for each page after `start`, before the page is
    /// read, and before the first [`collect`](DirtyLog::collect).
    ///
    /// # Errors
    /// When the mechanism fails. The migration has to end.
    fn watch(&self, block: usize, pages: Range<usize>) -> Result<(), DirtyLogError> {
        let _ = (block, pages);
        Ok(())
    }

    /// How many pages of a block one call of [`collect`](DirtyLog::collect) covers, so that several threads can each do a part: a
    /// multiple of 64. By default all of a block, for mechanisms that cannot divide it.
    fn pages_per_collect(&self) -> usize {
        usize::MAX
    }

    /// Sets in `dirty` the bits of the pages of `block` that were written, and leaves the other bits as they are. The first bit
    /// is page `first_page`, a multiple of [`pages_per_collect`](DirtyLog::pages_per_collect).
    ///
    /// # Errors
    /// When the mechanism fails. Pages may be lost then: the migration has to end.
    fn collect(
        &self,
        block: usize,
        first_page: usize,
        dirty: &mut [u64],
    ) -> Result<(), DirtyLogError>;

    /// Clears the pages of `block` whose bits are set in `words`, whose first bit is page
    /// `first_page`, a multiple of 64: the next write to each of them is reported again. Does nothing by default, for logs that
    /// clear in [`collect`](DirtyLog::collect).
    ///
    /// # Errors
    /// When the mechanism fails. The migration has to end.
    fn clear(&self, block: usize, first_page: usize, words: &[u64]) -> Result<(), DirtyLogError> {
        let _ = (block, first_page, words);
        Ok(())
    }

    /// Ends logging, also after any of the above has failed. Writes no longer cost anything.
    ///
    /// # Errors
    /// When the mechanism cannot be taken down.
    fn stop(&self) -> Result<(), DirtyLogError>;
}

/// Memory of one call of [`DirtyLog::collect`] where it can be divided: a multiple of every size of huge pages.
const COLLECT_BYTES: usize = 1 << 30;

/// A dirty log that failed, or could not be set up.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum DirtyLogError {
    #[error("dirty log ({log}): {call} failed")]
    System {
        log: &'static str,
        call: &'static str,
        source: io::Error,
    },
    /// This host does not have the mechanism.
    #[error("dirty log ({log}): {reason}")]
    Unsupported { log: &'static str, reason: String },
    /// The VMM described its memory in a way that does not fit.
    #[error("dirty log ({log}): {reason}")]
    Setup { log: &'static str, reason: String },
}

/// The error for a failed `call` of `log`.
fn failed(log: &'static str, call: &'static str) -> impl FnOnce(io::Error) -> DirtyLogError {
    move |source| DirtyLogError::System { log, call, source }
}
