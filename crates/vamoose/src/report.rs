//! The report of a migration: JSON, with the keys of QEMU's `query-migrate` where it has the same values.

use std::{
    error::Error,
    fs,
    io::{self, Write as _},
    net::IpAddr,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result};
use idxd::offload::OffloadCounters;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use serde_json::Value;
use vamoose_link::{Counters, MethodChoice, PathStatus, Session, millis};
use vamoose_relay::{AttemptId, CopiedDisks, DowntimeParts, GuestLocation, Moved, chain};

/// Report of a migration. Times are in milliseconds, as in QEMU.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Report {
    pub status: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_desc: Option<String>,
    /// The guest's name, the attempt to migrate it, and where it is; `None` for `vamoose relay`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<AttemptId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub location: Option<GuestLocation>,
    pub total_time: u64,
    /// `None` for `vamoose relay`, which cannot know the downtime.
    pub downtime: Option<u64>,
    /// The parts of the downtime.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub downtime_parts: Option<DowntimeParts>,
    /// What was done about a guest that had not been paused in time, and when: `action`, `milliseconds`, and the bytes `remaining`
    /// at that time.
    #[serde(skip_serializing_if = "Value::is_null")]
    pub on_timeout: Value,
    /// The guest's highest throttle, if it was slowed down.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_throttle_percentage: Option<u64>,
    pub setup_time: u64,
    pub ram: Ram,
    pub method: &'static str,
    pub level: Option<i32>,
    pub engine: &'static str,
    pub wire_bytes: u64,
    pub page_bytes: u64,
    pub zero_pages: u64,
    /// Pages sent as differences.
    pub delta: Delta,
    /// What the destination's page store had.
    pub shared: Shared,
    /// The disks that were copied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disks: Option<CopiedDisks>,
    /// Packets that software encoded or decoded instead of a device.
    pub fallbacks: u64,
    /// Packets of a device that software has verified.
    pub verified: u64,
    /// Pages processed by the devices of an engine that works page by page (iaa).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accelerator: Option<OffloadCounters>,
    pub cpu_seconds: CpuSeconds,
    /// The host that this process ran on: the guest's source.
    pub host: String,
    /// When the command was given, in seconds since 1970 (UTC).
    pub began: u64,
    /// The session with another Vamoose, if there was one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub link: Option<Link>,
}

/// Savings by sending differences from earlier versions of pages.
#[derive(Clone, Copy, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Delta {
    /// Pages that were sent as differences.
    pub pages: u64,
    /// Bytes of all pages in packets with differences, and bytes sent for these packets.
    pub page_bytes: u64,
    pub wire_bytes: u64,
    /// Bytes of the page cache.
    pub cache_bytes: u64,
}

/// Pages of the destination's page store.
#[derive(Clone, Copy, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Shared {
    /// Pages that were there, and were not sent.
    pub pages: u64,
    /// Pages that should have been there, and had to be sent.
    pub missed: u64,
}

