//! A running Linux guest that writes its memory all the time moves through Vamoose, over many rounds: its
//! whole memory is compared, it ticks on, and it finds its own checksums right.

use crate::common::{Host, LIMIT, MIB, incoming, listen_address, set_up, vamoose};
use anyhow::{Context as _, Result, ensure};
use lab::{
    counter,
    guest::{Guest, Image, Load},
    qemu::{self, AWKWARD, Binary, Builder, Qemu},
    ram::Fill,
    serial,
    vamoose::Vamoose,
};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const LOAD: Load = Load {
    fill: 128,
    hot: 24,
    rate: 3000,
};
/// Low enough for several rounds at this load, high enough for an end.
const DOWNTIME_LIMIT: u64 = 40;
/// Bytes per second on the wire.
const BANDWIDTH: &str = "60M";

pub(crate) fn guests(from: &Binary, to: &Binary) -> Result<Option<(Guest, Guest)>> {
    let Some(image) = Image::build_or_skip(16)? else {
        return Ok(None);
    };
    let machine = |binary| image.machine(binary, 320 * MIB + AWKWARD, &LOAD);
    let source = Guest::start(&machine(from))?;
    let destination = Guest::start(&machine(to).incoming().paused())?;
    source.wait_ready(LIMIT)?;
    source.wait_ticks(5, LIMIT)?;
    Ok(Some((source, destination)))
}

/// After the destination has gone on: it ticks without a gap in the numbers and its memory is right.
pub(crate) fn expect_alive(source: Guest, destination: Guest) -> Result<()> {
    destination.wait_ticks(5, LIMIT)?;
    destination.wait_rounds(2, LIMIT)?;
    serial::follow(&source.finish()?, &destination.finish()?)?;
    Ok(())
}

/// Through two bare relays; the destination waits, so that both memories can be compared.
fn through_a_pair(from: &Binary, to: &Binary, method: &str) -> Result<()> {
    let Some((mut source, mut destination)) = guests(from, to)? else {
        return Ok(());
    };
    let (from, to) = (&mut source.qemu, &mut destination.qemu);
    let relays = migrate_through_a_pair(from, to, method, BANDWIDTH, DOWNTIME_LIMIT)?;
    relays.expect_equal(from, to)?;
    destination.qemu.qmp.cont()?;
    expect_alive(source, destination)
}

struct Pair {
    near: Vamoose,
    far: Vamoose,
}

fn migrate_through_a_pair(
    source: &mut Qemu,
    destination: &mut Qemu,
    method: &str,
    bandwidth: &str,
    downtime_limit: u64,
) -> Result<Pair> {
    set_up(destination, 2, "none")?;
    let connect = incoming(destination, false)?;
    let (far, between) = Vamoose::relay(vamoose(), "tcp:127.0.0.1:0", &connect, &[])?;
    let listen = listen_address(source, "out", false);
    let options = ["--method", method, "--max-bandwidth", bandwidth];
    let (near, address) = Vamoose::relay(vamoose(), &listen, &between, &options)?;
    set_up(source, 2, "none")?;
    let limit = json!({ "downtime-limit": downtime_limit });
    source.qmp.set_parameters(limit)?;
    source.qmp.migrate(&address)?;
    Ok(Pair { near, far })
}

impl Pair {
    /// Waits for the end, after several rounds.
    fn expect_equal(self, source: &mut Qemu, destination: &mut Qemu) -> Result<()> {
        let Self { near, far } = self;
        let account = crate::common::expect_equal(source, destination, &[&near, &far])?;
        let rounds = account["ram"]["dirty-sync-count"].as_u64();
        ensure!(rounds >= Some(3), "{account}");
        near.finish(LIMIT)?.success()?;
        far.finish(LIMIT)?.success().map(drop)
    }
}

#[test]
fn a_running_guest_through_a_pair() -> Result<()> {
    let Some(binary) = qemu::find_or_skip(10, 0)? else {
        return Ok(());
    };
    through_a_pair(&binary, &binary, "zstd")
}

#[test]
fn a_running_guest_from_old_to_new() -> Result<()> {
    let (Some(old), Some(new)) = (qemu::find_or_skip(7, 2)?, qemu::find_or_skip(10, 0)?) else {
        return Ok(());
    };
    through_a_pair(&old, &new, "zlib")
}

#[test]
fn a_running_guest_from_new_to_old() -> Result<()> {
    let (Some(old), Some(new)) = (qemu::find_or_skip(7, 2)?, qemu::find_or_skip(10, 0)?) else {
        return Ok(());
    };
    through_a_pair(&new, &old, "none")
}

/// A guest under KVM that writes, between all versions: how far it has counted determines its memory, on either host.
#[test]
fn a_running_guest_under_kvm() -> Result<()> {
    if !qemu::kvm_or_skip()? {
        return Ok(());
    }
    let ram = 32 * MIB;
    let dir = tempfile::tempdir()?;
    let firmware = dir.path().join("firmware");
    counter::write_firmware(&firmware)?;
    let start = counter::Image::new(ram, 1)?;
    let methods = ["lz4", "zstd", "none", "qpl"].into_iter().cycle();
    for ((from, to), method) in qemu::pairs_or_skip()?.into_iter().zip(methods) {
        let machine = |binary| Builder::firmware(binary, ram, &firmware).kvm();
        let mut source = machine(&from).content(Fill::Mixed, 1).start()?;
        let mut destination = machine(&to).incoming().paused().start()?;
        migrate_through_a_pair(&mut source, &mut destination, method, "40M", 1)?
            .expect_equal(&mut source, &mut destination)
            .with_context(|| format!("{} to {}, {method}", from.version, to.version))?;
        let left = start.check(source.ram())?;
        destination.qmp.cont()?;
        let deadline = Instant::now() + LIMIT;
        // Once round all the pages that it writes.
        while counter::count(destination.ram())? < left + 128 {
            ensure!(Instant::now() < deadline, "the guest does not continue");
            std::thread::sleep(Duration::from_millis(5));
        }
        destination.qmp.stop()?;
        start.check(destination.ram())?;
    }
    Ok(())
}

