//! Traffic for benchmarks: an even share of the zero pages is sent as normal ones.

pub(super) struct NormalPageRatio {
    percent: u8,
    sum: u8,
}

impl From<u8> for NormalPageRatio {
    fn from(percent: u8) -> Self {
        Self { percent, sum: 0 }
    }
}

impl NormalPageRatio {
    /// Makes `percent` of the pages that are zero by `verdicts` normal ones.
    pub(super) fn apply(&mut self, verdicts: &mut [bool]) {
        for verdict in verdicts.iter_mut().filter(|verdict| **verdict) {
            self.sum += self.percent;
            if self.sum >= 100 {
                self.sum -= 100;
                *verdict = false;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratio_is_kept_evenly() {
        for percent in [0, 1, 33, 50, 99, 100] {
            let mut ratio = NormalPageRatio::from(percent);
            let mut normal = 0;
            for _ in 0..10 {
                let mut verdicts = [true; 100];
                ratio.apply(&mut verdicts);
                normal += verdicts.iter().filter(|zero| !**zero).count();
            }
            assert_eq!(normal, usize::from(percent) * 10);
        }
    }
}
