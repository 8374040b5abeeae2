//! Compresses each page to a raw DEFLATE stream: on IAA, and on the processor where IAA is late.
//!
//! ```text
//!   pages   0    1    2    3    4   …                            …   n-2  n-1
//!           out  out  └── IAA: one operation a page ──>     <── processor ──┘
//!                       └ the next to go out
//! ```
//! Pages go to the devices from the front, as many as their queues accept, and come out in order. If the next page is
//! not complete after a short wait, the processor compresses the last page that no device has begun. The processor also
//! compresses the pages that no queue accepts and, at the end, those that a device has not completed.
//!
//! A late device writes to the buffer of its slot, which is not reused until the device is done.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use super::{Devices, OffloadCounters, devices::Pending};
use crate::{
    Descriptor, Outcome, Slot,
    iaa::{self, CompressAecs},
    status::{IaaOutcome, SUCCESS},
};

/// Compresses pages, for one thread.
#[derive(Debug)]
pub struct Compressor {
    page_bytes: usize,
    /// The fixed codes. Devices read them at any time.
    aecs: Box<CompressAecs>,
    /// Streams of the pages that the processor has compressed, and their lengths: `None` for a raw page.
    side: Box<[u8]>,
    lengths: Vec<Option<usize>>,
    flights: Flights,
}

/// Compression by the processor: writes a page's stream to the buffer and returns its length, or `None` if the stream does
/// not fit.
pub type ByProcessor<'a> = dyn FnMut(&[u8], &mut [u8]) -> Option<usize> + 'a;

impl Compressor {
    /// For up to `pages` pages of `page_bytes` bytes at once, with the IAAs of `devices`. The slots' buffers must hold a
    /// page.
    pub fn new(devices: Arc<Devices>, page_bytes: usize, pages: usize) -> Self {
        Self {
            page_bytes,
            aecs: Box::new(CompressAecs::fixed()),
            side: vec![0; page_bytes * pages].into(),
            lengths: vec![None; pages],
            flights: Flights::new(devices),
        }
    }

    /// Compresses `pages` and emits their streams in order: `None` for a page that did not become shorter and must be sent
    /// raw. Ignores pages beyond the number given to [`new`](Self::new).
    pub fn compress(
        &mut self,
        pages: &[u8],
        by_processor: &mut ByProcessor<'_>,
        emit: &mut dyn FnMut(Option<&[u8]>),
    ) {
        let count = (pages.len() / self.page_bytes).min(self.lengths.len());
        let size = self.page_bytes;
        let page = |index: usize| &pages[index * size..][..size];
        self.flights.begin();
        let mut done = OffloadCounters::default();
        let (mut next, mut begun, mut tail) = (0, 0, count);
        while next < count {
            while begun < tail && self.submit(page(begun)) {
                begun += 1;
            }
            if next >= tail {
                self.emit_software_stream(next, emit);
            } else if begun == next {
                self.compress_in_software(next, page(next), by_processor);
                self.emit_software_stream(next, emit);
                done.refused += 1;
                begun += 1;
            } else if begun < tail && !self.flights.is_next_there() {
                tail -= 1;
                self.compress_in_software(tail, page(tail), by_processor);
                done.overtaken += 1;
                continue;
            } else {
                let outcome = self.flights.next();
                match outcome.as_ref().and_then(|outcome| stream(outcome, size)) {
                    Some(stream) => {
                        emit(stream);
                        done.by_device += 1;
                    }
                    None => {
                        self.compress_in_software(next, page(next), by_processor);
                        self.emit_software_stream(next, emit);
                        match outcome {
                            Some(_) => done.failed += 1,
                            None => done.overtaken += 1,
                        }
                    }
                }
            }
            next += 1;
        }
        self.flights.devices.counters().add(done);
    }

    fn submit(&mut self, page: &[u8]) -> bool {
        let Ok(size) = u32::try_from(page.len()) else {
            return false;
        };
        let (source, aecs) = (address(page), self.aecs.address());
        // SAFETY: compression writes to the slot's buffer only, and less than a page.
        unsafe {
            self.flights.submit(page.len(), &mut |slot| {
                let compress = iaa::Compress {
                    source,
                    size,
                    destination: slot.buffer_address(),
                    // A page that does not become shorter is sent raw.
                    destination_size: size.saturating_sub(1),
                    aecs,
                };
                iaa::compress(compress, 0).with(slot.limits().capabilities.cache_flag())
            })
        }
    }

