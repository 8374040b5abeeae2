//! Giving memory back to the system.

use std::io;

use rustix::mm::{Advice, madvise};
use vm_memory::VolatileSlice;

use crate::RamBlock;

/// Gives the pages of `memory`, a part of `block`, back: they read as zeros, until they are written again.
///
/// # Errors
/// Where the system cannot do that with this kind of memory; it is unchanged then.
pub(crate) fn punch(block: &RamBlock, memory: VolatileSlice<'_>) -> io::Result<()> {
    let advice = match block.file() {
        // Private memory.
        None => Advice::LinuxDontNeed,
        // Shared memory: the file's hole is everybody's.
        Some(_) => Advice::LinuxRemove,
    };
    let guard = memory.ptr_guard_mut();
    // SAFETY: the slice is a part of a mapping of guest memory that outlives it, and nobody has a Rust reference
    // into guest memory. To the guest and to us this is as a write of zeros.
    unsafe { madvise(guard.as_ptr().cast(), memory.len(), advice)? };
    Ok(())
}
