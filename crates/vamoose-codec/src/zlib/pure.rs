//! Raw deflate by zlib-rs: no C, every level.

use flate2::{Compression, FlushCompress};

use crate::engine::{Compress, CompressError};

pub(super) const NAME: &str = "zlib-rs";

/// One raw deflate stream being written.
pub(super) struct Deflate(flate2::Compress);

impl Deflate {
    pub(super) fn new(level: i32) -> Self {
        let level = Compression::new(level.unsigned_abs());
        Self(flate2::Compress::new(level, false))
    }
}

impl Compress for Deflate {
    fn compress(&mut self, pages: &[u8], out: &mut [u8]) -> Result<usize, CompressError> {
        let (mut input, mut written) = (pages, 0);
        loop {
            let (consumed, produced) = (self.0.total_in(), self.0.total_out());
            self.0
                .compress(input, &mut out[written..], FlushCompress::Sync)
                .map_err(|_| CompressError::Refused("the stream is in an invalid state"))?;
            input = input
                .get(since(self.0.total_in(), consumed)..)
                .unwrap_or_default();
            written += since(self.0.total_out(), produced);
            // Only spare output space proves that nothing is held back.
            if written >= out.len() {
                return Err(CompressError::OutputFull);
            }
            if input.is_empty() {
                return Ok(written);
            }
        }
    }
}

/// One raw deflate stream being read.
#[cfg(any(test, not(feature = "isal")))]
pub(crate) struct Inflate(flate2::Decompress);

#[cfg(any(test, not(feature = "isal")))]
impl Inflate {
    pub(super) fn new() -> Self {
        Self(flate2::Decompress::new(false))
    }
}

#[cfg(any(test, not(feature = "isal")))]
impl crate::stream::Stream for Inflate {
    fn step(
        &mut self,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<crate::stream::Step, &'static str> {
        let (consumed, produced) = (self.0.total_in(), self.0.total_out());
        let status = self
            .0
            .decompress(input, output, flate2::FlushDecompress::Sync)
            .map_err(|_| "invalid deflate data")?;
        Ok(crate::stream::Step {
            consumed: since(self.0.total_in(), consumed),
            produced: since(self.0.total_out(), produced),
            ended: status == flate2::Status::StreamEnd,
        })
    }
}

/// Bytes between two counts of all bytes.
fn since(now: u64, then: u64) -> usize {
    usize::try_from(now - then).unwrap_or(usize::MAX)
}
