//! Completes descriptors: writes their records, which may be late or lost, and updates the counters.

use std::hash::Hash as _;

use super::{Machine, NEVER, Unit};
use crate::{dsa::Outcome, faults::InjectedFault, memory::PAGE, nanoseconds, validate::status};
use idxd::{Flags, Kind, RecordImage, opcode};

/// A pending completion.
#[derive(Debug)]
pub(super) struct Delivery {
    pub(super) due: u64,
    pub(super) unit: Unit,
    /// What to write to the record. `None`: do the work first.
    image: Option<RecordImage>,
}

impl Machine {
    /// Schedules the record of a descriptor whose work is done.
    pub(super) fn conclude(&mut self, unit: Unit, image: RecordImage) {
        let latency = nanoseconds(self.executor.speeds.latency);
        let due = self.clock.saturating_add(latency);
        match unit.fault {
            Some(InjectedFault::RecordLate(by)) => {
                self.deliver_at(due.saturating_add(nanoseconds(by)), unit, Some(image));
            }
            Some(InjectedFault::RecordLost) => {
                self.statistics.unrecorded += u64::from(unit.member.is_none());
                self.account(&unit, image.status(), true);
            }
            _ => self.deliver_at(due, unit, Some(image)),
        }
    }

    pub(super) fn deliver_at(&mut self, due: u64, unit: Unit, image: Option<RecordImage>) {
        self.deliveries.push(Delivery {
            due: due.min(NEVER - 1),
            unit,
            image,
        });
    }

    pub(super) fn deliver(&mut self, index: usize) {
        let Delivery { unit, image, .. } = self.deliveries.swap_remove(index);
        [5, self.clock, unit.sequence].hash(&mut self.trace);
        let image = image.unwrap_or_else(|| self.work(&unit));
        self.complete(unit, image);
    }

    fn complete(&mut self, unit: Unit, image: RecordImage) {
        [6, u64::from(image.status()), u64::from(image.completed())].hash(&mut self.trace);
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

    /// Counts a descriptor as done.
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

    /// Completes drains without outstanding earlier descriptors of the same process.
    pub(super) fn check_drains(&mut self) {
        while let Some(index) = self.drains.iter().position(|drain| {
            let queue = &self.devices[drain.device].queues[drain.queue];
            let mut before = queue.outstanding.range(..drain.sequence);
            before.all(|(_, client)| *client != drain.client)
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

    /// Writes a record, if one is requested. Returns false if it could not be written.
    fn write(&mut self, unit: &Unit, image: RecordImage) -> bool {
        let kind = self.devices[unit.device].kind;
        if !wants_record(unit, image) {
            return true;
        }
        let image = self.poisoned(kind, unit, image);
        let bytes = image.words.map(u64::to_le_bytes);
        let length = if kind == Kind::Dsa { 32 } else { 64 };
        let address = unit.descriptor.record;
        let mut memory = self.executor.view();
        address.is_multiple_of(kind.record_alignment())
            && memory
                .write_record(address, &bytes.as_flattened()[..length])
                .is_ok()
    }

    /// The record with noise in every undefined byte.
    fn poisoned(&mut self, kind: Kind, unit: &Unit, mut image: RecordImage) -> RecordImage {
        let code = image.status() & !status::ON_WRITE;
        let fault = matches!(
            code,
            status::PAGE_FAULT | status::PAGE_REQUEST_REFUSED | status::BATCH_LIST_FAULT
        );
        let operation = unit.descriptor.opcode();
        // The number of random numbers must not depend on the status, which may depend on reused memory.
        let is_page_only = self.random.u64(..) & 1 == 0;
        if fault && is_page_only {
            image.words[1] &= !(PAGE - 1);
        }
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
                if !is_counted(operation, code) {
                    undefined[0] |= 0xffff_ffff_0000_0000;
                }
                if code != status::FLAGS {
                    undefined[2] = u64::MAX;
                }
                undefined[3] = u64::MAX;
            }
            // The device's other fields: checksums, and what only filters report.
            Kind::Iaa => {
                undefined[3] = 0xffff_ffff_0000_0000;
                undefined[4..].fill(u64::MAX);
            }
        }
        for (word, undefined) in image.words.iter_mut().zip(undefined) {
            *word = *word & !undefined | self.random.u64(..) & undefined;
        }
        image
    }
}

/// Whether the field for completed bytes or descriptors of DSA's record is defined (DSA 3.0, 5.4, 8.2.4, 8.3). It is 0 for
/// success and for a failed validation.
fn is_counted(operation: u8, code: u8) -> bool {
    match operation {
        opcode::NOOP | opcode::DRAIN => is_refused(code),
        _ => code <= status::BATCH_LIST_FAULT || is_refused(code),
    }
}

/// Whether it is the status of a failed validation.
fn is_refused(code: u8) -> bool {
    (status::OPCODE..=status::ADDRESS_ALIGNMENT).contains(&code)
}

/// Whether a record has to be written.
fn wants_record(unit: &Unit, image: RecordImage) -> bool {
    let flags = unit.descriptor.flags();
    flags.has(Flags::RECORD_VALID)
        && (is_error(image.status()) || flags.has(Flags::RECORD_REQUESTED))
}

/// Whether a status is recorded even without a request (DSA 3.0, 5.8.1 and 8.1.3: bit 3).
fn is_error(code: u8) -> bool {
    !matches!(code, status::SUCCESS | status::BATCH_FAILED)
}
