//! Tiny guests for tests, demos and benchmarks of live migration: they write memory in patterns, and can prove what they wrote.
//!
//! ```text
//!   source process                                     destination process
//!   Memory::new ─ fill ─ Guest::new                    Memory::new ─ Guest::incoming
//!        resume ─ … writes … (throttle)                        │
//!        pause ─ save ──────── state ────────────────────────> load ─ verify
//!        │  memory, dirty log: all by the migration ═════════> │      resume ─ … ─ pause ─ verify
//! ```
//!
//! A guest has several vCPUs, each of which writes to one page of the working set after another, in a [`Pattern`]. With
//! [`Kind::Kvm`], vCPUs run 64-bit code of this crate, and all of their state is in their registers; with [`Kind::Threads`], they
//! are threads of this process, for hosts without KVM.
//!
//! # What a guest proves
//! A page has separate words for each vCPU, so that vCPUs do not race. A write takes a stamp from the vCPU's generator and stores
//! it in one of the vCPU's words of the page, each time in another one. Before that, it reads the word and adds to a running sum
//!
//! ```text
//! (new - old) × (address + 1)        modulo 2⁶⁴
//! ```
//!
//! So at any time the register equals the sum over all words of the vCPU in the working set, each multiplied by its address plus
//! one. If a migration loses a page, delivers an old version of it, or puts it into another place, the two differ from then on,
//! whenever [`Guest::verify`] compares them.
//!
//! # Addresses
//! The memory consists of named blocks. An address in this crate is an offset into the blocks, one after another, and also the
//! virtual address in a KVM guest. Guest physical addresses have a hole: the first block is at 0, the others begin at 4 GiB.

#![deny(unsafe_code)]

#[cfg(not(target_arch = "x86_64"))]
compile_error!("testguest runs x86-64 code of its own");

mod config;
mod fill;
mod guest;
mod kvm;
mod memory;
mod pacer;
mod stamp;
mod state;
mod vcpu;

pub use config::{Config, Kind, Pattern};
pub use fill::{Fill, fill};
pub use guest::{Guest, Proof};
pub use kvm::{Slot, kvm_available};
pub use memory::{Backing, Block, Memory, PAGE};
