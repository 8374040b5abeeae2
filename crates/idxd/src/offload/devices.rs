//! The work queues that a process uses, all of one kind of device, in turn.

use std::{
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
    time::Duration,
};

use super::backoff::Backoff;
use crate::{InFlight, Queue, Slot};

/// Work queues, shared by all threads.
#[derive(Debug)]
pub struct Devices {
    members: Box<[Member]>,
    turn: AtomicUsize,
    work: Counters,
}

/// Pages that devices have done, and that the processor has done instead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "kebab-case")
)]
pub struct OffloadCounters {
    /// The devices are a model: the counts do not apply to hardware.
    pub model: bool,
    /// Done by a device.
    pub by_device: u64,
    /// Done by the processor because no work queue accepted them.
    pub refused: u64,
    /// Done by the processor because a device failed, most often at a page that is not mapped.
    pub failed: u64,
    /// Done by the processor because a device was slower or never answered, or was not used because it had been slower
    /// before.
    pub overtaken: u64,
    /// Pages done by a device that the processor did as well, to compare: zero pages alone, which no report counts.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub checked: u64,
}

/// Operations in flight.
#[derive(Debug)]
#[must_use]
pub(super) struct Pending {
    /// Index of the queue.
    pub(super) member: usize,
    pub(super) flight: InFlight,
}

#[derive(Debug)]
struct Member {
    queue: Queue,
    backoff: Backoff,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    by_device: AtomicU64,
    refused: AtomicU64,
    failed: AtomicU64,
    overtaken: AtomicU64,
    checked: AtomicU64,
}

impl Devices {
    /// Uses `queues` in turn.
    pub fn new(queues: impl IntoIterator<Item = Queue>) -> Self {
        let members = queues.into_iter().map(|queue| Member {
            queue,
            backoff: Backoff::default(),
        });
        Self {
            members: members.collect(),
            turn: AtomicUsize::new(0),
            work: Counters::default(),
        }
    }

    /// No devices: the processor does everything.
    pub fn none() -> Self {
        Self::new([])
    }

    /// The queues.
    pub fn queues(&self) -> impl Iterator<Item = &Queue> {
        self.members.iter().map(|member| &member.queue)
    }

    /// Whether there is no queue, or none that still accepts work.
    pub fn are_gone(&self) -> bool {
        self.queues().all(Queue::is_dead)
    }

    /// Pages done so far, by all users of these devices.
    pub fn work(&self) -> OffloadCounters {
        OffloadCounters {
            model: self.queues().any(Queue::is_modelled),
            ..self.work.read()
        }
    }

    /// Submits operations to the next queue that accepts them. `fill` writes the operations to a slot and returns their
    /// number; it may be called again for another slot. Zero operations end the attempt.
    ///
    /// # Safety
    /// That of [`Slot::submit`], for the operations that `fill` has written.
    pub(super) unsafe fn submit(
        &self,
        fill: &mut dyn FnMut(&mut Slot) -> usize,
    ) -> Option<Pending> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let count = self.members.len();
        let mut refusals = 0;
        for member in (0..count).map(|index| turn.wrapping_add(index) % count) {
            if !self.members[member].backoff.is_over() {
                continue;
            }
            let Some(mut slot) = self.slot(member) else {
                continue;
            };
            let count = fill(&mut slot);
            if count == 0 {
                return None;
            }
            // SAFETY: as the caller promises.
            if let Ok(flight) = unsafe { slot.submit(count) } {
                return Some(Pending { member, flight });
            }
            self.record_failure(member);
            refusals += 1;
            if refusals == MOST_REFUSALS {
                return None;
            }
        }
        None
    }

    /// A free slot of this queue, if there is one.
    pub(super) fn slot(&self, member: usize) -> Option<Slot> {
        self.members[member].queue.slot()
    }

    /// The queue's time. Reading it lets a modelled device proceed.
    pub(super) fn now(&self, member: usize) -> Duration {
        self.members[member].queue.now()
    }

    /// The queue has answered in time, which ends its backoff.
    pub(super) fn record_success(&self, member: usize) {
        self.members[member].backoff.record_success();
    }

    /// The queue accepted nothing, or did not answer in time: it is skipped for a while.
    pub(super) fn record_failure(&self, member: usize) {
        self.members[member].backoff.record_failure();
    }

    pub(super) fn counters(&self) -> &Counters {
        &self.work
    }
}

/// Queues that may refuse one submission. Then it is cheaper to do the work.
const MOST_REFUSALS: u32 = 2;

impl Counters {
    pub(super) fn add(&self, done: OffloadCounters) {
        let pairs = [
            (&self.by_device, done.by_device),
            (&self.refused, done.refused),
            (&self.failed, done.failed),
            (&self.overtaken, done.overtaken),
            (&self.checked, done.checked),
        ];
        for (counter, more) in pairs {
            if more > 0 {
                counter.fetch_add(more, Ordering::Relaxed);
            }
        }
    }

    fn read(&self) -> OffloadCounters {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        OffloadCounters {
            by_device: read(&self.by_device),
            refused: read(&self.refused),
            failed: read(&self.failed),
            overtaken: read(&self.overtaken),
            checked: read(&self.checked),
            model: false,
        }
    }
}

impl OffloadCounters {
    /// Difference to an earlier count.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            model: self.model,
            by_device: self.by_device - before.by_device,
            refused: self.refused - before.refused,
            failed: self.failed - before.failed,
            overtaken: self.overtaken - before.overtaken,
            checked: self.checked - before.checked,
        }
    }
}
