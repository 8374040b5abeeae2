//! Leaving a queue alone that is of no use, for longer and longer.
//!
//! "Full for ever" looks like a busy queue, and each time it says so costs everybody's bus. So a queue that took
//! nothing, or whose answer came too late, is not asked the next time, then not the next two, four, and so on; now
//! and then it is tried once. The first useful answer ends that. It is counted in occasions and not in time: so it
//! costs no look at a clock, and is the same in any time that a queue may have.

use std::sync::atomic::{AtomicU32, Ordering};

/// Occasions on which a queue is to be left alone.
#[derive(Debug, Default)]
pub(super) struct Rest {
    /// How often in a row it was of no use.
    failures: AtomicU32,
    /// Occasions that are left.
    left: AtomicU32,
}

/// The longest rest is two to the power of this: about ten milliseconds of the processor's own work.
const LONGEST: u32 = 10;

impl Rest {
    /// Whether the queue may be asked on this occasion. Threads that meet here may count one for two.
    pub(super) fn is_over(&self) -> bool {
        let left = self.left.load(Ordering::Relaxed);
        if left > 0 {
            self.left.store(left - 1, Ordering::Relaxed);
        }
        left == 0
    }

    /// It was of no use.
    pub(super) fn lengthen(&self) {
        let failures = self.failures.load(Ordering::Relaxed);
        self.failures
            .store((failures + 1).min(LONGEST), Ordering::Relaxed);
        self.left.store(1 << failures, Ordering::Relaxed);
    }

    /// It was of use.
    pub(super) fn end(&self) {
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
    fn rests_become_longer_up_to_a_limit_and_end_with_a_success() {
        let rest = Rest::default();
        let occasions = || (0..).take_while(|_| !rest.is_over()).count();
        assert_eq!(occasions(), 0);
        for power in [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10] {
            rest.lengthen();
            assert_eq!(occasions(), 1 << power);
        }
        rest.lengthen();
        rest.end();
        assert_eq!(occasions(), 0);
        rest.lengthen();
        assert_eq!(occasions(), 1);
    }
}
