//! Plans and schedules the evacuation of hosts: destinations of guests, order, concurrency and retries. No I/O, clocks or
//! threads.
//!
//! ```text
//!  Fleet ──> Plan ──> Scheduler ── Action: start, cancel ──────────────> the caller, who migrates
//!                        ^                                                  │
//!                        └────── Event: tick, ended (and where), stop <─────┘
//! ```
//! [`Plan`] admits guests, the largest first, and reserves their memory at a destination. It names the guests that cannot move
//! before anything starts. [`Scheduler`] carries out the plan: it takes events with the time at which they happened, and
//! returns actions.
//!
//! # Rules
//! - **Capacity**: the memory reserved at a destination never exceeds the memory that was free there.
//! - **Slots**: the number of concurrent migrations is limited for each source and each destination.
//! - **One outcome**: each guest is moved, stays, or is in doubt. A guest in doubt is never tried again, because a second
//!   migration could leave two copies running.
//! - **Observation**: after a migration, both hosts are asked where the guest is. Their answers override the migration's own
//!   result. A restarted process can therefore plan from what it observes, without a record.

#![forbid(unsafe_code)]

mod fleet;
mod plan;
mod schedule;

pub use fleet::{Fleet, Guest, GuestId, Host, HostId, SourceId};
pub use plan::{Hindrance, Move, Plan};
pub use schedule::{Action, At, End, Event, Failure, Limits, Outcome, Scheduler, Stay, Stop};
