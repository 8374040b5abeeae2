//! The report of a run: DIR/report.md.
//!
//! ```text
//!  machine.json ─┐
//!                ├─> results::Results ──> table ──> report.md
//!  results.jsonl ┘   (medians, spread)
//! ```
//! A figure is the median of the rounds, with the minimum and the maximum. Cancelled migrations are reported, too.

mod markdown;
mod results;
mod table;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use self::results::Results;

/// Reads the results of a run in `dir`, and writes the report there.
pub(crate) fn write(dir: &Path) -> Result<()> {
    let results = Results::read(dir)?;
    let path = dir.join("report.md");
    fs::write(&path, markdown::of(&results))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// The medians of a run in `dir`, for a terminal: a table for each group.
pub(crate) fn comparison(dir: &Path) -> Result<String> {
    let results = Results::read(dir)?;
    Ok(results.groups().map(table::narrow).collect())
}
