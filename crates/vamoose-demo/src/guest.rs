//! The guest, which both processes create in the same way.

use std::{
    convert::Infallible,
    fmt,
    num::NonZeroU64,
    str::FromStr,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use serde::{Deserialize, Serialize};
use testguest::{Backing, Config, Fill, Guest, Kind, Memory, Pattern};
use vamoose::options::{Size, as_text};
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
    #[arg(long, default_value = "10000", value_name = "PAGES")]
    #[serde(with = "as_text")]
    pub(crate) rate: Rate,
    /// Order in which they write pages
    #[arg(long, value_enum, default_value_t = Pattern::Random)]
    pattern: Pattern,
    /// Size of the memory, at its end, that is written [default: all memory]
    #[arg(id = "working-set", long, value_name = "SIZE", value_parser = parse_bytes)]
    working_set_bytes: Option<u64>,
    /// Type of the memory
    #[arg(long, value_enum, default_value_t = Backing::Anonymous)]
    backing: Backing,
}

impl Shape {
    /// Checks that this host can run the guest.
    pub(crate) fn check(&self) -> Result<()> {
        match (self.kind, testguest::kvm_available()) {
            (Kind::Kvm, Err(reason)) => {
                bail!("--guest kvm: {reason}; --guest threads needs no KVM")
            }
            _ => Ok(()),
        }
    }

    /// Makes its memory, untouched.
    pub(crate) fn memory(&self) -> Result<Memory> {
        Memory::new(self.backing, self.ram_bytes).context("--ram, --backing")
    }

    /// The configuration of the guest in `memory`.
    pub(crate) fn config(&self, memory: Memory) -> Result<Config> {
        let all = memory.len();
        let mut config = Config::new(self.kind, memory);
        config.vcpus = self.vcpus;
        config.pattern = self.pattern;
        config.rate = match self.rate {
            Rate::Max => None,
            Rate::PagesPerSecond(rate) => NonZeroU64::new(rate),
        };
        if let Some(bytes) = self.working_set_bytes {
            // At the end: a KVM guest has its code at the start.
            let start = all
                .checked_sub(bytes)
                .context("--working-set: more than --ram")?;
            config.working_set = Some(start..all);
        }
        Ok(config)
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
pub(crate) fn run_briefly(guest: &Guest, rate: Rate) -> Result<u64> {
    const WRITES: u64 = 4000;
    const TIMEOUT: Duration = Duration::from_secs(2);
    if rate == Rate::IDLE {
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

/// Rate at which the guest writes pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rate {
    /// At most this many pages a second.
    PagesPerSecond(u64),
    /// As fast as possible.
    Max,
}

impl Rate {
    /// No writes.
    pub(crate) const IDLE: Self = Self::PagesPerSecond(0);
}

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "max" {
            return Ok(Self::Max);
        }
        let pages = text.parse().map(Self::PagesPerSecond);
        pages.map_err(|_| format!("`{text}` is neither a number of pages per second nor `max`"))
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PagesPerSecond(rate) => rate.fmt(f),
            Self::Max => f.write_str("max"),
        }
    }
}

fn parse_bytes(text: &str) -> Result<u64, String> {
    let size: Size = text.parse()?;
    Ok(size.0)
}

/// The value of `--ram`.
fn parse_ram(text: &str) -> Result<u64, String> {
    /// Less is a forgotten unit.
    const MIN: u64 = 1 << 20;
    let bytes = parse_bytes(text)?;
    let hint = "are too small for a guest: append a unit, as in 512M or 2G";
    let is_large = bytes >= MIN;
    is_large
        .then_some(bytes)
        .ok_or(format!("{bytes} bytes {hint}"))
}

/// The value of `--fill`.
pub(crate) fn parse_fill(word: &str) -> Result<Fill, Infallible> {
    Ok(match word {
        "zero" => Fill::Zero,
        "untouched" => Fill::Untouched,
        "mixed" => Fill::Mixed,
        path => Fill::File(path.into()),
    })
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
    fn displayed_rates_parse_to_themselves() {
        for text in ["0", "1", "250000", "max"] {
            assert_eq!(text.parse::<Rate>().unwrap().to_string(), text);
        }
        for text in ["", "-1", "1.5", "Max", "10k"] {
            assert!(text.parse::<Rate>().is_err(), "{text}");
        }
    }

    #[test]
    fn other_words_are_paths() {
        assert_eq!(parse_fill("mixed"), Ok(Fill::Mixed));
        assert_eq!(parse_fill("./mixed"), Ok(Fill::File("./mixed".into())));
    }
}
