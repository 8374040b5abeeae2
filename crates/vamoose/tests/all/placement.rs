//! Pages that are written straight into the destination QEMU's memory: the whole RAM is compared, over several rounds, with
//! every kind of memory and every way in which a source sends zero pages.

use std::{
    fs,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use crate::common::{Host, LIMIT, MIB, expect_equal, incoming, listen_address, set_up, vamoose};
use anyhow::{Context as _, Result, ensure};
use lab::{
    counter,
    guest::{Guest, Image, Load},
    qemu::{self, Backend, Binary, Builder, Qemu},
    ram::{self, Fill},
    serial,
    vamoose::Vamoose,
};
use serde_json::{Value, json};

const RAM: u64 = 32 * MIB;
const METHODS: [&str; 4] = ["lz4", "zstd", "none", "qpl"];
/// What the server says of a QEMU whose memory it writes.
const PLACED: &str = "writing pages into QEMU's memory: mem";

fn source(binary: &Binary, to: &Binary) -> Builder {
    Builder::bare(binary, RAM)
        .content(Fill::Mixed, 1)
        .peer(to.version)
}

fn destination(binary: &Binary, from: &Binary) -> Builder {
    Builder::bare(binary, RAM).peer(from.version).incoming()
}

/// QEMU reports where its memory is from 8.0 on.
fn can_be_placed(binary: &Binary) -> bool {
    binary.version.major >= 8
}

/// Moves a guest that stands still, and says what the server had to say.
fn moves(from: &Builder, to: &Builder, serve: &[&str], migrate: &[&str]) -> Result<String> {
    let host = Host::start(serve)?;
    let (source, destination) = (from.start()?, to.start()?);
    host.knows("vm", &destination)?;
    let migration = host.migrate(&source, "vm", migrate)?;
    let ended = migration.finish(LIMIT)?.success();
    ended.with_context(|| format!("serve:\n{}", host.server.stderr()))?;
    ram::compare(source.ram(), destination.ram())
        .with_context(|| format!("serve:\n{}", host.server.stderr()))?;
    Ok(host.server.stderr())
}

#[test]
fn between_all_versions() -> Result<()> {
    let backends = [Backend::File, Backend::Memfd].into_iter().cycle();
    let cases = qemu::pairs_or_skip()?.into_iter().zip(backends);
    for (((from, to), backend), method) in cases.zip(METHODS.into_iter().cycle()) {
        let (source, destination) = (source(&from, &to), destination(&to, &from).backend(backend));
        let serve = ["--placement", "auto"];
        let said = moves(&source, &destination, &serve, &["--method", method])
            .with_context(|| format!("{} to {}, {method}", from.version, to.version))?;
        ensure!(said.contains(PLACED) == can_be_placed(&to), "{said}");
        ensure!(
            can_be_placed(&to) || said.contains("sending pages to QEMU: this QEMU does not report"),
            "{said}"
        );
    }
    Ok(())
}

/// Nothing is assumed of what the memory holds: zero pages become zeros, by whichever way they come.
#[test]
fn into_memory_that_is_not_empty() -> Result<()> {
    for (from, to) in qemu::pairs_or_skip()? {
        let source = source(&from, &to);
        let destination = destination(&to, &from).content(Fill::Random, 2);
        if can_be_placed(&to) {
            moves(&source, &destination, &["--placement", "on"], &[])
                .with_context(|| format!("{} to {}", from.version, to.version))?;
        }
    }
    Ok(())
}

#[test]
fn into_preallocated_memory_with_any_zero_page_detection() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    for (backend, zero_pages) in [
        (Backend::Memfd, "none"),
        (Backend::Memfd, "multifd"),
        (Backend::File, "legacy"),
    ] {
        let destination = destination(&binary, &binary).backend(backend).preallocate();
        let options = ["--zero-page-detection", zero_pages, "--method", "lz4"];
        let serve = ["--placement", "on"];
        moves(&source(&binary, &binary), &destination, &serve, &options)
            .with_context(|| zero_pages)?;
    }
    Ok(())
}

#[test]
fn into_huge_pages() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let Some(_huge_pages) = huge_pages()? else {
        return Ok(());
    };
    for (preallocate, method) in [(false, "lz4"), (true, "none")] {
        let mut to = destination(&binary, &binary).backend(Backend::HugeMemfd);
        if preallocate {
            to = to.preallocate();
        }
        let said = moves(
            &source(&binary, &binary),
            &to,
            &["--placement", "on"],
            &["--method", method],
        )?;
        ensure!(said.contains(PLACED), "{said}");
    }
    Ok(())
}

