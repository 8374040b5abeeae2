//! Moves guests between two hosts with `virsh migrate`, in every way that administrators do, and writes down how each
//! migration ended.
//!
//! ```text
//!  scripts/setup libvirt && cargo build --release -p vamoose -p lab --bin vamoose --bin libvirt && target/release/libvirt
//! ```
//! The guest ticks, checks its memory ([`lab::guest`]), and writes to a disk that both hosts reach. Behind each migration the program checks, or ends with an error:
//!
//! - the guest is on exactly one of the hosts, on the one that the case says;
//! - it ticks there, without a tick that is missing or doubled, and finds all of its memory as it wrote it;
//! - all that it has written is on its disk, nothing twice, and neither host has left the image locked;
//! - `virsh` has ended, and the next migration goes through, where the guest stayed.

mod case;
mod evacuate;
mod options;
mod stage;
mod times;

use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::Parser as _;

use case::CASES;
use options::Options;
use stage::Stage;

fn main() -> ExitCode {
    lab::exit_code("libvirt", run(&Options::parse()))
}

fn run(options: &Options) -> Result<()> {
    if let Some(rounds) = options.times {
        return times::run(options, rounds);
    }
    if let Some(guests) = options.evacuate {
        return evacuate::run(options, guests);
    }
    let generations = options.generations()?;
    let stage = Stage::new(options)?;
    let mut wrong = 0;
    println!("| libvirt | way | case | virsh | guest |\n|---|---|---|---|---|");
    for generation in &generations {
        for way in options.ways() {
            let cases = CASES.iter().filter(|case| options.wants(case));
            for case in cases.filter(|case| case.suits(generation, way)) {
                for _ in 0..options.repeat {
                    let found = stage.run(generation, way, case);
                    print!("| {} | {way} | {} | ", generation.version, case.name);
                    match found {
                        Ok(found) => println!("{} | {} |", found.ended, found.guest),
                        Err(error) => {
                            wrong += 1;
                            let error = format!("{error:#}").replace(['\n', '|'], " ");
                            println!("**WRONG**: {error} | |");
                        }
                    }
                }
            }
        }
    }
    ensure!(wrong == 0, "{wrong} cases went wrong");
    Ok(())
}
