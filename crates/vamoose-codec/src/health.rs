//! Counters of a migration's hardware engines, and when the engines are switched off.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Counts the packets that the devices of one migration processed, over all its channels, and decides when the devices are
/// switched off.
#[derive(Debug, Default)]
pub struct Health {
    accelerated: AtomicU64,
    fallbacks: AtomicU64,
    checked: AtomicU64,
    unchecked: AtomicU64,
    wrong: AtomicU64,
    failures_in_a_row: AtomicU32,
    off: AtomicBool,
}

/// The counters of a [`Health`] at one moment. All count packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Processed by a device, and not found wrong.
    pub accelerated: u64,
    /// Processed in software although there is a device.
    pub fallbacks: u64,
    /// Processed by a device and checked.
    pub checked: u64,
    /// Found wrong by a check.
    pub wrong: u64,
}

impl Health {
    /// Reads all counters.
    pub fn tally(&self) -> Tally {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Tally {
            accelerated: read(&self.accelerated),
            fallbacks: read(&self.fallbacks),
            checked: read(&self.checked),
            wrong: read(&self.wrong),
        }
    }

    pub(crate) fn is_off(&self) -> bool {
        self.off.load(Ordering::Relaxed)
    }

    pub(crate) fn add_fallback(&self) {
        self.fallbacks.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn add_accelerated(&self, checked: bool) {
        self.accelerated.fetch_add(1, Ordering::Relaxed);
        let counter = if checked {
            &self.checked
        } else {
            &self.unchecked
        };
        counter.fetch_add(1, Ordering::Relaxed);
        // Written rarely, so that channels do not contend for the cache line.
        if self.failures_in_a_row.load(Ordering::Relaxed) > 0 {
            self.failures_in_a_row.store(0, Ordering::Relaxed);
        }
    }

    /// Counts a failure; true if this failure switches the devices off.
    pub(crate) fn add_failure(&self, weight: u32) -> bool {
        let before = self.failures_in_a_row.fetch_add(weight, Ordering::Relaxed);
        before.saturating_add(weight) >= MOST_FAILURES && !self.off.swap(true, Ordering::Relaxed)
    }

    /// Switches the devices off because of wrong bytes; returns the number of packets that were sent unchecked before.
    pub(crate) fn add_wrong(&self) -> u64 {
        self.wrong.fetch_add(1, Ordering::Relaxed);
        self.off.store(true, Ordering::Relaxed);
        self.unchecked.load(Ordering::Relaxed)
    }
}

/// Weight of consecutive failures at which devices are switched off for the rest of the migration: each one costs time.
const MOST_FAILURES: u32 = 16;
