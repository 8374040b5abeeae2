//! Guests with a disk that all hosts reach, between every two versions of QEMU: wherever the guest comes to, it writes on, and in
//! the end every number that it has written is on the disk, none twice, and no QEMU has the image locked.

use crate::common::{
    Host, LIMIT, MIB,
    gate::{Fate, Gate, Message},
    migrate_from,
};
use anyhow::{Context as _, Result, ensure};
use lab::{
    counter::Image,
    qemu::{self, Binary, Qemu},
    ram::{self, Fill},
    vamoose::Vamoose,
    writer::{self, Disk, Ended},
};
use rustix::process::Signal;

/// Much more than sockets and relays hold: else a source believes that all has been sent, and stops its guest to wait for that.
const RAM: u64 = 16 * MIB;
/// Slow enough for a migration of [`RAM`] never to end by itself within a test.
const SLOW: [&str; 2] = ["--max-bandwidth", "16k"];
/// Numbers that the guest writes between two events.
const SOME: u32 = 5;

/// A guest with a disk, and all QEMUs that have, had or were to get it.
struct Scene {
    disk: Disk,
    image: Image,
    /// The guest's QEMU.
    here: Qemu,
    host: Host,
    /// Those that the guest has left: they keep the image open to the end.
    left: Vec<(Host, Qemu)>,
    runs: bool,
    /// No QEMU has sent the guest that loses writes to its memory by itself (docs/qemu.md).
    memory_is_whole: bool,
}

impl Scene {
    /// A guest that has begun to write, and is paused then, if it is not to run.
    fn start(binary: &Binary, runs: bool) -> Result<Self> {
        let disk = Disk::new()?;
        let machine = disk.machine(binary, RAM).content(Fill::Mixed, 1);
        let mut here = machine.start()?;
        let image = writer::wait_begun(&here, LIMIT)?;
        writer::wait_written(&here, SOME, LIMIT)?;
        if !runs {
            here.qmp.stop()?;
        }
        Ok(Self {
            disk,
            image,
            here,
            host: Host::start(&[])?,
            left: Vec::new(),
            runs,
            memory_is_whole: true,
        })
    }

    /// Another host with a QEMU that waits for the guest.
    fn waiting(&self, binary: &Binary) -> Result<(Host, Qemu)> {
        let there = Host::start(&[])?;
        let qemu = self.disk.machine(binary, RAM).incoming().start()?;
        there.knows("vm", &qemu)?;
        Ok((there, qemu))
    }

    fn migrate(&self, to: &str, options: &[&str]) -> Result<Vamoose> {
        let (state, monitor) = (self.host.state_dir(), self.here.qmp_socket());
        migrate_from(&state, &monitor, to, "vm", options)
    }

    /// Moves the guest to another host, where it goes on as it was.
    fn moves_to(&mut self, binary: &Binary) -> Result<()> {
        let (there, qemu) = self.waiting(binary)?;
        self.migrate(&there.address, &[])?
            .finish(LIMIT)?
            .success()
            .with_context(|| format!("serve:\n{}", there.server.stderr()))?;
        self.is_now_at(there, qemu)
    }

    fn is_now_at(&mut self, there: Host, qemu: Qemu) -> Result<()> {
        let mut source = std::mem::replace(&mut self.here, qemu);
        source.qmp.wait_status("postmigrate", LIMIT)?;
        if self.runs {
            self.memory_is_whole &= !source.version.loses_writes();
        } else {
            ensure!(self.here.qmp.query_status()? == "paused");
            ram::compare(source.ram(), self.here.ram())?;
        }
        let host = std::mem::replace(&mut self.host, there);
        self.left.push((host, source));
        self.goes_on()
    }

    /// The guest has stayed, and goes on as it was.
    fn has_stayed(&mut self, migration: Vamoose) -> Result<()> {
        let ended = migration.finish(LIMIT)?;
        ended.failure(" here.")?;
        self.goes_on()
    }

    fn goes_on(&mut self) -> Result<()> {
        if !self.runs {
            return Ok(());
        }
        self.here.qmp.wait_status("running", LIMIT)?;
        writer::wait_written(&self.here, SOME, LIMIT)
    }

    /// The guest writes on, if it was paused too, and all of its disk and its memory is right.
    fn ends_well(mut self) -> Result<()> {
        if !self.runs {
            self.here.qmp.cont()?;
            writer::wait_written(&self.here, SOME, LIMIT)?;
        }
        self.here.qmp.stop()?;
        if self.memory_is_whole {
            self.image.check(self.here.ram())?;
        }
        self.here.kill()?;
        self.disk.check(self.here.ram(), Ended::Stopped)?;
        Ok(())
    }
}

