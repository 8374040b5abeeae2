//! Everything that chance decides, from a seed: the same seed decides the same.

use std::ops::Range;
use std::time::Duration;

/// The splitmix64 sequence.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// What an experiment draws from: its own sequence, whatever the others draw.
    pub(crate) fn of_experiment(seed: u64, number: u64) -> Self {
        let mut random = Self(seed);
        let own = random.next() ^ number.wrapping_mul(GOLDEN);
        random.0 = own;
        random.next();
        random
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`; 0 if there is none.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next().checked_rem(limit).unwrap_or(0)
    }

    pub(crate) fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.below(range.end.saturating_sub(range.start))
    }

    pub(crate) fn millis(&mut self, range: Range<u64>) -> Duration {
        Duration::from_millis(self.within(range))
    }

    pub(crate) fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }

    /// One of `choices`, of which there must be one at least.
    pub(crate) fn choose<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.index(choices.len())]
    }

    /// One of `choices`, each as often as its weight says.
    pub(crate) fn weighted<T: Copy>(&mut self, choices: &[(u64, T)]) -> T {
        let total = choices.iter().map(|(weight, _)| weight).sum();
        let mut left = self.below(total);
        for (weight, choice) in choices {
            if left < *weight {
                return *choice;
            }
            left -= weight;
        }
        choices[choices.len() - 1].1
    }

    fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).unwrap_or(0)
    }
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_experiment_draws_the_same_again_and_others_do_not() {
        let draw = |seed, number| Random::of_experiment(seed, number).next();
        assert_eq!(draw(1, 7), draw(1, 7));
        assert_ne!(draw(1, 7), draw(1, 8));
        assert_ne!(draw(1, 7), draw(2, 7));
    }

    #[test]
    fn weights_decide() {
        let mut random = Random::of_experiment(1, 1);
        let mut counts = [0; 3];
        for _ in 0..1000 {
            counts[random.weighted(&[(1, 0), (0, 1), (9, 2)])] += 1;
        }
        assert!(
            counts[0] > 50 && counts[1] == 0 && counts[2] > 800,
            "{counts:?}"
        );
        assert!((3..5).contains(&random.within(3..5)));
        assert_eq!(random.below(0), 0);
    }
}
