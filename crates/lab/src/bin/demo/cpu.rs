//! What a migration costs in CPU time, apart from the guest that runs meanwhile.
//!
//! The guest is emulated by its QEMU's vCPU threads and the migration is done by others, so the two can be told
//! apart exactly: a QEMU's share is its whole process less its vCPU threads.

use anyhow::{Context, Result};
use lab::{cpu, qemu::Qemu};
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
    processes: cpu::Meter,
    source_vcpus: cpu::Meter,
    destination_vcpus: cpu::Meter,
}

impl Meter {
    pub(crate) fn start(source: &mut Qemu, destination: &mut Qemu, server: u32) -> Result<Self> {
        Ok(Self {
            processes: cpu::Meter::start(&[source.pid(), destination.pid(), server])?,
            source_vcpus: vcpus(source)?,
            destination_vcpus: vcpus(destination)?,
        })
    }

    /// `migrating`: what the process `vamoose migrate` used, which is not there any more.
    pub(crate) fn read(&self, migrating: f64) -> Result<Cpu> {
        let used = self.processes.read()?;
        let source: f64 = self.source_vcpus.read()?.iter().sum();
        let destination: f64 = self.destination_vcpus.read()?.iter().sum();
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
fn vcpus(qemu: &mut Qemu) -> Result<cpu::Meter> {
    let answer = qemu.qmp.execute("query-cpus-fast", json!({}))?;
    let cpus = answer.as_array().context("query-cpus-fast gave no list")?;
    let threads = cpus.iter().map(|cpu| cpu["thread-id"].as_u64());
    let threads: Option<Vec<_>> = threads.collect();
    cpu::Meter::of_threads(qemu.pid(), &threads.context("a vCPU has no thread")?)
}
