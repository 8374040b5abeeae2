//! Pages that the destination's QEMU decodes itself: zstd frames go to it as the source's relay made them, all other pages raw.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    thread,
};

use anyhow::{Context as _, Result, ensure};
use lab::{
    guest::{Guest, Image, Load},
    middlebox::{Change, Direction, Middlebox, Which},
    qemu::{self, Builder},
    ram::{self, Fill},
    serial,
    vamoose::Vamoose,
};
use multifd::{INITIAL_LEN, Layout};
use serde_json::Value;

use crate::common::{
    Host, LIMIT, MIB, bare_pair, incoming, listen_address, migrate, set_up, vamoose,
};

const RAM: u64 = 32 * MIB;

/// What the server says of a QEMU that decodes.
const DECODES: &str = "QEMU decodes zstd frames itself";

/// What the source says of a link for which encoding takes too long.
const IS_FAST: &str = "the link is fast";

/// Moves a guest that stands still, compares its memory, and says whether the destination's QEMU has decoded it, and whether the link was
/// found fast.
fn moves(from: &Builder, to: &Builder, options: &[&str]) -> Result<[bool; 2]> {
    let host = Host::start(&[])?;
    let (source, destination) = (from.start()?, to.start()?);
    host.knows("vm", &destination)?;
    let ended = host.migrate(&source, "vm", options)?.finish(LIMIT)?;
    let told = || format!("serve:\n{}", host.server.stderr());
    let ended = ended.success().with_context(told)?;
    ram::compare(source.ram(), destination.ram()).with_context(told)?;
    let decodes = host.server.stderr().contains(DECODES);
    Ok([decodes, ended.stderr.contains(IS_FAST)])
}

#[test]
fn between_all_versions() -> Result<()> {
    for (from, to) in qemu::pairs_or_skip()? {
        for method in ["auto", "zstd-frames"] {
            let source = Builder::bare(&from, RAM).content(Fill::Mixed, 1);
            let source = source.peer(to.version);
            let destination = Builder::bare(&to, RAM).peer(from.version).incoming();
            // With a limit, the link does not count as fast.
            let options = ["--method", method, "--max-bandwidth", "4G"];
            let [decoded, _] = moves(&source, &destination, &options)
                .with_context(|| format!("{} to {}, {method}", from.version, to.version))?;
            ensure!(decoded, "{} to {}, {method}", from.version, to.version);
        }
    }
    Ok(())
}

/// Whether a link between two processes counts as fast depends on the machine's load.
#[test]
fn over_a_fast_link_qemu_gets_raw_pages() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let source = Builder::bare(&binary, RAM).content(Fill::Mixed, 1);
    let destination = Builder::bare(&binary, RAM).incoming();
    // With one channel, more links are faster than the encoder.
    let options = ["--method", "auto", "--channels", "1"];
    for _ in 0..3 {
        let [decoded, is_fast] = moves(&source, &destination, &options)?;
        ensure!(decoded != is_fast, "decoded: {decoded}");
    }
    Ok(())
}

/// These have no frames, and frames without checksums are not for QEMU.
#[test]
fn other_methods_are_decoded_for_qemu() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let source = Builder::bare(&binary, RAM).content(Fill::Mixed, 1);
    let destination = Builder::bare(&binary, RAM).incoming();
    for method in ["none", "lz4", "zlib", "zstd", "qpl"] {
        let [decoded, _] = moves(&source, &destination, &["--method", method]).context(method)?;
        ensure!(!decoded, "{method}");
    }
    let unchecked = ["--method", "zstd-frames", "--check", "off"];
    moves(&source, &destination, &unchecked)?;
    Ok(())
}

