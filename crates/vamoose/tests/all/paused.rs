//! A paused guest with a disk: it stays paused wherever it is moved, and its image is active at one end only.

use std::{fs, thread};

use anyhow::{Context as _, Result, ensure};
use lab::{
    counter,
    qemu::{self, Binary, Builder, Qemu},
};
use tempfile::TempDir;

use crate::common::{
    Host, LIMIT, MIB,
    gate::{Fate, Gate, Message},
    migrate, qcow2,
};

/// A machine with a disk that every host reaches.
struct Disk {
    folder: TempDir,
}

impl Disk {
    fn new() -> Result<Self> {
        let disk = Self {
            folder: TempDir::new()?,
        };
        counter::write_firmware(&disk.folder.path().join("firmware"))?;
        fs::write(disk.folder.path().join("image"), qcow2::empty(MIB))?;
        Ok(disk)
    }

    fn machine(&self, binary: &Binary) -> Builder {
        let folder = self.folder.path();
        let image = folder.join("image");
        let file = format!("driver=file,node-name=file,filename={}", image.display());
        let arguments = [
            "-blockdev",
            &file,
            "-blockdev",
            "driver=qcow2,node-name=disk,file=file",
            "-device",
            "virtio-blk-pci,drive=disk",
        ];
        let machine = Builder::firmware(binary, 4 * MIB, &folder.join("firmware")).paused();
        arguments.into_iter().fold(machine, Builder::argument)
    }

    fn waiting(&self, binary: &Binary) -> Result<Qemu> {
        self.machine(binary).incoming().start()
    }
}

/// Every QEMU to every other one, and from there on to a third one of the first kind.
#[test]
fn a_paused_guest_is_moved_twice() -> Result<()> {
    for (from, to) in qemu::pairs_or_skip()? {
        let context = || format!("{} to {} and on", from.version, to.version);
        moved_twice(&from, &to).with_context(context)?;
    }
    Ok(())
}

fn moved_twice(from: &Binary, to: &Binary) -> Result<()> {
    let disk = Disk::new()?;
    let host = Host::start(&[])?;
    let (mut first, mut second) = (disk.machine(from).start()?, disk.waiting(to)?);
    let mut third = disk.waiting(from)?;
    host.knows("second", &second)?;
    host.knows("third", &third)?;
    host.migrate(&first, "second", &[])?
        .finish(LIMIT)?
        .success()?;
    ensure!(!["running", "inmigrate"].contains(&&*second.qmp.query_status()?));
    // The image is the second one's, though nothing has run there.
    ensure!(first.qmp.cont().is_err(), "both have the image");

    host.migrate(&second, "third", &[])?
        .finish(LIMIT)?
        .success()?;
    ensure!(!["running", "inmigrate"].contains(&&*third.qmp.query_status()?));
    ensure!(second.qmp.cont().is_err(), "both have the image");
    third.qmp.cont()?;
    third.qmp.wait_status("running", LIMIT)?;
    expect_counting(&third)
}

fn expect_counting(guest: &Qemu) -> Result<()> {
    let before = counter::count(guest.ram())?;
    let deadline = std::time::Instant::now() + LIMIT;
    while counter::count(guest.ram())? == before {
        ensure!(
            std::time::Instant::now() < deadline,
            "the guest does not run"
        );
        thread::yield_now();
    }
    Ok(())
}

/// The destination dies before the commit reaches it: the guest is the source's again, and so is its image.
#[test]
fn a_paused_guest_that_stays_has_its_image_back() -> Result<()> {
    for (major, minor) in qemu::VERSIONS {
        let Some(binary) = qemu::find_or_skip(major, minor)? else {
            continue;
        };
        let disk = Disk::new()?;
        let host = Host::start(&[])?;
        let gate = Gate::start(&host.address)?;
        let (mut source, mut destination) =
            (disk.machine(&binary).start()?, disk.waiting(&binary)?);
        host.knows("vm", &destination)?;
        gate.rule(Message::Request("commit"), Fate::Held);
        let migration = migrate(&source.qmp_socket(), &gate.address, "vm", &[])?;
        gate.wait_until_held()?;
        destination.kill()?;
        gate.release(Fate::Passes);
        let failed = migration.finish(LIMIT)?;
        failed.failure(" here.")?;
        ensure!(source.qmp.query_status()? != "running", "it was paused");
        let other = disk.machine(&binary).start();
        ensure!(other.is_err(), "{major}.{minor}: nobody has the image");
        source.qmp.cont()?;
        expect_counting(&source)?;
    }
    Ok(())
}
