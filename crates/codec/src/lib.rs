//! Encoders and decoders of page data, one per channel and direction, for QEMU's multifd methods
//! none, zlib and zstd.
//!
//! A packet's payload is the packet's normal pages, back to back, encoded by one method. For zlib
//! and zstd the channel carries **one** stream for the whole migration:
//!
//! ```text
//!             packet 1             packet 2                   packet n
//! channel  ┌────────────┬───────┐ ┌────────────┬───────┐     ┌────────────┬───────┐
//!          │ ≤ 128 pages│ flush │ │ ≤ 128 pages│ flush │  …  │ ≤ 128 pages│ flush │   never ended
//!          └────────────┴───────┘ └────────────┴───────┘     └────────────┴───────┘
//!           └─ history is carried over: every packet may refer to the ones before it ─┘
//! ```
//!
//! So an [`Encoder`] and a [`Decoder`] live as long as their channel, see each of its packets once
//! and in order, and are of no use after an error: the other side's history differs from then on.
//! The flush makes a packet decodable as soon as it has arrived.
//!
//! ```
//! use codec::{Decoder, Settings, encoder};
//! use multifd::{Layout, Method};
//!
//! let settings = Settings::new(Method::Zstd, None)?;
//! let mut encoder = encoder(&settings, Layout::X86)?;
//! let mut decoder = Decoder::new(Layout::X86);
//!
//! let (sent, mut payload) = (vec![7; 8192], Vec::new());
//! let payload = encoder.encode(&sent, &mut payload)?;
//! let mut received = vec![0; 8192];
//! decoder.decode(encoder.method(), payload, &mut received)?;
//! assert_eq!(received, sent);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Where to read on: [`Settings`] (what can be asked for), `encode` and `decode` (what both sides
//! of every method share: sizes, errors), `zlib` and `zstd` (the two streams, which engine serves
//! which level, and the measurements behind it), `isal` (the only unsafe code).

#![deny(unsafe_code)]

mod decode;
mod encode;
mod engine;
mod error;
#[cfg(feature = "isal")]
mod isal;
mod settings;
mod zlib;
mod zstd;

pub use decode::Decoder;
pub use encode::{Encoder, encoder};
pub use error::{DecodeError, EncodeError, SettingsError};
pub use settings::Settings;
