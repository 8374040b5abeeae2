//! Tiny guests for tests, demo and benchmarks of live migration: they write memory in patterns, and can prove
//! what they wrote.
//!
//! ```text
//!   source process                                     destination process
//!   Memory::new ─ fill ─ Guest::new                    Memory::new ─ Guest::incoming
//!        resume ─ … writes … (throttle)                        │
//!        pause ─ save ──────── state ────────────────────────> load ─ verify
//!        │  memory, dirty log: all by the migration ═════════> │      resume ─ … ─ pause ─ verify
//! ```
//!
//! A guest is a number of vCPUs, each of which writes to pages of the working set, page after page in its
//! [`Pattern`]. With [`Kind::Kvm`] they are vCPUs that run 64-bit code of this crate, and all of
//! their state is in their registers; with [`Kind::Threads`] they are threads of this process, for hosts without KVM.
//!
//! # What a guest proves
//! A page has words of its own for each vCPU, so that no two race for one. A write draws a stamp from the
//! vCPU's generator, and stores it in one of the vCPU's words of the page, each time in another one. Before
//! that it reads the word, and adds to a running sum
//!
//! ```text
//! (new - old) × (address + 1)        modulo 2⁶⁴
//! ```
//!
//! So the sum over all words of the vCPU in the working set, each times its address plus one, is at any time what
//! the register says. A page that a migration lost, brought in an older version, or put into another place makes
//! the two differ from there on, at whatever later time [`Guest::verify`] compares them.
//!
//! # Addresses
//! The memory is one or more named blocks. An address in this crate is an offset into them, one block after the
//! other, which is also the virtual address in a KVM guest. Guest physical addresses have a hole:
//! the first block is at 0, the others begin at 4 GiB.

#![deny(unsafe_code)]

#[cfg(not(target_arch = "x86_64"))]
compile_error!("testguest runs x86-64 code of its own");

mod config;
mod fill;
mod guest;
mod kvm;
mod memory;
mod pacer;
mod parallel;
mod stamp;
mod state;
mod vcpu;

pub use config::{Config, ConfigError, Kind, Pattern};
pub use fill::{Fill, fill};
pub use guest::{Guest, GuestError, Proof, VerifyError};
pub use kvm::{KvmError, Slot, kvm_available};
pub use memory::{Backing, Block, Memory, MemoryError, PAGE};
pub use state::LoadError;
