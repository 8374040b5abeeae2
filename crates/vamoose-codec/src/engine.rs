//! What a compression library or a device has to implement. Everything else (sizes, fallback, errors that name values) is
//! written once, in `encode`, `decode` and `accelerated`.

use std::{
    ops::RangeInclusive,
    path::{Path, PathBuf},
};

use multifd::{Layout, Method};
use thiserror::Error;

use crate::DecodeError;

/// A software engine: a library that encodes a method, at some of its levels.
#[derive(Clone, Debug)]
pub(crate) struct Software {
    pub(crate) name: &'static str,
    pub(crate) levels: RangeInclusive<i32>,
    /// The encoding side of a new channel, at one of these levels. Fails only if there is no memory.
    pub(crate) compressor: fn(i32) -> Result<Box<dyn Compress>, &'static str>,
}

/// Encodes packets: those of one stream, or each by itself.
pub(crate) trait Compress: Send {
    /// Writes `pages`, encoded, to the start of `out`, and returns how many bytes that are.
    fn compress(&mut self, pages: &[u8], out: &mut [u8]) -> Result<usize, CompressError>;

    /// As [`compress`](Compress::compress), of pages that resemble `earlier`, which the receiver has as well.
    fn compress_after(
        &mut self,
        earlier: &[u8],
        pages: &[u8],
        out: &mut [u8],
    ) -> Result<usize, CompressError> {
        let _ = (earlier, pages, out);
        Err(CompressError::Refused(NO_EARLIER))
    }

    /// Adds a checksum of the pages to each payload, if the method has one.
    fn add_checksums(&mut self) -> Result<(), &'static str> {
        Ok(())
    }
}

/// Only zstd-frames uses earlier versions.
const NO_EARLIER: &str = "it does not use earlier versions of pages";

/// Why [`Compress::compress`] failed. A stream is lost then; a method whose packets are independent
/// can continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CompressError {
    /// The result did not fit into the output.
    OutputFull,
    /// The library refused, for this reason.
    Refused(&'static str),
    /// A device has returned wrong bytes, after it had encoded this number of packets that were not checked.
    Distrusted { unchecked: u64 },
}

/// Most bytes of a payload for `pages_len` bytes of pages that may also be sent raw: encoding has to save a 32nd. If it saves
/// less, the receiver's work costs more than the link.
pub(crate) fn most_worth_sending(pages_len: usize) -> usize {
    pages_len - pages_len / 32
}

/// Decodes packets: those of one stream, or each by itself.
pub(crate) trait Unpack: Send {
    /// Fills all of `pages`, which are not empty, from a payload that must hold nothing else.
    fn unpack(&mut self, payload: &[u8], pages: &mut [u8]) -> Result<(), DecodeError>;

    /// As [`unpack`](Unpack::unpack), of a payload that was [encoded after](Compress::compress_after) `earlier`.
    fn unpack_after(
        &mut self,
        earlier: &[u8],
        payload: &[u8],
        pages: &mut [u8],
    ) -> Result<(), DecodeError> {
        let _ = (earlier, payload, pages);
        let (method, reason) = (Method::Delta, NO_EARLIER);
        Err(DecodeError::Engine { method, reason })
    }

    /// Whether `payload` can be a packet with `pages_len` bytes of pages, without decoding it. Only devices' packets are
    /// asked about, and no device does streams.
    fn has_shape(&self, payload: &[u8], pages_len: usize) -> bool {
        let _ = pages_len;
        !payload.is_empty()
    }
}

/// Hardware that encodes and decodes the packets of a method, present on this host.
pub(crate) trait Accelerator: Send + Sync {
    /// Whether it supports guests with this layout.
    fn takes(&self, layout: Layout) -> bool {
        let _ = layout;
        true
    }

    /// A device for a new channel, or one stream of it. What belongs to a thread is not set up
    /// before the first use.
    fn device(&self, method: Method, level: i32, layout: Layout) -> Box<dyn Device>;

    /// The file of the library that drives it, where there is one.
    fn library(&self) -> Option<&Path> {
        None
    }

    /// What its devices have done so far, where it counts pages.
    #[cfg(feature = "deflate")]
    fn work(&self) -> Option<idxd::offload::OffloadCounters> {
        None
    }
}

/// Why there is no [`Accelerator`].
#[derive(Clone, Debug)]
pub(crate) struct Missing {
    pub(crate) reason: String,
    /// The file of the library that would drive it, if that is there.
    pub(crate) library: Option<PathBuf>,
}

impl From<String> for Missing {
    fn from(reason: String) -> Self {
        Self {
            reason,
            library: None,
        }
    }
}

/// One channel's share of an [`Accelerator`]. It may fail at any packet, and may return wrong results.
pub(crate) trait Device: Send {
    /// As [`Compress::compress`].
    fn compress(&mut self, pages: &[u8], out: &mut [u8]) -> Result<usize, DeviceError>;

    /// As [`Unpack::unpack`]; on an error `pages` may hold anything.
    fn unpack(&mut self, payload: &[u8], pages: &mut [u8]) -> Result<(), DeviceError>;
}

/// Why a device did not process a packet.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub(crate) enum DeviceError {
    /// Its queue is full. The next packet may find room.
    #[error("its queue is full")]
    Busy,
    /// The device did not answer in time.
    #[error("it timed out: {0}")]
    TimedOut(String),
    /// Anything else.
    #[error("{0}")]
    Failed(String),
}
