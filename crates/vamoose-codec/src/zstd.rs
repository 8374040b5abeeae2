//! Method zstd: one frame per channel, flushed after every packet and never ended.
//!
//! A receiver that sees the frame end would start a new one and find no header. zstd's own frame
//! format is all there is: no checksum, no content size, since neither is known before the end.
//!
//! # Memory
//! Per channel: an encoder has 3 MiB up to level 2, up to 5 MiB at level 6, 13 MiB at level 12 and 20 MiB above. A decoder has
//! 2 MiB at most, as long as the peer is one of us. Any other peer may ask for a window of up to 128 MiB, the limit of stock
//! QEMU, so that every stream that a QEMU accepts is accepted here, too.
//!
//! # Speed
//! A packet a call takes 0.92 of the CPU time of a page a call, as QEMU does it, to encode, and the same to decode (level 1).
//! Packets whose history stays in place, by zstd's buffer-less functions, would take 0.85 and 0.97: not worth their unsafe
//! code for a method that only stock QEMUs need.

use std::ops::RangeInclusive;

use multifd::Method;
use zstd_safe::{
    CCtx, CParameter, DCtx, InBuffer, OutBuffer, get_error_name, zstd_sys::ZSTD_EndDirective,
};

use crate::{
    DecodeError,
    engine::{Compress, CompressError, Software, Unpack},
    ffi::zstd::refused,
    stream::{Step, Stream, unpack},
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
    compressor: |level| Ok(Box::new(Compressor(context(level)?))),
}];

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

fn context(level: i32) -> Result<CCtx<'static>, &'static str> {
    let mut context = CCtx::try_create().ok_or(NO_MEMORY)?;
    let mut set = |parameter| context.set_parameter(parameter).map_err(get_error_name);
    set(CParameter::CompressionLevel(level))?;
    if level <= LAST_FAST_LEVEL {
        set(CParameter::WindowLog(FAST_WINDOW_LOG))?;
    }
    if level > LAST_LEVEL_WITH_SMALL_WINDOW {
        set(CParameter::WindowLog(MAX_ENCODER_WINDOW_LOG))?;
    }
    if level > LAST_LEVEL_WITH_SMALL_TABLES {
        set(CParameter::HashLog(MAX_TABLE_LOG))?;
        set(CParameter::ChainLog(MAX_TABLE_LOG))?;
    }
    Ok(context)
}

const NO_MEMORY: &str = "no memory for a context";

struct Compressor(CCtx<'static>);

impl Compress for Compressor {
    fn compress(&mut self, pages: &[u8], out: &mut [u8]) -> Result<usize, CompressError> {
        let (mut input, mut output) = (InBuffer::around(pages), OutBuffer::around(out));
        let flush = ZSTD_EndDirective::ZSTD_e_flush;
        let flushed = self.0.compress_stream2(&mut output, &mut input, flush);
        match flushed.map_err(refused)? {
            0 => Ok(output.pos()),
            _ => Err(CompressError::OutputFull),
        }
    }
}

/// The decoding side of a channel.
pub(crate) struct Unpacker(Frame);

impl Unpacker {
    pub(crate) fn new() -> Result<Self, DecodeError> {
        let context = DCtx::try_create().ok_or(DecodeError::Engine {
            method: Method::Zstd,
            reason: NO_MEMORY,
        })?;
        Ok(Self(Frame { context, wanted: 0 }))
    }
}

impl Unpack for Unpacker {
    fn unpack(&mut self, payload: &[u8], pages: &mut [u8]) -> Result<(), DecodeError> {
        unpack(Method::Zstd, &mut self.0, payload, 0, pages)?;
        if self.0.wanted != BLOCK_HEADER {
            return Err(DecodeError::Corrupt {
                method: Method::Zstd,
                reason: "the packet ends within a header or block",
            });
        }
        Ok(())
    }
}

/// One frame being read.
struct Frame {
    context: DCtx<'static>,
    /// Bytes that zstd asks for next.
    wanted: usize,
}

/// What it asks for between two blocks.
const BLOCK_HEADER: usize = 3;

impl Stream for Frame {
    fn step(&mut self, input: &[u8], output: &mut [u8]) -> Result<Step, &'static str> {
        let (mut input, mut output) = (InBuffer::around(input), OutBuffer::around(output));
        let wanted = self.context.decompress_stream(&mut output, &mut input);
        self.wanted = wanted.map_err(get_error_name)?;
        Ok(Step {
            consumed: input.pos(),
            produced: output.pos(),
            ended: self.wanted == 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
                let mut compressor = Compressor(context(level).unwrap());
                let (pages, mut out) = ([7; 1 << 19], vec![0; 1 << 20]);
                let len = compressor.compress(&pages, &mut out).unwrap();
                let size = compressor.0.sizeof();
                assert!(mib(size) <= most, "level {level}: {size} bytes");

                let mut unpacker = Unpacker::new().unwrap();
                let mut back = vec![0; pages.len()];
                unpacker.unpack(&out[..len], &mut back).unwrap();
                assert!(back == pages);
                let size = unpacker.0.context.sizeof();
                assert!(mib(size) <= 2, "level {level}: {size} bytes");
            }
        }
    }
}
