//! Clients of the programs in a guest, and what they tell.

pub(crate) mod pgbench;
pub(crate) mod redis;

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::record::Service;

/// Clients at work.
pub(crate) trait Clients {
    /// Ends them and gives what they have noticed, in any order.
    ///
    /// # Errors
    /// When one has failed before: a connection broke, or an answer was wrong.
    fn end(self: Box<Self>) -> Result<Vec<Sample>>;
}

/// A request that was answered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    /// When the answer had come.
    pub(crate) at: Instant,
    /// How long it took.
    pub(crate) latency: Duration,
}

impl Service {
    /// Of those samples whose answers came in the span.
    pub(crate) fn of(samples: &[Sample], from: Instant, to: Instant) -> Self {
        let inside = samples.iter().filter(|it| (from..to).contains(&it.at));
        let mut millis: Vec<f64> = inside.map(|it| it.latency.as_secs_f64() * 1e3).collect();
        millis.sort_by(f64::total_cmp);
        let seconds = (to - from).as_secs_f64();
        let of_hundred = |part: usize| {
            let at = (millis.len() * part / 100).min(millis.len().saturating_sub(1));
            millis.get(at).copied()
        };
        Self {
            rate: millis.len() as f64 / seconds,
            p50: of_hundred(50),
            p99: of_hundred(99),
            longest: of_hundred(100),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_span() {
        let start = Instant::now();
        let sample = |number: u64| Sample {
            at: start + Duration::from_millis(number),
            latency: Duration::from_millis(number),
        };
        let samples: Vec<_> = (0..300).map(sample).collect();
        let span = |from, to| {
            let at = |millis| start + Duration::from_millis(millis);
            Service::of(&samples, at(from), at(to))
        };
        let middle = span(100, 200);
        assert_eq!(
            (middle.p50, middle.p99, middle.longest),
            (Some(150.0), Some(199.0), Some(199.0))
        );
        assert!((middle.rate - 1000.0).abs() < 1e-6);
        assert_eq!(span(300, 400).p50, None);
    }
}
