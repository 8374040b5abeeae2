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
//! - [`stream`]: one end of a stream as a state machine: events in, effects out.
//!
//! A frame is the unit of everything: it is right as a whole or comes again, and only its end is acknowledged. So
//! what is encoded once is sent as often as it takes, and a reader never sees a byte that was changed on its way.
//!
//! # How an end behaves
//! - **Resuming.** A connection that breaks, or is silent for 4 s, is given up as a whole, and with it what has come of a
//!   frame. The client dials again, on any path; the server lets a new connection take the place of an old one that it
//!   still believes in. Each end tells what it has received only when it reads no more from the old connection, and
//!   then sends its window again from there.
//! - **Heartbeats.** Who has sent nothing for 1 s sends [`Acknowledge`](frame::Kind::Acknowledge). While a frame of data
//!   waits for its reader, nothing behind it can be seen: bytes that wait in the kernel count as a sign of life.
//! - **Giving up.** A stream that makes no progress for the reconnect timeout is lost. A connection that was welcomed
//!   and then brought no frame is no progress.
//! - **Corruption.** A frame whose checksum does not fit ends its connection, so that it comes again; a second time at
//!   the same offset ends the stream. What is wrong behind a right checksum is the peer's fault and ends it at once.
//! - **Ending.** [`End`](frame::Kind::End) is acknowledged like data: who has sent it keeps the stream until then.
//!   [`Abort`](frame::Kind::Abort) says that nothing more is wanted; where no connection is left to say it on,
//!   [`Intent::Abort`](handshake::Intent::Abort) does, or the next attempt to resume is refused.
//! - **Acknowledging.** With every frame, and on its own for each 256 KiB received: the sender's buffers come back while
//!   they are in a cache. After 4 KiB, too, if nothing more has come: the sender's window may be as small.
//!
//! # Trust
//! All that is decoded here is a peer's. Every decoder takes a fixed number of bytes, allocates nothing and refuses
//! what no correct peer sends, bytes that must be 0 included. A peer that acknowledges what was not sent is
//! an [error](window::AcknowledgeError).

#![forbid(unsafe_code)]

mod fields;
pub mod frame;
pub mod handshake;
pub mod stream;
pub mod window;
