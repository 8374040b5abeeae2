//! What comes after the work: records, late or lost ones too, and who is notified.

use super::{Machine, NEVER, Unit, batch::Batch};
use crate::{dsa::Outcome, faults::InjectedFault, nanoseconds, validate::status};
use idxd::{Flags, Kind, RecordImage, opcode};

/// What happens to a descriptor once its engine is done with it.
#[derive(Debug)]
pub(super) struct Delivery {
    pub(super) due: u64,
    pub(super) unit: Unit,
    what: What,
}

#[derive(Debug)]
pub(super) enum What {
    /// The record is written, the descriptor complete.
    Complete(RecordImage),
    /// Everything else happened before: only the record is missing.
    Record(RecordImage),
    /// The work is to be done now.
    Work,
}

impl Machine {
    /// The work of a descriptor is done: brings the record on its way.
    pub(super) fn conclude(&mut self, unit: Unit, image: RecordImage) {
        let latency = nanoseconds(self.workshop.speeds.latency);
        let due = self.clock.saturating_add(latency);
        match unit.fault {
            Some(InjectedFault::RecordLate(by)) => {
                self.deliver_at(
                    due.saturating_add(nanoseconds(by)),
                    unit,
                    What::Complete(image),
                );
            }
            Some(InjectedFault::RecordLost) => {
                self.devices[unit.device].latched = true;
                self.statistics.unrecorded += u64::from(unit.member.is_none());
                self.account(&unit, image.status(), true);
            }
            _ => self.deliver_at(due, unit, What::Complete(image)),
        }
    }

    pub(super) fn deliver_at(&mut self, due: u64, unit: Unit, what: What) {
        self.deliveries.push(Delivery {
            due: due.min(NEVER - 1),
            unit,
            what,
        });
    }

    pub(super) fn deliver(&mut self, index: usize) {
        let Delivery { unit, what, .. } = self.deliveries.swap_remove(index);
        self.trace.note([5, self.clock, unit.sequence]);
        match what {
            What::Complete(image) => self.complete(unit, image),
            What::Record(image) => {
                self.write(&unit, image);
                self.clients[unit.client].in_flight -= 1;
            }
            What::Work => {
                let job = self.job_of(unit.clone(), None);
                let worked = self.workshop().work(&job);
                self.complete(unit, worked.image);
            }
        }
    }

    fn complete(&mut self, unit: Unit, image: RecordImage) {
        self.trace
            .note([6, u64::from(image.status()), u64::from(image.completed())]);
        if let Some((id, _)) = unit.member
            && self
                .batches
                .get(&id)
                .is_some_and(Batch::is_last_and_told_first)
        {
            // The parent's record first; the member's then counts as in flight by itself.
            self.clients[unit.client].in_flight += 1;
            let failed = image.status() != status::SUCCESS;
            if let Some(batch) = self.batches.get_mut(&id) {
                batch.failed |= failed;
                let (parent, reported) = (batch.parent.clone(), batch.outcome().image());
                batch.reported = true;
                self.write(&parent, reported);
            }
            let due = self
                .clock
                .saturating_add(nanoseconds(self.workshop.speeds.latency));
            self.deliver_at(due, unit.clone(), What::Record(image));
            self.account(&unit, image.status(), false);
            return;
        }
        let lost = !self.write(&unit, image);
        if unit.member.is_none() {
            let counter = match lost {
                true => &mut self.statistics.unrecorded,
                false => &mut self.statistics.completed,
            };
            *counter += 1;
        }
        self.account(&unit, image.status(), lost);
    }

    /// Books a descriptor as done.
    pub(super) fn account(&mut self, unit: &Unit, code: u8, lost: bool) {
        match unit.member {
            Some((id, _)) => {
                if let Some(batch) = self.batches.get_mut(&id) {
                    batch.running -= 1;
                    batch.failed |= code != status::SUCCESS || lost;
                    batch.lost |= lost;
                }
                self.check_batch(id);
            }
            None => {
                self.devices[unit.device].queues[unit.queue]
                    .outstanding
                    .remove(&unit.sequence);
                let client = &mut self.clients[unit.client];
                client.in_flight = client.in_flight.saturating_sub(1);
                self.check_drains();
            }
        }
    }

