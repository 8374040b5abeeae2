//! The worst moment for a cut: the source has stopped for good, and the destination has not been told to
//! go on. The guest may be late, it must never run twice and never nowhere.

mod common;

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread,
};

use anyhow::{Context as _, Result, ensure};
use common::{Host, LIMIT, MIB, bare_pair, migrate};
use lab::{
    qemu::{self, Binary, Qemu},
    ram,
    vamoose::Vamoose,
};
use rustix::process::Signal;

/// Everything between `migrate` and `serve` goes through here; the commit is held back until the test
/// has done its worst.
struct Gate {
    address: String,
    shared: Arc<Shared>,
}

struct Shared {
    server: Mutex<String>,
    commit: Mutex<Commit>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Commit {
    NotSeen,
    Held,
    /// The connection that holds it is cut, later ones go through.
    Cut,
    /// It goes through.
    Released,
    /// It goes through, its answer does not.
    AnswerLost,
}

impl Gate {
    fn start(server: &str) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = format!("tcp:{}", listener.local_addr()?);
        let shared = Arc::new(Shared {
            server: Mutex::new(host_and_port(server)),
            commit: Mutex::new(Commit::NotSeen),
            changed: Condvar::new(),
        });
        thread::spawn({
            let shared = shared.clone();
            // Ends with the test's process.
            move || {
                for near in listener.incoming().flatten() {
                    let shared = shared.clone();
                    thread::spawn(move || pass(&near, &shared));
                }
            }
        });
        Ok(Self { address, shared })
    }

    fn wait_until_held(&self) -> Result<()> {
        let commit = self
            .shared
            .commit
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let (commit, _) = self
            .shared
            .changed
            .wait_timeout_while(commit, LIMIT, |commit| *commit == Commit::NotSeen)
            .unwrap_or_else(PoisonError::into_inner);
        ensure!(*commit == Commit::Held, "the commit is {commit:?}");
        Ok(())
    }

    fn set(&self, to: Commit) {
        *self
            .shared
            .commit
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = to;
        self.shared.changed.notify_all();
    }

    /// Leads to another server from now on.
    fn lead_to(&self, server: &str) {
        *self
            .shared
            .server
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = host_and_port(server);
    }
}

fn host_and_port(address: &str) -> String {
    address.trim_start_matches("tcp:").to_owned()
}

fn pass(near: &TcpStream, shared: &Shared) {
    let server = shared
        .server
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone();
    let Ok(far) = TcpStream::connect(server) else {
        return;
    };
    thread::scope(|scope| {
        scope.spawn(|| copy(near, &far, |piece| hold_commit(piece, shared)));
        copy(&far, near, |_| {
            let commit = shared.commit.lock().unwrap_or_else(PoisonError::into_inner);
            // Only control connections have anything to say after the commit.
            *commit != Commit::AnswerLost
        });
    });
}

/// Holds a piece with a commit back until it is decided; false to cut the connection.
fn hold_commit(piece: &[u8], shared: &Shared) -> bool {
    let request = b"\"request\":\"commit\"";
    if !piece.windows(request.len()).any(|window| window == request) {
        return true;
    }
    let mut commit = shared.commit.lock().unwrap_or_else(PoisonError::into_inner);
    if *commit == Commit::NotSeen {
        *commit = Commit::Held;
        shared.changed.notify_all();
        commit = shared
            .changed
            .wait_while(commit, |commit| *commit == Commit::Held)
            .unwrap_or_else(PoisonError::into_inner);
        return *commit != Commit::Cut;
    }
    true
}

fn copy(mut from: &TcpStream, mut to: &TcpStream, mut pass: impl FnMut(&[u8]) -> bool) {
    let mut buffer = [0; 64 * 1024];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => {
                if !pass(&buffer[..read]) || to.write_all(&buffer[..read]).is_err() {
                    // Both ends see it, whatever the other direction does.
                    let _ = from.shutdown(Shutdown::Both);
                    break;
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    // The peer may be gone already.
    let _ = to.shutdown(Shutdown::Both);
}

/// A guest that has left the source and has not been told to go on at the destination.
struct Scene {
    host: Host,
    gate: Gate,
    source: Qemu,
    destination: Qemu,
    migration: Vamoose,
}

impl Scene {
    fn start(binary: &Binary) -> Result<Self> {
        let host = Host::start(&[])?;
        let gate = Gate::start(&host.address)?;
        let (mut source, mut destination) = bare_pair(binary, binary, 16 * MIB)?;
        source.qmp.cont()?;
        host.knows("vm", &destination)?;
        let migration = migrate(&source.qmp_socket(), &gate.address, "vm", &[])?;
        gate.wait_until_held()?;
        source.qmp.wait_status("postmigrate", LIMIT)?;
        destination.qmp.wait_migration(&["completed"], LIMIT)?;
        ensure!(destination.qmp.query_status()? == "paused");
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
    scene.gate.set(Commit::Released);
    scene.expect_moved()
}

#[test]
fn a_commit_that_is_cut_is_said_again() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let scene = Scene::start(&binary)?;
    scene.gate.set(Commit::Cut);
    scene.migration.wait_for("asking the server again", LIMIT)?;
    scene.expect_moved()
}

#[test]
fn an_answer_that_is_cut_is_asked_for_again() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut scene = Scene::start(&binary)?;
    scene.gate.set(Commit::AnswerLost);
    scene.migration.wait_for("asking the server again", LIMIT)?;
    // It runs there although nobody knows here.
    scene.destination.qmp.wait_status("running", LIMIT)?;
    scene.gate.set(Commit::Released);
    scene.expect_moved()
}

/// The server is started anew and knows nothing but the QEMU.
#[test]
fn another_server_takes_the_commit() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut scene = Scene::start(&binary)?;
    scene.host.server.signal(Signal::KILL)?;
    let again = Host::start(&[])?;
    again.knows("vm", &scene.destination)?;
    scene.gate.lead_to(&again.address);
    scene.gate.set(Commit::Cut);
    scene.host = again;
    scene.expect_moved()
}

/// `migrate` dies at the worst moment. Neither side runs, neither may be continued by hand; the same
/// command finishes the migration.
#[test]
fn the_same_command_finishes_what_was_killed() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut scene = Scene::start(&binary)?;
    scene.migration.signal(Signal::KILL)?;
    scene.gate.set(Commit::Cut);
    let again = migrate(&scene.source.qmp_socket(), &scene.host.address, "vm", &[])?;
    let killed = std::mem::replace(&mut scene.migration, again);
    ensure!(!killed.finish(LIMIT)?.status.success());
    scene.expect_moved()
}

/// The destination's QEMU dies before it could run: the guest goes on at the source.
#[test]
fn a_destination_that_dies_before_the_commit() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut scene = Scene::start(&binary)?;
    scene.destination.kill()?;
    scene.gate.set(Commit::Released);
    let ended = scene.migration.finish(LIMIT)?;
    ended.failure("the guest stays at the source")?;
    scene.source.qmp.wait_status("running", LIMIT)?;
    Ok(())
}

/// Ctrl-C at this point comes too late.
#[test]
fn a_cancel_that_comes_too_late() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let scene = Scene::start(&binary)?;
    scene.migration.signal(Signal::INT)?;
    scene.gate.set(Commit::Released);
    scene.expect_moved()
}
