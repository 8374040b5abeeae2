//! Batches: a list in memory whose members are read one by one as engines become free, and a record when all are done.

use super::{Machine, Unit, workshop::read_descriptor};
use crate::{dsa::Outcome, faults::InjectedFault, memory::View, validate::status};
use idxd::{Descriptor, Flags};

/// Batches that an engine has in progress at most: several (DSA 3.0, 4.4), but how many is assumed.
const BATCHES_PER_ENGINE: usize = 4;

/// Bit of GENCAP.
const BATCH_CONTINUATION: u32 = 15;

/// A batch whose members are read, run or awaited.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) parent: Unit,
    pub(super) group: usize,
    /// Its device reports in the result that a member failed (GENCAP bit 15; DSA 3.0, 8.3.2).
    has_result: bool,
    next: u32,
    pub(super) running: u32,
    pub(super) failed: bool,
    /// A member's record was lost.
    pub(super) lost: bool,
    /// The next member, which waits for those before it.
    fenced: Option<Descriptor>,
    /// No further members, for this reason.
    stopped: Option<Outcome>,
    /// The parent's record has been written.
    pub(super) reported: bool,
}

impl Machine {
    pub(super) fn open_batch(&mut self, parent: Unit, group: usize) {
        let batch = Batch {
            group,
            has_result: self.devices[parent.device].queues[parent.queue]
                .limits
                .capabilities
                .has(BATCH_CONTINUATION),
            next: 0,
            running: 0,
            failed: false,
            lost: false,
            fenced: None,
            stopped: None,
            reported: false,
            parent,
        };
        self.batches.insert(batch.parent.sequence, batch);
    }

    /// Reads the next member of a batch from its list, with the time when it has been read; `None` if that ends the
    /// batch, or if it has to wait.
    pub(super) fn next_member(&mut self, id: u64) -> Option<(Unit, u64)> {
        let (workshop, sequence, now) = (self.workshop(), self.next_sequence(), self.clock);
        let batch = self.batches.get_mut(&id)?;
        let queue = &self.devices[batch.parent.device].queues[batch.parent.queue];
        let (index, mut then) = (batch.next, now);
        let descriptor = match batch.fenced.take() {
            Some(fenced) => fenced,
            None => {
                let at = batch
                    .parent
                    .descriptor
                    .address_1
                    .wrapping_add(u64::from(index) * 64);
                let injected = match batch.parent.fault {
                    Some(InjectedFault::ListFault(member)) if member == index => Some((at, false)),
                    _ => None,
                };
                let mut view = View {
                    injected,
                    ..workshop.view(now, queue.requests_pages)
                };
                let read = read_descriptor(&mut view, at);
                then = now.saturating_add(view.stalled);
                match read {
                    Ok(descriptor) => descriptor,
                    Err(fault) => {
                        batch.stopped = Some(Outcome {
                            completed: Some(index),
                            fault: Some(fault.address),
                            ..Outcome::status(status::BATCH_LIST_FAULT)
                        });
                        self.check_batch(id);
                        return None;
                    }
                }
            }
        };
        if descriptor.flags().has(Flags::FENCE) {
            if batch.running > 0 {
                batch.fenced = Some(descriptor);
                return None;
            }
            if batch.failed {
                batch.stopped = Some(Outcome {
                    completed: Some(index),
                    ..Outcome::status(status::BATCH_FAILED)
                });
                self.check_batch(id);
                return None;
            }
        }
        batch.next += 1;
        batch.running += 1;
        let Unit {
            client,
            device,
            queue,
            ..
        } = batch.parent;
        let unit = Unit {
            sequence,
            client,
            device,
            queue,
            descriptor,
            member: Some((id, index)),
            fault: None,
        };
        Some((unit, then))
    }

    /// Whether a group can begin another batch.
    pub(super) fn takes_batch(&self, device: usize, group: usize) -> bool {
        let engines = self.devices[device]
            .engines
            .iter()
            .filter(|engine| engine.group == group)
            .count();
        let open = self.batches.values().filter(|batch| {
            batch.parent.device == device && batch.group == group && batch.is_open()
        });
        open.count() < engines * BATCHES_PER_ENGINE
    }

    /// Completes a batch of which everything is done.
    pub(super) fn check_batch(&mut self, id: u64) {
        if !self.batches.get(&id).is_some_and(Batch::is_over) {
            return;
        }
        let Some(batch) = self.batches.remove(&id) else {
            return;
        };
        let image = batch.outcome().image();
        if batch.reported {
            self.statistics.completed += 1;
            self.account(&batch.parent, image.status(), false);
        } else {
            self.conclude(batch.parent, image);
        }
    }
}

impl Batch {
    fn count(&self) -> u32 {
        self.parent.descriptor.size
    }

    /// Whether members are left.
    pub(super) fn is_open(&self) -> bool {
        self.stopped.is_none() && self.next < self.count()
    }

    /// Whether an engine can take a member.
    pub(super) fn has_next(&self) -> bool {
        self.is_open() && !(self.fenced.is_some() && self.running > 0)
    }

    fn is_over(&self) -> bool {
        self.running == 0 && !self.is_open()
    }

    /// Whether the member that is being completed is the last one, and the parent's record is to come before.
    pub(super) fn is_last_and_told_first(&self) -> bool {
        self.parent.fault == Some(InjectedFault::BatchFirst)
            && !self.reported
            && self.running == 1
            && !self.is_open()
    }

    pub(super) fn outcome(&self) -> Outcome {
        let code = if self.failed {
            status::BATCH_FAILED
        } else {
            status::SUCCESS
        };
        let done = Outcome {
            completed: Some(self.count()),
            ..Outcome::status(code)
        };
        // Where the device has none, there is what the kernel makes of a record that was lost.
        let reports_failure = self.lost || (self.failed && self.has_result);
        Outcome {
            result: u8::from(reports_failure),
            ..self.stopped.unwrap_or(done)
        }
    }
}
