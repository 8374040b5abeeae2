//! Exponential backoff from a queue that refuses work or answers too late.
//!
//! A queue that is full forever looks like a busy one, and each rejected submission costs bus time of all users. So a
//! queue that accepted nothing, or answered too late, is skipped once, then twice, then four times, and so on; after
//! each pause it is tried once. The first useful answer ends the backoff. It counts occasions instead of time, so it
//! needs no clock and behaves the same in virtual time.

use std::sync::atomic::{AtomicU32, Ordering};

/// Number of occasions on which a queue is skipped.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    /// Consecutive failures.
    failures: AtomicU32,
    /// Remaining occasions.
    left: AtomicU32,
}

/// The longest backoff is two to the power of this: about ten milliseconds of the processor's own work.
const LONGEST: u32 = 10;

impl Backoff {
    /// Whether the queue may be used on this occasion. Threads that race here may count two occasions as one.
    pub(super) fn is_over(&self) -> bool {
        let left = self.left.load(Ordering::Relaxed);
        if left > 0 {
            self.left.store(left - 1, Ordering::Relaxed);
        }
        left == 0
    }

    /// The queue accepted nothing, or answered too late.
    pub(super) fn record_failure(&self) {
        let failures = self.failures.load(Ordering::Relaxed);
        self.failures
            .store((failures + 1).min(LONGEST), Ordering::Relaxed);
        self.left.store(1 << failures, Ordering::Relaxed);
    }

    /// The queue answered in time.
    pub(super) fn record_success(&self) {
        if self.failures.load(Ordering::Relaxed) > 0 {
            self.failures.store(0, Ordering::Relaxed);
            self.left.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoffs_become_longer_up_to_a_limit_and_end_with_a_success() {
        let backoff = Backoff::default();
        let occasions = || (0..).take_while(|_| !backoff.is_over()).count();
        assert_eq!(occasions(), 0);
        for power in [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10] {
            backoff.record_failure();
            assert_eq!(occasions(), 1 << power);
        }
        backoff.record_failure();
        backoff.record_success();
        assert_eq!(occasions(), 0);
        backoff.record_failure();
        assert_eq!(occasions(), 1);
    }
}
