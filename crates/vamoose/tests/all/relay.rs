//! `vamoose relay` between stock QEMUs: every method in and out, every shape of channels, alone and
//! as a pair, across versions; the destination's whole memory is compared each time.

use crate::common::{
    LIMIT, MIB, bare_pair, expect_equal, incoming, listen_address, set_up, vamoose,
};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use lab::{
    qemu::{self, Binary, Builder},
    ram::Fill,
    vamoose::Vamoose,
};
use serde_json::{Value, json};

const METHODS: [&str; 3] = ["none", "zlib", "zstd"];

/// One migration through one relay.
#[derive(Clone, Copy, Debug)]
struct Alone {
    method_in: &'static str,
    method_out: &'static str,
    channels: (u8, u8),
    tcp: (bool, bool),
}

const ALONE: Alone = Alone {
    method_in: "none",
    method_out: "none",
    channels: (2, 2),
    tcp: (false, false),
};

impl Alone {
    fn run(self, from: &Binary, to: &Binary) -> Result<Value> {
        let (mut source, mut destination) = bare_pair(from, to, 16 * MIB)?;
        set_up(&mut destination, self.channels.1, self.method_out)?;
        let connect = incoming(&mut destination, self.tcp.1)?;
        let listen = listen_address(&source, "out", self.tcp.0);
        let channels = self.channels.1.to_string();
        let mut options = vec!["--method", self.method_out, "--json", "-"];
        if self.channels.0 != self.channels.1 {
            options.extend(["--channels", &channels]);
        }
        let (relay, address) = Vamoose::relay(vamoose(), &listen, &connect, &options)?;
        set_up(&mut source, self.channels.0, self.method_in)?;
        source.qmp.migrate(&address)?;
        expect_equal(&mut source, &mut destination, &[&relay])?;
        let ended = relay.finish(LIMIT)?.success()?;
        Ok(serde_json::from_str(&ended.stdout)?)
    }
}

/// Runs `cases` and reports which one failed.
fn run_all(cases: impl IntoIterator<Item = Alone>, from: &Binary, to: &Binary) -> Result<()> {
    for case in cases {
        let context = || format!("{case:?}, {} to {}", from.version, to.version);
        case.run(from, to).with_context(context)?;
    }
    Ok(())
}

#[test]
fn every_method_in_and_out_over_every_shape_of_channels() -> Result<()> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    for channels in [(2, 2), (2, 4), (4, 1)] {
        for method_in in METHODS {
            let cases = METHODS.map(|method_out| Alone {
                method_in,
                method_out,
                channels,
                ..ALONE
            });
            run_all(cases, &qemu, &qemu)?;
        }
    }
    Ok(())
}

#[test]
fn unix_and_tcp_on_either_side() -> Result<()> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let sides = [(false, true), (true, false), (true, true)];
    let cases = sides.map(|tcp| Alone {
        tcp,
        method_out: "zstd",
        ..ALONE
    });
    run_all(cases, &qemu, &qemu)
}

#[test]
fn old_and_new_qemus() -> Result<()> {
    for (from, to) in qemu::pairs_or_skip()? {
        let cases = METHODS.map(|method| Alone {
            // Also what only one of the two ends does.
            method_in: if method == "none" { "zlib" } else { "none" },
            method_out: method,
            channels: (2, 3),
            ..ALONE
        });
        run_all(cases, &from, &to)?;
    }
    Ok(())
}

/// A compresses, B restores: the QEMUs know nothing of it.
#[test]
fn a_pair_of_relays() -> Result<()> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    for method in METHODS {
        for (channels, tcp) in [(2, false), (4, true)] {
            pair(&qemu, &qemu, method, channels, tcp)
                .with_context(|| format!("{method}, {channels} channels, tcp {tcp}"))?;
        }
    }
    Ok(())
}

/// libvirt gives both QEMUs the same settings: the destination expects what the source sent, whatever was between.
#[test]
fn a_pair_restores_the_method_of_the_source() -> Result<()> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    for method in METHODS {
        restored(&qemu, method).context(method)?;
    }
    Ok(())
}

