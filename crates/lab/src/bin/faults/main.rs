//! The campaign: breaks migrations in every way, at random moments, and looks who has the guest.
//!
//! ```text
//!  cargo build --release -p vamoose && cargo run --release -p lab --bin faults -- --faults 2000
//! ```
//! An experiment is one guest, one migration, one or two faults. Then everything is repaired, the command is run again until
//! it knows where the guest is, and these must hold, or the program ends with an error and the experiment's seed:
//!
//! - the guest runs in exactly one place, and never ran in two, not even one after the other and back;
//! - it is lost only where the only process that had it was killed;
//! - its memory is right to the last byte, at the source if it stayed, at the destination if it moved;
//! - all that a guest of QEMU's has written is on its disk, nothing twice, and nobody has left the image locked, even where
//!   the guest is lost;
//! - what commands say is so: success if and only if it runs at the destination; in doubt only while something is broken, and
//!   only where a commit was sent;
//! - the next migration works.
//!
//! Chance decides everything from the seed and the experiment's number; what depends on the machine's speed is when exactly
//! a fault strikes that is not tied to a message or a byte.

mod campaign;
mod claim;
mod disk;
mod fault;
mod injector;
mod link;
mod live;
mod options;
mod qemu;
mod random;
mod report;
mod sandbox;
mod table;
mod tally;
mod timeline;

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    let options = options::Options::parse();
    let result = sandbox::enter().and_then(|()| campaign::run(&options));
    lab::exit_code("faults", result)
}
