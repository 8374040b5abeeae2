//! The program under test: which options it has, and its commands.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use lab::vamoose::Vamoose;

/// A `vamoose`.
#[derive(Debug)]
pub(crate) struct Program {
    path: PathBuf,
    migrate_help: String,
}

/// One migration, as a user would ask for it.
#[derive(Clone, Debug)]
pub(crate) struct Migrate {
    pub(crate) qmp: PathBuf,
    pub(crate) to: String,
    pub(crate) name: String,
    pub(crate) state: PathBuf,
    /// Options of the migration itself.
    pub(crate) options: Vec<String>,
}

impl Program {
    pub(crate) fn at(path: &Path) -> Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            migrate_help: help(path, "migrate")?,
        })
    }

    /// Whether it detects bytes that change on the network.
    pub(crate) fn checks(&self) -> bool {
        self.migrate_help.contains("--check")
    }

    pub(crate) fn migrate(&self, migrate: &Migrate) -> Result<Vamoose> {
        let mut command = Command::new(&self.path);
        command.args(["migrate", "--json", "-", "--stall-timeout", STALL, "--qmp"]);
        command.arg(&migrate.qmp);
        command.args(["--to", &migrate.to, "--name", &migrate.name]);
        command.args(&migrate.options);
        command.args(["--downtime-max", "5", "--state-dir"]);
        command.arg(&migrate.state);
        if self.migrate_help.contains("--insecure") {
            command.arg("--insecure");
        }
        Vamoose::start(&mut command)
    }

    pub(crate) fn serve(&self, monitors: &Path, state: &Path) -> Result<Vamoose> {
        let mut command = Command::new(&self.path);
        command.args([
            "serve",
            "--listen",
            "tcp:127.0.0.1:0",
            "--stall-timeout",
            STALL,
        ]);
        command.arg("--qmp-dir").arg(monitors);
        command.arg("--state-dir").arg(state).arg("--insecure");
        Vamoose::start(&mut command)
    }
}

/// Seconds without a byte: short, as most of an experiment is waiting for this.
const STALL: &str = "2";

fn help(path: &Path, command: &str) -> Result<String> {
    let output = Command::new(path).args([command, "--help"]).output();
    let output = output.with_context(|| format!("running {}", path.display()))?;
    ensure!(
        output.status.success(),
        "{} {command} --help: {}",
        path.display(),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
