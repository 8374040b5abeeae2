//! Decides when a vCPU writes next, and how many pages, from the rate, the throttle, and the time within which the vCPU must pause.
//!
//! A vCPU works in batches and is paused only between two batches. This module has no clock.

use std::time::{Duration, Instant};

/// Duration of a batch: short enough for a pause, long compared with entering and leaving the guest.
const BATCH: Duration = Duration::from_millis(1);

/// Maximum number of pages in a batch. When a dirty log is switched on, a page takes microseconds instead of nanoseconds, and the
/// current batch must still end after a few milliseconds.
const MOST: u32 = 1024;

/// Maximum time whose writes are in one batch, so that a low rate is even.
const RATE_SLICE: Duration = Duration::from_millis(5);

/// Delay that a vCPU may catch up: about the latency of the scheduler on a busy host.
const BURST: Duration = Duration::from_millis(10);

/// The shortest rest for which the vCPU sleeps.
const SHORTEST_REST: Duration = Duration::from_millis(1);

/// Paces one vCPU.
#[derive(Debug)]
pub(crate) struct Pacer {
    /// Writes per second.
    rate: Option<f64>,
    batch: u32,
    /// When the rate allows the next batch.
    due: Option<Instant>,
    /// When the rest that the throttle demands ends.
    rests_until: Option<Instant>,
    /// Rest that is due, but too short so far to sleep.
    owed: Duration,
}

impl Pacer {
    /// `rate` is in writes per second, more than 0.
    pub(crate) fn new(rate: Option<f64>) -> Self {
        let mut pacer = Self {
            rate,
            batch: 0,
            due: None,
            rests_until: None,
            owed: Duration::ZERO,
        };
        pacer.set_batch(16.0);
        pacer
    }

    /// How many pages to write at once, at least 1.
    pub(crate) fn batch(&self) -> u32 {
        self.batch
    }

    /// How long to wait before the next batch.
    pub(crate) fn delay(&self, now: Instant) -> Option<Duration> {
        let next = self.due.max(self.rests_until)?;
        next.checked_duration_since(now)
            .filter(|delay| !delay.is_zero())
    }

    /// Records a batch of [`batch`](Self::batch) writes, of a vCPU throttled by `percent` (0 to 99).
    pub(crate) fn ran(&mut self, started: Instant, ended: Instant, percent: u8) {
        let took = ended.saturating_duration_since(started);
        if let Some(rate) = self.rate {
            let oldest = started.checked_sub(BURST).unwrap_or(started);
            let due = self.due.map_or(started, |due| due.max(oldest));
            self.due = due.checked_add(Duration::from_secs_f64(f64::from(self.batch) / rate));
        }
        let percent = u32::from(percent.min(99));
        self.owed += took * percent / (100 - percent);
        if self.owed >= SHORTEST_REST {
            self.rests_until = ended.checked_add(self.owed);
            self.owed = Duration::ZERO;
        }
        let fitting = f64::from(self.batch) * BATCH.as_secs_f64() / took.as_secs_f64().max(1e-9);
        self.set_batch(fitting.min(f64::from(self.batch) * 2.0));
    }

    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "clamped to 1..=MOST"
    )]
    fn set_batch(&mut self, pages: f64) {
        let by_rate = self.rate.map_or(f64::INFINITY, |rate| {
            (rate * RATE_SLICE.as_secs_f64()).floor()
        });
        self.batch = pages.min(by_rate).clamp(1.0, f64::from(MOST)) as u32;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Runs `batches` of pages that take `page` each; gives pages, time running, time in all.
    fn simulate(
        pacer: &mut Pacer,
        batches: u32,
        page: Duration,
        percent: u8,
        late: Duration,
    ) -> (u64, Duration, Duration) {
        let begin = Instant::now();
        let (mut now, mut pages, mut running) = (begin, 0, Duration::ZERO);
        for _ in 0..batches {
            if let Some(delay) = pacer.delay(now) {
                now += delay + late;
            }
            assert_eq!(pacer.delay(now), None);
            let took = page * pacer.batch();
            pages += u64::from(pacer.batch());
            pacer.ran(now, now + took, percent);
            now += took;
            running += took;
        }
        (pages, running, now - begin)
    }

    #[test]
    fn without_rate_and_throttle_there_is_no_rest() {
        let page = Duration::from_nanos(200);
        let (_, running, all) = simulate(&mut Pacer::new(None), 1000, page, 0, Duration::ZERO);
        assert_eq!(running, all);
    }

    #[test]
    fn batches_shrink_when_pages_become_slow_and_grow_again() {
        let mut pacer = Pacer::new(None);
        let mut settle = |nanos| {
            simulate(
                &mut pacer,
                50,
                Duration::from_nanos(nanos),
                0,
                Duration::ZERO,
            );
            pacer.batch()
        };
        assert_eq!(settle(100), MOST);
        assert!((200..=300).contains(&settle(4000)));
        assert_eq!(settle(10_000_000), 1);
        assert_eq!(settle(0), MOST);
    }

    proptest! {
        #[test]
        fn throttled_by_percent_it_runs_the_rest(percent in 1_u8..=99, nanos in 50_u64..100_000) {
            let mut pacer = Pacer::new(None);
            let (_, running, all) =
                simulate(&mut pacer, 20_000, Duration::from_nanos(nanos), percent, Duration::ZERO);
            let share = running.as_secs_f64() / all.as_secs_f64();
            let wanted = 1.0 - f64::from(percent) / 100.0;
            prop_assert!((share - wanted).abs() < 0.02, "{share} instead of {wanted}");
        }

        #[test]
        fn the_rate_is_a_ceiling_that_is_reached(
            rate in 1_f64..2_000_000.0,
            nanos in 50_u64..400,
            late in 0_u64..5_000,
        ) {
            let mut pacer = Pacer::new(Some(rate));
            let late = Duration::from_micros(late);
            let (pages, _, all) = simulate(&mut pacer, 2000, Duration::from_nanos(nanos), 0, late);
            let ceiling = rate * (all + BURST).as_secs_f64() + f64::from(MOST);
            prop_assert!(pages as f64 <= ceiling, "{pages} pages in {all:?}");
            // Late by less than the burst, it catches up.
            let reached = rate * all.as_secs_f64() * 0.9;
            let can = 1e9 / nanos as f64;
            prop_assert!(rate > can * 0.5 || pages as f64 >= reached, "{pages} pages in {all:?}");
        }
    }
}
