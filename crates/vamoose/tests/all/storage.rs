//! Guests whose disks are copied to another host along with their memory: wherever the guest ends up, its disk has every number that
//! it has written, and the copy on which it went on is the only one that counts.

use std::{
    fs::{self, File},
    io::Read as _,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use lab::{
    qemu::{self, Binary, Builder, Qemu},
    ram::Fill,
    vamoose::Vamoose,
    writer::{self, Disk, Ended},
};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::common::{
    Host, LIMIT, MIB,
    gate::{Fate, Gate, Message},
    migrate_from,
};

const RAM: u64 = 16 * MIB;
/// Slow enough for a copy of [`DATA`], and for a migration of [`RAM`], never to end by itself within a test.
const SLOW: [&str; 2] = ["--max-bandwidth", "16k"];
/// Bytes of the second disk, which the guest does not use.
const DATA: u64 = 4 * MIB;
/// Numbers that the guest writes between two events.
const SOME: u32 = 5;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Qcow2,
    Raw,
    /// An overlay on a backing file that both hosts have.
    Overlay,
}

/// The disks of a guest on one host.
struct Disks {
    kind: Kind,
    /// The guest's content; the image itself if that is of its format.
    disk: Disk,
    data: PathBuf,
    /// Nothing can be written to the data.
    is_full: bool,
}

impl Disks {
    /// At the source: with a guest and random data.
    fn full(kind: Kind) -> Result<Self> {
        let disk = Disk::new()?;
        let data = disk.folder().join("data");
        let mut random = vec![0; usize::try_from(DATA)?];
        File::open("/dev/urandom")?.read_exact(&mut random)?;
        fs::write(&data, random)?;
        let disks = Self {
            kind,
            disk,
            data,
            is_full: false,
        };
        if kind == Kind::Overlay {
            disks.lay_over(disks.disk.path())?;
        }
        Ok(disks)
    }

    /// At the destination: images of the same sizes with other content, and for an overlay the source's backing file.
    fn empty(source: &Self) -> Result<Self> {
        let disk = Disk::new()?;
        let data = disk.folder().join("data");
        fs::write(&data, vec![0xee; usize::try_from(DATA)?])?;
        let disks = Self {
            kind: source.kind,
            disk,
            data,
            is_full: false,
        };
        match source.kind {
            Kind::Qcow2 => {}
            Kind::Raw => {
                let length = fs::metadata(disks.image())?.len();
                fs::write(disks.image(), vec![0xee; usize::try_from(length)?])?;
            }
            Kind::Overlay => disks.lay_over(source.disk.path())?,
        }
        Ok(disks)
    }

    fn lay_over(&self, base: PathBuf) -> Result<()> {
        let mut create = Command::new("qemu-img");
        create.args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"]);
        qemu_img(create.arg(base).arg(self.image()))
    }

    fn image(&self) -> PathBuf {
        match self.kind {
            Kind::Qcow2 => self.disk.path(),
            Kind::Raw => self.disk.folder().join("raw"),
            Kind::Overlay => self.disk.folder().join("top.qcow2"),
        }
    }

