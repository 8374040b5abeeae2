//! Method lz4: one LZ4 block per packet, between two Vamooses.
//!
//! For links that are faster than the processors that feed them. The level is LZ4's acceleration:
//! 1 finds the most, every step up makes it faster and finds less. A packet in which LZ4 finds next
//! to nothing goes raw, as method none, which its receiver need not decode.

use std::ops::RangeInclusive;

use lz4::block::{CompressionMode, compress_to_buffer, decompress_to_buffer};
use multifd::Method;

use crate::{
    DecodeError,
    engine::{Compress, Fault, Software, Unpack},
};

/// The levels that can be set: LZ4's accelerations.
pub(crate) const LEVELS: RangeInclusive<i32> = 1..=65_537;

/// The engine.
pub(crate) const ENGINES: &[Software] = &[Software {
    name: "lz4",
    levels: LEVELS,
    compressor: |acceleration| Ok(Box::new(Compressor { acceleration })),
}];

struct Compressor {
    acceleration: i32,
}

impl Compress for Compressor {
    fn name(&self) -> &'static str {
        "lz4"
    }

    /// Finds no room where less than [`LEAST_SAVING`] would be saved: LZ4 gives up at once then.
    fn compress(&mut self, pages: &[u8], out: &mut [u8]) -> Result<usize, Fault> {
        let most = pages.len() - pages.len() / LEAST_SAVING;
        let room = most.min(out.len());
        let mode = CompressionMode::FAST(self.acceleration);
        // Its only other error is an input of more than 2 GiB.
        compress_to_buffer(pages, Some(mode), false, &mut out[..room]).map_err(|_| Fault::Room)
    }
}

/// The part of a packet that has to be saved. Below it, the receiver's work costs more than the link.
const LEAST_SAVING: usize = 32;

/// Decodes packets.
pub(crate) struct Unpacker;

impl Unpack for Unpacker {
    fn unpack(&mut self, payload: &[u8], pages: &mut [u8]) -> Result<(), DecodeError> {
        let method = Method::Lz4;
        let expected = pages.len();
        let room = i32::try_from(expected).map_err(|_| DecodeError::Output {
            len: expected,
            max: i32::MAX as usize,
        })?;
        let found =
            decompress_to_buffer(payload, Some(room), pages).map_err(|_| DecodeError::Corrupt {
                method,
                reason: "invalid LZ4 data, or more than the packet's pages",
            })?;
        if found != expected {
            return Err(DecodeError::TooShort {
                method,
                payload: payload.len(),
                found,
                expected,
            });
        }
        Ok(())
    }

    /// Any bytes may be an LZ4 block.
    fn has_shape(&self, payload: &[u8], _pages_len: usize) -> bool {
        !payload.is_empty()
    }
}