/// Enough of them for one guest, which nobody else takes meanwhile. When there are not, says loudly what is skipped.
fn huge_pages() -> Result<Option<MutexGuard<'static, ()>>> {
    static ONE_GUEST: Mutex<()> = Mutex::new(());
    let guard = ONE_GUEST.lock().unwrap_or_else(PoisonError::into_inner);
    let free = fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    let free: u64 = free.unwrap_or_default().trim().parse().unwrap_or_default();
    if free * 2 * MIB < RAM {
        lab::skipped("no huge pages: echo 32 > /proc/sys/vm/nr_hugepages")?;
        return Ok(None);
    }
    Ok(Some(guard))
}

/// A guest of zeros does not make the destination allocate memory.
#[test]
fn zero_pages_take_no_memory() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let host = Host::start(&["--placement", "on"])?;
    let source = Builder::bare(&binary, RAM).start()?;
    let destination = destination(&binary, &binary).start()?;
    host.knows("vm", &destination)?;
    host.migrate(&source, "vm", &[])?.finish(LIMIT)?.success()?;
    let blocks = std::os::unix::fs::MetadataExt::blocks(&fs::metadata(destination.ram())?);
    ensure!(blocks == 0, "{blocks} blocks");
    Ok(())
}

#[test]
fn placement_on_is_done_or_refused() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let from = source(&binary, &binary);
    let said = moves(
        &from,
        &destination(&binary, &binary),
        &["--placement", "off"],
        &[],
    )?;
    ensure!(!said.contains(PLACED), "{said}");
    let said = moves(&from, &destination(&binary, &binary), &[], &[])?;
    ensure!(!said.contains(PLACED), "{said}");

    let mut source = from.start()?;
    let private = destination(&binary, &binary).backend(Backend::Private);
    let mut private = private.start()?;
    let insists = Host::start(&["--placement", "on"])?;
    insists.knows("vm", &private)?;
    let refused = insists.migrate(&source, "vm", &[])?.finish(LIMIT)?;
    refused.failure("none of its memory is shared")?;
    ensure!(private.qmp.query_status()? == "inmigrate");

    let host = Host::start(&["--placement", "auto"])?;
    host.knows("vm", &private)?;
    host.migrate(&source, "vm", &[])?.finish(LIMIT)?.success()?;
    let said = host.server.stderr();
    ensure!(said.contains("sending pages to QEMU: none of"), "{said}");
    source.qmp.wait_status("postmigrate", LIMIT)
}

/// What counts is how the QEMU is when the migration runs.
#[test]
fn a_capability_that_the_server_switches_off_is_not_in_the_way() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let (source, mut to) = (
        source(&binary, &binary).start()?,
        destination(&binary, &binary).start()?,
    );
    to.qmp.set_capabilities(&[("mapped-ram", true)])?;
    let host = Host::start(&["--placement", "on"])?;
    host.knows("vm", &to)?;
    host.migrate(&source, "vm", &[])?.finish(LIMIT)?.success()?;
    Ok(ram::compare(source.ram(), to.ram())?)
}

/// The monitor is another QEMU's than the one that listens.
#[test]
fn the_memory_of_another_qemu_is_left_alone() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    for placement in ["auto", "on"] {
        let mut source = source(&binary, &binary).start()?;
        let (mut to, mut other) = (
            destination(&binary, &binary).start()?,
            destination(&binary, &binary).start()?,
        );
        for qemu in [&mut source, &mut to, &mut other] {
            set_up(qemu, 2, "none")?;
        }
        let connect = incoming(&mut to, false)?;
        let qmp = other.qmp_socket();
        let qmp = qmp.to_str().context("a path in another encoding")?;
        let options = ["--qmp", qmp, "--placement", placement];
        let listen = listen_address(&source, "out", false);
        let (relay, address) = Vamoose::relay(vamoose(), &listen, &connect, &options)?;
        source.qmp.migrate(&address)?;
        let ended = relay.finish(LIMIT)?;
        let reason = "nothing proves that the QEMU of the monitor is the one that listens";
        if placement == "on" {
            ended.failure(reason)?;
            source.qmp.wait_migration(&["failed"], LIMIT)?;
        } else {
            ensure!(ended.stderr.contains(reason), "{}", ended.stderr);
            ended.success()?;
            ram::compare(source.ram(), to.ram())?;
        }
        let blocks = std::os::unix::fs::MetadataExt::blocks(&fs::metadata(other.ram())?);
        ensure!(blocks == 0, "{blocks} blocks");
    }
    Ok(())
}

const LOAD: Load = Load {
    fill: 128,
    hot: 24,
    rate: 3000,
};

