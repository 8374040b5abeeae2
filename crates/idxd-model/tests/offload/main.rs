//! Every call against models of its devices: in virtual time one by one, at random with everything that can go wrong,
//! and on threads.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod compression;
#[path = "../common/faults.rs"]
mod faults;
mod noise;
mod queues;
mod schedules;
mod zero_pages;

use std::{sync::Arc, time::Duration};

use idxd::offload::*;
use idxd::{Kind, Queue, Record, Shape, Statistics, Submit, Tuning};
use idxd_model::{Config, Model, PortalKind};

const PAGE: usize = 4096;

const BATCHES: Shape = Shape {
    members: 128,
    buffer_bytes: 0,
};

const PAGES: Shape = Shape {
    members: 1,
    buffer_bytes: PAGE,
};

/// The first work queue of each of the model's first `count` devices.
fn devices(model: &Model, count: usize, shape: Shape) -> Arc<Devices> {
    let queues = (0..count).map(|device| {
        let tuning = Tuning {
            slots: 64,
            ..Tuning::default()
        };
        let submit = model.queue(device, 0, PortalKind::Enqcmd);
        Queue::new(submit, shape, tuning).unwrap()
    });
    Arc::new(Devices::new(queues))
}

/// The counters of each queue.
fn statistics(devices: &Devices) -> Vec<Statistics> {
    devices.queues().map(Queue::statistics).collect()
}

/// Virtual time that goes by while the caller does something else.
fn pass(clock: &Arc<dyn Submit>, time: Duration) {
    let (record, end) = (Record::default(), clock.now() + time);
    while clock.now() < end {
        clock.pause(&record, end);
    }
}

/// Memory of whole pages, at the beginning of one.
struct Memory {
    words: Vec<u64>,
    start: usize,
}

impl Memory {
    fn of(bytes: &[u8]) -> Self {
        let mut words = vec![0_u64; (bytes.len() + PAGE) / 8];
        let start = words.as_ptr().align_offset(PAGE);
        let ours = words[start..].as_mut_ptr().cast::<u8>();
        // SAFETY: as many bytes as are there, of words that nothing else refers to yet.
        unsafe { ours.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Self { words, start }
    }

    fn bytes(&self) -> &[u8] {
        let ours = &self.words[self.start..];
        let len = (ours.len() * 8) / PAGE * PAGE;
        // SAFETY: words as their bytes.
        unsafe { std::slice::from_raw_parts(ours.as_ptr().cast(), len) }
    }

    fn page(&self, index: usize) -> &[u8] {
        &self.bytes()[index * PAGE..][..PAGE]
    }

    fn is_zero(&self, index: usize) -> bool {
        self.page(index).iter().all(|byte| *byte == 0)
    }

    fn addresses(&self, count: usize) -> Vec<u64> {
        let start = self.bytes().as_ptr().expose_provenance() as u64;
        (0..count)
            .map(|page| start + (page * PAGE) as u64)
            .collect()
    }
}

/// Pages of text, noise and zeros.
fn contents(pages: usize) -> Vec<u8> {
    let mut memory = vec![0; pages * PAGE];
    let mut random = 1_u64;
    for (index, page) in memory.chunks_exact_mut(PAGE).enumerate() {
        for (at, byte) in page.iter_mut().enumerate() {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            *byte = match index % 4 {
                0 => 0,
                1 => random.to_le_bytes()[7],
                _ => b"the quick brown fox "[at * index % 20],
            };
        }
    }
    memory
}

fn sum(work: OffloadCounters) -> u64 {
    work.by_device + work.refused + work.failed + work.overtaken
}
