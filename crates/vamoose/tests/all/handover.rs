//! Who has the guest: whatever was cut, killed or repeated, it runs in one place at most, in one place as soon as both hosts
//! can connect, and where `migrate` reports it.

use std::{
    fs,
    io::Read as _,
    os::unix::net::{UnixListener, UnixStream},
};

use crate::common::{
    Host, LIMIT, MIB,
    gate::{Fate, Gate, Message},
    migrate,
    monitor::SilentMonitor,
};
use anyhow::{Context as _, Result, ensure};
use lab::{
    qemu::{self, Binary, Builder, Qemu},
    ram::{self, Fill},
    vamoose::{Ended, Vamoose},
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

const RAM: u64 = 4 * MIB;
/// Slow enough for a migration of [`RAM`] never to end by itself within a test.
const SLOW: [&str; 2] = ["--max-bandwidth", "16k"];
const COMMIT: Message = Message::Request("commit");

/// A guest that runs.
fn guest(binary: &Binary) -> Result<Qemu> {
    let mut qemu = Builder::bare(binary, RAM).content(Fill::Mixed, 1).start()?;
    qemu.qmp.cont()?;
    Ok(qemu)
}

/// A QEMU that waits for a guest.
fn waiting(binary: &Binary) -> Result<Qemu> {
    Builder::bare(binary, RAM).incoming().start()
}

/// Passes only when the guest runs on this host, of all that are left, and on no other.
fn expect_runs_only<const N: usize>(on: &str, guests: [(&str, &mut Qemu); N]) -> Result<()> {
    let mut runs = Vec::new();
    for (host, qemu) in guests {
        if qemu.qmp.query_status()? == "running" {
            runs.push(host);
        }
    }
    ensure!(runs == [on], "the guest runs at {runs:?}, not only at {on}");
    Ok(())
}

fn failed(ended: Ended) -> Result<Ended> {
    ended.failure("  why: ")
}

fn signal(qemu: &Qemu, signal: Signal) -> Result<()> {
    let pid = Pid::from_raw(i32::try_from(qemu.pid())?).context("not a process")?;
    Ok(kill_process(pid, signal)?)
}

/// One migration from A to B, with the test's own network between.
struct Scene {
    b: Host,
    gate: Gate,
    at_a: Qemu,
    at_b: Qemu,
}

impl Scene {
    fn new(binary: &Binary) -> Result<Self> {
        let b = Host::start(&[])?;
        let gate = Gate::start(&b.address)?;
        let (at_a, at_b) = (guest(binary)?, waiting(binary)?);
        b.knows("vm", &at_b)?;
        Ok(Self {
            b,
            gate,
            at_a,
            at_b,
        })
    }

    /// The command, with the same words every time.
    fn command(&self) -> Result<Vamoose> {
        migrate(&self.at_a.qmp_socket(), &self.gate.address, "vm", &[])
    }

    /// The command, up to where the source has stopped for good and the commit is held.
    fn up_to_the_commit(&mut self) -> Result<Vamoose> {
        self.gate.rule(COMMIT, Fate::Held);
        let migration = self.command()?;
        self.gate.wait_until_held()?;
        self.at_a.qmp.wait_status("postmigrate", LIMIT)?;
        self.at_b.qmp.wait_migration(&["completed"], LIMIT)?;
        Ok(migration)
    }

    /// The command, up to where the destination has loaded the guest and the source has not been notified.
    fn up_to_loaded(&mut self) -> Result<Vamoose> {
        self.gate.rule(Message::Loaded, Fate::Held);
        let migration = self.command()?;
        self.gate.wait_until_held()?;
        self.at_b.qmp.wait_migration(&["completed"], LIMIT)?;
        self.b.server.wait_for("loaded", LIMIT)?;
        Ok(migration)
    }

    /// The server is killed and another one starts in its place, at the same address for A.
    fn restart_b(&mut self) -> Result<()> {
        self.b.restart()?;
        self.gate.lead_to(&self.b.address);
        Ok(())
    }

    /// `migrate` is killed when the source has stopped for good, before the commit has reached any process.
    fn kill_before_the_commit(&mut self) -> Result<()> {
        let mut migration = self.up_to_the_commit()?;
        migration.kill()?;
        self.gate.release(Fate::CutBefore);
        Ok(())
    }
}

/// A server has written down which QEMU it is about, but not which process that is, and was killed. The next one ends that QEMU, if
/// it is there, and takes a guest for another one by its name.
#[test]
fn a_qemu_without_a_known_process_does_not_block_others() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    for is_there in [true, false] {
        let mut b = Host::start(&[])?;
        let (mut at_a, mut at_b) = (guest(&binary)?, waiting(&binary)?);
        b.knows("vm", &at_b)?;
        let first = b.migrate(&at_a, "vm", &SLOW)?;
        first.wait_for("active", LIMIT)?;
        b.server.kill()?;
        let first = first.finish(LIMIT)?;
        first.failure(" here.")?;
        forget_processes(&b)?;
        if !is_there {
            at_b.kill()?;
        }
        b.restart()?;
        at_b.wait_exit(LIMIT)?;
        b.forgets("vm")?;
        let mut again = waiting(&binary)?;
        b.knows("vm", &again)?;
        b.migrate(&at_a, "vm", &[])?.finish(LIMIT)?.success()?;
        expect_runs_only("B", [("A", &mut at_a), ("B", &mut again)])?;
    }
    Ok(())
}

