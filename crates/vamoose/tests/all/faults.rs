//! Everything that can be killed, cut or cancelled in the middle of a migration between stock QEMUs: the
//! guest runs on at the source, nothing is left behind, and the next migration works.

use std::{process::Command, time::Duration};

use crate::common::{
    Host, LIMIT, MIB, bare_pair, expect_equal, incoming, listen_address, set_up, vamoose,
};
use anyhow::{Context as _, Result, ensure};
use lab::{
    qemu::{self, Binary, Builder, Qemu},
    ram::{self, Fill},
    vamoose::Vamoose,
};
use rustix::process::{Pid, Signal, kill_process};

/// Slow enough for a migration of [`RAM`] never to end by itself within a test.
const SLOW: [&str; 4] = ["--max-bandwidth", "64k", "--stall-timeout", "3"];
const RAM: u64 = 32 * MIB;

/// A running guest in the middle of a migration through a pair of relays.
struct Scene {
    source: Qemu,
    destination: Qemu,
    near: Vamoose,
    far: Vamoose,
}

impl Scene {
    fn start(binary: &Binary) -> Result<Self> {
        let (mut source, mut destination) = bare_pair(binary, binary, RAM)?;
        source.qmp.cont()?;
        set_up(&mut destination, 2, "none")?;
        let connect = incoming(&mut destination, false)?;
        let listen = listen_address(&destination, "far", true);
        let (far, between) = Vamoose::relay(vamoose(), &listen, &connect, &[])?;
        let listen = listen_address(&source, "out", false);
        let options = [&["--method", "zstd"][..], &SLOW].concat();
        let (near, address) = Vamoose::relay(vamoose(), &listen, &between, &options)?;
        set_up(&mut source, 2, "none")?;
        source.qmp.migrate(&address)?;
        source.qmp.wait_migration(&["active"], LIMIT)?;
        // A destination that has not taken all its connections yet waits for the missing ones for
        // ever when their other end dies: QEMU's own affair.
        destination.qmp.wait_migration(&["active"], LIMIT)?;
        Ok(Self {
            source,
            destination,
            near,
            far,
        })
    }

    /// The guest must run at the source, and must be able to move again.
    fn expect_recovery(mut self, binary: &Binary, [near, far]: [bool; 2]) -> Result<()> {
        self.source
            .qmp
            .wait_migration(&["failed", "cancelled"], LIMIT)?;
        self.source.qmp.wait_status("running", LIMIT)?;
        // The process that was not killed ends by itself, and reports that it failed.
        if near {
            self.near.finish(LIMIT)?.failure("vamoose: ")?;
        }
        if far {
            self.far.finish(LIMIT)?.failure("vamoose: ")?;
        }
        // The destination's QEMU ends, but for one that waits for a SYNC of channels that are gone:
        // it must be killed, as `serve` does, and is at the end of this test.
        migrate_again(&mut self.source, binary)
    }
}

fn migrate_again(source: &mut Qemu, binary: &Binary) -> Result<()> {
    source.qmp.wait_idle(LIMIT)?;
    let mut destination = Builder::bare(binary, RAM).incoming().start()?;
    set_up(&mut destination, 2, "zstd")?;
    let connect = incoming(&mut destination, false)?;
    let listen = listen_address(source, "again", false);
    let options = ["--method", "zstd"];
    let (relay, address) = Vamoose::relay(vamoose(), &listen, &connect, &options)?;
    set_up(source, 2, "none")?;
    source.qmp.take_events();
    source.qmp.migrate(&address)?;
    expect_equal(source, &mut destination, &[&relay])?;
    relay.finish(LIMIT)?.success()?;
    Ok(())
}

fn kill(pid: u32) -> Result<()> {
    signal(pid, Signal::KILL)
}

fn signal(pid: u32, signal: Signal) -> Result<()> {
    let pid = Pid::from_raw(i32::try_from(pid)?).context("not a process")?;
    Ok(kill_process(pid, signal)?)
}

/// Does `harm` in the middle of a migration and expects the guest to recover; `survivors` are the
/// relays, A and B, that are still there to end by themselves.
fn recovers(
    binary: Option<Binary>,
    harm: impl FnOnce(&mut Scene) -> Result<()>,
    survivors: [bool; 2],
) -> Result<()> {
    let Some(binary) = binary else {
        return Ok(());
    };
    let mut scene = Scene::start(&binary)?;
    harm(&mut scene)?;
    scene.expect_recovery(&binary, survivors)
}

#[test]
fn cancel_at_the_source() -> Result<()> {
    let harm = |scene: &mut Scene| scene.source.qmp.migrate_cancel();
    recovers(qemu::newest_or_skip()?, harm, [true, true])
}

#[test]
fn relay_a_killed() -> Result<()> {
    let harm = |scene: &mut Scene| kill(scene.near.pid());
    recovers(qemu::newest_or_skip()?, harm, [false, true])
}

#[test]
fn relay_b_killed() -> Result<()> {
    let harm = |scene: &mut Scene| kill(scene.far.pid());
    recovers(qemu::newest_or_skip()?, harm, [true, false])
}

