//! Makes experiments, several at once, until there are enough or one goes wrong.

use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::fault::{Fault, Kind};
use crate::live;
use crate::options::{Engine, Options};
use crate::program::Program;
use crate::qemu;
use crate::report::{Report, Trouble, Violation};
use crate::table::Tally;

/// Everything that the jobs share.
struct Campaign<'a> {
    options: &'a Options,
    qemu: Option<qemu::Setting>,
    live: Option<live::Setting>,
    begin: Instant,
    /// The number of the next experiment.
    next: AtomicU64,
    faults: AtomicU64,
    stop: AtomicBool,
    /// Interrupted: what has not ended by itself has got the same signal.
    interrupted: Arc<AtomicBool>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    tally: Tally,
    /// The first experiment that could not be made.
    failure: Option<anyhow::Error>,
}

/// An experiment that is being made.
struct Begun {
    number: u64,
    plan: String,
    kinds: Vec<Kind>,
}

/// Makes the experiments that `options` ask for, and prints what they have shown.
///
/// # Errors
/// When an invariant does not hold, or an experiment cannot be made.
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
        println!("seed {}", options.seed);
        let qemu = match options.engine {
            Engine::Live => None,
            Engine::Qemu | Engine::Both => Some(qemu_setting(options)?),
        };
        let live = match options.engine {
            Engine::Qemu => None,
            Engine::Live | Engine::Both => Some(live_setting(options)?),
        };
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

    /// One job: one experiment after the other.
    fn work(&self) {
        let mut bench = self.qemu.as_ref().map(qemu::Bench::new);
        while let Some(number) = self.next_experiment() {
            match (&self.qemu, &mut bench, &self.live) {
                // With both engines each has its turn.
                (qemu, _, Some(live)) if qemu.is_none() || number % 2 == 1 => {
                    let Some(plan) = live.plan(self.options.seed, number) else {
                        return;
                    };
                    let begun = self.begins(number, &plan, &plan.faults);
                    self.ends(&begun, live.experiment(&plan));
                }
                (Some(qemu), Some(bench), _) => {
                    let Some(plan) = qemu.plan(self.options.seed, number) else {
                        return;
                    };
                    let begun = self.begins(number, &plan, &plan.faults);
                    self.ends(&begun, bench.experiment(&plan));
                }
                _ => return,
            }
        }
    }

    fn begins(&self, number: u64, plan: &impl Display, faults: &[Fault]) -> Begun {
        self.faults.fetch_add(faults.len() as u64, Ordering::SeqCst);
        Begun {
            number,
            plan: plan.to_string(),
            kinds: faults.iter().map(|fault| fault.kind).collect(),
        }
    }

    fn ends(&self, begun: &Begun, result: Result<Report, Trouble>) {
        match result {
            _ if self.interrupted.load(Ordering::SeqCst) => {}
            Ok(report) => {
                let mut state = self.lock();
                state.tally.add(&report);
                self.show_progress(state.tally.experiments);
                if self.options.experiment.is_some() {
                    println!("{}: {}\n{report:?}", begun.number, begun.plan);
                }
            }
            Err(Trouble::Violation(violation)) => self.violated(begun, &violation),
            Err(Trouble::Experiment(error)) => self.failed(begun, error),
        }
    }

    fn next_experiment(&self) -> Option<u64> {
        let enough = self.faults.load(Ordering::SeqCst) >= self.options.faults()
            || self
                .options
                .minutes
                .is_some_and(|minutes| self.begin.elapsed() >= Duration::from_secs(60 * minutes))
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
            // It is not needed any more.
            let _ = write!(out, "\r{experiments} experiments, {faults} faults ");
        }
    }

    fn violated(&self, begun: &Begun, violation: &Violation) {
        let mut state = self.lock();
        // The others may have run into the same, and one story is enough.
        if !state.tally.has_violations() || self.options.keep_going {
            println!("\nBROKEN: {}: {}", violation.kind, violation.what);
            println!("experiment: {}", self.command(begun.number));
            println!("plan: {}\n{}\n", begun.plan, violation.story.join("\n"));
        }
        state
            .tally
            .add_violation(&begun.kinds, violation.kind, begun.number);
        if !self.options.keep_going {
            self.stop.store(true, Ordering::SeqCst);
        }
    }

    /// How to make an experiment again.
    fn command(&self, number: u64) -> String {
        let options = self.options;
        let mut command = format!("faults --seed {} --engine {}", options.seed, options.engine);
        for only in &options.only {
            command += &format!(" --only '{only}'");
        }
        if let Some(versions) = &options.versions {
            command += &format!(" --versions {}", versions.join(","));
        }
        if options.short {
            command += " --short";
        }
        format!("{command} --experiment {number}")
    }

    fn failed(&self, begun: &Begun, error: anyhow::Error) {
        self.stop.store(true, Ordering::SeqCst);
        let context = format!(
            "experiment {} could not be made: {}",
            begun.number, begun.plan
        );
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
    let program = Program::at(&options.vamoose()?)?;
    let kinds = qemu::kinds().filter(|kind| is_wanted(options, *kind, program.checks()));
    let kinds: Vec<_> = kinds.collect();
    qemu::Setting::new(program, &binaries, &kinds, options.short)
}

fn live_setting(options: &Options) -> Result<live::Setting> {
    let kinds = live::kinds().filter(|kind| is_wanted(options, *kind, false));
    live::Setting::new(&options.vmm()?, &kinds.collect::<Vec<_>>())
}

/// All kinds, or those that were named. Bits are flipped where that is noticed, or where that is asked for.
fn is_wanted(options: &Options, kind: Kind, checks: bool) -> bool {
    if options.only.is_empty() {
        return kind != Kind::Flip || checks;
    }
    let mut only = options.only.iter();
    only.any(|only| kind.name().contains(only.as_str()))
}
