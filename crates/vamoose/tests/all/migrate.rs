//! `vamoose serve` and `vamoose migrate`: both QEMUs are driven over QMP, the guest ends up running in
//! one place, and what cannot work is refused before anything starts.

use std::{fs, os::unix::fs::symlink, process::Command, time::Duration};

use crate::common::{Host, LIMIT, MIB, migrate, vamoose};
use anyhow::{Context as _, Result, ensure};
use lab::{
    qemu::{self, Binary, Builder, Qemu},
    ram::{self, Fill},
    vamoose::{Keys, Vamoose},
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

fn source(binary: &Binary, to: &Binary, seed: u64) -> Result<Qemu> {
    Builder::bare(binary, 32 * MIB)
        .content(Fill::Mixed, seed)
        .peer(to.version)
        .start()
}

fn destination(binary: &Binary, from: &Binary) -> Result<Qemu> {
    Builder::bare(binary, 32 * MIB)
        .peer(from.version)
        .incoming()
        .start()
}

#[test]
fn a_guest_moves_between_all_versions() -> Result<()> {
    let host = Host::start(&[])?;
    let methods = ["zstd", "lz4", "qatzip", "qpl"].into_iter().cycle();
    for (number, ((from, to), method)) in qemu::pairs_or_skip()?.iter().zip(methods).enumerate() {
        let name = format!("vm{number}");
        let mut source = source(from, to, 1)?;
        let mut destination = destination(to, from)?;
        host.knows(&name, &destination)?;
        let ended = host
            .migrate(&source, &name, &["--method", method, "--channels", "3"])?
            .finish(LIMIT)?
            .success()
            .with_context(|| format!("server:\n{}", host.server.stderr()))?;
        ram::compare(source.ram(), destination.ram())
            .with_context(|| format!("{} to {}, {method}", from.version, to.version))?;
        source.qmp.wait_status("postmigrate", LIMIT)?;
        let status = destination.qmp.query_status()?;
        // The bare machine was never started, so it is not started over there.
        ensure!(status == "prelaunch" || status == "paused", "{status}");
        let report: Value = serde_json::from_str(&ended.stdout)?;
        ensure!(
            report["status"] == "completed" && report["method"] == method,
            "{report}"
        );
        ensure!(
            report["ram"]["dirty-sync-count"].as_u64() > Some(0),
            "{report}"
        );
    }
    Ok(())
}

/// The address and the key of the other host are in hosts.toml, and nothing else tells them.
#[test]
fn a_guest_and_a_host_are_enough() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let keys = Keys::make(vamoose())?;
    let host = Host::start(&["--keys", &keys.destination.display().to_string()])?;
    let here = TempDir::new()?;
    let (mut source, mut there) = (source(&binary, &binary, 1)?, destination(&binary, &binary)?);
    host.knows("web1", &there)?;
    symlink(source.qmp_socket(), here.path().join("web1.qmp"))?;
    source.qmp.cont()?;
    let migrate = |name: &str| {
        let mut command = Command::new(vamoose());
        command.args(["migrate", "web1", name, "--keys"]);
        command.arg(&keys.source).arg("--qmp-dir").arg(here.path());
        command.arg("--state-dir").arg(here.path().join("state"));
        Vamoose::start(&mut command)?.finish(LIMIT)
    };
    let hosts = keys.source.join("hosts.toml");
    let [ours, theirs] = keys.public.each_ref().map(|key| key.trim());
    let write = |key: &str| {
        let text = format!("[kvm2]\naddress = {:?}\nkey = {key:?}\n", host.address);
        fs::write(&hosts, text)
    };
    write(theirs)?;
    let unknown = migrate("kvm3.invalid")?.failure("a name that this host can resolve")?;
    let file = hosts.display().to_string();
    ensure!(unknown.stderr.contains(&file), "{}", unknown.stderr);
    fs::remove_file(keys.source.join("trusted"))?;
    write(ours)?;
    let wrong = migrate("kvm2")?.failure(theirs)?;
    ensure!(wrong.stderr.contains("hosts.toml"), "{}", wrong.stderr);
    ensure!(source.qmp.query_status()? == "running");

    write(theirs)?;
    migrate("kvm2")?.success()?;
    there.qmp.wait_status("running", LIMIT)?;
    Ok(())
}

#[test]
fn many_guests_at_once_through_one_server() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let host = Host::start(&[])?;
    let mut guests = Vec::new();
    for seed in 0..4 {
        let name = format!("vm{seed}");
        let source = source(&binary, &binary, seed)?;
        let destination = destination(&binary, &binary)?;
        host.knows(&name, &destination)?;
        let migration = host.migrate(&source, &name, &["--method", "zlib"])?;
        guests.push((source, destination, migration));
    }
    for (source, destination, migration) in guests {
        migration.finish(LIMIT)?.success()?;
        ram::compare(source.ram(), destination.ram())?;
    }
    Ok(())
}

