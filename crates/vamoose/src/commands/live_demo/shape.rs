//! What both processes have to make alike: the guest's memory and what runs in it.

use std::{
    convert::Infallible,
    fmt,
    num::NonZeroU64,
    str::FromStr,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use testguest::{Backing, Config, Fill, Guest, Kind, Memory, PAGE, Pattern};
use vamoose_live::{Ram, RamBlock};

/// A guest to be made, at the source and at the destination.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Shape {
    pub(super) ram_bytes: u64,
    pub(super) backing: BackingName,
    pub(super) kind: KindName,
    pub(super) vcpus: u8,
    pub(super) pattern: PatternName,
    /// For the pattern hot-set.
    pub(super) hot_set_bytes: u64,
    /// At the end of the memory; `None` is everything.
    pub(super) working_set_bytes: Option<u64>,
    pub(super) rate: Rate,
}

impl Shape {
    /// Its memory, which nobody has touched yet.
    pub(super) fn memory(&self) -> Result<Memory> {
        let backing = match self.backing {
            BackingName::Anonymous => Backing::Anonymous,
            BackingName::Memfd => Backing::Memfd,
            BackingName::Hugetlb => Backing::Hugetlb,
        };
        Memory::new(backing, self.ram_bytes).context("--ram, --backing")
    }

    /// The guest in `memory`.
    pub(super) fn config(&self, memory: Memory) -> Result<Config> {
        let all = memory.len();
        let kind = match self.kind {
            KindName::Kvm => Kind::Kvm,
            KindName::Threads => Kind::Threads,
        };
        let mut config = Config::new(kind, memory);
        config.vcpus = self.vcpus;
        config.pattern = match self.pattern {
            PatternName::Sequential => Pattern::Sequential,
            PatternName::Random => Pattern::Random,
            PatternName::HotSet => Pattern::HotSet {
                pages: NonZeroU64::new(self.hot_set_bytes / PAGE)
                    .context("--hot-set: less than a page")?,
            },
        };
        config.rate = match self.rate {
            Rate::Idle | Rate::Max => None,
            Rate::PagesPerSecond(rate) => Some(rate),
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
pub(super) fn ram_of(memory: &Memory) -> Result<Ram> {
    let blocks = memory
        .blocks()
        .iter()
        .map(|block| RamBlock::new(block.name(), block.region().clone()));
    Ok(Ram::new(blocks.collect::<Result<_, _>>()?)?)
}

/// Lets a paused guest go on for some thousand writes, or what a slow one writes in two seconds, and pauses it
/// again. Returns how many it wrote.
pub(super) fn go_on(guest: &Guest, rate: Rate) -> Result<u64> {
    const WRITES: u64 = 4000;
    const PATIENCE: Duration = Duration::from_secs(2);
    if rate == Rate::Idle {
        return Ok(0);
    }
    let (before, start) = (guest.written(), Instant::now());
    guest.resume()?;
    while guest.written().wrapping_sub(before) < WRITES && start.elapsed() < PATIENCE {
        thread::sleep(Duration::from_millis(1));
    }
    guest.pause();
    Ok(guest.written().wrapping_sub(before))
}

/// What runs the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum KindName {
    /// vCPUs of a virtual machine
    Kvm,
    /// Threads of the process
    Threads,
}

/// Which pages it writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum PatternName {
    /// One after the other
    Sequential,
    /// Any of them
    Random,
    /// Any of the first ones, --hot-set
    HotSet,
}

/// What its memory is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum BackingName {
    /// Private memory
    Anonymous,
    /// A shared mapping of a memfd
    Memfd,
    /// A shared mapping of 2 MiB pages out of the host's pool (vm.nr_hugepages)
    Hugetlb,
}

/// How fast it writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(super) enum Rate {
    /// Not at all.
    Idle,
    /// At most so many pages.
    PagesPerSecond(NonZeroU64),
    /// As fast as it can.
    Max,
}

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "max" {
            return Ok(Self::Max);
        }
        let pages: u64 = text
            .parse()
            .map_err(|_| format!("`{text}` is neither a number of pages per second nor `max`"))?;
        Ok(NonZeroU64::new(pages).map_or(Self::Idle, Self::PagesPerSecond))
    }
}

impl TryFrom<String> for Rate {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Rate> for String {
    fn from(rate: Rate) -> Self {
        rate.to_string()
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Idle => f.write_str("0"),
            Self::PagesPerSecond(rate) => rate.fmt(f),
            Self::Max => f.write_str("max"),
        }
    }
}

/// What --fill says.
pub(super) fn parse_fill(word: &str) -> Result<Fill, Infallible> {
    Ok(match word {
        "zero" => Fill::Zero,
        "untouched" => Fill::Untouched,
        "mixed" => Fill::Mixed,
        path => Fill::File(path.into()),
    })
}

/// The guest kind of this host, if nobody names one.
pub(super) fn best_kind() -> KindName {
    match testguest::kvm_available() {
        Ok(()) => KindName::Kvm,
        Err(_) => KindName::Threads,
    }
}

/// Refuses a guest that this host cannot run, before anything is begun.
pub(super) fn check_kind(kind: KindName) -> Result<()> {
    if kind == KindName::Kvm
        && let Err(reason) = testguest::kvm_available()
    {
        bail!("--guest kvm: {reason}; --guest threads needs no KVM");
    }
    Ok(())
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
