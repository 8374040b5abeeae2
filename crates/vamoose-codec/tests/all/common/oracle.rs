//! Decoders that are not ours: the C zlib and zstd that stock QEMUs decode with.

use std::{ffi::c_int, ptr};

use libz_sys as c;
use multifd::Method;
use zstd_safe::{DCtx, InBuffer, OutBuffer};

/// What a stock receiver does with the packets of one channel.
pub(crate) enum Oracle {
    None,
    Zlib(CZlib),
    Zstd(DCtx<'static>),
    Qpl(CZlib),
}

impl Oracle {
    pub(crate) fn new(method: Method) -> Self {
        match method {
            Method::None => Self::None,
            Method::Zlib => Self::Zlib(CZlib::new(15)),
            // Raw deflate, with IAA's window of 4 KiB.
            Method::Qpl => Self::Qpl(CZlib::new(-12)),
            Method::Zstd => Self::Zstd(DCtx::create()),
            method => panic!("no oracle for {method}"),
        }
    }

    /// Decodes a payload that must be used up by filling `pages` exactly.
    pub(crate) fn decode(&mut self, payload: &[u8], pages: &mut [u8]) {
        match self {
            Self::None => pages.copy_from_slice(payload),
            Self::Zlib(stream) => stream.decode(payload, pages),
            Self::Qpl(stream) => stream.decode_pages(payload, pages),
            Self::Zstd(context) => {
                let mut input = InBuffer::around(payload);
                let mut output = OutBuffer::around(pages);
                while output.pos() < output.capacity() {
                    let hint = context.decompress_stream(&mut output, &mut input);
                    assert_ne!(
                        hint.map_err(zstd_safe::get_error_name),
                        Ok(0),
                        "frame ended"
                    );
                }
                assert_eq!(input.pos(), payload.len(), "payload left");
            }
        }
    }
}

/// One inflate stream of the C zlib.
pub(crate) struct CZlib(Box<c::z_stream>);

impl CZlib {
    /// `window_bits` are zlib's: 8 to 15, negative for raw deflate, 16 more for gzip.
    pub(crate) fn new(window_bits: c_int) -> Self {
        unsafe extern "C" {
            fn malloc(size: usize) -> *mut std::ffi::c_void;
            fn free(at: *mut std::ffi::c_void);
        }
        extern "C" fn allocate(
            _: *mut std::ffi::c_void,
            items: c::uInt,
            size: c::uInt,
        ) -> *mut std::ffi::c_void {
            // SAFETY: malloc takes any size.
            unsafe { malloc(items as usize * size as usize) }
        }
        extern "C" fn release(_: *mut std::ffi::c_void, at: *mut std::ffi::c_void) {
            // SAFETY: zlib gives back what `allocate` gave it, once.
            unsafe { free(at) }
        }
        let mut stream = Box::new(c::z_stream {
            next_in: ptr::null_mut(),
            avail_in: 0,
            total_in: 0,
            next_out: ptr::null_mut(),
            avail_out: 0,
            total_out: 0,
            msg: ptr::null_mut(),
            state: ptr::null_mut(),
            zalloc: allocate,
            zfree: release,
            opaque: ptr::null_mut(),
            data_type: 0,
            adler: 0,
            reserved: 0,
        });
        // SAFETY: the stream is initialised as zlib demands, and boxed, so it does not move.
        let code = unsafe {
            c::inflateInit2_(
                &raw mut *stream,
                window_bits,
                c::zlibVersion(),
                c_int::try_from(size_of::<c::z_stream>()).unwrap(),
            )
        };
        assert_eq!(code, c::Z_OK);
        Self(stream)
    }

    /// What the stream at the start of `input` holds, `room` bytes at most, and the stream's length; `None` if it is
    /// broken, or does not fit. Once for each `CZlib`.
    pub(crate) fn decode_stream(mut self, input: &[u8], room: usize) -> Option<(usize, Vec<u8>)> {
        let mut out = vec![0; room];
        let stream = &mut *self.0;
        stream.next_in = input.as_ptr().cast_mut();
        stream.avail_in = input.len().try_into().unwrap();
        stream.next_out = out.as_mut_ptr();
        stream.avail_out = room.try_into().unwrap();
        // SAFETY: both pointers are valid for the lengths beside them; the stream is initialised.
        let code = unsafe { c::inflate(&raw mut *stream, c::Z_FINISH) };
        out.truncate(usize::try_from(stream.total_out).unwrap());
        let len = usize::try_from(stream.total_in).unwrap();
        (code == c::Z_STREAM_END).then_some((len, out))
    }

    /// A table of lengths, then a stream for each page, or the page as it is.
    fn decode_pages(&mut self, payload: &[u8], pages: &mut [u8]) {
        const PAGE: usize = 4096;
        let (table, mut rest) = payload.split_at(pages.len() / PAGE * 4);
        for (page, length) in pages.chunks_exact_mut(PAGE).zip(table.chunks_exact(4)) {
            let len = u32::from_be_bytes(length.try_into().unwrap());
            let encoded;
            (encoded, rest) = rest.split_at(len.try_into().unwrap());
            if encoded.len() == PAGE {
                page.copy_from_slice(encoded);
                continue;
            }
            assert!(encoded.len() < PAGE, "longer than the page");
            let stream = &mut *self.0;
            stream.next_in = encoded.as_ptr().cast_mut();
            stream.avail_in = encoded.len().try_into().unwrap();
            stream.next_out = page.as_mut_ptr();
            stream.avail_out = page.len().try_into().unwrap();
            // SAFETY: both pointers are valid for the lengths beside them; the stream is initialised.
            let code = unsafe {
                assert_eq!(c::inflateReset(&raw mut *stream), c::Z_OK);
                c::inflate(&raw mut *stream, c::Z_FINISH)
            };
            assert_eq!(code, c::Z_STREAM_END, "inflate");
            assert_eq!((stream.avail_in, stream.avail_out), (0, 0), "left");
        }
        assert!(rest.is_empty(), "payload left");
    }

    fn decode(&mut self, payload: &[u8], pages: &mut [u8]) {
        let stream = &mut *self.0;
        stream.next_in = payload.as_ptr().cast_mut();
        stream.avail_in = payload.len().try_into().unwrap();
        stream.next_out = pages.as_mut_ptr();
        stream.avail_out = pages.len().try_into().unwrap();
        // SAFETY: both pointers are valid for the lengths beside them; the stream is initialised.
        let code = unsafe { c::inflate(&raw mut *stream, c::Z_SYNC_FLUSH) };
        assert_eq!(code, c::Z_OK, "inflate");
        assert_eq!(stream.avail_out, 0, "pages left");
        // The sync marker: zlib stops at the last byte of output.
        let mut spare = 0;
        stream.next_out = &raw mut spare;
        stream.avail_out = 1;
        // SAFETY: as above, with one byte of output.
        let code = unsafe { c::inflate(&raw mut *stream, c::Z_SYNC_FLUSH) };
        assert!(code == c::Z_OK || code == c::Z_BUF_ERROR, "inflate: {code}");
        assert_eq!(
            (stream.avail_in, stream.avail_out),
            (0, 1),
            "payload left or too much"
        );
    }
}

impl Drop for CZlib {
    fn drop(&mut self) {
        // SAFETY: initialised by `new`, ended only here.
        unsafe { c::inflateEnd(&raw mut *self.0) };
    }
}