/// Leaves all that the host's journal has but the processes of QEMUs.
fn forget_processes(host: &Host) -> Result<()> {
    for file in fs::read_dir(host.state_dir())? {
        let path = file?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let mut record: Value = serde_json::from_slice(&fs::read(&path)?)?;
        let process = record.pointer_mut("/qemu/process");
        *process.context("a record without a process")? = Value::Null;
        fs::write(&path, record.to_string())?;
    }
    Ok(())
}

/// A guest that did not get to B went to C. The old command to B does not wake it up at A.
#[test]
fn an_old_command_does_not_wake_a_guest_that_went_elsewhere() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let (b, c) = (Host::start(&[])?, Host::start(&[])?);
    let (mut at_a, at_b, mut at_c) = (guest(&binary)?, waiting(&binary)?, waiting(&binary)?);
    b.knows("vm", &at_b)?;
    c.knows("vm", &at_c)?;
    let first = b.migrate(&at_a, "vm", &SLOW)?;
    first.wait_for("active", LIMIT)?;
    first.signal(Signal::INT)?;
    first.finish(LIMIT)?.failure(" here.")?;
    c.migrate(&at_a, "vm", &[])?.finish(LIMIT)?.success()?;

    let again = b.migrate(&at_a, "vm", &SLOW)?.finish(LIMIT)?;
    expect_runs_only("C", [("A", &mut at_a), ("C", &mut at_c)])
        .with_context(|| format!("migrate said:\n{}", again.stderr))?;
    // It reports where the guest went.
    again.failure(&c.address)?;
    Ok(())
}

/// The guest went from B to C. The first command, to B, does not wake it up there, whether it had succeeded or been killed
/// before it received that.
#[test]
fn a_server_does_not_continue_a_guest_that_has_moved_on() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let scene = Scene::new(&binary)?;
    scene.command()?.finish(LIMIT)?.success()?;
    moved_on(&binary, scene, Host::restart)
}

#[test]
fn an_undecided_command_does_not_wake_a_guest_that_has_moved_on() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut scene = Scene::new(&binary)?;
    scene.gate.rule(COMMIT, Fate::AnswerLost);
    let mut first = scene.command()?;
    scene.at_b.qmp.wait_status("running", LIMIT)?;
    first.kill()?;
    moved_on(&binary, scene, Host::restart)
}

/// All that this server has is a QEMU that reports *completed*: of a migration that it has sent.
#[test]
fn a_server_without_memory_does_not_continue_a_guest_that_was_sent_on() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let scene = Scene::new(&binary)?;
    scene.command()?.finish(LIMIT)?.success()?;
    moved_on(&binary, scene, Host::restart_without_memory)
}

