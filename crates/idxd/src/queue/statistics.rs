//! Counters of a queue.

use std::sync::atomic::{AtomicU64, Ordering};

/// The counters of a [`Queue`](crate::Queue), read one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Operations that the device has accepted: members of batches, and single ones.
    pub operations: u64,
    /// Batches that the device has accepted.
    pub batches: u64,
    /// Submissions that a full queue refused.
    pub full: u64,
    /// Submissions that were not complete at their deadline.
    pub timed_out: u64,
    /// Slots that went into quarantine: timed out, dropped before they were complete, or with a lost record.
    pub quarantined: u64,
    /// Slots that came back from quarantine.
    pub late: u64,
    /// Entries of the work queue in use now, including those of slots in quarantine.
    pub entries: u32,
}

/// The counters themselves.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) operations: Counter,
    pub(super) batches: Counter,
    pub(super) full: Counter,
    pub(super) timed_out: Counter,
    pub(super) quarantined: Counter,
    pub(super) late: Counter,
}

impl Counters {
    pub(super) fn read(&self, entries: u32) -> Statistics {
        Statistics {
            operations: self.operations.get(),
            batches: self.batches.get(),
            full: self.full.get(),
            timed_out: self.timed_out.get(),
            quarantined: self.quarantined.get(),
            late: self.late.get(),
            entries,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    /// Adds to the counter; returns the new count.
    pub(super) fn add(&self, count: u32) -> u64 {
        let count = u64::from(count);
        self.0
            .fetch_add(count, Ordering::Relaxed)
            .wrapping_add(count)
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
