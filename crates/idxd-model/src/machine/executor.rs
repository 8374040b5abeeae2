//! Executes descriptors on memory.

use super::NEVER;
use idxd::{Descriptor, Kind, RecordImage, opcode};

use crate::{
    config::{Speeds, Work},
    dsa::{self, Outcome},
    faults::{At, InjectedFault},
    iaa,
    memory::{Fault, Memory, Pages, View},
    validate::status,
};

/// Executes descriptors.
#[derive(Debug)]
pub(crate) struct Executor {
    pub(crate) pages: Pages,
    pub(super) speeds: Speeds,
    pub(super) work: Work,
}

impl Executor {
    /// Executes a descriptor, with an injected fault, and returns what its record reports.
    pub(super) fn work(
        &self,
        kind: Kind,
        descriptor: &Descriptor,
        fault: Option<InjectedFault>,
        random: u64,
    ) -> RecordImage {
        let (mut refused, mut injected) = (false, None);
        match fault {
            Some(InjectedFault::Status(code)) => return Outcome::status(code).image(),
            Some(InjectedFault::PageFault {
                at,
                write,
                refused: is_refused,
            }) => {
                injected = place(descriptor, at, write, random);
                refused = is_refused;
            }
            _ => {}
        }
        let mut view = View {
            injected,
            ..self.view()
        };
        let mut image = match (kind, descriptor.opcode()) {
            (_, opcode::NOOP) => Outcome::status(status::SUCCESS).image(),
            (Kind::Dsa, _) => dsa::execute(descriptor, &mut view, &self.work).image(),
            (Kind::Iaa, _) => iaa::execute(descriptor, &mut view),
        };
        if refused && image.status() & !status::ON_WRITE == status::PAGE_FAULT {
            image.words[0] += u64::from(status::PAGE_REQUEST_REFUSED - status::PAGE_FAULT);
        }
        if fault == Some(InjectedFault::Corrupt) && image.status() == status::SUCCESS {
            self.corrupt(descriptor, random, &image);
        }
        image
    }

    /// Duration of the transfer in nanoseconds.
    pub(super) fn duration(&self, descriptor: &Descriptor) -> u64 {
        let size = u64::from(descriptor.size);
        let (bytes, rate) = match descriptor.opcode() {
            opcode::NOOP => return 0,
            opcode::COMPRESS => (size, self.speeds.compress),
            opcode::DECOMPRESS => (size * 2, self.speeds.decompress),
            _ => (size, self.speeds.transfer),
        };
        let took = u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1));
        u64::try_from(took).unwrap_or(NEVER)
    }

    /// Memory without injected faults.
    pub(super) fn view(&self) -> View<'_> {
        View {
            pages: &self.pages,
            injected: None,
        }
    }

    /// Changes one of the bytes that an operation wrote.
    fn corrupt(&self, descriptor: &Descriptor, random: u64, image: &RecordImage) {
        let written = match descriptor.opcode() {
            opcode::MEMMOVE => u64::from(descriptor.size),
            // IAA's size of the output.
            opcode::COMPRESS | opcode::DECOMPRESS => image.words[3] & 0xffff_ffff,
            _ => 0,
        };
        if written == 0 {
            return;
        }
        let at = descriptor.address_2.wrapping_add(random % written);
        let (mut view, mut byte) = (self.view(), [0]);
        if view.read(at, &mut byte).is_ok() {
            // The byte was just written, so this write can hardly fail; if it does, nothing is corrupted.
            let _ = view.write(at, &[byte[0] ^ 0x10]);
        }
    }
}

/// Address of an injected page fault, and whether it is on a write.
fn place(descriptor: &Descriptor, at: At, write: bool, random: u64) -> Option<(u64, bool)> {
    let size = u64::from(descriptor.size);
    let writes = match descriptor.opcode() {
        opcode::COMPARE_PATTERN => false,
        opcode::NOOP | opcode::DRAIN | opcode::BATCH => return None,
        _ => true,
    };
    let write = write && writes;
    let offset = match at {
        At::Byte(byte) => u64::from(byte),
        At::Anywhere => random % size.max(1),
    };
    let start = match write {
        false => descriptor.address_1,
        true => descriptor.address_2,
    };
    Some((start.wrapping_add(offset), write))
}

/// A member of a batch.
pub(super) fn read_descriptor(memory: &mut dyn Memory, at: u64) -> Result<Descriptor, Fault> {
    let mut bytes = [0; 64];
    memory.read(at, &mut bytes)?;
    Ok(Descriptor::from_bytes(bytes))
}