/// Moves the guest from B to C, restarts B's server, and runs the command to B again.
fn moved_on(
    binary: &Binary,
    mut scene: Scene,
    restart: impl Fn(&mut Host) -> Result<()>,
) -> Result<()> {
    let c = Host::start(&[])?;
    let mut at_c = waiting(binary)?;
    c.knows("vm", &at_c)?;
    scene
        .b
        .migrate_away(&scene.at_b, &c.address, "vm")?
        .finish(LIMIT)?
        .success()?;
    restart(&mut scene.b)?;
    scene.gate.lead_to(&scene.b.address);
    scene.gate.release(Fate::Passes);

    let again = scene.command()?.finish(LIMIT)?;
    let guests = [
        ("A", &mut scene.at_a),
        ("B", &mut scene.at_b),
        ("C", &mut at_c),
    ];
    expect_runs_only("C", guests).with_context(|| format!("migrate said:\n{}", again.stderr))?;
    failed(again)?;
    Ok(())
}

/// The guest was moved and has died since, at its new place. A repeated command neither reports that it runs, nor
/// starts the old one.
#[test]
fn a_success_is_not_reported_for_a_guest_that_has_died() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut scene = Scene::new(&binary)?;
    scene.command()?.finish(LIMIT)?.success()?;
    scene.at_b.kill()?;
    failed(scene.command()?.finish(LIMIT)?)?;
    ensure!(scene.at_a.qmp.query_status()? == "postmigrate");
    scene.restart_b()?;
    failed(scene.command()?.finish(LIMIT)?)?;
    ensure!(scene.at_a.qmp.query_status()? == "postmigrate");
    Ok(())
}

/// The destination continues the guest and dies; its answer to the commit is lost. The next answer is not that it runs.
#[test]
fn an_answer_that_was_true_is_not_given_again() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut scene = Scene::new(&binary)?;
    scene.gate.rule(COMMIT, Fate::AnswerLost);
    let migration = scene.command()?;
    scene.at_b.qmp.wait_status("running", LIMIT)?;
    scene.gate.rule(COMMIT, Fate::Held);
    scene.gate.wait_until_held()?;
    scene.at_b.kill()?;
    scene.gate.release(Fate::Passes);
    failed(migration.finish(LIMIT)?)?;
    // It has run there.
    ensure!(scene.at_a.qmp.query_status()? == "postmigrate");
    Ok(())
}

/// Two guests without a uuid, both between the source's end and the commit. A command for the one that names the other's
/// QEMU by mistake does not continue the other.
#[test]
fn a_wrong_name_does_not_continue_the_guest_of_another() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut scene = Scene::new(&binary)?;
    scene.kill_before_the_commit()?;
    let (mut other_at_a, mut other_at_b) = (guest(&binary)?, waiting(&binary)?);
    scene.b.knows("other", &other_at_b)?;
    let other_gate = Gate::start(&scene.b.address)?;
    other_gate.rule(COMMIT, Fate::Held);
    let other = migrate(&other_at_a.qmp_socket(), &other_gate.address, "other", &[])?;
    other_gate.wait_until_held()?;
    other_at_a.qmp.wait_status("postmigrate", LIMIT)?;
    other_at_b.qmp.wait_migration(&["completed"], LIMIT)?;

    let (monitor, to) = (scene.at_a.qmp_socket(), &scene.gate.address);
    let wrong = migrate(&monitor, to, "other", &[])?.finish(LIMIT)?;
    let state = other_at_b.qmp.query_status()?;
    ensure!(
        state == "paused",
        "the guest of another is {state}; migrate said:\n{}",
        wrong.stderr
    );
    failed(wrong)?;
    ensure!(scene.at_a.qmp.query_status()? == "postmigrate");

    // Nothing is spoilt: both can still be finished.
    other_gate.release(Fate::Passes);
    other.finish(LIMIT)?.success()?;
    other_at_b.qmp.wait_status("running", LIMIT)?;
    scene.command()?.finish(LIMIT)?.success()?;
    scene.at_b.qmp.wait_status("running", LIMIT)
}

