//! Method zstd: one frame per channel, flushed after every packet and never ended.
//!
//! A receiver that sees the frame end would start a new one and find no header. zstd's own frame
//! format is all there is: no checksum, no content size, since neither is known before the end.
//!
//! # Memory
//! Per channel, as zstd itself counts it: an encoder has 1.3 MiB up to level 1, 2 MiB at level 2,
//! up to 5 MiB at level 6, 12 MiB at level 12 and 19 MiB above; a decoder has 1 MiB, or 1.5 MiB from
//! level 2 on, as long as the peer is one of us. Any other peer may ask for a window of up to 128 MiB.
//!
//! # Speed
//! Measured as in the table of `zlib`, MB/s of pages encoded / decoded, and ratio: level -5
//! 767 / 2558 / 2.528, level -1 600 / 2272 / 3.097, level 1 584 / 1970 / 3.823, level 3
//! 361 / 1747 / 4.160.

use std::ops::RangeInclusive;

use multifd::Method;
use zstd_safe::{
    CCtx, CParameter, DCtx, DParameter, InBuffer, OutBuffer, get_error_name,
    zstd_sys::ZSTD_EndDirective,
};

use crate::{
    DecodeError,
    engine::{Compress, Decompress, Fault, Software, Step},
};

/// The level that 0 stands for.
pub(crate) const OWN_DEFAULT_LEVEL: i32 = zstd_safe::CLEVEL_DEFAULT;

/// The levels that can be set, as the library says.
pub(crate) fn levels() -> RangeInclusive<i32> {
    zstd_safe::min_c_level()..=zstd_safe::max_c_level()
}

/// The engine. Its [`levels`] are the library's word, which no constant can have.
pub(crate) const ENGINES: &[Software] = &[Software {
    name: "zstd",
    levels: i32::MIN..=i32::MAX,
    compressor: |level| {
        Ok(Box::new(Compressor {
            context: compression_context(level)?,
        }))
    },
}];

/// The decoding side of a new channel.
pub(crate) fn decompressor() -> Result<Box<dyn Decompress>, DecodeError> {
    let refused = |reason| DecodeError::Engine {
        method: Method::Zstd,
        reason,
    };
    let mut context = DCtx::try_create().ok_or_else(|| refused(NO_MEMORY))?;
    context
        .set_parameter(DParameter::WindowLogMax(MAX_DECODER_WINDOW_LOG))
        .map_err(|code| refused(get_error_name(code)))?;
    Ok(Box::new(Decompressor { context }))
}

const NO_MEMORY: &str = "no memory for a context";

/// Log of the largest window that we encode with: 1 MiB.
///
/// Both ends keep a window per channel for the whole migration, and a relay has many channels: this
/// is its ceiling of memory. The high levels would take 8 to 128 MiB each, at either end. Memory
/// pages gain nothing from it: what matches lies within the last packets.
const MAX_ENCODER_WINDOW_LOG: u32 = 20;

/// Levels up to this one are chosen for their speed.
const LAST_FAST_LEVEL: i32 = 1;

/// Log of the window of the fast levels: 256 KiB instead of 512. zstd copies its input into a buffer
/// of the window's length and a block's, and a packet, the payload and this one have to share a
/// processor's own cache. At level 1 it saves 3 % of the time for 0.3 % of the ratio.
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
/// that whatever goes to a QEMU directly also goes through us.
const MAX_DECODER_WINDOW_LOG: u32 = 27;

fn compression_context(level: i32) -> Result<CCtx<'static>, &'static str> {
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

struct Compressor {
    context: CCtx<'static>,
}

impl Compress for Compressor {
    fn name(&self) -> &'static str {
        "zstd"
    }

    fn compress(&mut self, pages: &[u8], out: &mut [u8]) -> Result<usize, Fault> {
        let mut input = InBuffer::around(pages);
        let mut output = OutBuffer::around(out);
        loop {
            let left = self
                .context
                .compress_stream2(&mut output, &mut input, ZSTD_EndDirective::ZSTD_e_flush)
                .map_err(|code| Fault::Refused(get_error_name(code)))?;
            if left == 0 && input.pos() == pages.len() {
                return Ok(output.pos());
            }
            if output.pos() == output.capacity() {
                return Err(Fault::Room);
            }
        }
    }
}

struct Decompressor {
    context: DCtx<'static>,
}

impl Decompress for Decompressor {
    fn step(&mut self, input: &[u8], output: &mut [u8]) -> Result<Step, &'static str> {
        let mut input = InBuffer::around(input);
        let mut output = OutBuffer::around(output);
        let hint = self
            .context
            .decompress_stream(&mut output, &mut input)
            .map_err(get_error_name)?;
        Ok(Step {
            consumed: input.pos(),
            produced: output.pos(),
            ended: hint == 0,
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
            (-9..=-1, 2),
            (1..=2, 2),
            (3..=6, 5),
            (7..=12, 12),
            (13..=22, 19),
        ] {
            for level in levels {
                let context = compression_context(level).unwrap();
                let mut compressor = Compressor { context };
                let mut out = vec![0; 1 << 20];
                let len = compressor.compress(&[7; 1 << 19], &mut out).unwrap();
                let size = compressor.context.sizeof();
                assert!(mib(size) <= most, "level {level}: {size} bytes");

                let mut decompressor = Decompressor {
                    context: DCtx::create(),
                };
                decompressor.step(&out[..len], &mut [0; 1 << 19]).unwrap();
                assert!(mib(decompressor.context.sizeof()) <= 2, "level {level}");
            }
        }
    }
}
