//! CPU time, memory, descriptors and threads of a process, from /proc.

use std::{fs, path::Path};

use anyhow::{Context, Result};

/// CPU seconds (user and system) of a process with all its threads. The resolution is the kernel's clock tick, usually 10 ms.
pub fn cpu_seconds(pid: u32) -> Result<f64> {
    seconds_in(&format!("/proc/{pid}/stat"))
}

/// CPU seconds of a process or thread, by the path of its `stat`.
pub(crate) fn seconds_in(path: &str) -> Result<f64> {
    let stat = fs::read_to_string(path).with_context(|| format!("reading {path}"))?;
    let ticks = cpu_ticks(&stat).with_context(|| format!("{path} is not as expected: {stat}"))?;
    Ok(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

/// The most bytes of memory, private and shared, that were resident at any time.
pub fn peak_memory(pid: u32) -> Result<u64> {
    memory(pid, "VmHWM:")
}

/// The bytes of memory, private and shared, that are resident now.
pub fn resident_memory(pid: u32) -> Result<u64> {
    memory(pid, "VmRSS:")
}

/// The number of open descriptors.
pub fn descriptors(pid: u32) -> Result<usize> {
    let path = format!("/proc/{pid}/fd");
    let open = fs::read_dir(&path).with_context(|| format!("reading {path}"))?;
    Ok(open.count())
}

fn memory(pid: u32, name: &str) -> Result<u64> {
    let path = format!("/proc/{pid}/status");
    let status = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    kilobytes(&status, name).with_context(|| format!("no {name} in {path}: has the process ended?"))
}

/// The state of each thread of a process (R: running, S: sleeping, D: waiting for storage) and where it waits in the kernel, for a
/// message about a process that does not react.
pub fn threads(pid: u32) -> String {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"));
    let about = |task: &Path| {
        let stat = fs::read_to_string(task.join("stat")).ok()?;
        let (name, rest) = stat.split_once('(')?.1.rsplit_once(") ")?;
        let place = fs::read_to_string(task.join("wchan")).unwrap_or_default();
        Some(format!("{name}: {} {place}", rest.get(..1)?))
    };
    let tasks = tasks.into_iter().flatten().flatten();
    let threads = tasks.filter_map(|task| about(&task.path()));
    threads.collect::<Vec<_>>().join(", ")
}

/// The bytes of memory that are available without swapping.
pub fn available_memory() -> Result<u64> {
    let info = fs::read_to_string("/proc/meminfo").context("reading /proc/meminfo")?;
    kilobytes(&info, "MemAvailable:").context("no MemAvailable in /proc/meminfo")
}

/// utime + stime, fields 14 and 15 of /proc/PID/stat. The program's name, field 2, may hold spaces and parentheses.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

fn kilobytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim()
        .strip_suffix(" kB")?
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_parentheses_do_not_shift_the_fields() {
        let stat = "42 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 110 23 0 0 20 0 1 0";
        assert_eq!(cpu_ticks(stat), Some(133));
        assert_eq!(cpu_ticks("42 (a) S 1 2"), None);
    }

    #[test]
    fn a_thread_that_runs_is_told() {
        let told = threads(std::process::id());
        assert!(told.contains(": R "), "{told}");
    }

    #[test]
    fn memory_is_read_in_bytes() {
        let status = "Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t 1024 kB\n";
        assert_eq!(kilobytes(status, "VmHWM:"), Some(2 << 20));
        assert_eq!(kilobytes("Name:\tzombie\n", "VmHWM:"), None);
    }

    #[test]
    fn this_process_has_figures() {
        let id = std::process::id();
        assert!(resident_memory(id).unwrap() > 1 << 20);
        assert!(peak_memory(id).unwrap() >= resident_memory(id).unwrap());
        assert!(descriptors(id).unwrap() > 2);
        assert!(cpu_seconds(std::process::id()).unwrap() >= 0.0);
        assert!(cpu_seconds(u32::MAX).is_err());
    }
}
