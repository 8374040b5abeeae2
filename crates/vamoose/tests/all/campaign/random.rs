//! Random numbers from a seed.

use std::ops::Range;
use std::time::Duration;

use fastrand::Rng;

pub(crate) struct Random(Rng);

impl Random {
    /// The sequence of an experiment, independent of other experiments.
    pub(crate) fn of_experiment(seed: u64, number: u64) -> Self {
        let of_campaign = Rng::with_seed(seed).u64(..);
        Self(Rng::with_seed(of_campaign ^ number))
    }

    /// A number below `limit`, or 0.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0.u64(..limit.max(1))
    }

    pub(crate) fn millis(&mut self, range: Range<u64>) -> Duration {
        Duration::from_millis(self.0.u64(range))
    }

    pub(crate) fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }

    /// One of `choices`, which must not be empty.
    pub(crate) fn choose<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.0.usize(..choices.len())]
    }

    /// One of `choices` by weight.
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_experiment_draws_the_same_again_and_others_do_not() {
        let draw = |seed, number| Random::of_experiment(seed, number).below(u64::MAX);
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
        assert_eq!(random.below(0), 0);
    }
}
