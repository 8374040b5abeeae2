//! Admits descriptors to a work queue, by the rules of the instructions and of the kernel's `write`.

use std::{hash::Hash as _, io};

use super::{Client, Machine, Unit, is_due};
use crate::PortalKind;
use idxd::{Descriptor, Refusal, opcode};

/// How often the kernel's `write` retries a full queue (`enqcmds_retries` in sysfs).
const WRITE_RETRIES: u32 = 32;

/// Refusal by a device that does not exist, or has been removed.
pub(crate) fn gone() -> Refusal {
    Refusal::System(io::Error::from_raw_os_error(libc::ENODEV))
}

impl Machine {
    /// Admits or denies one descriptor.
    pub(crate) fn admit(
        &mut self,
        client: usize,
        portal: PortalKind,
        descriptor: &Descriptor,
    ) -> Result<(), Refusal> {
        let Client {
            device,
            queue,
            generation,
            closed,
            forked,
            ..
        } = self.clients[client];
        if closed {
            return Err(Refusal::Closed);
        }
        if forked {
            return Err(Refusal::Forked);
        }
        let here = &mut self.devices[device];
        if here.unplugged {
            return Err(gone());
        }
        let dead = !here.enabled || here.queues[queue].generation != generation;
        let kind = here.kind;
        let is_old = here.queues[queue].limits.version == 0x100;
        if portal == PortalKind::Write
            && (!descriptor.record.is_multiple_of(kind.record_alignment())
                || (descriptor.opcode() == opcode::BATCH && is_old))
        {
            return Err(Refusal::Invalid);
        }
        if dead {
            return Err(Refusal::Full);
        }
        let tries = match portal {
            PortalKind::Enqcmd => 1,
            PortalKind::Write => 1 + WRITE_RETRIES,
        };
        if (0..tries).all(|_| self.full(device, queue)) {
            return Err(Refusal::Full);
        }
        let sequence = self.next_sequence();
        let unit = Unit {
            sequence,
            client,
            device,
            queue,
            descriptor: *descriptor,
            member: None,
            fault: None,
        };
        let here = &mut self.devices[device].queues[queue];
        here.entries.push_back(unit);
        here.outstanding.insert(sequence, client);
        self.clients[client].in_flight += 1;
        self.statistics.accepted += 1;
        [1, self.clock, sequence].hash(&mut self.trace);
        Ok(())
    }

    /// Whether a queue is full.
    fn full(&mut self, device: usize, queue: usize) -> bool {
        let competitor = self.random.u64(..=u64::from(self.faults.competitor));
        let unlucky = is_due(&mut self.random, self.faults.full_per_mille);
        let queue = &mut self.devices[device].queues[queue];
        if queue.full > 0 {
            // `u32::MAX` is always.
            if queue.full != u32::MAX {
                queue.full -= 1;
            }
            return true;
        }
        let taken = queue.entries.len() as u64 + competitor;
        unlucky || taken >= u64::from(queue.limits.threshold)
    }
}
