//! `report.md`, which can be put beside other documentation, and which `report.html` is made of.

use super::results::{Group, Results, Section};
use super::table::{self, Table};
use super::verdict;
use crate::record::Machine;
use crate::scenario::Published;

pub(super) const TITLE: &str = "Vamoose beside stock QEMU";

const HOW_TO_READ: &str = "Figures are medians of the rounds, with the least and the most in brackets. The cells of a scenario take \
    turns, so that a slow period of the machine affects all of them. Only figures of one run can be compared. A migration whose \
    memory was not equal afterwards ends the run and gives no figure. Vamoose's default (`migrate auto`, or `pair auto` where that \
    was not measured, without options) is in bold.";

const COMPARISONS: &str = "Vamoose's default beside stock QEMU's fastest method, and beside Vamoose's own fastest fixed method. The \
    ratio is that of the seconds; downtime and CPU seconds are those of the other method and of the default";

/// A plot in a file of its own.
pub(crate) struct Plot {
    /// Name of the file, without a folder.
    pub(crate) file: String,
    pub(crate) title: String,
    /// Text below the plot.
    pub(crate) note: String,
    pub(crate) svg: String,
}

impl Plot {
    /// Path of the file in the folder of the report.
    pub(crate) fn path(&self) -> String {
        format!("plots/{}", self.file)
    }

    pub(crate) fn markdown(&self) -> String {
        let (title, note) = (escaped(&self.title), escaped(&self.note));
        format!("\n**{title}**. {note}\n\n![{title}]({})\n", self.path())
    }
}

/// The report; `plots` are the plots of all groups, in their order.
pub(super) fn of(results: &Results, plots: &[Vec<Plot>]) -> String {
    let command = results.machine.command.replace("```", "");
    let machine = machine(&results.machine).markdown();
    let mut text = format!("# {TITLE}\n\n```\n{command}\n```\n\n{machine}\n");
    for line in verdict::summary(results) {
        text += &format!("- **{}**\n", escaped(&line));
    }
    if let Some(comparisons) = verdict::table(results) {
        text += &format!("\n{COMPARISONS}:\n\n{}", comparisons.markdown());
    }
    text += &format!("\n{HOW_TO_READ}\n");
    let mut plots = plots.iter();
    for section in &results.scenarios {
        text += &heading(section);
        for group in &section.groups {
            text += &of_group(group, plots.next().map_or(&[], Vec::as_slice));
        }
        text += &section.published.as_ref().map_or(String::new(), published);
    }
    text += "\n## What the columns mean\n\n";
    for (name, meaning) in table::meanings(results) {
        text += &format!("- **{}**: {}\n", escaped(name), escaped(meaning));
    }
    text
}

fn heading(section: &Section) -> String {
    let about = section.about.as_deref().unwrap_or_default();
    format!("\n## {}\n\n{}\n", escaped(&section.name), escaped(about))
}

fn of_group(group: &Group, plots: &[Plot]) -> String {
    let (title, table) = (escaped(&group.title()), Table::of(group).markdown());
    let plots: String = plots.iter().map(Plot::markdown).collect();
    format!("\n### {title}\n\n{table}{plots}")
}

fn published(published: &Published) -> String {
    let mut table = Table::new(published.columns.clone());
    for row in &published.rows {
        table.add(None, row.clone());
    }
    let (about, table) = (escaped(&published.about), table.markdown());
    format!("\n### Published: their authors' figures, on their hardware\n\n{about}\n\n{table}")
}

fn machine(machine: &Machine) -> Table {
    let mut table = Table::new(["", "measured on"]);
    let memory = format!("{:.1} GiB", machine.memory as f64 / f64::from(1 << 30));
    let processors = format!("{} ({})", machine.processors, machine.processor);
    for (name, value) in [
        ("processors", &processors),
        ("memory", &memory),
        ("kernel", &machine.kernel),
        ("QEMU", &machine.qemu),
        ("Vamoose", &machine.vamoose),
        ("silesia", &machine.corpus),
        ("date", &machine.date),
        ("load average at the start", &machine.load),
    ] {
        table.add(None, [name.to_owned(), value.clone()]);
    }
    table
}

/// Text that is not markup, on one line.
pub(crate) fn escaped(text: &str) -> String {
    text.chars().fold(String::new(), |mut text, character| {
        match character {
            '\\' | '|' | '*' | '_' | '`' | '<' | '[' | ']' | '#' | '&' => {
                text.extend(['\\', character])
            }
            // Neither XML nor a table has control characters.
            character if character.is_control() || matches!(character, '\u{fffe}' | '\u{ffff}') => {
                text.push(' ')
            }
            character => text.push(character),
        }
        text
    })
}
