//! The states of a slot: being filled in, in flight, complete.

use std::{ops::Range, sync::Arc, time::Duration};

use super::{
    Inner, Quarantined, SubmitError, Unanswered,
    flight::{Flight, RECORD},
};
use crate::{Descriptor, Limits, Record, RecordImage, Refusal, Submitted, opcode};

/// A list of descriptors, their records and a buffer, to be filled in. Dropping it frees the slot.
#[derive(Debug)]
pub struct Slot {
    lease: Lease,
}

impl Slot {
    /// `slot` of `queue` with `entries` credits, which the caller has taken.
    pub(super) fn new(queue: Arc<Inner>, slot: u32, entries: u32) -> Self {
        let lease = Lease {
            capacity: queue.capacity(entries),
            queue,
            slot,
            entries,
            flight: Flight::default(),
        };
        Self { lease }
    }

    /// Most operations that can be submitted with this slot: the shape's, or fewer if each needs an entry of its own.
    pub fn capacity(&self) -> usize {
        self.lease.capacity as usize
    }

    /// Limits of the work queue.
    pub fn limits(&self) -> &Limits {
        self.lease.queue.device.limits()
    }

    /// The list, with the contents that the slot's previous user left. Addresses and flags of records are set at submission.
    /// Empty in a forked child.
    pub fn descriptors_mut(&mut self) -> &mut [Descriptor] {
        let capacity = self.capacity();
        // SAFETY: the slot is this one's alone, mutably borrowed, and not submitted.
        let list = unsafe { self.lease.queue.arena.list(self.lease.slot) };
        let capacity = capacity.min(list.len());
        &mut list[..capacity]
    }

    /// Address of the record of operation `index`; `None` beyond the shape's operations and in a forked child.
    pub fn record_address(&self, index: usize) -> Option<u64> {
        let records = self.lease.queue.arena.member_records(self.lease.slot);
        records.get(index).map(Record::address)
    }

    /// The buffer, with the contents that the slot's previous user left. Empty in a forked child.
    pub fn buffer_mut(&mut self) -> &mut [u8] {
        let mut buffer = self.lease.queue.arena.buffer(self.lease.slot);
        // SAFETY: mapped as long as the arena, and initialised by the kernel; the slot is this one's alone,
        // mutably borrowed, and not submitted.
        unsafe { buffer.as_mut() }
    }

    /// Address of the buffer, for descriptors.
    pub fn buffer_address(&self) -> u64 {
        self.lease
            .queue
            .arena
            .buffer(self.lease.slot)
            .cast::<u8>()
            .as_ptr()
            .expose_provenance() as u64
    }

    /// Submits the first `count` descriptors. If the work queue accepts only a part, that part is in flight, and the other
    /// operations have no record in the end, as if the device had abandoned them. If it accepts nothing, the slot comes
    /// back.
    ///
    /// # Safety
    /// The descriptors write to this slot's buffer, or to writable memory of this process to which no one has a reference
    /// until the [`Outcome`] exists or the queue is closed; a passed deadline is not enough. They may read any address.
    pub unsafe fn submit(mut self, count: usize) -> Result<InFlight, (Self, SubmitError)> {
        // SAFETY: as the caller promises.
        match unsafe { self.lease.submit(count) } {
            Ok(()) => Ok(InFlight { lease: self.lease }),
            Err(reason) => Err((self, reason)),
        }
    }
}

/// A submission in flight. Dropping it does not wait: the slot then goes into quarantine.
#[derive(Debug)]
#[must_use = "a dropped submission in flight keeps its slot in quarantine"]
pub struct InFlight {
    lease: Lease,
}

impl InFlight {
    /// Whether the outcome is there, by the records alone.
    pub fn is_done(&self) -> bool {
        let mut flight = self.lease.flight;
        matches!(
            flight.look(&self.lease.queue.arena, self.lease.slot),
            Ok(None)
        )
    }