#[test]
fn destination_killed() -> Result<()> {
    let harm = |scene: &mut Scene| kill(scene.destination.pid());
    recovers(qemu::newest_or_skip()?, harm, [true, true])
}

#[test]
fn an_old_destination_killed() -> Result<()> {
    let harm = |scene: &mut Scene| kill(scene.destination.pid());
    recovers(qemu::find_or_skip(7, 2)?, harm, [true, true])
}

/// The guest is lost with its QEMU, but the relays end.
#[test]
fn source_killed() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let scene = Scene::start(&binary)?;
    kill(scene.source.pid())?;
    scene.near.finish(LIMIT)?.failure("vamoose: ")?;
    scene.far.finish(LIMIT)?.failure("vamoose: ")?;
    Ok(())
}

/// A relay that hangs without ending its connections, as behind a network that was cut.
#[test]
fn relay_b_hangs() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let (mut source, mut destination) = bare_pair(&binary, &binary, RAM)?;
    source.qmp.cont()?;
    set_up(&mut destination, 2, "none")?;
    let connect = incoming(&mut destination, false)?;
    let (far, between) = Vamoose::relay(vamoose(), "tcp:127.0.0.1:0", &connect, &[])?;
    let listen = listen_address(&source, "out", false);
    let options = ["--stall-timeout", "1", "--max-bandwidth", "1M"];
    let (near, address) = Vamoose::relay(vamoose(), &listen, &between, &options)?;
    set_up(&mut source, 2, "none")?;
    source.qmp.migrate(&address)?;
    far.wait_for("relaying a multifd migration", LIMIT)?;
    signal(far.pid(), Signal::STOP)?;
    // Once the sockets' buffers are full nothing moves.
    near.finish(LIMIT)?.failure("vamoose: ")?;
    source.qmp.wait_migration(&["failed"], LIMIT)?;
    source.qmp.wait_status("running", LIMIT)?;
    kill(far.pid())?;
    migrate_again(&mut source, &binary)
}

/// A guest whose relay has nowhere to go stays where it is.
#[test]
fn no_server_at_the_destination() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut source = Builder::bare(&binary, RAM)
        .content(Fill::Mixed, 1)
        .start()?;
    source.qmp.cont()?;
    let listen = listen_address(&source, "out", false);
    let (relay, address) = Vamoose::relay(vamoose(), &listen, "unix:/nowhere.sock", &[])?;
    set_up(&mut source, 2, "none")?;
    source.qmp.migrate(&address)?;
    relay
        .finish(LIMIT)?
        .failure("cannot connect to unix:/nowhere.sock")?;
    source.qmp.wait_migration(&["failed"], LIMIT)?;
    source.qmp.wait_status("running", LIMIT)?;
    migrate_again(&mut source, &binary)
}

/// A destination that decodes another method than the relay sends ends the migration, not the guest.
#[test]
fn a_destination_set_to_another_method() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let (mut source, mut destination) = bare_pair(&binary, &binary, RAM)?;
    source.qmp.cont()?;
    set_up(&mut destination, 2, "zlib")?;
    let connect = incoming(&mut destination, false)?;
    let listen = listen_address(&source, "out", false);
    let options = ["--method", "zstd"];
    let (relay, address) = Vamoose::relay(vamoose(), &listen, &connect, &options)?;
    set_up(&mut source, 2, "none")?;
    source.qmp.migrate(&address)?;
    relay.finish(LIMIT)?.failure("destination")?;
    source.qmp.wait_migration(&["failed"], LIMIT)?;
    source.qmp.wait_status("running", LIMIT)?;
    migrate_again(&mut source, &binary)
}

/// A migration driven by `migrate` through a server, in its middle.
struct Driven {
    host: Host,
    source: Qemu,
    destination: Qemu,
    migration: Vamoose,
}

impl Driven {
    fn start(binary: &Binary) -> Result<Self> {
        Self::start_at(binary, &["--stall-timeout", "3"])
    }

    fn start_at(binary: &Binary, server_options: &[&str]) -> Result<Self> {
        let host = Host::start(server_options)?;
        let (mut source, mut destination) = bare_pair(binary, binary, RAM)?;
        source.qmp.cont()?;
        host.knows("vm", &destination)?;
        let migration = host.migrate(&source, "vm", &SLOW)?;
        migration.wait_for("active", LIMIT)?;
        destination.qmp.wait_migration(&["active"], LIMIT)?;
        Ok(Self {
            host,
            source,
            destination,
            migration,
        })
    }
}

/// Does `harm` in the middle of a migration that `migrate` drives, and expects the guest to recover.
fn migrate_recovers(harm: impl FnOnce(&mut Driven) -> Result<()>) -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut driven = Driven::start(&binary)?;
    harm(&mut driven)?;
    let ended = driven.migration.finish(LIMIT)?;
    ended.failure(" here.")?;
    driven.source.qmp.wait_status("running", LIMIT)?;
    if !driven.host.server.has_ended()? {
        driven.destination.wait_exit(LIMIT)?;
    }
    migrate_again(&mut driven.source, &binary)
}

