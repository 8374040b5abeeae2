//! Guest memory, which changes while it is looked at.

use vm_memory::VolatileSlice;

use crate::zero::ZEROS;

/// Whether every byte of `page` is zero, as far as it does not change meanwhile.
pub(crate) fn is_zero(page: &VolatileSlice<'_>) -> bool {
    let guard = page.ptr_guard();
    (0..page.len()).step_by(ZEROS.len()).all(|start| {
        let len = ZEROS.len().min(page.len() - start);
        // SAFETY: both areas can be read: the slice promises that for its whole length, and `start + len` is within
        // it; `ZEROS` has at least `len` bytes. The C library keeps neither. If the guest writes the page at
        // the same time, the result is one of a page that was never there as a whole, which the
        // caller's contract allows for.
        unsafe { libc::memcmp(guard.as_ptr().add(start).cast(), ZEROS.as_ptr().cast(), len) == 0 }
    })
}
