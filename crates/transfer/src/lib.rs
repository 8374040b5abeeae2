//! Migration channels: sockets, packets in and out, pacing, statistics.
//!
//! This crate moves whole packets between a socket and memory and knows nothing of guests:
//!
//! ```text
//! socket ─> ChannelReader ─> Packet (decoded pages) ─> ChannelWriter ─> socket
//!            header check       from a PacketPool         encode, pace
//!            decode
//! ```
//!
//! Threads and blocking sockets throughout. What blocks can always be ended: by
//! [`Hangup::hang_up`], which shuts every registered socket down, and by the stall timeout of a
//! socket, which turns a peer that stops in the middle of a packet, or stops reading, into an error.

#![forbid(unsafe_code)]

mod address;
mod hangup;
mod pace;
mod packet;
mod reader;
mod socket;
mod stats;
mod writer;

pub use address::{Address, AddressError};
pub use hangup::Hangup;
pub use pace::Pacer;
pub use packet::Packet;
pub use reader::{ChannelReader, ReadError, Received};
pub use socket::{Listener, SocketError, Stream, dial, is_stall};
pub use stats::{Snapshot, Stats};
pub use writer::{ChannelWriter, WriteError};
