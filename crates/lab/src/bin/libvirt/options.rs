//! The command line.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::{Parser, ValueEnum};
use lab::{
    libvirt::{self, Generation, Way},
    vamoose,
};

use crate::case::Case;

/// Move guests between two hosts of libvirt, in every way, and check where each of them ends
#[derive(Parser, Debug)]
#[command(name = "libvirt", max_term_width = 100)]
pub(crate) struct Options {
    /// Versions of libvirt [default: all that are available]
    #[arg(long, value_name = "V", value_delimiter = ',')]
    versions: Vec<String>,
    /// What is between the two QEMUs
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "direct,relays,gateways"
    )]
    way: Vec<WayName>,
    /// Use only cases whose name contains this, such as `parallel` (repeatable: any of them)
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// How often each case is run
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) repeat: u32,
    /// Instead of the cases, measure how long migrations take, in so many rounds
    #[arg(long, value_name = "ROUNDS")]
    pub(crate) times: Option<u32>,
    /// Instead of the cases, move so many guests by `vamoose evacuate`
    #[arg(long, value_name = "GUESTS")]
    pub(crate) evacuate: Option<u32>,
    /// Program to test [default: the one beside this program]
    #[arg(long, value_name = "PROGRAM")]
    vamoose: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum WayName {
    Direct,
    Relays,
    Gateways,
}

impl Options {
    pub(crate) fn program(&self) -> Result<PathBuf> {
        vamoose::program(self.vamoose.as_deref(), "vamoose")
    }

    pub(crate) fn generations(&self) -> Result<Vec<Generation>> {
        let mut found = libvirt::available_or_skip()?;
        let is_wanted = |it: &Generation| self.versions.iter().any(|name| name == it.version);
        found.retain(|it| self.versions.is_empty() || is_wanted(it));
        ensure!(
            !found.is_empty(),
            "there is no such libvirt: run scripts/setup libvirt, as root"
        );
        Ok(found)
    }

    pub(crate) fn ways(&self) -> impl Iterator<Item = Way> {
        self.way.iter().map(|name| match name {
            WayName::Direct => Way::Direct,
            WayName::Relays => Way::Relays,
            WayName::Gateways => Way::Gateways,
        })
    }

    pub(crate) fn wants(&self, case: &Case) -> bool {
        match self.only.is_empty() {
            true => !case.is_by_name,
            false => self.only.iter().any(|text| case.name.contains(text)),
        }
    }
}
