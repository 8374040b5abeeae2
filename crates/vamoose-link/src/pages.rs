//! Where the pages of a packet come from and go to: a buffer of this process, or guest memory.

use vm_memory::VolatileSlice;

use crate::memory::{self, Left};

/// Where a packet's pages come from.
pub(crate) enum PageSource<'a> {
    /// The first bytes of a buffer, which may be exchanged for another buffer.
    Own(&'a mut Box<[u8]>, usize),
    /// Guest memory.
    Guest(&'a [VolatileSlice<'a>]),
}

/// Where a packet's pages go.
pub(crate) enum PageSink<'a> {
    /// A buffer as long as the pages.
    Own(&'a mut [u8]),
    /// Guest memory.
    Guest(&'a [VolatileSlice<'a>]),
}

impl PageSource<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Own(_, len) => *len,
            Self::Guest(slices) => memory::total_len(slices),
        }
    }

    /// The pages as a slice. Guest memory is copied to `copy` first, which grows as needed.
    pub(crate) fn gather<'b>(&'b mut self, copy: &'b mut Vec<u8>) -> &'b mut [u8] {
        match self {
            Self::Own(buffer, len) => &mut buffer[..*len],
            Self::Guest(slices) => {
                let len = memory::total_len(slices);
                if copy.len() < len {
                    copy.resize(len, 0);
                }
                copy_from_guest(slices, copy)
            }
        }
    }
}

impl PageSink<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Own(pages) => pages.len(),
            Self::Guest(slices) => memory::total_len(slices),
        }
    }

    /// CRC-32C of the pages as they are there now.
    pub(crate) fn sum(&self) -> u32 {
        match self {
            Self::Own(pages) => crc32c::crc32c(pages),
            Self::Guest(slices) => {
                let (left, mut sum) = (Left::new(&[], slices), 0);
                left.for_each(left.bytes(), &mut |bytes| {
                    sum = crc32c::crc32c_append(sum, bytes);
                });
                sum
            }
        }
    }
}

/// Copies `slices`, back to back, to the beginning of `copy`, which must be long enough.
pub(crate) fn copy_from_guest<'a>(
    slices: &[VolatileSlice<'_>],
    copy: &'a mut [u8],
) -> &'a mut [u8] {
    let mut end = 0;
    for slice in slices {
        end += slice.copy_to(&mut copy[end..]);
    }
    &mut copy[..end]
}

/// Copies `bytes` to `slices`, back to back, by the processor.
pub(crate) fn copy_to_guest(bytes: &[u8], slices: &[VolatileSlice<'_>]) {
    let mut rest = bytes;
    for slice in slices {
        let (bytes, behind) = rest.split_at(slice.len());
        slice.copy_from(bytes);
        rest = behind;
    }
}
