//! `vamoose completions`: completions for a shell. The packages have those of `vamoose pages`.

use anyhow::Result;
use clap::{Args, Command};
use clap_complete::{Shell, generate};
use vamoose::report::print;

/// Print completions for a shell
#[derive(Args, Debug)]
#[command(after_help = "\
Example:
  vamoose completions bash >/etc/bash_completion.d/vamoose")]
pub(crate) struct Options {
    shell: Shell,
}

pub(crate) fn run(options: &Options, mut program: Command) -> Result<()> {
    let mut text = Vec::new();
    generate(options.shell, &mut program, "vamoose", &mut text);
    print(&String::from_utf8(text)?)
}
