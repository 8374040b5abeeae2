//! Guest memory: whether a page of it is zero, and giving it back to the system.

use std::{io, ops::Range};

use rustix::mm::{Advice, madvise};
use vm_memory::VolatileSlice;

use crate::mapping::Backing;

/// Whether every byte of `page` is zero, as far as it does not change meanwhile.
pub(crate) fn is_zero(page: &VolatileSlice<'_>) -> bool {
    let (guard, len) = (page.ptr_guard(), page.len());
    (0..len).step_by(ZEROS.len()).all(|start| {
        let len = ZEROS.len().min(len - start);
        // SAFETY: both areas can be read: the slice promises that for its whole length, and `start + len` is within
        // it; `ZEROS` has at least `len` bytes. The C library keeps neither. If the guest writes the page at
        // the same time, either result is allowed: the dirty log has it sent again.
        unsafe { libc::memcmp(guard.as_ptr().add(start).cast(), ZEROS.as_ptr().cast(), len) == 0 }
    })
}

/// Compared with each part of a page.
const ZEROS: [u8; 4096] = [0; 4096];

/// How memory of one kind is given back so that it certainly reads as zeros. madvise(2) succeeds for nearly every kind of memory
/// and advice, but does not always discard the content.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Punch {
    advice: Advice,
    /// Size and alignment of the areas that can be given back. Huge pages are aligned to their size in memory and in their file.
    unit: usize,
}

impl Punch {
    /// `None` for memory that keeps its content, or gets it back from a file or on demand.
    pub(crate) fn of(backing: Backing) -> Option<Self> {
        let (advice, unit) = match backing {
            Backing::Anonymous { page_size } => (Advice::LinuxDontNeed, page_size),
            // The hole is in the file, for all its users.
            Backing::SharedFile | Backing::SharedMemory => {
                (Advice::LinuxRemove, rustix::param::page_size())
            }
            Backing::SharedHuge { page_size } => (Advice::LinuxRemove, page_size),
            Backing::Other => return None,
        };
        unit.is_power_of_two().then_some(Self { advice, unit })
    }

    pub(crate) fn unit(self) -> usize {
        self.unit
    }

    /// The part of `addresses` that can be given back. The rest are pieces of huge pages: kernels before 6.0 leave some of them
    /// unchanged, without an error, and some kernels from 5.18 on give back their neighbours as well.
    pub(crate) fn whole_units(self, addresses: &Range<usize>) -> Range<usize> {
        let mask = self.unit - 1;
        let start = addresses.start.saturating_add(mask) & !mask;
        let end = addresses.end & !mask;
        start..end.max(start)
    }

    /// Gives the pages of `memory` back: they read as zeros, until they are written again.
    ///
    /// # Errors
    /// Where the system cannot do that with this memory (it may be locked), or `memory` is not made of
    /// [whole units](Self::whole_units). It may hold anything then.
    pub(crate) fn punch(self, memory: VolatileSlice<'_>) -> io::Result<()> {
        let guard = memory.ptr_guard_mut();
        let start = guard.as_ptr().addr();
        let addresses = start..start + memory.len();
        if self.whole_units(&addresses) != addresses {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: the slice is a part of a mapping of guest memory that outlives it, and there is no Rust reference
        // into guest memory. It is made of whole pages of the mapping, so that no kernel rounds it to anything else.
        // To the guest and to us this is as a write of zeros.
        unsafe { madvise(guard.as_ptr().cast(), memory.len(), self.advice)? };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_huge_pages_are_given_back() {
        let huge = Punch::of(Backing::SharedHuge {
            page_size: 0x20_0000,
        })
        .unwrap();
        for (addresses, expected) in [
            (0x20_0000..0x60_0000, 0x20_0000..0x60_0000),
            (0x20_1000..0x60_0000, 0x40_0000..0x60_0000),
            (0x20_0000..0x5f_f000, 0x20_0000..0x40_0000),
            (0x1f_f000..0x60_1000, 0x20_0000..0x60_0000),
        ] {
            assert_eq!(huge.whole_units(&addresses), expected, "{addresses:#x?}");
        }
        for nothing in [
            0x20_1000..0x3f_f000,
            0x20_1000..0x20_2000,
            0x3f_f000..0x40_1000,
        ] {
            assert!(huge.whole_units(&nothing).is_empty(), "{nothing:#x?}");
        }
    }

    #[test]
    fn memory_of_which_nothing_is_known_is_not_given_back() {
        assert!(Punch::of(Backing::Other).is_none());
        assert!(Punch::of(Backing::Anonymous { page_size: 0 }).is_none());
    }
}
