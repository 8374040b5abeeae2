//! Moves all guests off hosts: which guest goes where, in which order, how many at once and how fast, without I/O, clocks or
//! threads.
//!
//! ```text
//!  Fleet ──> Plan ──> Scheduler ── Action: start, set a rate, cancel ──> the caller, who migrates
//!                        ^                                                  │
//!                        └────── Event: progress, ended (and where) <───────┘
//! ```
//! [`Plan`] admits guests, the largest first, and reserves their memory at a destination. It names the guests that cannot move
//! before anything starts. [`Scheduler`] carries the plan out: it takes events with the time at which they happened, and
//! returns actions.
//!
//! # Rules
//! - **Capacity**: what is reserved at a destination never exceeds what was free there.
//! - **Slots**: a host has at most so many migrations at once as a source, and as a destination.
//! - **Bandwidth**: rates are max-min fair within the limits of all migrations together, of each host and of each guest. After
//!   each single action their sum is within the limits: decreases come before starts, and those before increases.
//! - **One outcome**: each guest ends as moved, as one that stays, or as in doubt. One in doubt is never tried again: a second
//!   migration could make two of it.
//! - **Observation**: where a guest is when a migration has ended is an observation of both hosts. It counts, whatever the
//!   migration itself returned. So a process that is started anew plans from what it observes, and needs no record of its own.

#![forbid(unsafe_code)]

mod fleet;
mod plan;
mod schedule;
mod shares;

pub use fleet::{Fleet, FleetError, Guest, GuestId, Host, HostId};
pub use plan::{Hindrance, Move, Plan, Refusal, Refused};
pub use schedule::{
    Action, At, End, Event, Failure, FailureKind, Limits, LimitsError, Outcome, Scheduler, Stay,
    Stop,
};
