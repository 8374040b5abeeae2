//! Plans and schedules keep their rules for any fleet, and are fast for large fleets.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that fails panics"
)]

mod plans;
mod schedules;
mod simulation;
#[path = "../../examples/evacuate/simulator.rs"]
mod simulator;
mod strategies;