    fn format(&self) -> &'static str {
        match self.kind {
            Kind::Raw => "raw",
            Kind::Qcow2 | Kind::Overlay => "qcow2",
        }
    }

    fn machine(&self, binary: &Binary) -> Builder {
        let (format, image) = (self.format(), self.image());
        let image = format!("format={format},file={}", image.display());
        let data = self.data.display();
        let data = match self.is_full {
            false => format!("format=raw,file={data}"),
            true => format!(
                "driver=raw,file.driver=blkdebug,file.image.driver=file,file.image.filename={data},\
                 file.inject-error.0.event=none,file.inject-error.0.iotype=write,file.inject-error.0.errno=28"
            ),
        };
        let mut machine = Builder::bios(binary, RAM);
        for (id, image, more) in [("disk", image, ",bootindex=1"), ("data", data, "")] {
            let drive = format!("if=none,id={id},cache=writethrough,{image}");
            let device = format!("virtio-blk-pci,drive={id}{more}");
            machine = machine.argument("-drive").argument(drive);
            machine = machine.argument("-device").argument(device);
        }
        machine
    }

    /// Every number that the guest has written is on its disk. No QEMU has the images open.
    fn check(&self, ram: &Path) -> Result<()> {
        if self.kind != Kind::Qcow2 {
            let mut convert = Command::new("qemu-img");
            convert.args(["convert", "-f", self.format(), "-O", "qcow2"]);
            qemu_img(convert.arg(self.image()).arg(self.disk.path()))?;
        }
        self.disk.check(ram, Ended::Stopped)?;
        Ok(())
    }

    /// Both have the same content.
    fn equal(&self, other: &Self) -> Result<()> {
        ensure!(fs::read(&self.data)? == fs::read(&other.data)?, "the data");
        let mut compare = Command::new("qemu-img");
        compare.args(["compare", "-f", self.format(), "-F", other.format()]);
        qemu_img(compare.arg(self.image()).arg(other.image()))
    }
}

fn qemu_img(command: &mut Command) -> Result<()> {
    let output = command.output()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = said + &String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "qemu-img: {said}");
    Ok(())
}

/// A guest with disks, and the host that has it.
struct Scene {
    disks: Disks,
    here: Qemu,
    host: Host,
    /// The QEMUs that the guest has left, with their disks.
    left: Vec<(Host, Qemu, Disks)>,
    options: Vec<&'static str>,
}

impl Scene {
    /// A guest that has begun to write.
    fn start(binary: &Binary, kind: Kind) -> Result<Self> {
        let disks = Disks::full(kind)?;
        let here = disks.machine(binary).content(Fill::Mixed, 1).start()?;
        writer::wait_begun(&here, LIMIT)?;
        writer::wait_written(&here, SOME, LIMIT)?;
        let storage = match kind {
            Kind::Overlay => ["--storage", "inc"],
            Kind::Qcow2 | Kind::Raw => ["--storage", "all"],
        };
        Ok(Self {
            disks,
            here,
            host: Host::start(&[])?,
            left: Vec::new(),
            options: storage.to_vec(),
        })
    }

    /// Another host with a QEMU that waits for the guest.
    fn waiting(&self, binary: &Binary) -> Result<(Host, Qemu, Disks)> {
        self.waiting_with(binary, &[], |_| Ok(()))
    }

    fn waiting_with(
        &self,
        binary: &Binary,
        options: &[&str],
        change: impl FnOnce(&mut Disks) -> Result<()>,
    ) -> Result<(Host, Qemu, Disks)> {
        let there = Host::start(options)?;
        let mut disks = Disks::empty(&self.disks)?;
        change(&mut disks)?;
        let qemu = disks.machine(binary).incoming().start()?;
        there.knows("vm", &qemu)?;
        Ok((there, qemu, disks))
    }

    fn migrate(&self, to: &str, options: &[&str]) -> Result<Vamoose> {
        let (state, monitor) = (self.host.state_dir(), self.here.qmp_socket());
        let options = [&self.options, options].concat();
        migrate_from(&state, &monitor, to, "vm", &options)
    }

    /// Moves the guest to another host, where it goes on as it was. Returns the report.
    fn moves_to(&mut self, binary: &Binary) -> Result<Value> {
        let there = self.waiting(binary)?;
        let migration = self.migrate(&there.0.address, &[])?;
        self.arrives(migration, there)
    }

    fn arrives(&mut self, migration: Vamoose, there: (Host, Qemu, Disks)) -> Result<Value> {
        let (there, qemu, disks) = there;
        let ended = migration.finish(LIMIT)?;
        let ended = ended
            .success()
            .with_context(|| format!("serve:\n{}", there.server.stderr()))?;
        let mut source = std::mem::replace(&mut self.here, qemu);
        source.qmp.wait_status("postmigrate", LIMIT)?;
        nothing_is_left(&mut source)?;
        ensure!(exports(&mut self.here)?.is_empty());
        let host = std::mem::replace(&mut self.host, there);
        let disks = std::mem::replace(&mut self.disks, disks);
        self.left.push((host, source, disks));
        Ok(serde_json::from_str(&ended.stdout)?)
    }

