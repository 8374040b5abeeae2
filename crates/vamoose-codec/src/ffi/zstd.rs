//! One zstd frame, written or read a packet at a time, whose history stays where it is.
//!
//! zstd's streaming functions copy all pages into, or out of, a buffer of their own. The functions
//! below them, which it calls buffer-less, work from slice to slice and find their history where the
//! caller has left it. So the packets lie one behind the other in a [`Ring`] of ours:
//!
//! ```text
//!   │ packet 4 │ free │ packet 2 │ packet 3 │ free │
//!               └ the next one's place      └ no packet fits here, so 4 went to the start
//! ```
//!
//! Three rules make every block below sound:
//! 1. **A ring never moves and is only reached through one pointer.** zstd keeps pointers to the
//!    history between calls; no reference to the ring lives across one.
//! 2. **What zstd may read is allocated.** It remembers two runs of packets: the one it is in, and
//!    the one before the last return to the start. Both lie in the ring, which lives as long as the
//!    context. Where the new run has overwritten the old one, the encoder drops the old bytes, and
//!    a decoder whose peer refers to them all the same gets wrong bytes, but bytes of the ring.
//! 3. **The caller's slices are touched during a call only.**

use std::{
    ffi::c_void,
    ops::Range,
    ptr::{self, NonNull},
    slice,
};

use multifd::Method;
use zstd_safe::{CCtx, DCtx, ResetDirective, get_error_name, zstd_sys as c};

use crate::{
    DecodeError,
    engine::{CompressError, Unpack},
};

/// Parameters of an encoded frame.
pub(crate) type Parameters = c::ZSTD_compressionParameters;

/// zstd's own choice for `level`, as it is for a frame of unknown size.
pub(crate) fn parameters(level: i32) -> Parameters {
    // SAFETY: computes its result from its arguments; 0 means that sizes are unknown.
    unsafe { c::ZSTD_getCParams(level, 0, 0) }
}

/// One frame being written.
pub(crate) struct Compress {
    context: NonNull<c::ZSTD_CCtx>,
    ring: Ring,
}

// SAFETY: the context is owned by this struct alone, and zstd ties nothing to a thread.
unsafe impl Send for Compress {}

impl Compress {
    /// Most bytes of one call: a packet of QEMU's.
    pub(crate) const PIECE: usize = 512 << 10;

    /// A frame whose history lies in a ring of `ring_len` bytes, at least [`PIECE`](Self::PIECE). Each
    /// time it is full, matches in what lies across the seam take zstd's slower way for the length of
    /// a window: several windows are better than one.
    pub(crate) fn new(parameters: Parameters, ring_len: usize) -> Result<Self, &'static str> {
        // SAFETY: no demands.
        let context = NonNull::new(unsafe { c::ZSTD_createCCtx() }).ok_or(NO_MEMORY)?;
        let ring = Ring::new(ring_len.max(Self::PIECE));
        let this = Self { context, ring };
        let parameters = c::ZSTD_parameters {
            cParams: parameters,
            fParams: c::ZSTD_frameParameters {
                contentSizeFlag: 0,
                checksumFlag: 0,
                noDictIDFlag: 1,
            },
        };
        // SAFETY: the context is live and this struct's own; there is no dictionary to be read.
        let code = unsafe {
            c::ZSTD_compressBegin_advanced(context.as_ptr(), ptr::null(), 0, parameters, UNKNOWN)
        };
        checked(code).map_err(get_error_name)?;
        Ok(this)
    }

    /// Where the next packet goes: [`PIECE`](Self::PIECE) bytes.
    pub(crate) fn input_buffer(&mut self) -> &mut [u8] {
        self.ring.make_room(Self::PIECE)
    }

    /// Encodes the first `len` bytes of the [`input_buffer`](Self::input_buffer) to the start of `out`, whole blocks that
    /// hold nothing back, and returns how many bytes that are.
    pub(crate) fn compress(&mut self, len: usize, out: &mut [u8]) -> Result<usize, CompressError> {
        let src = self.ring.make_room(Self::PIECE)[..len].as_ptr();
        // SAFETY: the context is live, begun and this struct's own. `src` is valid for `len` reads: of the
        // ring, as is the history (rules 1 and 2). `out` is valid for as many writes as it is long.
        let code = unsafe {
            let (dst, room) = (out.as_mut_ptr().cast(), out.len());
            c::ZSTD_compressContinue(self.context.as_ptr(), dst, room, src.cast(), len)
        };
        let written = checked(code).map_err(refused)?;
        self.ring.at += len;
        Ok(written)
    }

    /// Bytes allocated.
    #[cfg(test)]
    pub(crate) fn size(&self) -> usize {
        // SAFETY: the context is live.
        self.ring.bytes.len() + unsafe { c::ZSTD_sizeof_CCtx(self.context.as_ptr()) }
    }
}

