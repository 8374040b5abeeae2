//! A conformance suite for implementations of QEMU's multifd migration format, as BoGo is for TLS.
//!
//! ```text
//!  cases/KIND/NAME.json ──> run ── request (stdin) ──> driver: a small program around the implementation
//!                            ^                            │
//!       expected memory, ────┴────── reply (stdout) ──────┘
//!       or the suite's own decoder
//! ```
//!
//! - [`Case`]: what a decoder is given and must make of it, or what an encoder is to send. The example
//!   `multifd-cases` makes most of them from descriptions; the others are recordings of QEMUs.
//! - [`Request`], [`Reply`]: how the runner and a driver speak.
//! - [`decode`]: the suite's own decoder, which judges encoders. It shares no code with the implementations under test.
//! - [`run()`]: all cases against a driver; [`Exclusion`]: cases that an implementation need not pass, and why.
//!
//! The README says how to test an implementation.

#![forbid(unsafe_code)]

mod case;
mod decoder;
mod notation;
mod protocol;
mod run;

pub use case::{Block, Bytes, Case, Expect, Memory, Page, Task};
pub use decoder::{Role, decode};
pub use protocol::{Reply, Request, Work};
pub use run::{Driver, Exclusion, Exclusions, Outcome, Verdict, fits, run, table};

/// Bytes in a page.
pub const PAGE: usize = 4096;

/// Pages that a packet can name: the length of its table of offsets.
pub const PACKET_PAGES: usize = 128;
