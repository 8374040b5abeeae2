//! A host: its server, the folder in which its QEMUs' monitors are found by name, and the folder of its journal.

use std::fs;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use lab::qemu::Qemu;
use lab::vamoose::Vamoose;
use tempfile::TempDir;

use crate::disk::Disk;
use crate::process::Process;
use crate::program::Program;

pub(crate) struct Host {
    program: Arc<Program>,
    monitors: TempDir,
    disk: Disk,
    server: Option<Server>,
}

struct Server {
    vamoose: Vamoose,
    address: SocketAddr,
}

/// A server starts at once, unless the machine is very busy.
const START: Duration = Duration::from_secs(30);

impl Host {
    /// A host whose server has not been started.
    pub(crate) fn new(program: Arc<Program>) -> Result<Self> {
        Ok(Self {
            program,
            monitors: TempDir::new().context("creating a folder for monitors")?,
            disk: Disk::new()?,
            server: None,
        })
    }

    /// Starts the server, unless it runs.
    pub(crate) fn start(&mut self) -> Result<()> {
        if self.is_up()? {
            return Ok(());
        }
        let vamoose = self.program.serve(self.monitors.path(), self.disk.path())?;
        let address = vamoose.wait_for("taking migrations on ", START)?;
        let address = address
            .trim_start_matches("tcp:")
            .parse()
            .context(address.clone())?;
        self.server = Some(Server { vamoose, address });
        Ok(())
    }

    /// Ends the server and starts another one, with the same journal.
    pub(crate) fn restart(&mut self) -> Result<()> {
        self.server = None;
        self.start()
    }

    pub(crate) fn is_up(&self) -> Result<bool> {
        match &self.server {
            Some(server) => Ok(!server.vamoose.wait_end(Duration::ZERO)?),
            None => Ok(false),
        }
    }

    /// Where the server listens.
    pub(crate) fn address(&self) -> Result<SocketAddr> {
        Ok(self.server()?.address)
    }

    pub(crate) fn process(&self) -> Result<Process> {
        Process::open(self.server()?.vamoose.pid())
    }

    /// What the server has said so far.
    pub(crate) fn said(&self) -> String {
        self.server
            .as_ref()
            .map_or_else(String::new, |server| server.vamoose.stderr())
    }

    pub(crate) fn disk(&self) -> &Disk {
        &self.disk
    }

    /// Makes a QEMU known by `name`, in the place of any that was.
    pub(crate) fn knows(&self, name: &str, qemu: &Qemu) -> Result<()> {
        self.forgets(name);
        let link = self.monitors.path().join(format!("{name}.qmp"));
        std::os::unix::fs::symlink(qemu.qmp_socket(), link).context("linking the monitor")
    }

    pub(crate) fn forgets(&self, name: &str) {
        // There may be none.
        let _ = fs::remove_file(self.monitors.path().join(format!("{name}.qmp")));
    }

    fn server(&self) -> Result<&Server> {
        self.server
            .as_ref()
            .context("the server has not been started")
    }
}
