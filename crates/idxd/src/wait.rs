//! Waits briefly for a completion record.
//!
//! The thread spins with PAUSE. If the record has not arrived by then, the thread yields, and the caller waits again.

use std::{
    hint,
    time::{Duration, Instant},
};

use crate::Record;

/// Checks of the record before the thread yields: a few microseconds, the time of a small operation.
const SPINS: u32 = 64;

/// The clock of one work queue.
#[derive(Debug)]
pub(crate) struct Waiting(Instant);

impl Waiting {
    pub(crate) fn new() -> Self {
        Self(Instant::now())
    }

    /// Time since the beginning.
    pub(crate) fn now(&self) -> Duration {
        self.0.elapsed()
    }

    /// Waits a little for `record`, at most until `deadline`.
    pub(crate) fn pause(&self, record: &Record, deadline: Duration) {
        if !spin(record, || self.now() < deadline) {
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
        let (waiting, record) = (Waiting::new(), Record::default());
        waiting.pause(&record, Duration::MAX);
        waiting.pause(&record, Duration::ZERO);
        assert_eq!(record.status(), 0);
    }

    #[test]
    fn time_goes_on() {
        let waiting = Waiting::new();
        let before = waiting.now();
        thread::yield_now();
        assert!(waiting.now() >= before);
    }
}