impl Drop for Compress {
    fn drop(&mut self) {
        // SAFETY: created by `new`, freed only here.
        unsafe { c::ZSTD_freeCCtx(self.context.as_ptr()) };
    }
}

/// One frame being read.
pub(crate) struct Decompress {
    context: NonNull<c::ZSTD_DCtx>,
    /// Made when the frame's header has shown how much history it takes.
    ring: Option<Ring>,
    /// Where in it the pages of the last packet are.
    last: Range<usize>,
    longest_packet: usize,
    longest_window: u64,
}

// SAFETY: as for `Compress`.
unsafe impl Send for Decompress {}

impl Decompress {
    /// For packets of at most `longest_packet` bytes of pages, in a frame that asks for a window of at most
    /// `longest_window` bytes.
    pub(crate) fn new(longest_packet: usize, longest_window: u64) -> Result<Self, &'static str> {
        // SAFETY: no demands.
        let context = NonNull::new(unsafe { c::ZSTD_createDCtx() }).ok_or(NO_MEMORY)?;
        let this = Self {
            context,
            ring: None,
            last: 0..0,
            longest_packet,
            longest_window,
        };
        // SAFETY: the context is live and this struct's own.
        checked(unsafe { c::ZSTD_decompressBegin(context.as_ptr()) }).map_err(get_error_name)?;
        Ok(this)
    }

    /// Decodes the `expected` bytes of pages in `payload`, which must hold exactly these, in whole blocks.
    fn decompress(&mut self, payload: &[u8], expected: usize) -> Result<(), DecodeError> {
        let ring = match self.ring.take() {
            Some(ring) => ring,
            None => Ring::new(self.history_len(payload)? + self.longest_packet + MARGIN),
        };
        let ring = self.ring.insert(ring);
        ring.make_room(expected + MARGIN);
        let (mut input, mut found) = (payload, 0);
        while !input.is_empty() {
            // SAFETY: the context is live and this struct's own.
            let needed = unsafe { c::ZSTD_nextSrcSizeToDecompress(self.context.as_ptr()) };
            if needed == 0 {
                return Err(DecodeError::Ended { method: METHOD });
            }
            let (part, rest) = input.split_at_checked(needed).ok_or(CUT_SHORT)?;
            let room = &mut ring.rest()[found..];
            // SAFETY: the context is live, begun and this struct's own. `part` is valid for `needed` reads and
            // `room` for as many writes as it is long. History is read in the ring only (rules 1 and 2). The
            // input may be hostile: zstd checks it against all of these bounds, and `tests/all/bounds.rs`
            // holds it to them.
            let code = unsafe {
                let (dst, capacity) = (room.as_mut_ptr().cast::<c_void>(), room.len());
                let context = self.context.as_ptr();
                c::ZSTD_decompressContinue(context, dst, capacity, part.as_ptr().cast(), needed)
            };
            found += checked(code).map_err(|code| corrupt(get_error_name(code)))?;
            if found > expected {
                return Err(DecodeError::too_long(METHOD, payload.len(), expected));
            }
            input = rest;
        }
        // SAFETY: as above.
        match unsafe { c::ZSTD_nextInputType(self.context.as_ptr()) } {
            c::ZSTD_nextInputType_e::ZSTDnit_blockHeader => {}
            c::ZSTD_nextInputType_e::ZSTDnit_frameHeader if !payload.is_empty() => {
                return Err(DecodeError::Ended { method: METHOD });
            }
            _ => return Err(CUT_SHORT),
        }
        DecodeError::check_len(METHOD, payload.len(), found, expected)?;
        self.last = ring.at..ring.at + expected;
        ring.at += expected;
        Ok(())
    }

    /// Bytes of history that the frame beginning with `payload` asks for.
    fn history_len(&self, payload: &[u8]) -> Result<usize, DecodeError> {
        // SAFETY: integers and an enum with a variant of value 0.
        let mut header: c::ZSTD_FrameHeader = unsafe { std::mem::zeroed() };
        // SAFETY: `payload` is valid for as many reads as it is long, and `header` for a write.
        let code = unsafe {
            c::ZSTD_getFrameHeader(&raw mut header, payload.as_ptr().cast(), payload.len())
        };
        match checked(code) {
            Ok(0) => {}
            Ok(_) => return Err(CUT_SHORT),
            Err(code) => return Err(corrupt(get_error_name(code))),
        }
        if header.frameType == c::ZSTD_FrameType_e::ZSTD_skippableFrame {
            return Err(DecodeError::Ended { method: METHOD });
        }
        let window = Some(header.windowSize).filter(|window| *window <= self.longest_window);
        window
            .and_then(|window| usize::try_from(window).ok())
            .ok_or(corrupt("the frame asks for too large a window"))
    }

    /// Bytes allocated.
    #[cfg(test)]
    pub(crate) fn size(&self) -> usize {
        let ring = self.ring.as_ref().map_or(0, |ring| ring.bytes.len());
        // SAFETY: the context is live.
        ring + unsafe { c::ZSTD_sizeof_DCtx(self.context.as_ptr()) }
    }
}

