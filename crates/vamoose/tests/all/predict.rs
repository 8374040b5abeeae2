//! `vamoose predict`: what it says of guests and links, that it changes nothing, and (`make predict`) how far it is off.

use std::{
    env,
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt as _, symlink},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use lab::{
    guest::{Guest, Image, Load, Pattern},
    net::{self, Link},
    qemu::{self, Binary, Builder, Qemu},
    ram::{self, Fill},
    vamoose::{Vamoose, state_dir},
};
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{Host, LIMIT, MIB, vamoose};

/// What `vamoose predict` of a guest without load prints, and its report.
fn predict(host: &Host, source: &Qemu, options: &[&str]) -> Result<(String, Value)> {
    let options = [&["--dry-run"], options].concat();
    let ended = host.migrate(source, "vm", &options)?.finish(LIMIT)?;
    let ended = ended.success()?;
    let report = serde_json::from_str(&ended.stdout).context(ended.stdout)?;
    Ok((ended.stderr, report))
}

fn number(report: &Value, path: &str) -> Result<f64> {
    let number = report.pointer(path).and_then(Value::as_f64);
    number.with_context(|| format!("{path}: {report}"))
}

#[test]
fn a_guest_without_load_is_measured_and_stays_as_it_is() -> Result<()> {
    for binary in qemu::available() {
        let host = Host::start(&[])?;
        let machine = Builder::bare(binary, 128 * MIB);
        let mut source = machine.clone().content(Fill::Mixed, 1).start()?;
        let destination = machine.incoming().start()?;
        host.knows("vm", &destination)?;
        source.qmp.cont()?;
        let memory = fs::read(source.ram())?;
        let settings =
            |source: &mut Qemu| source.qmp.execute("query-migrate-parameters", json!({}));
        let before = settings(&mut source)?;
        let slow = ["--method", "auto", "--max-bandwidth", "20M"];
        let (text, report) = predict(&host, &source, &slow)?;
        let version = binary.version;
        ensure!(report["converges"] == true, "{version}: {report}");
        ensure!(report["unknown"] == json!([]), "{version}: {report}");
        // A fifth of its pages, and two fifths of them cannot be compressed.
        let used = number(&report, "/ram/used")? / (128 * MIB) as f64;
        ensure!((0.7..0.9).contains(&used), "{version}: {used}");
        let link = number(&report, "/link/bytes-per-second")? / MIB as f64;
        ensure!(
            (10.0..24.0).contains(&link),
            "{version}: {link} of 20 MiB/s"
        );
        let [time, bytes] = ["/total-time", "/wire-bytes"].map(|path| number(&report, path));
        ensure!(bytes? > 10e6 && time? > 500.0, "{version}: {report}");
        let lines = text
            .lines()
            .skip_while(|line| !line.starts_with("Predicted: "));
        let lines: Vec<_> = lines.collect();
        ensure!(lines.len() >= 3, "{text}");
        ensure!(
            lines.iter().all(|line| line.chars().count() <= 80),
            "{text}"
        );

        ensure!(settings(&mut source)? == before, "{version}");
        ensure!(source.qmp.query_status()? == "running" && fs::read(source.ram())? == memory);
        ensure!(source.qmp.query_migrate()?["status"].is_null(), "{version}");
        host.migrate(&source, "vm", &slow)?
            .finish(LIMIT)?
            .success()?;
        ram::compare(source.ram(), destination.ram())?;
    }
    Ok(())
}

/// Rewrites whole pages: 12 MB/s.
const LOAD: Load = Load {
    fill: 48,
    hot: 16,
    rate: 3000,
};

#[test]
fn a_guest_that_writes_more_than_the_link_carries_does_not_converge() -> Result<()> {
    let (Some(binary), Some(image)) = (qemu::newest_or_skip()?, Image::build_or_skip(16)?) else {
        return Ok(());
    };
    let host = Host::start(&[])?;
    let machine = image.machine(&binary, 256 * MIB, &LOAD);
    let source = Guest::start(&machine)?;
    let destination = machine.incoming().paused().start()?;
    host.knows("vm", &destination)?;
    source.wait_ready(LIMIT)?;
    let (text, slow) = predict(&host, &source.qemu, &["--max-bandwidth", "3M"])?;
    ensure!(slow["converges"] == false, "{text}{slow}");
    ensure!(text.contains("it does not converge"), "{text}");
    ensure!(number(&slow, "/ram/dirty-rate")? > 4e6, "{slow}");
    ensure!(slow["remedies"]["downtime-limit"].is_u64(), "{slow}");
    // Its working set fits into this downtime.
    let patient = ["--max-bandwidth", "20M", "--downtime-limit", "5s"];
    let (text, patient) = predict(&host, &source.qemu, &patient)?;
    ensure!(patient["converges"] == true, "{text}{patient}");
    ensure!(!text.contains("converge"), "{text}");
    source.wait_ticks(3, LIMIT)
}

/// Neither the QEMU's memory nor its process is visible to another user who may use its monitor.
#[test]
fn what_may_not_be_read_is_said() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    if !rustix::process::geteuid().is_root() {
        return lab::skipped("only root becomes another user");
    }
    let host = Host::start(&["--peer-uid", "65534"])?;
    let machine = Builder::bare(&binary, 64 * MIB);
    let source = machine.clone().content(Fill::Mixed, 1).start()?;
    let destination = machine.incoming().start()?;
    host.knows("vm", &destination)?;
    let qmp = source.qmp_socket();
    for path in [&*qmp, qmp.parent().context("a folder")?] {
        fs::set_permissions(path, Permissions::from_mode(0o777))?;
    }
    let home = TempDir::new()?;
    let program = home.path().join("vamoose");
    fs::copy(vamoose(), &program)?;
    fs::set_permissions(home.path(), Permissions::from_mode(0o777))?;
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    command
        .arg(program)
        .args(["predict", "--insecure", "--method", "auto"]);
    command
        .args(["--name", "vm", "--to", &host.address, "--qmp"])
        .arg(qmp);
    command.arg("--state-dir").arg(home.path().join("state"));
    let ended = Vamoose::start(&mut command)?.finish(LIMIT)?.success()?;
    for line in [
        "its pages cannot be read",
        "taken as not compressible",
        "Predicted: ",
        "of which 0 % zero",
    ] {
        ensure!(
            ended.stdout.replace('\n', " ").contains(line),
            "{line}: {}",
            ended.stdout
        );
    }
    Ok(())
}

