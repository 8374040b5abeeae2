//! Makes all memory read as zeros, since a source does not send untouched memory.
//!
//! ```text
//!  Destination::run ── start ── wait for a source ── its offer ── wait ── prepared
//!                        │                                         │ preparing, every second
//!                        └ threads: find touched pages, read them, give them back or write zeros
//! ```
//! This begins before there is a source, so that the source does not wait.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread::{self, Scope},
    time::Duration,
};

use super::guest_ram::GuestRam;
use crate::spans::in_span;

/// Memory that is being made zero. Dropping this stops the work.
pub(super) struct MakeZero<'env> {
    memory: &'env GuestRam,
    progress: Arc<Progress>,
    ended: Receiver<()>,
}

/// Progress of the threads, and whether they are to stop.
#[derive(Default)]
pub(super) struct Progress {
    steps: AtomicU64,
    stop: AtomicBool,
}

/// How often to report progress.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(1);

impl<'env> MakeZero<'env> {
    /// Begins, on all processors.
    pub(super) fn start<'scope>(
        memory: &'env GuestRam,
        scope: &'scope Scope<'scope, 'env>,
    ) -> Self {
        let progress = Arc::new(Progress::default());
        let (ended_in, ended) = mpsc::channel();
        let of_thread = progress.clone();
        let run = in_span(move || {
            memory.make_zero(&of_thread);
            // Without a receiver the destination has ended.
            let _ = ended_in.send(());
        });
        let builder = thread::Builder::new().name("vamoose-zero".into());
        if let Err(error) = builder.spawn_scoped(scope, run) {
            tracing::debug!(%error, "no thread that makes memory zero: it waits for a source");
        }
        Self {
            memory,
            progress,
            ended,
        }
    }

    /// Waits until all memory reads as zeros. Calls `report` at once, and then after each `heartbeat` in which there was
    /// progress.
    pub(super) fn wait(self, heartbeat: Duration, report: &dyn Fn()) {
        let mut before = None;
        loop {
            let steps = Some(self.progress.steps.load(Ordering::Relaxed));
            if steps != before {
                report();
            }
            before = steps;
            match self.ended.recv_timeout(heartbeat) {
                Ok(()) => return,
                // The thread could not be started.
                Err(RecvTimeoutError::Disconnected) => {
                    return self.memory.make_zero(&self.progress);
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

impl Drop for MakeZero<'_> {
    fn drop(&mut self) {
        self.progress.stop.store(true, Ordering::Relaxed);
    }
}

impl Progress {
    /// Counts a step. False: the rest is not needed.
    pub(super) fn step(&self) -> bool {
        self.steps.fetch_add(1, Ordering::Relaxed);
        !self.stop.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::test_ram;

    /// Memory that is made zero by a thread that the test plays.
    fn with_thread(test: impl FnOnce(MakeZero<'_>, &mpsc::Sender<()>)) {
        let ram = test_ram::anonymous(1 << 20);
        let memory = GuestRam::new(&ram, true).unwrap();
        let (ended_in, ended) = mpsc::channel();
        let progress = Arc::default();
        let make_zero = MakeZero {
            memory: &memory,
            progress,
            ended,
        };
        test(make_zero, &ended_in);
    }

    #[test]
    fn finished_work_is_reported_once() {
        with_thread(|make_zero, ended| {
            ended.send(()).unwrap();
            let reports = Cell::new(0);
            make_zero.wait(HEARTBEAT, &|| reports.set(reports.get() + 1));
            assert_eq!(reports.get(), 1);
        });
    }

    #[test]
    fn progress_is_reported() {
        with_thread(|make_zero, ended| {
            let (progress, reports) = (make_zero.progress.clone(), Cell::new(0));
            make_zero.wait(Duration::from_millis(1), &|| {
                reports.set(reports.get() + 1);
                match reports.get() {
                    1..5 => drop(progress.step()),
                    _ => ended.send(()).unwrap(),
                }
            });
            assert_eq!(reports.get(), 5);
        });
    }

    #[test]
    fn without_a_thread_it_is_done_by_the_caller() {
        let ram = test_ram::anonymous(1 << 20);
        let memory = GuestRam::new(&ram, true).unwrap();
        let progress = Arc::<Progress>::default();
        let make_zero = MakeZero {
            memory: &memory,
            progress: progress.clone(),
            ended: mpsc::channel().1,
        };
        make_zero.wait(HEARTBEAT, &|| ());
        assert!(progress.steps.load(Ordering::Relaxed) > 0);
        assert!(!progress.step(), "it has been dropped");
    }
}
