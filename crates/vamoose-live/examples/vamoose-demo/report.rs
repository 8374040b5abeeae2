//! The report: keys of the other commands' reports where they apply, and the demo's own. Times are in milliseconds, like QEMU's.

use anyhow::Result;
use serde_json::{Value, json};
use vamoose::report::Report;
use vamoose_live::SourceConfig;

use crate::{dsa::Detection, guest::Shape, messages::Arrived, source::Run};

/// The outcome for the guest, as far as it is known.
#[derive(Default)]
pub(crate) struct Outcome {
    pub(crate) status: &'static str,
    /// Cause, and state of the guest.
    pub(crate) failure: Option<String>,
    /// Where it runs at the end: `source`, `destination`, or `undecided` if that is unknown and it is paused.
    pub(crate) at: &'static str,
    /// Pages written until the end of the migration.
    pub(crate) writes: u64,
    /// Pages written after that.
    pub(crate) writes_after: u64,
    /// Whether all of the memory was the same at the switchover; `None` if it could not be compared.
    pub(crate) memory_equal: Option<bool>,
    /// Whether the guest could prove its memory, at the switchover and after it had resumed on either side.
    pub(crate) checksum_holds: bool,
    pub(crate) arrived: Option<Arrived>,
}

/// The report of a migration with `config`, and of its guest.
pub(crate) fn json(
    config: &SourceConfig,
    detection: Detection,
    shape: &Shape,
    run: &Run,
    outcome: &Outcome,
) -> Result<Value> {
    let (status, moved) = (run.handle.status(), run.handle.moved());
    let (total, setup) = (status.total_time, status.setup_time);
    let session = run.handle.session();
    let mut common = Report::new(&config.method, moved, total, setup).of_link(session.as_ref());
    common.status = outcome.status;
    common.error_desc.clone_from(&outcome.failure);
    common.downtime = status
        .downtime
        .and_then(|time| u64::try_from(time.as_millis()).ok());
    common.downtime_parts = status.downtime_parts;
    common.ram.dirty_sync_count = Some(status.ram.dirty_sync_count);
    common.ram.dirty_sync_missed_zero_copy = moved.missed_zero_copy;
    let mut report = serde_json::to_value(common)?;
    let arrived = outcome.arrived.as_ref();
    set(
        &mut report,
        json!({
            "memory-equal": outcome.memory_equal,
            "checksum-holds": outcome.checksum_holds,
            "channels": config.channels,
            "zero-copy": {
                "requested": config.zero_copy,
                "sends": moved.zero_copy_sends,
                // Sends that the kernel copied.
                "copied": moved.copied_sends,
                // Flushes that found nothing but copies: QEMU's dirty-sync-missed-zero-copy.
                "missed": moved.missed_zero_copy,
            },
            "zero-page-detection": { "by": detection },
            "guest": shape,
            // Without making, reading and comparing the memory; at the source with the guest's vCPUs.
            "cpu-seconds": {
                "source": run.cpu_time.as_secs_f64(),
                "destination": arrived.map(|arrived| arrived.cpu_seconds),
                "total": arrived.map(|arrived| run.cpu_time.as_secs_f64() + arrived.cpu_seconds),
                "encode": moved.encode_time.as_secs_f64(),
                "decode": arrived.map(|arrived| arrived.decode_seconds),
            },
        }),
    );
    set(
        &mut report["guest"],
        json!({
            "at": outcome.at,
            "writes": outcome.writes,
            "writes-after": outcome.writes_after,
        }),
    );
    set(
        &mut report["zero-page-detection"],
        json!(status.zero_page_detection),
    );
    Ok(report)
}

/// Copies the keys of `values` into `object`.
fn set(object: &mut Value, values: Value) {
    if let (Value::Object(object), Value::Object(values)) = (object, values) {
        object.extend(values);
    }
}
