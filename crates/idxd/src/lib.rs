//! User-space driver for the work queues of Intel's Data Streaming Accelerator (DSA) and In-Memory Analytics
//! Accelerator (IAA).
//!
//! ```text
//!   offload                     finds zero pages; compresses, decompresses, copies pages: device or processor
//!      │
//!   queue                       one work queue: credits, deadlines, quarantine
//!      │
//!   submit                      the trait `Submit`: a work queue as a process has it
//!      ├── portal ── discovery  a queue of the host, by ENQCMD or write(2)
//!      └── crate idxd-model     devices in software that fail on request
//!
//!   descriptor, dsa, iaa        what a device is to do             record, status    what it reports
//! ```
//! These devices exist for little-endian x86-64 only; on other targets only the model works.

#[cfg(test)]
extern crate self as idxd;
#[cfg(test)]
#[path = "../tests/driver/tree.rs"]
#[expect(dead_code, reason = "the tests of the directory need all of it")]
mod tree;

mod arena;
mod cpu;
mod descriptor;
pub mod discovery;
pub mod dsa;
mod fork;
pub mod iaa;
mod limits;
pub mod offload;
pub mod portal;
mod queue;
mod record;
pub mod status;
mod submit;
mod wait;

pub use descriptor::{Descriptor, Flags, opcode};
pub use limits::{Capabilities, Kind, Limits, Operations};
pub use queue::{
    InFlight, OpenQueueError, Outcome, Queue, Shape, Slot, Statistics, SubmitError, Tuning,
    Unanswered,
};
pub use record::{Record, RecordImage};
pub use submit::{Refusal, Submit, Submitted};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(target_endian = "big")]
compile_error!("descriptors and records are little endian");
