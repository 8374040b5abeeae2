//! Timeline of a migration for its report: samples of its progress.
//!
//! A migration may take hours. When there are a thousand samples, every other one is dropped and the interval doubles.

use std::{collections::BTreeMap, time::Duration};

use multifd::Method;
use serde::Serialize;
use vamoose_link::{Session, millis};

use vamoose_relay::CopiedDisks;

use crate::progress::{Progress, remaining};

/// The samples of a migration.
#[derive(Debug, Default)]
pub struct Timeline {
    samples: Vec<Sample>,
    /// The newest sample, if it follows the last kept one too closely.
    newest: Option<Sample>,
    /// Minimum milliseconds between kept samples.
    interval: u64,
}

/// Progress at one moment. Counters are totals. `None`: not yet reported by the source QEMU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Sample {
    /// Since the start of the command.
    pub milliseconds: u64,
    /// QEMU's name for the state.
    pub status: String,
    pub wire_bytes: u64,
    pub page_bytes: u64,
    pub zero_pages: u64,
    /// Bytes left to send, see [`remaining`].
    pub remaining: Option<u64>,
    pub dirty_sync_count: Option<u64>,
    /// Pages that the guest writes per second.
    pub dirty_pages_rate: Option<u64>,
    /// Number of packets with pages, by method.
    pub packets: BTreeMap<&'static str, u64>,
    pub reconnects: u64,
    /// The disks that are copied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disks: Option<CopiedDisks>,
    /// Milliseconds since the guest was paused for the switchover.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paused: Option<u64>,
}

const MOST: usize = 1000;
/// Initial milliseconds between two samples.
const INTERVAL: u64 = 100;

impl Timeline {
    /// Adds the progress at `since` after the start.
    pub fn add(&mut self, since: Duration, progress: &Progress) {
        self.push(Sample::of(millis(since), progress));
    }

    /// All kept samples, and the newest.
    pub fn into_samples(self) -> Vec<Sample> {
        self.samples.into_iter().chain(self.newest).collect()
    }

    fn push(&mut self, sample: Sample) {
        self.interval = self.interval.max(INTERVAL);
        let due = |last: &Sample| sample.milliseconds >= last.milliseconds + self.interval;
        if !self.samples.last().is_none_or(due) {
            self.newest = Some(sample);
            return;
        }
        self.newest = None;
        self.samples.push(sample);
        if self.samples.len() >= MOST {
            self.newest = self.samples.pop();
            let mut is_kept = false;
            self.samples.retain(|_| {
                is_kept = !is_kept;
                is_kept
            });
            self.interval *= 2;
        }
    }
}

impl Sample {
    pub(crate) fn of(milliseconds: u64, progress: &Progress) -> Self {
        let ram = |key: &str| progress.source["ram"][key].as_u64();
        let moved = &progress.moved;
        let packets = Method::ALL.iter().zip(moved.method_packets);
        let packets = packets.filter(|(_, count)| *count > 0);
        Self {
            milliseconds,
            status: progress.status.clone(),
            wire_bytes: moved.wire_bytes,
            page_bytes: moved.page_bytes,
            zero_pages: moved.zero_pages,
            remaining: remaining(&progress.source),
            dirty_sync_count: ram("dirty-sync-count"),
            dirty_pages_rate: ram("dirty-pages-rate"),
            packets: packets
                .map(|(method, count)| (method.name(), count))
                .collect(),
            reconnects: progress.session.as_ref().map_or(0, Session::reconnects),
            disks: progress.disks,
            paused: Some(millis(progress.stopped_for)).filter(|paused| *paused > 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn number_of_samples_is_limited_and_includes_the_first_and_the_last(
            steps in proptest::collection::vec(0..400u64, 1..6000),
        ) {
            let mut timeline = Timeline::default();
            let mut now = 0;
            for step in &steps {
                now += step;
                timeline.push(Sample::of(now, &Progress::default()));
                prop_assert!(timeline.samples.len() < MOST);
            }
            let samples = timeline.into_samples();
            prop_assert!(samples.is_sorted_by_key(|sample| sample.milliseconds));
            prop_assert_eq!(samples.first().map(|sample| sample.milliseconds), Some(steps[0]));
            prop_assert_eq!(samples.last().map(|sample| sample.milliseconds), Some(now));
        }
    }

    #[test]
    fn newest_sample_survives_thinning() {
        let mut timeline = Timeline::default();
        for step in 1..=MOST as u64 {
            timeline.push(Sample::of(step * INTERVAL, &Progress::default()));
        }
        let samples = timeline.into_samples();
        let last = samples.last().map(|sample| sample.milliseconds);
        assert_eq!(last, Some(MOST as u64 * INTERVAL));
        assert_eq!(samples.len(), MOST / 2 + 1);
    }

    #[test]
    fn packets_are_counted_by_method() {
        let mut progress = Progress::default();
        progress.moved.method_packets[0] = 7;
        let sample = Sample::of(0, &progress);
        assert_eq!(sample.packets, [("none", 7)].into());
        assert_eq!((sample.remaining, sample.paused), (None, None));
    }
}
