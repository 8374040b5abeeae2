//! Raw deflate by libdeflate, a whole stream per call, as qpl and qatzip need it.

use libdeflater::{CompressionLvl, Compressor};
use multifd::Method;

use crate::{
    DecodeError,
    engine::{Compress, CompressError},
    ffi::libdeflate::Inflate,
};

pub(crate) const NAME: &str = "libdeflate";

/// Reads the streams of `method`.
pub(crate) fn inflate(method: Method) -> Result<Inflate, DecodeError> {
    Inflate::new().ok_or(DecodeError::Engine {
        method,
        reason: "no memory",
    })
}

/// Writes streams that know nothing of each other.
pub(crate) struct Deflate(Compressor);

impl Deflate {
    /// At one of libdeflate's levels, 0 to 12.
    pub(crate) fn new(level: i32) -> Result<Self, &'static str> {
        let level = CompressionLvl::new(level).map_err(|_| "not a level of libdeflate")?;
        Ok(Self(Compressor::new(level)))
    }
}

impl Compress for Deflate {
    fn name(&self) -> &'static str {
        NAME
    }

    fn compress(&mut self, pages: &[u8], out: &mut [u8]) -> Result<usize, CompressError> {
        // There is no other error.
        let result = self.0.deflate_compress(pages, out);
        result.map_err(|_| CompressError::OutputFull)
    }
}
