//! `vamoose pages`: manual pages and completions, from the same definitions as `--help`, and gateway.toml(5). For packages.
//!
//! ```text
//!  DIR/man/vamoose.1, vamoose-migrate.1, ..., vamoose-serve.8, gateway.toml.5
//!  DIR/completions/vamoose.bash, _vamoose, vamoose.fish
//! ```

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use clap::{Args, Command};
use clap_complete::{Shell, generate_to};
use clap_mangen::Man;

/// Write manual pages and completions for shells
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Directory to write man/ and completions/ into
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

/// gateway.toml(5), with the keys of the table in docs/gateway.md.
const GATEWAY_TOML: &str = include_str!("../../../../packaging/gateway.toml.5");

/// Servers, whose pages are in section 8; all others are in section 1.
const DAEMONS: [&str; 2] = ["vamoose-gateway", "vamoose-serve"];

pub(crate) fn run(options: &Options, mut program: Command) -> Result<()> {
    let [man, completions] = ["man", "completions"].map(|name| options.out.join(name));
    for dir in [&man, &completions] {
        fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    }
    let mut documented = without_help(program.clone());
    documented.build();
    write_pages(&documented, &man)?;
    write(&man.join("gateway.toml.5"), GATEWAY_TOML)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        generate_to(shell, &mut program, "vamoose", &completions)
            .with_context(|| format!("cannot write into {}", completions.display()))?;
    }
    Ok(())
}

/// Writes a page for each command, in its section.
fn write_pages(command: &Command, man: &Path) -> Result<()> {
    for command in command.get_subcommands().filter(|it| !it.is_hide_set()) {
        write_pages(command, man)?;
    }
    let name = command.get_display_name().unwrap_or(command.get_name());
    let section = if DAEMONS.contains(&name) { "8" } else { "1" };
    let page = Man::new(command.clone()).section(section);
    let mut text = Vec::new();
    page.render(&mut text)?;
    let mut text = String::from_utf8(text)?;
    // clap_mangen refers to all subcommands in the page's own section.
    for daemon in DAEMONS.map(|name| name.replace('-', "\\-")) {
        text = text.replace(&format!("{daemon}(1)"), &format!("{daemon}(8)"));
    }
    write(&man.join(page.get_filename()), &text)
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Removes the command `help`, whose page would be empty.
fn without_help(command: Command) -> Command {
    command
        .disable_help_subcommand(true)
        .mut_subcommands(without_help)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gateway_toml_5_has_the_table_of_the_handbook() {
        let handbook = include_str!("../../../../docs/gateway.md");
        let section = handbook.split("\n## Configuration\n").nth(1).unwrap();
        let table = section.split("\n|---|---|---|\n").nth(1).unwrap();
        let rows = table.lines().take_while(|line| line.starts_with('|'));
        let mut page = GATEWAY_TOML.replace("\\-", "-");
        for font in ["\\fB", "\\fI", "\\fR"] {
            page = page.replace(font, "");
        }
        let mut rest = &*page;
        for row in rows {
            let row = without_links(&row.replace('`', ""));
            let cells: Vec<_> = row.split('|').map(str::trim).collect();
            let [_, key, default, meaning, _] = cells[..] else {
                panic!("{row}");
            };
            let default = match default {
                "" => String::new(),
                default => format!("; default: {default}"),
            };
            let entry = format!(".TP\n{key}\n{meaning}{default}\n");
            let found = rest.split_once(&entry);
            rest = found
                .unwrap_or_else(|| panic!("{entry} is not in:\n{rest}"))
                .1;
        }
        assert!(!rest.contains(".TP\n"), "more keys: {rest}");
    }

    /// The texts of links alone.
    fn without_links(row: &str) -> String {
        let mut row = row.to_owned();
        while let Some(end) = row.find("](") {
            let target = end + row[end..].find(')').unwrap();
            row.replace_range(end..=target, "");
            row.remove(row[..end].rfind('[').unwrap());
        }
        row
    }
}