/// B has loaded the guest when the network is cut, and A runs on. B's copy grows old; the guest moves to C. The old command does
/// not continue the copy.
#[test]
fn an_old_copy_is_not_continued() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut scene = Scene::new(&binary)?;
    let c = Host::start(&[])?;
    let mut at_c = waiting(&binary)?;
    c.knows("vm", &at_c)?;
    let first = scene.up_to_loaded()?;
    scene.gate.close();
    first.finish(LIMIT)?.failure(" here.")?;
    scene.at_a.qmp.wait_status("running", LIMIT)?;
    c.migrate(&scene.at_a, "vm", &[])?
        .finish(LIMIT)?
        .success()?;

    scene.gate.open();
    let again = scene.command()?.finish(LIMIT)?;
    let b_runs = scene
        .at_b
        .qmp
        .query_status()
        .is_ok_and(|state| state == "running");
    ensure!(
        !b_runs,
        "an old copy runs at B; migrate said:\n{}",
        again.stderr
    );
    expect_runs_only("C", [("A", &mut scene.at_a), ("C", &mut at_c)])?;
    again.failure(&c.address)?;
    Ok(())
}

/// The source's QEMU dies when the destination has everything: the only guest that is left resumes there.
#[test]
fn a_complete_guest_is_continued_when_the_source_has_died() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut scene = Scene::new(&binary)?;
    let migration = scene.up_to_loaded()?;
    scene.at_a.kill()?;
    scene.gate.release(Fate::Passes);
    let ended = migration.finish(LIMIT)?;
    scene
        .at_b
        .qmp
        .wait_status("running", LIMIT)
        .with_context(|| format!("migrate said:\n{}", ended.stderr))?;
    ended.success()?;
    ram::compare(scene.at_a.ram(), scene.at_b.ram())?;
    Ok(())
}

/// As before, a moment later: the source has reported that it is done.
#[test]
fn a_commit_reaches_the_destination_when_the_source_has_died() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut scene = Scene::new(&binary)?;
    let migration = scene.up_to_the_commit()?;
    scene.at_a.kill()?;
    scene.gate.release(Fate::CutBefore);
    migration.finish(LIMIT)?.success()?;
    scene.at_b.qmp.wait_status("running", LIMIT)?;
    ram::compare(scene.at_a.ram(), scene.at_b.ram())?;
    Ok(())
}

/// A guest that its owner has paused does not start because the command had to be run twice.
#[test]
fn a_paused_guest_stays_paused() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut scene = Scene::new(&binary)?;
    scene.at_a.qmp.stop()?;
    scene.kill_before_the_commit()?;
    scene.command()?.finish(LIMIT)?.success()?;
    let state = scene.at_b.qmp.query_status()?;
    ensure!(
        state == "paused",
        "a paused guest is {state} when it has moved"
    );
    Ok(())
}

/// The source's QEMU is too busy to answer for longer than anybody waits. It answers late, and its guest has been there all
/// the time.
#[test]
fn a_monitor_that_is_late_is_not_a_guest_that_is_lost() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let b = Host::start(&[])?;
    let (mut at_a, mut at_b) = (guest(&binary)?, waiting(&binary)?);
    b.knows("vm", &at_b)?;
    let monitor = SilentMonitor::before(&at_a.qmp_socket())?;
    let migration = migrate(&monitor.path(), &b.address, "vm", &SLOW)?;
    migration.wait_for("active", LIMIT)?;
    monitor.fall_silent_at("query-migrate");
    monitor.wait_until_it_talks()?;
    migration.signal(Signal::INT)?;
    migration.finish(LIMIT)?.failure(" here.")?;
    at_a.qmp.wait_status("running", LIMIT)?;
    at_b.wait_exit(LIMIT)?;
    Ok(())
}