/// The link to another Vamoose.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Link {
    /// Name or key of the peer, and its address.
    pub peer: String,
    /// The cipher; null without TLS.
    pub tls: Option<&'static str>,
    /// Whether checksums of pages and of all sent data were verified.
    pub check: bool,
    /// Number of times that a stream was continued over another connection.
    pub reconnects: u64,
    pub paths: Vec<PathReport>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct PathReport {
    pub to: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bind: Option<IpAddr>,
    /// Number of streams on the path at the end.
    pub streams: usize,
    /// Bytes that arrived over the path.
    pub delivered_bytes: u64,
    pub failures: u64,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Ram {
    /// Bytes towards the destination.
    pub transferred: u64,
    /// Normal pages.
    pub normal: u64,
    /// Zero pages.
    pub duplicate: u64,
    /// Average megabits per second towards the destination.
    pub mbps: f64,
    pub pages_per_second: u64,
    /// Rounds over the guest's memory; `None` for `vamoose relay`, which cannot know them.
    pub dirty_sync_count: Option<u64>,
    pub dirty_sync_missed_zero_copy: u64,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct CpuSeconds {
    pub encode: f64,
    pub decode: f64,
    /// CPU time of the whole process.
    pub total: f64,
}

impl Report {
    /// The report of one relay.
    pub fn new(method: &MethodChoice, moved: Counters, total: Duration, setup: Duration) -> Self {
        let pages = moved.normal_pages + moved.zero_pages;
        let seconds = total.as_secs_f64().max(1e-3);
        Self {
            status: "completed",
            total_time: millis(total),
            setup_time: millis(setup),
            ram: Ram {
                transferred: moved.wire_bytes,
                normal: moved.normal_pages,
                duplicate: moved.zero_pages,
                mbps: moved.wire_bytes as f64 * 8.0 / 1e6 / seconds,
                pages_per_second: pages * 1000 / millis(total).max(1),
                ..Ram::default()
            },
            method: method.name(),
            level: method.level(),
            engine: method.engine(),
            wire_bytes: moved.wire_bytes,
            page_bytes: moved.page_bytes,
            zero_pages: moved.zero_pages,
            delta: Delta {
                pages: moved.delta_pages,
                page_bytes: moved.delta_page_bytes,
                wire_bytes: moved.delta_wire_bytes,
                cache_bytes: moved.delta_cache_bytes,
            },
            shared: Shared {
                pages: moved.shared_pages,
                missed: moved.missed_pages,
            },
            fallbacks: moved.engines.fallbacks,
            verified: moved.engines.checked,
            accelerator: method.engines().device_work(),
            cpu_seconds: CpuSeconds {
                encode: moved.encode_time.as_secs_f64(),
                decode: moved.decode_time.as_secs_f64(),
                total: process_cpu_time().as_secs_f64(),
            },
            host: host_name(),
            began: began(total),
            ..Self::default()
        }
    }

    /// Adds the state of the session.
    pub fn of_link(mut self, session: Option<&Session>) -> Self {
        self.link = session.map(|session| Link {
            peer: session.peer().to_owned(),
            tls: session.cipher(),
            check: session.is_checked(),
            reconnects: session.reconnects(),
            paths: session.paths().into_iter().map(PathReport::of).collect(),
        });
        self
    }

    /// Adds the guest, the attempt to migrate it, and where it is.
    pub fn of_attempt(
        mut self,
        name: &str,
        attempt: Option<AttemptId>,
        location: GuestLocation,
    ) -> Self {
        self.name = Some(name.to_owned());
        self.attempt = attempt;
        self.location = Some(location);
        self
    }

    /// Adds the disks that were copied.
    pub fn of_disks(mut self, disks: Option<CopiedDisks>) -> Self {
        self.disks = disks;
        self
    }

    /// Turns this into the report of a failed migration.
    pub fn failed(mut self, status: &'static str, error: &dyn Error) -> Self {
        self.status = status;
        self.error_desc = Some(chain(error));
        self
    }

    /// Adds what was done about a guest that writes too fast, from QEMU's account.
    pub fn of_policy(mut self, account: &Value) -> Self {
        self.on_timeout = account["on-timeout"].clone();
        self.cpu_throttle_percentage = account["cpu-throttle-percentage"].as_u64();
        self
    }

    /// Adds the values that only the source QEMU knows.
    pub fn of_guest(mut self, moved: &Moved) -> Self {
        let account = &moved.source;
        self.downtime = moved.downtime.map(millis);
        self.downtime_parts = moved.downtime_parts;
        self.setup_time = account["setup-time"].as_u64().unwrap_or(0);
        self.ram.dirty_sync_count = account["ram"]["dirty-sync-count"].as_u64();
        // With zero-page-detection legacy, zero pages are on the main stream, which the relay does not parse.
        let duplicate = account["ram"]["duplicate"].as_u64().unwrap_or(0);
        self.ram.duplicate = self.ram.duplicate.max(duplicate);
        self
    }
}

impl PathReport {
    fn of(status: PathStatus) -> Self {
        Self {
            to: status.path.to.to_string(),
            bind: status.path.bind,
            streams: status.streams,
            delivered_bytes: status.delivered,
            failures: status.failures,
        }
    }
}

/// Writes a report to `target`: a file, or `-` for standard output, whose reader may close it early.
pub fn write_json(report: &impl Serialize, target: &str) -> Result<()> {
    let mut text = serde_json::to_string_pretty(report).context("cannot write the report")?;
    text.push('\n');
    match target {
        "-" => print(&text),
        file => fs::write(file, text).with_context(|| format!("cannot write the report to {file}")),
    }
}

/// Prints to standard output. A reader that has closed it, as `head` does, is no error.
pub fn print(text: &str) -> Result<()> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to standard output"),
    }
}

fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_owned()
}

fn began(total: Duration) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default().saturating_sub(total).as_secs()
}

/// CPU time of this process, user and system.
pub fn process_cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}
