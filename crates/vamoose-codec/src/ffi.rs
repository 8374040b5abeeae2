//! Calls into C: the only unsafe code of this crate. Each module names the rules by which it is sound.
#![allow(
    unsafe_code,
    reason = "compression libraries take raw pointers; these modules are the crate's FFI boundary"
)]

#[cfg(feature = "isal")]
pub(crate) mod isal;
#[cfg(feature = "deflate")]
pub(crate) mod libdeflate;
#[cfg(feature = "deflate")]
pub(crate) mod libqatzip;
#[cfg(feature = "zstd")]
pub(crate) mod zstd;
