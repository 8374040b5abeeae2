//! The terminal of `migrate` goes away: an ssh session that ends, a pipe that nobody reads any more.

use std::{
    io::{BufRead as _, BufReader, pipe},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use lab::{
    qemu::{self, Binary, Builder, Qemu},
    ram::Fill,
};
use rustix::process::Signal;

use crate::common::{
    Host, LIMIT, MIB,
    gate::{Fate, Gate, Message},
    migrate, vamoose,
};

const RAM: u64 = 4 * MIB;

fn pair(binary: &Binary, host: &Host) -> Result<(Qemu, Qemu)> {
    let mut source = Builder::bare(binary, RAM).content(Fill::Mixed, 1).start()?;
    source.qmp.cont()?;
    let destination = Builder::bare(binary, RAM).incoming().start()?;
    host.knows("vm", &destination)?;
    Ok((source, destination))
}

#[test]
fn the_end_of_the_terminal_cancels() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let host = Host::start(&[])?;
    let (mut source, _destination) = pair(&binary, &host)?;
    let migration = host.migrate(&source, "vm", &["--max-bandwidth", "16k"])?;
    migration.wait_for("active", LIMIT)?;
    migration.signal(Signal::HUP)?;
    let ended = migration.finish(LIMIT)?;
    ended.failure("Cancelled; ")?;
    source.qmp.wait_status("running", LIMIT)
}

/// Nor is it taken for the decision of a person to leave the guest in doubt, while the server is asked again.
#[test]
fn the_end_of_the_terminal_does_not_end_a_commit() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let host = Host::start(&[])?;
    let gate = Gate::start(&host.address)?;
    let (mut source, mut destination) = pair(&binary, &host)?;
    gate.rule(Message::Request("commit"), Fate::Held);
    let migration = migrate(&source.qmp_socket(), &gate.address, "vm", &[])?;
    gate.wait_until_held()?;
    migration.signal(Signal::HUP)?;
    gate.close();
    migration.wait_for("asking the server again", LIMIT)?;
    migration.signal(Signal::HUP)?;
    gate.open();
    migration.finish(LIMIT)?.success()?;
    destination.qmp.wait_status("running", LIMIT)?;
    ensure!(source.qmp.query_status()? == "postmigrate");
    Ok(())
}

#[test]
fn a_reader_that_is_gone_does_not_end_a_migration() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let host = Host::start(&[])?;
    let (source, mut destination) = pair(&binary, &host)?;
    let (reader, writer) = pipe()?;
    let mut command = Command::new(vamoose());
    command
        .args(["migrate", "--insecure", "--method", "none"])
        // More than one line of progress is to come.
        .args([
            "--max-bandwidth",
            "256k",
            "--name",
            "vm",
            "--to",
            &host.address,
        ])
        .arg("--qmp")
        .arg(source.qmp_socket())
        .arg("--state-dir")
        .arg(source.qmp_socket().with_file_name("state"))
        .stderr(writer);
    let mut migration = command.spawn()?;
    drop(command);
    let mut lines = BufReader::new(reader).lines().map_while(Result::ok);
    let active = lines.find(|line| line.contains("active"));
    active.context("the migration has not begun")?;
    drop(lines);
    let status = migration.wait()?;
    ensure!(status.success(), "{status}");
    destination.qmp.wait_status("running", LIMIT)
}