/// The destination has announced the guest to the network before it ends. The source announces it here again.
#[test]
fn a_guest_that_stays_is_announced() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let wires = TempDir::new()?;
    let wire_of_a = UnixListener::bind(wires.path().join("a"))?;
    let _wire_of_b = UnixListener::bind(wires.path().join("b"))?;
    let machine = |wire| {
        let wire = wires.path().join(wire);
        [
            "-machine".to_owned(),
            "pc".to_owned(),
            "-netdev".to_owned(),
            format!("stream,id=wire,addr.type=unix,addr.path={}", wire.display()),
            "-device".to_owned(),
            "e1000,netdev=wire,romfile=".to_owned(),
        ]
        .into_iter()
        .fold(Builder::bare(&binary, 16 * MIB), Builder::argument)
    };
    let b = Host::start(&[])?;
    let gate = Gate::start(&b.address)?;
    let mut at_a = machine("a").start()?;
    let (wire, _) = wire_of_a.accept()?;
    at_a.qmp.cont()?;
    let mut at_b = machine("b").incoming().start()?;
    b.knows("vm", &at_b)?;
    gate.rule(COMMIT, Fate::Held);
    let migration = migrate(&at_a.qmp_socket(), &gate.address, "vm", &[])?;
    gate.wait_until_held()?;
    at_b.kill()?;
    gate.release(Fate::Passes);
    migration.finish(LIMIT)?.failure(" here.")?;
    at_a.qmp.wait_status("running", LIMIT)?;
    wait_for_announcement(&wire).context("nobody was told where the guest is")
}

/// Reads frames, each behind its length, until one comes with which QEMU announces a guest: a RARP.
fn wait_for_announcement(mut wire: &UnixStream) -> Result<()> {
    wire.set_read_timeout(Some(LIMIT))?;
    loop {
        let mut length = [0; 4];
        wire.read_exact(&mut length)?;
        let mut frame = vec![0; u32::from_be_bytes(length).try_into()?];
        wire.read_exact(&mut frame)?;
        if frame.get(12..14) == Some(&[0x80, 0x35]) {
            return Ok(());
        }
    }
}

/// The destination's QEMU stops when the source waits for nothing but its word. The guest does not wait with it.
#[test]
fn a_destination_that_hangs_at_the_switchover() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let b = Host::start(&[])?;
    let gate = Gate::start(&b.address)?;
    // Nothing but zeros: all of it fits into the sockets on the way.
    let machine = Builder::bare(&binary, MIB);
    let mut at_a = machine.start()?;
    at_a.qmp.cont()?;
    let mut at_b = machine.incoming().start()?;
    b.knows("vm", &at_b)?;
    at_a.qmp.take_events();
    gate.rule(Message::MainStream, Fate::Held);
    let options = ["--downtime-max", "2"];
    let migration = migrate(&at_a.qmp_socket(), &gate.address, "vm", &options)?;
    gate.wait_until_held()?;
    signal(&at_b, Signal::STOP)?;
    gate.release(Fate::Passes);
    at_a.qmp.wait_event("STOP", |_| true, LIMIT)?;
    at_a.qmp
        .wait_event("RESUME", |_| true, LIMIT)
        .context("the guest stays paused at the source")?;
    migration.finish(LIMIT)?.failure(" here.")?;
    ensure!(at_a.qmp.query_status()? == "running");
    at_b.wait_exit(LIMIT)?;
    Ok(())
}

/// The destination's QEMU hangs, and its process has another name than QEMU's: it is ended all the same when the migration has
/// failed.
#[test]
fn a_destination_by_another_name_is_ended() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let b = Host::start(&[])?;
    let mut at_a = guest(&binary)?;
    let mut at_b = Builder::bare(&binary, RAM)
        .argument("-name")
        .argument("web1,process=web1")
        .incoming()
        .start()?;
    let name = fs::read_to_string(format!("/proc/{}/comm", at_b.pid()))?;
    ensure!(name == "web1\n", "{name}");
    b.knows("vm", &at_b)?;
    let migration = b.migrate(&at_a, "vm", &SLOW)?;
    migration.wait_for("active", LIMIT)?;
    at_b.qmp.wait_migration(&["active"], LIMIT)?;
    signal(&at_b, Signal::STOP)?;
    migration.signal(Signal::INT)?;
    migration.finish(LIMIT)?.failure(" here.")?;
    at_a.qmp.wait_status("running", LIMIT)?;
    at_b.wait_exit(LIMIT)?;
    Ok(())
}
