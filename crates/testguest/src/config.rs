//! The configuration of a guest.

use std::{num::NonZeroU64, ops::Range};

use anyhow::{Result, ensure};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::{
    kvm,
    memory::{Memory, PAGE},
};

/// Maximum number of vCPUs. Each of 8 has 64 of the 512 words of a page.
const MAX_VCPUS: u8 = 8;

/// The configuration of a guest.
#[derive(Clone, Debug)]
pub struct Config {
    /// KVM or threads.
    pub kind: Kind,
    /// Memory of the guest. The first pages of a KVM guest have code and page tables.
    pub memory: Memory,
    /// Number of vCPUs, 1 to 8.
    pub vcpus: u8,
    /// Order in which they write pages.
    pub pattern: Pattern,
    /// Limit of the pages that all vCPUs together write per second; `None` for no limit.
    pub rate: Option<NonZeroU64>,
    /// Addresses that are written, in whole pages; `None` for all memory except the guest's code and page tables.
    pub working_set: Option<Range<u64>>,
}

/// What runs a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// vCPUs of a virtual machine
    Kvm,
    /// Threads of the process
    Threads,
}

/// Order in which the pages of the working set are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Pattern {
    /// One after another, each vCPU from a start of its own
    Sequential,
    /// Any page each time
    Random,
}

impl Config {
    /// A guest with one vCPU, which writes random pages of all memory as fast as possible.
    pub fn new(kind: Kind, memory: Memory) -> Self {
        Self {
            kind,
            memory,
            vcpus: 1,
            pattern: Pattern::Random,
            rate: None,
            working_set: None,
        }
    }

    /// Checks the number of vCPUs and the working set.
    pub(crate) fn check(&self) -> Result<()> {
        let (vcpus, writable, Range { start, end }) =
            (self.vcpus, self.writable(), self.working_set());
        ensure!(
            (1..=MAX_VCPUS).contains(&vcpus),
            "{vcpus} vCPUs: the range is 1 to {MAX_VCPUS}"
        );
        let is_whole = start.is_multiple_of(PAGE) && end.is_multiple_of(PAGE);
        ensure!(
            is_whole && start < end && writable.start <= start && end <= writable.end,
            "working set: {start:#x}..{end:#x} is not made of whole pages of {:#x}..{:#x}",
            writable.start,
            writable.end
        );
        Ok(())
    }

    /// The addresses that are written.
    pub(crate) fn working_set(&self) -> Range<u64> {
        self.working_set.clone().unwrap_or(self.writable())
    }

    fn writable(&self) -> Range<u64> {
        let reserved = match self.kind {
            Kind::Kvm => kvm::reserved_bytes(&self.memory),
            Kind::Threads => 0,
        };
        reserved..self.memory.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Backing;

    #[test]
    fn a_working_set_is_of_whole_pages_and_leaves_the_guest_its_own() {
        let memory = Memory::new(Backing::Anonymous, 1 << 20).unwrap();
        let check = |kind, working_set: Range<u64>| {
            let mut config = Config::new(kind, memory.clone());
            config.working_set = Some(working_set);
            config.check()
        };
        assert!(check(Kind::Threads, 0..PAGE).is_ok());
        for bad in [0..0, 1..PAGE, 0..PAGE + 1, 0..2 << 20] {
            assert!(check(Kind::Threads, bad.clone()).is_err(), "{bad:?}");
        }
        assert!(check(Kind::Kvm, 0..1 << 20).is_err());
        let all = Config::new(Kind::Kvm, memory.clone()).working_set();
        assert!(all.start > 0);
        assert!(check(Kind::Kvm, all).is_ok());
    }

    #[test]
    fn a_guest_has_1_to_8_vcpus() {
        let memory = Memory::new(Backing::Anonymous, 1 << 20).unwrap();
        let mut config = Config::new(Kind::Threads, memory);
        for (vcpus, fits) in [(0, false), (1, true), (8, true), (9, false)] {
            config.vcpus = vcpus;
            assert_eq!(config.check().is_ok(), fits, "{vcpus}");
        }
    }
}
