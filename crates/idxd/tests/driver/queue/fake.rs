//! A work queue that does what a test sets, in virtual time.

use std::{
    collections::{HashSet, VecDeque},
    ptr,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use idxd::{
    Capabilities, Descriptor, Kind, Limits, Operations, Record, Refusal, Submit, Submitted, opcode,
};

#[derive(Debug)]
pub(super) struct Fake {
    limits: Limits,
    state: Mutex<State>,
}

/// When the device completes what it has taken.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pace {
    /// Before the submission returns.
    AtOnce,
    /// At the test's request ([`Fake::complete`]), or when the queue is closed.
    Never,
    /// As soon as so many nanoseconds have gone by.
    After(u64),
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) pace: Pace,
    /// How many descriptors the next submissions take, and what they return for the others.
    pub(super) answers: VecDeque<(usize, Option<Refusal>)>,
    /// Takes no batches, though the limits have them.
    pub(super) refuses_batches: bool,
    /// Status that is written for an operation, by its first address; 1 otherwise.
    pub(super) statuses: Vec<(u64, u8)>,
    /// What it has in hand, and since when.
    pub(super) taken: Vec<(u64, Descriptor)>,
    pub(super) most_taken: usize,
    /// How often the driver has asked.
    pub(super) submissions: usize,
    pub(super) now: u64,
    pub(super) closed: u32,
}

pub(super) fn shared(threshold: u32, max_batch: u32) -> Limits {
    Limits {
        kind: Kind::Dsa,
        size: 128,
        threshold,
        max_batch: std::num::NonZeroU32::new(max_batch),
        max_transfer: 1 << 21,
        operations: Operations([u64::MAX; 4]),
        version: 0x100,
        capabilities: Capabilities::FIRST_DSA,
    }
}

impl Fake {
    pub(super) fn new(limits: Limits, pace: Pace) -> Self {
        let state = State {
            pace,
            answers: VecDeque::new(),
            refuses_batches: false,
            statuses: Vec::new(),
            taken: Vec::new(),
            most_taken: 0,
            submissions: 0,
            now: 0,
            closed: 0,
        };
        Self {
            limits,
            state: Mutex::new(state),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Addresses of all records that are still to be written.
    pub(super) fn in_hand(&self) -> HashSet<u64> {
        let state = self.state();
        let records = state.taken.iter().flat_map(|(_, descriptor)| {
            let members = State::members(descriptor).map(|member| member.record);
            members.chain([descriptor.record])
        });
        records.collect()
    }

    /// Completes the descriptor that was taken as the `index`th of those in hand.
    pub(super) fn complete(&self, index: usize) {
        let mut state = self.state();
        let (_, descriptor) = state.taken.remove(index);
        state.run(&descriptor);
    }
}

impl Submit for Fake {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    unsafe fn submit(&self, descriptors: &[Descriptor]) -> Submitted {
        let mut state = self.state();
        state.submissions += 1;
        let (most, refusal) = match state.answers.pop_front() {
            _ if state.closed > 0 => (0, Some(Refusal::Closed)),
            Some(answer) => answer,
            None => (usize::MAX, None),
        };
        let mut accepted = 0;
        let mut said = refusal;
        for descriptor in descriptors.iter().take(most) {
            if state.refuses_batches && descriptor.opcode() == opcode::BATCH {
                said = Some(Refusal::Invalid);
                break;
            }
            if state.taken.len() == self.limits.threshold as usize {
                said = Some(Refusal::Full);
                break;
            }
            accepted += 1;
            let now = state.now;
            if let Pace::AtOnce = state.pace {
                state.run(descriptor);
            } else {
                state.taken.push((now, *descriptor));
                state.most_taken = state.most_taken.max(state.taken.len());
            }
        }
        Submitted {
            accepted,
            refusal: if accepted == descriptors.len() {
                None
            } else {
                said
            },
        }
    }

    fn now(&self) -> Duration {
        Duration::from_nanos(self.state().now)
    }

    fn pause(&self, record: &Record, deadline: Duration) {
        let mut state = self.state();
        if record.status() != 0 {
            return;
        }
        let deadline = u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX);
        let Pace::After(nanos) = state.pace else {
            state.now = state.now.max(deadline);
            return;
        };
        // The next completion, or the deadline.
        let next = state.taken.iter().map(|(since, _)| since + nanos).min();
        state.now = state.now.max(next.unwrap_or(deadline).min(deadline));
        let now = state.now;
        // The latest first.
        while let Some(index) = state
            .taken
            .iter()
            .rposition(|(since, _)| since + nanos <= now)
        {
            let (_, descriptor) = state.taken.remove(index);
            state.run(&descriptor);
        }
    }

    fn close(&self) {
        let mut state = self.state();
        state.closed += 1;
        while let Some((_, descriptor)) = state.taken.pop() {
            state.run(&descriptor);
        }
    }
}

impl State {
    /// Executes `descriptor`, which is to write records.
    fn run(&self, descriptor: &Descriptor) {
        let status = self
            .statuses
            .iter()
            .find(|(address, _)| *address == descriptor.address_1);
        let status = status.map_or(1, |(_, status)| *status);
        if descriptor.opcode() != opcode::BATCH {
            // The result identifies the descriptor.
            write(
                descriptor.record,
                [status, descriptor.address_1.to_le_bytes()[0]],
                0,
            );
            return;
        }
        let mut all = 1;
        // The last one first.
        for member in Self::members(descriptor).rev() {
            assert_ne!(member.opcode(), opcode::BATCH);
            self.run(&member);
            let status = self
                .statuses
                .iter()
                .find(|(address, _)| *address == member.address_1);
            if status.is_some_and(|(_, status)| *status != 1) {
                all = 5;
            }
        }
        write(descriptor.record, [all, 0], descriptor.size);
    }

    /// The list of a batch; nothing for any other descriptor.
    fn members(descriptor: &Descriptor) -> impl DoubleEndedIterator<Item = Descriptor> + use<> {
        let (list, count) = match descriptor.opcode() {
            opcode::BATCH => (descriptor.address_1, descriptor.size as usize),
            _ => (0, 0),
        };
        let list: *const Descriptor = ptr::with_exposed_provenance(usize::try_from(list).unwrap());
        // SAFETY: a list of so many descriptors, which is not written before the batch is complete.
        (0..count).map(move |index| unsafe { list.add(index).read() })
    }
}

/// Writes a record as a device does: status last. A status of zero is not written at all.
pub(super) fn write(record: u64, [status, result]: [u8; 2], completed: u32) {
    if status == 0 {
        return;
    }
    let words: *mut u64 = ptr::with_exposed_provenance_mut(usize::try_from(record).unwrap());
    assert!(words.addr().is_multiple_of(64) && !words.is_null());
    let first = u64::from(status) | u64::from(result) << 8 | u64::from(completed) << 32;
    // SAFETY: a record of the arena, which is mapped until the queue is closed, and consists of atomics.
    let (last, first_word) = unsafe {
        (
            AtomicU64::from_ptr(words.add(1)),
            AtomicU64::from_ptr(words),
        )
    };
    last.store(record, Ordering::Relaxed);
    first_word.store(first, Ordering::Release);
}