impl Unpack for Decompress {
    fn unpack(&mut self, payload: &[u8], pages: &mut [u8]) -> Result<(), DecodeError> {
        self.decompress(payload, pages.len())?;
        pages.copy_from_slice(self.history());
        Ok(())
    }

    fn unpack_into_history(
        &mut self,
        payload: &[u8],
        len: usize,
    ) -> Option<Result<(), DecodeError>> {
        Some(self.decompress(payload, len))
    }

    fn history(&self) -> &[u8] {
        let ring = self.ring.as_ref();
        ring.map_or(&[], |ring| &ring.all()[self.last.clone()])
    }
}

impl Drop for Decompress {
    fn drop(&mut self) {
        // SAFETY: created by `new`, freed only here.
        unsafe { c::ZSTD_freeDCtx(self.context.as_ptr()) };
    }
}

/// A run of packets after another, from the start again when no more fits.
struct Ring {
    bytes: NonNull<[u8]>,
    /// Where the next packet goes.
    at: usize,
}

// SAFETY: owns plain bytes.
unsafe impl Send for Ring {}

impl Ring {
    /// Zeros that cost no memory before they are used.
    fn new(len: usize) -> Self {
        let bytes = vec![0; len].into_boxed_slice();
        Self {
            bytes: NonNull::from(Box::leak(bytes)),
            at: 0,
        }
    }

    /// Room for `len` bytes, at the start if it has to be.
    fn make_room(&mut self, len: usize) -> &mut [u8] {
        if len > self.bytes.len() - self.at {
            self.at = 0;
        }
        &mut self.rest()[..len]
    }

    /// All bytes from where the next packet goes.
    fn rest(&mut self) -> &mut [u8] {
        // SAFETY: initialised bytes, owned by this ring; the reference ends before zstd's next call (rule 1).
        let all = unsafe { self.bytes.as_mut() };
        &mut all[self.at..]
    }

    fn all(&self) -> &[u8] {
        // SAFETY: as in `rest`.
        unsafe { self.bytes.as_ref() }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: `new` has leaked this box, and it is made again only here.
        drop(unsafe { Box::from_raw(self.bytes.as_ptr()) });
    }
}

const METHOD: Method = Method::Zstd;

const NO_MEMORY: &str = "no memory for a context";

const UNKNOWN: u64 = u64::MAX;

/// Behind a packet: room for a whole block, so that one that is too long shows as such, and what
/// zstd's copying in steps may overwrite.
const MARGIN: usize = (128 << 10) + 64;

const CUT_SHORT: DecodeError = corrupt("the packet ends within a header or block");

const fn corrupt(reason: &'static str) -> DecodeError {
    DecodeError::Corrupt {
        method: METHOD,
        reason,
    }
}

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

fn checked(code: usize) -> Result<usize, usize> {
    // SAFETY: looks at its argument only.
    match unsafe { c::ZSTD_isError(code) } {
        0 => Ok(code),
        _ => Err(code),
    }
}
