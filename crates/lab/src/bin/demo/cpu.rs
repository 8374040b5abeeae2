//! What a migration costs in CPU time, apart from the guest that runs meanwhile.

use anyhow::Result;
use lab::cpu::{self, QemuMeter};
use lab::qemu::Qemu;

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
    source: QemuMeter,
    destination: QemuMeter,
    server: cpu::Meter,
}

impl Meter {
    /// `server`: the process `vamoose serve`.
    pub(crate) fn start(source: &mut Qemu, destination: &mut Qemu, server: u32) -> Result<Self> {
        Ok(Self {
            source: QemuMeter::start(source)?,
            destination: QemuMeter::start(destination)?,
            server: cpu::Meter::start(&[server])?,
        })
    }

    /// `migrating`: what the process `vamoose migrate` used, which is not there any more.
    pub(crate) fn read(&self, migrating: f64) -> Result<Cpu> {
        let (source, guest_before) = self.source.read()?;
        let (destination, guest_after) = self.destination.read()?;
        Ok(Cpu {
            source,
            vamoose: self.server.read()?.iter().sum::<f64>() + migrating,
            destination,
            guest: guest_before + guest_after,
        })
    }
}
