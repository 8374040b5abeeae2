//! Watches a migration until its end.

use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use lab::net;
use lab::qemu::Qemu;
use serde_json::Value;

use super::begin::{Finished, Helpers};
use crate::record::{Cell, Figures, Moment};

/// What was observed.
pub(super) struct Watched {
    /// The time to which all times of the record refer.
    pub(super) began: Instant,
    /// The same by the clock of QEMU's events: since 1970.
    pub(super) began_at: Duration,
    /// The source QEMU's report of a completed migration; `None` if it took too long.
    pub(super) account: Option<Value>,
    pub(super) timeline: Vec<Moment>,
    pub(super) throttle: u64,
    pub(super) seconds: f64,
}

/// Interval of the samples.
const LOOK: Duration = Duration::from_millis(50);

/// When a timeline is longer, every second moment is removed.
const MOST_MOMENTS: usize = 240;

/// Watches until the migration is completed, or has taken too long. `meanwhile` is called at each sample.
pub(super) fn watch(
    source: &mut Qemu,
    helpers: &mut Helpers,
    cell: &Cell,
    mut meanwhile: impl FnMut(Duration) -> Result<()>,
) -> Result<Watched> {
    let sent_before = net::sent_by(source.pid()).ok();
    let mut seen = Watched {
        began: Instant::now(),
        began_at: SystemTime::now().duration_since(UNIX_EPOCH)?,
        account: None,
        timeline: Vec::new(),
        throttle: 0,
        seconds: 0.0,
    };
    let mut stride = 1;
    // Before that, QEMU reports the previous migration.
    let mut has_begun = false;
    for look in 0_u64.. {
        let have_ended = helpers.have_ended()?;
        helpers.look();
        let account = source.qmp.query_migrate()?;
        let elapsed = seen.began.elapsed();
        seen.seconds = elapsed.as_secs_f64();
        let throttle = account["cpu-throttle-percentage"].as_u64();
        seen.throttle = seen.throttle.max(throttle.unwrap_or(0));
        let is_over = match account["status"].as_str() {
            // Without a downtime, it is the migration by which the guest arrived.
            Some("completed") => account["downtime"].is_u64(),
            Some("failed" | "cancelled") if has_begun => bail!("the migration failed: {account}"),
            Some("active") => {
                has_begun = true;
                false
            }
            _ => false,
        };
        if seen.timeline.len() >= MOST_MOMENTS {
            let mut is_kept = false;
            seen.timeline.retain(|_| {
                is_kept = !is_kept;
                is_kept
            });
            stride *= 2;
        }
        if is_over || has_begun && look % stride == 0 {
            let sent =
                sent_before.and_then(|before| Some(net::sent_by(source.pid()).ok()? - before));
            seen.timeline.push(moment(elapsed, &account, sent));
        }
        if is_over {
            seen.account = Some(account);
            break;
        }
        if have_ended {
            bail!("vamoose has ended, the migration has not: {account}");
        }
        if elapsed.as_secs() >= cell.timeout {
            break;
        }
        meanwhile(elapsed)?;
        thread::sleep(LOOK);
    }
    Ok(seen)
}

fn moment(elapsed: Duration, account: &Value, sent: Option<u64>) -> Moment {
    let of_ram = |name: &str| account["ram"][name].as_u64().unwrap_or(0);
    Moment {
        milliseconds: elapsed.as_millis().try_into().unwrap_or(u64::MAX),
        sent_bytes: sent.unwrap_or_else(|| of_ram("transferred")),
        remaining_bytes: of_ram("remaining"),
        rounds: of_ram("dirty-sync-count"),
        dirty_pages_rate: of_ram("dirty-pages-rate"),
    }
}

/// Figures from the reports of the source QEMU and of Vamoose.
pub(super) fn figures(seen: &Watched, finished: &Finished) -> Result<Figures> {
    let account = seen.account.as_ref().context("it was not completed")?;
    let report = finished.report.as_ref();
    let ram = |name: &str| account["ram"][name].as_u64();
    let millis = account["total-time"].as_f64();
    let of_report = |name: &str| report.and_then(|report| report[name].as_u64());
    let parts = report.and_then(|report| report["downtime-parts"].as_object());
    let parts = parts.into_iter().flatten();
    let parts = parts.filter_map(|(name, value)| Some((name.clone(), value.as_f64()?)));
    Ok(Figures {
        seconds: millis.with_context(|| format!("no total-time: {account}"))? / 1e3,
        downtime_reported: account["downtime"].as_f64(),
        downtime_parts: parts.collect(),
        rounds: ram("dirty-sync-count"),
        wire_bytes: match report {
            Some(_) => of_report("wire-bytes"),
            None => ram("transferred"),
        },
        normal_pages: report
            .map_or_else(|| ram("normal"), |report| report["ram"]["normal"].as_u64()),
        zero_pages: match report {
            Some(report) => report["ram"]["duplicate"].as_u64(),
            None => ram("duplicate"),
        },
        peak_sender: finished.peaks[0],
        peak_receiver: finished.peaks[1],
        throttle: Some(seen.throttle).filter(|throttle| *throttle > 0),
        ..Figures::default()
    })
}
