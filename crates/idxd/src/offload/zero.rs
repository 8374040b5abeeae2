//! Finds zero pages, with a DSA and the processor in parallel.
//!
//! ```text
//!   pages      0    1    2    3   …                       …   n-2  n-1
//!              └── processor, from the front ──>    <── device, from the back ──┘
//!                                            they meet
//! ```
//! The device gets the last pages of a batch in reverse order. When the caller wants the verdicts, the processor goes
//! through the pages from the front: it uses the device's verdict where there is one, and checks the page itself where
//! there is none yet. So a batch never takes longer than without a device. If the caller had other work in the meantime,
//! all verdicts are there, and the processor checks no page.
//!
//! The device's share of a batch depends on its progress with earlier batches: submitting pages that the processor then
//! overtakes is wasted work.

use std::{num::NonZeroU32, sync::Arc, time::Duration};

use thiserror::Error;

use super::{Devices, OffloadCounters, devices::Pending};
use crate::{Slot, dsa, status::SUCCESS};

/// Finds zero pages, for one thread.
#[derive(Debug)]
pub struct ZeroScanner {
    devices: Arc<Devices>,
    page_bytes: u32,
    /// Fraction of a batch that goes to a device.
    share: f32,
    /// Next increase of the fraction.
    raise: f32,
    /// One in this number of pages that a device calls zero is checked by the processor.
    check_one_in: Option<NonZeroU32>,
    until_check: u32,
    /// Overtaken batches whose records the device may still write.
    late: Vec<Late>,
}

/// A batch in progress; see [`ZeroScanner::start`].
#[derive(Debug, Default)]
#[must_use]
pub struct Batch {
    pending: Option<Pending>,
    /// Number of pages of the batch.
    pages: usize,
}

/// A device has repeatedly reported a page as zero that is not.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error(
    "a DSA reported a page as zero that is not, and {unchecked} more of its verdicts were not checked: \
     do not use it, and repeat what was done with its verdicts"
)]
pub struct WrongVerdict {
    /// Verdicts of devices that the processor has not checked.
    pub unchecked: u64,
}

#[derive(Debug)]
struct Late {
    pending: Pending,
    deadline: Duration,
}

/// Fewest pages that are worth a submission.
const FEWEST: usize = 8;

/// Increase of the device's share after a batch that it finished in time: by one page of a batch of 128, and by one page
/// more after each further batch. A larger step wastes work where many processes share the devices; after a short delay
/// of the device, the share recovers fast enough.
const RAISE: f32 = 1.0 / 128.0;

/// Time after which a batch counts as lost. Devices take microseconds.
const TIMEOUT: Duration = Duration::from_millis(500);

/// Most late batches; with more, devices get no new ones.
const MOST_LATE: usize = 4;

/// Number of times that device and processor check a page before the device is called wrong. If a guest writes to the page
/// all the time, the two differ each time with a probability of a quarter at most.
const CONFIRMATIONS: usize = 8;

/// Time for the device to confirm.
const CONFIRMATION: Duration = Duration::from_millis(5);

/// Pages that the processor checks before it reads the queue's clock, which lets modelled devices proceed. Reading the clock
/// costs as much as checking a page.
const LOOKS: u64 = 16;

impl ZeroScanner {
    /// For pages of `page_bytes` bytes, with `devices`. The processor checks one in `check_one_in` of the pages that a
    /// device calls zero.
    pub fn new(devices: Arc<Devices>, page_bytes: u32, check_one_in: Option<NonZeroU32>) -> Self {
        Self {
            devices,
            page_bytes,
            share: 1.0,
            raise: RAISE,
            check_one_in,
            until_check: 0,
            late: Vec::with_capacity(MOST_LATE + 1),
        }
    }

