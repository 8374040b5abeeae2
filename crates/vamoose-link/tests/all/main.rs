//! The crate from outside. One binary for all of it, which is linked once.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    reason = "a test fails by panicking, and its data is made up"
)]

mod channel;
mod delta;
mod flips;
mod hostile;
mod limit;
mod log;
mod memory;
mod page_store;
mod session;
mod sockets;
