//! The report of a run: DIR/report.md, DIR/report.html, DIR/results.csv, and the plots of the Markdown in DIR/plots.
//!
//! ```text
//!  machine.json ─┐                      ┌─> tables, verdicts ─┬─> report.md
//!  results.jsonl ├─> results::Results ──┤                     ├─> report.html
//!  SCENARIO.toml ┘   (medians, spread)  ├─> plots (SVG) ──────┴─> plots/*.svg
//!                                       └─> results.csv: a line for each migration
//! ```
//! Nothing is measured here, and nothing is left out because it looks bad: a figure is the median of the rounds with the least
//! and the most, a migration that was cancelled is shown as such, and where Vamoose is behind, the report says so.

mod about;
pub(crate) mod chart;
mod csv;
#[cfg(test)]
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "an example's figures are small"
)]
pub(crate) mod example;
mod html;
mod markdown;
pub(crate) mod page;
pub(crate) mod plots;
mod results;
pub(crate) mod svg;
pub(crate) mod table;
mod verdict;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use self::results::Results;
use self::table::{Table, Tone};
use crate::record::Machine;
use crate::scenario::Published;

/// Reads what a run has left in `dir`, and writes its report there.
pub(crate) fn write(dir: &Path) -> Result<()> {
    let results = Results::read(dir)?;
    let plots = plots::of(&results);
    let folder = dir.join("plots");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    for plot in plots.values().flatten() {
        save(&folder.join(plot.file_name()), &plot.svg.standalone())?;
    }
    save(&dir.join("results.csv"), &csv::of(&results))?;
    save(&dir.join("report.md"), &markdown::of(&results, &plots))?;
    save(&dir.join("report.html"), &html::of(&results, &plots))
}

/// The machine, as a table.
fn machine(machine: &Machine) -> Table {
    let mut table = Table::new(["", "measured on"]);
    let memory = format!("{:.1} GiB", machine.memory as f64 / f64::from(1 << 30));
    let rows = [
        (
            "processors",
            format!("{} ({})", machine.processors, machine.processor),
        ),
        ("memory", memory),
        ("kernel", machine.kernel.clone()),
        ("QEMU", machine.qemu.clone()),
        ("Vamoose", machine.vamoose.clone()),
        ("silesia", machine.corpus.clone()),
        ("date", machine.date.clone()),
        ("load average at the beginning", machine.load.clone()),
    ];
    for (name, value) in rows {
        table.add(Tone::Plain, [name.to_owned(), value]);
    }
    table
}

impl From<&Published> for Table {
    fn from(published: &Published) -> Self {
        let mut table = Self::new(published.columns.clone());
        for row in &published.rows {
            table.add(Tone::Plain, row.clone());
        }
        table
    }
}

fn save(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
