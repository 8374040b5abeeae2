//! The report of a run: DIR/report.md with its plots in DIR/plots, and DIR/results.csv.
//!
//! ```text
//!  machine.json ─┐                      ┌─> table ─────┬─> report.md
//!                ├─> results::Results ──┼─> plots/*.svg ┘
//!  results.jsonl ┘   (medians, spread)  └─> results.csv: a line for each migration
//! ```
//! A figure is the median of the rounds, with the minimum and the maximum. Cancelled migrations are reported, too.

pub(crate) mod chart;
mod csv;
mod markdown;
pub(crate) mod plots;
mod results;
pub(crate) mod table;
#[cfg(test)]
pub(crate) mod tests;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use self::results::Results;

/// Reads the results of a run in `dir`, and writes the report there.
pub(crate) fn write(dir: &Path) -> Result<()> {
    let results = Results::read(dir)?;
    let folder = dir.join("plots");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let plots = plots(&results)?;
    for plot in plots.iter().flatten() {
        save(&dir.join(plot.path()), &plot.svg)?;
    }
    save(&dir.join("results.csv"), &csv::of(&results)?)?;
    save(&dir.join("report.md"), &markdown::of(&results, &plots))
}

/// The medians of a run in `dir`, for a terminal: a table for each group.
pub(crate) fn comparison(dir: &Path) -> Result<String> {
    let results = Results::read(dir)?;
    Ok(results.groups().map(table::narrow).collect())
}

/// The plots of each group.
fn plots(results: &Results) -> Result<Vec<Vec<plots::Plot>>> {
    let sections = results.scenarios.iter();
    let groups =
        sections.flat_map(|section| section.groups.iter().map(|group| (&section.name, group)));
    groups.map(|(name, group)| plots::of(name, group)).collect()
}

fn save(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
