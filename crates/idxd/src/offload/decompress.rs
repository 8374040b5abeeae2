//! Decompresses raw DEFLATE streams to pages: on IAA, and on the processor where IAA is late.
//!
//! The device writes to the buffer of a slot, and the page is copied from there, because a late device must not write to a
//! page that is already in use. As with [compression](super::Compressor), the devices begin at the front and the processor
//! at the end.
//!
//! A payload as long as a page is the page itself and is not sent to a device, which might take it for a stream. A device
//! does not notice bytes after the last block of a stream; the page is correct nevertheless.

use std::sync::Arc;

use super::{
    Devices, OffloadCounters,
    compress::{Flights, address},
};
use crate::{
    Outcome, iaa,
    status::{IaaOutcome, SUCCESS},
};

/// Decompresses pages, for one thread.
#[derive(Debug)]
pub struct Decompressor {
    page_bytes: usize,
    flights: Flights,
}

impl Decompressor {
    /// For pages of `page_bytes` bytes, with the IAAs of `devices`. The slots' buffers must hold a page.
    pub fn new(devices: Arc<Devices>, page_bytes: usize) -> Self {
        Self {
            page_bytes,
            flights: Flights::new(devices),
        }
    }

    /// Fills `pages` from `streams`, one stream for each page. `by_processor` decompresses a stream to a page that no device
    /// has done, or that a device has rejected.
    ///
    /// # Errors
    /// The error of `by_processor`, of the first page for which it fails.
    #[expect(
        clippy::type_complexity,
        reason = "a name would not say more than the closure's own arguments"
    )]
    pub fn decompress<'a, E>(
        &mut self,
        streams: &dyn Fn(usize) -> &'a [u8],
        pages: &mut [u8],
        by_processor: &mut dyn FnMut(&[u8], &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let size = self.page_bytes;
        let count = pages.len() / size;
        let mut done = OffloadCounters::default();
        let (mut next, mut begun, mut tail) = (0, 0, count);
        let mut result = Ok(());
        let is_page = |stream: &[u8]| stream.len() == size;
        self.flights.begin();
        while next < tail && result.is_ok() {
            while begun < tail && (is_page(streams(begun)) || self.submit(streams(begun))) {
                begun += 1;
            }
            let stream = streams(next);
            let page = &mut pages[next * size..][..size];
            if is_page(stream) {
                result = by_processor(stream, page);
            } else if begun == next {
                result = by_processor(stream, page);
                done.refused += 1;
                begun += 1;
            } else if begun < tail && !self.flights.is_next_there() {
                tail -= 1;
                let stream = streams(tail);
                result = by_processor(stream, &mut pages[tail * size..][..size]);
                done.overtaken += u64::from(!is_page(stream));
                continue;
            } else {
                let outcome = self.flights.next();
                match outcome.as_ref().and_then(|outcome| decoded(outcome, size)) {
                    Some(bytes) => {
                        page.copy_from_slice(bytes);
                        done.by_device += 1;
                    }
                    None => {
                        result = by_processor(stream, page);
                        match outcome {
                            Some(_) => done.failed += 1,
                            None => done.overtaken += 1,
                        }
                    }
                }
            }
            next += 1;
        }
        // After an error the other pages are not needed.
        self.flights.begin();
        self.flights.devices.counters().add(done);
        result
    }

    fn submit(&mut self, stream: &[u8]) -> bool {
        let sizes = (u32::try_from(stream.len()), u32::try_from(self.page_bytes));
        let (Ok(size @ 1..), Ok(destination_size)) = sizes else {
            return false;
        };
        let source = address(stream);
        // SAFETY: decompression writes to the slot's buffer only, and no more than a page.
        unsafe {
            self.flights.submit(self.page_bytes, &mut |slot| {
                let decompress = iaa::Decompress {
                    source,
                    size,
                    destination: slot.buffer_address(),
                    destination_size,
                };
                iaa::decompress(decompress, 0).with(slot.limits().capabilities.cache_flag())
            })
        }
    }
}

/// The page, if the device has decompressed a whole one. How much of the stream was read is unknown: the record of a
/// complete operation has 0 bytes completed (IAA 2.1, 6.2.4).
fn decoded(outcome: &Outcome, page_bytes: usize) -> Option<&[u8]> {
    let answer = IaaOutcome::of(&outcome.image(0)?)?;
    let is_whole = usize::try_from(answer.output_size) == Ok(page_bytes);
    (answer.status == SUCCESS && is_whole).then(|| outcome.buffer(0..page_bytes))?
}
