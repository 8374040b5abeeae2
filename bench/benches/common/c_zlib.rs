//! What everything is compared with: the C zlib at level 1, as QEMU runs it.

use std::{
    ffi::{CStr, c_int},
    mem::MaybeUninit,
};

use libz_sys as c;

/// QEMU's default.
pub(crate) const LEVEL: c_int = 1;

/// Version of the library.
pub(crate) fn version() -> String {
    // SAFETY: zlib's version is a static C string.
    let version = unsafe { CStr::from_ptr(c::zlibVersion()) };
    version.to_string_lossy().into_owned()
}

/// One stream at level 1, sync-flushed after every packet.
pub(crate) struct Deflate(Box<c::z_stream>);

impl Deflate {
    pub(crate) fn new() -> Self {
        const WINDOW_BITS: c_int = 15;
        const MEM_LEVEL: c_int = 8;
        Self(started(|stream| {
            // SAFETY: `started` gives what zlib demands.
            unsafe {
                c::deflateInit2_(
                    stream,
                    LEVEL,
                    c::Z_DEFLATED,
                    WINDOW_BITS,
                    MEM_LEVEL,
                    c::Z_DEFAULT_STRATEGY,
                    c::zlibVersion(),
                    STREAM_SIZE,
                )
            }
        }))
    }

    /// Encodes a packet to the start of `out`, and says how long it is there.
    pub(crate) fn encode(&mut self, pages: &[u8], out: &mut [u8]) -> usize {
        let stream = &mut *self.0;
        set(stream, pages, out);
        // SAFETY: both pointers are valid for the lengths beside them; the stream is initialised.
        let code = unsafe { c::deflate(&raw mut *stream, c::Z_SYNC_FLUSH) };
        assert_eq!(code, c::Z_OK, "deflate");
        // With output left, the flush is complete.
        assert!(stream.avail_in == 0 && stream.avail_out > 0, "no room");
        out.len() - stream.avail_out as usize
    }
}

impl Drop for Deflate {
    fn drop(&mut self) {
        // SAFETY: initialised by `new`, ended only here.
        unsafe { c::deflateEnd(&raw mut *self.0) };
    }
}

/// The other end of a [`Deflate`].
pub(crate) struct Inflate(Box<c::z_stream>);

impl Inflate {
    pub(crate) fn new() -> Self {
        Self(started(|stream| {
            // SAFETY: `started` gives what zlib demands.
            unsafe { c::inflateInit_(stream, c::zlibVersion(), STREAM_SIZE) }
        }))
    }

    /// Decodes a packet whose pages fill `pages`.
    pub(crate) fn decode(&mut self, payload: &[u8], pages: &mut [u8]) {
        let stream = &mut *self.0;
        set(stream, payload, pages);
        // SAFETY: as in `Deflate::encode`.
        let code = unsafe { c::inflate(&raw mut *stream, c::Z_SYNC_FLUSH) };
        assert_eq!((code, stream.avail_out), (c::Z_OK, 0), "inflate");
        // The sync marker: zlib stops at the last byte of output.
        let mut spare = [0];
        stream.next_out = spare.as_mut_ptr();
        stream.avail_out = 1;
        // SAFETY: as above, with one byte of output.
        let code = unsafe { c::inflate(&raw mut *stream, c::Z_SYNC_FLUSH) };
        assert!(code == c::Z_OK || code == c::Z_BUF_ERROR, "inflate");
        assert_eq!((stream.avail_in, stream.avail_out), (0, 1), "left over");
    }
}

impl Drop for Inflate {
    fn drop(&mut self) {
        // SAFETY: initialised by `new`, ended only here.
        unsafe { c::inflateEnd(&raw mut *self.0) };
    }
}

const STREAM_SIZE: c_int = size_of::<c::z_stream>() as c_int;

/// A stream for which `init` has been called. Boxed, as it must not move.
fn started(init: impl FnOnce(*mut c::z_stream) -> c_int) -> Box<c::z_stream> {
    // All zeros is zlib's default for everything: its own allocator, no input, no output.
    let mut stream = Box::new(MaybeUninit::zeroed());
    assert_eq!(init(stream.as_mut_ptr()), c::Z_OK, "init");
    // SAFETY: zeros are a value of every field but the allocator's functions, which zlib has set.
    unsafe { stream.assume_init() }
}

fn set(stream: &mut c::z_stream, input: &[u8], output: &mut [u8]) {
    let len = |bytes: &[u8]| bytes.len().try_into().expect("a length of a packet");
    stream.next_in = input.as_ptr().cast_mut();
    stream.avail_in = len(input);
    stream.next_out = output.as_mut_ptr();
    stream.avail_out = len(output);
}
