//! Limits how many entries of a work queue this process has in use.

use std::sync::atomic::{AtomicU32, Ordering};

/// Number of entries in use, which never exceeds a limit.
#[derive(Debug)]
pub(super) struct Credits {
    used: AtomicU32,
    limit: u32,
}

impl Credits {
    pub(super) fn new(limit: u32) -> Self {
        Self {
            used: AtomicU32::new(0),
            limit,
        }
    }

    pub(super) fn limit(&self) -> u32 {
        self.limit
    }

    pub(super) fn used(&self) -> u32 {
        self.used.load(Ordering::Relaxed)
    }

    /// Takes up to `wanted` entries; returns how many.
    pub(super) fn take(&self, wanted: u32) -> u32 {
        let mut used = self.used();
        loop {
            let taken = wanted.min(self.limit.saturating_sub(used));
            if taken == 0 {
                return 0;
            }
            let swapped = self.used.compare_exchange_weak(
                used,
                used + taken,
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
            match swapped {
                Ok(_) => return taken,
                Err(now) => used = now,
            }
        }
    }

    /// Gives back `count` taken entries.
    pub(super) fn give_back(&self, count: u32) {
        let before = self.used.fetch_sub(count, Ordering::Relaxed);
        debug_assert!(before >= count, "{count} given back of {before}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_than_the_limit_is_in_use() {
        let credits = Credits::new(5);
        assert_eq!(credits.take(3), 3);
        assert_eq!(credits.take(3), 2);
        assert_eq!(credits.take(1), 0);
        credits.give_back(3);
        assert_eq!((credits.used(), credits.take(9)), (2, 3));
    }
}