/// QEMU compares a frame's checksum, so a bit that a relay's memory or processor gets wrong ends the migration.
#[test]
fn a_wrong_bit_leaves_the_guest_at_the_source() -> Result<()> {
    for binary in qemu::available() {
        let (mut source, mut destination) = bare_pair(binary, binary, RAM)?;
        set_up(&mut destination, 2, "zstd")?;
        let connect = flipping(&incoming(&mut destination, true)?)?;
        let options = ["--insecure", "--session", "listen", "--channels", "2"];
        let (far, between) = Vamoose::relay(vamoose(), "tcp:127.0.0.1:0", &connect, &options)?;
        let listen = listen_address(&source, "out", false);
        let options = [
            "--insecure",
            "--session",
            "connect",
            "--method",
            "zstd-frames",
        ];
        let (near, address) = Vamoose::relay(vamoose(), &listen, &between, &options)?;
        set_up(&mut source, 2, "zstd")?;
        source.qmp.migrate(&address)?;
        source.qmp.wait_migration(&["failed"], LIMIT)?;
        near.finish(LIMIT)?;
        far.finish(LIMIT)?;
        // 7.2 tells only that the connections have ended.
        let said = destination.stderr();
        let tells = said.contains("checksum") || binary.version.major < 10;
        ensure!(tells, "{}: {said}", binary.version);
        ensure!(
            source.qmp.query_status()? != "postmigrate",
            "{}",
            binary.version
        );
    }
    Ok(())
}

/// Forwards connections to a QEMU, and flips a bit of the first packet's payload on each channel. Returns its own address.
fn flipping(to: &str) -> Result<String> {
    let to: SocketAddr = to.trim_start_matches("tcp:").parse()?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = format!("tcp:{}", listener.local_addr()?);
    thread::spawn(move || {
        // The main stream and two channels.
        for near in listener.incoming().take(3).map_while(Result::ok) {
            let Ok(far) = TcpStream::connect(to) else {
                return;
            };
            let (Ok(back), Ok(there)) = (near.try_clone(), far.try_clone()) else {
                return;
            };
            let at = INITIAL_LEN + Layout::X86.ram_header_len() + 2000;
            thread::spawn(move || pass(&near, &far, Some(at)));
            thread::spawn(move || pass(&there, &back, None));
        }
    });
    Ok(address)
}

/// Passes bytes on until the end, and flips a bit at an offset, if these are a channel's.
fn pass(mut from: &TcpStream, mut to: &TcpStream, flip_at: Option<usize>) {
    let (mut buffer, mut passed, mut is_channel) = (vec![0; 1 << 16], 0, true);
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        let bytes = &mut buffer[..len];
        if passed == 0 {
            is_channel = !bytes.starts_with(&multifd::MAIN_MAGIC.to_be_bytes());
        }
        let at = flip_at.and_then(|at| at.checked_sub(passed));
        if let Some(byte) = at.and_then(|at| bytes.get_mut(at)).filter(|_| is_channel) {
            *byte ^= 1;
        }
        passed += len;
        if to.write_all(bytes).is_err() {
            break;
        }
    }
    // Whatever has ended the one direction ends both.
    let _ = (to.shutdown(Shutdown::Both), from.shutdown(Shutdown::Both));
}

/// No byte may be lost or come twice.
#[test]
fn the_loss_of_connections_is_nothing_to_qemu() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let host = Host::start(&["--insecure"])?;
    let to: SocketAddr = host.address.trim_start_matches("tcp:").parse()?;
    let middlebox = Middlebox::new(to)?;
    let source = Builder::bare(&binary, 2 * RAM).content(Fill::Mixed, 1);
    let source = source.start()?;
    let destination = Builder::bare(&binary, 2 * RAM).incoming().start()?;
    host.knows("vm", &destination)?;
    let to = format!("tcp:{}", middlebox.address());
    let options = [
        "--insecure",
        "--method",
        "zstd-frames",
        "--max-bandwidth",
        "12M",
    ];
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
    let host = Host::start(&[])?;
    host.knows("vm", &destination.qemu)?;
    let options = ["--method", "zstd-frames", "--max-bandwidth", "30M"];
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
