//! Performs one migration between two QEMUs and measures it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lab::cpu::QemuMeter;
use lab::qmp::Event;
use serde_json::Value;

use super::begin::Ends;
use super::{MOMENTS, watch};
use crate::record::{Cell, Cpu, Figures, Outcome, Record};

/// A completed or cancelled migration.
pub(crate) struct Moved {
    /// Whether the guest is at the destination. Otherwise the migration took too long and was cancelled.
    pub(crate) is_there: bool,
    pub(crate) figures: Figures,
    /// When the migration was started.
    pub(crate) commanded: Instant,
    /// From time 0 of the record until the guest arrived or the migration was cancelled.
    pub(crate) span: [Instant; 2],
    /// Vamoose's report, if there is one.
    pub(crate) report: Option<Value>,
}

impl Moved {
    /// The record of this migration.
    pub(super) fn record(self, cell: &Cell, round: u32, outcome: Outcome) -> Record {
        Record::new(cell, round, outcome, self.figures)
    }
}

/// Moves the guest; `meanwhile` is called at each look.
pub(crate) fn migrate(
    mut ends: Ends<'_>,
    cell: &Cell,
    meanwhile: impl FnMut() -> Result<()>,
) -> Result<Moved> {
    let mut moved = Moved {
        is_there: false,
        figures: Figures::default(),
        commanded: Instant::now(),
        span: [Instant::now(); 2],
        report: None,
    };
    ends.source.qmp.take_events();
    let meters = [
        QemuMeter::start(ends.source)?,
        QemuMeter::start(ends.destination)?,
    ];
    let sent_before = ends.here.traffic().ok();
    moved.commanded = Instant::now();
    let helpers = ends.begin(cell)?;
    let seen = watch::watch(ends.source, &helpers, cell, meanwhile);
    let seen = seen.with_context(|| helpers.said())?;
    moved.span[0] = seen.began;
    if seen.account.is_some() {
        let arrived = arrival(&mut ends, cell).with_context(|| helpers.said())?;
        moved.span[1] = Instant::now();
        let [source, destination] = [meters[0].read()?, meters[1].read()?];
        let finished = helpers.finish()?;
        moved.is_there = true;
        moved.figures = watch::figures(&seen, &finished)?;
        if let Some([stopped, resumed]) = arrived {
            moved.figures.downtime = Some((resumed - stopped).as_secs_f64() * 1e3);
            let stopped = stopped.checked_sub(seen.began_at);
            moved.figures.stopped = stopped.map(|stopped| stopped.as_secs_f64() * 1e3);
        }
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
        let is_running = ends.source.qmp.query_status()? == "running";
        ensure!(
            is_running || !cell.guest.runs(),
            "the guest does not run after a cancelled migration"
        );
    }
    moved.figures.link_bytes =
        sent_before.and_then(|before| Some(ends.here.traffic().ok()?.sent - before.sent));
    Ok(moved)
}

/// Waits until the guest has arrived; returns when a running guest stopped and resumed, by this host's clock.
fn arrival(ends: &mut Ends<'_>, cell: &Cell) -> Result<Option<[Duration; 2]>> {
    let (source, destination) = (&mut ends.source.qmp, &mut ends.destination.qmp);
    if !cell.guest.runs() {
        destination.wait_migration(&["completed"], MOMENTS)?;
        return Ok(None);
    }
    let resumed = destination.wait_event("RESUME", |_| true, MOMENTS)?;
    // QEMU sends STOP before it reports the migration as completed.
    let stopped = last_stop(&source.drain_events(), resumed.timestamp)?;
    Ok(Some([stopped, resumed.timestamp]))
}

/// When the guest stopped for good, from the events of its source. If the switchover was postponed, the guest stopped earlier, too,
/// and resumed.
fn last_stop(said: &[Event], resumed: Duration) -> Result<Duration> {
    let stops = said.iter().filter(|event| event.name == "STOP");
    let stop = stops.map(|event| event.timestamp).max();
    let stop = stop.context("the source did not say that it stopped the guest")?;
    ensure!(
        stop <= resumed,
        "the source stopped the guest at {stop:?}, after it ran at the destination, from {resumed:?}"
    );
    Ok(stop)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn the_downtime_begins_with_the_last_stop() {
        let event = |name: &str, millis| Event {
            name: name.to_owned(),
            data: Value::Null,
            timestamp: Duration::from_millis(millis),
        };
        let resumed = Duration::from_millis(900);
        let said = [
            event("STOP", 100),
            event("RESUME", 200),
            event("STOP", 700),
            event("MIGRATION", 800),
        ];
        let stop = last_stop(&said, resumed).unwrap();
        assert_eq!(stop, Duration::from_millis(700));
        let error = last_stop(&said[1..2], resumed).unwrap_err();
        assert!(error.to_string().contains("did not say"), "{error}");
        let both = last_stop(&[event("STOP", 901)], resumed).unwrap_err();
        assert!(both.to_string().contains("after it ran"), "{both}");
    }
}
