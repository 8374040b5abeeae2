//! Watches a migration until its end.

use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use lab::qemu::Qemu;
use serde_json::Value;

use super::begin::{Finished, Helpers};
use crate::record::{Cell, Figures};

/// Observations of a migration.
pub(super) struct Watched {
    /// Time 0 of the record.
    pub(super) began: Instant,
    /// Time 0 by the clock of QEMU's events, since 1970.
    pub(super) began_at: Duration,
    /// The source QEMU's report of a completed migration; `None` if it took too long.
    pub(super) account: Option<Value>,
    pub(super) seconds: f64,
}

/// Interval of the looks at the migration.
const LOOK: Duration = Duration::from_millis(50);

/// Watches until the migration is completed, or has taken too long. `meanwhile` is called at each look.
pub(super) fn watch(
    source: &mut Qemu,
    helpers: &Helpers,
    cell: &Cell,
    mut meanwhile: impl FnMut() -> Result<()>,
) -> Result<Watched> {
    let mut seen = Watched {
        began: Instant::now(),
        began_at: SystemTime::now().duration_since(UNIX_EPOCH)?,
        account: None,
        seconds: 0.0,
    };
    // Before the beginning, QEMU reports the previous migration.
    let mut has_begun = false;
    loop {
        let have_ended = helpers.have_ended()?;
        let account = source.qmp.query_migrate()?;
        let elapsed = seen.began.elapsed();
        seen.seconds = elapsed.as_secs_f64();
        let is_over = match account["status"].as_str() {
            // A report without a downtime is that of the migration by which the guest arrived here.
            Some("completed") => account["downtime"].is_u64(),
            Some("failed" | "cancelled") if has_begun => bail!("the migration failed: {account}"),
            Some("active") => {
                has_begun = true;
                false
            }
            _ => false,
        };
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
        meanwhile()?;
        thread::sleep(LOOK);
    }
    Ok(seen)
}

/// Figures from the reports of the source QEMU and of Vamoose.
pub(super) fn figures(seen: &Watched, finished: &Finished) -> Result<Figures> {
    let account = seen.account.as_ref().context("it was not completed")?;
    let report = finished.report.as_ref();
    let pages = &report.unwrap_or(account)["ram"];
    let millis = account["total-time"].as_f64();
    let parts = report.and_then(|report| report["downtime-parts"].as_object());
    let parts = parts.into_iter().flatten();
    let parts = parts.filter_map(|(name, value)| Some((name.clone(), value.as_f64()?)));
    Ok(Figures {
        seconds: millis.with_context(|| format!("no total-time: {account}"))? / 1e3,
        downtime_reported: account["downtime"].as_f64(),
        downtime_parts: parts.collect(),
        rounds: account["ram"]["dirty-sync-count"].as_u64(),
        wire_bytes: match report {
            Some(report) => report["wire-bytes"].as_u64(),
            None => account["ram"]["transferred"].as_u64(),
        },
        normal_pages: pages["normal"].as_u64(),
        zero_pages: pages["duplicate"].as_u64(),
        ..Figures::default()
    })
}