    fn compress_in_software(
        &mut self,
        index: usize,
        page: &[u8],
        by_processor: &mut ByProcessor<'_>,
    ) {
        let buffer = &mut self.side[index * self.page_bytes..][..self.page_bytes - 1];
        let most = buffer.len();
        self.lengths[index] = by_processor(page, buffer).filter(|len| *len <= most);
    }

    fn emit_software_stream(&self, index: usize, emit: &mut dyn FnMut(Option<&[u8]>)) {
        let start = index * self.page_bytes;
        emit(self.lengths[index].map(|len| &self.side[start..][..len]));
    }
}

/// The device's stream of a page, or `Some(None)` if the stream is not shorter than the page. `None` if it failed.
#[expect(
    clippy::option_option,
    reason = "two different things that may be missing"
)]
fn stream(outcome: &Outcome, page_bytes: usize) -> Option<Option<&[u8]>> {
    let answer = IaaOutcome::of(&outcome.image(0)?)?;
    if answer.does_not_fit() {
        return Some(None);
    }
    let len = usize::try_from(answer.output_size).ok()?;
    let plausible = (1..page_bytes).contains(&len);
    (answer.status == SUCCESS && plausible).then(|| outcome.buffer(0..len).map(Some))?
}

/// Single operations in flight, the oldest first.
#[derive(Debug)]
pub(super) struct Flights {
    pub(super) devices: Arc<Devices>,
    pending: VecDeque<Pending>,
    /// Time to wait for the next operation if the processor has nothing else to do; zero after a late one.
    timeout: Duration,
}

/// Operations in flight for one caller: more than a device has engines, so that it never runs dry.
const DEPTH: usize = 32;

/// Time to wait for the next page in order. Then the processor does another page, which takes about ten times as long.
const TIMEOUT: Duration = Duration::from_micros(4);

/// Time to wait for all of the last pages together, when the processor could only do the same pages.
const LAST_PATIENCE: Duration = Duration::from_micros(100);

impl Flights {
    pub(super) fn new(devices: Arc<Devices>) -> Self {
        Self {
            devices,
            pending: VecDeque::with_capacity(DEPTH),
            timeout: LAST_PATIENCE,
        }
    }

    /// Forgets the operations of an earlier call.
    pub(super) fn begin(&mut self) {
        // Operations of a call that ended with a panic or an error: their slots come back when the device is done.
        self.pending.clear();
        self.timeout = LAST_PATIENCE;
    }

    /// Submits an operation to the next queue that accepts it. Returns whether one did.
    ///
    /// # Safety
    /// The operation writes to the slot's buffer only, and to no more than `capacity` bytes of it.
    pub(super) unsafe fn submit(
        &mut self,
        capacity: usize,
        operation: &mut dyn FnMut(&Slot) -> Descriptor,
    ) -> bool {
        if self.pending.len() == DEPTH {
            return false;
        }
        let mut fill = |slot: &mut Slot| {
            if slot.buffer_mut().len() < capacity {
                return 0;
            }
            let operation = operation(slot);
            let place = slot.descriptors_mut().first_mut();
            place.map(|place| *place = operation).map_or(0, |()| 1)
        };
        // SAFETY: as the caller promises.
        let pending = unsafe { self.devices.submit(&mut fill) };
        let taken = pending.is_some();
        self.pending.extend(pending);
        taken
    }

    /// Whether the oldest operation is done, or is done soon.
    pub(super) fn is_next_there(&mut self) -> bool {
        let Some(Pending { member, flight }) = self.pending.front_mut() else {
            return false;
        };
        flight.is_done() || flight.wait_a_little(self.devices.now(*member) + TIMEOUT)
    }

    /// The outcome of the oldest operation, or `None` if it takes too long: then its slot comes back when the device is
    /// done.
    pub(super) fn next(&mut self) -> Option<Outcome> {
        let Pending { member, mut flight } = self.pending.pop_front()?;
        let before = self.devices.now(member);
        if flight.is_done() || flight.wait_a_little(before + self.timeout) {
            self.devices.record_success(member);
        } else if !self.timeout.is_zero() {
            self.devices.record_failure(member);
        }
        let waited = self.devices.now(member).saturating_sub(before);
        self.timeout = self.timeout.saturating_sub(waited);
        flight.poll().ok()
    }
}

pub(super) fn address(bytes: &[u8]) -> u64 {
    bytes.as_ptr().expose_provenance() as u64
}
