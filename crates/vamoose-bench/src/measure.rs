//! Moves guests and measures the migrations.
//!
//! ```text
//!  qemu      source QEMU ────────────────────────link─────────────────────────> destination QEMU
//!  migrate   source QEMU ─unix─> vamoose migrate ═link═> vamoose serve ──unix─> destination QEMU
//! ```
//!
//! `══` is a session with checksums. Contenders with `--tls` encrypt: stock QEMU as well as Vamoose. All processes and the link share the processors
//! of this host.

mod begin;
pub(crate) mod moving;
pub(crate) mod running;
mod still;
mod tls;
mod watch;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use lab::net::Link;
use lab::qemu::{self, Binary};
use lab::vamoose::program;

use crate::corpus::Corpus;
use crate::needs::Found;
use crate::record::{Cell, Record};
use crate::scenario::Rate;
use running::Running;

/// Properties that all cells of a run share.
pub(crate) struct Host {
    pub(crate) qemu: Binary,
    pub(crate) vamoose: PathBuf,
    pub(crate) corpus: Corpus,
    /// Whether links can be made; otherwise there is only loopback.
    pub(crate) has_links: bool,
}

/// Environment of the migrations of one guest over one link.
pub(crate) enum Testbed<'a> {
    /// Each migration begins with a new guest.
    Still(&'a Host),
    /// One guest moves back and forth.
    Running(Box<Running<'a>>),
}

/// Time limit of short operations.
const MOMENTS: Duration = Duration::from_secs(60);

impl<'a> Testbed<'a> {
    /// Prepares for `cell` and other cells of the same guest and link.
    pub(crate) fn new(host: &'a Host, cell: &Cell) -> Result<Self> {
        if !cell.guest.runs() {
            return Ok(Self::Still(host));
        }
        let running = Running::start(host, cell).context("starting the guest")?;
        Ok(Self::Running(Box::new(running)))
    }

    /// Performs one migration. Returns its record, unless the record is complete only at the end.
    pub(crate) fn measure(&mut self, cell: &Cell, round: u32) -> Result<Option<Record>> {
        match self {
            Self::Running(running) => running.migrate(cell, round).map(|()| None),
            Self::Still(host) => still::measure(host, cell, round).map(Some),
        }
    }

    /// Whether a failed migration has lost the guest.
    pub(crate) fn is_lost(&self) -> bool {
        matches!(self, Self::Running(_))
    }

    /// Returns the records that are complete only at the end, with the service of the clients.
    pub(crate) fn finish(self) -> Result<Vec<Record>> {
        match self {
            Self::Still(_) => Ok(Vec::new()),
            Self::Running(running) => running.finish(),
        }
    }
}

impl Host {
    /// Looks for the QEMU whose version begins so, for `vamoose`, and for a corpus.
    pub(crate) fn look(
        qemu: &str,
        vamoose: Option<&Path>,
        corpus: Option<&Path>,
    ) -> Result<(Self, Found)> {
        let vamoose = program(vamoose, "vamoose")?;
        let found = Found::look();
        let host = Self {
            qemu: newest_qemu(qemu)?,
            vamoose,
            corpus: Corpus::open(corpus)?,
            has_links: found.has_links(),
        };
        Ok((host, found))
    }

    fn link(&self, rate: Rate) -> Result<Link> {
        match self.has_links {
            true => Link::new(rate.limit()),
            false => Ok(Link::loopback()),
        }
    }
}

/// The newest QEMU whose version begins so.
pub(crate) fn newest_qemu(wanted: &str) -> Result<Binary> {
    let fits = |binary: &&Binary| binary.version.to_string().starts_with(wanted);
    let found = qemu::available().iter().rfind(fits);
    let found = found.with_context(|| {
        format!("there is no QEMU {wanted}: apt install qemu-system-x86, or scripts/setup qemu")
    });
    found.cloned()
}
