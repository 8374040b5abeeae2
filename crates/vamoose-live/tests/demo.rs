//! The example `vamoose-demo` as a user runs it: a guest moves between two processes intact, or stays where it is.

#![cfg(not(feature = "loom"))] // whose atomics work in a model only
#![allow(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::{env, path::PathBuf, process::Command, time::Duration};

use anyhow::{Context as _, Result, ensure};
use lab::vamoose::{Ended, Vamoose};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open},
};
use serde_json::Value;
use tempfile::TempDir;

/// Longer than anything may take on a machine that is very busy.
const LIMIT: Duration = Duration::from_secs(120);

/// A guest that cannot leave: it writes all of its memory faster than the link moves it.
const ENDLESS: [&str; 9] = [
    "--method=none",
    "--ram=16M",
    "--fill=zero",
    "--guest=threads",
    "--rate=max",
    "--zero-page-detection=none",
    "--max-bandwidth=1M",
    "--downtime-limit=1",
    "--json=-",
];

/// The example, which `cargo test` builds.
fn program() -> PathBuf {
    let tests = env::current_exe().unwrap();
    let program = tests
        .ancestors()
        .nth(2)
        .unwrap()
        .join("examples/vamoose-demo");
    assert!(
        program.exists(),
        "cargo build -p vamoose-live --example vamoose-demo"
    );
    program
}

#[test]
fn every_fill_arrives_intact() -> Result<()> {
    for fill in ["mixed", "zero", "untouched"] {
        // 32 MiB are 8192 pages. An idle guest leaves it at what was filled.
        let report = demo(&["--ram=32M", "--guest=threads", "--rate=0", "--fill", fill])?;
        let normal = number(&report["ram"], "normal");
        let zero = number(&report, "zero-pages");
        match fill {
            "untouched" => assert_eq!((normal, zero), (0, 0)),
            "zero" => assert_eq!((normal, zero), (0, 8192)),
            _ => assert!(normal >= 5000, "{fill}: {report:#}"),
        }
        assert_eq!(number(&report["guest"], "writes"), 0, "{fill}");
    }
    Ok(())
}

#[test]
fn devices_in_software_compress_on_one_side_and_decompress_on_the_other() -> Result<()> {
    for faults in [None, Some("3")] {
        let mut command = Command::new(program());
        // In software the devices are slow, however busy the machine is.
        command.args(["--json=-", "--ram=16M", "--guest=threads"]);
        command.arg("--rate=200");
        command.args(["--method=qpl", "--level=0", "--accel=iaa"]);
        command.arg("--iaa-path=model");
        command.envs(faults.map(|seed| ("VAMOOSE_MODEL_FAULTS", seed)));
        let ended = Vamoose::start(&mut command)?.finish(LIMIT)?.success()?;
        let report = report(&ended)?;
        holds(&report)?;
        assert_eq!(report["engine"], "iaa");
        assert!(
            number(&report["accelerator"], "by-device") > 0,
            "{report:#}"
        );
    }
    Ok(())
}

#[test]
fn every_method_and_backing_over_some_channels() -> Result<()> {
    for (method, backing, channels) in [
        ("none", "anonymous", "1"),
        ("zstd", "memfd", "4"),
        ("lz4", "anonymous", "4"),
        ("zlib", "memfd", "1"),
        ("auto", "anonymous", "2"),
    ] {
        let report = demo(&[
            "--ram=16M",
            "--guest=threads",
            "--method",
            method,
            "--backing",
            backing,
            "--channels",
            channels,
        ])?;
        assert_eq!(report["method"], method);
        assert_eq!(report["channels"].to_string(), channels);
        assert_eq!(report["guest"]["backing"], backing);
        if ["zstd", "lz4", "zlib"].contains(&method) {
            let (wire, pages) = (number(&report, "wire-bytes"), number(&report, "page-bytes"));
            assert!(wire < pages, "{method}: {wire} bytes for {pages}");
        }
    }
    Ok(())
}

#[test]
fn kvm_guest_moves() -> Result<()> {
    if !kvm() {
        return Ok(());
    }
    let report = demo(&["--ram=16M", "--guest=kvm", "--vcpus=2"])?;
    assert_eq!(report["guest"]["kind"], "kvm");
    assert_eq!(report["guest"]["vcpus"], 2);
    Ok(())
}

#[test]
fn guest_writes_on_both_sides() -> Result<()> {
    let report = demo(&["--ram=16M", "--guest=threads", "--rate=50000", "--prealloc"])?;
    for writes in ["writes", "writes-after"] {
        assert!(number(&report["guest"], writes) > 0, "{report:#}");
    }
    Ok(())
}

