//! Method zstd: one frame per channel, flushed after every packet and never ended.
//!
//! A receiver that sees the frame end would start a new one and find no header. zstd's own frame
//! format is all there is: no checksum, no content size, since neither is known before the end.
//!
//! # Memory
//! Per channel: an encoder has 2 MiB of packets, its history, and zstd's tables: together 3 MiB up to level 2,
//! up to 5 MiB at level 6, 13 MiB at level 12 and 20 MiB above. A decoder has 1 MiB, or 1.8 MiB from level 2
//! on, as long as the peer is one of us. Any other peer may ask for a window of up to 128 MiB, which takes up
//! memory as it fills.
//!
//! # Speed
//! In units of zstd's streaming functions called as QEMU calls them (level 1, a page a call; `paged zstd` in
//! `benches/methods.rs`), CPU time of Silesia / of the memory corpus on a Cascade Lake server: each packet the
//! least of 6 runs, in which all variants took turns. The bytes are 1.003 of those.
//!
//! | level 1                                             | encode        | decode        | both          |
//! |-----------------------------------------------------|---------------|---------------|---------------|
//! | streaming functions, a packet a call, same window   | 0.915 / 0.935 | 1.000 / 0.996 | 0.934 / 0.950 |
//! | history in place                                    | 0.854 / 0.846 | 0.967 / 0.973 | 0.880 / 0.877 |
//! | the same, pages gathered and read there             | 0.815 / 0.784 | 0.849 / 0.857 | 0.823 / 0.802 |
//!
//! The last row is [`input_buffer`](crate::Encoder::input_buffer) and
//! [`decode_borrowed`](crate::Decoder::decode_borrowed).

use std::ops::RangeInclusive;

use multifd::{Layout, Method};

use crate::{
    DecodeError,
    engine::{Compress, CompressError, Software},
    ffi::zstd as frame,
};

/// The level that 0 stands for.
pub(crate) const OWN_DEFAULT_LEVEL: i32 = zstd_safe::CLEVEL_DEFAULT;

/// The levels that can be set, by the library.
pub(crate) fn levels() -> RangeInclusive<i32> {
    zstd_safe::min_c_level()..=zstd_safe::max_c_level()
}

/// The engine. Its [`levels`] come from the library, which no constant can have.
pub(crate) const ENGINES: &[Software] = &[Software {
    name: "zstd",
    levels: i32::MIN..=i32::MAX,
    compressor: |level| {
        Ok(Box::new(Compressor(frame::Compress::new(
            parameters(level),
            RING_LEN,
        )?)))
    },
}];

/// The decoding side of a new channel.
pub(crate) fn decompressor(layout: Layout) -> Result<frame::Decompress, DecodeError> {
    let window = 1 << MAX_DECODER_WINDOW_LOG;
    frame::Decompress::new(layout.packet_bytes(), window).map_err(|reason| DecodeError::Engine {
        method: Method::Zstd,
        reason,
    })
}

/// Bytes of an encoder's ring of packets: 4 packets of QEMU's, 8 windows of the fast levels. 768 KiB
/// cost 1 % more time, 4 MiB save less than that.
const RING_LEN: usize = 2 << 20;

/// Log of the largest window that we encode with: 1 MiB.
///
/// Both ends keep a window per channel for the whole migration, and a relay has many channels: this
/// is its ceiling of memory. The high levels would take 8 to 128 MiB each, at either end. Memory
/// pages gain nothing from it: what matches lies within the last packets.
const MAX_ENCODER_WINDOW_LOG: u32 = 20;

/// Levels up to this one are chosen for their speed.
const LAST_FAST_LEVEL: i32 = 1;

/// Log of the window of the fast levels: 256 KiB instead of 512. The packet, the window, the payload and
/// zstd's tables have to share a processor's own cache. At level 1 it saves 5 % of the encoder's time and 3 %
/// of the decoder's for 0.3 % of the ratio; 128 KiB would cost 4 %. Other sizes of table, match and step
/// pay with one of time and ratio for the other.
const FAST_WINDOW_LOG: u32 = 18;

/// Levels up to this one have a window of at most [`MAX_ENCODER_WINDOW_LOG`] without it: 1 MiB at
/// level 2.
const LAST_LEVEL_WITH_SMALL_WINDOW: i32 = 2;

/// Log of the most entries of a match table, 4 bytes each: enough to index every position of the
/// window. zstd caps its tables in the same way, but only when it knows the size of the input,
/// which a migration never does: level 22 would take 640 MiB for tables it cannot use.
const MAX_TABLE_LOG: u32 = MAX_ENCODER_WINDOW_LOG + 1;

/// Levels up to this one have tables within [`MAX_TABLE_LOG`] by themselves.
const LAST_LEVEL_WITH_SMALL_TABLES: i32 = 9;

/// Log of the largest window that a peer may ask us to keep: 128 MiB, the limit of stock QEMU, so
/// that every stream that a QEMU accepts is accepted here, too.
const MAX_DECODER_WINDOW_LOG: u32 = 27;

fn parameters(level: i32) -> frame::Parameters {
    let mut parameters = frame::parameters(level);
    if level <= LAST_FAST_LEVEL {
        parameters.windowLog = FAST_WINDOW_LOG;
    }
    if level > LAST_LEVEL_WITH_SMALL_WINDOW {
        parameters.windowLog = MAX_ENCODER_WINDOW_LOG;
    }
    if level > LAST_LEVEL_WITH_SMALL_TABLES {
        parameters.hashLog = MAX_TABLE_LOG;
        parameters.chainLog = MAX_TABLE_LOG;
    }
    parameters
}

struct Compressor(frame::Compress);

impl Compress for Compressor {
    fn compress(&mut self, pages: &[u8], out: &mut [u8]) -> Result<usize, CompressError> {
        let mut written = 0;
        for piece in pages.chunks(frame::Compress::PIECE) {
            self.0.input_buffer()[..piece.len()].copy_from_slice(piece);
            written += self.0.compress(piece.len(), &mut out[written..])?;
        }
        Ok(written)
    }

    fn input_buffer(&mut self) -> Option<&mut [u8]> {
        Some(self.0.input_buffer())
    }

    fn compress_buffered(&mut self, len: usize, out: &mut [u8]) -> Result<usize, CompressError> {
        self.0.compress(len, out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Unpack as _;

    #[test]
    fn memory_per_channel_is_what_the_module_says() {
        let mib = |bytes: usize| bytes.div_ceil(1 << 20);
        for (levels, most) in [
            (-9..=-1, 3),
            (1..=2, 3),
            (3..=6, 5),
            (7..=12, 13),
            (13..=22, 20),
        ] {
            for level in levels {
                let frame = frame::Compress::new(parameters(level), RING_LEN).unwrap();
                let mut compressor = Compressor(frame);
                let (pages, mut out) = ([7; 1 << 19], vec![0; 1 << 20]);
                let len = compressor.compress(&pages, &mut out).unwrap();
                let size = compressor.0.size();
                assert!(mib(size) <= most, "level {level}: {size} bytes");

                let mut decompressor = decompressor(Layout::X86).unwrap();
                let mut back = vec![0; pages.len()];
                decompressor.unpack(&out[..len], &mut back).unwrap();
                assert!(back == pages);
                assert!(mib(decompressor.size()) <= 2, "level {level}");
            }
        }
    }
}
