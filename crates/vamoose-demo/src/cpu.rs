//! The CPU time of a migration.

use std::{fs, time::Duration};

use vamoose::report::process_cpu_time;

/// CPU time of this process so far, user and system.
#[derive(Clone, Copy)]
pub(crate) struct CpuTime {
    process: Duration,
    vcpus: Option<Duration>,
}

impl CpuTime {
    /// Up to now.
    pub(crate) fn now() -> Self {
        Self {
            process: process_cpu_time(),
            vcpus: vcpu_time(),
        }
    }

    /// Time of all threads but the vCPUs', since `before`.
    pub(crate) fn without_vcpus(self, before: Self) -> Duration {
        let process = self.process.saturating_sub(before.process);
        process.saturating_sub(self.of_vcpus(before).unwrap_or_default())
    }

    /// Time of the vCPUs' threads, since `before`; `None` where the kernel does not report it.
    pub(crate) fn of_vcpus(self, before: Self) -> Option<Duration> {
        Some(self.vcpus?.saturating_sub(before.vcpus?))
    }
}

/// The time of the threads that run a [`Guest`](testguest::Guest)'s vCPUs.
fn vcpu_time() -> Option<Duration> {
    let mut time = Duration::ZERO;
    for thread in fs::read_dir("/proc/self/task").ok()? {
        let folder = thread.ok()?.path();
        // A thread may end in the meantime.
        let Ok(name) = fs::read_to_string(folder.join("comm")) else {
            continue;
        };
        if name.starts_with("vcpu ") {
            let account = fs::read_to_string(folder.join("schedstat")).ok()?;
            let nanos = account.split_ascii_whitespace().next()?.parse().ok()?;
            time += Duration::from_nanos(nanos);
        }
    }
    Some(time)
}
