//! How fast memory moves and how fast the guest writes it, measured over rounds.

use std::time::Duration;

use vamoose_link::Counters;

/// Rates per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Rates {
    /// Bytes of normal pages; 0 until it is known.
    pub(super) page_bytes: f64,
    pub(super) wire_bytes: f64,
    /// Pages sent, normal and zero.
    pub(super) pages: f64,
    pub(super) dirty_pages: f64,
    /// Normal pages of the last round.
    pub(super) last_normal: u64,
}

/// A round that is smaller and shorter than this does not measure the link: round trips and scheduling dominate.
const MIN_SAMPLE: u64 = 4 << 20;
const MIN_SAMPLE_TIME: Duration = Duration::from_millis(200);

/// Bytes per second, until a round was long enough to measure: a tenth of a slow link, so that a guest is not paused for
/// a guess.
const UNKNOWN_BANDWIDTH: f64 = 1e6;

impl Rates {
    /// Records a round that has arrived: `sent` took `took`, from the first page to the destination's acknowledgement.
    pub(super) fn round_sent(&mut self, sent: Sent, took: Duration) {
        let seconds = took.as_secs_f64().max(1e-6);
        self.last_normal = sent.normal_pages;
        let is_measure = sent.page_bytes >= MIN_SAMPLE || took >= MIN_SAMPLE_TIME;
        if sent.page_bytes > 0 && (is_measure || self.page_bytes == 0.0) {
            self.page_bytes = sent.page_bytes as f64 / seconds;
            self.wire_bytes = sent.wire_bytes as f64 / seconds;
            self.pages = (sent.normal_pages + sent.zero_pages) as f64 / seconds;
        }
    }

    /// Records the pages that the guest has dirtied during a round.
    pub(super) fn guest_dirtied(&mut self, pages: usize, within: Duration) {
        self.dirty_pages = pages as f64 / within.as_secs_f64().max(1e-6);
    }

    /// How long this many bytes of pages take, if none of them is zero.
    pub(super) fn time_for(&self, bytes: u64) -> Duration {
        let bandwidth = self.page_bytes.max(UNKNOWN_BANDWIDTH);
        Duration::try_from_secs_f64(bytes as f64 / bandwidth).unwrap_or(Duration::MAX)
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
    pub(super) fn between(before: &Counters, after: &Counters) -> Self {
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
    use super::*;

    /// 10 MB/s.
    const ROUND: Sent = Sent {
        normal_pages: 2441,
        zero_pages: 0,
        page_bytes: 10_000_000,
        wire_bytes: 5_000_000,
    };
    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn only_a_round_that_is_long_enough_is_measured() {
        let mut rates = Rates::default();
        rates.round_sent(ROUND, SECOND);
        let measured = rates;
        assert_eq!((measured.page_bytes, measured.wire_bytes), (1e7, 5e6));
        let short = Sent {
            normal_pages: 10,
            page_bytes: MIN_SAMPLE - 1,
            ..ROUND
        };
        rates.round_sent(short, MIN_SAMPLE_TIME - Duration::from_millis(1));
        assert_eq!(rates.page_bytes, measured.page_bytes);
        // On a slow link a round is long for all that: what is written again and again may be harder to encode than the rest.
        rates.round_sent(short, SECOND);
        assert_eq!(rates.page_bytes, short.page_bytes as f64);
        rates.round_sent(Sent::default(), SECOND);
        assert_eq!(rates.page_bytes, short.page_bytes as f64);
        rates.round_sent(ROUND, SECOND * 2);
        assert_eq!(rates.page_bytes, 5e6);
        // No time at all is no division by zero.
        rates.guest_dirtied(5, Duration::ZERO);
        assert!(rates.dirty_pages.is_finite());
    }

    #[test]
    fn time_is_not_guessed_too_short() {
        let mut rates = Rates::default();
        assert_eq!(rates.time_for(1_000_000), SECOND);
        assert_eq!(rates.time_for(0), Duration::ZERO);
        // The first round counts, however short.
        let short = Sent {
            normal_pages: 1,
            page_bytes: 4096,
            ..Sent::default()
        };
        rates.round_sent(short, Duration::from_micros(1));
        assert!(rates.time_for(1_000_000) < Duration::from_millis(1));
    }
}
