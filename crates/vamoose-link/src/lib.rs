//! Migration channels: sockets, packets in and out, the adaptive method, pacing, statistics.
//!
//! This crate moves whole packets between a socket and memory and knows nothing of guests. A relay keeps
//! packets in its own buffers:
//!
//! ```text
//! socket ─> ChannelReader::read ─> Packet (decoded pages) ─> ChannelWriter::write ─> socket
//!            header check, decode                             encode, pace
//! ```
//!
//! A VMM has guest memory, seen as `VolatileSlice`s, which vCPUs write meanwhile. Pages of method none
//! are transferred between it and the socket directly, others through the coder's buffer:
//!
//! ```text
//! guest ─> write_memory ─┬───── none: sendmsg, or MSG_ZEROCOPY ─────┬─> socket
//!                        └─ copy, encode ──────────────────────────┘
//! socket ─> read_header, then read_pages ─┬──── none: recvmsg ───┬─> guest
//!                                         └─ decode, copy ───────┘
//! ```
//!
//! Threads and blocking sockets throughout. Every blocking call can be ended: by
//! [`Hangup::hang_up`], which shuts down all registered sockets, and by the stall timeout of a
//! socket, which turns a peer that stops in the middle of a packet, or stops reading, into an error.

#![deny(unsafe_code)]
#![cfg_attr(
    not(feature = "_tls"),
    allow(dead_code, unused_imports, reason = "what only sessions use")
)]

mod adaptive;
mod address;
mod backlog;
mod blocks;
mod bytes;
mod chain;
mod conversation;
mod cost;
mod delta;
mod dial;
mod downtime;
mod hangup;
mod memory;
mod method;
mod new_file;
mod pace;
mod packet;
#[cfg_attr(not(feature = "_tls"), path = "page_store/absent.rs")]
mod page_store;
mod pages;
mod peer;
mod queue;
mod reader;
#[cfg_attr(not(feature = "_tls"), path = "session/absent.rs")]
mod session;
mod socket;
mod stats;
mod stream;
mod threads;
mod timeouts;
#[cfg(feature = "_tls")]
mod tls;
mod wait;
mod writer;
mod zero_copy;

pub use adaptive::Adaptive;
pub use address::{Address, AddressError};
pub use blocks::{ByteReader, ByteWriter};
pub use bytes::Bytes;
pub use chain::chain;
pub use conversation::{Conversation, ConversationError, random_id, send_message};
pub use cost::EncodingCost;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub use delta::testing as delta_testing;
pub use delta::{DeltaError, DeltaReceiver, DeltaSender, PageCaches};
pub use dial::dial;
pub use downtime::{DowntimeParts, millis};
pub use hangup::{Hangup, HangupGuard};
pub use memory::populate;
pub use method::{MethodChoice, PacketEncoder};
pub use new_file::NewFile;
pub use pace::{Limit, Pacer};
pub use packet::Packet;
#[cfg(feature = "_tls")]
pub use page_store::{GuestPages, PageStore, StoreUse};
pub use page_store::{StoreListener, StoreLister, StoreSender};
pub use peer::{Peer, Peers, all_has_come, peer_inode, peer_of};
pub use queue::PollQueue;
pub use reader::{ChannelReader, PacketName, PayloadFault, ReadError, Received};
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub use session::testing as session_testing;
pub use session::{
    DialError, Introduced, Remote, Resumable, Session, SessionConfig, Sessions, SessionsError,
    StreamError,
};
#[cfg(feature = "_tls")]
pub use session::{LinkFaults, Opening, PathStatus, Route};
pub use socket::{Listener, Socket, SocketError, is_stall};
pub use stats::{Counters, Stats};
pub use stream::Stream;
pub use threads::{for_thread, on_every_thread};
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub use tls::testing as tls_testing;
#[cfg(feature = "_tls")]
pub use tls::{
    Certificates, Cipher, End, FileCipher, FileFault, FileKey, Keys, Objection, OneTimeKey,
    PublicKey, PublicKeyError, Refusal, Security, TlsError,
};
pub(crate) use wait::try_lock;
pub use wait::{left, lock, receive_until, wait_for, wait_until};
pub use writer::{ChannelWriter, WriteError};
pub use zero_copy::{ZeroCopyError, check_locked_memory};