fn restored(qemu: &Binary, method: &str) -> Result<()> {
    let (mut source, mut destination) = bare_pair(qemu, qemu, 16 * MIB)?;
    set_up(&mut destination, 2, method)?;
    let connect = incoming(&mut destination, false)?;
    let options = ["--insecure", "--session", "listen", "--channels", "2"];
    let (far, between) = Vamoose::relay(vamoose(), "tcp:127.0.0.1:0", &connect, &options)?;
    let listen = listen_address(&source, "out", false);
    let options = ["--insecure", "--session", "connect", "--channels", "3"];
    let (near, address) = Vamoose::relay(vamoose(), &listen, &between, &options)?;
    set_up(&mut source, 2, method)?;
    source.qmp.migrate(&address)?;
    expect_equal(&mut source, &mut destination, &[&near, &far])?;
    near.finish(LIMIT)?.success()?;
    far.finish(LIMIT)?.success()?;
    Ok(())
}

/// A relay that does not know the number of channels takes a migration for one without channels if none comes beside the main
/// stream. The near relay opens the main stream last; threads of the far relay may still announce it before a channel.
#[test]
fn another_relay_finds_all_channels_without_knowing_their_number() -> Result<()> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let (mut source, mut destination) = bare_pair(&qemu, &qemu, 16 * MIB)?;
    set_up(&mut destination, 2, "none")?;
    let connect = incoming(&mut destination, false)?;
    let mut command = Command::new(vamoose());
    command.args(["relay", "--insecure", "--session", "listen"]);
    command.args(["--listen", "tcp:127.0.0.1:0", "--connect", &connect]);
    let far = Vamoose::start(command.env("VAMOOSE_LOG", "debug"))?;
    let between = far.wait_for("listening on ", LIMIT)?;
    let listen = listen_address(&source, "out", false);
    let options = ["--insecure", "--session", "connect"];
    let (near, address) = Vamoose::relay(vamoose(), &listen, &between, &options)?;
    set_up(&mut source, 2, "none")?;
    source.qmp.migrate(&address)?;
    expect_equal(&mut source, &mut destination, &[&near, &far])?;
    near.finish(LIMIT)?.success()?;
    let said = far.finish(LIMIT)?.success()?.stderr;
    let came = |what| said.lines().filter(|line| line.ends_with(what)).count();
    ensure!(came("the main stream has come") == 1, "{said}");
    ensure!(came("channel 0 has come") == 1, "{said}");
    ensure!(came("channel 1 has come") == 1, "{said}");
    Ok(())
}

#[test]
fn a_pair_of_relays_between_old_and_new() -> Result<()> {
    for (from, to) in qemu::pairs_or_skip()? {
        pair(&from, &to, "zstd", 2, true)
            .with_context(|| format!("{} to {}", from.version, to.version))?;
    }
    Ok(())
}

fn pair(from: &Binary, to: &Binary, method: &str, between: u8, tcp: bool) -> Result<()> {
    let (mut source, mut destination) = bare_pair(from, to, 16 * MIB)?;
    set_up(&mut destination, 2, "none")?;
    let connect = incoming(&mut destination, tcp)?;
    let listen = listen_address(&destination, "far", tcp);
    let (far, between_address) =
        Vamoose::relay(vamoose(), &listen, &connect, &["--channels", "2"])?;
    let listen = listen_address(&source, "out", false);
    let options = ["--method", method, "--channels", &between.to_string()];
    let (near, address) = Vamoose::relay(vamoose(), &listen, &between_address, &options)?;
    set_up(&mut source, 2, "none")?;
    source.qmp.migrate(&address)?;
    expect_equal(&mut source, &mut destination, &[&near, &far])?;
    near.finish(LIMIT)?.success()?;
    far.finish(LIMIT)?.success()?;
    Ok(())
}

#[test]
fn every_way_to_detect_zero_pages() -> Result<()> {
    for (from, to) in qemu::pairs_or_skip()? {
        if from.version.major.min(to.version.major) < 9 {
            continue;
        }
        for detection in ["none", "legacy", "multifd"] {
            zero_pages(&from, &to, detection)
                .with_context(|| format!("{detection}, {} to {}", from.version, to.version))?;
        }
    }
    Ok(())
}

