//! How much memory may be left when the source QEMU stops its guest.
//!
//! ```text
//!  stop ── packets of QEMU and relay ── what has been written ── the remainder ── load, commit ──> runs
//!          one a channel and one more    25 ms, a round trip       this rule's
//!  └────────────────────────────────── the downtime limit ──────────────────────────────────┘
//! ```
//!
//! QEMU stops a guest when sending the rest takes less than the limit, at the bandwidth of the last 100 ms. QEMU counts bytes as
//! sent that still wait in sockets, and on a slow link 100 ms are about one packet. So the relay gives QEMU the bandwidth to
//! assume (`avail-switchover-bandwidth`, from QEMU 8.2 on). An older QEMU keeps its own estimate, with a lower
//! `downtime-limit`.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use multifd::Layout;
use vamoose_link::Snapshot;

/// The rule for one migration. It has neither a clock nor a QEMU.
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

impl Remainder {
    /// The rule for a migration over `channels`.
    pub(super) fn new(limit: Duration, channels: u8, layout: Layout) -> Self {
        // Each channel has one packet, partly in the relay and partly in QEMU, and QEMU has filled one more.
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

    /// What to tell QEMU at `now`, when the relay has `moved` that much. `None` unless it has changed.
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

    /// Measures the rate over the samples. Samples with mostly zero pages say nothing about normal pages.
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

    /// Downtime of a guest that is stopped with as much left as is allowed.
    fn downtime(allowed: Allowed, rate: f64, channels: u8, round_trip: Duration) -> f64 {
        let left = allowed.bandwidth as f64 * LIMIT.as_secs_f64();
        let under_way = (f64::from(channels) + 1.0) * PACKET;
        let waits = UNSENT + ENDING + round_trip;
        (left + under_way) / rate + waits.as_secs_f64()
    }

    #[test]
    fn downtime_stays_within_the_limit() {
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
    fn link_too_slow_for_the_packets_gets_a_quarter_of_the_limit() {
        let allowed = told(1_250_000, 0, 2, Duration::ZERO).unwrap();
        assert_eq!(allowed.bandwidth, 312_500);
        assert_eq!(allowed.downtime_limit, 75);
    }

    #[test]
    fn zero_pages_do_not_change_the_rate() {
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
    fn qemu_is_told_only_changes() {
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
