//! How much of its memory a guest writes, as QEMU sees it (`calc-dirty-rate`).
//!
//! QEMU compares checksums of sampled pages (`page-sampling`), which costs the guest nothing. Its other modes count every page, but
//! make each first write of a page trap, as a migration does. Pages written with the same content are not seen, nor are RAM blocks of
//! less than 128 MiB; the rate is in whole MiB per second.

use std::{ops::ControlFlow, time::Duration};

use serde_json::json;

use super::{Qemu, QemuError};

/// How long QEMU may take beside the time over which it measures.
const LATE: Duration = Duration::from_secs(10);

/// Pages that are compared: as many as take QEMU a few tenths of a second.
const PAGES: u64 = 1 << 16;

impl Qemu {
    /// Begins to measure over some `seconds`.
    pub(crate) fn begin_dirty_rate(&mut self, seconds: u64, ram: u64) -> Result<(), QemuError> {
        let sampled = (PAGES / (ram >> 30).max(1)).clamp(128, 8192);
        let arguments = json!({ "calc-time": seconds, "sample-pages": sampled });
        self.execute("calc-dirty-rate", arguments)
    }

    /// Bytes of pages that changed per second, over the time that [`begin_dirty_rate`](Self::begin_dirty_rate) was told.
    pub(crate) fn dirty_rate(&mut self, seconds: u64) -> Result<f64, QemuError> {
        let within = Duration::from_secs(seconds) + LATE;
        self.ask_until("a measured dirty rate", within, |qemu| {
            let answer = qemu.qmp.execute("query-dirty-rate", json!({}))?;
            let rate = answer["dirty-rate"].as_f64();
            Ok(match (answer["status"].as_str(), rate) {
                (Some("measured"), Some(rate)) => ControlFlow::Break(rate.max(0.0) * 1_048_576.0),
                (status, _) => ControlFlow::Continue(status.unwrap_or_default().to_owned()),
            })
        })
    }

    /// Bytes of RAM.
    pub(crate) fn ram(&mut self) -> Result<u64, QemuError> {
        const COMMAND: &str = "query-memory-size-summary";
        let answer = self.qmp.execute(COMMAND, json!({}))?;
        let part = |name: &str| answer[name].as_u64();
        let base = part("base-memory").ok_or(QemuError::Answer(COMMAND, "base-memory"))?;
        Ok(base.saturating_add(part("plugged-memory").unwrap_or(0)))
    }
}