    /// Status and result (error code, for IAA) of every submitted operation in their order; zeros for an incomplete one.
    /// Each record is read when the iterator gets to it. Output of the device must not be read before the outcome exists.
    /// Empty in a forked child.
    pub fn statuses(&self) -> impl DoubleEndedIterator<Item = (u8, u8)> + ExactSizeIterator {
        let lease = &self.lease;
        let records = lease.queue.arena.member_records(lease.slot);
        let submitted = lease.flight.members as usize;
        let records = records.get(..submitted).unwrap_or_default();
        records.iter().map(Record::status_and_result)
    }

    /// Waits until `deadline`, by [`Queue::now`](crate::Queue::now). Returns whether the outcome is there.
    pub fn wait_a_little(&mut self, deadline: Duration) -> bool {
        self.lease.wait(deadline).is_ok()
    }

    /// The outcome, if it is there.
    pub fn poll(mut self) -> Result<Outcome, Self> {
        match self.lease.look() {
            Ok(None) => Ok(Outcome { lease: self.lease }),
            _ => Err(self),
        }
    }

    /// Waits for the outcome until `deadline`, by [`Queue::now`](crate::Queue::now).
    ///
    /// Without one, the slot is in quarantine, and the device may still write to wherever the descriptors point.
    pub fn wait(mut self, deadline: Duration) -> Result<Outcome, Unanswered> {
        self.lease.wait_or_count(deadline)?;
        Ok(Outcome { lease: self.lease })
    }
}

/// The device's answers to a submission. Dropping it frees the slot.
#[derive(Debug)]
pub struct Outcome {
    lease: Lease,
}

impl Outcome {
    /// Number of operations that the caller wanted to submit.
    pub fn count(&self) -> usize {
        self.lease.flight.asked as usize
    }

    /// Whether every operation has status 0x01, so that only the results have to be examined.
    pub fn all_succeeded(&self) -> bool {
        let flight = &self.lease.flight;
        !flight.flawed && flight.members == flight.asked
    }

    /// Status and result (error code, for IAA) of operation `index`; zeros if it has no record.
    pub fn status_and_result(&self, index: usize) -> (u8, u8) {
        self.records()
            .get(index)
            .map_or((0, 0), Record::status_and_result)
    }

    /// The record of operation `index`. `None` if there is none: the operation was not submitted, or abandoned, or its record
    /// is lost. Then the processor has to do it, although the device may have done it.
    pub fn image(&self, index: usize) -> Option<RecordImage> {
        self.records().get(index)?.image()
    }

    /// Bytes of the slot's buffer. `None` beyond its end, in a forked child, and when a record is lost: then the
    /// device may not be done with the buffer.
    pub fn buffer(&self, range: Range<usize>) -> Option<&[u8]> {
        if self.lease.flight.lost {
            return None;
        }
        let buffer = self.lease.queue.arena.buffer(self.lease.slot);
        // SAFETY: mapped as long as the arena, and initialised by the kernel. The slot is this one's alone; every
        // operation that the device began is complete.
        unsafe { buffer.as_ref() }.get(range)
    }

    fn records(&self) -> &[Record] {
        let records = self.lease.queue.arena.member_records(self.lease.slot);
        records.get(..self.count()).unwrap_or_default()
    }
}

/// A slot and its entries while they are in use.
#[derive(Debug)]
struct Lease {
    queue: Arc<Inner>,
    slot: u32,
    entries: u32,
    /// Most operations that can be submitted. It does not change when the queue stops using batches.
    capacity: u32,
    /// The submitted operations; by default none.
    flight: Flight,
}

