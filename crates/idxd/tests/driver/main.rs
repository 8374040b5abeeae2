//! The driver as its users see it, on modelled directories and with work queues that need no device.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod discovery;
mod dsa;
mod iaa;
mod offload;
mod queue;
mod tree;
mod witness;

/// 64 bytes from what stands at some of their places.
fn expected(parts: &[(usize, &[u8])]) -> [u8; 64] {
    let mut expected = [0; 64];
    for (at, bytes) in parts {
        expected[*at..at + bytes.len()].copy_from_slice(bytes);
    }
    expected
}
