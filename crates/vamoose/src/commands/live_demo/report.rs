//! The demo's report: the keys of the other commands' reports where they apply, and what only a demo can know.

use std::time::Duration;

use serde::Serialize;
use vamoose_link::MethodChoice;

use super::{
    dsa::Done,
    log::LogName,
    shape::Shape,
    source::{Round, Run},
    talk::Arrived,
    verdict::Verdict,
};
use crate::report::{self, Accelerator, Ram};

/// What the migration was and cost, and whether all is there. Times are in milliseconds, as QEMU's.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Report {
    pub(super) status: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) error_desc: Option<String>,
    #[serde(flatten)]
    pub(super) verdict: Verdict,
    pub(super) total_time: u64,
    pub(super) downtime: Option<u64>,
    pub(super) setup_time: u64,
    /// All but the setup: from the first look for written memory to the running guest.
    pub(super) scan_and_send: u64,
    pub(super) rounds: Vec<Round>,
    pub(super) ram: Ram,
    pub(super) method: &'static str,
    pub(super) level: Option<i32>,
    pub(super) engine: &'static str,
    pub(super) channels: u8,
    pub(super) packet_bytes: u32,
    pub(super) wire_bytes: u64,
    pub(super) page_bytes: u64,
    pub(super) zero_pages: u64,
    pub(super) fallbacks: u64,
    pub(super) verified: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) accelerator: Option<Accelerator>,
    pub(super) zero_copy: ZeroCopy,
    pub(super) zero_page_detection: Done,
    /// Of decoded pages into the guest's memory at the destination.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) copy: Option<Done>,
    pub(super) guest: GuestReport,
    pub(super) cpu_seconds: CpuSeconds,
}

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct ZeroCopy {
    pub(super) requested: bool,
    /// Sends that were to go without a copy.
    pub(super) sends: u64,
    /// Those that the kernel copied all the same.
    pub(super) copied: u64,
    /// Flushes that found nothing but copies: QEMU's dirty-sync-missed-zero-copy.
    pub(super) missed: u64,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct GuestReport {
    #[serde(flatten)]
    pub(super) shape: Shape,
    /// Where it runs in the end: `source`, `destination`, or `undecided` if it stands still and nobody knows.
    pub(super) at: &'static str,
    /// Pages written until the migration was over.
    pub(super) writes: u64,
    /// Pages written after that.
    pub(super) writes_after: u64,
    pub(super) throttle_percentage: u8,
    pub(super) dirty_log: LogName,
}

/// CPU time of the migration, without making, reading and comparing the memory.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct CpuSeconds {
    /// Of the source's process without the vCPUs.
    pub(super) source: f64,
    /// Of the destination's process; unknown if that has failed.
    pub(super) destination: Option<f64>,
    /// Of both.
    pub(super) total: Option<f64>,
    /// Of the vCPUs at the source, faults of the dirty log included.
    pub(super) guest: Option<f64>,
    pub(super) encode: f64,
    pub(super) decode: Option<f64>,
}

impl Report {
    /// What `run` says about it. The rest is filled in as it turns out.
    pub(super) fn new(
        method: &MethodChoice,
        channels: u8,
        packet_bytes: u32,
        zero_copy: bool,
        zero_page_detection: Done,
        guest: GuestReport,
        run: &Run,
    ) -> Self {
        let (status, moved) = (&run.status, run.moved);
        let millis = Duration::from_millis;
        let setup_time = millis(status.setup_time);
        let account = report::Report::new(method, moved, millis(status.total_time), setup_time);
        let mut ram = account.ram;
        ram.dirty_sync_count = Some(status.ram.dirty_sync_count);
        ram.dirty_sync_missed_zero_copy = moved.missed_zero_copy;
        Self {
            status: "completed",
            error_desc: None,
            verdict: Verdict::default(),
            total_time: status.total_time,
            downtime: status.downtime,
            setup_time: status.setup_time,
            scan_and_send: status.total_time.saturating_sub(status.setup_time),
            rounds: run.rounds.clone(),
            ram,
            method: account.method,
            level: account.level,
            engine: account.engine,
            channels,
            packet_bytes,
            wire_bytes: account.wire_bytes,
            page_bytes: account.page_bytes,
            zero_pages: account.zero_pages,
            fallbacks: account.fallbacks,
            verified: account.verified,
            accelerator: account.accelerator,
            zero_copy: ZeroCopy {
                requested: zero_copy,
                sends: moved.zero_copy_sends,
                copied: moved.copied_sends,
                missed: moved.missed_zero_copy,
            },
            zero_page_detection,
            copy: None,
            guest,
            cpu_seconds: CpuSeconds {
                source: run.cpu_time.as_secs_f64(),
                destination: None,
                total: None,
                guest: run.vcpu_time.map(|time| time.as_secs_f64()),
                encode: account.cpu_seconds.encode,
                decode: None,
            },
        }
    }

    /// Adds what the destination has used.
    pub(super) fn account_for(&mut self, arrived: &Arrived) {
        self.copy = Some(Done::copy(arrived.copy));
        let cpu = &mut self.cpu_seconds;
        cpu.destination = Some(arrived.cpu_seconds);
        cpu.total = Some(cpu.source + arrived.cpu_seconds);
        cpu.decode = Some(arrived.decode_seconds);
    }
}
