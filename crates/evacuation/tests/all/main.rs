//! Plans and schedules of any fleet keep their rules, and those of a large one are quick.

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