/// Driven by `migrate`: the guest resumes by itself, within the downtime that is reported.
#[test]
fn a_running_guest_through_migrate_and_serve() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let Some((mut source, mut destination)) = guests(&binary, &binary)? else {
        return Ok(());
    };
    let host = Host::start(&[])?;
    host.knows("vm", &destination.qemu)?;
    let limit = DOWNTIME_LIMIT.to_string();
    let options = [
        "--method",
        "zstd",
        "--max-bandwidth",
        BANDWIDTH,
        "--downtime-limit",
        &limit,
    ];
    let migration = host.migrate(&source.qemu, "vm", &options)?;
    let ended = migration
        .finish(LIMIT)?
        .success()
        .with_context(|| host.server.stderr())?;
    destination.qemu.qmp.wait_status("running", LIMIT)?;
    source.qemu.qmp.wait_status("postmigrate", LIMIT)?;
    let report: Value = serde_json::from_str(&ended.stdout)?;
    ensure!(
        report["ram"]["dirty-sync-count"].as_u64() >= Some(3),
        "{report}"
    );
    let downtime = report["downtime"].as_u64().context("no downtime")?;
    let parts = ["last-round", "device-state", "load", "commit"];
    let parts = parts.map(|part| report["downtime-parts"][part].as_u64());
    let sum: Option<u64> = parts.into_iter().sum();
    // Each is rounded down.
    let sum = sum.with_context(|| format!("{report}"))?;
    ensure!(
        (downtime.saturating_sub(4)..=downtime).contains(&sum),
        "{report}"
    );
    expect_alive(source, destination)
}

/// While it moves the source has another idea of what may be left than before and afterwards.
fn is_told(binary: &Binary, parameter: &str) -> Result<()> {
    let Some((mut source, destination)) = guests(binary, binary)? else {
        return Ok(());
    };
    source.qemu.qmp.stop()?;
    let host = Host::start(&[])?;
    host.knows("vm", &destination.qemu)?;
    let value = |source: &mut Guest| -> Result<Value> {
        let qmp = &mut source.qemu.qmp;
        let all = qmp.execute("query-migrate-parameters", json!({}))?;
        Ok(all[parameter].clone())
    };
    let before = value(&mut source)?;
    let mut options = vec!["--method", "none", "--max-bandwidth", BANDWIDTH];
    options.extend(["--downtime-limit", "300"]);
    let migration = host.migrate(&source.qemu, "vm", &options)?;
    let deadline = Instant::now() + LIMIT;
    while value(&mut source)? == before {
        ensure!(Instant::now() < deadline, "{parameter} stays {before}");
    }
    migration.finish(LIMIT)?.success()?;
    ensure!(
        value(&mut source)? == before,
        "{parameter} was not put back"
    );
    Ok(())
}

#[test]
fn the_source_is_told_how_much_may_be_left() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    is_told(&binary, "avail-switchover-bandwidth")
}

/// What a migration that was killed has left is not taken for somebody's wish.
#[test]
fn a_bandwidth_that_was_left_there_is_not_used() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let Some((mut source, destination)) = guests(&binary, &binary)? else {
        return Ok(());
    };
    let qmp = &mut source.qemu.qmp;
    // By it no guest would ever be stopped.
    qmp.set_parameters(json!({ "avail-switchover-bandwidth": 1 }))?;
    let host = Host::start(&[])?;
    host.knows("vm", &destination.qemu)?;
    let migration = host.migrate(&source.qemu, "vm", &[])?;
    migration.finish(LIMIT)?.success()?;
    expect_alive(source, destination)
}

#[test]
fn an_old_source_is_told_how_much_may_be_left() -> Result<()> {
    let Some(binary) = qemu::find_or_skip(7, 2)? else {
        return Ok(());
    };
    is_told(&binary, "downtime-limit")
}

/// The same without `-S` at the destination: the server prevents it from starting by itself.
#[test]
fn a_destination_that_was_not_started_paused() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let Some(image) = Image::build_or_skip(16)? else {
        return Ok(());
    };
    let load = Load {
        fill: 32,
        hot: 4,
        rate: 100,
    };
    let machine = image.machine(&binary, 256 * MIB, &load);
    let source = Guest::start(&machine)?;
    let mut destination = Guest::start(&machine.clone().incoming())?;
    source.wait_ready(LIMIT)?;
    let host = Host::start(&[])?;
    host.knows("vm", &destination.qemu)?;
    let migration = host.migrate(&source.qemu, "vm", &[])?;
    migration.finish(LIMIT)?.success()?;
    destination.qemu.qmp.wait_status("running", LIMIT)?;
    let resumed = destination.qemu.qmp.take_events();
    let resumes = resumed
        .iter()
        .filter(|event| event.name == "RESUME")
        .count();
    ensure!(resumes == 1, "the guest was continued {resumes} times");
    expect_alive(source, destination)
}
