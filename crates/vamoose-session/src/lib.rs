//! The protocol of the link between two Vamooses, without I/O, clocks or threads: what makes connections members of
//! one session, and what lets a stream of bytes go on over the next connection when one breaks.
//!
//! ```text
//!  a session: one secret                       a stream: bytes in both directions
//!  ┌──────────────────────────────┐
//!  │ stream 0 ── connection       │   client  Hello ───────────────────────> server
//!  │ stream 1 ── connection       │           <─────────────────────── Answer
//!  │ stream 2 ── (broken)         │           Attach (stream, has n) ──────>      each proves that it
//!  │          ── next connection  │           <─────────── Welcome (has m)        knows the secret
//!  └──────────────────────────────┘           Data from m on ──────────────>
//!                                             <────────────── Data from n on
//! ```
//!
//! - [`handshake`]: the four messages that begin every connection.
//! - [`frame`]: what follows them, each header and all bytes with a checksum.
//! - [`window`]: what was sent and not acknowledged, to be sent again.
//!
//! A frame is the unit of everything: it is right as a whole or comes again, and only its end is acknowledged. So
//! what is encoded once is sent as often as it takes, and a reader never sees a byte that was changed on its way.
//!
//! # Trust
//! All that is decoded here is a peer's. Every decoder takes a fixed number of bytes, allocates nothing and refuses
//! what no correct peer sends, bytes that must be 0 included. A peer that acknowledges what was not sent is
//! an [error](window::AcknowledgeError).

#![forbid(unsafe_code)]

pub mod frame;
pub mod handshake;
pub mod window;
