//! What it costs the processor to ask a DSA which pages are zero, against looking itself.
//!
//! ```text
//! cargo bench -p idxd --bench offload
//! ```
//! Nanoseconds of this thread's CPU time per page of 4 KiB, in batches of 128, each the least of rounds that take turns:
//! what others do on the machine can only add to it. The offload is
//! [`ZeroScanner::start`] and [`ZeroScanner::finish`]: build descriptors, submit, read records. Its device has them
//! done when submission returns, and reads no memory; what this device needs for itself, which is to write a record
//! for each descriptor, is measured alone and taken off. What remains is what a program pays for each page, but for the
//! instruction ENQCMD, that no emulation has: 200 to 400 ns per batch are assumed for it.
//!
//! The processor is as fast as the C library's `memcmp`. Cold is memory that is larger than the caches, gone through
//! once; hot is the same packet again and again.
//!
//! From this follows from which share of zero pages on the offload pays, if nothing but the processor's time counts,
//! the device is never late, and pages that are not zero differ in the first byte: where
//! `zero * share + other * (1 - share)` is more than what the offload costs. In cold memory the other pages cost a
//! cache miss each, which is not saved but only moved if the page is read later to be encoded.
//!
//! On a Xeon with 2.5 GHz and 36 MB of L3, shared with a dozen busy processes:
//!
//! ```text
//! ns per page                      hot     cold
//! offload, all zero                9.7
//! offload, none zero               8.1
//! processor, zero                103.5    461.0
//! processor, first byte differs    4.2     45.8
//! processor, last byte differs   105.6    400.0
//! ```
//! With ENQCMD that is 11.3 to 12.8 ns: in cold memory it always pays, from 2 % zero pages on if the cache misses are
//! only moved, and in hot memory from 7 to 9 %.

#![allow(
    clippy::expect_used,
    clippy::cast_precision_loss,
    reason = "a benchmark fails by panicking and prints rounded figures"
)]

use std::{
    hint::black_box,
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use idxd::{
    Capabilities, Descriptor, Kind, Limits, Operations, Queue, Record, Shape, Submit, Submitted,
    Tuning, dsa,
    offload::{Devices, ZeroScanner},
    opcode,
};
use rustix::time::{ClockId, clock_gettime};

const PAGE: usize = 4096;
const BATCH: usize = 128;
const ROUNDS: usize = 64;
/// Batches of one round, of what is hot.
const BATCHES: usize = 400;
/// Bytes of cold memory, for each kind of page, and how much of it a round goes through.
const COLD: usize = 256 << 20;
const PART: usize = 16 << 20;
/// What an ENQCMD is assumed to take, at least and at most.
const ENQCMD: [f64; 2] = [200.0, 400.0];

fn main() {
    let hot = [None, Some(0), Some(PAGE - 1)].map(|other| memory(BATCH * PAGE, other));
    let cold = [None, Some(0), Some(PAGE - 1)].map(|other| memory(COLD, other));
    let pages: Vec<_> = (0..BATCH)
        .map(|page| (page * PAGE) as u64 + (1 << 32))
        .collect();
    let mut offloads = [0, 1].map(Offload::new);
    let mut rows = vec![Vec::new(); 9];
    for round in 0..ROUNDS {
        let part = round * PART % COLD..;
        let mut row = rows.iter_mut();
        let mut put = |nanos| row.next().expect("a row").push(nanos);
        offloads
            .iter_mut()
            .for_each(|offload| put(offload.run(&pages)));
        put(device_alone(&pages));
        hot.iter().for_each(|memory| put(scan(memory, BATCHES / 8)));
        cold.iter()
            .for_each(|memory| put(scan(&memory[part.clone()][..PART], 1)));
    }
    let least = rows
        .iter()
        .map(|row| row.iter().copied().fold(f64::INFINITY, f64::min));
    let least: Vec<_> = least.collect();
    let [zero, other, device, ..] = least[..] else {
        unreachable!("nine rows")
    };
    println!("ns per page                    hot     cold");
    println!("offload, all zero           {:>6.1}", zero - device);
    println!("offload, none zero          {:>6.1}", other - device);
    println!("(the device in software)    {device:>6.1}");
    for (kind, name) in ["zero", "first byte differs", "last byte differs"]
        .iter()
        .enumerate()
    {
        println!(
            "processor, {name:<18}{:>5.1}   {:>6.1}",
            least[3 + kind],
            least[6 + kind]
        );
    }
    let cost = zero.max(other) - device;
    for enqcmd in ENQCMD {
        let offload = cost + enqcmd / BATCH as f64;
        // Zero pages, and others of which the first byte differs.
        let pays_from = |zero: f64, other: f64| {
            let share = (offload - other) / (zero - other);
            share.clamp(0.0, 1.0) * 100.0
        };
        println!(
            "with {enqcmd} ns for ENQCMD {offload:.1}: pays from {:.1} % zero pages on; {:.1} % if whoever encodes the \
             others has their first cache miss then; hot {:.1} %",
            pays_from(least[6], least[7]),
            pays_from(least[6], least[4]),
            pays_from(least[3], least[4]),
        );
    }
}

/// Pages of zeros, with one other byte in each of them if wanted.
fn memory(bytes: usize, other: Option<usize>) -> Vec<u8> {
    // Written to: pages that were never touched are all the same one.
    let mut memory = vec![1; bytes];
    for page in memory.chunks_mut(PAGE) {
        page.fill(0);
        if let Some(at) = other {
            page[at] = 1;
        }
    }
    memory
}

/// The processor's way, so many times.
fn scan(memory: &[u8], times: usize) -> f64 {
    let start = cpu_time();
    for _ in 0..times {
        let zeros = memory.chunks(PAGE).filter(|page| *page == ZEROS).count();
        black_box(zeros);
    }
    nanos(start, times * memory.len() / PAGE)
}

static ZEROS: [u8; PAGE] = [0; PAGE];

struct Offload {
    scanner: ZeroScanner,
    result: u8,
}

impl Offload {
    /// With a device that reports `result` for every page.
    fn new(result: u8) -> Self {
        let shape = Shape {
            members: 128,
            buffer_bytes: 0,
        };
        let device = Arc::new(Immediate::new(result));
        let queue = Queue::new(device, shape, Tuning::default()).expect("a queue");
        let devices = Arc::new(Devices::new([queue]));
        let scanner = ZeroScanner::new(devices, 4096, NonZeroU32::new(1 << 20));
        Self { scanner, result }
    }

    fn run(&mut self, pages: &[u64]) -> f64 {
        let (mut verdicts, is_zero) = ([false; BATCH], self.result == 0);
        let start = cpu_time();
        for _ in 0..BATCHES {
            let batch = self.scanner.start(black_box(pages));
            self.scanner
                .finish(batch, pages, &mut |_| is_zero, &mut verdicts)
                .expect("right verdicts");
            black_box(&verdicts);
        }
        assert!(verdicts.iter().all(|verdict| *verdict == is_zero));
        nanos(start, BATCHES * BATCH)
    }
}

/// What the device itself needs for a batch.
fn device_alone(pages: &[u64]) -> f64 {
    let device = Immediate::new(0);
    let records: Vec<_> = (0..=BATCH).map(|_| Record::default()).collect();
    let members = pages.iter().zip(&records);
    let list: Vec<_> = members
        .map(|(page, record)| dsa::compare_pattern(*page, 4096, 0, record.address()))
        .collect();
    let batch = dsa::batch(
        list.as_ptr().expose_provenance() as u64,
        128,
        records[BATCH].address(),
    );
    let batch = [batch];
    let start = cpu_time();
    for _ in 0..BATCHES {
        // SAFETY: list and records live, and it is done when this returns.
        let submitted = unsafe { device.submit(black_box(&batch)) };
        assert_eq!(submitted.accepted, 1);
    }
    nanos(start, BATCHES * BATCH)
}

fn nanos(start: Duration, pages: usize) -> f64 {
    (cpu_time() - start).as_secs_f64() * 1e9 / pages as f64
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).expect("a time since the thread began")
}

