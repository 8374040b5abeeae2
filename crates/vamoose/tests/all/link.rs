//! The link between two hosts: authenticated, encrypted, and lost again and again in the middle of migrations.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use lab::{
    middlebox::{Admission, Change, Direction, Flow, Middlebox, Which},
    qemu::{self, Binary, Qemu},
    ram,
    vamoose::{Keys, Vamoose},
};
use rustix::process::Signal;
use serde_json::Value;

use crate::common::{
    Host, LIMIT, MIB, bare_pair, expect_equal,
    gate::{Fate, Gate, Message},
    incoming, listen_address, set_up, vamoose,
};

/// Keys of two hosts that know each other.
struct TwoHosts(Keys);

impl TwoHosts {
    fn new() -> Result<Self> {
        Keys::make(vamoose()).map(Self)
    }

    fn near(&self) -> [&str; 2] {
        ["--keys", self.0.source.to_str().unwrap_or_default()]
    }

    fn far(&self) -> [&str; 2] {
        ["--keys", self.0.destination.to_str().unwrap_or_default()]
    }
}

const RAM: u64 = 64 * MIB;

/// A guest that moves to another host through a middlebox, which `meanwhile` plays with.
fn moves(
    binary: &Binary,
    (near, far): (&[&str], &[&str]),
    options: &[&str],
    meanwhile: impl FnOnce(&Middlebox, &Vamoose) -> Result<()>,
) -> Result<Value> {
    let host = Host::start(far)?;
    let middlebox = Middlebox::new(socket_address(&host.address)?)?;
    let (mut source, mut destination) = bare_pair(binary, binary, RAM)?;
    source.qmp.cont()?;
    host.knows("vm", &destination)?;
    let to = format!("tcp:{}", middlebox.address());
    let options = [near, options].concat();
    let migration = crate::common::migrate(&source.qmp_socket(), &to, "vm", &options)?;
    let told = || format!("serve:\n{}", host.server.stderr());
    meanwhile(&middlebox, &migration).with_context(told)?;
    let ended = migration.finish(LIMIT)?.success().with_context(told)?;
    expect_moved(&mut source, &mut destination)?;
    Ok(serde_json::from_str(&ended.stdout)?)
}

fn expect_moved(source: &mut Qemu, destination: &mut Qemu) -> Result<()> {
    destination.qmp.wait_status("running", LIMIT)?;
    ensure!(source.qmp.query_status()? == "postmigrate");
    // A bare machine has no processor that would change it.
    Ok(ram::compare(source.ram(), destination.ram())?)
}

fn socket_address(address: &str) -> Result<SocketAddr> {
    Ok(address.trim_start_matches("tcp:").parse()?)
}

const INSECURE: &[&str] = &["--insecure"];

/// Slow enough for things to happen meanwhile.
const SLOW: &[&str] = &["--max-bandwidth", "24M", "--channels", "4"];

#[test]
fn a_migration_survives_resets_of_all_connections() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let hosts = TwoHosts::new()?;
    for (security, method) in [
        ((INSECURE, INSECURE), "none"),
        ((&hosts.near()[..], &hosts.far()[..]), "zstd"),
        ((&hosts.near()[..], &hosts.far()[..]), "auto"),
    ] {
        let options = [SLOW, &["--method", method]].concat();
        let report = moves(&binary, security, &options, |middlebox, _| {
            for mebibytes in [1, 3, 6] {
                let bytes = mebibytes << 20;
                middlebox.wait_for_bytes(Direction::ToListener, bytes, LIMIT)?;
                middlebox.apply(Which::All, Change::Reset);
            }
            Ok(())
        })
        .with_context(|| format!("{method}, {security:?}"))?;
        ensure!(report["link"]["reconnects"].as_u64() >= Some(3), "{report}");
    }
    Ok(())
}

/// The server is not there yet. Meanwhile Ctrl-C ends the migration, of which the server has not heard.
#[test]
fn a_server_may_come_late() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let host = Host::start(INSECURE)?;
    let middlebox = Middlebox::new(socket_address(&host.address)?)?;
    let (mut source, mut destination) = bare_pair(&binary, &binary, 16 * MIB)?;
    source.qmp.cont()?;
    host.knows("vm", &destination)?;
    let to = format!("tcp:{}", middlebox.address());
    let options = ["--insecure", "--connect-timeout", "100"];
    for admission in [Admission::Silence, Admission::Refuse] {
        middlebox.admit(admission)?;
        let migration = crate::common::migrate(&source.qmp_socket(), &to, "vm", &options)?;
        migration.wait_for("trying again", LIMIT)?;
        migration.signal(Signal::INT)?;
        let ended = migration.finish(LIMIT)?.failure("Cancelled; ")?;
        ensure!(ended.status.code() == Some(3), "{}", ended.status);
        ensure!(!ended.stderr.contains("confirmed"), "{}", ended.stderr);
    }
    let migration = crate::common::migrate(&source.qmp_socket(), &to, "vm", &options)?;
    migration.wait_for("trying again", LIMIT)?;
    middlebox.admit(Admission::Pass)?;
    migration.finish(LIMIT)?.success()?;
    expect_moved(&mut source, &mut destination)
}

/// Connections are refused for a while: nothing gets through, and then all goes on.
#[test]
fn a_migration_survives_a_cut() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let hosts = TwoHosts::new()?;
    let security = (&hosts.near()[..], &hosts.far()[..]);
    for change in [Change::Close, Change::Flow(Flow::Drop)] {
        moves(&binary, security, SLOW, |middlebox, migration| {
            middlebox.wait_for_bytes(Direction::ToListener, 2 << 20, LIMIT)?;
            middlebox.admit(Admission::Refuse)?;
            middlebox.apply(Which::All, change);
            migration.wait_for("was lost", LIMIT)?;
            middlebox.admit(Admission::Pass)
        })?;
    }
    Ok(())
}

