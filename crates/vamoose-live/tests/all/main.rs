//! The crate from outside, beside a guest that runs. One binary for all of it, which is linked once.

#![cfg(not(feature = "loom"))] // whose atomics work in a model only
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    reason = "a test fails by panicking, and its data is made up"
)]

mod common;

mod both_ends;
mod cancel;
mod dsa;
mod faults;
mod hostile;
mod link;
mod migrate;
mod post_copy;
mod snapshots;
#[cfg(target_arch = "x86_64")]
mod threads;
mod vmm;
