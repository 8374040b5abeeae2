//! Engines that are not there, and engines that misbehave: the migration completes with the right
//! memory, or ends with the guest at the source.
//!
//! The program under test is built with the feature `fault-injection` (see Cargo.toml), so that
//! `VAMOOSE_FAULTS` gives it an engine that does what it lists; `vamoose-codec/src/testing/faulty.rs` has the words.
//! QAT's library is a stand-in of ours (`lab::stand_in`).

use std::{ffi::OsStr, process::Command};

use crate::common::{LIMIT, MIB, bare_pair, expect_equal, incoming, set_up, vamoose};
use anyhow::{Context as _, Result, ensure};
use lab::{
    qemu::{self, Qemu},
    stand_in,
    vamoose::{Ended, Vamoose},
};
use serde_json::Value;
use tempfile::TempDir;

/// A relay on `address`, with an environment.
fn relay(
    connect: &str,
    options: &[&str],
    environment: &[(&str, &OsStr)],
) -> Result<(Vamoose, String)> {
    let mut command = Command::new(vamoose());
    command.args(["relay", "--listen", "tcp:127.0.0.1:0", "--connect", connect]);
    command.args(["--json", "-"]).args(options);
    command.envs(environment.iter().copied());
    let relay = Vamoose::start(&mut command)?;
    let address = relay.wait_for("listening on ", LIMIT)?;
    Ok((relay, address))
}

struct Ends {
    near: Ended,
    far: Ended,
}

impl Ends {
    fn reports(self) -> Result<[Value; 2]> {
        let near = serde_json::from_str(&self.near.success()?.stdout)?;
        let far = serde_json::from_str(&self.far.success()?.stdout)?;
        Ok([near, far])
    }
}

/// One migration through two relays, each in its environment; `complete` is whether it has to.
fn migrate(
    source: &mut Qemu,
    destination: &mut Qemu,
    options: &[&str],
    verify: &str,
    [near, far]: [&[(&str, &OsStr)]; 2],
    complete: bool,
) -> Result<Ends> {
    set_up(destination, 2, "none")?;
    let connect = incoming(destination, false)?;
    let (far, between) = relay(&connect, &["--verify", verify], far)?;
    let options = [options, &["--verify", verify]].concat();
    let (near, address) = relay(&between, &options, near)?;
    set_up(source, 2, "none")?;
    source.qmp.migrate(&address)?;
    if complete {
        expect_equal(source, destination, &[&near, &far])?;
    } else {
        source.qmp.wait_migration(&["failed"], LIMIT)?;
    }
    Ok(Ends {
        near: near.finish(LIMIT)?,
        far: far.finish(LIMIT)?,
    })
}

fn number(report: &Value, key: &str) -> u64 {
    report[key].as_u64().unwrap_or(0)
}

#[test]
fn whatever_an_engine_does_the_memory_is_right() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let everything = "refuse@20%,fail@10%,timeout=1ms@2%,nothing@3%,beyond@3%,short@3%,long@3%";
    for method in ["lz4", "qpl", "qatzip"] {
        for (faults, verify) in [
            ("refuse", "sample"),
            ("refuse@7", "sample"),
            ("fail", "sample"),
            ("timeout=2ms", "sample"),
            ("delay=300us,refuse@50%", "off"),
            ("wrong", "sample"),
            ("wrong@5%,corrupt@5%", "all"),
            (everything, "all"),
        ] {
            let context = || format!("{method}, {faults}, --verify {verify}");
            let (mut source, mut destination) = bare_pair(&binary, &binary, 16 * MIB)?;
            let options = ["--method", method];
            let faults = [("VAMOOSE_FAULTS", OsStr::new(faults))];
            let ends = migrate(
                &mut source,
                &mut destination,
                &options,
                verify,
                [&faults; 2],
                true,
            );
            let [near, _] = ends.and_then(Ends::reports).with_context(context)?;
            ensure!(near["engine"] == "faulty", "{}: {near}", context());
            ensure!(number(&near, "fallbacks") > 0, "{}: {near}", context());
        }
    }
    Ok(())
}

/// A wrong result after unchecked packets: the relay ends the migration and reports why; the guest is
/// where it was, and moves in software.
#[test]
fn wrong_bytes_after_unchecked_packets_leave_the_guest_at_the_source() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    // The checks are of the packets 1, 65, 129, ... of each channel, and the 65th is wrong. The engine of
    // the destination's relay is right: otherwise that relay may be the first to end the migration.
    let (mut source, mut destination) = bare_pair(&binary, &binary, 128 * MIB)?;
    let options = ["--method", "lz4"];
    let faults = [("VAMOOSE_FAULTS", OsStr::new("honest=64,wrong"))];
    let ends = migrate(
        &mut source,
        &mut destination,
        &options,
        "sample",
        [&faults, &[]],
        false,
    )?;
    let ended = ends.near.failure("has returned wrong bytes")?;
    ensure!(ended.stderr.contains("--verify all"), "{}", ended.stderr);
    ends.far.failure("")?;
    let (_, mut destination) = bare_pair(&binary, &binary, 128 * MIB)?;
    let ends = migrate(
        &mut source,
        &mut destination,
        &options,
        "sample",
        [&[]; 2],
        true,
    )?;
    let [near, _] = ends.reports()?;
    ensure!(near["engine"] == "lz4", "{near}");
    Ok(())
}

