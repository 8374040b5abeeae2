//! Encoders and decoders of page data, one per channel and direction, for QEMU's multifd methods and two of Vamoose's own, and
//! the engines (libraries, devices) that implement them.
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
//! The packets of lz4, zstd-frames, qpl and qatzip are independent of each other.
//!
//! An [`Encoder`] and a [`Decoder`] live as long as their channel and process each of its packets once, in order. They cannot
//! be used after an error: the other side's history differs from then on. The flush makes a packet decodable as soon as it
//! has arrived.
//!
//! ```
//! # #[cfg(feature = "zstd")] {
//! use vamoose_codec::{Decoder, Settings, encoder};
//! use multifd::{Layout, Method};
//!
//! let settings = Settings::new(Method::Zstd, None)?;
//! let mut encoder = encoder(&settings, Layout::X86)?;
//! let mut decoder = Decoder::new(Layout::X86);
//!
//! let (sent, mut out) = (vec![7; 8192], vec![0; Layout::X86.max_payload()]);
//! let encoded = encoder.encode(&sent, &mut out)?;
//! let mut received = vec![0; 8192];
//! decoder.decode(encoded.method, encoded.payload, &mut received)?;
//! assert_eq!(received, sent);
//! # }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A method's module has its format, its engines, and the measurements behind the choice.

#![deny(unsafe_code)]
#![cfg_attr(
    not(all(feature = "deflate", feature = "lz4", feature = "zstd")),
    allow(dead_code, unused_imports, reason = "what only some methods use")
)]

mod accelerated;
mod decode;
pub mod delta;
mod encode;
mod engine;
mod error;
mod ffi;
mod health;
#[cfg(feature = "deflate")]
mod iaa;
#[cfg(feature = "lz4")]
mod lz4;
mod methods;
#[cfg(feature = "deflate")]
mod qat;
#[cfg(feature = "deflate")]
mod qatzip;
#[cfg(feature = "deflate")]
mod qpl;
mod registry;
mod settings;
pub mod shared;
mod stream;
#[cfg(feature = "fault-injection")]
mod testing;
#[cfg(feature = "zstd")]
mod words;
mod zero;
#[cfg(feature = "deflate")]
mod zlib;
#[cfg(feature = "zstd")]
mod zstd;
#[cfg_attr(not(feature = "zstd"), path = "zstd_frames/absent.rs")]
mod zstd_frames;

pub use accelerated::Verify;
pub use decode::Decoder;
pub use encode::{Encoded, Encoder, encoder};
pub use error::{Absence, DecodeError, EncodeError, SettingsError};
pub use health::{Health, Tally};
pub use methods::{DecodedBy, Framing, Levels, MethodInfo, info};
pub use registry::{Accel, EngineInfo, Engines, Registry};
pub use settings::Settings;
#[cfg(feature = "fault-injection")]
pub use testing::Faults;
pub use zero::is_zero;
pub use zstd_frames::{RAW_FRAME_LEN, checks_itself, raw_frame};
