//! `vamoose pages`: manual pages and completions, from the same definitions as `--help`. For packages.
//!
//! ```text
//!  DIR/man/vamoose.1, vamoose-serve.1, ...
//!  DIR/completions/vamoose.bash, _vamoose, vamoose.fish
//! ```

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result};
use clap::{Args, Command};
use clap_complete::{Shell, generate_to};

/// Write manual pages and completions for shells
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Directory to write man/ and completions/ into
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

pub(crate) fn run(options: &Options, mut program: Command) -> Result<()> {
    let [man, completions] = ["man", "completions"].map(|name| options.out.join(name));
    for dir in [&man, &completions] {
        fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    }
    clap_mangen::generate_to(without_help(program.clone()), &man)
        .with_context(|| format!("cannot write into {}", man.display()))?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        generate_to(shell, &mut program, "vamoose", &completions)
            .with_context(|| format!("cannot write into {}", completions.display()))?;
    }
    Ok(())
}

/// Without the command `help`, whose pages would say nothing.
fn without_help(command: Command) -> Command {
    command
        .disable_help_subcommand(true)
        .mut_subcommands(without_help)
}
