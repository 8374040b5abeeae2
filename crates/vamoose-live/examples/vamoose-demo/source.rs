//! The migration at the source: shows its progress, and cancels it on a signal.

use std::{
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

use testguest::Guest;
use vamoose_live::{GuestError, Handle, Source, SourceError, SourceGuest, Transport};

use vamoose::progress::{Display, Mode, Progress};
use vamoose::report::process_cpu_time;

/// A migration that has ended, successfully or not.
pub(crate) struct Run {
    pub(crate) handle: Handle,
    /// CPU time of this process, including the guest's vCPUs, from before the migration to its end.
    pub(crate) cpu_time: Duration,
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
    };
    let before = process_cpu_time();
    let result = thread::scope(|scope| {
        let (_over, ended) = mpsc::channel::<()>();
        scope.spawn(|| watch(&handle, cancel, ended));
        source.run(to, &mut outgoing).map(drop)
    });
    let run = Run {
        handle,
        cpu_time: process_cpu_time().saturating_sub(before),
    };
    (run, result)
}

/// Shows the progress of the migration, and cancels it on request, until `ended` disconnects.
fn watch(handle: &Handle, cancel: &AtomicBool, ended: Receiver<()>) {
    const EVERY: Duration = Duration::from_millis(100);
    let display = Display::new(Mode::Auto, "the destination");
    loop {
        display.show(&progress(handle));
        if cancel.load(Ordering::Relaxed) {
            // Has no effect if the guest has moved already.
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
    let stopped_for = status.downtime.unwrap_or_default();
    // A status has only numbers and strings, so this cannot fail.
    let source = serde_json::to_value(status).unwrap_or_default();
    Progress {
        status: source["status"].as_str().unwrap_or_default().to_owned(),
        source,
        moved: handle.moved(),
        session: handle.session(),
        stopped_for,
        ..Progress::default()
    }
}

/// The guest as the engine sees it.
struct Outgoing<'a> {
    guest: &'a Guest,
    /// Whether the guest runs while it is at the source.
    runs: bool,
}

impl SourceGuest for Outgoing<'_> {
    fn is_running(&self) -> bool {
        self.runs
    }

    fn pause(&mut self) -> Result<(), GuestError> {
        self.guest.pause();
        Ok(())
    }

    fn resume(&mut self) -> Result<(), GuestError> {
        Ok(self.guest.resume()?)
    }

    fn save(&mut self) -> Result<Vec<u8>, GuestError> {
        Ok(self.guest.save()?)
    }
}
