//! What `migrate` shows on a terminal, and a terminal that goes away: an ssh session that ends, a pipe that nobody reads any more.

mod screen;

use std::{
    fmt::Write as _,
    fs,
    io::{BufRead as _, BufReader, pipe},
    os::unix::{fs::symlink, net::UnixStream},
    path::Path,
    process::Command,
};

use anyhow::{Context as _, Result, bail, ensure};
use lab::{
    middlebox::{Admission, Change, Direction, Middlebox, Which},
    qemu::{self, Binary, Builder, Qemu},
    ram::Fill,
    vamoose::{Keys, Vamoose},
};
use rustix::process::Signal;
use serde_json::{Deserializer, Value};
use tempfile::TempDir;

use self::screen::{Screen, Shown};
use crate::common::{
    Host, LIMIT, MIB, bare_pair,
    gate::{Fate, Gate, Message},
    migrate, vamoose,
};

const RAM: u64 = 4 * MIB;

fn pair(binary: &Binary, host: &Host) -> Result<(Qemu, Qemu)> {
    let mut source = Builder::bare(binary, RAM).content(Fill::Mixed, 1).start()?;
    source.qmp.cont()?;
    let destination = Builder::bare(binary, RAM).incoming().start()?;
    host.knows("vm", &destination)?;
    Ok((source, destination))
}

#[test]
fn the_end_of_the_terminal_cancels() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let host = Host::start(&[])?;
    let (mut source, _destination) = pair(&binary, &host)?;
    let migration = host.migrate(&source, "vm", &["--max-bandwidth", "16k"])?;
    migration.wait_for("active", LIMIT)?;
    migration.signal(Signal::HUP)?;
    let ended = migration.finish(LIMIT)?;
    ended.failure("Cancelled; ")?;
    source.qmp.wait_status("running", LIMIT)
}

/// Nor is it taken for the decision of a person to leave the guest in doubt, while the server is asked again.
#[test]
fn the_end_of_the_terminal_does_not_end_a_commit() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let host = Host::start(&[])?;
    let gate = Gate::start(&host.address)?;
    let (mut source, mut destination) = pair(&binary, &host)?;
    gate.rule(Message::Request("commit"), Fate::Held);
    let migration = migrate(&source.qmp_socket(), &gate.address, "vm", &[])?;
    gate.wait_until_held()?;
    migration.signal(Signal::HUP)?;
    gate.close();
    migration.wait_for("asking the server again", LIMIT)?;
    migration.signal(Signal::HUP)?;
    gate.open();
    migration.finish(LIMIT)?.success()?;
    destination.qmp.wait_status("running", LIMIT)?;
    ensure!(source.qmp.query_status()? == "postmigrate");
    Ok(())
}

#[test]
fn a_reader_that_is_gone_does_not_end_a_migration() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let host = Host::start(&[])?;
    let (source, mut destination) = pair(&binary, &host)?;
    let (reader, writer) = pipe()?;
    let mut command = Command::new(vamoose());
    command
        .args(["migrate", "--insecure", "--method", "none"])
        // More than one line of progress is to come.
        .args([
            "--max-bandwidth",
            "256k",
            "--name",
            "vm",
            "--to",
            &host.address,
        ])
        .arg("--qmp")
        .arg(source.qmp_socket())
        .arg("--state-dir")
        .arg(source.qmp_socket().with_file_name("state"))
        .stderr(writer);
    let mut migration = command.spawn()?;
    drop(command);
    let mut lines = BufReader::new(reader).lines().map_while(Result::ok);
    let active = lines.find(|line| line.contains("active"));
    active.context("the migration has not begun")?;
    drop(lines);
    let status = migration.wait()?;
    ensure!(status.success(), "{status}");
    destination.qmp.wait_status("running", LIMIT)
}

/// A guest web1 on this host, and a host kvm2 behind a middlebox that waits for it.
struct Hosts {
    keys: Keys,
    middlebox: Middlebox,
    _source: Qemu,
    destination: Qemu,
    monitors: TempDir,
    _kvm2: Host,
}

