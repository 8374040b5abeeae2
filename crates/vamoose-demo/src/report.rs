//! The report: keys of the other commands' reports where they apply, and the demo's own. Times are in milliseconds, like QEMU's.

use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};
use testguest::Proof;
use vamoose::report;
use vamoose_live::{SourceConfig, ZeroPageDetection};

use crate::{digest::Digest, dirty_log::LogName, guest::Shape, messages::Arrived, source::Run};

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
    pub(crate) verdict: Verdict,
    pub(crate) arrived: Option<Arrived>,
}

/// Whether the guest that arrived is the one that was sent, as far as that has been proven.
#[derive(Debug, Default)]
pub(crate) struct Verdict {
    /// Whether all of the memory was the same at the switchover; `None` if it could not be compared.
    pub(crate) memory_equal: Option<bool>,
    /// Whether the guest could prove its memory, at the switchover and after it had resumed on either side.
    pub(crate) checksum_holds: bool,
    /// The checks that failed.
    pub(crate) wrong: Vec<String>,
}

impl Verdict {
    /// Compares the guest that was sent, `checksum` and `digest`, with what has arrived.
    pub(crate) fn arrived(&mut self, checksum: &Proof, digest: &Digest, arrived: &Arrived) {
        let difference = digest.difference(&arrived.digest);
        self.memory_equal = Some(difference.is_none());
        if let Some(difference) = difference {
            self.wrong
                .push(format!("the memory is not equal: {difference}"));
        }
        self.checksum_holds = arrived.checksum.as_ref() == Ok(checksum);
        match &arrived.checksum {
            Ok(there) if there == checksum => {}
            Ok(there) => self.wrong.push(format!(
                "the guest that arrived ({there:?}) is not the one that was sent ({checksum:?})"
            )),
            Err(error) => self
                .wrong
                .push(format!("the checksum does not hold: {error}")),
        }
    }
}

/// The report of a migration with `config`, and of its guest.
pub(crate) fn json(
    config: &SourceConfig,
    shape: &Shape,
    dirty_log: LogName,
    run: &Run,
    outcome: &Outcome,
) -> Result<Value> {
    let (status, moved) = (&run.status, run.moved);
    let millis = Duration::from_millis;
    let setup_time = millis(status.setup_time);
    let common = report::Report::new(&config.method, moved, millis(status.total_time), setup_time);
    let mut report = serde_json::to_value(common.of_link(run.session.as_ref()))?;
    let arrived = outcome.arrived.as_ref();
    set(
        &mut report,
        json!({
            "status": outcome.status,
            "memory-equal": outcome.verdict.memory_equal,
            "checksum-holds": outcome.verdict.checksum_holds,
            "downtime": status.downtime,
            "channels": config.channels,
            "packet-bytes": config.packet_bytes,
            "zero-copy": {
                "requested": config.zero_copy,
                "sends": moved.zero_copy_sends,
                // Sends that the kernel copied.
                "copied": moved.copied_sends,
                // Flushes that found nothing but copies: QEMU's dirty-sync-missed-zero-copy.
                "missed": moved.missed_zero_copy,
            },
            "zero-page-detection": { "by": name(&config.zero_page_detection) },
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
            "throttle-percentage": status.cpu_throttle_percentage,
            "dirty-log": dirty_log,
        }),
    );
    if let Some(parts) = &status.downtime_parts {
        report["downtime-parts"] = json!(parts);
    }
    report["ram"]["dirty-sync-count"] = status.ram.dirty_sync_count.into();
    report["ram"]["dirty-sync-missed-zero-copy"] = moved.missed_zero_copy.into();
    set(
        &mut report["zero-page-detection"],
        json!(status.zero_page_detection),
    );
    if let Some(arrived) = arrived {
        report["copy"] = json!({ "by": if arrived.copy.is_some() { "dsa" } else { "cpu" } });
        set(&mut report["copy"], json!(arrived.copy));
    }
    if let Some(failure) = &outcome.failure {
        report["error-desc"] = json!(failure);
    }
    Ok(report)
}

fn name(detection: &ZeroPageDetection) -> &'static str {
    match detection {
        ZeroPageDetection::None => "none",
        ZeroPageDetection::Cpu => "cpu",
        ZeroPageDetection::Dsa(_) => "dsa",
    }
}

/// Copies the keys of `values` into `object`.
fn set(object: &mut Value, values: Value) {
    if let (Value::Object(object), Value::Object(values)) = (object, values) {
        object.extend(values);
    }
}

#[cfg(test)]
mod tests {
    use testguest::{Backing, Fill, Memory, fill};

    use super::*;
    use crate::guest::ram_of;

    fn digest(content: &Fill) -> Digest {
        let memory = Memory::new(Backing::Anonymous, 1 << 20).unwrap();
        fill(&memory, content).unwrap();
        Digest::of(&ram_of(&memory).unwrap()).unwrap()
    }

    fn checksum(sum: u64) -> Proof {
        Proof {
            writes: 7,
            sums: vec![sum],
        }
    }

    /// The verdict on a guest that arrives with this checksum and memory.
    fn verdict(there: Result<Proof, String>, memory: &Fill) -> Verdict {
        let mut verdict = Verdict::default();
        let arrived = Arrived {
            checksum: there,
            digest: digest(memory),
            cpu_seconds: 0.0,
            decode_seconds: 0.0,
            copy: None,
        };
        verdict.arrived(&checksum(1), &digest(&Fill::Mixed), &arrived);
        verdict
    }

    #[test]
    fn an_intact_guest_passes() {
        let verdict = verdict(Ok(checksum(1)), &Fill::Mixed);
        assert_eq!(verdict.memory_equal, Some(true));
        assert!(verdict.checksum_holds);
        assert_eq!(verdict.wrong, Vec::<String>::new());
    }

    #[test]
    fn each_defect_is_reported() {
        for (there, memory, equal, holds, told) in [
            (Ok(1), Fill::Zero, false, true, "is not equal"),
            (Ok(2), Fill::Mixed, true, false, "not the one"),
            (Err("lost"), Fill::Mixed, true, false, "hold: lost"),
        ] {
            let there = there.map(checksum).map_err(str::to_owned);
            let verdict = verdict(there, &memory);
            assert_eq!(verdict.memory_equal, Some(equal), "{told}");
            assert_eq!(verdict.checksum_holds, holds, "{told}");
            assert_eq!(verdict.wrong.len(), 1, "{verdict:?}");
            assert!(verdict.wrong[0].contains(told), "{verdict:?}");
        }
    }
}
