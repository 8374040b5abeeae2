//! Measures `live`: a guest of `vamoose-demo` with the same content in its memory, of which the guest writes one page a second.

use std::ffi::OsStr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lab::ram;
use lab::vamoose::Vamoose;
use serde_json::Value;
use tempfile::TempDir;

use super::Host;
use super::still::SEED;
use crate::record::{Cell, Cpu, Figures, Outcome, Record};

/// Time limit, including the time for filling and comparing the memory.
const MOST: Duration = Duration::from_secs(300);

pub(super) fn measure(host: &Host, cell: &Cell, round: u32) -> Result<Record> {
    let folder = TempDir::new_in("/dev/shm").context("a folder for the memory image")?;
    let image = folder.path().join("ram");
    let fill = match host.corpus.fill(cell.guest, &host.qemu, cell.ram)? {
        Some(fill) => {
            ram::write(&image, cell.ram, &fill, SEED)?;
            image.as_os_str()
        }
        None => OsStr::new("zero"),
    };
    let link = host.link(cell.link)?;
    let contender = &cell.contender;
    let mut command = link.source.command(&host.demo);
    command.args(["--guest", "threads", "--rate", "1", "--json", "-"]);
    command.args(["--method", &contender.method]);
    command.args(["--ram", &cell.ram.to_string()]);
    command.args(["--channels", &cell.channels.to_string()]);
    command.args(["--downtime-limit", &cell.downtime_limit.to_string()]);
    command.args(["--timeout", &cell.timeout.to_string()]);
    command.args(["--listen", &format!("tcp:{}:0", link.destination.address())]);
    if host.has_links {
        let via = format!("ip netns exec {}", link.destination.name());
        command.args(["--via", &via]);
    }
    if !contender.options.iter().any(|option| option == "--plain") {
        command.arg("--insecure");
    }
    command
        .args(["--prealloc", "--fill"])
        .arg(fill)
        .args(&contender.options);
    let sent_before = link.source.traffic().ok();
    let ended = Vamoose::start(&mut command)?.finish(MOST)?.success()?;
    let sent = sent_before.and_then(|before| Some(link.source.traffic().ok()?.sent - before.sent));
    let report: Value = serde_json::from_str(&ended.stdout).context("vamoose-demo's report")?;
    ensure!(
        report["memory-equal"] == true,
        "the memory differs after the migration: {report}"
    );
    let number = |value: &Value| {
        let number = value.as_f64();
        number.with_context(|| format!("missing in {report}"))
    };
    let cpu = &report["cpu-seconds"];
    let figures = Figures {
        seconds: number(&report["total-time"])? / 1e3,
        downtime_reported: report["downtime"].as_f64(),
        rounds: report["ram"]["dirty-sync-count"].as_u64(),
        wire_bytes: report["wire-bytes"].as_u64(),
        link_bytes: sent,
        normal_pages: report["ram"]["normal"].as_u64(),
        zero_pages: report["ram"]["duplicate"].as_u64(),
        cpu: Cpu {
            sender: number(&cpu["source"])?,
            receiver: number(&cpu["destination"])?,
            ..Cpu::default()
        },
        ..Figures::default()
    };
    Ok(Record::new(cell, round, Outcome::Equal, figures))
}