/// What cannot work is refused with its reason, and neither QEMU has been touched.
#[test]
fn impossible_migrations_are_refused_early() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let host = Host::start(&[])?;
    let mut source = source(&binary, &binary, 1)?;
    let refuses = |name: &str, options: &[&str], reason: &str| -> Result<()> {
        let migration = host.migrate(&source, name, options)?;
        let ended = migration.finish(LIMIT)?.failure(reason)?;
        // Wrong options have no report.
        let code = if ended.stdout.is_empty() { 2 } else { 1 };
        ensure!(ended.status.code() == Some(code), "{}", ended.status);
        if code == 1 {
            let report: Value = serde_json::from_str(&ended.stdout)?;
            ensure!(report["status"] == "failed", "{report}");
        }
        Ok(())
    };
    refuses("nobody", &[], "nobody.qmp")?;
    refuses("../escape", &[], "invalid name")?;
    refuses("x", &["--method", "zstd", "--level", "99"], "99")?;
    refuses("x", &["--accel", "qat"], "engine qat is absent")?;

    let not_waiting = Builder::bare(&binary, 32 * MIB).start()?;
    host.knows("not-waiting", &not_waiting)?;
    refuses(
        "not-waiting",
        &[],
        "does not wait for a guest: it is `prelaunch`",
    )?;

    let smaller = Builder::bare(&binary, 16 * MIB).incoming().start()?;
    host.knows("smaller", &smaller)?;
    refuses("smaller", &[], "RAM: 32 MiB here, 16 MiB at tcp:")?;

    let mut other_uuid = Builder::bare(&binary, 32 * MIB)
        .argument("-uuid")
        .argument("11111111-2222-3333-4444-555555555555")
        .incoming()
        .start()?;
    host.knows("other-uuid", &other_uuid)?;
    refuses("other-uuid", &[], "uuid: 0000")?;
    ensure!(other_uuid.qmp.query_status()? == "inmigrate");

    let soon = ["--connect-timeout", "1"];
    let nobody = migrate(&source.qmp_socket(), "tcp:127.0.0.1:1", "x", &soon)?;
    nobody
        .finish(LIMIT)?
        .failure("does `vamoose serve` run on that host")?;
    let nowhere = host.monitors.path().join("nowhere.qmp");
    let no_qemu = migrate(&nowhere, &host.address, "x", &[])?;
    no_qemu.finish(LIMIT)?.failure("nowhere.qmp")?;

    ensure!(source.qmp.query_status()? == "prelaunch");
    ensure!(source.qmp.query_migrate()?["status"].is_null());
    Ok(())
}

#[test]
fn nothing_is_insecure_unless_it_is_asked_for() -> Result<()> {
    for arguments in [
        ["serve", "--listen", "tcp:0.0.0.0:0", "--qmp-dir", "/"].as_slice(),
        &["serve", "--listen", "tcp:127.0.0.1:0", "--qmp-dir", "/"],
        &[
            "migrate",
            "--to",
            "tcp:127.0.0.1:1",
            "--name",
            "vm",
            "--qmp",
            "/nowhere",
        ],
        &[
            "relay",
            "--listen",
            "tcp:0.0.0.0:0",
            "--connect",
            "unix:/nowhere",
        ],
    ] {
        let refused = Vamoose::start(Command::new(vamoose()).args(arguments))?;
        let refused = refused.finish(LIMIT)?.failure("--insecure")?;
        ensure!(refused.status.code() == Some(2), "{}", refused.status);
    }
    Ok(())
}

/// Ctrl-C in the middle: the guest stays, the destination's half guest is gone, and the next
/// migration works.
#[test]
fn ctrl_c_cancels() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let host = Host::start(&[])?;
    let mut source = source(&binary, &binary, 1)?;
    let mut first = destination(&binary, &binary)?;
    host.knows("first", &first)?;
    let migration = host.migrate(&source, "first", &["--max-bandwidth", "1M"])?;
    migration.wait_for("active", LIMIT)?;
    migration.signal(Signal::INT)?;
    let ended = migration.finish(LIMIT)?.failure("Cancelled; ")?;
    let report: Value = serde_json::from_str(&ended.stdout)?;
    ensure!(report["status"] == "cancelled", "{report}");
    ensure!(ended.status.code() == Some(3), "{}", ended.status);
    ensure!(source.qmp.query_status()? == "prelaunch");
    first.wait_exit(LIMIT)?;

    let second = destination(&binary, &binary)?;
    host.knows("second", &second)?;
    host.migrate(&source, "second", &[])?
        .finish(LIMIT)?
        .success()?;
    ram::compare(source.ram(), second.ram())?;
    Ok(())
}

/// An unresponsive destination is ended, whatever its process is called: half a guest must
/// not stay behind.
#[test]
fn a_destination_that_hangs_is_ended() -> Result<()> {
    for binary in qemu::available() {
        let host = Host::start(&[])?;
        let mut source = source(binary, binary, 1)?;
        let mut destination = Builder::bare(binary, 32 * MIB)
            .process_name("web1")
            .incoming()
            .start()?;
        host.knows("vm", &destination)?;
        let migration = host.migrate(&source, "vm", &["--max-bandwidth", "1M"])?;
        migration.wait_for("active", LIMIT)?;
        let pid = Pid::from_raw(destination.pid().try_into()?).context("no pid")?;
        kill_process(pid, Signal::STOP)?;
        migration.signal(Signal::INT)?;
        migration.finish(LIMIT)?.failure("Cancelled; ")?;
        destination
            .wait_exit(Duration::from_secs(20))
            .with_context(|| format!("{}: {}", binary.version, host.server.stderr()))?;
        ensure!(source.qmp.query_status()? == "prelaunch");
    }
    Ok(())
}
