//! `make faults`: breaks migrations in every way, at random moments, and checks where the guest is.
//!
//! An experiment is one guest, one migration, one or two faults. Then everything is repaired, and the command is run again until it
//! knows where the guest is. The test fails with the experiment's seed unless:
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
//!
//! Experiments run in parallel until there are enough or one fails.

mod claim;
mod disk;
mod fault;
mod injector;
mod link;
pub(crate) mod options;
mod qemu;
mod random;
mod report;
pub(crate) mod sandbox;
mod tally;
mod timeline;

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use self::fault::Kind;
use self::options::Options;
use self::qemu::Experiment;
use self::report::Trouble;
use self::tally::Tally;
use crate::common::vamoose;

/// The test below, for a process of its own.
pub(crate) const TEST: &str = "campaign::whatever_fails_a_guest_is_in_one_place";

#[test]
#[ignore = "minutes"]
fn whatever_fails_a_guest_is_in_one_place() -> Result<()> {
    if sandbox::is_inside() {
        return run(&Options::of_environment()?);
    }
    let ended = sandbox::command(TEST)?.status();
    let ended = ended.context("starting the campaign")?;
    ensure!(ended.success(), "{ended}, see above");
    Ok(())
}

/// What all jobs share.
struct Campaign<'a> {
    options: &'a Options,
    setting: qemu::Setting,
    begin: Instant,
    /// The number of the next experiment.
    next: AtomicU64,
    faults: AtomicU64,
    stop: AtomicBool,
    /// This program got a signal, and so did its children.
    interrupted: Arc<AtomicBool>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    tally: Tally,
    /// The error of the first experiment that could not run.
    failure: Option<anyhow::Error>,
}

/// Runs the experiments that `options` ask for, and prints the results.
///
/// # Errors
/// When an invariant does not hold, or an experiment cannot run.
fn run(options: &Options) -> Result<()> {
    let campaign = Campaign::new(options)?;
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        let interrupted = campaign.interrupted.clone();
        signal_hook::flag::register(signal, interrupted).context("catching signals")?;
    }
    thread::scope(|scope| {
        for _ in 0..options.jobs {
            scope.spawn(|| campaign.work());
        }
    });
    campaign.conclude()
}

impl<'a> Campaign<'a> {
    fn new(options: &'a Options) -> Result<Self> {
        println!("seed {}", options.seed);
        Ok(Self {
            options,
            setting: two_qemus(options)?,
            begin: Instant::now(),
            next: AtomicU64::new(options.experiment.unwrap_or(0)),
            faults: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            interrupted: Arc::default(),
            state: Mutex::default(),
        })
    }

    /// A job: runs experiments one after the other.
    fn work(&self) {
        while let Some(number) = self.next_experiment() {
            let made = self.setting.experiment(self.options.seed, number);
            self.count(number, made);
        }
    }

    fn count(&self, number: u64, made: Experiment) {
        let Experiment {
            plan,
            faults,
            result,
        } = made;
        self.faults.fetch_add(faults.len() as u64, Ordering::SeqCst);
        match result {
            _ if self.interrupted.load(Ordering::SeqCst) => {}
            Ok(report) => {
                let mut state = self.lock();
                state.tally.add(&report);
                self.show_progress(state.tally.experiments);
                if self.options.experiment.is_some() {
                    println!("{number}: {plan}\n{report:?}");
                }
            }
            Err(Trouble::Violation { kind, what, story }) => {
                let mut state = self.lock();
                // Other jobs may have found the same; one story is enough.
                if !state.tally.has_violations() {
                    println!("\nBROKEN: {kind}: {what}");
                    println!("experiment: {}", self.options.repeat(number));
                    println!("plan: {plan}\n{}\n", story.join("\n"));
                }
                state.tally.add_violation(&faults, kind, number);
                self.stop.store(true, Ordering::SeqCst);
            }
            Err(Trouble::Experiment(error)) => {
                let error = error.context(format!("experiment {number} could not run: {plan}"));
                self.stop.store(true, Ordering::SeqCst);
                self.lock().failure.get_or_insert(error);
            }
        }
    }

    fn next_experiment(&self) -> Option<u64> {
        let enough = self.faults.load(Ordering::SeqCst) >= self.options.faults
            || self.begin.elapsed().as_secs() / 60 >= self.options.minutes
            || self.stop.load(Ordering::SeqCst)
            || self.interrupted.load(Ordering::SeqCst);
        let number = self.next.fetch_add(1, Ordering::SeqCst);
        let only = self.options.experiment.is_none_or(|only| only == number);
        (!enough && only).then_some(number)
    }

    fn show_progress(&self, experiments: u64) {
        let mut out = io::stderr();
        if out.is_terminal() {
            let faults = self.faults.load(Ordering::SeqCst);
            // An error is harmless.
            let _ = write!(out, "\r{experiments} experiments, {faults} faults ");
        }
    }

    fn conclude(self) -> Result<()> {
        let took = self.begin.elapsed();
        let state = self
            .state
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        let minutes = took.as_secs_f64() / 60.0;
        println!(
            "\n{}{:.1} minutes, {:.0} experiments a minute",
            state.tally,
            minutes,
            state.tally.experiments as f64 / minutes
        );
        if let Some(failure) = state.failure {
            return Err(failure);
        }
        if state.tally.has_violations() {
            bail!("an invariant does not hold (seed {})", self.options.seed);
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The QEMUs and the faults that `options` ask for.
fn two_qemus(options: &Options) -> Result<qemu::Setting> {
    let kinds = wanted_kinds(options);
    ensure!(!kinds.is_empty(), "there is no fault of that name");
    let binaries = lab::qemu::available().to_vec();
    ensure!(
        !binaries.is_empty(),
        "no QEMU here: scripts/setup qemu fetches some"
    );
    let versions = binaries.iter().map(|binary| binary.version.to_string());
    println!("QEMU {}", versions.collect::<Vec<_>>().join(", "));
    qemu::Setting::new(vamoose().to_owned(), binaries, kinds)
}

/// All kinds, or those of the name asked for. Full disks need namespaces.
fn wanted_kinds(options: &Options) -> Vec<(u64, Kind)> {
    let can_be = |kind: Kind| !matches!(kind, Kind::DiskFull(_)) || sandbox::has_namespaces();
    let kinds = qemu::KINDS.into_iter();
    let is_wanted = |kind: Kind| kind.to_string().contains(&options.only);
    let wanted = kinds.filter(|(_, kind)| can_be(*kind) && is_wanted(*kind));
    wanted.collect()
}