/// A device that has done everything before submission returns, and that knows the result.
#[derive(Debug)]
struct Immediate {
    limits: Limits,
    result: u8,
    beginning: Instant,
}

impl Immediate {
    fn new(result: u8) -> Self {
        let limits = Limits {
            kind: Kind::Dsa,
            size: 128,
            threshold: 128,
            max_batch: NonZeroU32::new(128),
            max_transfer: 2 << 20,
            operations: Operations([u64::MAX; 4]),
            version: 0x100,
            capabilities: Capabilities::FIRST_DSA,
        };
        Self {
            limits,
            result,
            beginning: Instant::now(),
        }
    }
}

impl Submit for Immediate {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    unsafe fn submit(&self, descriptors: &[Descriptor]) -> Submitted {
        for descriptor in descriptors {
            let mut completed = 0;
            if descriptor.opcode() == opcode::BATCH {
                completed = descriptor.size;
                let list =
                    std::ptr::with_exposed_provenance::<Descriptor>(address(descriptor.address_1));
                // SAFETY: a list of so many descriptors, as its submission promises.
                let members = unsafe { std::slice::from_raw_parts(list, completed as usize) };
                for member in members {
                    complete(member, self.result, 0);
                }
            }
            complete(descriptor, 0, completed);
        }
        Submitted {
            accepted: descriptors.len(),
            refusal: None,
        }
    }

    fn now(&self) -> Duration {
        self.beginning.elapsed()
    }

    fn pause(&self, _: &Record, _: Duration) {
        std::hint::spin_loop();
    }

    fn close(&self) {}
}

/// Status and result are in the first word.
fn complete(descriptor: &Descriptor, result: u8, completed: u32) {
    let word = std::ptr::with_exposed_provenance_mut::<u64>(address(descriptor.record));
    // SAFETY: the first word of a record, which consists of atomics, as its submission promises.
    let word = unsafe { AtomicU64::from_ptr(word) };
    word.store(
        1 | u64::from(result) << 8 | u64::from(completed) << 32,
        Ordering::Release,
    );
}

fn address(number: u64) -> usize {
    usize::try_from(number).expect("64 bits")
}
