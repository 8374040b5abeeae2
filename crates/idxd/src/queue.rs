//! Drives one work queue: credits, deadlines, and quarantine of memory that a device may still write to.
//!
//! ```text
//!                 ┌──────────────────────────── dropped ───────────────────────────┐
//!                 │                                                                ▼
//!   Queue::slot ─▶ Slot ── submit ──▶ InFlight ── wait, poll ──▶ Outcome ──────▶ free
//!                 ▲  │ (fill it in)      │                          │ (read it)     ▲
//!                 └──┘                   │ late, dropped            │ record lost   │ complete after all
//!               not taken                └───────────▶ quarantine ◀─┘───────────────┘
//! ```
//! A [`Slot`] is a list of descriptors, their records and a buffer, in memory that the device may write to at any time. A
//! single descriptor is submitted as it is, several as a batch, and without batches (IAA; write(2) to the first DSA) one by
//! one in one call. Nothing allocates once the queue is open.
//!
//! **Credits.** A full queue rejects a descriptor, which costs bus time of all users, and the process that submits most often
//! gets most. So the entries in use are counted. A slot holds its entries until it is complete.
//!
//! **Full queues.** A submission is tried once, since a disabled queue also reports that it is full. The caller tries
//! another queue, or the processor does the work.
//!
//! **Deadlines.** An operation of a disabled device, or one whose record could not be written, never completes. The
//! waiting thread gives up at a deadline, but the device may still write to the slot. Such a slot is in quarantine
//! until its records are complete after all, or the queue is closed. After a few timeouts the queue is dead: it hands
//! out no slots any more and does not recover. The owner may open another one.
//!
//! **Forks.** A forked child has neither the portal nor this memory. In the child the queue is dead, slots are empty, and
//! nothing completes.

mod credits;
mod flight;
mod freelist;
mod slot;
mod statistics;

use std::{
    num::NonZeroU32,
    sync::{
        Arc, Mutex, MutexGuard, Once, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use thiserror::Error;

use self::{credits::Credits, flight::Flight, freelist::FreeList, statistics::Counters};
use crate::{
    Limits, Refusal, Submit,
    arena::{Arena, Layout},
    opcode,
};

pub use self::{
    slot::{InFlight, Outcome, Slot},
    statistics::Statistics,
};

/// A work queue and the memory for its submissions. Clones refer to the same queue.
///
/// The queue is closed, and then its memory unmapped, when the last clone, slot, submission and outcome is dropped.
#[derive(Clone, Debug)]
pub struct Queue {
    inner: Arc<Inner>,
}

/// Size of each slot of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Most operations of one submission.
    pub members: u32,
    /// Bytes of the page-aligned buffer; zero for none.
    pub buffer_bytes: usize,
}

/// How a queue is driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuning {
    /// Most slots. There are never more than the work queue has entries.
    pub slots: u32,
    /// Submissions past their deadline after which the queue is dead.
    pub most_timed_out: u32,
}

impl Default for Tuning {
    /// Eight slots; dead at the third timeout.
    fn default() -> Self {
        Self {
            slots: 8,
            most_timed_out: 3,
        }
    }
}

/// Why a queue cannot be driven.
#[derive(Debug, Error)]
pub enum OpenQueueError {
    /// The shape or the tuning contains a zero.
    #[error("a queue needs at least one slot with at least one operation")]
    Nothing,
    /// The work queue is not configured.
    #[error("the work queue has no entries: it needs a size and a threshold")]
    NoEntries,
    /// The memory cannot be mapped.
    #[error("no memory for the slots of a work queue")]
    Memory(#[source] rustix::io::Errno),
}

/// Why nothing of a submission was accepted.
#[derive(Debug, Error)]
pub enum SubmitError {
    /// The work queue is full. The processor does the work.
    #[error("the work queue is full")]
    Full,
    /// The queue is dead ([`Queue::is_dead`]).
    #[error("the work queue is not used any more")]
    Dead,
    /// The number of operations is zero or more than the slot's capacity.
    #[error("a submission has 1 to {most} operations")]
    Count {
        /// The slot's capacity.
        most: usize,
    },
    /// The work queue refused it for another reason.
    #[error(transparent)]
    Refused(Refusal),
}

/// Why there is no outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Unanswered {
    /// The deadline has passed. The device may still execute the operation until the queue is closed.
    #[error("the device has not answered in time")]
    TimedOut,
    /// The queue has been closed, and the device will not answer any more.
    #[error("the work queue was closed before the device answered")]
    Closed,
    /// The parent of this forked process submitted it.
    #[error("the process that this one was forked from submitted it")]
    Forked,
}

impl Queue {
    /// Drives `device`. Nothing else may submit to it, or the credits are wrong.
    pub fn new(
        device: Arc<dyn Submit>,
        shape: Shape,
        tuning: Tuning,
    ) -> Result<Self, OpenQueueError> {
        let limits = device.limits();
        let entries = limits.threshold.min(limits.size);
        let slots = tuning.slots.min(entries);
        if entries == 0 {
            return Err(OpenQueueError::NoEntries);
        }
        if slots == 0 || shape.members == 0 {
            return Err(OpenQueueError::Nothing);
        }
        let most_batch = most_batch(limits);
        let layout = Layout {
            heads: most_batch.map_or(0, |most| shape.members.div_ceil(most)),
            members: shape.members,
            buffer: shape.buffer_bytes,
        };
        let arena = Arena::new(slots, layout).map_err(OpenQueueError::Memory)?;
        let inner = Arc::new(Inner {
            credits: Credits::new(entries),
            free: FreeList::full(slots),
            batch: AtomicU32::new(most_batch.unwrap_or(1)),
            quarantine: Mutex::new(Vec::with_capacity(slots as usize)),
            in_quarantine: AtomicU32::new(0),
            counters: Counters::default(),
            dead: AtomicBool::new(false),
            closing: Once::new(),
            drained: AtomicBool::new(false),
            tuning,
            device,
            arena,
        });
        Ok(Self { inner })
    }

