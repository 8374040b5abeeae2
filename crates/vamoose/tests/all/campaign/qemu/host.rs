//! A host: its server, the folder with its QEMUs' monitors by name, and the disk of its journal.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use lab::process::Process;
use lab::qemu::Qemu;
use lab::vamoose::Vamoose;
use serde_json::Value;
use tempfile::TempDir;

use crate::campaign::disk::Disk;

pub(crate) struct Host {
    program: PathBuf,
    monitors: TempDir,
    disk: Disk,
    /// The server and its address.
    server: Option<(Vamoose, SocketAddr)>,
}

/// The seconds without a byte after which commands give up: few, as an experiment mostly waits for this.
pub(crate) const STALL: &str = "2";

/// The seconds that both ends wait for another connection: longer than most faults. Some commands do not wait.
pub(crate) const RECONNECT: &str = "3";

/// The limit for a server to start, on a very busy machine.
const START: Duration = Duration::from_secs(30);

impl Host {
    /// A host whose server is not started.
    pub(crate) fn new(program: &Path) -> Result<Self> {
        Ok(Self {
            program: program.to_owned(),
            monitors: TempDir::new().context("creating a folder for monitors")?,
            disk: Disk::new()?,
            server: None,
        })
    }

    /// Starts the server, if it does not run.
    pub(crate) fn start(&mut self) -> Result<()> {
        if self.is_up() {
            return Ok(());
        }
        let mut command = Command::new(&self.program);
        command.args(["serve", "--listen", "tcp:127.0.0.1:0", "--insecure"]);
        command.args(["--reconnect-timeout", RECONNECT]);
        command.args(["--stall-timeout", STALL]);
        command.arg("--qmp-dir").arg(self.monitors.path());
        command.arg("--state-dir").arg(self.disk.path());
        let vamoose = Vamoose::start(&mut command)?;
        let address = vamoose.wait_for("taking migrations on ", START)?;
        let address = address
            .trim_start_matches("tcp:")
            .parse()
            .context(address.clone())?;
        self.server = Some((vamoose, address));
        Ok(())
    }

    /// Ends the server and starts another one with the same journal.
    pub(crate) fn restart(&mut self) -> Result<()> {
        self.server = None;
        self.start()
    }

    pub(crate) fn is_up(&self) -> bool {
        let server = self.server.as_ref();
        server.is_some_and(|(vamoose, _)| !vamoose.process().has_ended())
    }

    /// The server's address.
    pub(crate) fn address(&self) -> Result<SocketAddr> {
        Ok(self.server()?.1)
    }

    pub(crate) fn process(&self) -> Result<Process> {
        Ok(self.server()?.0.process().clone())
    }

    /// The server's stderr so far.
    pub(crate) fn said(&self) -> String {
        let server = self.server.as_ref();
        server.map_or_else(String::new, |(vamoose, _)| vamoose.stderr())
    }

    pub(crate) fn disk(&self) -> &Disk {
        &self.disk
    }

    /// Makes a QEMU known by `name`, replacing any other.
    pub(crate) fn knows(&self, name: &str, qemu: &Qemu) -> Result<()> {
        self.forgets(name);
        let link = self.monitors.path().join(format!("{name}.qmp"));
        std::os::unix::fs::symlink(qemu.qmp_socket(), link).context("linking the monitor")
    }

    /// Whether an attempt to move the guest of this name away from here has reached its commit.
    pub(crate) fn has_committed(&self, name: &str) -> Result<bool> {
        for entry in fs::read_dir(self.disk.path()).context("reading a journal")? {
            let entry = entry.context("reading a journal")?;
            if !entry.file_name().to_string_lossy().starts_with("source-") {
                continue;
            }
            // The server may be replacing or removing it.
            let record = fs::read(entry.path()).unwrap_or_default();
            let record = serde_json::from_slice::<Value>(&record).unwrap_or_default();
            if record["name"] == name && record["phase"] != "moving" {
                return Ok(true);
            }
        }
        Ok(false)
    }

    pub(crate) fn forgets(&self, name: &str) {
        // The name may be unused.
        let _ = fs::remove_file(self.monitors.path().join(format!("{name}.qmp")));
    }

    fn server(&self) -> Result<&(Vamoose, SocketAddr)> {
        let server = self.server.as_ref();
        server.context("the server has not been started")
    }
}
