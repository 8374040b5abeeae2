//! Counters of a migration.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use multifd::Method;
use rustix::time::{ClockId, clock_gettime};
use vamoose_codec::{Health, Tally};

/// Counters of one direction of a migration, shared by all its channels. Each packet costs a handful of relaxed additions.
#[derive(Debug, Default)]
pub struct Stats {
    health: Arc<Health>,
    packets: AtomicU64,
    syncs: AtomicU64,
    received_bytes: AtomicU64,
    wire_bytes: AtomicU64,
    normal_pages: AtomicU64,
    zero_pages: AtomicU64,
    page_bytes: AtomicU64,
    encode_nanos: AtomicU64,
    decode_nanos: AtomicU64,
    delta_pages: AtomicU64,
    delta_page_bytes: AtomicU64,
    delta_wire_bytes: AtomicU64,
    delta_cache_bytes: AtomicU64,
    shared_pages: AtomicU64,
    missed_pages: AtomicU64,
    zero_copy_sends: AtomicU64,
    copied_sends: AtomicU64,
    missed_zero_copy: AtomicU64,
    method_packets: [AtomicU64; Method::ALL.len()],
    changed_packets: AtomicU64,
}

/// The counters at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Packets sent, without SYNCs.
    pub packets: u64,
    /// SYNCs sent, each on all channels.
    pub syncs: u64,
    /// Bytes received from the source: headers and payloads, main stream included.
    pub received_bytes: u64,
    /// Bytes sent towards the destination: headers and payloads, main stream included.
    pub wire_bytes: u64,
    /// Normal pages sent.
    pub normal_pages: u64,
    /// Zero pages, sent as offsets only.
    pub zero_pages: u64,
    /// Bytes of guest memory in the normal pages.
    pub page_bytes: u64,
    /// CPU time spent encoding.
    pub encode_time: Duration,
    /// CPU time spent decoding.
    pub decode_time: Duration,
    /// Normal pages that were sent as the difference to an earlier version.
    pub delta_pages: u64,
    /// Bytes of the pages in the packets with such pages.
    pub delta_page_bytes: u64,
    /// Bytes of these packets' payloads.
    pub delta_wire_bytes: u64,
    /// Bytes of pages in the cache for differences.
    pub delta_cache_bytes: u64,
    /// Pages that the destination had in its page store.
    pub shared_pages: u64,
    /// Pages that the destination should have had there, and had not: they were sent.
    pub missed_pages: u64,
    /// Zero-copy sends. A packet is one send, or several if the socket took it in parts.
    pub zero_copy_sends: u64,
    /// Zero-copy sends that the kernel copied after all: at once, because it could lock no more memory, or
    /// later, because the path to the peer needs a copy (loopback, a device without scatter-gather).
    pub copied_sends: u64,
    /// Flushes of a channel after which all sends had been copied. This is QEMU's
    /// `dirty-sync-missed-zero-copy`, counted once per SYNC and channel.
    pub missed_zero_copy: u64,
    /// Packets with normal pages by method, in the order of [`Method::ALL`].
    pub method_packets: [u64; Method::ALL.len()],
    /// Packets whose decoded pages were not the ones sent: each ends its migration.
    pub changed_packets: u64,
    /// Results of the hardware engines.
    pub engines: Tally,
}

impl Stats {
    /// Reads all counters.
    pub fn snapshot(&self) -> Snapshot {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Snapshot {
            packets: read(&self.packets),
            syncs: read(&self.syncs),
            received_bytes: read(&self.received_bytes),
            wire_bytes: read(&self.wire_bytes),
            normal_pages: read(&self.normal_pages),
            zero_pages: read(&self.zero_pages),
            page_bytes: read(&self.page_bytes),
            encode_time: Duration::from_nanos(read(&self.encode_nanos)),
            decode_time: Duration::from_nanos(read(&self.decode_nanos)),
            delta_pages: read(&self.delta_pages),
            delta_page_bytes: read(&self.delta_page_bytes),
            delta_wire_bytes: read(&self.delta_wire_bytes),
            delta_cache_bytes: read(&self.delta_cache_bytes),
            shared_pages: read(&self.shared_pages),
            missed_pages: read(&self.missed_pages),
            zero_copy_sends: read(&self.zero_copy_sends),
            copied_sends: read(&self.copied_sends),
            missed_zero_copy: read(&self.missed_zero_copy),
            method_packets: self.method_packets.each_ref().map(read),
            changed_packets: read(&self.changed_packets),
            engines: self.health.tally(),
        }
    }

    /// Where the migration's encoders and decoders report.
    pub fn health(&self) -> &Arc<Health> {
        &self.health
    }

    /// Counts a packet whose pages were changed.
    pub(crate) fn add_changed_packet(&self) {
        self.changed_packets.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts received bytes.
    pub fn add_received(&self, bytes: usize) {
        add(&self.received_bytes, bytes);
    }

    /// Counts sent bytes.
    pub fn add_sent(&self, bytes: usize) {
        add(&self.wire_bytes, bytes);
    }

    /// Counts a SYNC sent on all channels.
    pub fn add_sync(&self) {
        add(&self.syncs, 1);
    }

    /// Counts a packet of pages that was sent.
    pub fn add_packet(&self, normal: usize, zero: usize, page_bytes: usize) {
        add(&self.packets, 1);
        add(&self.normal_pages, normal);
        add(&self.zero_pages, zero);
        add(&self.page_bytes, page_bytes);
    }

    /// Counts a packet with normal pages sent by `method`.
    pub(crate) fn add_method(&self, method: Method) {
        let counters = Method::ALL.iter().zip(&self.method_packets);
        for (_, counter) in counters.filter(|(known, _)| **known == method) {
            add(counter, 1);
        }
    }

    pub(crate) fn add_encode(&self, time: Duration) {
        add_time(&self.encode_nanos, time);
    }

    pub(crate) fn add_differences(&self, pages: usize, page_bytes: usize, payload_bytes: usize) {
        if pages > 0 {
            add(&self.delta_pages, pages);
            add(&self.delta_page_bytes, page_bytes);
            add(&self.delta_wire_bytes, payload_bytes);
        }
    }

    pub(crate) fn set_kept(&self, bytes: u64) {
        self.delta_cache_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Counts references to the destination's page store.
    pub(crate) fn add_shared(&self, found: usize, missed: usize) {
        add(&self.shared_pages, found);
        add(&self.missed_pages, missed);
    }

    pub(crate) fn add_zero_copy_send(&self) {
        add(&self.zero_copy_sends, 1);
    }

    pub(crate) fn add_copied_sends(&self, sends: u64) {
        self.copied_sends.fetch_add(sends, Ordering::Relaxed);
    }

    pub(crate) fn add_missed_zero_copy(&self) {
        add(&self.missed_zero_copy, 1);
    }

    pub(crate) fn add_decode(&self, time: Duration) {
        add_time(&self.decode_nanos, time);
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

fn add(counter: &AtomicU64, value: usize) {
    counter.fetch_add(value as u64, Ordering::Relaxed);
}

fn add_time(counter: &AtomicU64, time: Duration) {
    let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    counter.fetch_add(nanos, Ordering::Relaxed);
}
