//! How much memory may be left when the source QEMU stops its guest.
//!
//! ```text
//!  stop ── packets of QEMU and relay ── what has been written ── the remainder ── load, commit ──> runs
//!          one a channel and one more    25 ms, a round trip       this rule's
//!  └────────────────────────────────── the downtime limit ──────────────────────────────────┘
//! ```
//!
//! QEMU stops a guest when what is left takes less than the limit at the bandwidth of its last 100 ms. It takes for sent what
//! only waits to be sent, and on a slow link those 100 ms are a packet more or less. So it is given what to assume: as
//! `avail-switchover-bandwidth` (QEMU 8.2), or, before that, a lower `downtime-limit`, with which its own
//! estimate remains.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use multifd::Layout;
use vamoose_link::Snapshot;

/// The rule for one migration, without a clock and a QEMU.
#[derive(Debug)]
pub(super) struct Remainder {
    limit: Duration,
    page_size: usize,
    /// Bytes of pages that QEMU and its relay have taken and not yet put on the link.
    under_way: f64,
    samples: VecDeque<(Instant, Snapshot)>,
    /// Bytes of pages per second, once known.
    rate: Option<f64>,
    told: f64,
}

/// What to tell a QEMU: one of the two.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Allowed {
    /// In bytes per second.
    pub(super) bandwidth: u64,
    /// In milliseconds.
    pub(super) downtime_limit: u64,
}

/// The rate is that of the last second.
const WINDOW: Duration = Duration::from_secs(1);

/// Less is no measure.
const LEAST_WINDOW: Duration = Duration::from_millis(200);

/// What connections hold back beyond what is in flight.
const UNSENT: Duration = Duration::from_millis(25);

/// Device state, loading it, and the commit.
const ENDING: Duration = Duration::from_millis(25);

/// Least share of the limit for the remainder. The migration of a guest that writes little has to end even where data under way
/// takes the whole limit.
const LEAST_SHARE: f64 = 0.25;

impl Remainder {
    /// A migration over so many channels.
    pub(super) fn new(limit: Duration, channels: u8, layout: Layout) -> Self {
        // A channel has a packet in the relay and one in QEMU, both in part, and QEMU has filled another one.
        let packets = f64::from(channels) + 1.0;
        Self {
            limit,
            page_size: layout.page_size(),
            under_way: packets * layout.packet_bytes() as f64,
            samples: VecDeque::new(),
            rate: None,
            told: 0.0,
        }
    }

