//! Counters of a migration.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use multifd::Method;
use rustix::time::{ClockId, clock_gettime};
use vamoose_codec::{Health, Tally};

/// The counters, a row each.
macro_rules! counters {
    ($($(#[$meta:meta])* $name:ident,)*) => {
        /// Counters of one direction of a migration, shared by all its channels. Each packet costs a handful of relaxed additions.
        #[derive(Debug, Default)]
        pub struct Stats {
            $(pub(crate) $name: Counter,)*
            encode_nanos: Counter,
            decode_nanos: Counter,
            method_packets: [Counter; Method::ALL.len()],
            health: Arc<Health>,
            post_copy: AtomicBool,
            answered: AtomicBool,
        }

        /// The counters at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[$meta])* pub $name: u64,)*
            /// CPU time spent encoding.
            pub encode_time: Duration,
            /// CPU time spent decoding.
            pub decode_time: Duration,
            /// Packets with normal pages by method, in the order of [`Method::ALL`].
            pub method_packets: [u64; Method::ALL.len()],
            /// Results of the hardware engines.
            pub engines: Tally,
        }

        impl Stats {
            /// Reads all counters.
            pub fn snapshot(&self) -> Counters {
                Counters {
                    $($name: self.$name.read(),)*
                    encode_time: Duration::from_nanos(self.encode_nanos.read()),
                    decode_time: Duration::from_nanos(self.decode_nanos.read()),
                    method_packets: self.method_packets.each_ref().map(Counter::read),
                    engines: self.health.tally(),
                }
            }
        }
    };
}

counters! {
    /// Packets sent, without SYNCs.
    packets,
    /// SYNCs sent, each on all channels.
    syncs,
    /// Bytes received from the source: headers and payloads, main stream included.
    received_bytes,
    /// Bytes sent towards the destination: headers and payloads, main stream included.
    wire_bytes,
    /// Normal pages sent.
    normal_pages,
    /// Zero pages, sent as offsets only.
    zero_pages,
    /// Bytes of guest memory in the normal pages.
    page_bytes,
    /// Normal pages that were sent as the difference to an earlier version.
    delta_pages,
    /// Bytes of the pages in the packets with such pages.
    delta_page_bytes,
    /// Bytes of these packets' payloads.
    delta_wire_bytes,
    /// Bytes of pages in the cache for differences.
    delta_cache_bytes,
    /// Pages that the destination had in its page store.
    shared_pages,
    /// Pages that the destination should have had there, and had not: they were sent.
    missed_pages,
    /// Zero-copy sends. A packet is one send, or several if the socket took it in parts.
    zero_copy_sends,
    /// Zero-copy sends that the kernel copied after all: at once, because it could lock no more memory, or
    /// later, because the path to the peer needs a copy (loopback, a device without scatter-gather).
    copied_sends,
    /// Flushes of a channel after which all sends had been copied. This is QEMU's
    /// `dirty-sync-missed-zero-copy`, counted once per SYNC and channel.
    missed_zero_copy,
    /// Packets whose decoded pages were not the ones sent: each ends its migration.
    changed_packets,
}

impl Stats {
    /// Where the migration's encoders and decoders report.
    pub fn health(&self) -> &Arc<Health> {
        &self.health
    }

    /// Counts received bytes.
    pub fn add_received(&self, bytes: usize) {
        self.received_bytes.add(bytes);
    }

    /// Counts sent bytes.
    pub fn add_sent(&self, bytes: usize) {
        self.wire_bytes.add(bytes);
    }

    /// Records that the destination has asked for pages: the guest runs there under post-copy.
    pub fn note_post_copy(&self) {
        self.post_copy.store(true, Ordering::Relaxed);
    }

    /// Whether the guest runs at the destination under post-copy.
    pub fn is_under_post_copy(&self) -> bool {
        self.post_copy.load(Ordering::Relaxed)
    }

    /// Notes that the destination has answered on its return path.
    pub fn note_answer(&self) {
        self.answered.store(true, Ordering::Relaxed);
    }

    /// Whether the destination has answered on its return path.
    pub fn has_answer(&self) -> bool {
        self.answered.load(Ordering::Relaxed)
    }

    /// Counts a SYNC sent on all channels.
    pub fn add_sync(&self) {
        self.syncs.add(1);
    }

    /// Counts a packet of pages that was sent.
    pub fn add_packet(&self, normal: usize, zero: usize, page_bytes: usize) {
        self.packets.add(1);
        self.normal_pages.add(normal);
        self.zero_pages.add(zero);
        self.page_bytes.add(page_bytes);
    }

    /// Counts a packet with normal pages sent by `method`.
    pub(crate) fn add_method(&self, method: Method) {
        let counters = Method::ALL.iter().zip(&self.method_packets);
        for (_, counter) in counters.filter(|(known, _)| **known == method) {
            counter.add(1);
        }
    }

    pub(crate) fn add_encode(&self, time: Duration) {
        self.encode_nanos.add_time(time);
    }

    pub(crate) fn add_differences(&self, pages: usize, page_bytes: usize, payload_bytes: usize) {
        if pages > 0 {
            self.delta_pages.add(pages);
            self.delta_page_bytes.add(page_bytes);
            self.delta_wire_bytes.add(payload_bytes);
        }
    }

    pub(crate) fn add_decode(&self, time: Duration) {
        self.decode_nanos.add_time(time);
    }
}

/// Runs `work`; returns its result and the CPU time that this thread spent on it.
pub(crate) fn cpu_timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let start = thread_cpu_time();
    let result = work();
    (result, thread_cpu_time().saturating_sub(start))
}

pub(crate) fn thread_cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, value: usize) {
        self.add_all(value as u64);
    }

    pub(crate) fn add_all(&self, value: u64) {
        self.0.fetch_add(value, Ordering::Relaxed);
    }

    pub(crate) fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    fn add_time(&self, time: Duration) {
        self.add_all(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    pub(crate) fn read(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
