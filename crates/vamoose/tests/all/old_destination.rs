//! A destination QEMU ends by itself when its migration breaks off.
//!
//! Once a destination has read a mark in the main stream, it waits for the SYNCs of all channels and for nothing else, in all
//! versions. So a relay must not send a mark whose SYNCs may never follow. 7.2 has the most marks: one in every section.
//! `VAMOOSE_REPEAT` sets how often each is tried.

use crate::common::{LIMIT, MIB, incoming, listen_address, number, set_up, vamoose};
use anyhow::{Result, ensure};
use lab::{
    qemu::{self, Binary, Builder, Qemu},
    ram::Fill,
    vamoose::Vamoose,
};
use rustix::process::Signal;

const RAM: u64 = 64 * MIB;

/// Migrations through a pair of relays that break off in their middle.
struct Scene {
    source: Qemu,
    destination: Qemu,
    near: Vamoose,
    far: Vamoose,
}

impl Scene {
    fn start(from: &Binary, to: &Binary) -> Result<Self> {
        let mut source = Builder::bare(from, RAM)
            .content(Fill::Random, 1)
            .peer(to.version)
            .start()?;
        source.qmp.cont()?;
        let mut destination = Builder::bare(to, RAM)
            .peer(from.version)
            .incoming()
            .start()?;
        set_up(&mut destination, 2, "none")?;
        let connect = incoming(&mut destination, false)?;
        let (far, between) = Vamoose::relay(vamoose(), "tcp:127.0.0.1:0", &connect, &[])?;
        let listen = listen_address(&source, "out", false);
        let options = ["--max-bandwidth", "10M"];
        let (near, address) = Vamoose::relay(vamoose(), &listen, &between, &options)?;
        set_up(&mut source, 2, "none")?;
        source.qmp.migrate(&address)?;
        // A destination that no connection has reached yet rightly waits on. The source may have sent the first megabytes by then:
        // the sockets' buffers hold them.
        destination.qmp.wait_migration(&["active"], LIMIT)?;
        Ok(Self {
            source,
            destination,
            near,
            far,
        })
    }
}

/// Requires that the destination ends after `harm`, at another moment each time.
fn ends(from: &Binary, to: &Binary, harm: fn(&mut Scene) -> Result<()>) -> Result<()> {
    let repeat = number("VAMOOSE_REPEAT", 3)?;
    let mut ended = 0;
    for number in 0..repeat {
        let mut scene = Scene::start(from, to)?;
        let moment = (2 + 3 * (number % 10)) * MIB;
        scene.source.qmp.wait_transferred(moment, LIMIT)?;
        harm(&mut scene)?;
        scene
            .source
            .qmp
            .wait_migration(&["failed", "cancelled"], LIMIT)?;
        scene.source.qmp.wait_status("running", LIMIT)?;
        ended += u64::from(scene.destination.wait_exit(LIMIT / 4).is_ok());
    }
    let _ = std::io::Write::write_all(
        &mut std::io::stderr(),
        format!("{ended} of {repeat} destinations ended\n").as_bytes(),
    );
    ensure!(ended == repeat, "{ended} of {repeat} destinations ended");
    Ok(())
}

fn ends_between(
    from: (u32, u32),
    to: (u32, u32),
    harm: fn(&mut Scene) -> Result<()>,
) -> Result<()> {
    match (
        qemu::find_or_skip(from.0, from.1)?,
        qemu::find_or_skip(to.0, to.1)?,
    ) {
        (Some(from), Some(to)) => ends(&from, &to, harm),
        _ => Ok(()),
    }
}

fn cancel(scene: &mut Scene) -> Result<()> {
    scene.source.qmp.migrate_cancel()
}

fn kill_near(scene: &mut Scene) -> Result<()> {
    scene.near.signal(Signal::KILL)
}

fn kill_far(scene: &mut Scene) -> Result<()> {
    scene.far.signal(Signal::KILL)
}

const OLD: (u32, u32) = (7, 2);

#[test]
fn after_a_cancel() -> Result<()> {
    ends_between(OLD, OLD, cancel)
}

#[test]
fn after_a_cancel_of_a_newer_source() -> Result<()> {
    ends_between((10, 0), OLD, cancel)
}

#[test]
fn after_the_near_relay_is_killed() -> Result<()> {
    ends_between(OLD, OLD, kill_near)
}

#[test]
fn after_the_far_relay_is_killed() -> Result<()> {
    ends_between(OLD, OLD, kill_far)
}

#[test]
fn newer_destination_after_the_far_relay_is_killed() -> Result<()> {
    ends_between(OLD, (10, 0), kill_far)?;
    ends_between(OLD, (11, 1), kill_far)
}
