//! Waits briefly for a completion record.
//!
//! With WAITPKG, the processor sleeps while it monitors the record's cache line: UMONITOR, a check whether the record was
//! written before, UMWAIT. Without WAITPKG, the thread spins with PAUSE. If the record has not arrived by then, the thread
//! yields, and the caller waits again.

use std::{
    hint,
    time::{Duration, Instant},
};

use crate::{Record, cpu::Features};

/// Checks of the record before the thread yields: a few microseconds, the time of a small operation.
const SPINS: u32 = 64;

/// Longest sleep, in cycles: the kernel's default limit (`/sys/devices/system/cpu/umwait_control/max_time`).
#[cfg(target_arch = "x86_64")]
const MOST_CYCLES: u64 = 100_000;

/// The clock of one work queue, and the way to wait on this processor.
#[derive(Debug)]
pub(crate) struct Waiting {
    beginning: Instant,
    monitors: bool,
}

impl Waiting {
    pub(crate) fn with(features: Features) -> Self {
        Self {
            beginning: Instant::now(),
            monitors: cfg!(target_arch = "x86_64") && features.waitpkg,
        }
    }

    /// Time since the beginning.
    pub(crate) fn now(&self) -> Duration {
        self.beginning.elapsed()
    }

    /// Waits a little for `record`, at most until `deadline`.
    pub(crate) fn pause(&self, record: &Record, deadline: Duration) {
        let left = deadline.saturating_sub(self.now());
        if left.is_zero() {
            return;
        }
        let is_done = match self.monitors {
            true => monitor(record, left),
            false => spin(record, || self.now() < deadline),
        };
        if !is_done {
            rustix::thread::sched_yield();
        }
    }
}

/// Spins; returns whether the record is complete.
fn spin(record: &Record, may_go_on: impl Fn() -> bool) -> bool {
    for _ in 0..SPINS {
        if record.status() != 0 {
            return true;
        }
        if !may_go_on() {
            return false;
        }
        hint::spin_loop();
    }
    record.status() != 0
}

/// Sleeps; returns whether the record is complete. A nanosecond counts as one cycle: time stamp counters of processors with
/// WAITPKG are assumed to run faster, so a sleep ends before its deadline without calibration.
#[cfg(target_arch = "x86_64")]
fn monitor(record: &Record, left: Duration) -> bool {
    use crate::portal::instructions::{time_stamp, umonitor, umwait};

    let cycles = u64::try_from(left.as_nanos())
        .unwrap_or(u64::MAX)
        .min(MOST_CYCLES);
    // SAFETY: `Waiting::with` has seen WAITPKG.
    unsafe { umonitor(record) };
    // A record that was written before UMONITOR does not end the sleep.
    if record.status() == 0 {
        // SAFETY: as above.
        unsafe { umwait(time_stamp().saturating_add(cycles)) };
    }
    record.status() != 0
}

#[cfg(not(target_arch = "x86_64"))]
fn monitor(record: &Record, _left: Duration) -> bool {
    record.status() != 0
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, thread};

    use super::*;

    #[test]
    fn spinning_ends_with_the_record_with_the_deadline_and_by_itself() {
        let record = Record::default();
        let looks = Cell::new(0);
        let at_most = |most: u32| {
            looks.set(0);
            spin(&record, || {
                looks.set(looks.get() + 1);
                looks.get() < most
            })
        };
        assert!(!at_most(u32::MAX));
        assert_eq!(looks.get(), SPINS);
        assert!(!at_most(3));
        assert_eq!(looks.get(), 3);
    }

    #[test]
    fn a_complete_record_ends_the_wait_at_once() {
        // SAFETY: a record is eight atomic words, which are laid out as plain ones are.
        let record: Record = unsafe { std::mem::transmute([1_u64; 8]) };
        assert!(spin(&record, || panic!("spins")));
    }

    #[test]
    fn a_pause_returns_without_a_reason() {
        for features in [Features::default(), Features::of_host()] {
            let waiting = Waiting::with(features);
            let record = Record::default();
            waiting.pause(&record, Duration::MAX);
            waiting.pause(&record, Duration::ZERO);
            assert_eq!(record.status(), 0);
        }
    }

    #[test]
    fn time_goes_on() {
        let waiting = Waiting::with(Features::default());
        let before = waiting.now();
        thread::yield_now();
        assert!(waiting.now() >= before);
    }
}
