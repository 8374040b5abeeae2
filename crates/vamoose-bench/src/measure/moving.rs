//! One migration between two QEMUs, and what it took.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lab::cpu::QemuMeter;
use serde_json::Value;

use super::begin::Ends;
use super::{MOMENTS, watch};
use crate::record::{Cell, Cpu, Figures, Moment};
use crate::scenario::Guest;

/// A migration that has ended as it should.
pub(crate) struct Moved {
    /// Whether the guest is at the destination: otherwise it took too long, was cancelled, and is at the source.
    pub(crate) is_there: bool,
    pub(crate) figures: Figures,
    pub(crate) timeline: Vec<Moment>,
    /// From the command until the guest had arrived, or was given up.
    pub(crate) span: [Instant; 2],
    /// What Vamoose says of it, if it was there.
    pub(crate) report: Option<Value>,
    /// CPU seconds of the guest meanwhile, at both ends.
    pub(crate) guest_cpu: f64,
}

/// Moves the guest; `meanwhile` is called at each look at the migration.
pub(crate) fn migrate(
    mut ends: Ends<'_>,
    cell: &Cell,
    meanwhile: impl FnMut(Duration) -> Result<()>,
) -> Result<Moved> {
    let mut moved = Moved {
        is_there: false,
        figures: Figures::default(),
        timeline: Vec::new(),
        span: [Instant::now(); 2],
        report: None,
        guest_cpu: 0.0,
    };
    ends.source.qmp.take_events();
    let meters = [
        QemuMeter::start(ends.source)?,
        QemuMeter::start(ends.destination)?,
    ];
    let sent_before = ends.here.traffic().ok();
    moved.span[0] = Instant::now();
    let mut helpers = ends.begin(cell)?;
    let seen = watch::watch(ends.source, &mut helpers, cell, meanwhile);
    let mut seen = seen.with_context(|| helpers.said())?;
    moved.timeline = std::mem::take(&mut seen.timeline);
    if seen.account.is_some() {
        let arrived = arrival(&mut ends, cell).with_context(|| helpers.said())?;
        moved.span[1] = Instant::now();
        let [(source, before), (destination, after)] = [meters[0].read()?, meters[1].read()?];
        let finished = helpers.finish()?;
        moved.is_there = true;
        moved.guest_cpu = before + after;
        moved.figures = watch::figures(&seen, &finished)?;
        moved.figures.downtime = arrived.map(|downtime| downtime.as_secs_f64() * 1e3);
        moved.figures.cpu = Cpu {
            source,
            sender: finished.cpu[0],
            receiver: finished.cpu[1],
            destination,
        };
        moved.report = finished.report;
    } else {
        moved.span[1] = Instant::now();
        helpers.cancel(ends.source)?;
        moved.figures.seconds = seen.seconds;
        moved.figures.throttle = Some(seen.throttle).filter(|throttle| *throttle > 0);
        let is_running = ends.source.qmp.query_status()? == "running";
        ensure!(
            is_running || matches!(cell.guest, Guest::Still(_)),
            "the guest does not run after a cancelled migration"
        );
    }
    moved.figures.link_bytes =
        sent_before.and_then(|before| Some(ends.here.traffic().ok()?.sent - before.sent));
    Ok(moved)
}

/// Waits until the guest has arrived; gives the downtime of one that runs, from stop to start by this host's clock.
fn arrival(ends: &mut Ends<'_>, cell: &Cell) -> Result<Option<Duration>> {
    let (source, destination) = (&mut ends.source.qmp, &mut ends.destination.qmp);
    if matches!(cell.guest, Guest::Still(_)) {
        destination.wait_migration(&["completed"], MOMENTS)?;
        return Ok(None);
    }
    let resumed = destination.wait_event("RESUME", |_| true, MOMENTS)?;
    let stopped = source.wait_event("STOP", |_| true, MOMENTS)?;
    Ok(Some(resumed.timestamp.saturating_sub(stopped.timestamp)))
}
