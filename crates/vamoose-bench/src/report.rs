//! The report of a run: DIR/report.md, DIR/report.html, DIR/results.csv, and the plots of the Markdown in DIR/plots.
//!
//! ```text
//!  machine.json ─┐                      ┌─> table, verdict ─┐
//!  results.jsonl ├─> results::Results ──┤                   ├─> report.md ─> report.html
//!  SCENARIO.toml ┘   (medians, spread)  ├─> plots/*.svg ────┘
//!                                       └─> results.csv: a line for each migration
//! ```
//! The report leaves nothing out because it looks bad: a figure is the median of the rounds, with the least and the most; cancelled
//! migrations are shown; and where Vamoose is slower, the report says so.

pub(crate) mod chart;
mod csv;
pub(crate) mod markdown;
pub(crate) mod page;
pub(crate) mod plots;
mod results;
pub(crate) mod table;
#[cfg(test)]
pub(crate) mod tests;
mod verdict;

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
    let markdown = markdown::of(&results, &plots);
    save(&dir.join("results.csv"), &csv::of(&results)?)?;
    save(&dir.join("report.md"), &markdown)?;
    let plots: Vec<_> = plots.into_iter().flatten().collect();
    save(
        &dir.join("report.html"),
        &page::of(markdown::TITLE, &markdown, &plots),
    )
}

/// The plots of each group.
fn plots(results: &Results) -> Result<Vec<Vec<markdown::Plot>>> {
    let sections = results.scenarios.iter();
    let groups =
        sections.flat_map(|section| section.groups.iter().map(|group| (&section.name, group)));
    groups.map(|(name, group)| plots::of(name, group)).collect()
}

fn save(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
