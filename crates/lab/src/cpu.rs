//! The CPU time of processes or threads between two moments.

use anyhow::{Context, Result};
use serde_json::json;

use crate::proc;
use crate::qemu::Qemu;

/// CPU time of some processes or threads since the meter was started.
#[derive(Debug)]
pub struct Meter {
    /// The path of each `stat` in /proc, and the CPU seconds at the start.
    at_start: Vec<(String, f64)>,
}

impl Meter {
    /// Starts measuring processes.
    pub fn start(pids: &[u32]) -> Result<Self> {
        Self::of(pids.iter().map(|pid| format!("/proc/{pid}/stat")))
    }

    fn of(stats: impl Iterator<Item = String>) -> Result<Self> {
        let at_start = stats.map(|stat| {
            let seconds = proc::seconds_in(&stat)?;
            Ok((stat, seconds))
        });
        Ok(Self {
            at_start: at_start.collect::<Result<_>>()?,
        })
    }

    /// CPU seconds (user and system) since the start, in the same order. A process that has ended counts until it is reaped.
    pub fn read(&self) -> Result<Vec<f64>> {
        let used = |(stat, before): &(String, f64)| Ok(proc::seconds_in(stat)? - before);
        self.at_start.iter().map(used).collect()
    }
}

/// The CPU time of a migration in a QEMU, without the guest: the whole process less its vCPU threads.
#[derive(Debug)]
pub struct QemuMeter(Meter);

impl QemuMeter {
    /// Starts measuring a QEMU.
    pub fn start(qemu: &mut Qemu) -> Result<Self> {
        let answer = qemu.qmp.execute("query-cpus-fast", json!({}))?;
        let cpus = answer.as_array().context("query-cpus-fast gave no list")?;
        let threads = cpus.iter().map(|cpu| cpu["thread-id"].as_u64());
        let threads: Option<Vec<_>> = threads.collect();
        let threads = threads.context("a vCPU has no thread")?.into_iter();
        let pid = qemu.pid();
        let vcpus = threads.map(|thread| format!("/proc/{pid}/task/{thread}/stat"));
        Meter::of([format!("/proc/{pid}/stat")].into_iter().chain(vcpus)).map(Self)
    }

    /// CPU seconds since the start.
    pub fn read(&self) -> Result<f64> {
        let used = self.0.read()?;
        let guest: f64 = used[1..].iter().sum();
        // The clock ticks of threads and processes are rounded separately.
        Ok((used[0] - guest).max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn counts_time_spent() {
        let meter = Meter::start(&[std::process::id()]).unwrap();
        let start = Instant::now();
        while meter.read().unwrap()[0] < 0.05 {
            assert!(
                start.elapsed() < Duration::from_secs(30),
                "busy for 30 s, but no CPU time was counted"
            );
        }
    }
}