/// A guest of `make predict`.
enum Kind {
    /// Of this content, without load.
    Still(Fill),
    /// Linux with a load.
    Busy(Load, Pattern),
}

const fn load(fill: u32, hot: u32, rate: u32) -> Load {
    Load { fill, hot, rate }
}

/// PREDICT_ONLY is a part of the names of the rows that run.
#[test]
#[ignore = "minutes, as root"]
fn predictions_are_measured() -> Result<()> {
    use Kind::{Busy, Still};
    net::available()?;
    let binary = qemu::newest_or_skip()?.context("there is no QEMU here")?;
    let image = Image::build(16)?;
    let only = env::var("PREDICT_ONLY").unwrap_or_default();
    println!(
        "| guest | Mbit/s | method | time, s | MB | downtime, ms | converges |\n|---|---|---|---|---|---|---|"
    );
    let guests = [
        ("mixed pages", Still(Fill::Mixed)),
        ("noise", Still(Fill::Random)),
        ("idle Linux", Busy(load(64, 0, 0), Pattern::All)),
        ("4 MB/s to 16 MB", Busy(load(64, 16, 1000), Pattern::All)),
        ("12 MB/s to 48 MB", Busy(load(64, 48, 3000), Pattern::All)),
        (
            "few words of 12 MB/s",
            Busy(load(64, 16, 3000), Pattern::First(12)),
        ),
    ];
    for (name, kind) in &guests {
        for (rate, method) in [(50, "auto"), (50, "none"), (300, "auto"), (300, "none")] {
            let row = format!("{name} | {rate} | {method}");
            if row.contains(&only) {
                let cells =
                    measure(&binary, &image, kind, rate, method).with_context(|| row.clone())?;
                println!("| {row} | {cells} |");
            }
        }
    }
    Ok(())
}

/// Predicts a migration, carries it out, and returns the cells of a row: predicted and measured.
fn measure(binary: &Binary, image: &Image, kind: &Kind, rate: u64, method: &str) -> Result<String> {
    let link = Link::new(Some(rate * 1_000_000))?;
    let machine = match kind {
        Kind::Still(_) => Builder::bare(binary, 256 * MIB),
        Kind::Busy(load, pattern) => image.machine_that_writes(binary, 256 * MIB, load, *pattern),
    };
    let destination = machine.clone().incoming().paused().start()?;
    let (still, busy);
    let source = match kind {
        Kind::Still(fill) => {
            let mut qemu = machine.content(fill.clone(), 1).start()?;
            qemu.qmp.cont()?;
            still = qemu;
            &still
        }
        Kind::Busy(..) => {
            busy = Guest::start(&machine)?;
            busy.wait_ready(LIMIT)?;
            busy.wait_rounds(2, LIMIT)?;
            &busy.qemu
        }
    };
    let (monitors, state) = (TempDir::new()?, state_dir()?);
    symlink(destination.qmp_socket(), monitors.path().join("vm.qmp"))?;
    let mut serve = link.destination.command(vamoose());
    serve
        .args(["serve", "--insecure", "--qmp-dir"])
        .arg(monitors.path());
    serve
        .arg("--state-dir")
        .arg(state.path().join("destination"));
    let listen = format!("tcp:{}:0", link.destination.address());
    let server = Vamoose::start(serve.args(["--listen", &listen]))?;
    let to = server.wait_for("taking migrations on ", LIMIT)?;
    let command = |name: &str| {
        let mut command = link.source.command(vamoose());
        command.args([
            name,
            "--json",
            "-",
            "--name",
            "vm",
            "--insecure",
            "--method",
            method,
        ]);
        command
            .args(["--to", &to, "--qmp"])
            .arg(source.qmp_socket());
        command.arg("--state-dir").arg(state.path().join("source"));
        command
    };
    let predicted = Vamoose::start(&mut command("predict"))?
        .finish(LIMIT)?
        .success()?;
    let predicted: Value = serde_json::from_str(&predicted.stdout)?;
    eprintln!("{predicted}");
    let moving = Vamoose::start(&mut command("migrate"))?;
    let patience = Duration::from_secs_f64(2.0 * number(&predicted, "/total-time")? / 1e3 + 20.0);
    let has_ended = moving.process().wait(patience);
    if !has_ended {
        moving.signal(Signal::INT)?;
    }
    let moved: Value = serde_json::from_str(&moving.finish(LIMIT)?.stdout)?;
    let both = |path: &str, unit: f64| match (number(&predicted, path), number(&moved, path)) {
        (Ok(predicted), Ok(moved)) if has_ended => {
            let off = (predicted / moved - 1.0) * 100.0;
            format!("{:.1}, {:.1} ({off:+.0} %)", predicted / unit, moved / unit)
        }
        _ => "-".to_owned(),
    };
    let figures = [
        both("/total-time", 1e3),
        both("/wire-bytes", 1e6),
        both("/downtime", 1.0),
    ];
    let converges = predicted["converges"] == true;
    Ok(format!(
        "{} | {converges}, {has_ended}",
        figures.join(" | ")
    ))
}