#[test]
fn serve_killed() -> Result<()> {
    migrate_recovers(|driven| driven.host.server.signal(Signal::KILL))
}

#[test]
fn serve_told_to_stop_twice() -> Result<()> {
    migrate_recovers(|driven| {
        let server = &driven.host.server;
        server.signal(Signal::TERM)?;
        server.wait_for("no further migrations", LIMIT)?;
        server.signal(Signal::TERM)?;
        server.wait_for("stopping", LIMIT).map(drop)
    })
}

#[test]
fn serve_told_to_stop_at_once() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let driven = Driven::start_at(&binary, &["--drain-timeout", "0"])?;
    driven.host.server.signal(Signal::TERM)?;
    let ended = driven.migration.finish(LIMIT)?;
    ended.failure(" here.")?;
    driven.host.server.finish(LIMIT)?.success().map(drop)
}

#[test]
fn destination_of_a_server_killed() -> Result<()> {
    migrate_recovers(|driven| kill(driven.destination.pid()))
}

#[test]
fn migrate_killed() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut driven = Driven::start(&binary)?;
    driven.migration.signal(Signal::KILL)?;
    driven.source.qmp.wait_migration(&["failed"], LIMIT)?;
    driven.source.qmp.wait_status("running", LIMIT)?;
    driven.destination.wait_exit(LIMIT)?;
    // The same server takes the next one, also by the same name.
    let second = Builder::bare(&binary, RAM).incoming().start()?;
    driven.host.forgets("vm")?;
    driven.host.knows("vm", &second)?;
    driven
        .host
        .migrate(&driven.source, "vm", &[])?
        .finish(LIMIT)?
        .success()?;
    ram::compare(driven.source.ram(), second.ram())?;
    Ok(())
}

/// A destination that waits for a SYNC reacts to neither a cancel nor its monitor: the server ends it.
#[test]
fn a_destination_that_waits_for_a_sync() -> Result<()> {
    for binary in qemu::available() {
        let host = Host::start(&[])?;
        let machine = Builder::bare(binary, 2 * MIB);
        let mut source = machine.clone().content(Fill::Random, 1).start()?;
        source.qmp.cont()?;
        let mut destination = machine.incoming().start()?;
        host.knows("vm", &destination)?;
        // All of it fits into the relays, so the end of the round is at the destination long before
        // the pages are. The guest stands still meanwhile, longer than it may by default.
        let options = ["--max-bandwidth", "32k", "--downtime-max", "100"];
        let migration = host.migrate(&source, "vm", &options)?;
        migration.wait_for("100%", LIMIT)?;
        migration.signal(Signal::INT)?;
        migration.finish(LIMIT)?.failure("Cancelled; ")?;
        destination.wait_exit(LIMIT)?;
        source.qmp.wait_status("running", LIMIT)?;
    }
    Ok(())
}

#[test]
fn source_of_migrate_killed() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut driven = Driven::start(&binary)?;
    kill(driven.source.pid())?;
    let ended = driven.migration.finish(LIMIT)?;
    ended.failure("the source's QEMU has ended")?;
    driven.destination.wait_exit(LIMIT)?;
    Ok(())
}

/// The settings of both QEMUs are as they were, so that a plain migration works afterwards.
#[test]
fn a_failed_migration_puts_settings_back() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let host = Host::start(&[])?;
    let mut source = Builder::bare(&binary, RAM)
        .content(Fill::Mixed, 1)
        .start()?;
    source.qmp.set_capabilities(&[("xbzrle", true)])?;
    let before = settings(&mut source)?;
    let destination = Builder::bare(&binary, RAM).incoming().start()?;
    host.knows("vm", &destination)?;
    let migration = host.migrate(&source, "vm", &SLOW)?;
    migration.wait_for("active", LIMIT)?;
    migration.signal(Signal::INT)?;
    migration.finish(LIMIT)?.failure("Cancelled; ")?;
    ensure!(settings(&mut source)? == before);
    Ok(())
}

fn settings(qemu: &mut Qemu) -> Result<[serde_json::Value; 2]> {
    let mut ask = |command| qemu.qmp.execute(command, serde_json::json!({}));
    Ok([
        ask("query-migrate-capabilities")?,
        ask("query-migrate-parameters")?,
    ])
}

/// Nothing that `vamoose relay` opened is there when it has ended.
#[test]
fn no_socket_is_left_behind() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let source = Builder::bare(&binary, RAM).start()?;
    let listen = listen_address(&source, "out", false);
    let (relay, _) = Vamoose::relay(vamoose(), &listen, "unix:/nowhere", &[])?;
    relay.signal(Signal::KILL)?;
    let ended = relay.finish(Duration::from_secs(20))?;
    ensure!(!ended.status.success());
    // What a killed relay leaves is replaced by the next; one that lives is not.
    let (relay, _) = Vamoose::relay(vamoose(), &listen, "unix:/nowhere", &[])?;
    let mut second = Command::new(vamoose());
    second.args(["relay", "--listen", &listen, "--connect", "unix:/nowhere"]);
    Vamoose::start(&mut second)?
        .finish(LIMIT)?
        .failure("cannot listen")?;
    drop(relay);
    Ok(())
}
