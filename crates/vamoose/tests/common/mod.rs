//! What the end-to-end tests share: bare QEMUs around one or two relays.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test file uses its own part of this module"
)]

use std::{path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use lab::{
    qemu::{Binary, Builder, Qemu},
    ram::{self, Fill},
    vamoose::Vamoose,
};
use serde_json::{Value, json};

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

/// The guest must be where it was before a migration that failed.
pub fn expect_at_source(source: &mut Qemu) -> Result<()> {
    source.qmp.wait_migration(&["failed", "cancelled"], LIMIT)?;
    let status = source.qmp.query_status()?;
    ensure!(
        status == "running" || status == "prelaunch",
        "the guest at the source is {status}"
    );
    Ok(())
}
