//! Traffic for benchmarks: an even share of the zero pages is sent as normal ones.

use vamoose_codec::{WrongVerdict, ZeroScan};
use vm_memory::VolatileSlice;

/// `scan`, but of the zero pages it finds `percent` count as normal ones.
pub(super) fn wrap(scan: Box<dyn ZeroScan>, percent: u8) -> Box<dyn ZeroScan> {
    Box::new(NormalPageRatio {
        scan,
        percent,
        sum: 0,
    })
}

struct NormalPageRatio {
    scan: Box<dyn ZeroScan>,
    percent: u8,
    sum: u8,
}

impl ZeroScan for NormalPageRatio {
    fn start(&mut self, pages: &[VolatileSlice<'_>]) {
        self.scan.start(pages);
    }

    fn finish(
        &mut self,
        pages: &[VolatileSlice<'_>],
        verdicts: &mut [bool],
    ) -> Result<(), WrongVerdict> {
        self.scan.finish(pages, verdicts)?;
        for verdict in verdicts.iter_mut().filter(|verdict| **verdict) {
            self.sum += self.percent;
            if self.sum >= 100 {
                self.sum -= 100;
                *verdict = false;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use vamoose_codec::CpuScan;

    use super::*;

    #[test]
    fn the_ratio_is_kept_evenly() {
        let mut zeros = [0; 4096];
        let pages = vec![VolatileSlice::from(&mut zeros[..]); 100];
        for percent in [0, 1, 33, 50, 99, 100] {
            let mut scan = wrap(Box::new(CpuScan), percent);
            let mut normal = 0;
            for _ in 0..10 {
                let mut verdicts = [false; 100];
                scan.start(&pages);
                scan.finish(&pages, &mut verdicts).unwrap();
                normal += verdicts.iter().filter(|zero| !**zero).count();
            }
            assert_eq!(normal, usize::from(percent) * 10);
        }
    }
}
