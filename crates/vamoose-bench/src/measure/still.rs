//! Measures a guest that does not run: its whole RAM is compared afterwards.
//!
//! Both QEMUs have touched all of their memory before the migration: the source because it is filled, the destination because it is
//! preallocated.

use anyhow::{Result, anyhow};
use lab::qemu::Builder;
use lab::ram;

use super::begin::Ends;
use super::{Host, moving};
use crate::record::{Cell, Outcome, Record};

/// The same content in all cells.
pub(super) const SEED: u64 = 1;

pub(super) fn measure(host: &Host, cell: &Cell, round: u32) -> Result<Record> {
    let link = host.link(cell.link)?;
    let (here, there) = (&link.source, &link.destination);
    let mut bare = Builder::bare(&host.qemu, cell.ram).preallocate();
    // May take minutes, and much memory: so it comes first.
    let fill = host.corpus.fill(cell.guest, &host.qemu, cell.ram)?;
    let mut destination = bare.clone().incoming().namespace(there.name()).start()?;
    if let Some(fill) = fill {
        bare = bare.content(fill, SEED);
    }
    let mut source = bare.namespace(here.name()).start()?;

    let ends = Ends {
        source: &mut source,
        destination: &mut destination,
        here,
        there,
        vamoose: &host.vamoose,
        proxy: None,
    };
    let moved = moving::migrate(ends, cell, || Ok(()))?;
    if moved.is_there {
        ram::compare(source.ram(), destination.ram())
            .map_err(|mismatch| anyhow!("the memory differs after the migration: {mismatch}"))?;
    }
    let outcome = match moved.is_there {
        true => Outcome::Equal,
        false => Outcome::Cancelled,
    };
    Ok(moved.record(cell, round, outcome))
}