#[test]
fn the_report_adds_up() -> Result<()> {
    let folder = TempDir::new()?;
    let file = folder.path().join("report.json");
    let file = file.to_str().context("a path")?;
    let ended = run(&["--ram=16M", "--guest=threads", "--json", file])?.success()?;
    assert_eq!(ended.stdout, "");
    let report: Value = serde_json::from_str(&std::fs::read_to_string(file)?)?;
    holds(&report)?;

    let ram = &report["ram"];
    assert_eq!(number(ram, "transferred"), number(&report, "wire-bytes"));
    assert_eq!(number(ram, "duplicate"), number(&report, "zero-pages"));
    // Every page is sent once, or again in a later round.
    assert!(number(ram, "normal") + number(ram, "duplicate") >= 4096);
    assert!(number(ram, "dirty-sync-count") >= 2);
    let cpu = |key: &str| report["cpu-seconds"][key].as_f64().unwrap();
    assert!(cpu("source") > 0.0 && cpu("destination") > 0.0);
    assert!((cpu("total") - cpu("source") - cpu("destination")).abs() < 1e-9);
    Ok(())
}

#[test]
fn zero_copy_over_loopback_copies_and_says_so() -> Result<()> {
    let ended = run(&[
        "--ram=16M",
        "--guest=threads",
        "--channels=1",
        "--method=none",
        "--plain",
        "--zero-copy",
        "--json=-",
    ])?;
    if ended.stderr.contains("ulimit -l") {
        lab::skipped("this host does not allow locking the memory that zero-copy send needs")
            .unwrap();
        return Ok(());
    }
    let report = report(&ended.success()?)?;
    let zero_copy = &report["zero-copy"];
    assert_eq!(zero_copy["requested"], true);
    assert!(number(zero_copy, "sends") > 0);
    assert_eq!(zero_copy["copied"], zero_copy["sends"]);
    let missed = number(zero_copy, "missed");
    assert!(missed > 0, "{report:#}");
    assert_eq!(
        number(&report["ram"], "dirty-sync-missed-zero-copy"),
        missed
    );
    Ok(())
}

#[test]
fn the_report_describes_the_link() -> Result<()> {
    let options = ["--ram=16M", "--guest=threads"];
    let report = |more| demo(&[&options[..], more].concat());
    let secure = report(&[])?;
    let link = &secure["link"];
    assert!(link["tls"].is_string() && link["check"] == true, "{link}");
    assert!(link["reconnects"].is_u64(), "{link}");
    let peer = link["peer"].as_str().unwrap();
    assert!(peer.contains("ed25519:"), "{link}");
    let insecure = report(&["--insecure"])?;
    assert!(insecure["link"]["tls"].is_null() && insecure["link"]["check"] == true);
    assert!(report(&["--plain"])?["link"].is_null());
    Ok(())
}

#[test]
fn modelled_dsas_look_for_zero_pages() -> Result<()> {
    let options = [
        "--ram=32M",
        "--guest=threads",
        "--fill=mixed",
        "--method=lz4",
        "--prealloc",
        "--zero-page-detection=dsa",
        "--dsa-path=model:2",
        "--json=-",
    ];
    for faults in [None, Some("7")] {
        let mut command = command(&options);
        if let Some(seed) = faults {
            command.env("VAMOOSE_MODEL_FAULTS", seed);
        }
        let ended = Vamoose::start(&mut command)?.finish(LIMIT)?;
        let report = report(&ended.success()?)?;
        holds(&report)?;
        let done = &report["zero-page-detection"];
        assert_eq!(done["by"], "dsa");
        assert_eq!(done["model"], true);
        assert!(number(done, "by-device") > 0, "{faults:?}: {report:#}");
        if faults.is_some() {
            assert!(number(done, "failed") > 0, "{report:#}");
        }
    }
    Ok(())
}

#[test]
fn invalid_options_are_refused() -> Result<()> {
    for (options, words) in [
        (
            &["--zero-copy", "--plain", "--method=zstd"][..],
            "--zero-copy",
        ),
        (&["--zero-copy"], "--plain"),
        (&["--plain", "--insecure"], "--insecure"),
        (&["--ram=5000"], "--ram"),
        (&["--ram=0"], "--ram"),
        (&["--ram=2048"], "append a unit"),
        (&["--channels=0"], "0 channels"),
        (&["--channels=65"], "65 channels"),
        (&["--vcpus=9"], "9 vCPUs"),
        (&["--rate=fast"], "--rate"),
        (&["--max-bandwidth=0"], "--max-bandwidth"),
        (&["--timeout=0"], "--timeout"),
        (&["--method=none", "--level=3"], "level"),
        (&["--dsa-path=model"], "--dsa-path"),
        (
            &["--zero-page-detection=dsa", "--dsa-path=wq77.7"],
            "vamoose probe",
        ),
        (
            &["--zero-page-detection=dsa", "--dsa-path=models"],
            "--dsa-path",
        ),
        (&["--fill=nonsense"], "--fill"),
        (&["--via=/does/not/exist"], "/does/not/exist"),
        (&["--via=false"], "has ended"),
    ] {
        let ended = run(&[&["--guest=threads", "--json=-"], options].concat())?.failure(words)?;
        assert_eq!(ended.stdout, "", "{options:?}");
        assert!(!ended.stderr.contains("panicked"), "{}", ended.stderr);
    }
    Ok(())
}