/// The connection is cut behind the commit, or before its answer, which comes over the next one: nobody has to ask again.
#[test]
fn a_hand_over_survives_the_loss_of_its_connection() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    for fate in [Fate::CutAfter, Fate::AnswerLost] {
        let host = Host::start(INSECURE)?;
        let gate = Gate::start(&host.address)?;
        let (mut source, mut destination) = bare_pair(&binary, &binary, 16 * MIB)?;
        source.qmp.cont()?;
        host.knows("vm", &destination)?;
        gate.rule(Message::Request("commit"), fate);
        let migration =
            crate::common::migrate(&source.qmp_socket(), &gate.address, "vm", INSECURE)?;
        let ended = migration.finish(LIMIT)?.success()?;
        ensure!(ended.stderr.contains("was lost"), "{}", ended.stderr);
        ensure!(
            !ended.stderr.contains("asking the server again"),
            "{}",
            ended.stderr
        );
        expect_moved(&mut source, &mut destination)?;
    }
    Ok(())
}

/// A link that does not come back: the guest stays, and can be moved later.
#[test]
fn a_cut_that_lasts_too_long_leaves_the_guest_at_the_source() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let options = ["--insecure", "--reconnect-timeout", "2"];
    let host = Host::start(&options)?;
    let middlebox = Middlebox::new(socket_address(&host.address)?)?;
    let (mut source, mut first) = bare_pair(&binary, &binary, RAM)?;
    source.qmp.cont()?;
    host.knows("first", &first)?;
    let to = format!("tcp:{}", middlebox.address());
    let slow = [&options[..], SLOW].concat();
    let migration = crate::common::migrate(&source.qmp_socket(), &to, "first", &slow)?;
    middlebox.wait_for_bytes(Direction::ToListener, 2 << 20, LIMIT)?;
    middlebox.admit(Admission::Refuse)?;
    middlebox.apply(Which::All, Change::Close);
    migration.finish(LIMIT)?.failure(" here.")?;
    ensure!(source.qmp.query_status()? == "running");
    first.wait_exit(LIMIT)?;

    middlebox.admit(Admission::Pass)?;
    let (_, mut second) = bare_pair(&binary, &binary, RAM)?;
    host.knows("second", &second)?;
    crate::common::migrate(&source.qmp_socket(), &to, "second", &options)?
        .finish(LIMIT)?
        .success()?;
    expect_moved(&mut source, &mut second)
}

#[test]
fn an_untrusted_peer_is_refused_with_a_reason_at_both_ends() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let (hosts, others) = (TwoHosts::new()?, TwoHosts::new()?);
    let host = Host::start(&hosts.far())?;
    let (mut source, destination) = bare_pair(&binary, &binary, 4 * MIB)?;
    source.qmp.cont()?;
    host.knows("vm", &destination)?;
    let far_key = std::fs::read_to_string(hosts.0.source.join("trusted"))?;
    let unknown = [&others.near()[..], &["--peer-key", far_key.trim()]].concat();
    for (options, here, there) in [
        (
            &others.near()[..],
            "refusing the server",
            "refuses this server",
        ),
        (
            &unknown,
            "the server refuses this client",
            "refusing the client",
        ),
        (
            INSECURE,
            "the peer refuses: it speaks TLS only",
            "does not speak TLS",
        ),
    ] {
        let migration = host.migrate(&source, "vm", options)?;
        migration.finish(LIMIT)?.failure(here)?;
        host.server
            .wait_for(there, Duration::from_secs(20))
            .with_context(|| format!("{options:?}: {}", host.server.stderr()))?;
    }
    ensure!(source.qmp.query_status()? == "running");
    // The right ones still get in.
    host.migrate(&source, "vm", &hosts.near())?
        .finish(LIMIT)?
        .success()?;
    Ok(())
}

/// Two relays whose link is reset, between QEMUs that know nothing of it.
#[test]
fn a_pair_of_relays_survives_resets() -> Result<()> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let hosts = TwoHosts::new()?;
    for method in ["none", "zstd", "lz4"] {
        let (mut source, mut destination) = bare_pair(&qemu, &qemu, RAM)?;
        set_up(&mut destination, 2, "none")?;
        let connect = incoming(&mut destination, false)?;
        let far = [&["--session", "listen"][..], &hosts.far()].concat();
        let (far, address) = Vamoose::relay(vamoose(), "tcp:127.0.0.1:0", &connect, &far)?;
        let middlebox = Middlebox::new(socket_address(&address)?)?;
        let near = ["--session", "connect", "--method", method];
        let near = [&near[..], SLOW_RELAY, &hosts.near()].concat();
        let listen = listen_address(&source, "out", false);
        let to = format!("tcp:{}", middlebox.address());
        let (near, address) = Vamoose::relay(vamoose(), &listen, &to, &near)?;
        set_up(&mut source, 2, "none")?;
        source.qmp.migrate(&address)?;
        for mebibytes in [1, 3] {
            middlebox.wait_for_bytes(Direction::ToListener, mebibytes << 20, LIMIT)?;
            middlebox.apply(Which::All, Change::Reset);
        }
        expect_equal(&mut source, &mut destination, &[&near, &far])?;
        near.finish(LIMIT)?.success()?;
        far.finish(LIMIT)?.success()?;
    }
    Ok(())
}

const SLOW_RELAY: &[&str] = &["--max-bandwidth", "24M"];
