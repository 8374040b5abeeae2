//! `vamoose bench` starts another program, or says how to get it.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use anyhow::{Result, ensure};
use tempfile::TempDir;

use crate::common::vamoose;

/// A folder with vamoose and nothing else, on the file system of the real one.
fn alone() -> Result<(TempDir, PathBuf)> {
    let folder = TempDir::new_in(env!("CARGO_TARGET_TMPDIR"))?;
    let program = folder.path().join("vamoose");
    fs::hard_link(vamoose(), &program)?;
    Ok((folder, program))
}

fn run(program: &Path, arguments: &[&str]) -> Result<Output> {
    let mut command = Command::new(program);
    Ok(command.args(arguments).env("PATH", "/nowhere").output()?)
}

#[test]
fn a_missing_vamoose_bench_has_a_remedy() -> Result<()> {
    let (_folder, program) = alone()?;
    let output = run(&program, &["bench", "--quick"])?;
    let error = String::from_utf8(output.stderr)?;
    ensure!(!output.status.success(), "{error}");
    ensure!(
        error.contains("no program vamoose-bench beside vamoose or in PATH"),
        "{error}"
    );
    ensure!(
        error.contains("cargo build --release -p vamoose-bench"),
        "{error}"
    );
    Ok(())
}

#[test]
fn the_other_program_gets_all_arguments() -> Result<()> {
    let (folder, program) = alone()?;
    let other = folder.path().join("vamoose-bench");
    fs::write(&other, "#!/bin/sh\necho \"$@\"\nexit 7\n")?;
    fs::set_permissions(&other, fs::Permissions::from_mode(0o755))?;
    for (arguments, passed) in [
        (&["bench"][..], ""),
        (
            &["bench", "--quick", "idle", "--out", "a"],
            "--quick idle --out a",
        ),
        (&["bench", "report", "dir"], "report dir"),
        (&["bench", "--help"], "--help"),
    ] {
        let output = run(&program, arguments)?;
        ensure!(
            String::from_utf8(output.stdout)?.trim_end() == passed,
            "{arguments:?}"
        );
        ensure!(output.status.code() == Some(7));
    }
    Ok(())
}
