//! What a host remembers of attempts: listed, taken up by a server that is started again, settled by a person; and peers
//! that speak another version.

use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use crate::{
    common::{
        Host, LIMIT, MIB,
        gate::{Fate, Gate, Message},
        migrate,
        monitor::SilentMonitor,
        vamoose,
    },
    gateway::metrics::wait_for,
};
use anyhow::{Context as _, Result, ensure};
use lab::{
    qemu::{self, Binary, Builder, Qemu},
    ram::{self, Fill},
    vamoose::{Ended, Vamoose},
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const COMMIT: Message = Message::Request("commit");

/// A guest that has left A, and B has not been sent `cont`: `migrate` was killed, and the network is cut.
pub(crate) struct Scene {
    b: Host,
    gate: Gate,
    pub(crate) at_a: Qemu,
    at_b: Qemu,
    pub(crate) attempt: String,
}

impl Scene {
    pub(crate) fn start(binary: &Binary, options: &[&str]) -> Result<Self> {
        let b = Host::start(options)?;
        let gate = Gate::start(&b.address)?;
        let mut at_a = Builder::bare(binary, 4 * MIB)
            .content(Fill::Mixed, 1)
            .start()?;
        at_a.qmp.cont()?;
        let mut at_b = Builder::bare(binary, 4 * MIB).incoming().start()?;
        b.knows("vm", &at_b)?;
        gate.rule(COMMIT, Fate::Held);
        let mut migration = migrate(&at_a.qmp_socket(), &gate.address, "vm", &[])?;
        gate.wait_until_held()?;
        at_a.qmp.wait_status("postmigrate", LIMIT)?;
        at_b.qmp.wait_migration(&["completed"], LIMIT)?;
        b.server.wait_for("loaded", LIMIT)?;
        migration.kill()?;
        gate.close();
        gate.release(Fate::CutBefore);
        let list = attempts(&at_a.qmp_socket().with_file_name("state"))?;
        let attempt = list[0]["attempt"]
            .as_str()
            .context("no attempt")?
            .to_owned();
        Ok(Self {
            b,
            gate,
            at_a,
            at_b,
            attempt,
        })
    }

    pub(crate) fn state_of_a(&self) -> PathBuf {
        self.at_a.qmp_socket().with_file_name("state")
    }

    /// The same command again.
    fn again(&self) -> Result<Ended> {
        migrate(&self.at_a.qmp_socket(), &self.gate.address, "vm", &[])?.finish(LIMIT)
    }

    fn expect_at_b(&mut self) -> Result<()> {
        self.at_b.qmp.wait_status("running", LIMIT)?;
        ensure!(self.at_a.qmp.query_status()? == "postmigrate");
        Ok(ram::compare(self.at_a.ram(), self.at_b.ram())?)
    }

    /// How this host's only attempt stands.
    fn standing(state: &Path) -> Result<String> {
        let list = attempts(state)?;
        let only = list.as_array().map(Vec::len);
        ensure!(only == Some(1), "{list}");
        Ok(list[0]["standing"].as_str().unwrap_or_default().to_owned())
    }
}

/// Where the guest is counts more than the report.
#[test]
fn a_report_that_cannot_be_written_hides_nothing() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let mut command = Command::new(vamoose());
    command.args(["migrate", "--insecure", "--to", "tcp:127.0.0.1:1"]);
    command.args(["--name", "vm", "--json", "/dev/full", "--qmp"]);
    command.arg(dir.path().join("qmp")).arg("--state-dir");
    let ended = Vamoose::start(command.arg(dir.path().join("state")))?.finish(LIMIT)?;
    let ended = ended.failure(" here.")?;
    ensure!(ended.stderr.contains("/dev/full"), "{}", ended.stderr);
    Ok(())
}

