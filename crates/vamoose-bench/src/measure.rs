//! Moves guests and takes the figures.
//!
//! ```text
//!  qemu      source QEMU ────────────────────────link─────────────────────────> destination QEMU
//!  relay     source QEMU ─unix─> vamoose relay ──link─────────────────────────> destination QEMU, which decodes
//!  pair      source QEMU ─unix─> vamoose relay ══link══> vamoose relay ──unix─> destination QEMU
//!  migrate   source QEMU ─unix─> vamoose migrate ═link═> vamoose serve ──unix─> destination QEMU
//!  live      vamoose-demo, source ═══════════════link══> vamoose-demo, destination
//!  sockets   iperf3, client ─────────────────────link──> iperf3, server
//! ```
//!
//! `══` is a session with its checksums, without TLS, as stock QEMU uses none here. All processes and the link share the
//! processors of this host.

pub(crate) mod begin;
mod live;
pub(crate) mod moving;
mod running;
mod sockets;
mod still;
mod watch;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use lab::net::Link;
use lab::qemu::Binary;

use crate::corpus::Corpus;
use crate::record::{Cell, Record};
use crate::scenario::{Guest, Rate, Who};
use running::Running;

/// What all cells of a run share.
pub(crate) struct Host {
    pub(crate) qemu: Binary,
    pub(crate) vamoose: PathBuf,
    pub(crate) demo: PathBuf,
    pub(crate) corpus: Corpus,
    /// Whether links can be made; without, there is only loopback.
    pub(crate) has_links: bool,
}

/// What the migrations of one guest over one link need.
pub(crate) enum Stage<'a> {
    /// Each begins with a new guest.
    Still(&'a Host),
    /// One guest moves on and on.
    Running(Box<Running<'a>>),
}

/// For everything that takes moments.
const MOMENTS: Duration = Duration::from_secs(60);

impl<'a> Stage<'a> {
    /// Prepares for `cell`, and others of the same guest and link.
    pub(crate) fn set(host: &'a Host, cell: &Cell) -> Result<Self> {
        Ok(match cell.guest {
            Guest::Still(_) => Self::Still(host),
            Guest::Running(workload) => {
                let running = Running::start(host, workload, cell).context("starting the guest")?;
                Self::Running(Box::new(running))
            }
        })
    }

    /// Makes one migration; gives its results, if they are known already.
    pub(crate) fn measure(&mut self, cell: &Cell, round: u32) -> Result<Option<Record>> {
        match self {
            Self::Running(running) => running.migrate(cell, round).map(|()| None),
            Self::Still(host) => match cell.contender.who {
                Who::Live => live::measure(host, cell, round).map(Some),
                Who::Sockets => sockets::measure(host, cell, round).map(Some),
                _ => still::measure(host, cell, round).map(Some),
            },
        }
    }

    /// Gives the results that are known only in the end: what clients have noticed.
    pub(crate) fn end(self) -> Result<Vec<Record>> {
        match self {
            Self::Still(_) => Ok(Vec::new()),
            Self::Running(running) => running.end(),
        }
    }
}

impl Host {
    fn link(&self, rate: Rate) -> Result<Link> {
        match self.has_links {
            true => Link::new(rate.first()),
            false => Ok(Link::loopback()),
        }
    }
}