fn zero_pages(from: &Binary, to: &Binary, detection: &str) -> Result<()> {
    let (mut source, mut destination) = bare_pair(from, to, 16 * MIB)?;
    set_up(&mut destination, 2, "zstd")?;
    let connect = incoming(&mut destination, false)?;
    let listen = listen_address(&source, "out", false);
    let options = ["--method", "zstd", "--json", "-"];
    let (relay, address) = Vamoose::relay(vamoose(), &listen, &connect, &options)?;
    set_up(&mut source, 2, "none")?;
    source
        .qmp
        .set_parameters(json!({ "zero-page-detection": detection }))?;
    source.qmp.migrate(&address)?;
    expect_equal(&mut source, &mut destination, &[&relay])?;
    let ended = relay.finish(LIMIT)?.success()?;
    let report: Value = serde_json::from_str(&ended.stdout)?;
    let zero_pages = report["zero-pages"].as_u64().unwrap_or(0);
    ensure!((zero_pages > 0) == (detection == "multifd"), "{report}");
    Ok(())
}

/// QEMUs before 9.0 lose zero pages that are sent as mere offsets: the relay can write them out.
#[test]
fn zero_pages_are_written_out_for_an_old_destination() -> Result<()> {
    for (from, to) in qemu::pairs_or_skip()? {
        if from.version.major >= 9 && to.version.major < 9 {
            written_out(&from, &to).with_context(|| format!("from {}", from.version))?;
        }
    }
    Ok(())
}

fn written_out(from: &Binary, to: &Binary) -> Result<()> {
    let (mut source, _) = bare_pair(from, to, 16 * MIB)?;
    // Full of other bytes, so that a zero page that is lost shows.
    let mut destination = Builder::bare(to, 16 * MIB)
        .content(Fill::Random, 2)
        .incoming()
        .start()?;
    set_up(&mut destination, 2, "none")?;
    let connect = incoming(&mut destination, false)?;
    let listen = listen_address(&source, "out", false);
    let options = ["--zero-pages", "expand"];
    let (relay, address) = Vamoose::relay(vamoose(), &listen, &connect, &options)?;
    set_up(&mut source, 2, "none")?;
    // Which the machine type's compatibility would have switched off.
    source
        .qmp
        .set_parameters(json!({ "zero-page-detection": "multifd" }))?;
    source.qmp.migrate(&address)?;
    expect_equal(&mut source, &mut destination, &[&relay])?;
    relay.finish(LIMIT)?.success()?;
    Ok(())
}

/// A migration without multifd is passed through, and logged as such.
#[test]
fn a_single_main_connection_is_passed_through() -> Result<()> {
    for (from, to) in qemu::pairs_or_skip()? {
        passed_through(&from, &to)
            .with_context(|| format!("{} to {}", from.version, to.version))?;
    }
    Ok(())
}

fn passed_through(from: &Binary, to: &Binary) -> Result<()> {
    let (mut source, mut destination) = bare_pair(from, to, 16 * MIB)?;
    let connect = incoming(&mut destination, true)?;
    let (relay, address) = Vamoose::relay(vamoose(), "tcp:127.0.0.1:0", &connect, &[])?;
    source
        .qmp
        .set_capabilities(&[("events", true), ("return-path", true)])?;
    source.qmp.migrate(&address)?;
    relay.wait_for("the source uses a single main connection", LIMIT)?;
    expect_equal(&mut source, &mut destination, &[&relay])?;
    relay.finish(LIMIT)?.success()?;
    Ok(())
}

/// With a connection of its own for pages that are asked for, which may say nothing for as long as the migration takes.
#[test]
fn post_copy_through_a_pair() -> Result<()> {
    for (from, to) in qemu::pairs_or_skip()? {
        // QEMU 7.2 was the first to have one, and libvirt left it alone there.
        if from.version == to.version && from.version.major >= 8 {
            post_copy(&from).with_context(|| from.version.to_string())?;
        }
    }
    Ok(())
}

