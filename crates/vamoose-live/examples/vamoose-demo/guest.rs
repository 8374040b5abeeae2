//! The guest, which both processes create in the same way.

use std::{
    num::NonZeroU64,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use serde::{Deserialize, Serialize};
use testguest::{Backing, Config, Guest, Kind, Memory};
use vamoose::values::Size;
use vamoose_live::{Ram, RamBlock};

/// Description of a guest, for the source and the destination.
#[derive(Args, Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Shape {
    /// Memory of the guest
    #[arg(id = "ram", long, default_value = "256M", value_name = "SIZE", value_parser = parse_ram)]
    pub(crate) ram_bytes: u64,
    /// What runs the guest: kvm by default if available, else threads
    #[arg(id = "guest", long, value_enum, default_value_t = default_kind())]
    pub(crate) kind: Kind,
    /// Number of vCPUs, 1 to 8
    #[arg(long, default_value_t = 1, value_name = "N")]
    vcpus: u8,
    /// Pages that all vCPUs together write per second, or `max`
    #[arg(long, default_value = "10000", value_name = "PAGES", value_parser = parse_rate)]
    pub(crate) rate: u64,
    /// Type of the memory
    #[arg(long, value_enum, default_value_t = Backing::Anonymous)]
    backing: Backing,
}

impl Shape {
    /// Checks that this host can run the guest.
    pub(crate) fn check(&self) -> Result<()> {
        if self.kind == Kind::Kvm
            && let Err(reason) = testguest::kvm_available()
        {
            bail!("--guest kvm: {reason}; --guest threads needs no KVM");
        }
        Ok(())
    }

    /// Makes its memory, untouched.
    pub(crate) fn memory(&self) -> Result<Memory> {
        Memory::new(self.backing, self.ram_bytes).context("--ram, --backing")
    }

    /// The configuration of the guest in `memory`.
    pub(crate) fn config(&self, memory: Memory) -> Config {
        let mut config = Config::new(self.kind, memory);
        config.vcpus = self.vcpus;
        config.rate = NonZeroU64::new(self.rate).filter(|_| self.rate != MAX_RATE);
        config
    }
}

/// The memory as the engine sees it.
pub(crate) fn ram_of(memory: &Memory) -> Result<Ram> {
    let blocks = memory
        .blocks()
        .iter()
        .map(|block| RamBlock::new(block.name(), block.region().clone()));
    Ok(Ram::new(blocks.collect::<Result<_, _>>()?)?)
}

/// Runs a paused guest for some thousand writes, or for two seconds if it is slow, and pauses it again. Returns the number of
/// pages it wrote.
pub(crate) fn run_briefly(guest: &Guest, rate: u64) -> Result<u64> {
    const WRITES: u64 = 4000;
    const TIMEOUT: Duration = Duration::from_secs(2);
    if rate == 0 {
        return Ok(0);
    }
    let (before, start) = (guest.written(), Instant::now());
    guest.resume()?;
    while guest.written().wrapping_sub(before) < WRITES && start.elapsed() < TIMEOUT {
        thread::sleep(Duration::from_millis(1));
    }
    guest.pause();
    Ok(guest.written().wrapping_sub(before))
}

/// The value of `--ram`.
fn parse_ram(text: &str) -> Result<u64, String> {
    /// Less is a forgotten unit.
    const MIN: u64 = 1 << 20;
    let Size(bytes) = text.parse()?;
    if bytes < MIN {
        return Err(format!(
            "{bytes} bytes are too small for a guest: append a unit, as in 512M or 2G"
        ));
    }
    Ok(bytes)
}

/// As fast as possible.
const MAX_RATE: u64 = u64::MAX;

/// The value of `--rate`.
fn parse_rate(text: &str) -> Result<u64, String> {
    match text {
        "max" => Ok(MAX_RATE),
        pages => pages
            .parse()
            .map_err(|_| format!("`{text}` is neither a number of pages per second nor `max`")),
    }
}

fn default_kind() -> Kind {
    match testguest::kvm_available() {
        Ok(()) => Kind::Kvm,
        Err(_) => Kind::Threads,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_is_a_number_or_max() {
        for (text, rate) in [("0", 0), ("250000", 250_000), ("max", MAX_RATE)] {
            assert_eq!(parse_rate(text), Ok(rate));
        }
        for text in ["", "-1", "1.5", "Max", "10k"] {
            assert!(parse_rate(text).is_err(), "{text}");
        }
    }
}