    /// The guest has stayed, and goes on writing to its own disk. Nothing of the copies is left.
    fn has_stayed(&mut self, migration: Vamoose, why: &str) -> Result<()> {
        migration.finish(LIMIT)?.failure(why)?;
        self.goes_on()?;
        nothing_is_left(&mut self.here)
    }

    fn goes_on(&mut self) -> Result<()> {
        self.here.qmp.wait_status("running", LIMIT)?;
        writer::wait_written(&self.here, SOME, LIMIT)
    }

    fn ends_well(mut self) -> Result<()> {
        self.goes_on()?;
        self.here.qmp.stop()?;
        self.here.kill()?;
        self.disks.check(self.here.ram())
    }
}

fn nothing_is_left(source: &mut Qemu) -> Result<()> {
    let jobs = source.qmp.execute("query-jobs", json!({}))?;
    let nodes = source.qmp.execute("query-named-block-nodes", json!({}))?;
    ensure!(jobs == json!([]), "{jobs}");
    ensure!(!nodes.to_string().contains("vamoose-disk-"), "{nodes}");
    Ok(())
}

fn exports(qemu: &mut Qemu) -> Result<Vec<Value>> {
    let exports = qemu.qmp.execute("query-block-exports", json!({}))?;
    Ok(exports.as_array().cloned().unwrap_or_default())
}

