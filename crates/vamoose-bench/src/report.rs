//! The report of a run: DIR/report.md and DIR/results.csv.
//!
//! ```text
//!  machine.json ─┐                      ┌─> table ──> report.md
//!                ├─> results::Results ──┤
//!  results.jsonl ┘   (medians, spread)  └─> results.csv: a line for each migration
//! ```
//! A figure is the median of the rounds, with the minimum and the maximum. Cancelled migrations are reported, too.

mod csv;
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
    save(&dir.join("results.csv"), &csv::of(&results)?)?;
    save(&dir.join("report.md"), &markdown::of(&results))
}

/// The medians of a run in `dir`, for a terminal: a table for each group.
pub(crate) fn comparison(dir: &Path) -> Result<String> {
    let results = Results::read(dir)?;
    Ok(results.groups().map(table::narrow).collect())
}

fn save(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
