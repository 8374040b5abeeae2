//! That the guest lived on: what its ticks tell, and how much silence is allowed.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lab::serial::{self, Continuity, Log};

use super::Variant;
use super::run::Run;
use super::screen::note;
use super::setup::FILLED;

/// From one tick to the next on a machine with nothing else to do.
const TICK: Duration = Duration::from_millis(100);
/// For the first steps at a new place on a machine that others use too: emulated code is translated anew there.
const NOISE: Duration = Duration::from_millis(500);

/// The guest's ticks around a migration. Only a guest with every tick, once and in order, and intact memory has one.
#[derive(Debug)]
pub(crate) struct Life {
    pub(crate) continuity: Continuity,
    /// Between two ticks with the noise of this machine: the longest silence at the source while the migration ran, or
    /// what a sleeping thread suffered meanwhile and later.
    noisy_tick: Duration,
    /// The longest silence at the destination.
    after: Duration,
}

impl Life {
    pub(crate) fn of(
        source: &Log,
        destination: &Log,
        start: Instant,
        overslept: Duration,
    ) -> Result<Self> {
        let continuity = serial::follow(source, destination)?;
        let mut migrating = source.clone();
        migrating.lines.retain(|line| line.at >= start);
        Ok(Self {
            continuity,
            noisy_tick: migrating.largest_gap().max(TICK + overslept),
            after: destination.largest_gap(),
        })
    }
}

/// A move by Vamoose whose guest was silent for longer than the downtime explains is an error.
pub(crate) fn check(run: &Run) -> Result<()> {
    if run.variant == Variant::Stock {
        return Ok(());
    }
    let allowed = allowed(run);
    for (silence, place) in [
        (silence(run), "across the move"),
        (run.life.after, "at the destination"),
    ] {
        ensure!(
            silence <= allowed,
            "{}: the guest was silent for {silence:.0?} {place}, the downtime of {:.0?} allows {allowed:.0?}",
            run.variant,
            run.downtime,
        );
    }
    Ok(())
}

/// Says what was found, and checks it.
pub(crate) fn show(run: &Run) -> Result<()> {
    let Life {
        continuity,
        noisy_tick,
        ..
    } = &run.life;
    note("the source QEMU has stopped for good ('postmigrate'), the destination QEMU is 'running'");
    note(
        "before the guest ran on, all of its memory was compared, in both QEMUs: every byte is equal",
    );
    note(format!(
        "the guest has verified all of its {FILLED} MiB since it moved: nothing is corrupt"
    ));
    note(format!(
        "{} ticks, numbered without a hole or a repetition; {} was the last here, {} the first over there",
        continuity.ticks, continuity.last.number, continuity.first.number,
    ));
    note(format!(
        "between these two: {} ms, with a downtime of {} ms, both without the {} ms of that comparison",
        silence(run).as_millis(),
        run.downtime.as_millis(),
        run.held.as_millis(),
    ));
    note(format!(
        "allowed: {} ms = downtime x 1.5 + {} ms (first steps at a new place, on a shared machine)\n\
         + {} ms (a tick's period and this machine's noise, seen at the source and by a thread that only sleeps)",
        allowed(run).as_millis(),
        NOISE.as_millis(),
        noisy_tick.as_millis(),
    ));
    check(run).context("the guest was away for too long")
}

/// From the last tick at the source to the first one at the destination, without the comparison that the demo made between.
fn silence(run: &Run) -> Duration {
    run.life.continuity.gap().saturating_sub(run.held)
}

fn allowed(run: &Run) -> Duration {
    run.downtime.mul_f64(1.5) + NOISE + run.life.noisy_tick
}
