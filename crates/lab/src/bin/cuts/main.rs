//! Cuts the link between two hosts while a guest moves from one to the other, in every phase and in every way, and writes
//! down how each migration ended.
//!
//! ```text
//!  cargo build --release -p vamoose -p lab --bin vamoose --bin cuts && target/release/cuts --table full --jobs 4
//! ```
//! Experiments are the rows of [`lab::cuts::Table`], each with the next method, QEMUs and kind of authentication. The guest
//! counts in its memory and on a disk ([`lab::writer`]), so that these can be checked behind each of them, or the program ends
//! with an error:
//!
//! - the guest runs at exactly one end: at the destination if and only if the command says so;
//! - all of its memory is right there, to the last byte, and it goes on counting;
//! - all that it has written is on its disk, nothing twice, and the other end has not left the image locked;
//! - a cut that is shorter than the timeouts ends no migration whose connections had been made.

mod options;
mod report;
mod stage;

use std::{
    process::ExitCode,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use anyhow::{Result, ensure};
use clap::Parser as _;

use options::Options;
use report::Line;
use stage::Studio;

fn main() -> ExitCode {
    lab::exit_code("cuts", run(&Options::parse()))
}

fn run(options: &Options) -> Result<()> {
    let studio = Studio::new(options)?;
    let plans = options.plans(studio.binaries())?;
    ensure!(!plans.is_empty(), "no row has such a name");
    eprintln!("cuts: {} experiments", plans.len());
    let (next, lines) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..options.jobs() {
            scope.spawn(|| {
                while let Some(plan) = plans.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let line = Line::new(plan, studio.experiment(plan));
                    eprintln!("{line}");
                    let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
                    lines.push(line);
                }
            });
        }
    });
    let mut lines = lines.into_inner().unwrap_or_else(PoisonError::into_inner);
    lines.sort_by_key(|line| line.number);
    let wrong = lines.iter().filter(|line| line.is_wrong()).count();
    report::write(options.output.as_deref(), &lines)?;
    ensure!(
        wrong == 0,
        "{wrong} of {} experiments went wrong",
        lines.len()
    );
    Ok(())
}
