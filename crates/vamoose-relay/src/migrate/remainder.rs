//! How much memory may be left when the source QEMU stops its guest.
//!
//! ```text
//!  stop ── packets of QEMU and relay ── what has been written ── the remainder ── load, commit ──> runs
//!          one a channel and one more    25 ms, a round trip      crate `convergence`
//!  └────────────────────────────────── the downtime limit ──────────────────────────────────┘
//! ```
//!
//! QEMU stops a guest when sending the rest takes less than the limit, at the bandwidth of the last 100 ms. QEMU counts bytes as
//! sent that still wait in sockets, and on a slow link 100 ms are about one packet. So the relay gives QEMU the bandwidth to
//! assume (`avail-switchover-bandwidth`, from QEMU 8.2 on), by which the rest within the limit is the allowed one. An older QEMU
//! keeps its own estimate, with a lower `downtime-limit`.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use convergence::{Convergence, Policy};
use multifd::Layout;
use serde_json::Value;
use vamoose_link::Counters;

/// The rule for one migration. It has neither a clock nor a QEMU.
#[derive(Debug)]
pub(super) struct Remainder {
    pub(super) convergence: Convergence,
    /// QEMU's parameter, from 8.2 on.
    downtime_limit: Duration,
    page_size: usize,
    /// Bytes of pages that QEMU and its relay have taken and not yet put on the link.
    under_way: f64,
    samples: VecDeque<(Instant, Counters)>,
    /// Bytes of pages per second, once known.
    rate: Option<f64>,
    round: u64,
    /// The link's time for the pages that were dirty when the round began.
    rest: Duration,
    told: f64,
}

/// What is known of a migration at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    pub(super) now: Instant,
    /// Since the migration's beginning.
    pub(super) elapsed: Duration,
    pub(super) moved: Counters,
    pub(super) round_trip: Duration,
    pub(super) round: u64,
    /// Bytes that are dirty.
    pub(super) remaining: u64,
}

/// What to tell a QEMU: one of the two.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Allowed {
    /// In bytes per second.
    pub(super) bandwidth: u64,
    /// In milliseconds.
    pub(super) downtime_limit: u64,
}

/// Time over which the rate is measured.
const WINDOW: Duration = Duration::from_secs(1);

/// Shorter times are too short for a rate.
const LEAST_WINDOW: Duration = Duration::from_millis(200);

/// How long bytes wait in a connection before they are in flight.
const UNSENT: Duration = Duration::from_millis(25);

/// Time for the device state, for loading it, and for the commit.
const ENDING: Duration = Duration::from_millis(25);

/// Least share of the limit for the remainder. The migration of a guest that writes little has to end even where data under way
/// takes the whole limit.
const LEAST_SHARE: f64 = 0.25;

/// Bytes that may be left as long as the rate is unknown, and the rate that this assumes.
const AT_FIRST: f64 = 256e3;
const RATE_AT_FIRST: f64 = 50e6;

/// A migration whose rate is unknown for so many rounds moves zero pages only. Then QEMU decides by its own estimate.
const UNMEASURED: u64 = 4;

/// More than any guest has.
const EVERYTHING: f64 = 1e15;

/// QEMU's longest downtime limit, in milliseconds.
const LONGEST_LIMIT: f64 = 2e6;

/// QEMU divides the bandwidth by 1000 and drops the rest.
const LEAST_BANDWIDTH: f64 = 1e3;

impl Remainder {
    /// The rule for a migration over `channels`.
    pub(super) fn new(policy: Policy, channels: u8, layout: Layout) -> Self {
        // Each channel has one packet, partly in the relay and partly in QEMU, and QEMU has filled one more.
        let packets = f64::from(channels) + 1.0;
        Self {
            convergence: Convergence::new(policy),
            downtime_limit: policy.downtime_limit,
            page_size: layout.page_size(),
            under_way: packets * layout.packet_bytes() as f64,
            samples: VecDeque::new(),
            rate: None,
            round: 0,
            rest: Duration::ZERO,
            told: AT_FIRST,
        }
    }

    /// What to tell QEMU before the migration.
    pub(super) fn at_first(downtime_limit: Duration) -> Allowed {
        Allowed::of(AT_FIRST, RATE_AT_FIRST, downtime_limit)
    }

    /// What to tell QEMU now. `None` unless it has changed.
    pub(super) fn after(&mut self, seen: &Seen) -> Option<Allowed> {
        let is_new = seen.round > self.round;
        self.round = seen.round;
        if is_new {
            // Between two rounds QEMU collects dirty pages, and the link may be idle.
            self.samples.clear();
        }
        self.measure(seen);
        let bytes = match (self.rate, self.convergence.limit()) {
            (_, Duration::MAX) => EVERYTHING,
            (None, _) if seen.round < UNMEASURED => AT_FIRST,
            (None, _) => 0.0,
            (Some(rate), limit) => {
                let most = limit.saturating_sub(self.reserved(rate, seen.round_trip));
                let most = most.max(limit.mul_f64(LEAST_SHARE));
                if is_new {
                    self.rest = seconds(seen.remaining as f64 / rate);
                    self.convergence.round_begins(self.rest, most, seen.elapsed);
                }
                self.convergence.allowed(most).as_secs_f64() * rate
            }
        };
        if (bytes - self.told).abs() <= self.told / 20.0 {
            return None;
        }
        self.told = bytes;
        let rate = self.rate.unwrap_or(RATE_AT_FIRST);
        Some(Allowed::of(bytes, rate, self.downtime_limit))
    }

