//! The progress of a migration at one moment, for other programs.

use std::collections::BTreeMap;

use multifd::Method;
use serde::Serialize;
use vamoose_link::{Session, millis};

use vamoose_relay::CopiedDisks;

use crate::progress::{Progress, remaining};

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