    /// What to tell QEMU when the relay has `moved` so much by `now`, if that has changed.
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "rates and limits are positive, and the casts saturate"
    )]
    pub(super) fn after(
        &mut self,
        now: Instant,
        moved: Snapshot,
        round_trip: Duration,
    ) -> Option<Allowed> {
        let is_old = |at: &Instant| now.saturating_duration_since(*at) > WINDOW;
        while self.samples.get(1).is_some_and(|(at, _)| is_old(at)) {
            self.samples.pop_front();
        }
        self.samples.push_back((now, moved));
        self.measure();
        let rate = self.rate?;
        let time = self.limit.saturating_sub(UNSENT + ENDING + round_trip);
        let limit = self.limit.as_secs_f64().max(1e-3);
        let share = (time.as_secs_f64() - self.under_way / rate) / limit;
        let share = share.clamp(LEAST_SHARE, 1.0);
        let bytes = share * rate;
        if (bytes - self.told).abs() <= self.told / 20.0 {
            return None;
        }
        self.told = bytes;
        Some(Allowed {
            bandwidth: bytes as u64,
            downtime_limit: ((share * limit * 1e3) as u64).max(1),
        })
    }

    /// The rate over the samples. A time in which there were mostly zero pages tells nothing of the others.
    fn measure(&mut self) {
        let ends = self.samples.front().zip(self.samples.back());
        let Some(((since, before), (now, after))) = ends else {
            return;
        };
        let time = now.saturating_duration_since(*since);
        let bytes = after.page_bytes.saturating_sub(before.page_bytes);
        let zero_pages = after.zero_pages.saturating_sub(before.zero_pages);
        let zeros = zero_pages.saturating_mul(self.page_size as u64);
        if time >= LEAST_WINDOW && bytes > 0 && bytes >= zeros / 3 {
            self.rate = Some(bytes as f64 / time.as_secs_f64());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_millis(300);
    const PACKET: f64 = 524_288.0;

    /// What is told at the end of three seconds at these rates, normal and zero pages in bytes per second.
    fn told(normal: u64, zero: u64, channels: u8, round_trip: Duration) -> Option<Allowed> {
        let mut remainder = Remainder::new(LIMIT, channels, Layout::X86);
        feed(
            &mut remainder,
            Snapshot::default(),
            normal,
            zero,
            round_trip,
        )
    }

    fn feed(
        remainder: &mut Remainder,
        mut moved: Snapshot,
        normal: u64,
        zero: u64,
        round_trip: Duration,
    ) -> Option<Allowed> {
        let (mut now, mut told) = (Instant::now(), None);
        for _ in 0..30 {
            told = remainder.after(now, moved, round_trip).or(told);
            now += Duration::from_millis(100);
            moved.page_bytes += normal / 10;
            moved.zero_pages += zero / 10 / 4096;
        }
        told
    }

    /// How long after its stop the guest runs again, all told, with as much left as is allowed.
    fn downtime(allowed: Allowed, rate: f64, channels: u8, round_trip: Duration) -> f64 {
        let left = allowed.bandwidth as f64 * LIMIT.as_secs_f64();
        let under_way = (f64::from(channels) + 1.0) * PACKET;
        let waits = UNSENT + ENDING + round_trip;
        (left + under_way) / rate + waits.as_secs_f64()
    }

    #[test]
    fn the_limit_is_kept_where_the_packets_leave_room() {
        for (rate, channels) in [
            (12_500_000, 1),
            (37_000_000, 2),
            (125_000_000, 4),
            (1_250_000_000, 8),
        ] {
            for round_trip in [0, 1, 50] {
                let round_trip = Duration::from_millis(round_trip);
                let allowed = told(rate, 0, channels, round_trip).unwrap();
                let downtime = downtime(allowed, rate as f64, channels, round_trip);
                assert!((0.2..=0.301).contains(&downtime), "{downtime} at {rate}");
            }
        }
    }

    #[test]
    fn a_link_that_is_too_slow_for_the_packets_gets_a_quarter() {
        let allowed = told(1_250_000, 0, 2, Duration::ZERO).unwrap();
        assert_eq!(allowed.bandwidth, 312_500);
        assert_eq!(allowed.downtime_limit, 75);
    }

    #[test]
    fn zero_pages_tell_nothing_of_the_others() {
        assert_eq!(told(0, 4_000_000_000, 2, Duration::ZERO), None);
        let mut remainder = Remainder::new(LIMIT, 2, Layout::X86);
        let first = feed(
            &mut remainder,
            Snapshot::default(),
            125_000_000,
            0,
            Duration::ZERO,
        );
        assert!(first.is_some());
        let rate = remainder.rate;
        let moved = remainder.samples.back().unwrap().1;
        remainder.samples.clear();
        feed(&mut remainder, moved, 1_000, 4_000_000_000, Duration::ZERO);
        assert_eq!(remainder.rate, rate);
    }

    #[test]
    fn what_is_no_news_is_not_told() {
        let mut remainder = Remainder::new(LIMIT, 2, Layout::X86);
        let (mut now, mut moved, mut times) = (Instant::now(), Snapshot::default(), 0);
        for _ in 0..50 {
            times += usize::from(remainder.after(now, moved, Duration::ZERO).is_some());
            now += Duration::from_millis(100);
            moved.page_bytes += 12_500_000;
        }
        assert_eq!(times, 1);
    }
}
