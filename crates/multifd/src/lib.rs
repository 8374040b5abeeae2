//! QEMU's multifd live-migration wire format: parse and build packets, no I/O.
//!
//! A multifd migration consists of a main stream, which is not part of this crate, and `N` **data channels**, each of which
//! carries
//!
//! ```text
//!  64 bytes          320 bytes + table          payload_len bytes
//! ┌─────────┐ ┌──────────────┬────────────────┬──────────────────────────┐ ┌───
//! │ Initial │ │ flags, counts│ page offsets   │ normal pages, encoded    │ │ next packet …
//! │ (once)  │ │ RAM block    │ page_count × 8 │ by the method in `flags` │ │
//! └─────────┘ └──────────────┴────────────────┴──────────────────────────┘ └───
//!              └── Prelude: the first 12 bytes show whether this is a RAM packet or device state
//! ```
//!
//! Read 12 bytes, let [`Prelude::parse`] decide, read the rest of that header, parse it with
//! [`RamHeader::parse`] or [`DeviceStateHeader::parse`], then read the payload whose checked length
//! the header gives. All integers are big endian. Every length and count is checked against a
//! [`Layout`] before it is used as a length or an index, and no input makes this crate panic.
//!
//! The facts come from experiments with stock QEMU 7.2 and 10.0; the recorded streams in this
//! crate's `tests/` hold it to them.

#![forbid(unsafe_code)]

mod device_state;
mod error;
mod flags;
mod initial;
mod layout;
mod prelude;
mod ram;

pub use device_state::{DEVICE_STATE_HEADER_LEN, DeviceStateHeader, MAX_DEVICE_STATE_PAYLOAD};
pub use error::{InitialError, LayoutError, PacketError};
pub use flags::Method;
pub use initial::{INITIAL_LEN, Initial, MAX_CHANNELS};
pub use layout::{Layout, PACKET_BYTES, PACKET_BYTES_RANGE};
pub use prelude::{PRELUDE_LEN, PacketKind, Prelude};
pub use ram::{BlockName, RAM_HEADER_FIXED_LEN, RamHeader};

/// First four bytes of a data channel and of every packet on it.
pub const MAGIC: u32 = 0x1122_3344;

/// The only version of the format there is.
pub const VERSION: u32 = 1;

/// First four bytes (`QEVM`) of a main stream.
pub const MAIN_MAGIC: u32 = 0x5145_564d;