/// Every QEMU with every one; none where there are no disks.
fn pairs_or_skip() -> Result<Vec<(Binary, Binary)>> {
    match writer::available_or_skip()? {
        true => qemu::pairs_or_skip(),
        false => Ok(Vec::new()),
    }
}

/// From a QEMU of this version to each other one, back, and on to a third host, which has the next version.
fn there_and_back_and_on((major, minor): (u32, u32), runs: bool) -> Result<()> {
    let pairs = pairs_or_skip()?;
    let from_here =
        |(from, _): &&(Binary, Binary)| (from.version.major, from.version.minor) == (major, minor);
    let others: Vec<_> = pairs.iter().filter(from_here).collect();
    for (number, (from, to)) in others.iter().enumerate() {
        let (_, third) = others[(number + 1) % others.len()];
        let mut scene = Scene::start(from, runs)?;
        let mut go = || {
            scene.moves_to(to).context("there")?;
            scene.moves_to(from).context("back")?;
            scene.moves_to(third).context("on")
        };
        let context = || format!("{} to {}, then {}", from.version, to.version, third.version);
        go().with_context(context)?;
        scene.ends_well().with_context(context)?;
    }
    Ok(())
}

#[test]
fn a_running_guest_of_7_2() -> Result<()> {
    there_and_back_and_on((7, 2), true)
}

#[test]
fn a_running_guest_of_10_0() -> Result<()> {
    there_and_back_and_on((10, 0), true)
}

#[test]
fn a_running_guest_of_11_1() -> Result<()> {
    there_and_back_and_on((11, 1), true)
}

/// Tries each QEMU as a source with the next one as a destination.
fn each(runs: &[bool], story: impl Fn(&mut Scene, &Binary) -> Result<()>) -> Result<()> {
    let pairs = pairs_or_skip()?;
    let count = pairs.len().isqrt();
    for number in 0..count {
        // The pairs of a source are together.
        let (from, to) = &pairs[number * count + (number + 1) % count];
        for runs in runs {
            let mut scene = Scene::start(from, *runs)?;
            let context = || format!("{} to {}, runs: {runs}", from.version, to.version);
            story(&mut scene, to).with_context(context)?;
            scene
                .moves_to(to)
                .context("the next migration")
                .with_context(context)?;
            scene.ends_well().with_context(context)?;
        }
    }
    Ok(())
}

/// A migration that is cancelled, or whose destination dies, in its middle.
fn breaks_off(
    scene: &mut Scene,
    to: &Binary,
    harm: fn(&Vamoose, &mut Qemu) -> Result<()>,
) -> Result<()> {
    let (there, mut qemu) = scene.waiting(to)?;
    let migration = scene.migrate(&there.address, &SLOW)?;
    migration.wait_for("active", LIMIT)?;
    qemu.qmp.wait_migration(&["active"], LIMIT)?;
    scene.goes_on()?;
    harm(&migration, &mut qemu)?;
    scene.has_stayed(migration)?;
    // What was to become the guest has gone, and the image with it.
    qemu.wait_exit(LIMIT)?;
    Ok(())
}

#[test]
fn a_cancelled_migration() -> Result<()> {
    each(&[true, false], |scene, to| {
        breaks_off(scene, to, |migration, _| migration.signal(Signal::INT))
    })
}

#[test]
fn a_destination_that_is_killed() -> Result<()> {
    each(&[true, false], |scene, to| {
        breaks_off(scene, to, |_, qemu| qemu.kill())
    })
}

/// The source has completed, and its disks are at nobody's: the destination dies before it is given the guest. The guest returns.
fn aborted(scene: &mut Scene, to: &Binary) -> Result<()> {
    let (there, mut qemu) = scene.waiting(to)?;
    let gate = Gate::start(&there.address)?;
    gate.rule(Message::Request("commit"), Fate::Held);
    let migration = scene.migrate(&gate.address, &[])?;
    gate.wait_until_held()?;
    scene.here.qmp.wait_status("postmigrate", LIMIT)?;
    qemu.qmp.wait_migration(&["completed"], LIMIT)?;
    qemu.kill()?;
    gate.release(Fate::Passes);
    scene.has_stayed(migration)?;
    if !scene.runs {
        // QEMU does not send a guest again that has not run since.
        scene.here.qmp.cont()?;
        writer::wait_written(&scene.here, SOME, LIMIT)?;
        scene.here.qmp.stop()?;
    }
    Ok(())
}

#[test]
fn an_aborted_migration() -> Result<()> {
    each(&[true, false], aborted)
}

#[test]
fn a_paused_guest_of_7_2() -> Result<()> {
    there_and_back_and_on((7, 2), false)
}

#[test]
fn a_paused_guest_of_10_0() -> Result<()> {
    there_and_back_and_on((10, 0), false)
}

#[test]
fn a_paused_guest_of_11_1() -> Result<()> {
    there_and_back_and_on((11, 1), false)
}
