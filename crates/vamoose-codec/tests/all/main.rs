//! The crate from outside. One binary for all of it, which is linked once.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_possible_wrap,
    reason = "a test fails by panicking, and its data is made up"
)]

mod common;

mod bounds;
mod documented;
#[cfg(feature = "fault-injection")]
mod faults;
mod hostile;
mod iaa;
mod qat;
mod qatzip;
mod qpl;
mod round_trip;
mod vectors;
