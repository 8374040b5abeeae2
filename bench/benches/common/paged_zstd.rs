//! zstd as QEMU calls it: its streaming functions, a page a call, and a flush after every packet.

use zstd_safe::{CCtx, CParameter, DCtx, InBuffer, OutBuffer, zstd_sys::ZSTD_EndDirective as End};

/// QEMU's default.
pub(crate) const LEVEL: i32 = 1;

/// The encoding side.
pub(crate) struct Compress(CCtx<'static>);

impl Compress {
    pub(crate) fn new() -> Self {
        let mut context = CCtx::create();
        let level = CParameter::CompressionLevel(LEVEL);
        context.set_parameter(level).expect("a level");
        Self(context)
    }

    /// Encodes a packet to the start of `out`, and says how long it is there.
    pub(crate) fn encode(&mut self, packet: &[u8], page_size: usize, out: &mut [u8]) -> usize {
        let mut output = OutBuffer::around(out);
        let mut pages = packet.chunks(page_size).peekable();
        while let Some(page) = pages.next() {
            let last = pages.peek().is_none();
            let end = if last {
                End::ZSTD_e_flush
            } else {
                End::ZSTD_e_continue
            };
            let mut input = InBuffer::around(page);
            loop {
                let left = self.0.compress_stream2(&mut output, &mut input, end);
                let left = left.expect("compression");
                if input.pos() == page.len() && (left == 0 || !last) {
                    break;
                }
            }
        }
        output.pos()
    }
}

/// The other end of a [`Compress`].
pub(crate) struct Decompress(DCtx<'static>);

impl Decompress {
    pub(crate) fn new() -> Self {
        Self(DCtx::create())
    }

    /// Decodes a packet whose pages fill `pages`.
    pub(crate) fn decode(&mut self, payload: &[u8], page_size: usize, pages: &mut [u8]) {
        let mut input = InBuffer::around(payload);
        for page in pages.chunks_mut(page_size) {
            let len = page.len();
            let mut output = OutBuffer::around(page);
            while output.pos() < len {
                let hint = self.0.decompress_stream(&mut output, &mut input);
                hint.expect("decompression");
            }
        }
        assert_eq!(input.pos(), payload.len(), "left over");
    }
}