/// Waits until the copies of the disks are in this state.
fn wait_for_jobs(source: &mut Qemu, status: &str) -> Result<()> {
    let begin = Instant::now();
    loop {
        let jobs = source.qmp.execute("query-jobs", json!({}))?;
        let jobs = jobs.as_array().cloned().unwrap_or_default();
        if !jobs.is_empty() && jobs.iter().any(|job| job["status"] == status) {
            return Ok(());
        }
        ensure!(begin.elapsed() < LIMIT, "{jobs:?} are not {status}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Every QEMU with every one; none where there are no disks.
fn pairs_or_skip() -> Result<Vec<(Binary, Binary)>> {
    match writer::available_or_skip()? {
        true => qemu::pairs_or_skip(),
        false => Ok(Vec::new()),
    }
}

/// Tries each QEMU as a source with the next one as a destination. The guest can be moved afterwards.
fn each(kind: Kind, story: impl Fn(&mut Scene, &Binary) -> Result<()>) -> Result<()> {
    let pairs = pairs_or_skip()?;
    let count = pairs.len().isqrt();
    for number in 0..count {
        // The pairs of a source are together.
        let (from, to) = &pairs[number * count + (number + 1) % count];
        let mut scene = Scene::start(from, kind)?;
        let context = || format!("{} to {}", from.version, to.version);
        story(&mut scene, to).with_context(context)?;
        scene.options.truncate(2);
        scene
            .moves_to(to)
            .context("the next migration")
            .with_context(context)?;
        scene.ends_well().with_context(context)?;
    }
    Ok(())
}

/// There, and on to a third host.
fn moves(kind: Kind) -> Result<()> {
    each(kind, |scene, to| {
        let report = scene.moves_to(to)?;
        let copied = report["disks"]["bytes"].as_u64();
        ensure!(copied.is_some_and(|bytes| bytes >= DATA), "{report}");
        ensure!(report["disks"]["wire-bytes"].as_u64() > Some(0), "{report}");
        scene.goes_on()
    })
}

#[test]
fn a_guest_with_qcow2_images() -> Result<()> {
    moves(Kind::Qcow2)
}

#[test]
fn a_guest_with_raw_images() -> Result<()> {
    moves(Kind::Raw)
}

#[test]
fn a_guest_with_overlays() -> Result<()> {
    moves(Kind::Overlay)
}

/// QEMU before 8.2 cannot make the guest's writes wait for their copies.
#[test]
fn a_guest_that_outruns_the_copies() -> Result<()> {
    each(Kind::Qcow2, |scene, to| {
        let (there, mut qemu, _disks) = scene.waiting(to)?;
        let migration = scene.migrate(&there.address, &SLOW)?;
        let said = match scene.here.version.major >= 9 {
            true => "writes to its disks wait for the copies",
            false => "this QEMU cannot slow it down",
        };
        migration.wait_for(said, LIMIT)?;
        scene.goes_on()?;
        migration.signal(Signal::INT)?;
        scene.has_stayed(migration, "Cancelled;")?;
        qemu.wait_exit(LIMIT)?;
        Ok(())
    })
}

/// A paused guest writes nothing more, so both copies are the same.
#[test]
fn a_paused_guest_has_the_same_disks_at_both_ends() -> Result<()> {
    let kinds = [Kind::Qcow2, Kind::Raw, Kind::Overlay].into_iter().cycle();
    for ((from, to), kind) in pairs_or_skip()?.iter().zip(kinds) {
        let mut scene = Scene::start(from, kind)?;
        scene.here.qmp.stop()?;
        scene.moves_to(to)?;
        ensure!(scene.here.qmp.query_status()? == "paused");
        let (_, source, disks) = &mut scene.left[0];
        for qemu in [source, &mut scene.here] {
            qemu.kill()?;
        }
        let equal = disks.equal(&scene.disks);
        equal.with_context(|| format!("{kind:?}, {} to {}", from.version, to.version))?;
        scene.disks.check(scene.here.ram())?;
    }
    Ok(())
}

#[test]
fn a_copy_that_is_cancelled() -> Result<()> {
    each(Kind::Qcow2, |scene, to| {
        let (there, mut qemu, _disks) = scene.waiting(to)?;
        let migration = scene.migrate(&there.address, &SLOW)?;
        migration.wait_for("copying disks", LIMIT)?;
        scene.goes_on()?;
        migration.signal(Signal::INT)?;
        scene.has_stayed(migration, "Cancelled;")?;
        qemu.wait_exit(LIMIT)?;
        Ok(())
    })
}

/// The disk that the guest uses has been copied, and its memory is being moved.
#[test]
fn a_migration_that_is_cancelled_when_the_disks_are_copied() -> Result<()> {
    each(Kind::Qcow2, |scene, to| {
        scene.options.extend(["--storage-disk", "disk"]);
        let (there, mut qemu, _disks) = scene.waiting(to)?;
        // A guest that writes would write faster than the link carries.
        scene.here.qmp.stop()?;
        let migration = scene.migrate(&there.address, &SLOW)?;
        qemu.qmp.wait_migration(&["active"], LIMIT)?;
        wait_for_jobs(&mut scene.here, "ready")?;
        scene.here.qmp.cont()?;
        scene.goes_on()?;
        migration.signal(Signal::INT)?;
        scene.has_stayed(migration, "Cancelled;")?;
        qemu.wait_exit(LIMIT)?;
        Ok(())
    })
}

#[test]
fn a_destination_that_is_killed_while_disks_are_copied() -> Result<()> {
    each(Kind::Qcow2, |scene, to| {
        let (there, mut qemu, _disks) = scene.waiting(to)?;
        let migration = scene.migrate(&there.address, &SLOW)?;
        migration.wait_for("copying disks", LIMIT)?;
        wait_for_jobs(&mut scene.here, "running")?;
        qemu.kill()?;
        scene.has_stayed(migration, "vm was not moved; it still runs here.")
    })
}

#[test]
fn a_destination_that_is_killed_before_the_commit() -> Result<()> {
    each(Kind::Overlay, |scene, to| {
        let (there, mut qemu, _disks) = scene.waiting(to)?;
        let gate = Gate::start(&there.address)?;
        gate.rule(Message::Request("commit"), Fate::Held);
        let migration = scene.migrate(&gate.address, &[])?;
        gate.wait_until_held()?;
        scene.here.qmp.wait_status("postmigrate", LIMIT)?;
        qemu.kill()?;
        gate.release(Fate::Passes);
        scene.has_stayed(migration, "it still runs here.")
    })
}

#[test]
fn a_command_that_is_killed_while_disks_are_copied() -> Result<()> {
    each(Kind::Raw, |scene, to| {
        let (there, mut qemu, _disks) = scene.waiting(to)?;
        let mut migration = scene.migrate(&there.address, &SLOW)?;
        migration.wait_for("copying disks", LIMIT)?;
        wait_for_jobs(&mut scene.here, "running")?;
        migration.kill()?;
        qemu.wait_exit(LIMIT)?;
        // The next command removes the job that has failed.
        scene.goes_on()
    })
}

#[test]
fn a_server_that_is_killed_while_disks_are_copied() -> Result<()> {
    each(Kind::Qcow2, |scene, to| {
        let (mut there, mut qemu, _disks) = scene.waiting(to)?;
        let migration = scene.migrate(&there.address, &SLOW)?;
        migration.wait_for("copying disks", LIMIT)?;
        there.restart()?;
        scene.has_stayed(migration, "it still runs here.")?;
        qemu.wait_exit(LIMIT)?;
        Ok(())
    })
}

#[test]
fn a_link_that_is_cut_while_disks_are_copied() -> Result<()> {
    const RECONNECTS: [&str; 3] = ["--insecure", "--reconnect-timeout", "30"];
    each(Kind::Qcow2, |scene, to| {
        let there = scene.waiting_with(to, &RECONNECTS, |_| Ok(()))?;
        let gate = Gate::start(&there.0.address)?;
        // Some seconds for the data.
        let options = [&RECONNECTS[..], &["--max-bandwidth", "2M"]].concat();
        let migration = scene.migrate(&gate.address, &options)?;
        migration.wait_for("copying disks", LIMIT)?;
        gate.close();
        thread::sleep(Duration::from_secs(3));
        scene.goes_on()?;
        gate.open();
        let report = scene.arrives(migration, there)?;
        ensure!(report["link"]["reconnects"].as_u64() > Some(0), "{report}");
        Ok(())
    })
}

/// QEMU reports the destination's full disk at the source.
#[test]
fn a_destination_whose_disk_is_full() -> Result<()> {
    each(Kind::Qcow2, |scene, to| {
        let full = |disks: &mut Disks| {
            disks.is_full = true;
            Ok(())
        };
        let (there, mut qemu, _disks) = scene.waiting_with(to, &[], full)?;
        let migration = scene.migrate(&there.address, &[])?;
        scene.has_stayed(migration, "No space left on device")?;
        qemu.wait_exit(LIMIT)?;
        Ok(())
    })
}

#[test]
fn a_disk_that_does_not_fit_is_refused() -> Result<()> {
    each(Kind::Overlay, |scene, to| {
        let small = |disks: &mut Disks| Ok(fs::write(&disks.data, [0; 512])?);
        let alone = |disks: &mut Disks| {
            let mut create = Command::new("qemu-img");
            create.args(["create", "-q", "-f", "qcow2"]);
            qemu_img(create.arg(disks.image()).arg((1025 * 512).to_string()))
        };
        for (change, why) in [
            (
                &small as &dyn Fn(&mut Disks) -> Result<()>,
                "disk data: 4 MiB here, 512 bytes at",
            ),
            (&alone, "of nothing at"),
        ] {
            let (there, mut qemu, _disks) = scene.waiting_with(to, &[], change)?;
            for options in [&["--dry-run"][..], &[]] {
                let migration = scene.migrate(&there.address, options)?;
                scene.has_stayed(migration, why)?;
                ensure!(qemu.qmp.query_status()? == "inmigrate");
            }
        }
        let (there, _qemu, _disks) = scene.waiting(to)?;
        let other = ["--storage-disk", "vdz"];
        let migration = scene.migrate(&there.address, &other)?;
        scene.has_stayed(migration, "no writable disk `vdz`: it has disk, data")
    })
}
