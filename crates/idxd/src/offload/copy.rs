//! Copies pages, with a DSA and the processor in parallel.
//!
//! The device gets the last pages, about as many as it completed in the past while the processor copied the others. A
//! late device cannot be ignored, because it would overwrite newer bytes with old ones. So the copier waits for the device,
//! and closes the work queue if it does not answer, which ends everything that was submitted. From then on the processor
//! copies. Other threads that use the queue lose their operations in flight, and repeat them on the processor.
//!
//! A page that was never touched is a page fault for the device. Touching it first does not pay: then the page is in the
//! processor's cache, and copying takes the processor less time than a submission. So a device that met only faults is
//! skipped for a while, because the next pages are likely to be untouched as well. The processor repeats a copy that a fault
//! ended: a move is one page, so none of it was copied.

use std::{sync::Arc, time::Duration};

use super::{Devices, OffloadCounters, devices::Pending};
use crate::{InFlight, Outcome, Slot, dsa, status::SUCCESS};

/// Bytes to be copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Address of the source.
    pub source: u64,
    /// Address of the destination, which must not overlap with any other source or destination.
    pub destination: u64,
    /// Number of bytes, at least one, within one page.
    pub len: u32,
}

/// Copies pages, for one thread.
#[derive(Debug)]
pub struct Copier {
    devices: Arc<Devices>,
    /// Fraction of the moves that a device gets.
    share: f32,
}

/// Bounds of the device's fraction.
const LEAST_SHARE: f32 = 1.0 / 16.0;
const MOST_SHARE: f32 = 15.0 / 16.0;

/// Change of the device's fraction.
const STEP: f32 = 1.0 / 32.0;

/// Fewest moves that are worth a submission.
const FEWEST: usize = 8;

/// Time after which the work queue is closed. A device takes two milliseconds for everything in a full queue.
const TIMEOUT: Duration = Duration::from_millis(100);

/// A device is skipped for a while if the copier has waited for it longer than this, and longer than the processor worked.
const TOO_LONG: Duration = Duration::from_micros(20);

impl Copier {
    /// Copies with the DSAs of `devices` and the processor.
    pub fn new(devices: Arc<Devices>) -> Self {
        Self {
            devices,
            share: 0.5,
        }
    }

    /// Does all `moves`, in any order. `by_processor` does the move with this index.
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
        let Some(writing) = (unsafe { submit(&self.devices, &moves[moves.len() - wanted..]) })
        else {
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
                // Also if the descriptor's own record is missing, the device no longer writes: a batch completes only after all its
                // descriptors (DSA specification, version 3.0, section 3.8).
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
/// That of [`Copier::copy`], until the returned value is dropped.
unsafe fn submit<'a>(devices: &'a Devices, moves: &[Move]) -> Option<Writing<'a>> {
    if moves.len() < FEWEST {
        return None;
    }
    // SAFETY: as the caller promises.
    let Pending { member, flight } = unsafe { devices.submit(&mut |slot| fill(slot, moves)) }?;
    Some(Writing {
        devices,
        member,
        flight: Some(flight),
    })
}

/// Writes as many moves as fit, the last one first: moves that the queue does not accept are then next to the processor's.
fn fill(slot: &mut Slot, moves: &[Move]) -> usize {
    let list = slot.descriptors_mut();
    for (descriptor, of) in list.iter_mut().zip(moves.iter().rev()) {
        *descriptor = dsa::memmove(of.source, of.destination, of.len, 0);
    }
    moves.len().min(list.len())
}

/// Moves in flight, which write to the caller's memory. They end before the caller continues, even after a panic.
struct Writing<'a> {
    devices: &'a Devices,
    member: usize,
    /// Taken when the moves have ended.
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

    /// The device's answer, if there is one, and whether it was late. The processor has worked from `beginning` until now.
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