    /// Puts the expected downtime into `info`, whose own value follows from what QEMU was told.
    pub(super) fn correct(&self, info: &mut Value, round_trip: Duration) {
        if let (Some(expected), Some(rate)) = (info.get_mut("expected-downtime"), self.rate) {
            let downtime = self.rest.saturating_add(self.reserved(rate, round_trip));
            *expected = vamoose_link::millis(downtime).into();
        }
    }

    /// Bytes of pages that the link moves in a second; 0 if unknown.
    pub(super) fn rate(&self) -> u64 {
        whole(self.rate.unwrap_or(0.0))
    }

    /// The part of the downtime that is not for the remainder.
    fn reserved(&self, rate: f64, round_trip: Duration) -> Duration {
        let under_way = seconds(self.under_way / rate);
        under_way.saturating_add(UNSENT + ENDING + round_trip)
    }

    /// Measures the rate over the samples, all of one round. Samples with mostly zero pages say nothing about normal pages.
    fn measure(&mut self, seen: &Seen) {
        let is_old = |at: &Instant| seen.now.saturating_duration_since(*at) > WINDOW;
        while self.samples.get(1).is_some_and(|(at, _)| is_old(at)) {
            self.samples.pop_front();
        }
        self.samples.push_back((seen.now, seen.moved));
        let Some((since, before)) = self.samples.front() else {
            return;
        };
        let time = seen.now.saturating_duration_since(*since);
        let bytes = seen.moved.page_bytes.saturating_sub(before.page_bytes);
        let zero_pages = seen.moved.zero_pages.saturating_sub(before.zero_pages);
        let zeros = zero_pages.saturating_mul(self.page_size as u64);
        if time >= LEAST_WINDOW && bytes > 0 && bytes >= zeros / 3 {
            self.rate = Some(bytes as f64 / time.as_secs_f64());
        }
    }
}

impl Allowed {
    /// Lets QEMU stop its guest with `bytes` left. At 0, QEMU decides by its own estimate.
    fn of(bytes: f64, rate: f64, downtime_limit: Duration) -> Self {
        let limit = downtime_limit.as_secs_f64().max(1e-3);
        let own = bytes == 0.0;
        let time = if own { limit } else { bytes / rate } * 1e3;
        let bandwidth = (bytes / limit).max(LEAST_BANDWIDTH);
        Self {
            bandwidth: if own { 0 } else { whole(bandwidth) },
            downtime_limit: whole(time.clamp(1.0, LONGEST_LIMIT)),
        }
    }
}

/// The longest time there is, if that is shorter.
fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "rates and times are positive, and the cast saturates"
)]
fn whole(number: f64) -> u64 {
    number as u64
}

#[cfg(test)]
mod tests {
    use convergence::OnTimeout;

    use super::*;

    const LIMIT: Duration = Duration::from_millis(300);
    const PACKET: f64 = 524_288.0;
    /// More than a limit leaves room for.
    const MUCH: u64 = 1 << 40;

    fn policy(timeout: Option<(Duration, OnTimeout)>) -> Policy {
        Policy {
            downtime_limit: LIMIT,
            downtime_max: Duration::from_secs(10),
            timeout,
            auto_converge: None,
        }
    }

    fn remainder(channels: u8) -> Remainder {
        Remainder::new(policy(None), channels, Layout::X86)
    }

    /// What is told in the course of some rounds of half a second at these rates, normal and zero pages in bytes per second, each of
    /// which begins with this much left.
    fn tell(
        remainder: &mut Remainder,
        (normal, zero): (u64, u64),
        round_trip: Duration,
        left: &[u64],
    ) -> Vec<Allowed> {
        let before = remainder.samples.back().copied();
        let (mut now, mut moved) = before.unwrap_or((Instant::now(), Counters::default()));
        let began = now;
        let mut told = Vec::new();
        let first = remainder.round + 1;
        for (round, remaining) in (first..).zip(left) {
            for _ in 0..5 {
                let seen = Seen {
                    now,
                    elapsed: now - began,
                    moved,
                    round_trip,
                    round,
                    remaining: *remaining,
                };
                told.extend(remainder.after(&seen));
                now += Duration::from_millis(100);
                moved.page_bytes += normal / 10;
                moved.zero_pages += zero / 10 / 4096;
            }
        }
        told
    }

    /// Downtime of a guest that is stopped with as much left as is allowed.
    fn downtime(allowed: Allowed, rate: f64, channels: u8, round_trip: Duration) -> f64 {
        let left = allowed.bandwidth as f64 * LIMIT.as_secs_f64();
        let under_way = (f64::from(channels) + 1.0) * PACKET;
        let waits = UNSENT + ENDING + round_trip;
        (left + under_way) / rate + waits.as_secs_f64()
    }

