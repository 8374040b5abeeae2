//! What a migration costs in CPU time, apart from the guest that runs meanwhile.
//!
//! The guest is emulated by its QEMU's vCPU threads and the migration is done by others, so the two can be told
//! apart exactly: a QEMU's share is its whole process less its vCPU threads.

use anyhow::{Context, Result};
use lab::{proc, qemu::Qemu};
use serde_json::json;

/// CPU seconds (user and system).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cpu {
    /// The source QEMU without the guest.
    pub(crate) source: f64,
    /// `vamoose migrate` and `vamoose serve`.
    pub(crate) vamoose: f64,
    /// The destination QEMU without the guest.
    pub(crate) destination: f64,
    /// The guest, in both QEMUs.
    pub(crate) guest: f64,
}

impl Cpu {
    pub(crate) fn migration(&self) -> f64 {
        self.source + self.vamoose + self.destination
    }
}

/// Started right before a migration and read right after it.
pub(crate) struct Meter {
    /// The source, the destination and `vamoose serve`.
    processes: lab::cpu::Meter,
    source: Vcpus,
    destination: Vcpus,
}

impl Meter {
    pub(crate) fn start(source: &mut Qemu, destination: &mut Qemu, server: u32) -> Result<Self> {
        Ok(Self {
            processes: lab::cpu::Meter::start(&[source.pid(), destination.pid(), server])?,
            source: Vcpus::of(source)?,
            destination: Vcpus::of(destination)?,
        })
    }

    /// `migrating`: what the process `vamoose migrate` used, which is not there any more.
    pub(crate) fn read(&self, migrating: f64) -> Result<Cpu> {
        let used = self.processes.read()?;
        let (source, destination) = (self.source.used()?, self.destination.used()?);
        // Clock ticks of threads and processes are rounded apart.
        let rest = |whole: f64, guest: f64| (whole - guest).max(0.0);
        Ok(Cpu {
            source: rest(used[0], source),
            vamoose: used[2] + migrating,
            destination: rest(used[1], destination),
            guest: source + destination,
        })
    }
}

/// The vCPU threads of one QEMU.
struct Vcpus {
    /// Their entries in /proc.
    stats: Vec<String>,
    at_start: f64,
}

impl Vcpus {
    fn of(qemu: &mut Qemu) -> Result<Self> {
        let pid = qemu.pid();
        let answer = qemu.qmp.execute("query-cpus-fast", json!({}))?;
        let cpus = answer.as_array().context("query-cpus-fast gave no list")?;
        let stats = cpus.iter().map(|cpu| {
            let thread = cpu["thread-id"].as_u64().context("a vCPU has no thread")?;
            Ok(format!("/proc/{pid}/task/{thread}/stat"))
        });
        let stats: Vec<_> = stats.collect::<Result<_>>()?;
        Ok(Self {
            at_start: sum(&stats)?,
            stats,
        })
    }

    fn used(&self) -> Result<f64> {
        Ok(sum(&self.stats)? - self.at_start)
    }
}

fn sum(stats: &[String]) -> Result<f64> {
    stats.iter().map(|path| proc::seconds_in(path)).sum()
}
