//! Pages that the destination's QEMU decodes itself: payloads go to it as the source's relay made them, whatever happens to the
//! link meanwhile.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use lab::{
    guest::{Guest, Image, Load},
    middlebox::{Change, Direction, Middlebox, Which},
    qemu::{self, Builder},
    ram::{self, Fill},
    serial,
};
use serde_json::Value;

use crate::common::{Host, LIMIT, MIB, migrate};

const RAM: u64 = 32 * MIB;
const BY_QEMU: [&str; 2] = ["--decoder", "qemu"];
/// What the server says of a QEMU that decodes.
const DECODES: &str = "QEMU decodes the pages itself";

/// Moves a guest that stands still, compares its memory, and says what the server had to say.
fn moves(from: &Builder, to: &Builder, serve: &[&str], options: &[&str]) -> Result<String> {
    let host = Host::start(serve)?;
    let (source, destination) = (from.start()?, to.start()?);
    host.knows("vm", &destination)?;
    let ended = host.migrate(&source, "vm", options)?.finish(LIMIT)?;
    let told = || format!("serve:\n{}", host.server.stderr());
    ended.success().with_context(told)?;
    ram::compare(source.ram(), destination.ram()).with_context(told)?;
    Ok(host.server.stderr())
}

#[test]
fn between_all_versions() -> Result<()> {
    for (from, to) in qemu::pairs_or_skip()? {
        let source = Builder::bare(&from, RAM).content(Fill::Mixed, 1);
        let source = source.peer(to.version);
        let destination = Builder::bare(&to, RAM).peer(from.version).incoming();
        let said = moves(&source, &destination, &BY_QEMU, &["--method", "zstd"])
            .with_context(|| format!("{} to {}", from.version, to.version))?;
        ensure!(said.contains(DECODES), "{said}");
    }
    Ok(())
}

/// Everything else is decoded by the server, and by default zstd is, too.
#[test]
fn other_methods_are_decoded_for_qemu() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let source = Builder::bare(&binary, RAM).content(Fill::Mixed, 1);
    let destination = Builder::bare(&binary, RAM).incoming();
    for (serve, method) in [
        (&BY_QEMU[..], "auto"),
        (&BY_QEMU[..], "lz4"),
        (&BY_QEMU[..], "zlib"),
        (&[][..], "zstd"),
    ] {
        let said = moves(&source, &destination, serve, &["--method", method])?;
        ensure!(!said.contains(DECODES), "{method}: {said}");
    }
    Ok(())
}

/// The decoder in QEMU keeps what came before, so no byte may be lost or come twice.
#[test]
fn the_loss_of_connections_is_nothing_to_qemu() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let host = Host::start(&["--decoder", "qemu", "--insecure"])?;
    let to: SocketAddr = host.address.trim_start_matches("tcp:").parse()?;
    let middlebox = Middlebox::new(to)?;
    let source = Builder::bare(&binary, 2 * RAM).content(Fill::Mixed, 1);
    let source = source.start()?;
    let destination = Builder::bare(&binary, 2 * RAM).incoming().start()?;
    host.knows("vm", &destination)?;
    let to = format!("tcp:{}", middlebox.address());
    let options = ["--insecure", "--method", "zstd", "--max-bandwidth", "12M"];
    let options = [&options[..], &["--channels", "4"]].concat();
    let migration = migrate(&source.qmp_socket(), &to, "vm", &options)?;
    for mebibytes in [1, 3, 6] {
        middlebox.wait_for_bytes(Direction::ToListener, mebibytes << 20, LIMIT)?;
        middlebox.apply(Which::All, Change::Reset);
    }
    let ended = migration.finish(LIMIT)?;
    let told = || format!("serve:\n{}", host.server.stderr());
    let report: Value = serde_json::from_str(&ended.success().with_context(told)?.stdout)?;
    ensure!(report["link"]["reconnects"].as_u64() >= Some(3), "{report}");
    ram::compare(source.ram(), destination.ram()).with_context(told)?;
    ensure!(host.server.stderr().contains(DECODES));
    Ok(())
}

/// Over several rounds, in which the same pages come again.
#[test]
fn a_running_guest() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let Some(image) = Image::build_or_skip(16)? else {
        return Ok(());
    };
    let load = Load {
        fill: 128,
        hot: 24,
        rate: 3000,
    };
    let machine = || image.machine(&binary, 320 * MIB, &load);
    let source = Guest::start(&machine())?;
    let destination = Guest::start(&machine().incoming().paused())?;
    source.wait_ready(LIMIT)?;
    source.wait_ticks(5, LIMIT)?;
    let host = Host::start(&BY_QEMU)?;
    host.knows("vm", &destination.qemu)?;
    let options = ["--method", "zstd", "--max-bandwidth", "30M"];
    let options = [&options[..], &["--downtime-limit", "40"]].concat();
    let ended = host.migrate(&source.qemu, "vm", &options)?.finish(LIMIT)?;
    let report: Value = serde_json::from_str(&ended.success()?.stdout)?;
    let rounds = report["ram"]["dirty-sync-count"].as_u64();
    ensure!(rounds >= Some(3), "{report}");
    ensure!(host.server.stderr().contains(DECODES));
    destination.wait_ticks(5, LIMIT)?;
    destination.wait_rounds(2, LIMIT)?;
    serial::follow(&source.finish()?, &destination.finish()?)?;
    Ok(())
}
