//! Running guests that update their memory in place, through links that carry less than they write: pages go as differences,
//! and arrive as they are, whatever happens to the link.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use lab::{
    guest::{Guest, Image, Load, Pattern},
    middlebox::{Change, Direction, Mark, Middlebox, Which},
    qemu::{self, Binary, Builder},
    serial,
    vamoose::Vamoose,
};
use serde_json::{Value, json};

use crate::common::{Host, LIMIT, MIB, incoming, listen_address, set_up, vamoose};

/// 12 MB/s of pages, of which half can be compressed.
const LOAD: Load = Load {
    fill: 48,
    hot: 16,
    rate: 3000,
};
/// Of the 512 words of a page: so that differences are next to nothing, and so that even they are more than the link carries.
const FEW: u32 = 12;
const MANY: u32 = 200;
/// Less than the guest writes.
const BANDWIDTH: &str = "4M";

/// Rounds before the source may stop its guest.
const ROUNDS: u64 = 6;

fn guests(from: &Binary, to: &Binary, change: u32) -> Result<Option<(Guest, Guest)>> {
    let Some(image) = Image::build_or_skip(16)? else {
        return Ok(None);
    };
    let source = Guest::start(&machine(&image, from, change))?;
    let destination = Guest::start(&machine(&image, to, change).incoming().paused())?;
    source.wait_ready(LIMIT)?;
    Ok(Some((source, destination)))
}

fn machine(image: &Image, binary: &Binary, change: u32) -> Builder {
    image.machine_that_writes(binary, 256 * MIB, &LOAD, Pattern::First(change))
}

/// Ticks on without a gap in the numbers, with its memory right.
fn expect_alive(source: Guest, destination: Guest) -> Result<()> {
    destination.wait_ticks(5, LIMIT)?;
    destination.wait_rounds(2, LIMIT)?;
    serial::follow(&source.finish()?, &destination.finish()?)?;
    Ok(())
}

/// Two relays with a session between them, and a middlebox in it.
struct Pair {
    near: Vamoose,
    far: Vamoose,
    middlebox: Middlebox,
}

fn start_pair(source: &mut Guest, destination: &mut Guest, options: &[&str]) -> Result<Pair> {
    set_up(&mut destination.qemu, 2, "none")?;
    let connect = incoming(&mut destination.qemu, false)?;
    let far = ["--session", "listen", "--insecure", "--channels", "2"];
    let (far, between) = Vamoose::relay(vamoose(), "tcp:127.0.0.1:0", &connect, &far)?;
    let between: SocketAddr = between.trim_start_matches("tcp:").parse()?;
    let middlebox = Middlebox::new(between)?;
    let listen = listen_address(&source.qemu, "out", false);
    let near = ["--session", "connect", "--insecure", "--json", "-"];
    let near = [&near[..], &["--max-bandwidth", BANDWIDTH], options].concat();
    let to = format!("tcp:{}", middlebox.address());
    let (near, address) = Vamoose::relay(vamoose(), &listen, &to, &near)?;
    set_up(&mut source.qemu, 2, "none")?;
    // Never: until it is let go, it goes on with its rounds. With 0 a source of 7.2 has no second one.
    source
        .qemu
        .qmp
        .set_parameters(json!({ "downtime-limit": 1 }))?;
    source.qemu.qmp.migrate(&address)?;
    Ok(Pair {
        near,
        far,
        middlebox,
    })
}

impl Pair {
    /// Lets the guest go after some rounds, waits for the end, compares both memories, and returns the near relay's report.
    fn expect_equal(self, source: &mut Guest, destination: &mut Guest) -> Result<Value> {
        let Self { near, far, .. } = self;
        let_go(source)?;
        crate::common::expect_equal(&mut source.qemu, &mut destination.qemu, &[&near, &far])?;
        let report = near.finish(LIMIT)?.success()?.stdout;
        far.finish(LIMIT)?.success()?;
        Ok(serde_json::from_str(&report)?)
    }
}

fn let_go(source: &mut Guest) -> Result<()> {
    source.qemu.qmp.wait_rounds(ROUNDS, LIMIT)?;
    // Longer than all that changes takes.
    let limit = json!({ "downtime-limit": 10_000 });
    source.qemu.qmp.set_parameters(limit)
}

fn expect_differences(report: &Value) -> Result<()> {
    let delta = |key| report["delta"][key].as_u64().unwrap_or(0);
    let (pages, bytes) = (delta("page-bytes"), delta("wire-bytes"));
    ensure!(delta("pages") > 100 && bytes < pages / 10 * 6, "{report}");
    Ok(())
}

