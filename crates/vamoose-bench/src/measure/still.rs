//! Measures a guest that does not run: its whole RAM is compared afterwards.
//!
//! Both QEMUs have touched all of their memory before: the source like a guest that has run for a while, the destination because
//! it is preallocated.

use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use lab::net::Link;
use lab::qemu::Builder;
use lab::ram;

use super::begin::Ends;
use super::{Host, moving};
use crate::record::{Cell, Outcome, Record};
use crate::scenario::{Content, Guest, Rate};

/// The same content in all cells.
pub(super) const SEED: u64 = 1;

/// When a changing link changes, and to how many bits a second.
const CHANGES: [(Duration, u64); 2] = [
    (Duration::from_secs(3), 1_000_000_000),
    (Duration::from_millis(4500), 100_000_000),
];

pub(super) fn measure(host: &Host, cell: &Cell, round: u32) -> Result<Record> {
    let Guest::Still(content) = cell.guest else {
        bail!("{} runs", cell.guest);
    };
    let link = host.link(cell.link)?;
    let (here, there) = (&link.source, &link.destination);
    let mut bare = Builder::bare(&host.qemu, cell.ram);
    if content != Content::Untouched {
        bare = bare.preallocate();
    }
    let mut destination = bare.clone().incoming().namespace(there.name()).start()?;
    if let Some(fill) = host.corpus.fill(content) {
        bare = bare.content(fill, SEED);
    }
    let mut source = bare.namespace(here.name()).start()?;

    let mut changes = Changes::of(&link, cell.link);
    let ends = Ends {
        source: &mut source,
        destination: &mut destination,
        here,
        there,
        vamoose: &host.vamoose,
        server: None,
        is_shown: false,
    };
    let moved = moving::migrate(ends, cell, |elapsed| changes.at(elapsed))?;
    if moved.is_there {
        ram::compare(source.ram(), destination.ram())
            .map_err(|mismatch| anyhow!("the memory differs after the migration: {mismatch}"))?;
    }
    let outcome = match moved.is_there {
        true => Outcome::Equal,
        false => Outcome::Cancelled,
    };
    Ok(Record {
        timeline: moved.timeline,
        ..Record::new(cell, round, outcome, moved.figures)
    })
}

/// Changes of the link's rate that are still to come.
struct Changes<'a> {
    link: &'a Link,
    left: &'static [(Duration, u64)],
}

impl<'a> Changes<'a> {
    fn of(link: &'a Link, rate: Rate) -> Self {
        let left: &[_] = match rate {
            Rate::Changing => &CHANGES,
            _ => &[],
        };
        Self { link, left }
    }

    fn at(&mut self, elapsed: Duration) -> Result<()> {
        while let [(when, rate), left @ ..] = self.left
            && elapsed >= *when
        {
            self.link.set_rate(*rate)?;
            self.left = left;
        }
        Ok(())
    }
}