/// A place that does not exist is noticed before anything is done.
#[test]
fn wrong_places_are_refused_first() -> Result<()> {
    for (arguments, problem) in [
        (
            &[
                "migrate",
                "vm",
                "tcp:127.0.0.1:1",
                "--insecure",
                "--json",
                "/nope/x",
            ][..],
            "--json /nope/x: No such file or directory",
        ),
        (
            &["attempts", "--state-dir", "/nope"],
            "--state-dir: /nope is not a directory",
        ),
    ] {
        let refused = Vamoose::start(Command::new(vamoose()).args(arguments))?.finish(LIMIT)?;
        let refused = refused.failure(problem)?;
        ensure!(refused.status.code() == Some(2), "{}", refused.status);
    }
    Ok(())
}

fn attempts(state: &Path) -> Result<Value> {
    let mut command = Command::new(vamoose());
    command.args(["attempts", "--json", "--state-dir"]);
    let ended = Vamoose::start(command.arg(state))?
        .finish(LIMIT)?
        .success()?;
    Ok(serde_json::from_str(&ended.stdout)?)
}

fn settle(state: &Path, attempt: &str, verdict: &str, options: &[&str]) -> Result<Ended> {
    let mut command = Command::new(vamoose());
    command.args([
        "settle",
        "--attempt",
        attempt,
        "--as",
        verdict,
        "--state-dir",
    ]);
    Vamoose::start(command.arg(state).args(options).arg("--insecure"))?.finish(LIMIT)
}

#[test]
fn a_person_takes_the_guest_back() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut scene = Scene::start(&binary, &[])?;
    ensure!(Scene::standing(&scene.state_of_a())? == "in-doubt");
    let plan = settle(
        &scene.state_of_a(),
        &scene.attempt,
        "never-ran",
        &["--dry-run"],
    )?;
    ensure!(plan.success()?.stdout.contains("continue the guest at"));
    ensure!(scene.at_a.qmp.query_status()? == "postmigrate");

    // A destination that does not answer does not agree.
    let silent = settle(&scene.state_of_a(), &scene.attempt, "never-ran", &[])?;
    let silent = silent.failure("cannot be asked whether it has the guest")?;
    silent.failure("--unreachable")?;
    ensure!(scene.at_a.qmp.query_status()? == "postmigrate");
    ensure!(Scene::standing(&scene.state_of_a())? == "in-doubt");

    let gone = ["--unreachable"];
    settle(&scene.state_of_a(), &scene.attempt, "never-ran", &gone)?.success()?;
    scene.at_a.qmp.wait_status("running", LIMIT)?;
    ensure!(Scene::standing(&scene.state_of_a())? == "at-source");
    let over = settle(&scene.state_of_a(), &scene.attempt, "running-there", &[])?;
    over.failure("is over")?;

    // B still has the guest, and must never run it.
    ensure!(scene.at_b.qmp.query_status()? == "paused");
    settle(&scene.b.state_dir(), &scene.attempt, "never-ran", &[])?.success()?;
    scene.at_b.wait_exit(LIMIT)?;
    ensure!(Scene::standing(&scene.b.state_dir())? == "at-source");
    Ok(())
}

#[test]
fn a_person_gives_the_guest_to_the_destination() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    for served in [true, false] {
        let mut scene = Scene::start(&binary, &[])?;
        if !served {
            scene.b.server.kill()?;
            ensure!(Scene::standing(&scene.b.state_dir())? == "orphaned");
        }
        let settled = settle(&scene.b.state_dir(), &scene.attempt, "running-there", &[])?;
        ensure!(settled.success()?.stdout.contains("continue the guest at"));
        scene.expect_at_b()?;
        ensure!(Scene::standing(&scene.b.state_dir())? == "at-destination");

        // Whoever is wrong at A is contradicted by B, if it can be asked.
        if !served {
            scene.b.restart()?;
            scene.gate.lead_to(&scene.b.address);
        }
        scene.gate.open();
        scene.gate.rule(COMMIT, Fate::Passes);
        let wrong = settle(&scene.state_of_a(), &scene.attempt, "never-ran", &[])?;
        wrong.failure("the destination answers")?;
        scene.again()?.success()?;
        scene.expect_at_b()?;
    }
    Ok(())
}

