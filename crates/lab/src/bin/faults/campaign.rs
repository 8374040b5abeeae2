//! Makes experiments, several at once, until there are enough or one goes wrong.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::fault::Kind;
use crate::options::{Engine, Options};
use crate::program::Program;
use crate::qemu;
use crate::report::{Trouble, Violation};
use crate::table::Tally;

/// Everything that the jobs share.
struct Campaign<'a> {
    options: &'a Options,
    qemu: Option<qemu::Setting>,
    begin: Instant,
    /// The number of the next experiment.
    next: AtomicU64,
    faults: AtomicU64,
    stop: Arc<AtomicBool>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    tally: Tally,
    /// The first experiment that could not be made.
    failure: Option<anyhow::Error>,
}

/// Makes the experiments that `options` ask for, and prints what they have shown.
///
/// # Errors
/// When an invariant does not hold, or an experiment cannot be made.
pub(crate) fn run(options: &Options) -> Result<()> {
    let campaign = Campaign::new(options)?;
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, campaign.stop.clone()).context("catching signals")?;
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
        let qemu = match options.engine {
            Engine::Live => None,
            Engine::Qemu | Engine::Both => Some(qemu_setting(options)?),
        };
        Ok(Self {
            options,
            qemu,
            begin: Instant::now(),
            next: AtomicU64::new(options.experiment.unwrap_or(0)),
            faults: AtomicU64::new(0),
            stop: Arc::default(),
            state: Mutex::default(),
        })
    }

    /// One job: one experiment after the other.
    fn work(&self) {
        let mut bench = self.qemu.as_ref().map(qemu::Bench::new);
        while let Some(number) = self.next_experiment() {
            let Some((setting, bench)) = self.qemu.as_ref().zip(bench.as_mut()) else {
                return;
            };
            let Some(plan) = setting.plan(self.options.seed, number) else {
                return;
            };
            let kinds: Vec<_> = plan.faults.iter().map(|fault| fault.kind).collect();
            self.faults.fetch_add(kinds.len() as u64, Ordering::SeqCst);
            match bench.experiment(&plan) {
                Ok(report) => {
                    let mut state = self.lock();
                    state.tally.add(&report);
                    if self.options.experiment.is_some() {
                        println!("{number}: {plan}\n{report:?}");
                    }
                }
                Err(Trouble::Violation(violation)) => {
                    self.violated(number, &kinds, &plan.to_string(), &violation);
                }
                Err(Trouble::Experiment(error)) => self.failed(number, &plan.to_string(), error),
            }
        }
    }

    fn next_experiment(&self) -> Option<u64> {
        let enough = self.faults.load(Ordering::SeqCst) >= self.options.faults
            || self
                .options
                .time
                .is_some_and(|time| self.begin.elapsed() >= time)
            || self.stop.load(Ordering::SeqCst);
        let number = self.next.fetch_add(1, Ordering::SeqCst);
        let only = self.options.experiment.is_none_or(|only| only == number);
        (!enough && only).then_some(number)
    }

    fn violated(&self, number: u64, kinds: &[Kind], plan: &str, violation: &Violation) {
        let mut state = self.lock();
        // The others may have run into the same, and one story is enough.
        if !state.tally.has_violations() || self.options.keep_going {
            let seed = self.options.seed;
            println!("\nBROKEN: {}: {}", violation.kind, violation.what);
            println!("experiment: faults --seed {seed} --experiment {number}\nplan: {plan}");
            println!("{}\n", violation.story.join("\n"));
        }
        state.tally.add_violation(kinds, violation.kind, number);
        if !self.options.keep_going {
            self.stop.store(true, Ordering::SeqCst);
        }
    }

    fn failed(&self, number: u64, plan: &str, error: anyhow::Error) {
        self.stop.store(true, Ordering::SeqCst);
        let context = format!("experiment {number} could not be made: {plan}");
        self.lock().failure.get_or_insert(error.context(context));
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

fn qemu_setting(options: &Options) -> Result<qemu::Setting> {
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
    let kinds: Vec<_> = qemu::kinds()
        .filter(|kind| is_wanted(options, *kind))
        .collect();
    let program = Program::at(&options.vamoose)?;
    qemu::Setting::new(program, &binaries, &kinds, options.short)
}

fn is_wanted(options: &Options, kind: Kind) -> bool {
    let mut only = options.only.iter();
    options.only.is_empty() || only.any(|only| kind.name().contains(only.as_str()))
}