    /// Submits the pages at these addresses to a device, and returns at once. Pages that are not mapped should be left out:
    /// a device can only report a fault, and the processor has to check them anyway.
    ///
    /// The memory may change or be unmapped meanwhile; then the verdicts are undefined.
    pub fn start(&mut self, pages: &[u64]) -> Batch {
        self.forget_late();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a part of a length"
        )]
        let wanted = ((pages.len() as f32 * self.share) as usize).max(FEWEST);
        let pending = if wanted > pages.len() || self.late.len() > MOST_LATE {
            None
        } else {
            self.submit(&pages[pages.len() - wanted..])
        };
        let pages = pages.len();
        Batch { pending, pages }
    }

    /// Verdicts on the batch of [`start`](Self::start): whether each page is zero. `is_zero` lets the processor check the
    /// page with this index. Pages beyond the length of `verdicts` are ignored.
    ///
    /// # Errors
    /// If a device has certainly given a wrong verdict. The verdicts of this batch are right even then, but earlier ones may
    /// be wrong.
    pub fn finish(
        &mut self,
        batch: Batch,
        pages: &[u64],
        is_zero: &mut dyn FnMut(usize) -> bool,
        verdicts: &mut [bool],
    ) -> Result<(), WrongVerdict> {
        let most = verdicts.len().min(pages.len());
        let verdicts = &mut verdicts[..most];
        // The results of the device do not belong to a batch of another length.
        let Some(pending) = batch.pending.filter(|_| batch.pages == pages.len()) else {
            look(verdicts, is_zero);
            self.devices.counters().add(OffloadCounters {
                refused: most as u64,
                ..OffloadCounters::default()
            });
            return Ok(());
        };
        let first = pages.len().saturating_sub(pending.flight.statuses().len());
        let (front, back) = verdicts.split_at_mut(first.min(most));
        look(front, is_zero);
        let mut done = OffloadCounters::default();
        let (mut wrong, mut over) = (false, None);
        // The list has the last page first.
        let answer = pending.flight.statuses().rev();
        for (page, (verdict, answer)) in (first..).zip(back.iter_mut().zip(answer)) {
            match answer {
                (SUCCESS, EQUAL) => {
                    *verdict = true;
                    done.by_device += 1;
                    if self.is_check_due() {
                        done.checked += 1;
                        *verdict = is_zero(page);
                        wrong |=
                            !*verdict && self.is_wrong(pending.member, pages[page], page, is_zero);
                    }
                }
                (SUCCESS, _) => {
                    *verdict = false;
                    done.by_device += 1;
                }
                (PENDING, _) if !*over.get_or_insert_with(|| pending.flight.is_done()) => {
                    *verdict = is_zero(page);
                    if done.overtaken % LOOKS == 0 {
                        self.devices.now(pending.member);
                    }
                    done.overtaken += 1;
                }
                // Includes members that a failed batch has left out.
                _ => {
                    *verdict = is_zero(page);
                    done.failed += 1;
                }
            }
        }
        self.adapt(&done, pending.member, pages.len());
        done.overtaken += front.len() as u64;
        self.devices.counters().add(done);
        self.keep_if_late(pending);
        if !wrong {
            return Ok(());
        }
        let work = self.devices.work();
        Err(WrongVerdict {
            unchecked: work.by_device.saturating_sub(work.checked),
        })
    }

    /// Submits `pages` to a device, the last one first, as many as it accepts at once.
    fn submit(&self, pages: &[u64]) -> Option<Pending> {
        // SAFETY: comparisons write to nothing but their records, which are the slot's.
        unsafe { self.devices.submit(&mut |slot| self.fill(slot, pages)) }
    }

    fn fill(&self, slot: &mut Slot, pages: &[u64]) -> usize {
        let list = slot.descriptors_mut();
        for (descriptor, page) in list.iter_mut().zip(pages.iter().rev()) {
            *descriptor = dsa::compare_pattern(*page, self.page_bytes, 0, 0);
        }
        pages.len().min(list.len())
    }

    /// Lowers the device's share if pages were overtaken, and raises it otherwise.
    fn adapt(&mut self, done: &OffloadCounters, member: usize, pages: usize) {
        if done.by_device > 0 {
            self.devices.record_success(member);
        } else if done.overtaken + done.failed > 0 {
            self.devices.record_failure(member);
        }
        if done.overtaken == 0 {
            self.share = (self.share + self.raise).min(1.0);
            self.raise += RAISE;
            return;
        }
        self.raise = RAISE;
        #[expect(clippy::cast_precision_loss, reason = "a part of a length")]
        let reached = (done.by_device + done.failed) as f32 / pages.max(1) as f32;
        self.share = 0.75 * self.share + 0.25 * reached;
    }

    /// Keeps a late batch: its slot belongs to the device until the batch is done, or counts as lost.
    fn keep_if_late(&mut self, pending: Pending) {
        let Pending { member, flight } = pending;
        if let Err(flight) = flight.poll() {
            let deadline = self.devices.now(member) + TIMEOUT;
            let pending = Pending { member, flight };
            self.late.push(Late { pending, deadline });
        }
    }

    fn forget_late(&mut self) {
        let mut index = 0;
        while let Some(Late { pending, deadline }) = self.late.get(index) {
            if pending.flight.is_done() || self.devices.now(pending.member) >= *deadline {
                let late = self.late.swap_remove(index);
                // After its deadline it counts as a timeout; its result is not needed any more.
                drop(late.pending.flight.wait(late.deadline));
            } else {
                index += 1;
            }
        }
    }

    fn is_check_due(&mut self) -> bool {
        let Some(one_in) = self.check_one_in else {
            return false;
        };
        let due = self.until_check == 0;
        self.until_check = if due { one_in.get() } else { self.until_check } - 1;
        due
    }

    /// Whether the device keeps reporting a page as zero that is not. A single difference proves nothing: the page may have
    /// been zero when the device read it.
    fn is_wrong(
        &self,
        member: usize,
        address: u64,
        page: usize,
        is_zero: &mut dyn FnMut(usize) -> bool,
    ) -> bool {
        (0..CONFIRMATIONS).all(|_| self.says_zero(member, address) && !is_zero(page))
    }

    /// Checks the page with the same queue again.
    fn says_zero(&self, member: usize, address: u64) -> bool {
        let Some(mut slot) = self.devices.slot(member) else {
            return false;
        };
        let count = self.fill(&mut slot, &[address]);
        // SAFETY: a comparison writes to nothing but its record, which is the slot's.
        let Ok(flight) = (unsafe { slot.submit(count) }) else {
            return false;
        };
        let outcome = flight.wait(self.devices.now(member) + CONFIRMATION);
        outcome.is_ok_and(|outcome| outcome.status_and_result(0) == (SUCCESS, EQUAL))
    }
}

/// The processor's verdicts on the first pages.
fn look(verdicts: &mut [bool], is_zero: &mut dyn FnMut(usize) -> bool) {
    for (page, verdict) in verdicts.iter_mut().enumerate() {
        *verdict = is_zero(page);
    }
}

/// Status of an operation that is not done (`linux/idxd.h`).
const PENDING: u8 = 0x00;
/// Result of a comparison.
const EQUAL: u8 = 0;
