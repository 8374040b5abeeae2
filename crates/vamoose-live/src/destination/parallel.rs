//! Work that is done in parts, by several threads, with regular reports of its progress.

use std::{
    cell::Cell,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use crate::spans::in_span;

/// Calls `work` with each number below `parts`, on up to `threads` threads. The caller's is one of them, and does
/// everything where no other can be had.
///
/// `heartbeat` beats after each part of the caller's, so it reports progress, not threads that hang.
pub(super) fn each(
    parts: usize,
    threads: usize,
    heartbeat: &Heartbeat<'_>,
    work: &(dyn Fn(usize) + Sync),
) {
    let next = AtomicUsize::new(0);
    // This only divides the parts; the end of the scope orders the rest.
    let take = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|part| *part < parts);
    thread::scope(|scope| {
        for _ in 1..threads.min(parts) {
            let helper = || std::iter::from_fn(take).for_each(work);
            let builder = thread::Builder::new().name("make-zero".into());
            if let Err(error) = builder.spawn_scoped(scope, in_span(helper)) {
                tracing::debug!(%error, "no more threads: fewer do the work");
                break;
            }
        }
        for part in std::iter::from_fn(take) {
            work(part);
            heartbeat.beat();
        }
    });
}

/// Reports at intervals that work makes progress.
pub(super) struct Heartbeat<'a> {
    report: &'a dyn Fn(),
    every: Duration,
    last: Cell<Instant>,
}

impl<'a> Heartbeat<'a> {
    /// Calls `report`, but at most once `every` so long.
    pub(super) fn new(every: Duration, report: &'a dyn Fn()) -> Self {
        let last = Cell::new(Instant::now());
        Self {
            report,
            every,
            last,
        }
    }

    /// Something has been done.
    pub(super) fn beat(&self) {
        if self.last.get().elapsed() >= self.every {
            (self.report)();
            self.last.set(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Barrier, Mutex, mpsc};

    use super::*;

    const NEVER: Duration = Duration::MAX;

    #[test]
    fn each_part_is_done_once() {
        for threads in [0, 1, 3] {
            for parts in [0, 1, 2, 100] {
                let done = Mutex::new(Vec::new());
                let heartbeat = Heartbeat::new(NEVER, &|| panic!("too early"));
                each(parts, threads, &heartbeat, &|part| {
                    done.lock().unwrap().push(part);
                });
                let mut done = done.into_inner().unwrap();
                done.sort_unstable();
                assert!(done.into_iter().eq(0..parts), "{threads} threads");
            }
        }
    }

    #[test]
    fn parts_are_done_at_the_same_time() {
        let (done_in, done) = mpsc::channel();
        // On a thread that is left behind if the parts wait for each other in vain.
        thread::spawn(move || {
            let meet = Barrier::new(2);
            let heartbeat = Heartbeat::new(NEVER, &|| {});
            each(2, 2, &heartbeat, &|_| {
                meet.wait();
            });
            done_in.send(()).unwrap();
        });
        done.recv_timeout(Duration::from_secs(60)).unwrap();
    }

    #[test]
    fn the_heartbeat_reports_of_parts_that_are_done() {
        let beats = Cell::new(0);
        let report = || beats.set(beats.get() + 1);
        let heartbeat = Heartbeat::new(Duration::ZERO, &report);
        each(10, 1, &heartbeat, &|_| {});
        assert_eq!(beats.get(), 10);
    }
}
