//! The protocol of the link between two Vamooses, without I/O, clocks or threads: a session of byte streams that survive the loss
//! of the connections that carry them.
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
//! - [`frame`]: the units that follow, with checksums of headers and payloads.
//! - [`window`]: frames that were sent and not acknowledged, kept to be sent again.
//! - [`stream`]: one end of a stream as a state machine: events in, effects out.
//!
//! A frame is received completely and intact, or it is sent again; only whole frames are acknowledged. A packet that was encoded
//! once is therefore sent as often as necessary, and a reader never sees a byte that was changed in transit.
//!
//! # How an end behaves
//! - **Resuming.** A connection that breaks, or is silent for 4 s, is given up, with any partial frame. The client dials again, on
//!   any path. The server lets a new connection replace one that still seems to work. Each end reports what it has received only
//!   when it has stopped reading the old connection, and then sends its window again from the offset that the peer has reported.
//! - **Heartbeats.** An end that has sent nothing for 1 s sends [`Acknowledge`](frame::Kind::Acknowledge). While a frame of data
//!   waits for its reader, the frames after it cannot be seen: unread bytes in the kernel count as a sign of life.
//! - **Giving up.** A stream that makes no progress for the reconnect timeout is lost. A connection that was welcomed and then
//!   brought no frame is not progress.
//! - **Corruption.** A frame with a wrong checksum ends its connection, so that the frame is sent again. A second one at the same
//!   offset ends the stream. A violation of the protocol with a correct checksum is the peer's fault, and ends the stream
//!   immediately.
//! - **Ending.** [`End`](frame::Kind::End) is acknowledged like data: its sender keeps the stream until then.
//!   [`Abort`](frame::Kind::Abort) gives up both directions. Without a connection, [`Intent::Abort`](handshake::Intent::Abort) does
//!   so on a new one; otherwise the peer's next attempt to resume is refused.
//! - **Acknowledging.** Every frame acknowledges. After 256 KiB received, an acknowledgement is sent on its own: the sender's
//!   buffers come back while they are in a cache. After 4 KiB, this happens as soon as nothing more has come: the sender's window
//!   may be as small.
//!
//! # Trust
//! Everything decoded here comes from a peer. Every decoder takes a fixed number of bytes, allocates nothing, and refuses what no
//! correct peer sends, including nonzero bytes where 0 is required. A peer that acknowledges bytes that were not sent is an
//! [error](window::AcknowledgeError).

#![forbid(unsafe_code)]

mod fields;
pub mod frame;
pub mod handshake;
pub mod stream;
pub mod window;
