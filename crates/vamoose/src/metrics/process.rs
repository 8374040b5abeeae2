//! What this process takes of its host, under the names that Prometheus' own libraries use.

use std::{fmt, fs};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::Unit,
};
use rustix::{
    param::page_size,
    time::{ClockId, clock_gettime},
};

#[derive(Debug)]
pub(super) struct Process;

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let time = clock_gettime(ClockId::ProcessCPUTime);
        let seconds = time.tv_sec as f64 + time.tv_nsec as f64 / 1e9;
        let (help, unit) = ("CPU time of the process", Some(&Unit::Seconds));
        let cpu = encoder.encode_descriptor("process_cpu", help, unit, MetricType::Counter)?;
        ConstCounter::new(seconds).encode(cpu)?;
        if let Some(bytes) = resident_bytes() {
            let (name, help) = ("process_resident_memory", "Resident memory of the process");
            let unit = Some(&Unit::Bytes);
            let memory = encoder.encode_descriptor(name, help, unit, MetricType::Gauge)?;
            ConstGauge::new(bytes).encode(memory)?;
        }
        if let Ok(open) = fs::read_dir("/proc/self/fd") {
            let (name, help) = ("process_open_fds", "Open file descriptors");
            let files = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            ConstGauge::new(open.count()).encode(files)?;
        }
        Ok(())
    }
}

fn resident_bytes() -> Option<usize> {
    let statm = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: usize = statm.split_whitespace().nth(1)?.parse().ok()?;
    pages.checked_mul(page_size())
}
