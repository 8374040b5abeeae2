//! The policy of pre-copy: after each round, whether to send another round, switch over, slow the guest down, or
//! give up. No clock and no I/O: figures of rounds in, a [`NextStep`] out.
//!
//! The duration of a round is proportional to the pages that the guest dirtied during the previous round. So rounds get shorter
//! as long as pages move faster than the guest dirties them, and eventually the rest fits into the downtime limit. Otherwise
//! only auto-converge or a longer limit helps.

use std::time::Duration;

use vamoose_link::Snapshot;

use super::SourceConfig;
use crate::Switchover;

/// Steps of the vCPUs' throttle, in percent of the time for which they are stopped. The defaults are QEMU's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AutoConverge {
    /// The first.
    pub initial: u8,
    /// What each further one adds.
    pub increment: u8,
    /// The highest, at most 99.
    pub max: u8,
}

impl Default for AutoConverge {
    fn default() -> Self {
        Self {
            initial: 20,
            increment: 10,
            max: 99,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NextStep {
    NextRound,
    /// Nothing is dirty, and the VMM does not want to switch over: wait for a moment before the next round.
    Wait,
    /// Stop the vCPUs for this percentage of the time, then send the next round.
    Throttle(u8),
    /// Pause the guest and send the rest.
    SwitchOver,
    GiveUp,
}

#[derive(Debug)]
pub(super) struct Convergence {
    page_size: usize,
    downtime_limit: Duration,
    timeout: Option<Duration>,
    auto_converge: Option<AutoConverge>,
    /// The guest's present throttle, in percent.
    pub(super) throttle: u8,
    pub(super) rates: Rates,
}

/// How fast memory moves and how fast the guest writes it, per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Rates {
    /// Bytes of normal pages; 0 until it is known.
    pub(super) page_bytes: f64,
    pub(super) wire_bytes: f64,
    /// Pages sent, normal and zero.
    pub(super) pages: f64,
    pub(super) dirty_pages: f64,
    /// Normal pages of the last round.
    last_normal: u64,
}

/// A round that is smaller and shorter than this does not measure the link: round trips and scheduling dominate.
const MIN_SAMPLE: u64 = 4 << 20;
const MIN_SAMPLE_TIME: Duration = Duration::from_millis(200);

/// Bytes per second, until a round was long enough to measure: a tenth of a slow link, so that a guest is not paused for
/// a guess.
const UNKNOWN_BANDWIDTH: f64 = 1e6;

/// Part of the downtime limit that the last round may take: device state, two answers and scheduling need time too.
const LAST_ROUND_SHARE: f64 = 0.7;

impl Convergence {
    pub(super) fn new(config: &SourceConfig, page_size: usize) -> Self {
        Self {
            page_size,
            downtime_limit: config.downtime_limit,
            timeout: config.timeout,
            auto_converge: config.auto_converge,
            throttle: 0,
            rates: Rates::default(),
        }
    }

    /// Records a round that has arrived: `sent` took `took`, from the first page to the destination's acknowledgement.
    pub(super) fn round_sent(&mut self, sent: Sent, took: Duration) {
        let seconds = took.as_secs_f64().max(1e-6);
        let rates = &mut self.rates;
        rates.last_normal = sent.normal_pages;
        let is_measure = sent.page_bytes >= MIN_SAMPLE || took >= MIN_SAMPLE_TIME;
        if sent.page_bytes > 0 && (is_measure || rates.page_bytes == 0.0) {
            rates.page_bytes = sent.page_bytes as f64 / seconds;
            rates.wire_bytes = sent.wire_bytes as f64 / seconds;
            rates.pages = (sent.normal_pages + sent.zero_pages) as f64 / seconds;
        }
    }

    /// Records the pages that the guest has dirtied during a round.
    pub(super) fn guest_dirtied(&mut self, pages: usize, within: Duration) {
        self.rates.dirty_pages = pages as f64 / within.as_secs_f64().max(1e-6);
    }

    /// The next step with `dirty` pages left and the VMM's wish, `elapsed` after the migration's beginning.
    pub(super) fn decide(&mut self, dirty: usize, wish: Switchover, elapsed: Duration) -> NextStep {
        let switch_over = match wish {
            Switchover::Auto => self.fits(dirty),
            Switchover::Force => true,
            Switchover::Forbid => false,
        };
        if switch_over {
            return NextStep::SwitchOver;
        }
        if self.timeout.is_some_and(|timeout| timeout <= elapsed) {
            return NextStep::GiveUp;
        }
        if let Some(percent) = self.next_throttle(dirty) {
            self.throttle = percent;
            return NextStep::Throttle(percent);
        }
        match dirty {
            0 => NextStep::Wait,
            _ => NextStep::NextRound,
        }
    }

    /// How long `dirty` pages take, if none of them is zero.
    pub(super) fn time_for(&self, dirty: usize) -> Option<Duration> {
        let bandwidth = self.rates.page_bytes.max(UNKNOWN_BANDWIDTH);
        Duration::try_from_secs_f64((dirty * self.page_size) as f64 / bandwidth).ok()
    }

    /// Ends the throttle. Returns whether the guest was throttled.
    pub(super) fn end_throttle(&mut self) -> bool {
        std::mem::take(&mut self.throttle) > 0
    }

    /// Whether `dirty` pages can be sent within the downtime limit.
    fn fits(&self, dirty: usize) -> bool {
        let limit = self.downtime_limit.mul_f64(LAST_ROUND_SHARE);
        dirty == 0 || self.time_for(dirty).is_some_and(|time| time <= limit)
    }

    /// The next throttle, if the guest has dirtied more than half as many pages as the last round sent.
    fn next_throttle(&self, dirty: usize) -> Option<u8> {
        let steps = self.auto_converge?;
        if dirty as u64 <= self.rates.last_normal / 2 || self.throttle >= steps.max {
            return None;
        }
        Some(match self.throttle {
            0 => steps.initial,
            now => now.saturating_add(steps.increment).min(steps.max),
        })
    }
}

/// The amount of data that a round has sent.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sent {
    pub(super) normal_pages: u64,
    pub(super) zero_pages: u64,
    /// Bytes of the normal pages.
    pub(super) page_bytes: u64,
    pub(super) wire_bytes: u64,
}

impl Sent {
    /// The difference of two snapshots.
    pub(super) fn between(before: &Snapshot, after: &Snapshot) -> Self {
        Self {
            normal_pages: after.normal_pages - before.normal_pages,
            zero_pages: after.zero_pages - before.zero_pages,
            page_bytes: after.page_bytes - before.page_bytes,
            wire_bytes: after.wire_bytes - before.wire_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use vamoose_codec::{Engines, Settings};

    use super::*;
    use NextStep::{GiveUp, NextRound, SwitchOver, Throttle, Wait};

    const PAGE: usize = 4096;
    /// 10 MB/s.
    const ROUND: Sent = Sent {
        normal_pages: 2441,
        zero_pages: 0,
        page_bytes: 10_000_000,
        wire_bytes: 5_000_000,
    };
    const SECOND: Duration = Duration::from_secs(1);

    fn policy(change: impl FnOnce(&mut SourceConfig)) -> Convergence {
        let settings = Settings::new(multifd::Method::None, None).unwrap();
        let mut config = SourceConfig::new(Engines::software(settings));
        config.downtime_limit = Duration::from_millis(100);
        change(&mut config);
        let mut policy = Convergence::new(&config, PAGE);
        policy.round_sent(ROUND, SECOND);
        policy
    }

    #[test]
    fn the_guest_is_paused_when_the_rest_fits_into_the_downtime_limit() {
        // 70 % of 100 ms at 10 MB/s: 170 pages.
        for (dirty, wish, expected) in [
            (0, Switchover::Auto, SwitchOver),
            (170, Switchover::Auto, SwitchOver),
            (171, Switchover::Auto, NextRound),
            (usize::MAX / PAGE, Switchover::Auto, NextRound),
            (usize::MAX / PAGE, Switchover::Force, SwitchOver),
            (1, Switchover::Forbid, NextRound),
            (0, Switchover::Forbid, Wait),
        ] {
            let decision = policy(|_| {}).decide(dirty, wish, SECOND);
            assert_eq!(decision, expected, "{dirty} pages, {wish:?}");
        }
    }

    #[test]
    fn migration_fails_at_the_timeout_unless_the_rest_fits() {
        let mut policy = policy(|config| {
            config.timeout = Some(SECOND);
            config.auto_converge = Some(AutoConverge::default());
        });
        let early = Duration::from_millis(999);
        for (dirty, wish, elapsed, expected) in [
            (1000, Switchover::Auto, early, NextRound),
            (1000, Switchover::Auto, SECOND, GiveUp),
            (9000, Switchover::Auto, SECOND, GiveUp),
            (0, Switchover::Forbid, SECOND, GiveUp),
            (1000, Switchover::Force, SECOND, SwitchOver),
            (10, Switchover::Auto, SECOND, SwitchOver),
        ] {
            let decision = policy.decide(dirty, wish, elapsed);
            assert_eq!(decision, expected, "{dirty} pages, {wish:?}, {elapsed:?}");
        }
    }

    #[test]
    fn a_guest_that_dirties_more_than_half_of_a_round_is_throttled_in_steps() {
        let steps = |initial, increment, max| {
            Some(AutoConverge {
                initial,
                increment,
                max,
            })
        };
        for (auto_converge, dirty, expected) in [
            (None, 2441, vec![NextRound; 3]),
            (steps(20, 10, 99), 1220, vec![NextRound; 3]),
            (
                steps(20, 10, 99),
                1221,
                vec![Throttle(20), Throttle(30), Throttle(40)],
            ),
            (
                steps(50, 60, 99),
                2441,
                vec![Throttle(50), Throttle(99), NextRound],
            ),
            (
                steps(30, 10, 30),
                2441,
                vec![Throttle(30), NextRound, NextRound],
            ),
        ] {
            let mut policy = policy(|config| config.auto_converge = auto_converge);
            for expected in expected {
                let decision = policy.decide(dirty, Switchover::Auto, SECOND);
                assert_eq!(decision, expected, "{dirty} pages, {auto_converge:?}");
            }
        }
    }

    #[test]
    fn only_a_round_that_is_long_enough_is_measured() {
        let mut policy = policy(|_| {});
        let measured = policy.rates;
        assert_eq!((measured.page_bytes, measured.wire_bytes), (1e7, 5e6));
        let short = Sent {
            normal_pages: 10,
            page_bytes: MIN_SAMPLE - 1,
            ..ROUND
        };
        policy.round_sent(short, MIN_SAMPLE_TIME - Duration::from_millis(1));
        assert_eq!(policy.rates.page_bytes, measured.page_bytes);
        // On a slow link a round is long for all that: what is written again and again may be harder to encode than the rest.
        policy.round_sent(short, SECOND);
        assert_eq!(policy.rates.page_bytes, short.page_bytes as f64);
        policy.round_sent(Sent::default(), SECOND);
        assert_eq!(policy.rates.page_bytes, short.page_bytes as f64);
        policy.round_sent(ROUND, SECOND * 2);
        assert_eq!(policy.rates.page_bytes, 5e6);
        // No time at all is no division by zero.
        policy.guest_dirtied(5, Duration::ZERO);
        assert!(policy.rates.dirty_pages.is_finite());
    }

    #[test]
    fn a_guest_is_not_paused_for_a_guess() {
        let mut policy = policy(|_| {});
        policy.rates = Rates::default();
        // 70 % of 100 ms at 1 MB/s.
        assert_eq!(policy.decide(17, Switchover::Auto, SECOND), SwitchOver);
        assert_eq!(policy.decide(18, Switchover::Auto, SECOND), NextRound);
        // The first round counts, however short.
        let short = Sent {
            normal_pages: 1,
            page_bytes: 4096,
            ..Sent::default()
        };
        policy.round_sent(short, Duration::from_micros(1));
        assert_eq!(policy.decide(10_000, Switchover::Auto, SECOND), SwitchOver);
    }
}
