//! The fault campaign: breaks migrations in every way, at random moments, and checks where the guest is.
//!
//! ```text
//!  cargo build --release -p vamoose && cargo run --release -p lab --bin faults -- --faults 2000
//! ```
//! An experiment is one guest, one migration, one or two faults. Then everything is repaired, and the command is run again until it
//! knows where the guest is. The program ends with an error and the experiment's seed unless:
//!
//! - the guest runs in exactly one place, and has never run in two, nor returned with old memory;
//! - it is lost only if the only process that had it was killed;
//! - its memory is right to the last byte, at the source if it stayed, at the destination if it moved;
//! - everything that a guest of a QEMU has written is on its disk once, and the image is not locked, even if the guest is lost;
//! - commands are right: success if and only if the guest runs at the destination; in doubt only until the repair, and only after a
//!   commit;
//! - the next migration works.
//!
//! The seed and the experiment's number determine everything except the exact time of faults that are not tied to a message or a
//! byte, which depends on the machine's speed.

mod campaign;
mod claim;
mod disk;
mod fault;
mod injector;
mod link;
mod options;
mod qemu;
mod random;
mod report;
mod sandbox;
mod tally;
mod timeline;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    let options = options::Options::parse();
    let result = sandbox::enter().and_then(|()| campaign::run(&options));
    lab::exit_code("faults", result)
}