/// A running guest through two relays, the second of which writes its memory.
fn a_running_guest(
    from: &Binary,
    to: &Binary,
    method: &str,
    backend: Backend,
    parameters: Value,
) -> Result<()> {
    let Some(image) = Image::build_or_skip(16)? else {
        return Ok(());
    };
    let machine = |binary| image.machine(binary, 320 * MIB, &LOAD);
    let mut source = Guest::start(&machine(from))?;
    let mut destination = Guest::start(&machine(to).backend(backend).incoming().paused())?;
    source.wait_ready(LIMIT)?;
    source.wait_ticks(5, LIMIT)?;

    through_relays(
        &mut source.qemu,
        &mut destination.qemu,
        "on",
        method,
        "60M",
        parameters,
    )?;
    destination.qemu.qmp.cont()?;
    destination.wait_ticks(5, LIMIT)?;
    destination.wait_rounds(2, LIMIT)?;
    serial::follow(&source.finish()?, &destination.finish()?)?;
    Ok(())
}

/// Over several rounds; the destination waits, so that both memories can be compared.
fn through_relays(
    source: &mut Qemu,
    destination: &mut Qemu,
    placement: &str,
    method: &str,
    bandwidth: &str,
    parameters: Value,
) -> Result<()> {
    set_up(destination, 2, "none")?;
    let connect = incoming(destination, false)?;
    let qmp = destination.qmp_socket();
    let qmp = qmp.to_str().context("a path in another encoding")?;
    let options = ["--qmp", qmp, "--placement", placement];
    let (far, between) = Vamoose::relay(vamoose(), "tcp:127.0.0.1:0", &connect, &options)?;
    let listen = listen_address(source, "out", false);
    let options = ["--method", method, "--max-bandwidth", bandwidth];
    let (near, address) = Vamoose::relay(vamoose(), &listen, &between, &options)?;
    set_up(source, 2, "none")?;
    source.qmp.set_parameters(parameters)?;
    source.qmp.migrate(&address)?;
    let account = expect_equal(source, destination, &[&near, &far])?;
    let rounds = account["ram"]["dirty-sync-count"].as_u64();
    ensure!(rounds >= Some(3), "{account}");
    near.finish(LIMIT)?.success()?;
    far.finish(LIMIT)?.success()?;
    Ok(())
}

#[test]
fn a_running_guest_with_zero_pages_in_packets() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let parameters = json!({ "downtime-limit": 40, "zero-page-detection": "multifd" });
    a_running_guest(&binary, &binary, "lz4", Backend::Memfd, parameters)
}

/// These zero pages are QEMU's to write, while pages of the next round come.
#[test]
fn a_running_guest_with_zero_pages_on_the_main_stream() -> Result<()> {
    let Some(binary) = qemu::find_or_skip(10, 0)? else {
        return Ok(());
    };
    let parameters = json!({ "downtime-limit": 40, "zero-page-detection": "legacy" });
    a_running_guest(&binary, &binary, "zstd", Backend::File, parameters)
}

#[test]
fn a_running_guest_from_one_version_to_another() -> Result<()> {
    let (Some(old), Some(new)) = (qemu::find_or_skip(10, 0)?, qemu::newest_or_skip()?) else {
        return Ok(());
    };
    let parameters = json!({ "downtime-limit": 40 });
    a_running_guest(&old, &new, "none", Backend::File, parameters)
}

/// A guest under KVM that writes, between all versions and into every kind of memory: what its memory has to be follows from
/// how far it has counted, on either host.
#[test]
fn a_running_guest_under_kvm() -> Result<()> {
    if !qemu::kvm_or_skip()? {
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let firmware = dir.path().join("firmware");
    counter::write_firmware(&firmware)?;
    let start = counter::Image::new(RAM, 1)?;
    let huge_pages = huge_pages()?;
    let mut backends = vec![Backend::Memfd, Backend::File];
    backends.extend(huge_pages.is_some().then_some(Backend::HugeMemfd));
    let backends = backends.into_iter().cycle();
    let cases = qemu::pairs_or_skip()?.into_iter().zip(backends);
    for (((from, to), backend), method) in cases.zip(METHODS.into_iter().cycle()) {
        let machine = |binary| Builder::firmware(binary, RAM, &firmware).kvm();
        let mut source = machine(&from).content(Fill::Mixed, 1).start()?;
        let waits = machine(&to).backend(backend).incoming().paused();
        let mut destination = waits.start()?;
        let parameters = json!({ "downtime-limit": 1 });
        through_relays(
            &mut source,
            &mut destination,
            "auto",
            method,
            "40M",
            parameters,
        )
        .with_context(|| format!("{} to {}, {method}, {backend:?}", from.version, to.version))?;
        let left = start.check(source.ram())?;
        destination.qmp.cont()?;
        let deadline = Instant::now() + LIMIT;
        // Once round all the pages that it writes.
        while counter::count(destination.ram())? < left + 128 {
            ensure!(Instant::now() < deadline, "the guest does not go on");
            std::thread::sleep(Duration::from_millis(5));
        }
        destination.qmp.stop()?;
        start.check(destination.ram())?;
    }
    Ok(())
}
