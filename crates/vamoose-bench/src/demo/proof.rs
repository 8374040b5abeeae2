//! Proves from the guest's ticks that it kept running, with no more silence than allowed.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use lab::serial::{self, Log};

use super::screen::note;
use crate::measure::moving::Moved;

/// Time from one tick to the next on an idle machine.
const TICK: Duration = Duration::from_millis(100);
/// Allowance for the first steps at a new place on a shared machine: emulated code is translated anew there.
const NOISE: Duration = Duration::from_millis(500);

/// Shows the ticks around a migration, after which the guest has verified its memory. Fails if the guest was silent for longer than
/// its downtime explains. Returns the silence between the last tick at the source and the first one at the destination.
pub(crate) fn show(source: &Log, destination: &Log, moved: &Moved) -> Result<Duration> {
    let found = serial::follow(source, destination)?;
    let mut migrating = source.clone();
    migrating.lines.retain(|line| line.at >= moved.commanded);
    // A tick, and the noise of this machine.
    let before = migrating.largest_gap().max(TICK);
    let downtime = moved.figures.downtime.context("no downtime measured")?;
    let downtime = Duration::from_secs_f64(downtime / 1e3);
    let (silence, allowed) = (found.gap(), downtime.mul_f64(1.5) + NOISE + before);
    let millis = [silence, downtime, allowed, NOISE, before].map(|it| it.as_millis());
    let [silent, downtime, limit, noise, before] = millis;
    note(format!(
        "the source QEMU has stopped for good ('postmigrate'), the destination QEMU is 'running'\n\
         since the move, the guest has verified all of its content: nothing is corrupt\n\
         {} ticks, numbered without a gap or a repetition; {} was the last at the source, {} the first at the destination\n\
         between these two: {silent} ms, with a downtime of {downtime} ms\n\
         allowed: {limit} ms = downtime x 1.5 + {noise} ms (first steps at a new place, on a shared machine) \
         + {before} ms (the longest silence at the source during the migration)",
        found.ticks, found.last.number, found.first.number,
    ));
    for (silence, place) in [
        (silence, "across the move"),
        (destination.largest_gap(), "at the destination"),
    ] {
        ensure!(
            silence <= allowed,
            "the guest was silent for {silence:.0?} {place}, its downtime allows {allowed:.0?}",
        );
    }
    Ok(silence)
}