#[test]
fn an_attempt_settled_at_the_source_is_not_asked_about() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut scene = Scene::start(&binary, &[])?;
    settle(&scene.state_of_a(), &scene.attempt, "running-there", &[])?.success()?;
    ensure!(Scene::standing(&scene.state_of_a())? == "at-destination");
    scene.again()?.failure("has moved the guest")?;
    ensure!(scene.at_a.qmp.query_status()? == "postmigrate");
    Ok(())
}

/// `migrate` is killed while memory moves, and the guest powers off: it has not been handed over, so nothing is in doubt.
#[test]
fn a_guest_that_ends_unobserved_is_not_in_doubt() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    for settled in [true, false] {
        let b = Host::start(&[])?;
        let mut at_a = Builder::bare(&binary, 16 * MIB)
            .content(Fill::Random, 1)
            .start()?;
        at_a.qmp.cont()?;
        let at_b = Builder::bare(&binary, 16 * MIB).incoming().start()?;
        b.knows("vm", &at_b)?;
        let slow = ["--max-bandwidth", "16k", "--downtime-limit", "10"];
        let mut slow = b.migrate(&at_a, "vm", &slow)?;
        slow.wait_for("active", LIMIT)?;
        slow.kill()?;
        at_a.kill()?;
        let state = at_a.qmp_socket().with_file_name("state");
        let list = attempts(&state)?;
        let attempt = list[0]["attempt"].as_str().context("no attempt")?;
        let standing = if settled {
            settle(&state, attempt, "never-ran", &[])?.success()?;
            "lost"
        } else {
            let again = b.migrate(&at_a, "vm", &[])?.finish(LIMIT)?;
            again.failure("the guest is no longer at the source")?;
            "gone"
        };
        ensure!(Scene::standing(&state)? == standing);
        let again = b.migrate(&at_a, "vm", &[])?.finish(LIMIT)?;
        ensure!(!again.stderr.contains("was not moved"), "{}", again.stderr);
    }
    Ok(())
}

/// A guest that B has loaded, and `migrate` does not know it yet.
struct Loaded {
    b: Host,
    gate: Gate,
    at_a: Qemu,
    at_b: Qemu,
    migration: Vamoose,
}

impl Loaded {
    fn start(binary: &Binary) -> Result<Self> {
        let b = Host::start(&[])?;
        let gate = Gate::start(&b.address)?;
        let mut at_a = Builder::bare(binary, 4 * MIB)
            .content(Fill::Mixed, 1)
            .start()?;
        at_a.qmp.cont()?;
        let at_b = Builder::bare(binary, 4 * MIB).incoming().start()?;
        b.knows("vm", &at_b)?;
        gate.rule(Message::Loaded, Fate::Held);
        let migration = migrate(&at_a.qmp_socket(), &gate.address, "vm", &[])?;
        gate.wait_until_held()?;
        b.server.wait_for("loaded", LIMIT)?;
        Ok(Self {
            b,
            gate,
            at_a,
            at_b,
            migration,
        })
    }
}

/// As before, but the destination has all of it: that is left for a person, who continues it.
#[test]
fn a_possible_only_copy_is_not_terminated() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let Loaded {
        b,
        gate,
        mut at_a,
        mut at_b,
        mut migration,
    } = Loaded::start(&binary)?;
    migration.signal(Signal::STOP)?;
    at_a.kill()?;
    migration.kill()?;
    gate.release(Fate::CutBefore);
    let again = migrate(&at_a.qmp_socket(), &gate.address, "vm", &[])?.finish(LIMIT)?;
    let again = again.failure("the guest is no longer at the source")?;
    ensure!(
        again.stderr.contains("--as running-there"),
        "{}",
        again.stderr
    );
    ensure!(at_b.qmp.query_status()? == "paused");
    let list = attempts(&b.state_dir())?;
    let attempt = list[0]["attempt"].as_str().context("no attempt")?;
    settle(&b.state_dir(), attempt, "running-there", &[])?.success()?;
    at_b.qmp.wait_status("running", LIMIT)
}

