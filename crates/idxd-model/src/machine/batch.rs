//! Batches: a list in memory whose members are read one by one as engines become free, and a record when all are done.

use super::{Machine, Unit, executor::read_descriptor};
use crate::{dsa::Outcome, faults::InjectedFault, memory::View, validate::status};

/// Most batches that an engine has in progress: several (DSA 3.0, 4.4); the number is an assumption.
const BATCHES_PER_ENGINE: usize = 4;

/// A batch whose members are read, run or awaited.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) parent: Unit,
    next: u32,
    pub(super) running: u32,
    pub(super) failed: bool,
    /// A member's record was lost.
    pub(super) lost: bool,
    /// No further members: reading the list faulted.
    stopped: Option<Outcome>,
}

impl Machine {
    pub(super) fn open_batch(&mut self, parent: Unit) {
        let batch = Batch {
            next: 0,
            running: 0,
            failed: false,
            lost: false,
            stopped: None,
            parent,
        };
        self.batches.insert(batch.parent.sequence, batch);
    }

    /// Reads the next member of a batch from its list; `None` if reading the list faults, which ends the batch.
    pub(super) fn next_member(&mut self, id: u64) -> Option<Unit> {
        let (executor, sequence) = (self.executor(), self.next_sequence());
        let batch = self.batches.get_mut(&id)?;
        let (index, list) = (batch.next, batch.parent.descriptor.address_1);
        let at = list.wrapping_add(u64::from(index) * 64);
        let is_injected = batch.parent.fault == Some(InjectedFault::ListFault(index));
        let mut view = View {
            pages: &executor.pages,
            injected: is_injected.then_some((at, false)),
        };
        let descriptor = match read_descriptor(&mut view, at) {
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
        };
        batch.next += 1;
        batch.running += 1;
        Some(Unit {
            sequence,
            descriptor,
            member: Some((id, index)),
            fault: None,
            ..batch.parent
        })
    }

    /// Whether a device can begin another batch.
    pub(super) fn takes_batch(&self, device: usize) -> bool {
        let engines = self.devices[device].engines.len();
        let open = self
            .batches
            .values()
            .filter(|batch| batch.parent.device == device && batch.has_next());
        open.count() < engines * BATCHES_PER_ENGINE
    }

    /// Completes a batch if all of its members are done.
    pub(super) fn check_batch(&mut self, id: u64) {
        if !self.batches.get(&id).is_some_and(Batch::is_over) {
            return;
        }
        let Some(batch) = self.batches.remove(&id) else {
            return;
        };
        let image = batch.outcome().image();
        self.conclude(batch.parent, image);
    }
}

impl Batch {
    fn count(&self) -> u32 {
        self.parent.descriptor.size
    }

    /// Whether members are left.
    pub(super) fn has_next(&self) -> bool {
        self.stopped.is_none() && self.next < self.count()
    }

    fn is_over(&self) -> bool {
        self.running == 0 && !self.has_next()
    }

    fn outcome(&self) -> Outcome {
        let code = if self.failed {
            status::BATCH_FAILED
        } else {
            status::SUCCESS
        };
        let done = Outcome {
            completed: Some(self.count()),
            ..Outcome::status(code)
        };
        Outcome {
            // The kernel's report of a member's lost record.
            result: u8::from(self.lost),
            ..self.stopped.unwrap_or(done)
        }
    }
}
