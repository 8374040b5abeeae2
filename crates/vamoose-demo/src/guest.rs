//! The guest, which both processes make in the same way.

use std::{
    convert::Infallible,
    fmt,
    num::NonZeroU64,
    str::FromStr,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use serde::{Deserialize, Serialize};
use testguest::{Backing, Config, Fill, Guest, Kind, Memory, Pattern};
use vamoose::options::{Size, as_text};
use vamoose_live::{Ram, RamBlock};

/// Description of a guest, for the source and the destination.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Shape {
    pub(crate) ram_bytes: u64,
    pub(crate) backing: Backing,
    pub(crate) kind: Kind,
    pub(crate) vcpus: u8,
    pub(crate) pattern: Pattern,
    /// Size of the part that is written, at the end of the memory; `None` is all memory.
    pub(crate) working_set_bytes: Option<u64>,
    #[serde(with = "as_text")]
    pub(crate) rate: Rate,
}

impl Shape {
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

/// The value of `--ram`.
pub(crate) fn parse_ram(text: &str) -> Result<Size, String> {
    /// Less is a forgotten unit.
    const MIN: u64 = 1 << 20;
    let size: Size = text.parse()?;
    if size.0 < MIN {
        return Err(format!(
            "{size} bytes are too small for a guest: append a unit, as in 512M or 2G"
        ));
    }
    Ok(size)
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

/// The kind of the guest: `chosen`, or KVM where this host has it.
///
/// # Errors
/// When KVM was chosen and this host does not have it.
pub(crate) fn kind(chosen: Option<Kind>) -> Result<Kind> {
    match (chosen, testguest::kvm_available()) {
        (Some(Kind::Kvm), Err(reason)) => {
            bail!("--guest kvm: {reason}; --guest threads needs no KVM")
        }
        (Some(kind), _) => Ok(kind),
        (None, Ok(())) => Ok(Kind::Kvm),
        (None, Err(_)) => Ok(Kind::Threads),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_back() {
        for text in ["0", "1", "250000", "max"] {
            assert_eq!(text.parse::<Rate>().unwrap().to_string(), text);
        }
        for text in ["", "-1", "1.5", "Max", "10k"] {
            assert!(text.parse::<Rate>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_file_is_what_is_no_word() {
        assert_eq!(parse_fill("mixed"), Ok(Fill::Mixed));
        assert_eq!(parse_fill("./mixed"), Ok(Fill::File("./mixed".into())));
    }
}
