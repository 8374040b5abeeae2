//! Copies pages, with a DSA and the processor in parallel.
//!
//! The device gets the last pages, about as many as it completed in the past while the processor copied the others. A
//! device that may still write cannot be ignored: it would overwrite newer bytes with old ones. So the copier waits for
//! it, and closes the work queue if the device does not answer, which ends everything that was submitted; from then on
//! the processor copies. Other users of the queue lose what they have in flight, and do it on the processor too.
//!
//! Pages that were never touched fault. Touching them first does not pay: then the kernel's zeros are in the processor's
//! cache, where the processor copies faster than it submits. So a device that met only faults is left alone for a
//! while, because the next pages are likely to be untouched as well. A copy that a fault ended is not continued: a move
//! is one page, and so is a fault, so that nothing of it was done.

use std::{sync::Arc, time::Duration};

use super::{Devices, OffloadCounters, devices::Pending};
use crate::{InFlight, Outcome, Slot, dsa, status::SUCCESS};

/// Bytes to be copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Address that they are at.
    pub source: u64,
    /// Address that they are to be at. It overlaps with no source or destination, of this move or another.
    pub destination: u64,
    /// How many; not zero.
    pub len: u32,
}

/// Copies, for one thread.
#[derive(Debug)]
pub struct Copier {
    devices: Arc<Devices>,
    /// Part of the moves that a device gets.
    share: f32,
}

/// The device gets at least so much, and at most.
const LEAST_SHARE: f32 = 1.0 / 16.0;
const MOST_SHARE: f32 = 15.0 / 16.0;

/// By how much the device's part changes.
const STEP: f32 = 1.0 / 32.0;

/// Fewer moves are not worth a submission.
const FEWEST: usize = 8;

/// After this the work queue is closed. Two milliseconds are what a device takes for all that fits a full queue.
const TIMEOUT: Duration = Duration::from_millis(100);

/// A device that is waited for so long, and longer than the processor has worked meanwhile, is left alone for a while.
const TOO_LONG: Duration = Duration::from_micros(20);

impl Copier {
    /// By the DSAs of `devices`, and the processor.
    pub fn new(devices: Arc<Devices>) -> Self {
        Self {
            devices,
            share: 0.5,
        }
    }

    /// Does all of `moves`, in any order. `by_processor` does one, by its index.
    ///
    /// # Safety
    /// The destinations are writable memory of this process to which no one has a reference until this returns.
    pub unsafe fn copy(&mut self, moves: &[Move], by_processor: &mut dyn FnMut(usize)) {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a part of a length"
        )]
        let wanted = ((moves.len() as f32 * self.share) as usize).max(FEWEST.min(moves.len()));
        // SAFETY: as the caller promises: this does not return before the device is done, or the queue closed.
        let Some(writing) = (unsafe { give(&self.devices, &moves[moves.len() - wanted..]) }) else {
            (0..moves.len()).for_each(by_processor);
            self.devices.counters().add(OffloadCounters {
                refused: moves.len() as u64,
                ..OffloadCounters::default()
            });
            return;
        };
        let first = moves.len() - writing.count();
        let beginning = writing.now();
        (0..first).for_each(&mut *by_processor);
        let step = if writing.is_done() { STEP } else { -STEP };
        self.share = (self.share + step).clamp(LEAST_SHARE, MOST_SHARE);
        let mut done = OffloadCounters {
            overtaken: first as u64,
            ..OffloadCounters::default()
        };
        let member = writing.member;
        let (outcome, is_late) = writing.finish(beginning);
        for index in first..moves.len() {
            let status = outcome
                .as_ref()
                .map(|outcome| outcome.status_and_result(moves.len() - 1 - index).0);
            match status {
                Some(SUCCESS) => done.by_device += 1,
                // Where a record is lost nothing is written any more either: a batch is complete after its members (DSA
                // 3.0, 3.8).
                Some(_) => {
                    by_processor(index);
                    done.failed += 1;
                }
                None => {
                    by_processor(index);
                    done.overtaken += 1;
                }
            }
        }
        if is_late || done.by_device == 0 {
            self.devices.record_failure(member);
        } else {
            self.devices.record_success(member);
        }
        self.devices.counters().add(done);
    }
}

/// # Safety
/// As for [`Copier::copy`], until what this returns is dropped.
unsafe fn give<'a>(devices: &'a Devices, moves: &[Move]) -> Option<Writing<'a>> {
    if moves.len() < FEWEST {
        return None;
    }
    // SAFETY: as the caller promises.
    let Pending { member, flight } = unsafe { devices.give(&mut |slot| fill(slot, moves)) }?;
    Some(Writing {
        devices,
        member,
        flight: Some(flight),
    })
}

/// As many as fit, the last one first: what the queue does not take of them is next to the processor's.
fn fill(slot: &mut Slot, moves: &[Move]) -> usize {
    let list = slot.descriptors_mut();
    for (descriptor, of) in list.iter_mut().zip(moves.iter().rev()) {
        *descriptor = dsa::memmove(of.source, of.destination, of.len, 0);
    }
    moves.len().min(list.len())
}

/// What a device writes to the caller's memory. It ends before the caller continues, also if that panics.
struct Writing<'a> {
    devices: &'a Devices,
    member: usize,
    /// There until it has ended.
    flight: Option<InFlight>,
}

impl Writing<'_> {
    fn count(&self) -> usize {
        let flight = self.flight.as_ref();
        flight.map_or(0, |flight| flight.statuses().len())
    }

    fn now(&self) -> Duration {
        self.devices.now(self.member)
    }

    fn is_done(&self) -> bool {
        self.flight.as_ref().is_some_and(InFlight::is_done)
    }

    /// The device's answer, if it is there, and whether it was late. The processor has worked from `beginning` until
    /// now.
    fn finish(mut self, beginning: Duration) -> (Option<Outcome>, bool) {
        let waiting = self.now();
        let outcome = self.end();
        let waited = self.now().saturating_sub(waiting);
        let is_late = waited > TOO_LONG.max(waiting.saturating_sub(beginning));
        (outcome, is_late)
    }

    fn end(&mut self) -> Option<Outcome> {
        let deadline = self.now() + TIMEOUT;
        self.flight.take()?.wait_or_close(deadline).ok()
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.end();
    }
}