    /// Completes the drains before which nothing is outstanding.
    pub(super) fn check_drains(&mut self) {
        while let Some(index) = self.drains.iter().position(|drain| {
            let queue = &self.devices[drain.device].queues[drain.queue];
            queue.outstanding.range(..drain.sequence).next().is_none()
        }) {
            let drain = self.drains.swap_remove(index);
            let image = Outcome {
                status: status::SUCCESS,
                ..Outcome::default()
            }
            .image();
            self.conclude(drain, image);
        }
    }

    /// Writes a record, if one is wanted. Whether it is there, or was not wanted.
    fn write(&mut self, unit: &Unit, image: RecordImage) -> bool {
        let flags = unit.descriptor.flags();
        let kind = self.devices[unit.device].kind;
        let failed = image.status() != status::SUCCESS;
        if !flags.has(Flags::RECORD_VALID) {
            // Errors go to the device's register only.
            self.devices[unit.device].latched |= failed;
            return true;
        }
        if !failed && !flags.has(Flags::RECORD_REQUESTED) {
            return true;
        }
        let image = self.poisoned(kind, unit, image);
        let bytes = image.words.map(u64::to_le_bytes);
        let length = if kind == Kind::Dsa { 32 } else { 64 };
        let address = unit.descriptor.record;
        let written = address.is_multiple_of(kind.record_alignment())
            && self
                .workshop
                .view(self.clock, false, None)
                .write_record(address, &bytes.as_flattened()[..length])
                .is_ok();
        self.devices[unit.device].latched |= !written;
        written
    }

    /// The record with noise in every byte that has no meaning there.
    fn poisoned(&mut self, kind: Kind, unit: &Unit, mut image: RecordImage) -> RecordImage {
        let code = image.status() & !status::ON_WRITE;
        let fault = matches!(
            code,
            status::PAGE_FAULT | status::PAGE_REQUEST_REFUSED | status::BATCH_LIST_FAULT
        );
        let operation = unit.descriptor.opcode();
        let mut undefined = [0u64; 8];
        undefined[0] |= 0xffff_0000;
        undefined[1] = if fault { 0 } else { u64::MAX };
        if code == status::FLAGS {
            undefined[2] = 0xffff_ffff_0000_0000;
        } else if kind == Kind::Iaa {
            undefined[2] = u64::MAX;
        }
        match kind {
            Kind::Dsa => {
                let counted = fault
                    || matches!(operation, opcode::BATCH)
                    || matches!(code, status::DELTA_ORDER | status::DELTA_RANGE)
                    || (matches!(operation, opcode::COMPARE | opcode::COMPARE_PATTERN)
                        && image.result() == 1)
                    || (operation == opcode::CREATE_DELTA && image.result() == 2);
                if !counted {
                    undefined[0] |= 0xffff_ffff_0000_0000;
                }
                undefined[2] |= match operation {
                    opcode::CRC | opcode::COPY_CRC | opcode::CREATE_DELTA => 0xffff_ffff_0000_0000,
                    _ if code == status::FLAGS => 0,
                    _ => u64::MAX,
                };
                undefined[3] = u64::MAX;
            }
            // What only filters report: for everything else it is noise.
            Kind::Iaa => {
                undefined[4] = 0xffff_ffff_0000_0000;
                undefined[6..].fill(u64::MAX);
                if operation != opcode::CRC64 {
                    undefined[5] = u64::MAX;
                }
            }
        }
        for (word, undefined) in image.words.iter_mut().zip(undefined) {
            *word = *word & !undefined | self.random.next() & undefined;
        }
        image
    }
}
