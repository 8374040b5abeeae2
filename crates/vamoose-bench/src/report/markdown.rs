//! `report.md`, to be put beside other documentation.

use super::plots::Plots;
use super::results::{Group, Results};
use super::table::{Table, Tone};
use super::{about, machine, table, verdict};

pub(super) fn of(results: &Results, plots: &Plots) -> String {
    let mut text = format!(
        "# {}\n\n```\n{}\n```\n\n",
        about::TITLE,
        results.machine.command.replace("```", "")
    );
    text += &table_of(&machine(&results.machine));
    for line in verdict::summary(results) {
        text += &format!("\n- **{}**", escaped(&line));
    }
    if let Some(overview) = verdict::overview(results) {
        let (caption, table) = (about::OVERVIEW, table_of(&overview));
        text += &format!("\n\n{caption}:\n\n{table}");
    }
    text += &format!("\n{}\n", about::HOW);
    for section in &results.scenarios {
        text += &format!("\n## {}\n", escaped(&section.name));
        if let Some(about) = &section.about {
            text += &format!("\n{}\n", escaped(about));
        }
        for group in &section.groups {
            text += &of_group(group);
            let plots = plots
                .get(&(section.name.clone(), group.same))
                .into_iter()
                .flatten();
            for plot in plots {
                text += &format!(
                    "\n![{}](plots/{})\n",
                    escaped(plot.svg.title()),
                    plot.file_name()
                );
            }
        }
        if let Some(published) = &section.published {
            text += &format!(
                "\n### {}\n\n{}\n\n",
                about::PUBLISHED,
                escaped(&published.about)
            );
            text += &table_of(&published.into());
        }
    }
    text += &format!("\n## {}\n\n", about::COLUMNS);
    for (name, meaning) in table::meanings(&results.groups()) {
        text += &format!("- **{}**: {}\n", escaped(name), escaped(meaning));
    }
    text
}

fn of_group(group: &Group) -> String {
    let mut text = format!("\n### {}\n", escaped(&group.same.title()));
    if let Some(verdicts) = verdict::table(group) {
        text += &format!("\n{}:\n\n{}", about::VERDICTS, table_of(&verdicts));
    }
    text += &format!("\n{}:\n\n", about::CELLS);
    text += &table_of(&Table::first(group));
    // A table is one only between blank lines.
    text += &format!(
        "\n<details>\n<summary>{}</summary>\n\n{}\n</details>\n",
        about::OTHERS,
        table_of(&Table::second(group))
    );
    text
}

fn table_of(table: &Table) -> String {
    let row = |cells: &mut dyn Iterator<Item = String>| {
        format!("| {} |\n", cells.collect::<Vec<_>>().join(" | "))
    };
    let mut text = row(&mut table.columns.iter().map(|name| escaped(name)));
    text += &format!("|{}\n", "---|".repeat(table.columns.len()));
    for line in &table.rows {
        text += &row(&mut line.cells.iter().enumerate().map(|(at, cell)| {
            let cell = escaped(cell);
            let is_marked = match line.tone {
                Tone::Plain => false,
                Tone::Default => at == 0,
                Tone::Short => at + 1 == line.cells.len(),
            };
            if is_marked {
                format!("**{cell}**")
            } else {
                cell
            }
        }));
    }
    text
}

/// What would be markup is text.
fn escaped(text: &str) -> String {
    text.chars().fold(String::new(), |mut text, character| {
        match character {
            '\\' | '|' | '*' | '_' | '`' | '<' | '[' | ']' | '#' => text.extend(['\\', character]),
            character if character.is_control() => text.push(' '),
            character => text.push(character),
        }
        text
    })
}
