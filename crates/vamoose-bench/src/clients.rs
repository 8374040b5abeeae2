//! Clients of the program in a guest.

pub(crate) mod redis;

use std::time::{Duration, Instant};

use crate::record::Service;

/// An answered request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    /// Time of the answer.
    pub(crate) at: Instant,
    /// Time from request to answer.
    pub(crate) latency: Duration,
}

impl Service {
    /// The service in a span of time.
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
