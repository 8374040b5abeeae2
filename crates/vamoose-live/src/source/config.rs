//! The options of a source.

use std::{num::NonZeroU64, ops::RangeInclusive, time::Duration};

use convergence::Policy;
use multifd::PACKET_BYTES;
use vamoose_link::MethodChoice;

use super::{AutoConverge, OnTimeout};
use crate::{SourceError, config::options, offload::DsaDetection};

options! {
    /// The options of a [`Source`](crate::Source).
    #[derive(Clone)]
    #[non_exhaustive]
    pub struct SourceConfig {
        /// How pages are encoded.
        pub method: MethodChoice,
        /// Whether pages that were sent before are sent as differences where that pays: over a session with checksums, by methods
        /// [whose packets may hold differences](MethodChoice::takes_differences). The source keeps sent pages in at most the
        /// session's [page cache](vamoose_link::SessionConfig::page_cache); the destination has them in the guest's memory.
        pub delta: bool,
        /// Channels, 1 to 64.
        pub channels: u8,
        /// Most bytes of pages in a packet: a power of two from 64 KiB to 4 MiB.
        pub packet_bytes: u32,
        /// Whether pages are sent with MSG_ZEROCOPY, for method none, over plain TCP connections. A session keeps copies of sent data
        /// for resending, so both together are refused ([`ZeroCopyError::Session`](crate::causes::ZeroCopyError::Session)).
        pub zero_copy: bool,
        /// How zero pages are found.
        pub zero_page_detection: ZeroPageDetection,
        /// Bandwidth limit in bytes per second, over all channels.
        pub max_bandwidth: Option<NonZeroU64>,
        /// Longest downtime to accept. The guest is paused for as short as its writing allows.
        pub downtime_limit: Duration,
        /// Longest downtime, at least the limit. After that the migration fails and the guest resumes here, unless it has been
        /// handed over. Not after [`OnTimeout::Pause`].
        pub downtime_max: Duration,
        /// When to act if the guest has not been paused by then.
        pub timeout: Option<Duration>,
        /// What to do then, at the end of the round; [`OnTimeout::Abort`] does not wait for that.
        pub on_timeout: OnTimeout,
        /// Whether and how the vCPUs are throttled if they write too fast; with [`OnTimeout::Throttle`] only from then on.
        pub auto_converge: Option<AutoConverge>,
        /// Abort after this time without progress from the destination.
        pub stall_timeout: Duration,
        /// How long to ask where the guest is, if the connection is lost during the hand-over. Over a session, only if the
        /// connection does not come back at once.
        pub settle_time: Duration,
        /// The VMM guarantees that nothing between the two processes can accept, close or refuse a connection in the
        /// destination's name: no tunnel, no proxy, no address translation. Then a destination that has
        /// closed its connections and refuses new ones has ended, and the guest resumes here if it had not begun to run there.
        /// Without the guarantee such a guest stays paused and [in doubt](SourceError::InDoubt), for an operator to decide. For plain
        /// connections only: how a session's connections end is not known here.
        pub direct_link: bool,
        /// Prepares for a post-copy: when the guest is [forced](crate::Switchover::Force) to switch over, it resumes at the
        /// destination at once, and its memory follows it. The destination has to have userfaultfd for the kernel's faults, and
        /// memory in pages of the base size; it refuses the guest otherwise.
        ///
        /// From then on the guest is in two parts, until all of its memory is there. If the link is lost for longer than
        /// [`reconnect_timeout`](crate::session::SessionConfig::reconnect_timeout), or one of the two processes ends, the guest is lost:
        /// [`SourceError::PagesLost`].
        pub post_copy: bool,
        /// Looks for writes while the guest is paused, and fails with [`SourceError::WrittenWhilePaused`] if there is one. For the
        /// development of a VMM: a device that still writes behind [`pause`](crate::SourceGuest::pause) corrupts memory at
        /// the destination in silence otherwise. It costs downtime: the dirty log is cleared and read once more.
        pub check_pause: bool,
    }
}

/// How zero pages are found.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum ZeroPageDetection {
    /// Not at all. Untouched memory is not sent in any case.
    None,
    /// By the processor.
    #[default]
    Cpu,
    /// By DSAs, and by the processor where they do not.
    Dsa(DsaDetection),
}

/// How many channels a migration may have.
pub(crate) const CHANNELS: RangeInclusive<u8> = 1..=64;

impl Default for SourceConfig {
    /// Sends by the adaptive method, encoded in software, over two channels.
    fn default() -> Self {
        Self::new(MethodChoice::default())
    }
}

impl SourceConfig {
    /// Sends by `method` over two channels, everything else by default.
    pub fn new(method: impl Into<MethodChoice>) -> Self {
        let method = method.into();
        Self {
            delta: matches!(method, MethodChoice::Adaptive(_)),
            method,
            channels: 2,
            packet_bytes: PACKET_BYTES,
            zero_copy: false,
            zero_page_detection: ZeroPageDetection::Cpu,
            max_bandwidth: None,
            downtime_limit: Duration::from_millis(300),
            downtime_max: Duration::from_secs(10),
            timeout: None,
            on_timeout: OnTimeout::Abort,
            auto_converge: None,
            stall_timeout: Duration::from_secs(15),
            settle_time: Duration::from_secs(60),
            direct_link: false,
            post_copy: false,
            check_pause: false,
        }
    }

    pub(super) fn policy(&self) -> Policy {
        Policy {
            downtime_limit: self.downtime_limit,
            downtime_max: self.downtime_max,
            timeout: self.timeout.map(|after| (after, self.on_timeout)),
            auto_converge: self.auto_converge,
        }
    }

    pub(super) fn check(&self) -> Result<(), SourceError> {
        let refuse = |text: String| Err(SourceError::Config(text));
        if !CHANNELS.contains(&self.channels) {
            let (channels, min, max) = (self.channels, CHANNELS.start(), CHANNELS.end());
            return refuse(format!("{channels} channels: the range is {min} to {max}"));
        }
        if self.delta && !self.method.takes_differences() {
            let name = self.method.name();
            return refuse(format!("differences: packets of method {name} hold none"));
        }
        for (name, time) in [
            ("stall timeout", self.stall_timeout),
            ("settle time", self.settle_time),
            ("longest downtime", self.downtime_max),
        ] {
            if time.is_zero() {
                return refuse(format!("{name}: 0 s is too short"));
            }
        }
        if self.downtime_limit > self.downtime_max {
            let (limit, max) = (self.downtime_limit, self.downtime_max);
            return refuse(format!(
                "downtime limit: {limit:?} is more than the longest downtime, {max:?}"
            ));
        }
        if let Some(steps) = self.auto_converge.filter(|steps| !steps.is_valid()) {
            return refuse(format!(
                "auto-converge: {steps:?} does not increase to at most 99 %"
            ));
        }
        Ok(())
    }
}
