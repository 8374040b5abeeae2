//! The work of one descriptor, in memory. It needs nothing of the machine, so that threads can do it outside its lock.

use super::{NEVER, Unit};
use idxd::{Descriptor, Kind, RecordImage, opcode};

use crate::{
    config::{Speeds, Work},
    dsa::{self, Outcome},
    faults::{At, InjectedFault},
    iaa,
    memory::{Fault, Memory, Pages, View},
    validate::status,
};

/// What work needs: shared with threads that work outside the machine's lock.
#[derive(Debug)]
pub(crate) struct Workshop {
    pub(crate) pages: Pages,
    pub(super) speeds: Speeds,
    pub(super) work: Work,
}

/// Work that can be done without the machine.
#[derive(Debug)]
pub(crate) struct Job {
    pub(super) kind: Kind,
    pub(crate) unit: Unit,
    pub(super) done: Option<RecordImage>,
    pub(super) block: bool,
    pub(super) random: u64,
    pub(super) now: u64,
}

/// What came out of a [`Job`].
#[derive(Debug)]
pub(crate) struct Worked {
    pub(super) image: RecordImage,
    /// How long page requests took.
    pub(super) stalled: u64,
}

impl Workshop {
    /// Does the work of a descriptor, in memory.
    pub(crate) fn work(&self, job: &Job) -> Worked {
        if let Some(image) = job.done {
            return Worked { image, stalled: 0 };
        }
        let descriptor = &job.unit.descriptor;
        let mut refused = job.block;
        let mut injected = None;
        match job.unit.fault {
            Some(InjectedFault::Status(code)) => {
                return Worked {
                    image: Outcome::status(code).image(),
                    stalled: 0,
                };
            }
            Some(InjectedFault::PageFault {
                at,
                write,
                refused: asked,
            }) => {
                injected = place(descriptor, at, write, job.random);
                refused |= asked;
            }
            _ => {}
        }
        let mut view = View {
            injected,
            ..self.view(job.now, job.block)
        };
        let mut image = match job.kind {
            Kind::Dsa => dsa::execute(descriptor, &mut view, &self.work).image(),
            Kind::Iaa if matches!(descriptor.opcode(), opcode::NOOP) => {
                Outcome::status(status::SUCCESS).image()
            }
            Kind::Iaa => iaa::execute(descriptor, &mut view),
        };
        if refused && image.status() & !status::ON_WRITE == status::PAGE_FAULT {
            image.words[0] += u64::from(status::PAGE_REQUEST_REFUSED - status::PAGE_FAULT);
        }
        if job.unit.fault == Some(InjectedFault::Corrupt) && image.status() == status::SUCCESS {
            self.corrupt(job, &image);
        }
        Worked {
            image,
            stalled: view.stalled,
        }
    }

    /// How long the transfer takes, in nanoseconds.
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

    /// Memory without faults that were asked for, and with all that are reported.
    pub(super) fn view(&self, now: u64, block: bool) -> View<'_> {
        View {
            pages: &self.pages,
            now,
            block,
            injected: None,
            stalled: 0,
        }
    }

    /// Makes one of the bytes wrong that an operation wrote.
    fn corrupt(&self, job: &Job, image: &RecordImage) {
        let descriptor = &job.unit.descriptor;
        let written = match descriptor.opcode() {
            opcode::MEMMOVE | opcode::FILL => u64::from(descriptor.size),
            // IAA's size of the output.
            opcode::COMPRESS | opcode::DECOMPRESS => image.words[3] & 0xffff_ffff,
            _ => 0,
        };
        if written == 0 {
            return;
        }
        let at = descriptor.address_2.wrapping_add(job.random % written);
        let (mut view, mut byte) = (self.view(job.now, false), [0]);
        if view.read(at, &mut byte).is_ok() {
            // What was just written can be written; if not, it is not corrupted.
            let _ = view.write(at, &[byte[0] ^ 0x10]);
        }
    }
}

/// Address of a fault at `at` in what `descriptor` works on, and whether of a write.
fn place(descriptor: &Descriptor, at: At, write: bool, random: u64) -> Option<(u64, bool)> {
    let size = u64::from(descriptor.size);
    let (reads, writes) = match descriptor.opcode() {
        opcode::FILL => (false, true),
        opcode::COMPARE_PATTERN | opcode::CRC64 => (true, false),
        opcode::NOOP | opcode::DRAIN | opcode::BATCH => return None,
        _ => (true, true),
    };
    let write = writes && (write || !reads);
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
    let word = |at: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[at..at + 8]);
        u64::from_le_bytes(word)
    };
    let half =
        |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    Ok(Descriptor {
        pasid: half(0),
        control: half(4),
        record: word(8),
        address_1: word(16),
        address_2: word(24),
        size: half(32),
        interrupt: u16::from_le_bytes([bytes[36], bytes[37]]),
        operation_flags: u16::from_le_bytes([bytes[38], bytes[39]]),
        operands: [word(40), word(48), word(56)],
    })
}
