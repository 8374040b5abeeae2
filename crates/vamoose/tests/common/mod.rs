//! What the end-to-end tests share: bare QEMUs around one or two relays.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test file uses its own part of this module"
)]

use std::{path::Path, process::Command, time::Duration};

use anyhow::{Context as _, Result};
use lab::{
    qemu::{Binary, Builder, Qemu},
    ram::{self, Fill},
    vamoose::Vamoose,
};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Longer than anything may take on a machine that is very busy.
pub const LIMIT: Duration = Duration::from_secs(120);
pub const MIB: u64 = 1 << 20;

/// The program under test.
pub fn vamoose() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_vamoose"))
}

/// A source full of pages of all kinds and a destination that waits for it.
pub fn bare_pair(from: &Binary, to: &Binary, ram: u64) -> Result<(Qemu, Qemu)> {
    let source = Builder::bare(from, ram)
        .content(Fill::Mixed, 1)
        .peer(to.version)
        .start()?;
    let destination = Builder::bare(to, ram)
        .peer(from.version)
        .incoming()
        .start()?;
    Ok((source, destination))
}

/// Turns multifd on with `channels` and `method`.
pub fn set_up(qemu: &mut Qemu, channels: u8, method: &str) -> Result<()> {
    qemu.qmp.use_multifd(channels)?;
    qemu.qmp
        .set_parameters(json!({ "multifd-compression": method }))
}

/// An address on which `qemu` (or a relay beside it) can listen.
pub fn listen_address(qemu: &Qemu, name: &str, tcp: bool) -> String {
    if tcp {
        "tcp:127.0.0.1:0".to_owned()
    } else {
        format!("unix:{}", qemu.socket(name).display())
    }
}

/// Lets a destination listen and returns where.
pub fn incoming(destination: &mut Qemu, tcp: bool) -> Result<String> {
    let address = listen_address(destination, "in", tcp);
    destination.qmp.migrate_incoming(&address)?;
    if tcp {
        let port = destination.qmp.incoming_port()?;
        return Ok(format!("tcp:127.0.0.1:{port}"));
    }
    Ok(address)
}

/// Waits until both QEMUs have completed and compares their whole memory.
pub fn expect_equal(
    source: &mut Qemu,
    destination: &mut Qemu,
    relays: &[&Vamoose],
) -> Result<Value> {
    let said = || {
        let relays = relays.iter().map(|relay| relay.stderr());
        relays.collect::<Vec<_>>().join("\n--\n")
    };
    let account = source
        .qmp
        .wait_migration(&["completed"], LIMIT)
        .with_context(|| {
            format!(
                "relays:\n{}\ndestination:\n{}",
                said(),
                destination.stderr()
            )
        })?;
    destination.qmp.wait_migration(&["completed"], LIMIT)?;
    ram::compare(source.ram(), destination.ram())?;
    Ok(account)
}

/// A destination host: its server, and the folder in which its QEMUs' monitors are linked by name.
pub struct Host {
    pub server: Vamoose,
    pub address: String,
    pub monitors: TempDir,
}

impl Host {
    pub fn start(options: &[&str]) -> Result<Self> {
        let monitors = TempDir::new()?;
        let mut command = Command::new(vamoose());
        command.args(["serve", "--listen", "tcp:127.0.0.1:0", "--qmp-dir"]);
        let server = Vamoose::start(command.arg(monitors.path()).args(options))?;
        let address = server.wait_for("taking migrations on ", LIMIT)?;
        Ok(Self {
            server,
            address,
            monitors,
        })
    }

    /// Makes `qemu` known here by `name`.
    pub fn knows(&self, name: &str, qemu: &Qemu) -> Result<()> {
        let link = self.monitors.path().join(format!("{name}.qmp"));
        std::os::unix::fs::symlink(qemu.qmp_socket(), link).context("cannot link the monitor")
    }

    /// Makes the name free for another QEMU.
    pub fn forgets(&self, name: &str) -> Result<()> {
        let link = self.monitors.path().join(format!("{name}.qmp"));
        std::fs::remove_file(link).context("no such name")
    }

    pub fn migrate(&self, source: &Qemu, name: &str, options: &[&str]) -> Result<Vamoose> {
        migrate(&source.qmp_socket(), &self.address, name, options)
    }
}

pub fn migrate(qmp: &Path, to: &str, name: &str, options: &[&str]) -> Result<Vamoose> {
    let mut command = Command::new(vamoose());
    command.args([
        "migrate", "--json", "-", "--to", to, "--name", name, "--qmp",
    ]);
    Vamoose::start(command.arg(qmp).args(options))
}
