//! The worst moment for a cut: the source has stopped for good, and the destination has not been
//! continued. The guest may be late, but it must run once.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use crate::common::{
    Host, LIMIT, MIB, bare_pair,
    gate::{Fate, Gate, Message},
    migrate,
};
use anyhow::{Context as _, Result, ensure};
use lab::{
    qemu::{self, Binary, Qemu},
    ram,
    vamoose::Vamoose,
};
use rustix::process::Signal;

/// A guest that has left the source and has not been continued at the destination.
struct Scene {
    host: Host,
    gate: Gate,
    source: Qemu,
    destination: Qemu,
    migration: Vamoose,
}

impl Scene {
    fn start(binary: &Binary) -> Result<Self> {
        let mut scene = Self::hold(binary, Message::Request("commit"))?;
        ensure!(scene.destination.qmp.query_status()? == "paused");
        Ok(scene)
    }

    fn hold(binary: &Binary, message: Message) -> Result<Self> {
        let host = Host::start(&[])?;
        let gate = Gate::start(&host.address)?;
        let (mut source, mut destination) = bare_pair(binary, binary, 16 * MIB)?;
        source.qmp.cont()?;
        host.knows("vm", &destination)?;
        gate.rule(message, Fate::Held);
        let migration = migrate(&source.qmp_socket(), &gate.address, "vm", &[])?;
        gate.wait_until_held().with_context(|| {
            let (here, there) = (migration.stderr(), host.server.stderr());
            format!("migrate:\n{here}\nserve:\n{there}")
        })?;
        source.qmp.wait_status("postmigrate", LIMIT)?;
        destination.qmp.wait_migration(&["completed"], LIMIT)?;
        Ok(Self {
            host,
            gate,
            source,
            destination,
            migration,
        })
    }

    /// The guest runs at the destination and is stopped at the source.
    fn expect_moved(mut self) -> Result<()> {
        let said = |host: &Host| host.server.stderr();
        self.migration
            .finish(LIMIT)?
            .success()
            .with_context(|| format!("server:\n{}", said(&self.host)))?;
        self.destination.qmp.wait_status("running", LIMIT)?;
        self.source.qmp.wait_status("postmigrate", LIMIT)?;
        ram::compare(self.source.ram(), self.destination.ram())?;
        Ok(())
    }
}

#[test]
fn a_commit_that_is_late() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let scene = Scene::start(&binary)?;
    scene.gate.release(Fate::Passes);
    scene.expect_moved()
}

#[test]
fn a_cut_commit_is_sent_again() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let scene = Scene::start(&binary)?;
    scene.gate.release(Fate::CutBefore);
    scene.migration.wait_for("asking the server again", LIMIT)?;
    scene.expect_moved()
}

#[test]
fn a_commit_whose_connection_is_cut_behind_it() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let scene = Scene::start(&binary)?;
    scene.gate.release(Fate::CutAfter);
    scene.migration.wait_for("asking the server again", LIMIT)?;
    scene.expect_moved()
}

/// What is under way finishes, what is new is refused with the reason.
#[test]
fn a_server_that_is_told_to_end_meanwhile() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let Scene {
        host,
        gate,
        mut source,
        mut destination,
        migration,
    } = Scene::start(&binary)?;
    host.server.signal(Signal::TERM)?;
    host.server.wait_for("no further migrations", LIMIT)?;
    let (mut stays, waiting) = bare_pair(&binary, &binary, 16 * MIB)?;
    stays.qmp.cont()?;
    host.knows("late", &waiting)?;
    host.migrate(&stays, "late", &[])?
        .finish(LIMIT)?
        .failure("this server is about to end")?;
    ensure!(stays.qmp.query_status()? == "running");
    gate.release(Fate::Passes);
    migration.finish(LIMIT)?.success()?;
    destination.qmp.wait_status("running", LIMIT)?;
    source.qmp.wait_status("postmigrate", LIMIT)?;
    host.server.finish(LIMIT)?.success()?;
    ram::compare(source.ram(), destination.ram())?;
    Ok(())
}

/// The answer takes longer than `migrate` waits for one.
#[test]
fn an_answer_that_is_late() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let scene = Scene::hold(&binary, Message::Answer("running"))?;
    scene.migration.wait_for("asking the server again", LIMIT)?;
    scene.gate.release(Fate::Passes);
    scene.expect_moved()
}

#[test]
fn an_answer_that_is_cut_is_asked_for_again() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut scene = Scene::start(&binary)?;
    scene.gate.release(Fate::AnswerLost);
    scene.migration.wait_for("asking the server again", LIMIT)?;
    // It runs there although this is not known here.
    scene.destination.qmp.wait_status("running", LIMIT)?;
    scene.expect_moved()
}

/// The server is started anew and knows nothing but the QEMU and what its predecessor wrote down.
#[test]
fn another_server_takes_the_commit() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut scene = Scene::start(&binary)?;
    scene.host.restart()?;
    scene.gate.lead_to(&scene.host.address);
    scene.gate.release(Fate::CutBefore);
    scene.expect_moved()
}

/// `migrate` dies at the worst moment. Neither side runs, neither may be continued by hand; the same
/// command finishes the migration.
#[test]
fn the_same_command_finishes_a_killed_attempt() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut scene = Scene::start(&binary)?;
    scene.migration.signal(Signal::KILL)?;
    scene.gate.release(Fate::CutBefore);
    let again = migrate(&scene.source.qmp_socket(), &scene.gate.address, "vm", &[])?;
    let killed = std::mem::replace(&mut scene.migration, again);
    ensure!(!killed.finish(LIMIT)?.status.success());
    scene.expect_moved()
}

/// The destination's QEMU dies before it could run: the guest resumes at the source.
#[test]
fn a_destination_that_dies_before_the_commit() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut scene = Scene::start(&binary)?;
    scene.destination.kill()?;
    scene.gate.release(Fate::Passes);
    let ended = scene.migration.finish(LIMIT)?;
    ended.failure(" here.")?;
    scene.source.qmp.wait_status("running", LIMIT)?;
    Ok(())
}

/// The destination's QEMU has been told to go on, and ends while no server runs: the guest may have run. The next server says
/// so instead of being unable to tell for ever.
#[test]
fn a_destination_that_dies_between_two_servers() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut scene = Scene::start(&binary)?;
    // It does not answer the server.
    scene.destination.process().signal(Signal::STOP);
    scene.gate.release(Fate::Passes);
    wait_until_written(&scene.host, "\"starting\"")?;
    scene.host.server.kill()?;
    scene.destination.kill()?;
    scene.host.restart()?;
    scene.gate.lead_to(&scene.host.address);
    scene.gate.release(Fate::CutBefore);
    let ended = scene.migration.finish(LIMIT)?;
    ended.failure("the guest has ended")?;
    ensure!(scene.source.qmp.query_status()? == "postmigrate");
    Ok(())
}

/// Waits until the host has a record with this text.
fn wait_until_written(host: &Host, text: &str) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    loop {
        for entry in fs::read_dir(host.state_dir())? {
            let path = entry?.path();
            // One that is being written has another name: it may never become a record.
            let is_record = path.extension().is_some_and(|it| it == "json");
            if is_record && fs::read_to_string(path).is_ok_and(|record| record.contains(text)) {
                return Ok(());
            }
        }
        ensure!(Instant::now() < deadline, "no record has {text}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Ctrl-C at this point comes too late.
#[test]
fn a_cancel_that_comes_too_late() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let scene = Scene::start(&binary)?;
    scene.migration.signal(Signal::INT)?;
    scene.gate.release(Fate::Passes);
    scene.expect_moved()
}
