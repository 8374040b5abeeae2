//! `vamoose attempts --watch`, beside migrations of all commands that move guests.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Command, Stdio},
    thread,
};

use anyhow::{Context as _, Result, ensure};
use fastrand::Rng;
use lab::{
    process::Child,
    qemu::{self, Builder, Qemu},
    ram::Fill,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    common::{
        Host, LIMIT, MIB,
        gate::{Fate, Gate, Message},
        migrate, vamoose,
    },
    gateway::{
        Hosts, PORT,
        metrics::{self, WITH_METRICS},
    },
};

/// Watches until a line is what `is_it` wants, and returns that.
fn watch(dir: &Path, options: &[&str], is_it: impl Fn(&str) -> bool) -> Result<String> {
    let mut command = Command::new(vamoose());
    command.args(["attempts", "--watch", "--state-dir"]);
    command.arg(dir).args(options).stdout(Stdio::piped());
    let mut child = Child::start(&mut command)?;
    let stdout = child.pipes.stdout.take().context("no stdout")?;
    let mut seen = Vec::new();
    for line in BufReader::new(stdout).lines().take(SECONDS) {
        let line = line?;
        if is_it(&line) {
            return Ok(line);
        }
        seen.push(line);
    }
    anyhow::bail!("never seen, but:\n{}", seen.join("\n"))
}

/// As a line comes each second.
const SECONDS: usize = 120;

/// The migration that is moved by this command, once it has sent something.
fn watch_json(dir: &Path, by: &str, role: &str) -> Result<Value> {
    let find = |line: &str| {
        let line: Value = serde_json::from_str(line).ok()?;
        let mut all = line["migrations"].as_array()?.iter();
        let is_it = |it: &&Value| {
            it["by"] == by && it["role"] == role && it["wire-bytes"].as_u64() > Some(MIB)
        };
        all.find(is_it).cloned()
    };
    let line = watch(dir, &["--json"], |line| find(line).is_some())?;
    find(&line).context("no line")
}

fn expect(seen: &Value, wanted: &[(&str, Value)]) -> Result<()> {
    for (key, value) in wanted {
        ensure!(seen[key] == *value, "{key}: {seen}");
    }
    Ok(())
}

/// Seconds for what a test moves.
const SLOW: u64 = MIB;

fn source(binary: &qemu::Binary) -> Result<Qemu> {
    let mut source = Builder::bare(binary, 64 * MIB)
        .content(Fill::Random, 1)
        .argument("-name")
        .argument("guest=web1")
        .start()?;
    source.qmp.cont()?;
    Ok(source)
}

#[test]
fn both_ends_of_migrate_and_serve_are_seen() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let host = Host::start(&[])?;
    let source = source(&binary)?;
    let destination = Builder::bare(&binary, 64 * MIB).incoming().start()?;
    host.knows("vm", &destination)?;
    let limit = format!("{SLOW}B");
    let options = ["--max-bandwidth", &limit];
    let _migration = migrate(&source.qmp_socket(), &host.address, "vm", &options)?;
    let here = source.qmp_socket().with_file_name("state");
    let leaving = watch_json(&here, "migrate", "source")?;
    expect(
        &leaving,
        &[
            ("name", json!("vm")),
            ("peer", json!(host.address)),
            ("status", json!("active")),
            ("method", json!("none")),
            ("rounds", json!(1)),
            ("downtime", Value::Null),
        ],
    )?;
    ensure!(leaving["remaining"].as_u64() < leaving["total"].as_u64());
    ensure!(
        leaving["wire-bytes-per-second"].as_u64() > Some(0),
        "{leaving}"
    );
    let coming = watch_json(&host.state_dir(), "serve", "destination")?;
    expect(
        &coming,
        &[("name", json!("vm")), ("remaining", Value::Null)],
    )?;
    watch(&here, &[], |line| {
        line.starts_with("vm to tcp:127.0.0.1:")
            && line.contains(" (migrate), active: ")
            && line.contains(" by none in ")
            && line.ends_with(" MiB left")
    })?;
    Ok(())
}