impl Hosts {
    fn start(binary: &Binary) -> Result<Self> {
        let keys = Keys::make(vamoose())?;
        let kvm2 = Host::start(&["--keys", &keys.destination.display().to_string()])?;
        let middlebox = Middlebox::new(kvm2.address.trim_start_matches("tcp:").parse()?)?;
        let (mut source, destination) = bare_pair(binary, binary, 64 * MIB)?;
        source.qmp.cont()?;
        kvm2.knows("web1", &destination)?;
        let monitors = TempDir::new()?;
        symlink(source.qmp_socket(), monitors.path().join("web1.qmp"))?;
        let address = format!("[kvm2]\naddress = \"{}\"\n", middlebox.address());
        fs::write(keys.source.join("hosts.toml"), address)?;
        Ok(Self {
            keys,
            middlebox,
            _source: source,
            destination,
            monitors,
            _kvm2: kvm2,
        })
    }

    /// `vamoose migrate web1 kvm2`.
    fn migrate(&self, options: &[&str]) -> Command {
        let mut command = Command::new(vamoose());
        command.args(["migrate", "web1", "kvm2", "--keys"]);
        command.arg(&self.keys.source);
        command.arg("--qmp-dir").arg(self.monitors.path());
        command
            .arg("--state-dir")
            .arg(self.monitors.path().join("state"));
        command.args(options);
        command
    }

    fn expect_moved(&mut self) -> Result<()> {
        self.destination.qmp.wait_status("running", LIMIT)
    }

    /// Nothing gets through any more.
    fn cut(&self) -> Result<()> {
        self.middlebox
            .wait_for_bytes(Direction::ToListener, MIB, LIMIT)?;
        self.middlebox.admit(Admission::Refuse)?;
        self.middlebox.apply(Which::All, Change::Close);
        Ok(())
    }
}

/// Slow enough to be looked at.
const SLOW: &[&str] = &["--max-bandwidth", "4M"];

#[test]
fn a_terminal_of_any_width_shows_everything() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    for columns in [40, 80, 200] {
        let mut hosts = Hosts::start(&binary)?;
        let screen = Screen::start(&mut hosts.migrate(SLOW), columns)?;
        screen.wait_for("% active, ")?;
        hosts.cut()?;
        screen.wait_for("no connection to kvm2, retrying (")?;
        hosts.middlebox.admit(Admission::Pass)?;
        screen.wait_for("connected to kvm2 again after ")?;
        screen.resize(columns.min(80))?;
        let (status, shown) = screen.finish()?;
        ensure!(status.success(), "{shown:#?}");
        ensure!(shown.wrapped.is_empty(), "{columns} columns: {shown:#?}");
        let text = shown.text();
        for part in [
            "web1 runs at kvm2 (",
            "downtime ",
            " MiB sent",
            "ratio ",
            "End its QEMU here",
        ] {
            ensure!(text.contains(part), "{columns} columns, {part}: {shown:#?}");
        }
        ensure!(!text.contains("% active"), "{shown:#?}");
        let active = |line: &&String| line.contains("% active");
        let last = shown.cleared.iter().rfind(active);
        ensure!(
            last.is_some_and(|line| line.chars().count() < 80),
            "{shown:#?}"
        );
        hosts.expect_moved()?;
        record(&format!("cut-{columns}"), &shown)?;
    }
    Ok(())
}

#[test]
fn a_terminal_shows_a_refusal_and_a_cancel() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let hosts = Hosts::start(&binary)?;
    let refused = Screen::start(&mut hosts.migrate(&["--name", "web2"]), 80)?;
    let (status, shown) = refused.finish()?;
    ensure!(status.code() == Some(1), "{status}");
    record("refusal", &shown)?;
    ensure!(
        shown.lines[0] == "web1 was not moved; it still runs here.",
        "{shown:#?}"
    );
    ensure!(
        shown.lines[1].starts_with("  why: the server refuses: "),
        "{shown:#?}"
    );

    let cancelled = Screen::start(&mut hosts.migrate(SLOW), 80)?;
    cancelled.wait_for(" left")?;
    cancelled.signal(Signal::INT);
    let (status, shown) = cancelled.finish()?;
    ensure!(status.code() == Some(3), "{status}");
    ensure!(
        shown.text() == "Cancelled; web1 still runs here.\n",
        "{shown:#?}"
    );
    Ok(())
}

