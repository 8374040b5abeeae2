//! A reader's use of the cache: restores packets with differences.

use std::sync::Arc;

use multifd::{Layout, Method};
use vamoose_codec::{
    Decoder,
    delta::{Mark, read_table},
};
use vm_memory::VolatileSlice;

use super::{DeltaError, DeltaReceiver};
use crate::{pages::PageSink, reader::PayloadFault};

/// Restores the packets of one reader.
pub(crate) struct Incoming {
    versions: Versions,
    page_size: usize,
    marks: Vec<Mark>,
    /// Restored pages, before they are copied to guest memory.
    scratch: Vec<u8>,
    /// The versions that a packet's pages are encoded after.
    earlier: Vec<u8>,
}

/// Where earlier versions are.
pub(crate) enum Versions {
    Slots(Arc<DeltaReceiver>),
    /// In guest memory, where the pages go.
    Memory,
}

impl Incoming {
    pub(crate) fn new(versions: Versions, layout: Layout) -> Self {
        Self {
            versions,
            page_size: layout.page_size(),
            marks: Vec::with_capacity(layout.page_count()),
            scratch: Vec::new(),
            earlier: Vec::new(),
        }
    }

    /// A packet has arrived, with differences or without.
    pub(crate) fn note_arrival(&self) {
        if let Versions::Slots(slots) = &self.versions {
            slots.note_arrival();
        }
    }

    /// Decodes a packet and restores its pages, whose checksum is `sum`, and returns their checksum. Pages for guest memory are left
    /// in [`decoded`](Self::decoded). The cache stays as it is until the checksum is right, so decoding again is harmless.
    pub(crate) fn decode(
        &mut self,
        decoder: &mut Decoder,
        payload: &[u8],
        sink: &mut PageSink<'_>,
        sum: u32,
    ) -> Result<u32, PayloadFault> {
        let len = sink.len();
        self.marks.clear();
        self.marks.resize(len / self.page_size, Mark::Plain);
        let (method, payload) = read_table(payload, &mut self.marks)?;
        let mut scratch = std::mem::take(&mut self.scratch);
        let restored = match sink {
            PageSink::Own(pages) => self.restore(decoder, (method, payload), pages, None, sum),
            PageSink::Guest(slices) => {
                scratch.resize(len, 0);
                let memory = Some(&**slices);
                self.restore(decoder, (method, payload), &mut scratch, memory, sum)
            }
        };
        self.scratch = scratch;
        restored
    }

    /// The pages that were [decoded](Self::decode) for guest memory.
    pub(crate) fn decoded(&self) -> &[u8] {
        &self.scratch
    }

    fn restore(
        &mut self,
        decoder: &mut Decoder,
        (method, payload): (Method, &[u8]),
        pages: &mut [u8],
        memory: Option<&[VolatileSlice<'_>]>,
        sum: u32,
    ) -> Result<u32, PayloadFault> {
        let mut found = 0;
        for _ in 0..ATTEMPTS {
            self.earlier.clear();
            match (&self.versions, memory) {
                (Versions::Slots(slots), _) => slots.versions(&self.marks, &mut self.earlier)?,
                (Versions::Memory, Some(memory)) => {
                    versions_in_place(&self.marks, memory, self.page_size, &mut self.earlier)?;
                }
                (Versions::Memory, None) => return Err(DeltaError::Unexpected.into()),
            }
            decoder.decode_after(method, payload, &self.earlier, pages)?;
            found = crc32c::crc32c(pages);
            if found == sum {
                if let Versions::Slots(slots) = &self.versions {
                    slots.keep(&self.marks, pages)?;
                }
                break;
            }
        }
        Ok(found)
    }
}

/// Attempts at decoding a packet whose checksum is wrong.
const ATTEMPTS: usize = 2;

/// Appends the versions in `memory` that pages are encoded after: slices of whole pages, in the order of the pages.
fn versions_in_place(
    marks: &[Mark],
    memory: &[VolatileSlice<'_>],
    page_size: usize,
    earlier: &mut Vec<u8>,
) -> Result<(), DeltaError> {
    let (mut slices, mut skip) = (memory.iter(), 0);
    let mut slice = slices.next();
    for mark in marks {
        while slice.is_some_and(|slice| skip >= slice.len()) {
            (slice, skip) = (slices.next(), 0);
        }
        let here = slice.and_then(|slice| slice.subslice(skip, page_size).ok());
        skip += page_size;
        match mark {
            Mark::Plain => {}
            Mark::InPlace => {
                let end = earlier.len();
                earlier.resize(end + page_size, 0);
                here.ok_or(DeltaError::Unexpected)?
                    .copy_to(&mut earlier[end..]);
            }
            Mark::Store(_) | Mark::Difference(_) => return Err(DeltaError::Unexpected),
        }
    }
    Ok(())
}
