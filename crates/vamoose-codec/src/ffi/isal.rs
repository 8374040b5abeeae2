//! Raw deflate by Intel's ISA-L: one stream over all packets ([`Deflate`]), or a whole stream per call ([`OneShot`]).
//!
//! Three rules make every block below sound:
//! 1. **The C state never moves and is only reached through one pointer.** It lives in a [`Heap`],
//!    which hands out no reference to it. ISA-L keeps pointers into its own level buffer between
//!    calls, so neither a move nor a `&mut` in between would do.
//! 2. **ISA-L touches the caller's memory during a call only.** It reads `avail_in` bytes at
//!    `next_in` and writes at most `avail_out` bytes at `next_out`; both are set from slices
//!    immediately before a call and cleared after it. What it needs of them later, it copies.
//! 3. **Counters are differences.** `total_in` and `total_out` are 32 bits wide and wrap at 4 GiB,
//!    which ISA-L allows for (it only subtracts them); we never read them.
//!
//! The same input may be encoded differently each time: at the start of a stream, ISA-L's assembly hashes whatever value a
//! register holds (`write_first_byte`; e.g. the state's address), and may miss a match there. The output is correct in any case.

use std::{alloc, ptr, ptr::NonNull};

use isal_sys::igzip_lib as c;

use crate::{
    engine::{Compress, CompressError},
    stream::{Step, Stream},
};

#[cfg(test)]
mod tests;

/// A level of ISA-L. Its level 0 is another algorithm than zlib's: one pass, with a given Huffman code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Level(u32);

impl Level {
    /// One pass with the fixed Huffman code of deflate, which needs no description.
    pub(crate) const FIXED: Self = Self(0);

    /// The level that serves zlib's `level`, if there is one; `zlib` has the measurements.
    pub(crate) fn of_zlib(level: i32) -> Result<Self, &'static str> {
        let level = u32::try_from(level).ok();
        let level = level.filter(|level| (1..=3).contains(level));
        level.map(Self).ok_or("not a level of ISA-L")
    }

    /// Bytes of the level's own buffer that the stream is given: what ISA-L advises.
    fn buffer_len(self) -> u32 {
        match self.0 {
            0 => 0,
            1 => c::ISAL_DEF_LVL1_DEFAULT,
            2 => c::ISAL_DEF_LVL2_DEFAULT,
            _ => c::ISAL_DEF_LVL3_DEFAULT,
        }
    }
}

pub(crate) const NAME: &str = "isa-l";

/// One raw deflate stream being written.
pub(crate) struct Deflate {
    state: Heap<DeflateState>,
}

/// The stream and its level buffer; the alignment is for the vector code that works on the latter.
#[repr(C, align(64))]
struct DeflateState {
    level_buffer: [u8; c::ISAL_DEF_LVL3_DEFAULT as usize],
    stream: c::isal_zstream,
}

const _: () = assert!(
    c::ISAL_DEF_LVL1_DEFAULT <= c::ISAL_DEF_LVL3_DEFAULT
        && c::ISAL_DEF_LVL2_DEFAULT <= c::ISAL_DEF_LVL3_DEFAULT
);

// SAFETY: `DeflateState` consists of integers and raw pointers, for which zero is a valid value.
// `isal_deflate` works on what its stream points to, and on constant tables.
unsafe impl Zeroable for DeflateState {}

impl DeflateState {
    /// Prepares the stream for `level`.
    ///
    /// # Safety
    /// `at` must point to an initialised state that nothing else refers to (rule 1), and `init` be one of ISA-L's functions
    /// that set up a stream, which only store into it.
    unsafe fn set_up(
        at: *mut Self,
        level: Level,
        init: unsafe extern "C" fn(*mut c::isal_zstream),
    ) {
        // SAFETY: as the caller promises. The level buffer is as large as the size that the stream is given, for every level.
        unsafe {
            init(&raw mut (*at).stream);
            (*at).stream.level = level.0;
            (*at).stream.level_buf = (&raw mut (*at).level_buffer).cast();
            (*at).stream.level_buf_size = level.buffer_len();
            (*at).stream.gzip_flag = RAW;
            if level == Level::FIXED {
                // It fails for other types of code, and for streams that have begun.
                c::isal_deflate_set_hufftables(&raw mut (*at).stream, ptr::null_mut(), FIXED_CODE);
            }
        }
    }
}

impl Deflate {
    pub(crate) fn new(level: Level) -> Self {
        let state = Heap::<DeflateState>::zeroed();
        let at = state.as_ptr();
        // SAFETY: `at` points to an initialised state that nothing else refers to (rule 1).
        unsafe {
            DeflateState::set_up(at, level, c::isal_deflate_init);
            (*at).stream.flush = SYNC_FLUSH;
        }
        Self { state }
    }
}

