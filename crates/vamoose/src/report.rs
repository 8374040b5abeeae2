//! The report of a migration: JSON with QEMU's keys where `query-migrate` has them.

use std::{error::Error, fs, io::Write as _, time::Duration};

use anyhow::{Context as _, Result};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use vamoose_codec::{DeviceWork, Engines};
use vamoose_link::Snapshot;
use vamoose_relay::{DowntimeParts, Moved, chain};

/// What a migration was and cost. Times are in milliseconds, as QEMU's.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Report {
    pub(crate) status: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error_desc: Option<String>,
    pub(crate) total_time: u64,
    /// Of the guest; a bare relay cannot know it.
    pub(crate) downtime: Option<u64>,
    /// What the downtime consists of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) downtime_parts: Option<DowntimeParts>,
    pub(crate) setup_time: u64,
    pub(crate) ram: Ram,
    pub(crate) method: &'static str,
    pub(crate) level: Option<i32>,
    pub(crate) engine: &'static str,
    pub(crate) wire_bytes: u64,
    pub(crate) page_bytes: u64,
    pub(crate) zero_pages: u64,
    /// Packets that software did instead of a device.
    pub(crate) fallbacks: u64,
    /// Packets of a device that software has checked.
    pub(crate) verified: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) accelerator: Option<Accelerator>,
    pub(crate) cpu_seconds: CpuSeconds,
}

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Ram {
    /// Bytes towards the destination.
    pub(crate) transferred: u64,
    /// Normal pages.
    pub(crate) normal: u64,
    /// Zero pages.
    pub(crate) duplicate: u64,
    /// Megabits per second towards the destination, on average.
    pub(crate) mbps: f64,
    pub(crate) pages_per_second: u64,
    /// Rounds over the guest's memory; a bare relay cannot know it.
    pub(crate) dirty_sync_count: Option<u64>,
    pub(crate) dirty_sync_missed_zero_copy: u64,
}

/// What the devices did that work page by page (engine iaa), and what the processor did in their stead, in pages.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Accelerator {
    by_device: u64,
    /// No work queue took them.
    refused: u64,
    /// A device failed.
    failed: u64,
    /// A device was slower, or never answered.
    overtaken: u64,
    /// Whether the devices are software, and all of this is no statement about hardware.
    model: bool,
}

impl From<DeviceWork> for Accelerator {
    fn from(work: DeviceWork) -> Self {
        Self {
            by_device: work.by_device,
            refused: work.refused,
            failed: work.failed,
            overtaken: work.overtaken,
            model: work.modelled,
        }
    }
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct CpuSeconds {
    pub(crate) encode: f64,
    pub(crate) decode: f64,
    /// Of this whole process.
    pub(crate) total: f64,
}

impl Report {
    /// The report of what one relay moved.
    pub(crate) fn new(
        engines: &Engines,
        moved: Snapshot,
        total: Duration,
        setup: Duration,
    ) -> Self {
        let settings = engines.settings();
        let pages = moved.normal_pages + moved.zero_pages;
        let seconds = total.as_secs_f64().max(1e-3);
        Self {
            status: "completed",
            error_desc: None,
            total_time: millis(total),
            downtime: None,
            downtime_parts: None,
            setup_time: millis(setup),
            ram: Ram {
                transferred: moved.wire_bytes,
                normal: moved.normal_pages,
                duplicate: moved.zero_pages,
                mbps: moved.wire_bytes as f64 * 8.0 / 1e6 / seconds,
                pages_per_second: pages * 1000 / millis(total).max(1),
                dirty_sync_count: None,
                dirty_sync_missed_zero_copy: 0,
            },
            method: settings.name(),
            level: settings.level(),
            engine: engines.name(),
            wire_bytes: moved.wire_bytes,
            page_bytes: moved.page_bytes,
            zero_pages: moved.zero_pages,
            fallbacks: moved.engines.fallbacks,
            verified: moved.engines.checked,
            accelerator: engines.device_work().map(Accelerator::from),
            cpu_seconds: CpuSeconds {
                encode: moved.encode_time.as_secs_f64(),
                decode: moved.decode_time.as_secs_f64(),
                total: process_cpu_time().as_secs_f64(),
            },
        }
    }

    /// Makes it the report of a migration that ended by `error`.
    pub(crate) fn failed(mut self, status: &'static str, error: &dyn Error) -> Self {
        self.status = status;
        self.error_desc = Some(chain(error));
        self
    }

    /// Adds what only the source QEMU knows.
    pub(crate) fn of_guest(mut self, moved: &Moved) -> Self {
        let account = &moved.source;
        self.downtime = moved.downtime.map(millis);
        self.downtime_parts = moved.downtime_parts;
        self.setup_time = account["setup-time"].as_u64().unwrap_or(0);
        self.ram.dirty_sync_count = account["ram"]["dirty-sync-count"].as_u64();
        // On the main stream, where a relay does not see them (zero-page-detection legacy).
        let duplicate = account["ram"]["duplicate"].as_u64().unwrap_or(0);
        self.ram.duplicate = self.ram.duplicate.max(duplicate);
        self
    }

    /// Writes the report to `target`, a file or `-` for standard output.
    pub(crate) fn write(&self, target: &str) -> Result<()> {
        write_json(self, target)
    }
}

/// Writes a report of any command to `target`, a file or `-` for standard output.
pub(crate) fn write_json(report: &impl Serialize, target: &str) -> Result<()> {
    let mut text = serde_json::to_string_pretty(report).context("cannot write the report")?;
    text.push('\n');
    if target == "-" {
        std::io::stdout().write_all(text.as_bytes())
    } else {
        fs::write(target, text)
    }
    .with_context(|| format!("cannot write the report to {target}"))
}

pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// CPU time of this process, user and system.
pub(crate) fn process_cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}