#[test]
fn an_address_that_is_taken_is_the_destinations_error() -> Result<()> {
    let taken = std::net::TcpListener::bind("127.0.0.1:0")?;
    let listen = format!("--listen=tcp:{}", taken.local_addr()?);
    run(&["--ram=16M", "--guest=threads", &listen])?
        .failure("the destination: cannot listen on tcp:127.0.0.1:")?;
    Ok(())
}

#[test]
fn another_command_starts_the_destination() -> Result<()> {
    demo(&["--ram=16M", "--guest=threads", "--via=env MARK=1"])?;
    Ok(())
}

#[test]
fn a_killed_destination_leaves_the_guest_at_the_source() -> Result<()> {
    // Over a session it might come back.
    let demo = start(&[&ENDLESS[..], &["--reconnect-timeout=1"]].concat())?;
    let destination = destination(&demo)?;
    demo.wait_for("active, ", LIMIT)?;
    kill_process(destination, Signal::KILL)?;
    let ended = demo
        .finish(LIMIT)?
        .failure("the destination's process was killed by signal 9")?;
    stays(&ended, "failed")
}

#[test]
fn ctrl_c_cancels_and_the_guest_goes_on() -> Result<()> {
    for (when, signal) in [
        ("active, ", Signal::INT),
        ("active, ", Signal::TERM),
        // Before the first page, or even the first connection.
        ("the destination, process ", Signal::INT),
    ] {
        let demo = start(&ENDLESS)?;
        let destination = pidfd_open(destination(&demo)?, PidfdFlags::empty())?;
        demo.wait_for(when, LIMIT)?;
        demo.signal(signal)?;
        let ended = demo.finish(LIMIT)?.failure("cancelled")?;
        stays(&ended, "cancelled")?;
        ensure!(ends(&destination)?, "the destination goes on");
    }
    Ok(())
}

#[test]
fn a_guest_that_never_fits_stays_when_the_time_is_over() -> Result<()> {
    let ended = run(&[&ENDLESS[..], &["--timeout=1"]].concat())?.failure("not converged")?;
    stays(&ended, "failed")
}

#[test]
fn a_killed_source_takes_its_destination_along() -> Result<()> {
    let demo = start(&ENDLESS)?;
    let destination = pidfd_open(destination(&demo)?, PidfdFlags::empty())?;
    demo.wait_for("active, ", LIMIT)?;
    demo.signal(Signal::KILL)?;
    ensure!(ends(&destination)?, "the destination goes on");
    Ok(())
}

/// Runs a demo that has to succeed, and returns its report.
fn demo(options: &[&str]) -> Result<Value> {
    let ended = run(&[&["--json=-"], options].concat())?
        .success()
        .with_context(|| format!("{options:?}"))?;
    let report = report(&ended)?;
    holds(&report)?;
    Ok(report)
}

fn holds(report: &Value) -> Result<()> {
    ensure!(
        report["status"] == "completed"
            && report["memory-equal"] == true
            && report["checksum-holds"] == true
            && report["guest"]["at"] == "destination",
        "{report:#}"
    );
    Ok(())
}

/// That the guest of a failed demo runs at the source, and is whole.
fn stays(ended: &Ended, status: &str) -> Result<()> {
    ensure!(
        ended.stderr.contains("the guest resumed at the source"),
        "{}",
        ended.stderr
    );
    let report = report(ended)?;
    ensure!(
        report["status"] == status
            && report["memory-equal"].is_null()
            && report["checksum-holds"] == true
            && report["guest"]["at"] == "source"
            && number(&report["guest"], "writes-after") > 0,
        "{report:#}"
    );
    Ok(())
}

fn report(ended: &Ended) -> Result<Value> {
    serde_json::from_str(&ended.stdout).with_context(|| ended.stdout.clone())
}

fn run(options: &[&str]) -> Result<Ended> {
    start(options)?.finish(LIMIT)
}

fn start(options: &[&str]) -> Result<Vamoose> {
    Vamoose::start(&mut command(options))
}

fn command(options: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.args(options);
    command
}

/// The destination's process.
fn destination(demo: &Vamoose) -> Result<Pid> {
    let said = demo.wait_for("the destination, process ", LIMIT)?;
    let (pid, _) = said.split_once(',').context("no process")?;
    Pid::from_raw(pid.parse()?).context("not a process id")
}

/// Whether the process ends in time.
fn ends(process: &rustix::fd::OwnedFd) -> Result<bool> {
    let timeout = Timespec::try_from(LIMIT)?;
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    Ok(poll(&mut fds, Some(&timeout))? > 0)
}

fn kvm() -> bool {
    match testguest::kvm_available() {
        Ok(()) => true,
        Err(reason) => {
            lab::skipped(&reason).unwrap();
            false
        }
    }
}

fn number(value: &Value, key: &str) -> u64 {
    value[key]
        .as_u64()
        .with_context(|| format!("{key} is no number in {value:#}"))
        .unwrap()
}
