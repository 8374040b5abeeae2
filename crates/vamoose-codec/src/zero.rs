//! Which pages are all zeros: those need no payload, only their offset.

mod dsa;

use vm_memory::VolatileSlice;

pub use dsa::DsaScan;
pub use idxd::offload::WrongVerdict;

use crate::ffi;

/// Finds the zero pages of batches, in whatever way this host does that best.
///
/// ```text
///   start(1)  start(2)  finish(1)  …  start(3)  finish(2)  …     finish(n)
///                          └ encode 1, send 1      └ encode 2, send 2
/// ```
/// What another device does of a batch it does between the two calls, while the caller has other work.
pub trait ZeroScan: Send {
    /// Begins to look at `pages`, the next batch. Does not wait.
    fn start(&mut self, pages: &[VolatileSlice<'_>]) {
        let _ = pages;
    }

    /// Sets, for each of `pages`, whether every byte of it is zero. They are the pages of the first batch that was
    /// started and has not been finished. A page that is written between start and end gets either verdict: whoever
    /// sends pages of a running guest has to learn of that by its dirty log.
    ///
    /// Pages without a verdict of their own, because there are fewer `verdicts`, are not looked at.
    ///
    /// # Errors
    /// When a device has been caught judging wrong. Verdicts of earlier batches may be wrong then.
    fn finish(
        &mut self,
        pages: &[VolatileSlice<'_>],
        verdicts: &mut [bool],
    ) -> Result<(), WrongVerdict>;
}

/// The processor's own scan: all of it at the end of a batch, as the pages are going to be read anyway then. It stops
/// at a page's first byte that is not zero.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuScan;

impl CpuScan {
    /// Whether every byte of `page` is zero.
    pub fn is_zero(page: &VolatileSlice<'_>) -> bool {
        ffi::memory::is_zero(page)
    }
}

impl ZeroScan for CpuScan {
    fn finish(
        &mut self,
        pages: &[VolatileSlice<'_>],
        verdicts: &mut [bool],
    ) -> Result<(), WrongVerdict> {
        for (page, verdict) in pages.iter().zip(verdicts) {
            *verdict = Self::is_zero(page);
        }
        Ok(())
    }
}

/// Whether every byte of `page` is zero. Stops at the first that is not.
///
/// A comparison with zeros is the standard library's, which is the C library's and as fast as memory:
/// about 13 ms of CPU time per GB where all is zero, and next to nothing where it is not.
pub fn is_zero(page: &[u8]) -> bool {
    page.chunks(ZEROS.len())
        .all(|part| part == &ZEROS[..part.len()])
}

/// What a part of a page is compared with.
pub(crate) const ZEROS: [u8; 4096] = [0; 4096];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bit_anywhere_makes_the_difference() {
        for len in [1024, 4096, 65536] {
            let mut page = vec![0; len];
            assert!(is_zero(&page));
            assert_eq!(scanned(&mut page), [true]);
            for at in (0..len).step_by(97).chain([len - 1]) {
                page[at] = 0x10;
                assert!(!is_zero(&page), "{at} of {len}");
                assert_eq!(scanned(&mut page), [false], "{at} of {len}");
                page[at] = 0;
            }
        }
    }

    #[test]
    fn every_page_has_its_verdict() {
        let mut pages = vec![0; 3 * 4096];
        pages[4096 + 17] = 1;
        let memory = VolatileSlice::from(&mut pages[..]);
        let slices = [0, 1, 2].map(|page| memory.subslice(page * 4096, 4096).unwrap());
        let mut verdicts = [false; 3];
        CpuScan.finish(&slices, &mut verdicts).unwrap();
        assert_eq!(verdicts, [true, false, true]);
    }

    fn scanned(page: &mut [u8]) -> [bool; 1] {
        let mut verdict = [false];
        CpuScan
            .finish(&[VolatileSlice::from(page)], &mut verdict)
            .unwrap();
        verdict
    }
}
