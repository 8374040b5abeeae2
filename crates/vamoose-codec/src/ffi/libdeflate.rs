//! Raw deflate by libdeflate, a whole stream per call, as qpl and qatzip need it.
//!
//! The crate libdeflater deflates. It does not inflate: it does not return where the data ended, which is where a gzip member's
//! trailer begins.
//!
//! Two rules make the blocks below sound:
//! 1. **The decompressor is ours alone**: allocated by `new`, freed by `drop`, used through
//!    `&mut self` in between. libdeflate ties nothing to a thread.
//! 2. **libdeflate touches the caller's memory during a call only**, within the two lengths it is
//!    given, whatever the input; `tests/all/bounds.rs` and `tests/all/qatzip.rs` check this.

use std::ptr::NonNull;

use libdeflate_sys as c;
use libdeflater::{CompressionLvl, Compressor};
use multifd::Method;

use crate::{
    DecodeError,
    engine::{Compress, CompressError},
};

pub(crate) const NAME: &str = "libdeflate";

/// Writes streams that are independent of each other.
pub(crate) struct Deflate(Compressor);

impl Deflate {
    /// At one of libdeflate's levels, 0 to 12.
    pub(crate) fn new(level: i32) -> Result<Self, &'static str> {
        let level = CompressionLvl::new(level).map_err(|_| "not a level of libdeflate")?;
        Ok(Self(Compressor::new(level)))
    }
}

impl Compress for Deflate {
    fn compress(&mut self, pages: &[u8], out: &mut [u8]) -> Result<usize, CompressError> {
        // There is no other error.
        let result = self.0.deflate_compress(pages, out);
        result.map_err(|_| CompressError::OutputFull)
    }
}

/// Inflates one whole stream per call.
pub(crate) struct Inflate(NonNull<c::libdeflate_decompressor>);

/// What one stream has taken and made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Inflated {
    /// Bytes of the stream, at the start of the input.
    pub(crate) consumed: usize,
    /// Bytes written to the start of the output.
    pub(crate) produced: usize,
}

/// Why a stream was not inflated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// It is corrupt, or continues after the input; libdeflate does not distinguish these.
    Data,
    /// It holds more than fits into the output. It may also be cut short there: libdeflate reads on
    /// for a few bytes that are not there, as if they were zeros.
    Room,
}

// SAFETY: rule 1.
unsafe impl Send for Inflate {}

impl Inflate {
    /// For the streams of `method`.
    pub(crate) fn new(method: Method) -> Result<Self, DecodeError> {
        // SAFETY: takes nothing; returns memory of its own, or null.
        let decompressor = NonNull::new(unsafe { c::libdeflate_alloc_decompressor() });
        let reason = "no memory";
        let decompressor = decompressor.ok_or(DecodeError::Engine { method, reason })?;
        Ok(Self(decompressor))
    }

    /// Inflates the stream at the start of `input` to the start of `out`.
    pub(crate) fn inflate(&mut self, input: &[u8], out: &mut [u8]) -> Result<Inflated, Failure> {
        let (mut consumed, mut produced) = (0, 0);
        // SAFETY: the decompressor is valid and not in use (rule 1). The pointers are valid for
        // reads and writes of the lengths beside them, and the last two for one write each, until
        // the call returns (rule 2).
        let code = unsafe {
            c::libdeflate_deflate_decompress_ex(
                self.0.as_ptr(),
                input.as_ptr().cast(),
                input.len(),
                out.as_mut_ptr().cast(),
                out.len(),
                &raw mut consumed,
                &raw mut produced,
            )
        };
        match code {
            c::libdeflate_result_LIBDEFLATE_SUCCESS => Ok(Inflated { consumed, produced }),
            c::libdeflate_result_LIBDEFLATE_INSUFFICIENT_SPACE => Err(Failure::Room),
            _ => Err(Failure::Data),
        }
    }
}

impl Drop for Inflate {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, freed only here.
        unsafe { c::libdeflate_free_decompressor(self.0.as_ptr()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inflate_stops_at_the_end_of_the_stream() {
        let mut inflate = Inflate::new(Method::Qpl).unwrap();
        let stored = [1, 3, 0, 0xfc, 0xff, b'a', b'b', b'c', 9, 9, 9];
        let mut out = [0; 8];
        let inflated = inflate.inflate(&stored, &mut out);
        assert_eq!(
            inflated,
            Ok(Inflated {
                consumed: 8,
                produced: 3
            })
        );
        assert_eq!(&out, b"abc\0\0\0\0\0");
        assert_eq!(inflate.inflate(&stored, &mut out[..2]), Err(Failure::Room));
        assert_eq!(inflate.inflate(&stored, &mut []), Err(Failure::Room));
        for len in 0..8 {
            let failure = inflate.inflate(&stored[..len], &mut out);
            assert_eq!(failure, Err(Failure::Data), "{len}");
        }
        // The shortest stream, whose bytes are zeros but for the first.
        let nothing = Inflated {
            consumed: 2,
            produced: 0,
        };
        assert_eq!(inflate.inflate(&[3, 0, 7], &mut []), Ok(nothing));
    }
}
