//! Runs experiments in parallel until there are enough or one fails.

use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use clap::builder::PossibleValue;
use lab::vamoose::program;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::fault::{Fault, Kind};
use crate::live;
use crate::options::{Engine, Options};
use crate::qemu;
use crate::report::{Report, Trouble};
use crate::sandbox;
use crate::table::Row;
use crate::tally::Tally;

/// What all jobs share.
struct Campaign<'a> {
    options: &'a Options,
    qemu: Option<qemu::Setting>,
    live: Option<live::Setting>,
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
pub(crate) fn run(options: &Options) -> Result<()> {
    let campaign = Campaign::new(options)?;
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        let interrupted = campaign.interrupted.clone();
        signal_hook::flag::register(signal, interrupted).context("catching signals")?;
    }
    thread::scope(|scope| {
        for _ in 0..options.jobs() {
            scope.spawn(|| campaign.work());
        }
    });
    campaign.conclude()
}

impl<'a> Campaign<'a> {
    fn new(options: &'a Options) -> Result<Self> {
        match options.table {
            Some(_) => println!("{TABLE_HEAD}"),
            None => println!("seed {}", options.seed),
        }
        let qemu = match options.engine {
            Engine::Live => None,
            Engine::Qemu | Engine::Both => qemu_setting(options)?,
        };
        let live = match options.engine {
            Engine::Qemu => None,
            _ if options.table.is_some() => None,
            Engine::Live | Engine::Both => live_setting(options)?,
        };
        ensure!(
            qemu.is_some() || live.is_some(),
            "this engine has no fault of that name"
        );
        Ok(Self {
            options,
            qemu,
            live,
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
        let seed = self.options.seed;
        let mut worker = self.qemu.as_ref().map(qemu::Worker::new);
        while let Some(number) = self.next_experiment() {
            match (&mut worker, &self.live) {
                // Both engines alternate.
                (Some(worker), live) if live.is_none() || number % 2 == 0 => {
                    let plan = worker.plan(seed, number);
                    self.experiment(number, &plan, &plan.faults, || worker.experiment(&plan));
                }
                (_, Some(live)) => {
                    let plan = live.plan(seed, number);
                    self.experiment(number, &plan, &plan.faults, || live.experiment(&plan));
                }
                (_, None) => return,
            }
        }
    }

    fn experiment(
        &self,
        number: u64,
        plan: &impl Display,
        faults: &[Fault],
        make: impl FnOnce() -> Result<Report, Trouble>,
    ) {
        self.faults.fetch_add(faults.len() as u64, Ordering::SeqCst);
        match make() {
            _ if self.interrupted.load(Ordering::SeqCst) => {}
            Ok(report) => {
                let mut state = self.lock();
                state.tally.add(&report);
                self.show_progress(state.tally.experiments);
                if self.options.table.is_some() {
                    let downtime = report.downtime.unwrap_or_default().as_millis();
                    let seconds = report.took.as_secs_f64();
                    let cut = match report.missed {
                        0 => "",
                        _ => ", not cut: the phase was over",
                    };
                    let ended = report.ended;
                    println!("| {plan} | {ended}{cut} | {seconds:.1} | {downtime} |");
                } else if self.options.experiment.is_some() {
                    println!("{number}: {plan}\n{report:?}");
                }
            }
            Err(Trouble::Violation { kind, what, story }) => {
                let mut state = self.lock();
                // Other jobs may have found the same; one story is enough.
                if !state.tally.has_violations() || self.options.keep_going {
                    println!("\nBROKEN: {kind}: {what}");
                    println!("experiment: {}", self.command(number));
                    println!("plan: {plan}\n{}\n", story.join("\n"));
                }
                state.tally.add_violation(faults, kind, number);
                if !self.options.keep_going {
                    self.stop.store(true, Ordering::SeqCst);
                }
            }
            Err(Trouble::Experiment(error)) => {
                let error = error.context(format!("experiment {number} could not run: {plan}"));
                if self.options.keep_going {
                    eprintln!("{error:#}");
                    if self.options.table.is_some() {
                        println!("| {plan} | **could not run** | | |");
                    }
                } else {
                    self.stop.store(true, Ordering::SeqCst);
                }
                self.lock().failure.get_or_insert(error);
            }
        }
    }

    fn next_experiment(&self) -> Option<u64> {
        let minutes = self.options.minutes.unwrap_or(u64::MAX);
        let enough = self.faults.load(Ordering::SeqCst) >= self.options.faults()
            || self.begin.elapsed().as_secs() / 60 >= minutes
            || self.stop.load(Ordering::SeqCst)
            || self.interrupted.load(Ordering::SeqCst);
        let number = self.next.fetch_add(1, Ordering::SeqCst);
        let table = self
            .qemu
            .as_ref()
            .and_then(|setting| setting.table.as_ref());
        let enough = enough || table.is_some_and(|rows| number >= rows.len() as u64);
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

    /// The command that repeats an experiment.
    fn command(&self, number: u64) -> String {
        let options = self.options;
        let engine = options.engine.to_possible_value();
        let engine = engine.as_ref().map_or("", PossibleValue::get_name);
        let mut command = match options.table.and_then(|table| table.to_possible_value()) {
            Some(table) => format!("faults --table {}", table.get_name()),
            None => format!("faults --seed {} --engine {engine}", options.seed),
        };
        for only in &options.only {
            command += &format!(" --only '{only}'");
        }
        if let Some(versions) = &options.versions {
            command += &format!(" --versions {}", versions.join(","));
        }
        format!("{command} --experiment {number}")
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

const TABLE_HEAD: &str =
    "| phase | cut | paths | options | ended | s | downtime, ms |\n|---|---|---|---|---|---:|---:|";

/// The setting of the engine, if it has a fault of the wanted names.
fn qemu_setting(options: &Options) -> Result<Option<qemu::Setting>> {
    let kinds = wanted(options, &qemu::KINDS);
    let is_wanted = |row: &Row| {
        let name = row.to_string();
        options.only.is_empty() || options.only.iter().any(|only| name.contains(only))
    };
    let table = options.table.map(|table| {
        let rows = table.rows().into_iter().filter(is_wanted);
        rows.collect::<Vec<_>>()
    });
    if table.as_ref().map_or(kinds.is_empty(), Vec::is_empty) {
        return Ok(None);
    }
    let mut binaries = lab::qemu::available().to_vec();
    if let Some(versions) = &options.versions {
        binaries.retain(|binary| {
            let (major, minor) = (binary.version.major, binary.version.minor);
            versions.contains(&format!("{major}.{minor}"))
        });
    }
    if binaries.is_empty() {
        bail!("no such QEMU here: scripts/setup qemu fetches some");
    }
    let versions: Vec<_> = binaries
        .iter()
        .map(|binary| binary.version.to_string())
        .collect();
    println!("QEMU {}", versions.join(", "));
    qemu::Setting::new(program(None, "vamoose")?, binaries, kinds, table).map(Some)
}

fn live_setting(options: &Options) -> Result<Option<live::Setting>> {
    let kinds = wanted(options, &live::KINDS);
    if kinds.is_empty() {
        return Ok(None);
    }
    // The example of vamoose-live.
    live::Setting::new(program(None, "examples/vmm")?, kinds).map(Some)
}

/// All kinds, or the named ones. Full disks need namespaces.
fn wanted(options: &Options, kinds: &[(u64, Kind)]) -> Vec<(u64, Kind)> {
    let is_wanted = |kind: Kind| match kind {
        Kind::DiskFull(_) if !sandbox::is_inside() => false,
        _ => {
            let mut only = options.only.iter();
            only.len() == 0 || only.any(|only| kind.to_string().contains(only))
        }
    };
    let kinds = kinds.iter().filter(|(_, kind)| is_wanted(*kind));
    kinds.copied().collect()
}