impl Compress for Deflate {
    /// All pages in one call: fed page by page, ISA-L would work on copies in its own buffer and
    /// lose a quarter of its speed.
    fn compress(&mut self, pages: &[u8], out: &mut [u8]) -> Result<usize, CompressError> {
        let at = self.state.as_ptr();
        // SAFETY: `at` points to an initialised state that nothing else refers to (rule 1), set up by
        // `new` with a level buffer as large as the size that it names.
        let (left, idle) = unsafe {
            let stream = &raw mut (*at).stream;
            let left = lend(stream, pages, out, c::isal_deflate)?;
            let state = (*stream).internal_state.state;
            (left, state == c::isal_zstate_state_ZSTATE_NEW_HDR)
        };
        if left.code != 0 {
            return Err(CompressError::Refused("invalid level or level buffer"));
        }
        // ISA-L's documented sign that everything is out, the sync marker included.
        if left.input > 0 || left.room == 0 || !idle {
            return Err(CompressError::OutputFull);
        }
        Ok(out.len() - left.room)
    }
}

/// Writes raw deflate streams that are independent of each other, one per call: what a gzip member holds.
pub(crate) struct OneShot {
    state: Heap<DeflateState>,
    level: Level,
}

impl OneShot {
    pub(crate) fn new(level: Level) -> Self {
        Self {
            state: Heap::zeroed(),
            level,
        }
    }
}

impl Compress for OneShot {
    /// Incompressible input becomes stored blocks: 5 bytes more for each 65535.
    fn compress(&mut self, input: &[u8], out: &mut [u8]) -> Result<usize, CompressError> {
        let at = self.state.as_ptr();
        // SAFETY: `at` points to an initialised state that nothing else refers to (rule 1). All that ISA-L reads of an
        // earlier call, it sets anew first.
        let left = unsafe {
            DeflateState::set_up(at, self.level, c::isal_deflate_stateless_init);
            (*at).stream.flush = NO_FLUSH;
            (*at).stream.end_of_stream = 1;
            lend(&raw mut (*at).stream, input, out, c::isal_deflate_stateless)?
        };
        whole(&left, out)
    }
}

/// The result of a call on a stream, and what it left over.
struct Left {
    code: i32,
    input: usize,
    room: usize,
}

/// Lends `input` and `out` to `stream` for one call of `deflate` (rule 2).
///
/// # Safety
/// `stream` must point to an initialised stream that nothing else refers to (rule 1), whose level buffer
/// is as large as it states and whose code is one of ISA-L's making; `deflate` must be one of ISA-L's
/// functions that write such a stream.
unsafe fn lend(
    stream: *mut c::isal_zstream,
    input: &[u8],
    out: &mut [u8],
    deflate: unsafe extern "C" fn(*mut c::isal_zstream) -> i32,
) -> Result<Left, CompressError> {
    let len = u32::try_from(input.len()).map_err(|_| CompressError::Refused("more than 4 GiB"))?;
    let room =
        u32::try_from(out.len()).map_err(|_| CompressError::Refused("room for more than 4 GiB"))?;
    // SAFETY: the caller vouches for the stream. `next_in` and `next_out` are valid for `len` reads and
    // `room` writes until this function returns, and are cleared before it does. ISA-L does not write
    // through `next_in`.
    unsafe {
        (*stream).next_in = input.as_ptr().cast_mut();
        (*stream).avail_in = len;
        (*stream).next_out = out.as_mut_ptr();
        (*stream).avail_out = room;
        let code = deflate(stream);
        let left = Left {
            code,
            input: (*stream).avail_in as usize,
            room: ((*stream).avail_out as usize).min(out.len()),
        };
        (*stream).next_in = ptr::null_mut();
        (*stream).avail_in = 0;
        (*stream).next_out = ptr::null_mut();
        (*stream).avail_out = 0;
        // The bit buffer points into the output too; ISA-L sets it anew before each use.
        let bits = &raw mut (*stream).internal_state.bitbuf;
        (*bits).m_out_buf = ptr::null_mut();
        (*bits).m_out_end = ptr::null_mut();
        (*bits).m_out_start = ptr::null_mut();
        Ok(left)
    }
}

/// Whether a whole stream has been written to `out`, by a call that makes one at once.
fn whole(left: &Left, out: &[u8]) -> Result<usize, CompressError> {
    match left.code {
        0 if left.input == 0 => Ok(out.len() - left.room),
        0 | c::STATELESS_OVERFLOW => Err(CompressError::OutputFull),
        _ => Err(CompressError::Refused("invalid level or level buffer")),
    }
}

/// One raw deflate stream being read.
pub(crate) struct Inflate {
    state: Heap<c::inflate_state>,
}

// SAFETY: `inflate_state` consists of integers, arrays and a union of them, and raw pointers, for
// all of which zero is a valid value. `isal_inflate` works on that and on constant tables.
unsafe impl Zeroable for c::inflate_state {}