/// `migrate` to B is killed while memory moves, and another tool moves the guest to C. The old command does not take that for
/// its own.
#[test]
fn a_guest_moved_by_another_tool_is_not_committed() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let Loaded {
        b,
        gate,
        mut at_a,
        mut at_b,
        mut migration,
    } = Loaded::start(&binary)?;
    migration.kill()?;
    gate.release(Fate::CutBefore);
    // QEMU notices, and goes on.
    at_a.qmp.wait_migration(&["failed"], LIMIT)?;
    at_a.qmp.wait_status("running", LIMIT)?;
    let mut at_c = Builder::bare(&binary, 4 * MIB).incoming().start()?;
    at_c.qmp.use_multifd(2)?;
    let to_c = format!("unix:{}", at_c.socket("in").display());
    at_c.qmp.migrate_incoming(&to_c)?;
    at_a.qmp.migrate(&to_c)?;
    at_a.qmp.wait_migration(&["completed"], LIMIT)?;
    at_c.qmp.wait_migration(&["completed"], LIMIT)?;
    at_c.qmp.cont()?;

    let again = migrate(&at_a.qmp_socket(), &gate.address, "vm", &[])?.finish(LIMIT)?;
    let states = [&mut at_a, &mut at_b, &mut at_c].map(|qemu| qemu.qmp.query_status());
    let runs = states.iter().flatten().filter(|state| *state == "running");
    ensure!(
        runs.count() == 1,
        "{states:?}; migrate said:\n{}",
        again.stderr
    );
    let again = again.failure("please confirm")?;
    ensure!(again.stderr.contains("--confirm"), "{}", again.stderr);
    ensure!(again.status.code() == Some(4), "{}", again.status);

    let state = at_a.qmp_socket().with_file_name("state");
    let list = attempts(&state)?;
    let attempt = list[0]["attempt"].as_str().context("no attempt")?;
    settle(&state, attempt, "moved-elsewhere", &[])?.success()?;
    ensure!(Scene::standing(&state)? == "gone");
    settle(&b.state_dir(), attempt, "moved-elsewhere", &[])?.success()?;
    at_b.wait_exit(LIMIT)?;
    ensure!(at_c.qmp.query_status()? == "running");
    Ok(())
}

/// `migrate` is killed when its QEMU has completed and before it knows that: a person's word finishes the migration.
#[test]
fn a_migration_that_completed_unseen_is_finished_by_a_word() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let b = Host::start(&[])?;
    let mut at_a = Builder::bare(&binary, 16 * MIB)
        .content(Fill::Random, 1)
        .start()?;
    at_a.qmp.cont()?;
    let mut at_b = Builder::bare(&binary, 16 * MIB).incoming().start()?;
    b.knows("vm", &at_b)?;
    let monitor = SilentMonitor::before(&at_a.qmp_socket())?;
    let slow = ["--max-bandwidth", "4M", "--downtime-limit", "10"];
    let mut migration = migrate(&monitor.path(), &b.address, "vm", &slow)?;
    migration.wait_for("active", LIMIT)?;
    monitor.fall_silent_at("query-migrate");
    at_a.qmp.wait_status("postmigrate", LIMIT)?;
    at_b.qmp.wait_migration(&["completed"], LIMIT)?;
    migration.kill()?;
    monitor.wait_until_it_talks()?;

    let again = migrate(&monitor.path(), &b.address, "vm", &[])?.finish(LIMIT)?;
    let again = again.failure("please confirm")?;
    ensure!(at_b.qmp.query_status()? == "paused");
    let state = monitor.path().with_file_name("state");
    let list = attempts(&state)?;
    let attempt = list[0]["attempt"].as_str().context("no attempt")?;
    let word = ["--confirm", attempt];
    ensure!(again.stderr.contains(&word.join(" ")), "{}", again.stderr);
    migrate(&monitor.path(), &b.address, "vm", &word)?
        .finish(LIMIT)?
        .success()?;
    at_b.qmp.wait_status("running", LIMIT)?;
    Ok(ram::compare(at_a.ram(), at_b.ram())?)
}