#[test]
fn qat_is_used_where_its_library_finds_hardware() -> Result<()> {
    let folder = TempDir::new()?;
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    if stand_in::libqatzip_or_skip(folder.path(), None)?.is_none() {
        return Ok(());
    }
    let path = folder.path().as_os_str();
    // Every third call fails, on both sides.
    for (accel, faults) in [("auto", None), ("qat", None), ("auto", Some("3"))] {
        let (mut source, mut destination) = bare_pair(&binary, &binary, 16 * MIB)?;
        let mut environment = vec![("LD_LIBRARY_PATH", path)];
        if let Some(every) = faults {
            environment.push(("STAND_IN_qzCompress_code", OsStr::new("-2")));
            environment.push(("STAND_IN_qzCompress_every", OsStr::new(every)));
        }
        let options = ["--method", "qatzip", "--accel", accel];
        let ends = migrate(
            &mut source,
            &mut destination,
            &options,
            "sample",
            [&environment; 2],
            true,
        );
        let [near, far] = ends.and_then(Ends::reports)?;
        ensure!(near["engine"] == "qat", "{near}");
        ensure!(
            (number(&near, "fallbacks") > 0) == faults.is_some(),
            "{near}"
        );
        ensure!(number(&near, "verified") > 0, "{near}");
        // The receiver has it as well.
        ensure!(number(&far, "verified") > 0, "{far}");
    }
    Ok(())
}

/// IAA by devices in software, in real time, honest and with everything that can go wrong with hardware.
#[test]
fn iaa_moves_the_memory_whatever_its_devices_do() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    for (seed, level, verify) in [
        (None, "0", "sample"),
        (None, "1", "sample"),
        (Some("1"), "0", "all"),
        (Some("2"), "1", "sample"),
    ] {
        let context = || format!("faults {seed:?}, level {level}");
        let (mut source, mut destination) = bare_pair(&binary, &binary, 16 * MIB)?;
        let options = [
            "--method",
            "qpl",
            "--level",
            level,
            "--accel",
            "iaa",
            "--iaa-path",
            "model:2",
        ];
        let faults = seed.map(|seed| ("VAMOOSE_MODEL_FAULTS", OsStr::new(seed)));
        let environment: Vec<_> = faults.into_iter().collect();
        let ends = migrate(
            &mut source,
            &mut destination,
            &options,
            verify,
            [&environment; 2],
            true,
        );
        let [near, _] = ends.and_then(Ends::reports).with_context(context)?;
        let accelerator = &near["accelerator"];
        ensure!(near["engine"] == "iaa", "{}: {near}", context());
        ensure!(accelerator["model"] == true, "{}: {near}", context());
        ensure!(
            number(accelerator, "by-device") > 0,
            "{}: {near}",
            context()
        );
        if seed.is_none() {
            ensure!(number(&near, "fallbacks") == 0, "{}: {near}", context());
        }
    }
    Ok(())
}

#[test]
fn an_absent_engine_is_an_early_error_when_it_is_named_and_nothing_otherwise() -> Result<()> {
    let refused = |options: &[&str], environment: &[(&str, &OsStr)], why: &str| {
        let mut command = Command::new(vamoose());
        command.args(["relay", "--listen", "tcp:127.0.0.1:0"]);
        command.args(["--connect", "tcp:127.0.0.1:1"]).args(options);
        command.envs(environment.iter().copied());
        let output = command.output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(!output.status.success(), "{options:?} was not refused");
        ensure!(said.contains(why), "{options:?}: {said}");
        Ok(())
    };
    refused(
        &["--method", "qatzip", "--accel", "qat"],
        &[],
        "engine qat is absent: libqatzip.so.3 cannot be loaded",
    )?;
    refused(
        &["--method", "qpl", "--accel", "iaa", "--iaa-path", "wq77.0"],
        &[],
        "engine iaa is absent: this host has no work queue wq77.0",
    )?;
    refused(
        &["--method", "zstd", "--iaa-path", "model"],
        &[],
        "engine iaa does not do method zstd, only qpl",
    )?;
    refused(
        &["--method", "zstd", "--accel", "qat"],
        &[],
        "engine qat does not do method zstd, only qatzip",
    )?;
    refused(
        &["--zero-page-detection", "dsa"],
        &[],
        "invalid value 'dsa'",
    )?;
    refused(
        &["--method", "lz4", "--level", "0"],
        &[],
        "lz4 has no level 0",
    )?;
    let folder = TempDir::new()?;
    if stand_in::libqatzip_or_skip(folder.path(), None)?.is_some() {
        let path = [("LD_LIBRARY_PATH", folder.path().as_os_str())];
        let without = [path[0], ("STAND_IN_hw_session_stat", OsStr::new("11"))];
        let options = ["--method", "qatzip", "--accel", "qat"];
        refused(
            &options,
            &without,
            "finds no usable QAT hardware: qzInit returns -101 (no hardware",
        )?;
    }
    Ok(())
}

/// Nothing of Vamoose's own goes to a stock QEMU unnoticed.
#[test]
fn a_stock_destination_refuses_lz4_and_the_guest_stays() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    for method in ["none", "zlib", "zstd"] {
        let (mut source, mut destination) = bare_pair(&binary, &binary, 16 * MIB)?;
        set_up(&mut destination, 2, method)?;
        let connect = incoming(&mut destination, false)?;
        let (near, address) = relay(&connect, &["--method", "lz4"], &[])?;
        set_up(&mut source, 2, "none")?;
        source.qmp.migrate(&address)?;
        source.qmp.wait_migration(&["failed"], LIMIT)?;
        near.finish(LIMIT)?.failure("")?;
    }
    Ok(())
}
