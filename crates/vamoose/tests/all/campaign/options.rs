//! What a campaign does, by the environment.

use std::{env, thread};

use anyhow::Result;
use lab::process::now;

use crate::common::number;

#[derive(Debug)]
pub(crate) struct Options {
    /// Ends after this many faults.
    pub(crate) faults: u64,
    /// Ends after this many minutes.
    pub(crate) minutes: u64,
    pub(crate) seed: u64,
    /// The number of experiments at once.
    pub(crate) jobs: usize,
    /// Runs only this experiment, and prints all of its events.
    pub(crate) experiment: Option<u64>,
    /// Only faults whose name contains this, such as `kill`.
    pub(crate) only: String,
}

impl Options {
    pub(crate) fn of_environment() -> Result<Self> {
        let minutes = number(MINUTES, u64::MAX)?;
        let faults = if minutes == u64::MAX { 200 } else { u64::MAX };
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let experiment = number(EXPERIMENT, u64::MAX)?;
        Ok(Self {
            faults: number("FAULTS", faults)?,
            minutes,
            // Of few digits, which are easy to type.
            seed: number(SEED, u64::from(now().subsec_micros()))?,
            jobs: number(JOBS, 2 * processors)?.max(1),
            experiment: Some(experiment).filter(|it| *it != u64::MAX),
            only: env::var(ONLY).unwrap_or_default(),
        })
    }

    /// The command that repeats an experiment.
    pub(crate) fn repeat(&self, experiment: u64) -> String {
        let Self { seed, only, .. } = self;
        format!("{SEED}={seed} {ONLY}='{only}' {EXPERIMENT}={experiment} make faults")
    }
}

pub(crate) const MINUTES: &str = "FAULTS_MINUTES";
pub(crate) const SEED: &str = "FAULTS_SEED";
pub(crate) const JOBS: &str = "FAULTS_JOBS";
const EXPERIMENT: &str = "FAULTS_EXPERIMENT";
const ONLY: &str = "FAULTS_ONLY";