/// Reported, not killed, not run; and the source may come back.
#[test]
fn an_orphan_waits_for_its_source() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let options = ["--orphan-timeout", "1", "--metrics", "tcp:127.0.0.1:0"];
    let mut scene = Scene::start(&binary, &options)?;
    let metrics = scene.b.server.wait_for("metrics at tcp:", LIMIT)?;
    let orphans = |number| wait_for(metrics.trim(), "vamoose_guests_orphaned ", number);
    scene.b.server.wait_for("is an orphan", LIMIT)?;
    orphans(1.0)?;
    ensure!(Scene::standing(&scene.b.state_dir())? == "orphaned");
    ensure!(scene.at_b.qmp.query_status()? == "paused");
    scene.gate.open();
    scene.gate.rule(COMMIT, Fate::Passes);
    scene.again()?.success()?;
    orphans(0.0)?;
    scene.expect_at_b()
}

/// What was coming in to a server that was killed cannot arrive any more: the next server ends that QEMU, even if it
/// receives nothing.
#[test]
fn a_server_that_is_started_again_ends_half_a_guest() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut b = Host::start(&[])?;
    let mut at_a = Builder::bare(&binary, 16 * MIB)
        .content(Fill::Mixed, 1)
        .start()?;
    at_a.qmp.cont()?;
    let mut at_b = Builder::bare(&binary, 16 * MIB).incoming().start()?;
    b.knows("vm", &at_b)?;
    let slow = b.migrate(&at_a, "vm", &["--max-bandwidth", "16k"])?;
    slow.wait_for("active", LIMIT)?;
    let process = Pid::from_raw(at_b.pid().try_into()?).context("no process")?;
    kill_process(process, Signal::STOP)?;
    b.restart()?;
    at_b.wait_exit(LIMIT)?;
    slow.finish(LIMIT)?.failure(" here.")?;
    at_a.qmp.wait_status("running", LIMIT)?;
    b.server.wait_for("migration failed", LIMIT)?;
    ensure!(Scene::standing(&b.state_dir())? == "at-source");
    Ok(())
}

#[test]
fn nothing_is_begun_that_cannot_be_remembered() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut guest = Builder::bare(&binary, 16 * MIB).start()?;
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("file");
    std::fs::write(&file, "")?;
    let mut command = Command::new(vamoose());
    command.args([
        "migrate",
        "--to",
        "tcp:127.0.0.1:1",
        "--insecure",
        "--name",
        "vm",
        "--qmp",
    ]);
    command.arg(guest.qmp_socket()).arg("--state-dir").arg(file);
    let ended = Vamoose::start(&mut command)?.finish(LIMIT)?;
    ended.failure("cannot use the state folder")?;
    ensure!(guest.qmp.query_migrate()?["status"].is_null());
    Ok(())
}

/// A server from before sessions: it reads a preamble of 24 bytes, and then waits for a line.
#[test]
fn an_older_server_is_reported() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let guest = Builder::bare(&binary, 16 * MIB).start()?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = format!("tcp:{}", listener.local_addr()?);
    thread::spawn(move || -> Result<()> {
        for stream in listener.incoming() {
            stream?.read_exact(&mut [0; 24])?;
        }
        Ok(())
    });
    let migration = migrate(&guest.qmp_socket(), &address, "vm", &[])?;
    migration.finish(LIMIT)?.failure("cannot speak with tcp:")?;
    Ok(())
}

#[test]
fn a_source_without_a_session_is_turned_away() -> Result<()> {
    let host = Host::start(&[])?;
    let mut stream = TcpStream::connect(host.address.trim_start_matches("tcp:"))?;
    let prepare = r#"{"request":"prepare","protocol":1,"name":"vm","uuid":"","ram-bytes":1,"channels":2,"page-size":4096,"method":""}"#;
    // At once: the server may close the connection after the first bytes.
    stream.write_all(format!("VAMOOSEC0123456789abcdef{prepare}\n").as_bytes())?;
    // Nothing but the end.
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    ensure!(answer.is_empty(), "{answer:?}");
    host.server.wait_for("the peer is not Vamoose", LIMIT)?;
    Ok(())
}
