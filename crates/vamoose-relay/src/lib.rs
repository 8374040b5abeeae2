//! A live-migration relay between two QEMUs, and its orchestration over QMP.
//!
//! ```text
//!            main stream (opaque bytes, both ways)
//!  source ══════════════════════════════════════════ destination
//!  QEMU   ── channel 0..N ─> Relay ─> channel 0..M ─> QEMU, or another relay
//!            any method       one method, SYNC on all
//! ```
//!
//! [`Relay`] moves one migration. [`Server`] and [`Migration`] put two relays between two QEMUs, set
//! both QEMUs up over QMP and see the migration through to a guest that runs in one place. [`Gateway`] stands between two
//! hosts for all migrations of those who drive their QEMUs themselves.
//!
//! ARCHITECTURE.md describes a page's path through the modules. The log lines of a migration are in one span, `migration`,
//! with its role (`relay`, `source`, `destination`) and the attempt's id.

#![forbid(unsafe_code)]

mod accept;
mod attempts;
mod channels;
mod config;
mod control;
mod downtime;
mod error;
mod exchange;
mod first_bytes;
mod gateway;
mod gather;
mod instance;
mod journal;
mod late;
mod main_stream;
mod marks;
mod migrate;
mod observer;
mod opaque;
mod process;
mod qemu;
mod qmp;
mod relay;
mod return_path;
mod serve;
mod service;
mod settle;
mod syncs;
mod under_way;

pub use accept::{Accept, SortedStreams};
pub use attempts::{Attempt, Standing, attempts};
pub use config::{Config, Dialer, ZeroPages};
pub use control::ControlError;
pub use convergence::{AutoConverge, OnTimeout};
pub use downtime::Switchover;
pub use error::{Direction, RelayError};
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub use gateway::fuzzing as gateway_fuzzing;
pub use gateway::{
    AnnounceError, Gateway, GatewayConfig, GatewayError, GatewayPeer, GatewayStream,
};
pub use handover::{AttemptId, GuestLocation};
pub use instance::Instance;
pub use journal::{Journal, JournalError};
pub use migrate::{
    Cause, CopiedDisks, Failure, Forecast, Inputs, LinkSpeed, Migration, Moved, News, Prediction,
    Progress, Remedies, Storage, Writes,
};
pub use observer::{End, EndKind, Observed, Observer};
pub use process::ProcessId;
pub use qemu::{Fact, Fit, QemuError, Version};
pub use qmp::QmpError;
pub use relay::{Milestone, Outcome, Relay, Summary};
pub use serve::{ServeError, Server, ServerConfig};
pub use settle::{SettleError, Settlement, Verdict};
pub use under_way::{Role, UnderWay, WatchError, Watchable, under_way};
pub use vamoose_link::{DowntimeParts, chain};