    #[test]
    fn downtime_of_a_guest_that_writes_much_stays_within_the_limit() {
        for (rate, channels) in [
            (12_500_000, 1),
            (37_000_000, 2),
            (125_000_000, 4),
            (1_250_000_000, 8),
        ] {
            for round_trip in [0, 1, 50] {
                let round_trip = Duration::from_millis(round_trip);
                let mut remainder = remainder(channels);
                let first = Remainder::at_first(LIMIT);
                assert!(first.bandwidth as f64 * LIMIT.as_secs_f64() <= AT_FIRST);
                // Every round but the first has nearly as much as there is room for.
                let time = LIMIT - UNSENT - ENDING - round_trip;
                let room = time.as_secs_f64() * rate as f64 - (f64::from(channels) + 1.0) * PACKET;
                let mut left = [whole(room * 0.99); 30];
                left[..3].fill(MUCH);
                let told = tell(&mut remainder, (rate, 0), round_trip, &left);
                let least = told[0].bandwidth as f64 * LIMIT.as_secs_f64() / rate as f64;
                assert!((0.0049..=0.0051).contains(&least), "{least} at {rate}");
                let most = downtime(told[told.len() - 1], rate as f64, channels, round_trip);
                assert!((0.2..=0.301).contains(&most), "{most} at {rate}");
            }
        }
    }

    #[test]
    fn link_too_slow_for_the_packets_gets_a_quarter_of_the_limit() {
        let mut left = [80_000; 9];
        left[..3].fill(MUCH);
        let told = tell(&mut remainder(2), (1_250_000, 0), Duration::ZERO, &left);
        let last = told[told.len() - 1];
        assert_eq!((last.bandwidth, last.downtime_limit), (312_500, 75));
    }

    #[test]
    fn zero_pages_do_not_change_the_rate() {
        let mut remainder = remainder(2);
        let zeros = (0, 4_000_000_000);
        // QEMU's own estimate decides then.
        let told = tell(&mut remainder, zeros, Duration::ZERO, &[MUCH; 9]);
        let own = Allowed {
            bandwidth: 0,
            downtime_limit: 300,
        };
        assert_eq!(told, [own]);
        tell(
            &mut remainder,
            (125_000_000, 0),
            Duration::ZERO,
            &[MUCH; 30],
        );
        let rate = remainder.rate;
        assert!(rate.is_some());
        tell(
            &mut remainder,
            (1_000, 4_000_000_000),
            Duration::ZERO,
            &[MUCH; 9],
        );
        assert_eq!(remainder.rate, rate);
    }

    #[test]
    fn qemu_is_told_only_changes() {
        let mut remainder = remainder(2);
        let rates = (125_000_000, 0);
        let told = tell(&mut remainder, rates, Duration::ZERO, &[MUCH; 50]);
        assert_eq!(told.len(), 1);
    }

    /// QEMU collects dirty pages meanwhile.
    #[test]
    fn time_between_rounds_does_not_lower_the_rate() {
        let mut remainder = remainder(2);
        tell(&mut remainder, (125_000_000, 0), Duration::ZERO, &[MUCH; 2]);
        let rate = remainder.rate;
        assert_eq!(rate, Some(125e6));
        let (mut now, mut moved) = remainder.samples.back().copied().unwrap();
        for round in 3..30 {
            now += Duration::from_millis(900);
            moved.page_bytes += 4096;
            remainder.after(&Seen {
                now,
                elapsed: Duration::ZERO,
                moved,
                round_trip: Duration::ZERO,
                round,
                remaining: 4096,
            });
        }
        assert_eq!(remainder.rate, rate);
    }

    #[test]
    fn any_rest_is_allowed_when_the_guest_is_to_be_paused() {
        for rates in [(0, 0), (125_000_000, 0)] {
            let policy = policy(Some((Duration::ZERO, OnTimeout::Pause)));
            let mut remainder = Remainder::new(policy, 2, Layout::X86);
            remainder.convergence.action(Duration::ZERO);
            let told = tell(&mut remainder, rates, Duration::ZERO, &[MUCH; 9]);
            let [all] = told[..] else { panic!("{told:?}") };
            assert!(all.bandwidth as f64 * LIMIT.as_secs_f64() > 1e14);
            assert_eq!(all.downtime_limit, 2_000_000);
        }
    }

    /// QEMU's own follows from the bandwidth that it was told.
    #[test]
    fn the_expected_downtime_is_that_of_the_last_round() {
        let mut remainder = remainder(1);
        let left = [MUCH, MUCH, MUCH, 12_500_000];
        tell(&mut remainder, (125_000_000, 0), Duration::ZERO, &left);
        let mut info = serde_json::json!({ "expected-downtime": 9 });
        remainder.correct(&mut info, Duration::from_millis(1));
        // 100 ms, two packets, what waits, the end, and a round trip.
        assert_eq!(info["expected-downtime"], 159);
        let mut info = serde_json::json!({});
        remainder.correct(&mut info, Duration::ZERO);
        assert_eq!(info, serde_json::json!({}));
    }
}