#[test]
fn a_guest_that_writes_more_than_the_link_carries() -> Result<()> {
    let Some(new) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    for options in [
        &["--method", "lz4", "--delta", "on"][..],
        &["--method", "auto"],
        // Another number of channels.
        &[
            "--method",
            "zstd-frames",
            "--delta",
            "on",
            "--channels",
            "3",
        ],
    ] {
        let Some((mut source, mut destination)) = guests(&new, &new, FEW)? else {
            return Ok(());
        };
        let pair = start_pair(&mut source, &mut destination, options)?;
        let report = pair.expect_equal(&mut source, &mut destination);
        expect_differences(&report.with_context(|| format!("{options:?}"))?)?;
        destination.qemu.qmp.cont()?;
        expect_alive(source, destination)?;
    }
    Ok(())
}

/// With SYNCs many times in a round, and half as many slots as pages that change.
#[test]
fn an_old_source() -> Result<()> {
    let (Some(old), Some(new)) = (qemu::find_or_skip(7, 2)?, qemu::newest_or_skip()?) else {
        return Ok(());
    };
    let Some((mut source, mut destination)) = guests(&old, &new, MANY)? else {
        return Ok(());
    };
    let options = ["--method", "lz4", "--delta", "on", "--page-cache", "8M"];
    let pair = start_pair(&mut source, &mut destination, &options)?;
    let Pair { near, far, .. } = pair;
    let_go(&mut source)?;
    source.qemu.qmp.wait_migration(&["completed"], LIMIT)?;
    let report = near.finish(LIMIT)?.success()?.stdout;
    far.finish(LIMIT)?.success()?;
    // A source of 7.2 under TCG loses writes of a busy guest by itself: neither can memory be compared nor is the guest
    // sure to live. That pages were restored as they were sent, the checksum of each packet has shown.
    expect_differences(&serde_json::from_str(&report)?)
}

/// Resets in the middle of rounds with differences, and bits that are flipped on the way.
#[test]
fn connections_that_break_and_lie() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let Some((mut source, mut destination)) = guests(&binary, &binary, MANY)? else {
        return Ok(());
    };
    let options = ["--method", "auto"];
    let pair = start_pair(&mut source, &mut destination, &options)?;
    let middlebox = &pair.middlebox;
    for (connection, number) in (0..64).flat_map(|it| (1..8).map(move |number| (it, number))) {
        let mark = Mark {
            connection,
            direction: Direction::ToListener,
            bytes: number * (6 << 20) + connection as u64 * 4099,
        };
        middlebox.flip_at(mark, 3);
    }
    middlebox.wait_for_bytes(Direction::ToListener, 1 << 20, LIMIT)?;
    for rounds in 1..ROUNDS {
        let begun = source.qemu.qmp.wait_rounds(rounds, LIMIT);
        begun.with_context(|| format!("{}\n--\n{}", pair.near.stderr(), pair.far.stderr()))?;
        middlebox.apply(Which::All, Change::Reset);
    }
    let report = pair.expect_equal(&mut source, &mut destination)?;
    expect_differences(&report)?;
    ensure!(report["link"]["reconnects"].as_u64() >= Some(3), "{report}");
    destination.qemu.qmp.cont()?;
    expect_alive(source, destination)
}

/// One of the relays is killed: the guest stays, and moves later.
#[test]
fn a_relay_that_dies() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let Some((mut source, mut first)) = guests(&binary, &binary, MANY)? else {
        return Ok(());
    };
    let options = ["--method", "auto", "--reconnect-timeout", "1"];
    let mut pair = start_pair(&mut source, &mut first, &options)?;
    let bytes = 44 << 20;
    pair.middlebox
        .wait_for_bytes(Direction::ToListener, bytes, LIMIT)?;
    pair.far.kill()?;
    let failed = pair.near.finish(LIMIT)?;
    ensure!(!failed.status.success(), "{}", failed.stderr);
    source.wait_ticks(5, LIMIT)?;
    drop(first);

    let host = Host::start(&["--insecure"])?;
    let image = Image::build(16)?;
    let waiting = machine(&image, &binary, MANY).incoming().paused();
    let destination = Guest::start(&waiting)?;
    host.knows("vm", &destination.qemu)?;
    let options = [
        "--insecure",
        "--method",
        "auto",
        "--downtime-limit",
        "10000",
    ];
    host.migrate(&source.qemu, "vm", &options)?
        .finish(LIMIT)?
        .success()?;
    expect_alive(source, destination)
}

#[test]
fn options_that_have_no_effect_are_refused() -> Result<()> {
    let relay = |options: &[&str]| {
        let command = [
            &[
                "relay",
                "--connect",
                "tcp:127.0.0.1:1",
                "--listen",
                "tcp:127.0.0.1:0",
            ][..],
            options,
        ];
        let mut process = std::process::Command::new(vamoose());
        Vamoose::start(process.args(command.concat()))?.finish(LIMIT)
    };
    for method in ["none", "zlib", "zstd", "qpl", "qatzip"] {
        let ended = relay(&[
            "--session",
            "connect",
            "--insecure",
            "--method",
            method,
            "--delta",
            "on",
        ])?;
        ended.failure("cannot hold differences")?;
    }
    relay(&["--method", "lz4", "--delta", "on"])?.failure("needs --session connect")?;
    Ok(())
}
