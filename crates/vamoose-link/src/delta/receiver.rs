//! The receiver's cache.

use std::{
    sync::{
        Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use multifd::Layout;
use thiserror::Error;
use vamoose_codec::delta::{Mark, Touch};

use super::slots;
use crate::{Stream, lock};

/// The pages that one end of a session has received and keeps, shared by all channels of a migration.
pub struct DeltaReceiver {
    page_size: usize,
    limit: usize,
    /// After this long without any packet, a wait for a version fails.
    patience: Duration,
    slots: OnceLock<Box<[Mutex<Slot>]>>,
    /// Packets of any kind that have arrived, on all channels.
    arrived: AtomicU64,
    has_given_up: Mutex<bool>,
    changed: Condvar,
}

#[derive(Default)]
struct Slot {
    version: u32,
    /// Empty until the first touch.
    content: Box<[u8]>,
}

/// Time since the last packet, as observed by one wait.
struct Silence {
    arrived: u64,
    since: Instant,
}

/// A packet with differences that cannot be restored.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum DeltaError {
    #[error("the peer sends differences to versions that this end does not keep")]
    Unexpected,
    #[error("the peer sends differences without a checksum of the pages")]
    Unchecked,
    #[error("the peer names slot {slot}, and there are {limit}")]
    Slot { slot: u32, limit: usize },
    #[error("the peer uses version {version} of slot {slot}, which has version {found}")]
    Passed { slot: u32, version: u32, found: u32 },
    #[error("the peer uses the version in slot {slot}, which is empty")]
    Empty { slot: u32 },
    #[error("version {version} of slot {slot} has not arrived, and no packet for {seconds} s")]
    Missing {
        slot: u32,
        version: u32,
        seconds: u64,
    },
    #[error("the migration has ended")]
    Ended,
}

impl DeltaReceiver {
    /// A cache of `bytes`. A packet waits for versions from other channels while packets arrive at least once within
    /// `patience`.
    pub fn new(bytes: usize, layout: Layout, patience: Duration) -> Self {
        Self {
            page_size: layout.page_size(),
            limit: slots(bytes, layout),
            patience,
            slots: OnceLock::new(),
            arrived: AtomicU64::new(0),
            has_given_up: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// The cache for the session of `stream`; `None` without a session.
    pub fn of(stream: &Stream, layout: Layout) -> Option<Self> {
        let session = stream.session()?;
        let config = session.config();
        // A lost connection may take that long to be restored.
        let patience = stream.stall_timeout() + config.reconnect_timeout;
        // The sender decides whether packets have checksums.
        Some(Self::new(session.kept_pages(), layout, patience))
    }

    /// Ends all waits: no more packets will arrive.
    pub fn give_up(&self) {
        *self.has_given_up() = true;
        self.changed.notify_all();
    }

    /// A packet has arrived, with touches or without: the expected one may be behind it.
    pub(crate) fn note_arrival(&self) {
        self.arrived.fetch_add(1, Ordering::Relaxed);
    }

    /// Appends the versions that a packet's pages are encoded after to `earlier`, once the touches before have been carried out.
    pub(crate) fn versions(&self, marks: &[Mark], earlier: &mut Vec<u8>) -> Result<(), DeltaError> {
        for mark in marks {
            match *mark {
                Mark::Plain => {}
                Mark::InPlace => return Err(DeltaError::Unexpected),
                Mark::Store(touch) => self.wait_for(touch)?,
                Mark::Difference(touch) => {
                    self.wait_for(touch)?;
                    let slot = lock(self.slot(touch)?);
                    if slot.content.is_empty() {
                        return Err(DeltaError::Empty { slot: touch.slot });
                    }
                    earlier.extend_from_slice(&slot.content);
                }
            }
        }
        Ok(())
    }

    /// Carries out the touches of a packet whose checksum is right.
    pub(crate) fn keep(&self, marks: &[Mark], pages: &[u8]) -> Result<(), DeltaError> {
        for (mark, page) in marks.iter().zip(pages.chunks_exact(self.page_size)) {
            let (Mark::Store(touch) | Mark::Difference(touch)) = *mark else {
                continue;
            };
            let mut slot = lock(self.slot(touch)?);
            // Another packet had the same touch, or this one has it twice.
            if slot.version != touch.version {
                return Err(passed(touch, &slot));
            }
            match slot.content.is_empty() {
                true => slot.content = page.into(),
                false => slot.content.copy_from_slice(page),
            }
            slot.version = touch.version.wrapping_add(1);
        }
        // With the lock, so that a waiting reader has either not checked yet or is woken.
        drop(self.has_given_up());
        self.changed.notify_all();
        Ok(())
    }

    fn wait_for(&self, touch: Touch) -> Result<(), DeltaError> {
        if self.is_there(touch)? {
            return Ok(());
        }
        let mut has_given_up = self.has_given_up();
        let mut silence = Silence::new(self.arrived(), Instant::now());
        loop {
            if *has_given_up {
                return Err(DeltaError::Ended);
            }
            // With the lock: `keep` takes it after changing a slot, and wakes this thread.
            if self.is_there(touch)? {
                return Ok(());
            }
            let left = silence.left(self.patience, self.arrived(), Instant::now());
            if left.is_zero() {
                return Err(DeltaError::Missing {
                    slot: touch.slot,
                    version: touch.version,
                    seconds: self.patience.as_secs(),
                });
            }
            let waited = self.changed.wait_timeout(has_given_up, left);
            has_given_up = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Whether the slot has the version; an error if the version has passed.
    fn is_there(&self, touch: Touch) -> Result<bool, DeltaError> {
        let slot = lock(self.slot(touch)?);
        match touch.version.wrapping_sub(slot.version) {
            0 => Ok(true),
            // Versions wrap around; no packet is that many touches ahead.
            ahead if ahead < u32::MAX / 2 => Ok(false),
            _ => Err(passed(touch, &slot)),
        }
    }

    fn slot(&self, touch: Touch) -> Result<&Mutex<Slot>, DeltaError> {
        let (slot, limit) = (touch.slot, self.limit);
        let index = usize::try_from(slot).unwrap_or(usize::MAX);
        if index >= limit {
            return Err(DeltaError::Slot { slot, limit });
        }
        let slots = self
            .slots
            .get_or_init(|| (0..limit).map(|_| Mutex::default()).collect());
        Ok(&slots[index])
    }

    fn has_given_up(&self) -> MutexGuard<'_, bool> {
        lock(&self.has_given_up)
    }

    pub(crate) fn arrived(&self) -> u64 {
        self.arrived.load(Ordering::Relaxed)
    }
}

impl Silence {
    fn new(arrived: u64, since: Instant) -> Self {
        Self { arrived, since }
    }

    /// What remains of `patience`: all of it if packets have arrived meanwhile.
    fn left(&mut self, patience: Duration, arrived: u64, now: Instant) -> Duration {
        if arrived != self.arrived {
            *self = Self::new(arrived, now);
        }
        patience.saturating_sub(now - self.since)
    }
}

fn passed(touch: Touch, slot: &Slot) -> DeltaError {
    DeltaError::Passed {
        slot: touch.slot,
        version: touch.version,
        found: slot.version,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl DeltaReceiver {
        /// Version and content of the first `count` slots.
        pub(in crate::delta) fn all(&self, count: usize) -> Vec<(u32, Vec<u8>)> {
            let slots = self.slots.get().map_or(&[][..], |slots| &slots[..count]);
            let slots = slots.iter().map(|slot| {
                let slot = lock(slot);
                (slot.version, slot.content.to_vec())
            });
            slots.collect()
        }
    }

    #[test]
    fn patience_restarts_with_every_packet() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut silence = Silence::new(3, start);
        let mut left = |arrived, seconds| {
            let left = silence.left(Duration::from_secs(60), arrived, at(seconds));
            left.as_secs()
        };
        assert_eq!(left(3, 20), 40);
        assert_eq!(left(4, 50), 60);
        assert_eq!(left(4, 100), 10);
        assert_eq!(left(9, 200), 60);
        assert_eq!(left(9, 300), 0);
    }
}