impl Inflate {
    pub(crate) fn new() -> Self {
        let state = Heap::<c::inflate_state>::zeroed();
        let at = state.as_ptr();
        // SAFETY: `at` points to an initialised state that nothing else refers to (rule 1), and
        // `isal_inflate_init` does nothing but store into it.
        unsafe {
            c::isal_inflate_init(at);
            (*at).crc_flag = c::ISAL_DEFLATE;
        }
        Self { state }
    }
}

impl Stream for Inflate {
    /// ISA-L reports success even when it got nowhere, be it for want of input or of room; the
    /// caller sees that from the counts.
    fn step(&mut self, input: &[u8], output: &mut [u8]) -> Result<Step, &'static str> {
        // Less than everything is a valid step, should a slice ever exceed 4 GiB.
        let len = u32::try_from(input.len()).unwrap_or(u32::MAX);
        let room = u32::try_from(output.len()).unwrap_or(u32::MAX);
        let at = self.state.as_ptr();
        // SAFETY: `at` points to an initialised state that nothing else refers to (rule 1).
        // `next_in` and `next_out` are valid for `len <= input.len()` reads and
        // `room <= output.len()` writes until this function returns, and are cleared before it does
        // (rule 2). ISA-L does not write through `next_in`; it reads through `next_out` only what
        // it has written itself during the call. It checks the input, which may be hostile, against
        // all of these bounds: `tests/all/bounds.rs` holds it to them.
        let (code, left, room_left, block) = unsafe {
            (*at).next_in = input.as_ptr().cast_mut();
            (*at).avail_in = len;
            (*at).next_out = output.as_mut_ptr();
            (*at).avail_out = room;
            let code = c::isal_inflate(at);
            let left = (*at).avail_in;
            let room_left = (*at).avail_out;
            (*at).next_in = ptr::null_mut();
            (*at).avail_in = 0;
            (*at).next_out = ptr::null_mut();
            (*at).avail_out = 0;
            (code, left, room_left, (*at).block_state)
        };
        match code {
            0 => Ok(Step {
                consumed: len.saturating_sub(left) as usize,
                produced: room.saturating_sub(room_left) as usize,
                ended: block == c::isal_block_state_ISAL_BLOCK_INPUT_DONE
                    || block == c::isal_block_state_ISAL_BLOCK_FINISH,
            }),
            c::ISAL_INVALID_BLOCK => Err("invalid deflate block"),
            c::ISAL_INVALID_SYMBOL => Err("invalid deflate symbol"),
            c::ISAL_INVALID_LOOKBACK => Err("invalid deflate distance"),
            _ => Err("invalid deflate data"),
        }
    }
}

/// A C struct of our own on the heap, reached by raw pointer only, so that C may keep pointers into
/// it (rule 1). Built in place: the structs are too large for the stack.
struct Heap<T>(NonNull<T>);

// SAFETY: the struct is owned by its `Heap` alone. The pointers that ISA-L leaves in it lead into
// itself or to ISA-L's constant tables, and by `Zeroable` nothing is tied to a thread.
unsafe impl<T: Zeroable> Send for Heap<T> {}

impl<T: Zeroable> Heap<T> {
    fn zeroed() -> Self {
        let layout = alloc::Layout::new::<T>();
        const { assert!(size_of::<T>() > 0) }
        // SAFETY: the layout's size is not zero.
        let at = unsafe { alloc::alloc_zeroed(layout) }.cast::<T>();
        match NonNull::new(at) {
            // Zeroed memory is a valid `T`, by `Zeroable`.
            Some(at) => Self(at),
            None => alloc::handle_alloc_error(layout),
        }
    }
}

impl<T> Heap<T> {
    fn as_ptr(&self) -> *mut T {
        self.0.as_ptr()
    }
}

impl<T> Drop for Heap<T> {
    fn drop(&mut self) {
        // SAFETY: allocated by `zeroed` with this very layout, and freed only here. `T` is a C
        // struct and has nothing to drop.
        unsafe { alloc::dealloc(self.0.as_ptr().cast(), alloc::Layout::new::<T>()) }
    }
}

/// C structs that a [`Heap`] can hold.
///
/// # Safety
/// All zero bytes must be a valid value of the type, it must have nothing to drop, and its
/// functions must not care which thread calls them.
unsafe trait Zeroable {}

const RAW: u16 = 0;
const FIXED_CODE: i32 = c::IGZIP_HUFFTABLE_STATIC.cast_signed();
const NO_FLUSH: u16 = 0;
const SYNC_FLUSH: u16 = 1;
const _: () = assert!(
    RAW as u32 == c::IGZIP_DEFLATE
        && NO_FLUSH as u32 == c::NO_FLUSH
        && SYNC_FLUSH as u32 == c::SYNC_FLUSH
);
