//! Collecting from a dirty log, by several threads, and clearing it.

use super::{Bitmap, COLLECT_BYTES, DirtyLog, DirtyLogError};
use crate::parallel;

/// Adds the pages that `log` has found to `dirty`, which has a bitmap for each block, on up to `threads` threads.
///
/// # Errors
/// The first failure of the log. Pages may be lost then.
pub(crate) fn collect(
    log: &dyn DirtyLog,
    dirty: &mut [Bitmap],
    threads: usize,
) -> Result<(), DirtyLogError> {
    let words = (log.pages_per_collect() / 64).max(1);
    let blocks = dirty.iter_mut().enumerate();
    let parts = blocks.flat_map(|(block, bitmap)| {
        let parts = bitmap.words_mut().chunks_mut(words).enumerate();
        parts.map(move |(nth, part)| (block, nth * words * 64, part))
    });
    let collected = parallel::each(parts.collect(), threads, &|(block, first_page, words)| {
        log.collect(block, first_page, words)
    });
    dirty.iter_mut().for_each(Bitmap::trim);
    collected
}

/// Clears all pages of `dirty`, of which one has `page_size` bytes, in windows that no log finds too long.
///
/// # Errors
/// The first failure of the log.
pub(crate) fn clear(
    log: &dyn DirtyLog,
    dirty: &[Bitmap],
    page_size: usize,
) -> Result<(), DirtyLogError> {
    let words = (COLLECT_BYTES / page_size / 64).max(1);
    for (block, bitmap) in dirty.iter().enumerate() {
        for (nth, part) in bitmap.words().chunks(words).enumerate() {
            log.clear(block, nth * words * 64, part)?;
        }
    }
    Ok(())
}