fn post_copy(qemu: &Binary) -> Result<()> {
    let (mut source, mut destination) = bare_pair(qemu, qemu, 16 * MIB)?;
    let capabilities = [
        ("events", true),
        ("return-path", true),
        ("postcopy-ram", true),
        ("postcopy-preempt", true),
    ];
    source.qmp.set_capabilities(&capabilities)?;
    destination.qmp.set_capabilities(&capabilities)?;
    let connect = incoming(&mut destination, false)?;
    let options = ["--insecure", "--session", "listen"];
    let (far, between) = Vamoose::relay(vamoose(), "tcp:127.0.0.1:0", &connect, &options)?;
    let listen = listen_address(&source, "out", false);
    let options = ["--insecure", "--session", "connect"];
    let (near, address) = Vamoose::relay(vamoose(), &listen, &between, &options)?;
    source
        .qmp
        .set_parameters(json!({ "max-bandwidth": 4 * MIB }))?;
    source.qmp.migrate(&address)?;
    source.qmp.wait_transferred(MIB, LIMIT)?;
    source.qmp.execute("migrate-start-postcopy", json!({}))?;
    expect_equal(&mut source, &mut destination, &[&near, &far])?;
    near.finish(LIMIT)?.success()?;
    far.finish(LIMIT)?.success()?;
    Ok(())
}

/// Without a return path there is no confirmation: the relay delivers everything all the same.
#[test]
fn without_a_return_path() -> Result<()> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let (mut source, mut destination) = bare_pair(&qemu, &qemu, 16 * MIB)?;
    set_up(&mut destination, 2, "zstd")?;
    let connect = incoming(&mut destination, false)?;
    let listen = listen_address(&source, "out", false);
    let (relay, address) = Vamoose::relay(vamoose(), &listen, &connect, &["--method", "zstd"])?;
    set_up(&mut source, 2, "none")?;
    source.qmp.set_capabilities(&[("return-path", false)])?;
    source.qmp.migrate(&address)?;
    expect_equal(&mut source, &mut destination, &[&relay])?;
    let ended = relay.finish(LIMIT)?.success()?;
    ensure!(ended.stderr.contains("unconfirmed"), "{}", ended.stderr);
    Ok(())
}

#[test]
fn the_report_counts_bytes_on_the_wire() -> Result<()> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let report = Alone {
        method_out: "zlib",
        ..ALONE
    }
    .run(&qemu, &qemu)?;
    let number = |key: &str| report.pointer(key).and_then(Value::as_u64).unwrap_or(0);
    ensure!(
        report["status"] == "completed" && report["method"] == "zlib",
        "{report}"
    );
    ensure!(
        number("/ram/normal") + number("/zero-pages") >= 4096,
        "{report}"
    );
    ensure!(
        number("/page-bytes") == number("/ram/normal") * 4096,
        "{report}"
    );
    ensure!(number("/wire-bytes") < number("/page-bytes"), "{report}");
    ensure!(
        report["cpu-seconds"]["encode"].as_f64() > Some(0.0),
        "{report}"
    );
    Ok(())
}

/// The level that is set is the one that acts.
#[test]
fn a_higher_level_sends_less() -> Result<()> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    for (method, low, high) in [("zlib", "0", "6"), ("zstd", "-20", "9")] {
        let mut bytes = Vec::new();
        for level in [low, high] {
            let (mut source, mut destination) = bare_pair(&qemu, &qemu, 16 * MIB)?;
            set_up(&mut destination, 2, method)?;
            let connect = incoming(&mut destination, false)?;
            let listen = listen_address(&source, "out", false);
            let options = ["--method", method, "--level", level, "--json", "-"];
            let (relay, address) = Vamoose::relay(vamoose(), &listen, &connect, &options)?;
            set_up(&mut source, 2, "none")?;
            source.qmp.migrate(&address)?;
            expect_equal(&mut source, &mut destination, &[&relay])?;
            let ended = relay.finish(LIMIT)?.success()?;
            let report: Value = serde_json::from_str(&ended.stdout)?;
            ensure!(report["level"] == level.parse::<i32>()?, "{report}");
            bytes.push(report["wire-bytes"].as_u64().unwrap_or(0));
        }
        ensure!(bytes[1] < bytes[0], "{method}: {bytes:?}");
    }
    Ok(())
}
