//! Every misbehaviour, seen; and everything at once, at random.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod admission;
mod batches;
#[path = "../common/faults.rs"]
mod faults;
mod healthy;
mod page_faults;
mod schedules;
mod together;
mod trouble;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use idxd::{Descriptor, Flags, Record, RecordImage, Refusal, Submit, Submitted, opcode};
use idxd_model::*;

/// Memory for devices: whole pages, which devices change behind the back of who reads them.
#[derive(Debug)]
struct Memory(Vec<Words>);

#[derive(Debug)]
#[repr(C, align(4096))]
struct Words([AtomicU64; 512]);

impl Memory {
    /// Pages of `byte`.
    fn new(pages: usize, byte: u8) -> Self {
        let word = u64::from_le_bytes([byte; 8]);
        Self(
            (0..pages)
                .map(|_| Words(std::array::from_fn(|_| AtomicU64::new(word))))
                .collect(),
        )
    }

    /// Pages with other bytes each.
    fn varied(pages: usize) -> Self {
        let mut number = 1_u64;
        let mut random = || {
            number = number
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            number.rotate_right(32)
        };
        Self(
            (0..pages)
                .map(|_| Words(std::array::from_fn(|_| AtomicU64::new(random()))))
                .collect(),
        )
    }

    fn address(&self) -> u64 {
        self.0.as_ptr().expose_provenance() as u64
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        &self.0[at / 4096].0[at % 4096 / 8]
    }

    fn bytes(&self) -> Vec<u8> {
        let words = self.0.iter().flat_map(|page| &page.0);
        words
            .flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes())
            .collect()
    }

    fn set(&self, at: usize, byte: u8) {
        let mut bytes = self.word(at).load(Ordering::Relaxed).to_le_bytes();
        bytes[at % 8] = byte;
        self.word(at)
            .store(u64::from_le_bytes(bytes), Ordering::Relaxed);
    }
}

fn wanted() -> Flags {
    Flags::RECORD_VALID.with(Flags::RECORD_REQUESTED)
}

fn descriptor(opcode: u8, record: &Record) -> Descriptor {
    Descriptor {
        control: Descriptor::control_of(opcode, wanted()),
        record: record.address(),
        ..Descriptor::default()
    }
}

fn noop(record: &Record) -> Descriptor {
    descriptor(opcode::NOOP, record)
}

fn copy(from: u64, to: u64, size: u32, record: &Record) -> Descriptor {
    Descriptor {
        address_1: from,
        address_2: to,
        size,
        ..descriptor(opcode::MEMMOVE, record)
    }
}

/// Copies from pages that are full of `pattern`.
fn fill(pattern: u64, to: u64, size: u32, record: &Record) -> Descriptor {
    let source = Box::leak(vec![pattern; size.div_ceil(8) as usize].into_boxed_slice());
    copy(source.as_ptr().expose_provenance() as u64, to, size, record)
}

fn is_zero(from: u64, size: u32, record: &Record) -> Descriptor {
    Descriptor {
        address_1: from,
        size,
        ..descriptor(opcode::COMPARE_PATTERN, record)
    }
}

fn batch(list: &[Descriptor], record: &Record) -> Descriptor {
    Descriptor {
        address_1: list.as_ptr() as u64,
        size: u32::try_from(list.len()).unwrap(),
        ..descriptor(opcode::BATCH, record)
    }
}

fn with(descriptor: Descriptor, flags: Flags) -> Descriptor {
    Descriptor {
        control: descriptor.control | flags.0,
        ..descriptor
    }
}

fn records(count: usize) -> Vec<Record> {
    (0..count).map(|_| Record::default()).collect()
}

fn submit(queue: &Arc<dyn Submit>, descriptors: &[Descriptor]) -> Submitted {
    // SAFETY: tests keep memory and records until they have closed the queue, or seen everything complete.
    unsafe { queue.submit(descriptors) }
}

fn accepted(queue: &Arc<dyn Submit>, descriptors: &[Descriptor]) {
    let submitted = submit(queue, descriptors);
    assert_eq!(
        submitted.accepted,
        descriptors.len(),
        "{:?}",
        submitted.refusal
    );
}

/// Waits for a record, for at most `timeout`.
fn wait(queue: &Arc<dyn Submit>, record: &Record, timeout: Duration) -> Option<RecordImage> {
    let deadline = queue.now() + timeout;
    loop {
        if let Some(image) = record.image() {
            return Some(image);
        }
        if queue.now() >= deadline {
            return None;
        }
        queue.pause(record, deadline);
    }
}

fn complete(queue: &Arc<dyn Submit>, record: &Record) -> RecordImage {
    wait(queue, record, Duration::from_secs(60)).unwrap()
}

/// Submits one, and waits for it.
fn run(queue: &Arc<dyn Submit>, descriptor: &Descriptor, record: &Record) -> RecordImage {
    record.clear();
    accepted(queue, &[*descriptor]);
    complete(queue, record)
}

fn config_with(mut config: Config, change: impl FnOnce(&mut Config)) -> Config {
    change(&mut config);
    config
}

/// Whether a fault is reported at `address`, exactly or as its page.
fn is_at(image: &RecordImage, address: u64) -> bool {
    let found = image.fault_address();
    found == address || found == address & !(PAGE - 1)
}

/// Longer than anything healthy takes, in virtual time.
const TIMEOUT: Duration = Duration::from_millis(10);
