//! `vamoose bench`, which starts the program `vamoose-bench`.
//!
//! Measurements and test QEMUs are in a separate program because most hosts do not need them.

use std::{
    env,
    ffi::OsString,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use clap::Args;

/// Measure migrations by Vamoose and by stock QEMU on this host
///
/// Starts the program vamoose-bench from the directory of this program or from PATH; `vamoose bench --help` shows its options.
#[derive(Args, Debug)]
#[command(disable_help_flag = true)]
pub(crate) struct BenchOptions {
    /// Arguments of vamoose-bench
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARGUMENT"
    )]
    arguments: Vec<OsString>,
}

const PROGRAM: &str = "vamoose-bench";

pub(crate) fn bench(options: &BenchOptions) -> Result<()> {
    become_program(&options.arguments)
}

/// Replaces this process by the program; returns only if that fails.
fn become_program(arguments: &[OsString]) -> Result<()> {
    let own = env::current_exe().ok();
    let path = env::var_os("PATH").unwrap_or_default();
    let program = find(own.as_deref(), env::split_paths(&path)).with_context(|| {
        format!(
            "there is no program {PROGRAM} beside vamoose or in PATH: install the package {PROGRAM}, or build it by \
             `cargo build --release -p {PROGRAM}` from Vamoose's sources, and copy target/release/{PROGRAM} there"
        )
    })?;
    let failure = Command::new(&program).args(arguments).exec();
    Err(failure).with_context(|| format!("cannot start {}", program.display()))
}

/// Finds the program in the directory of `own`, or in one of `folders`.
fn find(own: Option<&Path>, folders: impl Iterator<Item = PathBuf>) -> Option<PathBuf> {
    let beside = own.and_then(Path::parent).map(Path::to_owned);
    // A relative entry of PATH would depend on the working directory.
    let folders = folders.filter(|folder| folder.is_absolute());
    let mut programs = beside
        .into_iter()
        .chain(folders)
        .map(|folder| folder.join(PROGRAM));
    programs.find(|program| program.is_file())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_program_beside_this_one_comes_first() -> Result<()> {
        let [beside, other] = [tempfile::tempdir()?, tempfile::tempdir()?];
        let own = beside.path().join("vamoose");
        let found = || {
            find(
                Some(&own),
                [PathBuf::from("."), other.path().into()].into_iter(),
            )
        };
        assert_eq!(found(), None);
        fs::write(other.path().join(PROGRAM), "")?;
        assert_eq!(found(), Some(other.path().join(PROGRAM)));
        fs::write(beside.path().join(PROGRAM), "")?;
        assert_eq!(found(), Some(beside.path().join(PROGRAM)));
        Ok(())
    }
}
