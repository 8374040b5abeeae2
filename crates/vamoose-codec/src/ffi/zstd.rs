//! zstd's prefixes, which the library keeps pointers to from call to call: here for the length of one frame.

use std::slice;

use zstd_safe::{CCtx, DCtx, ResetDirective, get_error_name, zstd_sys as c};

use crate::engine::CompressError;

/// One whole frame, encoded after `earlier` as its prefix. Errors are zstd's codes.
pub(crate) fn compress_after(
    context: &mut CCtx<'static>,
    earlier: &[u8],
    pages: &[u8],
    out: &mut [u8],
) -> Result<usize, usize> {
    // SAFETY: zstd reads a prefix during one frame, and that ends with `compress2`, or else with `reset`. The empty prefix then
    // replaces its pointer.
    context.ref_prefix(unsafe { forever(earlier) })?;
    let encoded = context.compress2(out, pages);
    context.reset(ResetDirective::SessionOnly)?;
    context.ref_prefix(&[])?;
    encoded
}

/// The frame of [`compress_after`], decoded with the same prefix.
pub(crate) fn decompress_after(
    context: &mut DCtx<'static>,
    earlier: &[u8],
    payload: &[u8],
    pages: &mut [u8],
) -> Result<usize, usize> {
    // SAFETY: as above.
    context.ref_prefix(unsafe { forever(earlier) })?;
    let decoded = context.decompress(pages, payload);
    context.reset(ResetDirective::SessionOnly)?;
    context.ref_prefix(&[])?;
    decoded
}

/// # Safety
/// The result must not be used after the end of `bytes`.
unsafe fn forever(bytes: &[u8]) -> &'static [u8] {
    // SAFETY: the bytes are there and initialised as long as the caller uses them.
    unsafe { slice::from_raw_parts(bytes.as_ptr(), bytes.len()) }
}

/// Why zstd, with this error, has encoded nothing.
pub(crate) fn refused(code: usize) -> CompressError {
    match code {
        NO_ROOM => CompressError::OutputFull,
        code => CompressError::Refused(get_error_name(code)),
    }
}

/// zstd's errors are the last values of `usize`.
const NO_ROOM: usize = (c::ZSTD_ErrorCode::ZSTD_error_dstSize_tooSmall as usize).wrapping_neg();