#[test]
fn the_downtime_counts_on_while_the_destination_does_not_answer() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let host = Host::start(&[])?;
    let gate = Gate::start(&host.address)?;
    let source = source(&binary)?;
    let destination = Builder::bare(&binary, 64 * MIB).incoming().start()?;
    host.knows("vm", &destination)?;
    gate.rule(Message::Request("commit"), Fate::Held);
    let migration = migrate(&source.qmp_socket(), &gate.address, "vm", &[])?;
    gate.wait_until_held()?;
    let here = source.qmp_socket().with_file_name("state");
    let downtime = || {
        watch_json(&here, "migrate", "source")?["downtime"]
            .as_u64()
            .context("none")
    };
    let first = downtime()?;
    ensure!(downtime()? > first);
    gate.release(Fate::Passes);
    migration.finish(LIMIT)?.success()?;
    Ok(())
}

#[test]
fn migrations_through_gateways_are_seen_on_both_hosts() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let dir = TempDir::new()?;
    let path = dir.path().to_str().context("no text")?.to_owned();
    let hosts = Hosts::with("", "", &["--state-dir", String::leak(path)])?;
    let mut source = source(&binary)?;
    let mut destination = Builder::bare(&binary, 64 * MIB).incoming().start()?;
    for qemu in [&mut source, &mut destination] {
        crate::common::set_up(qemu, 2, "none")?;
    }
    let limit = json!({ "max-bandwidth": SLOW });
    source.qmp.set_parameters(limit)?;
    hosts.far.receives(&mut destination, PORT)?;
    hosts.near.sends(&mut source, PORT)?;
    for role in ["source", "destination"] {
        let seen = watch_json(dir.path(), "gateway", role)?;
        expect(
            &seen,
            &[
                ("name", json!("web1")),
                ("peer", json!("other")),
                ("target", json!(format!("port {PORT}"))),
            ],
        )?;
    }
    let method = watch_json(dir.path(), "gateway", "source")?["method"].clone();
    ensure!(method == "auto", "{method}");
    Ok(())
}

/// As libvirt copies a disk.
#[test]
fn bytes_through_gateways_are_seen_on_both_hosts_and_counted() -> Result<()> {
    const ZEROS: usize = 16 << 20;
    const RANDOM: usize = 2 << 20;
    let dir = TempDir::new()?;
    let path = dir.path().to_str().context("no text")?.to_owned();
    let options = ["--state-dir", String::leak(path)];
    let hosts = Hosts::with(WITH_METRICS, "", &options)?;
    let server = TcpListener::bind((hosts.far.own, PORT))?;
    let mut client = TcpStream::connect((hosts.near.door, PORT))?;
    let (mut server, _) = server.accept()?;
    server.write_all(b"NBDMAGIC")?;
    let mut written = vec![0; ZEROS];
    let mut random = Rng::with_seed(1);
    written.resize_with(ZEROS + RANDOM, || random.u8(..));
    let mut read = vec![0; written.len()];
    thread::scope(|scope| {
        scope.spawn(|| client.write_all(&written));
        server.read_exact(&mut read)
    })?;
    ensure!(read == written, "other bytes arrived");
    for (role, method) in [("source", json!("auto")), ("destination", Value::Null)] {
        let seen = watch_json(dir.path(), "gateway", role)?;
        expect(
            &seen,
            &[
                ("peer", json!("other")),
                ("target", json!(format!("port {PORT}"))),
                ("is-bytes", json!(true)),
                ("method", method),
                ("guest-bytes", json!(written.len())),
            ],
        )?;
        ensure!(seen["wire-bytes"].as_u64() < Some(3 * MIB), "{seen}");
    }
    watch(dir.path(), &[], |line| {
        line.contains("(gateway), bytes: 18 MiB as 2 MiB by auto in ")
    })?;
    let (at, with) = (
        metrics::address(&hosts)?,
        "{direction=\"outgoing\",peer=\"other\"}",
    );
    for (name, expected) in [
        ("vamoose_migrations_in_flight", 1.0),
        ("vamoose_migration_guest_bytes_total", written.len() as f64),
    ] {
        metrics::wait_for(&at, &format!("{name}{with}"), expected)?;
    }
    Ok(())
}
