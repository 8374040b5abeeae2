//! Proves from the guest's ticks that it kept running, with no more silence than allowed.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lab::serial::{self, Continuity, Log};

use super::Variant;
use super::run::Run;
use super::screen::note;
use super::setup::FILLED;

/// Time from one tick to the next on an idle machine.
const TICK: Duration = Duration::from_millis(100);
/// Allowance for the first steps at a new place on a shared machine: emulated code is translated anew there.
const NOISE: Duration = Duration::from_millis(500);

/// The guest's ticks around a migration. It exists only for a guest with intact memory and with every tick once and in order.
#[derive(Debug)]
pub(crate) struct Life {
    pub(crate) continuity: Continuity,
    /// The time between two ticks with the noise of this machine: the longest silence at the source during the migration, or the
    /// longest delay of a sleeping thread.
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

/// Fails if a guest moved by Vamoose was silent for longer than the downtime explains.
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

/// Shows and checks the ticks.
pub(crate) fn show(run: &Run) -> Result<()> {
    let Life {
        continuity,
        noisy_tick,
        ..
    } = &run.life;
    note("the source QEMU has stopped for good ('postmigrate'), the destination QEMU is 'running'");
    note(
        "before the guest resumed, all of its memory was compared in both QEMUs: every byte is equal",
    );
    note(format!(
        "since the move, the guest has verified all of its {FILLED} MiB: nothing is corrupt"
    ));
    note(format!(
        "{} ticks, numbered without a gap or a repetition; {} was the last at the source, {} the first at the destination",
        continuity.ticks, continuity.last.number, continuity.first.number,
    ));
    note(format!(
        "between these two: {} ms, with a downtime of {} ms, both without the {} ms of the comparison",
        silence(run).as_millis(),
        run.downtime.as_millis(),
        run.held.as_millis(),
    ));
    note(format!(
        "allowed: {} ms = downtime x 1.5 + {} ms (first steps at a new place, on a shared machine)\n\
         + {} ms (period of a tick and noise of this machine, measured at the source and by a sleeping thread)",
        allowed(run).as_millis(),
        NOISE.as_millis(),
        noisy_tick.as_millis(),
    ));
    check(run).context("the guest was silent for too long")
}

/// Time from the last tick at the source to the first one at the destination, without the demo's own comparison.
fn silence(run: &Run) -> Duration {
    run.life.continuity.gap().saturating_sub(run.held)
}

fn allowed(run: &Run) -> Duration {
    run.downtime.mul_f64(1.5) + NOISE + run.life.noisy_tick
}