#[test]
fn plain_lines_are_shown_where_nothing_else_can_be() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    for (name, value) in [("NO_COLOR", "1"), ("TERM", "dumb")] {
        let mut hosts = Hosts::start(&binary)?;
        let mut command = hosts.migrate(&[]);
        // The screen sets the variables of a usual terminal.
        let program = command.get_program().to_owned();
        let arguments: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
        command = Command::new("env");
        command
            .arg(format!("{name}={value}"))
            .arg(program)
            .args(arguments);
        let (status, shown) = Screen::start(&mut command, 80)?.finish()?;
        ensure!(status.success() && shown.cleared.is_empty(), "{shown:#?}");
        ensure!(shown.text().contains("100% completed"), "{shown:#?}");
        hosts.expect_moved()?;
    }
    Ok(())
}

#[test]
fn programs_read_progress_and_quiet_ones_nothing() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut hosts = Hosts::start(&binary)?;
    let mut command = hosts.migrate(&["--quiet", "--progress", "json", "--json", "-"]);
    let ended = Vamoose::start(&mut command)?.finish(LIMIT)?.success()?;
    ensure!(ended.stderr.is_empty(), "{}", ended.stderr);
    let values = Deserializer::from_str(&ended.stdout).into_iter::<Value>();
    let values: Vec<_> = values.collect::<Result<_, _>>()?;
    let [progress @ .., last, report] = &values[..] else {
        bail!("too little: {}", ended.stdout);
    };
    for line in progress.iter().chain([last]) {
        ensure!(
            line["status"].is_string() && line["wire-bytes"].is_u64(),
            "{line}"
        );
    }
    // Nothing in it goes back.
    for pair in values[..values.len() - 1].windows(2) {
        for key in ["milliseconds", "wire-bytes", "page-bytes", "zero-pages"] {
            ensure!(pair[0][key].as_u64() <= pair[1][key].as_u64(), "{pair:?}");
        }
    }
    ensure!(last["total"].is_u64(), "{last}");
    ensure!(last["status"] == "completed", "{last}");
    ensure!(
        report["name"] == "web1" && report["location"] == "destination",
        "{report}"
    );
    let attempt = report["attempt"].as_str();
    ensure!(attempt.is_some_and(|id| id.len() == 32), "{report}");
    hosts.expect_moved()?;

    let again = Vamoose::start(&mut hosts.migrate(&["--quiet", "--name", "web2"]))?;
    again.finish(LIMIT)?.failure("web1")?;
    Ok(())
}

/// Waits are explained: a server that says nothing, and a monitor that another client holds.
#[test]
fn silence_is_explained() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let hosts = Hosts::start(&binary)?;
    hosts.middlebox.admit(Admission::Silence)?;
    let migration = Screen::start(&mut hosts.migrate(&["--connect-timeout", "100"]), 80)?;
    migration.wait_for("waiting for a connection to tcp:")?;
    migration.signal(Signal::INT);
    migration.finish()?;

    hosts.middlebox.admit(Admission::Pass)?;
    let _client = UnixStream::connect(hosts.monitors.path().join("web1.qmp"))?;
    let migration = Screen::start(&mut hosts.migrate(&[]), 80)?;
    migration.wait_for("waiting for the source QEMU's monitor (")?;
    Ok(())
}

/// Writes what a terminal has shown beside the test's binary: the lines that were cleared are marked.
fn record(name: &str, shown: &Shown) -> Result<()> {
    let mut text = String::new();
    for line in &shown.cleared {
        writeln!(text, "~ {line}")?;
    }
    text += &shown.text();
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("terminal-{name}.txt"));
    Ok(fs::write(path, text)?)
}