    /// A slot to fill in and submit; `None` without a free slot or credit, or if the queue is dead. Then the processor does
    /// the work, or waits for a submission in flight.
    pub fn slot(&self) -> Option<Slot> {
        let inner = &self.inner;
        if inner.is_dead() {
            return None;
        }
        inner.reap();
        let entries = inner.credits.take(inner.most_entries());
        if entries == 0 {
            return None;
        }
        let Some(slot) = inner.free.pop() else {
            inner.credits.give_back(entries);
            return None;
        };
        Some(Slot::new(inner.clone(), slot, entries))
    }

    /// Whether the queue is permanently out of use: after too many timeouts, an error of the system, closed, or in a forked
    /// child.
    pub fn is_dead(&self) -> bool {
        self.inner.is_dead()
    }

    /// Closes the work queue, and waits until no submitted descriptor can access memory any more. Submissions in flight may
    /// have no outcome. Does nothing in a forked child.
    pub fn close(&self) {
        self.inner.close();
    }

    /// Limits of the work queue.
    pub fn limits(&self) -> &Limits {
        self.inner.device.limits()
    }

    /// Whether the device is a model.
    pub fn is_modelled(&self) -> bool {
        self.inner.device.is_modelled()
    }

    /// The clock of deadlines.
    pub fn now(&self) -> Duration {
        self.inner.device.now()
    }

    /// Counters.
    pub fn statistics(&self) -> Statistics {
        self.inner.counters.read(self.inner.credits.used())
    }
}

/// State that all clones, slots and submissions share.
#[derive(Debug)]
struct Inner {
    credits: Credits,
    free: FreeList,
    /// Most members of a batch; 1 if operations are submitted one by one.
    batch: AtomicU32,
    quarantine: Mutex<Vec<Quarantined>>,
    in_quarantine: AtomicU32,
    counters: Counters,
    dead: AtomicBool,
    closing: Once,
    /// No submitted descriptor can access memory any more.
    drained: AtomicBool,
    tuning: Tuning,
    device: Arc<dyn Submit>,
    arena: Arena,
}

impl Inner {
    fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Relaxed) || !self.arena.is_here()
    }

    fn give_up(&self) {
        self.dead.store(true, Ordering::Relaxed);
    }

    /// Counts a submission past its deadline. After several the queue is dead.
    fn count_timeout(&self) {
        if self.counters.timed_out.add(1) >= u64::from(self.tuning.most_timed_out) {
            self.give_up();
        }
    }

    fn batch(&self) -> u32 {
        self.batch.load(Ordering::Relaxed)
    }

    fn go_one_by_one(&self) {
        self.batch.store(1, Ordering::Relaxed);
    }

    fn is_drained(&self) -> bool {
        self.drained.load(Ordering::Acquire)
    }

    /// Capacity of a slot with `entries` entries.
    fn capacity(&self, entries: u32) -> u32 {
        entries
            .saturating_mul(self.batch())
            .min(self.arena.layout().members)
    }

    /// Entries that a full slot needs. If each operation needs an entry, a slot gets at most half of all entries, so that
    /// another slot can be filled in while the device works.
    fn most_entries(&self) -> u32 {
        let members = self.arena.layout().members;
        match self.batch() {
            1 => members.min((self.credits.limit() / 2).max(1)),
            batch => members.div_ceil(batch),
        }
    }

    fn close(&self) {
        if !self.arena.is_here() {
            return;
        }
        self.give_up();
        self.closing.call_once(|| self.device.close());
        self.drained.store(true, Ordering::Release);
    }

    fn put_back(&self, slot: u32, entries: u32) {
        self.free.push(slot);
        self.credits.give_back(entries);
    }

    fn put_in_quarantine(&self, slot: Quarantined) {
        self.counters.quarantined.add(1);
        let mut quarantine = self.quarantine();
        quarantine.push(slot);
        self.in_quarantine.fetch_add(1, Ordering::Relaxed);
    }

    /// Releases slots in quarantine that are complete after all.
    fn reap(&self) {
        if self.in_quarantine.load(Ordering::Relaxed) == 0 {
            return;
        }
        self.quarantine().retain(|slot| {
            let mut flight = slot.flight.afresh();
            let complete = matches!(flight.look(&self.arena, slot.slot), Ok(None)) && !flight.lost;
            if complete {
                self.counters.late.add(1);
                self.in_quarantine.fetch_sub(1, Ordering::Relaxed);
                self.put_back(slot.slot, slot.entries);
            }
            !complete
        });
    }

    fn quarantine(&self) -> MutexGuard<'_, Vec<Quarantined>> {
        self.quarantine
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Inner {
    /// Before the arena is dropped.
    fn drop(&mut self) {
        self.close();
    }
}

/// A slot that the device may still write to.
#[derive(Debug)]
struct Quarantined {
    slot: u32,
    entries: u32,
    flight: Flight,
}

/// Most members of a batch; `None` without batches.
fn most_batch(limits: &Limits) -> Option<u32> {
    limits
        .max_batch
        .map(NonZeroU32::get)
        .filter(|most| *most > 1 && limits.operations.has(opcode::BATCH))
}
