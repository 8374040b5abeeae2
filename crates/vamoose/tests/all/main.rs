//! The program as a user runs it, beside stock QEMUs. One binary for all of it: linked once, and the slow tests of one file run
//! beside those of the others.

#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]

mod common;

mod attempts;
mod bench;
mod campaign;
mod commit;
mod database;
mod decoder;
mod delta;
mod disks;
mod docs;
mod engines;
mod faults;
mod gateway;
mod handover;
mod host;
mod hostile;
mod keys;
mod libvirt;
mod limit;
mod link;
mod methods;
mod migrate;
mod mistakes;
mod old_destination;
mod owner;
mod page_store;
mod paths;
mod paused;
mod policy;
mod post_copy;
mod predict;
mod preflight;
mod probe;
mod relay;
mod relay_end;
mod replaced;
mod running;
mod selftest;
mod settings;
mod soak;
mod storage;
mod suspended;
mod terminal;
mod watch;
