//! The machine of a report: what decides how its devices answer, and nothing that names it or its users.

use std::fs;

use idxd::{
    Kind, Operations,
    discovery::{self, DeviceReport, Report, Root, WorkQueue},
};
use serde::Serialize;

/// A machine with its devices.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Host {
    /// The kernel's release.
    kernel: Option<String>,
    /// The processor's model.
    cpu: Option<String>,
    enqcmd: bool,
    enqcmd_enabled: bool,
    movdir64b: bool,
    waitpkg: bool,
    /// This process has CAP_SYS_RAWIO, without which kernels may let it submit through write(2) alone.
    raw_io: bool,
    missing: Vec<String>,
    devices: Vec<Device>,
}

/// A device. Registers are as sysfs has them, in hexadecimal.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Device {
    name: String,
    kind: &'static str,
    version: Option<String>,
    state: Option<String>,
    numa_node: Option<u32>,
    gen_cap: Option<String>,
    op_cap: Option<String>,
    /// Of an IAA of the second generation or later.
    iaa_cap: Option<String>,
    engines: usize,
    max_work_queues_size: Option<u32>,
    max_batch_size: Option<u32>,
    max_transfer_size: Option<u64>,
    event_log_entries: Option<u32>,
    pasid_enabled: Option<bool>,
    problem: Option<String>,
    queues: Vec<Queue>,
}

/// A work queue as it is set up. Its name, which its administrator chose, is left out.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Queue {
    name: String,
    state: Option<String>,
    r#type: Option<String>,
    group: Option<u32>,
    priority: Option<u32>,
    mode: Option<String>,
    size: Option<u32>,
    threshold: Option<u32>,
    /// Null where a batch cannot be submitted.
    max_batch: Option<u32>,
    max_transfer: Option<u64>,
    operations: Option<String>,
    block_on_fault: Option<bool>,
    prs_disable: Option<bool>,
    ats_disable: Option<bool>,
    problem: Option<String>,
}

impl Host {
    pub(super) fn of(root: &Root) -> Self {
        let report = discovery::report(root);
        let text = |file: &str| fs::read_to_string(root.proc.join(file)).ok();
        let cpuinfo = text("cpuinfo").unwrap_or_default();
        let model = cpuinfo
            .lines()
            .find_map(|line| line.strip_prefix("model name"));
        let Report { cpu, raw_io, .. } = report;
        Self {
            kernel: text("sys/kernel/osrelease").map(|release| release.trim().to_owned()),
            cpu: model.map(|model| model.trim_matches([' ', '\t', ':']).to_owned()),
            enqcmd: cpu.enqcmd,
            enqcmd_enabled: cpu.enqcmd_enabled,
            movdir64b: cpu.movdir64b,
            waitpkg: cpu.waitpkg,
            raw_io,
            missing: report.missing.iter().map(ToString::to_string).collect(),
            devices: report.devices.iter().map(Device::of).collect(),
        }
    }
}

impl Device {
    fn of(report: &DeviceReport) -> Self {
        let DeviceReport {
            device, event_log, ..
        } = report;
        Self {
            name: device.name.to_string(),
            kind: kind(device.name.kind),
            version: device.version.map(|version| format!("{version:#x}")),
            state: device.state.as_ref().map(ToString::to_string),
            numa_node: device.numa_node,
            gen_cap: device.gen_cap.map(|bits| format!("{bits:#x}")),
            op_cap: device.op_cap.map(opcodes),
            iaa_cap: device.iaa_cap.map(|bits| format!("{bits:#x}")),
            engines: device.engines.len(),
            max_work_queues_size: device.max_work_queues_size,
            max_batch_size: device.max_batch_size,
            max_transfer_size: device.max_transfer_size,
            event_log_entries: event_log.and_then(|log| log.entries),
            pasid_enabled: device.pasid_enabled,
            problem: device.problem.as_ref().map(ToString::to_string),
            queues: device.queues.iter().map(Queue::of).collect(),
        }
    }
}

impl Queue {
    fn of(queue: &WorkQueue) -> Self {
        let limits = queue.limits();
        Self {
            name: queue.name.to_string(),
            state: queue.state.as_ref().map(ToString::to_string),
            r#type: queue.kind.as_ref().map(ToString::to_string),
            group: queue.group,
            priority: queue.priority,
            mode: limits.map(|limits| format!("{:?}", limits.mode).to_lowercase()),
            size: queue.size,
            threshold: limits.map(|limits| limits.threshold),
            max_batch: limits.and_then(|limits| limits.max_batch.map(u32::from)),
            max_transfer: limits.map(|limits| limits.max_transfer),
            operations: limits.map(|limits| opcodes(limits.operations)),
            block_on_fault: limits.map(|limits| limits.block_on_fault),
            prs_disable: queue.prs_disable,
            ats_disable: queue.ats_disable,
            problem: queue.usable().err().map(|problem| problem.to_string()),
        }
    }
}

pub(super) fn kind(kind: Kind) -> &'static str {
    match kind {
        Kind::Dsa => "dsa",
        Kind::Iaa => "iaa",
    }
}

/// A map of opcodes as one number, bit N for opcode N.
fn opcodes(Operations([a, b, c, d]): Operations) -> String {
    format!("{d:016x}{c:016x}{b:016x}{a:016x}")
}
