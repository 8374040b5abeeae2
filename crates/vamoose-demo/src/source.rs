//! The migration at the source: shows its progress, cancels it on a signal, and keeps statistics of each round.

use std::{
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use serde::Serialize;
use testguest::Guest;
use vamoose_live::{
    GuestError, Handle, Session, Snapshot, Source, SourceError, SourceGuest, Status, Switchover,
    Transport,
};

use crate::cpu::CpuTime;
use vamoose::progress::{Display, Progress};

/// A migration that has ended, successfully or not.
pub(crate) struct Run {
    /// Status at the end.
    pub(crate) status: Status,
    pub(crate) moved: Snapshot,
    pub(crate) rounds: Vec<Round>,
    /// CPU time of this process without the vCPUs, from before the migration to its end.
    pub(crate) cpu_time: Duration,
    /// CPU time of the vCPUs during the migration.
    pub(crate) vcpu_time: Option<Duration>,
    pub(crate) session: Option<Session>,
}

/// A round over the guest's memory. In the last one the guest is paused.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Round {
    /// In milliseconds, including the following read of the dirty log. For the last round, the downtime.
    pub(crate) time: f64,
    /// Pages sent, normal and zero.
    pub(crate) pages: u64,
    pub(crate) wire_bytes: u64,
    /// Dirty pages at its end.
    pub(crate) dirty_pages: u64,
}

/// Migrates `guest` to the destination at `to`, until `cancel` is set. A paused guest stays paused.
pub(crate) fn migrate(
    source: Source,
    to: &Transport,
    guest: &Guest,
    cancel: &AtomicBool,
) -> (Run, Result<(), SourceError>) {
    let handle = source.handle();
    let mut outgoing = Outgoing {
        guest,
        runs: guest.is_running(),
        rounds: Vec::new(),
        last: Mark::default(),
        start: Instant::now(),
    };
    let before = CpuTime::now();
    let (result, after) = thread::scope(|scope| {
        let (_over, ended) = mpsc::channel::<()>();
        let watched = handle.clone();
        scope.spawn(move || watch(&watched, cancel, &ended));
        outgoing.start = Instant::now();
        let result = source.run(to, &mut outgoing);
        (result.map(drop), CpuTime::now())
    });
    let status = handle.status();
    if result.is_ok() {
        outgoing.last_round(&status);
    }
    let run = Run {
        status,
        moved: handle.moved(),
        rounds: outgoing.rounds,
        cpu_time: after.without_vcpus(before),
        vcpu_time: after.of_vcpus(before),
        session: handle.session(),
    };
    (run, result)
}

/// Shows the progress of the migration, and cancels it on request, until `ended` disconnects.
fn watch(handle: &Handle, cancel: &AtomicBool, ended: &Receiver<()>) {
    const EVERY: Duration = Duration::from_millis(100);
    let mut display = Display::on_stderr();
    loop {
        display.show(&progress(handle));
        if cancel.load(Ordering::Relaxed) {
            // It may be too late: the guest has moved.
            handle.cancel();
        }
        if ended.recv_timeout(EVERY) != Err(RecvTimeoutError::Timeout) {
            break;
        }
    }
    display.end();
}

fn progress(handle: &Handle) -> Progress {
    let status = handle.status();
    let stopped_for = Duration::from_millis(status.downtime.unwrap_or_default());
    // Plain numbers and strings: this cannot fail.
    let source = serde_json::to_value(status).unwrap_or_default();
    Progress {
        status: source["status"].as_str().unwrap_or_default().to_owned(),
        source,
        moved: handle.moved(),
        session: handle.session(),
        stopped_for,
    }
}

/// The guest as the engine sees it.
struct Outgoing<'a> {
    guest: &'a Guest,
    /// Whether it runs while it is here.
    runs: bool,
    rounds: Vec<Round>,
    last: Mark,
    start: Instant,
}

/// Totals at the end of a round.
#[derive(Default)]
struct Mark {
    time: Duration,
    pages: u64,
    wire_bytes: u64,
}

impl Outgoing<'_> {
    fn round(&mut self, status: &Status, time: Duration, took: Duration) {
        let ram = &status.ram;
        let pages = ram.normal + ram.duplicate;
        self.rounds.push(Round {
            time: tenths(took),
            pages: pages - self.last.pages,
            wire_bytes: ram.transferred - self.last.wire_bytes,
            dirty_pages: ram.remaining / ram.page_size.max(1),
        });
        self.last = Mark {
            time,
            pages,
            wire_bytes: ram.transferred,
        };
    }

    fn last_round(&mut self, status: &Status) {
        let mut status = status.clone();
        status.ram.remaining = 0;
        let took = Duration::from_millis(status.downtime.unwrap_or_default());
        self.round(&status, self.start.elapsed(), took);
    }
}

/// Milliseconds with one decimal.
fn tenths(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e4).round() / 10.0
}

impl SourceGuest for Outgoing<'_> {
    fn pause(&mut self) -> Result<(), GuestError> {
        self.guest.pause();
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        if self.runs {
            self.guest.resume()?;
        }
        Ok(())
    }

    fn save(&mut self) -> Result<Vec<u8>, GuestError> {
        Ok(self.guest.save()?)
    }

    fn throttle(&mut self, percent: u8) {
        self.guest.throttle(percent);
    }

    fn switchover(&mut self, status: &Status) -> Switchover {
        let now = self.start.elapsed();
        let began = match self.rounds.is_empty() {
            true => Duration::from_millis(status.setup_time),
            false => self.last.time,
        };
        self.round(status, now, now.saturating_sub(began));
        Switchover::Auto
    }
}