impl Lease {
    /// # Safety
    /// That of [`Slot::submit`].
    unsafe fn submit(&mut self, count: usize) -> Result<(), SubmitError> {
        let queue = &*self.queue;
        if queue.is_dead() {
            return Err(SubmitError::Dead);
        }
        let most = self.capacity;
        let Some(count) = u32::try_from(count)
            .ok()
            .filter(|count| (1..=most).contains(count))
        else {
            return Err(SubmitError::Count {
                most: most as usize,
            });
        };
        // SAFETY: the slot is this lease's alone, mutably borrowed, and not submitted.
        let list = unsafe { queue.arena.list(self.slot) };
        let records = queue.arena.member_records(self.slot);
        for (descriptor, record) in list.iter_mut().zip(records).take(count as usize) {
            descriptor.record = record.address();
            descriptor.control |= RECORD.0;
            record.clear();
        }
        let list = &*list;
        loop {
            let batch = queue.batch();
            let missing = count.div_ceil(batch).saturating_sub(self.entries);
            if missing > 0 {
                self.entries += queue.credits.take(missing);
            }
            let mut flight = Flight::new(count, batch, self.entries);
            let descriptors = flight.prepare(&queue.arena, self.slot, list);
            self.flight = flight;
            // SAFETY: records, lists and the slot's buffer are in the arena, which is mapped until the queue has
            // been closed; a slot is not used again before its records are complete. For what is outside of the
            // arena the caller promises it.
            let Submitted { accepted, refusal } = unsafe { queue.device.submit(descriptors) };
            let refused = descriptors.get(accepted).map(Descriptor::opcode);
            let refused_batch =
                matches!(refusal, Some(Refusal::Invalid)) && refused == Some(opcode::BATCH);
            if refused_batch {
                queue.go_one_by_one();
            }
            if matches!(
                refusal,
                Some(Refusal::Forked | Refusal::Closed | Refusal::System(_))
            ) {
                queue.give_up();
            }
            // At most as many as there are descriptors, which are no more than the entries.
            let accepted =
                u32::try_from(accepted).map_or(flight.entries, |it| it.min(flight.entries));
            if accepted > 0 {
                flight.keep(accepted);
                queue.counters.operations.add(flight.members);
                queue.counters.batches.add(flight.batches());
                queue.credits.give_back(self.entries - accepted);
                self.entries = accepted;
                self.flight = flight;
                return Ok(());
            }
            self.flight = Flight::default();
            match refusal {
                // Once: now they go one by one.
                Some(Refusal::Invalid) if refused_batch => {}
                Some(Refusal::Full) | None => {
                    queue.counters.full.add(1);
                    return Err(SubmitError::Full);
                }
                Some(refusal) => return Err(SubmitError::Refused(refusal)),
            }
        }
    }

    /// A record that is still missing, or `None` if the outcome is there.
    fn look(&mut self) -> Result<Option<&Record>, Unanswered> {
        self.flight.look(&self.queue.arena, self.slot)
    }

    /// Waits for the outcome. A passed deadline counts as a timeout of the queue.
    fn wait_or_count(&mut self, deadline: Duration) -> Result<(), Unanswered> {
        let result = self.wait(deadline);
        if result == Err(Unanswered::TimedOut) {
            self.queue.count_timeout();
        }
        result
    }

    fn wait(&mut self, deadline: Duration) -> Result<(), Unanswered> {
        let queue = &*self.queue;
        let mut over = false;
        loop {
            let drained = queue.is_drained();
            let Some(record) = self.flight.look(&queue.arena, self.slot)? else {
                return Ok(());
            };
            if drained {
                return Err(Unanswered::Closed);
            }
            if over {
                return Err(Unanswered::TimedOut);
            }
            // Checks the record once more after the deadline, because this thread may have been delayed.
            over = queue.device.now() >= deadline;
            if !over {
                queue.device.pause(record, deadline);
            }
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let queue = &*self.queue;
        match self.flight.look(&queue.arena, self.slot) {
            Ok(None) if !self.flight.lost => queue.put_back(self.slot, self.entries),
            Ok(_) => queue.put_in_quarantine(Quarantined {
                slot: self.slot,
                entries: self.entries,
                flight: self.flight,
            }),
            // The slot is the parent's.
            Err(_) => {}
        }
    }
}
