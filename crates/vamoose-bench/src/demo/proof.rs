//! Proves from the guest's ticks that it kept running, with no more silence than allowed.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use lab::serial::{self, Continuity, Log};

use super::run::Run;
use super::screen::note;

/// Time from one tick to the next on an idle machine.
const TICK: Duration = Duration::from_millis(100);
/// Allowance for the first steps at a new place on a shared machine: emulated code is translated anew there.
const NOISE: Duration = Duration::from_millis(500);

/// The guest's ticks around a migration. A value exists only if the guest's memory is intact and every tick came once, in order.
#[derive(Debug)]
pub(crate) struct Life {
    continuity: Continuity,
    /// The longest silence at the source during the migration: a tick, and the noise of this machine.
    before: Duration,
    /// The longest silence at the destination.
    after: Duration,
}

impl Life {
    pub(crate) fn of(source: &Log, destination: &Log, start: Instant) -> Result<Self> {
        let continuity = serial::follow(source, destination)?;
        let mut migrating = source.clone();
        migrating.lines.retain(|line| line.at >= start);
        Ok(Self {
            continuity,
            before: migrating.largest_gap().max(TICK),
            after: destination.largest_gap(),
        })
    }
}

/// Shows the ticks. Fails if the guest was silent for longer than its downtime explains.
pub(crate) fn show(run: &Run, filled: u32) -> Result<()> {
    let Continuity { ticks, last, first } = &run.life.continuity;
    let allowed = run.downtime.mul_f64(1.5) + NOISE + run.life.before;
    let millis =
        [silence(run), run.downtime, allowed, NOISE, run.life.before].map(|it| it.as_millis());
    let [silent, downtime, limit, noise, before] = millis;
    note(format!(
        "the source QEMU has stopped for good ('postmigrate'), the destination QEMU is 'running'\n\
         since the move, the guest has verified all of its {filled} MiB: nothing is corrupt\n\
         {ticks} ticks, numbered without a gap or a repetition; {} was the last at the source, {} the first at the destination\n\
         between these two: {silent} ms, with a downtime of {downtime} ms\n\
         allowed: {limit} ms = downtime x 1.5 + {noise} ms (first steps at a new place, on a shared machine) \
         + {before} ms (the longest silence at the source during the migration)",
        last.number, first.number,
    ));
    for (silence, place) in [
        (silence(run), "across the move"),
        (run.life.after, "at the destination"),
    ] {
        ensure!(
            silence <= allowed,
            "the guest was silent for {silence:.0?} {place}, the downtime of {:.0?} allows {allowed:.0?}",
            run.downtime,
        );
    }
    Ok(())
}

/// Time from the last tick at the source to the first one at the destination.
pub(crate) fn silence(run: &Run) -> Duration {
    run.life.continuity.gap()
}
