//! A guest that somebody else pauses or continues, that stops by itself, or that has a disk: it is where it was, as its owner
//! has it, with its disk, and nobody calls it in doubt.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};

use crate::common::{
    Host, LIMIT, MIB,
    gate::{Fate, Gate, Message},
    migrate,
};
use anyhow::{Context as _, Result, ensure};
use lab::{
    qemu::{self, Binary, Builder, Qemu, available},
    ram::{self, Fill},
};
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;

const COMMIT: Message = Message::Request("commit");
const RAM: u64 = 16 * MIB;
/// Some seconds for [`guest`], longer than the longest downtime, and nearly all of them before the switchover.
const SLOW: [&str; 6] = [
    "--max-bandwidth",
    "4M",
    "--downtime-limit",
    "10",
    "--downtime-max",
    "1",
];
/// Slow enough for a migration never to end by itself within a test.
const VERY_SLOW: [&str; 6] = [
    "--max-bandwidth",
    "16k",
    "--downtime-limit",
    "10",
    "--downtime-max",
    "1",
];

fn guest(binary: &Binary) -> Result<Qemu> {
    let mut qemu = Builder::bare(binary, RAM)
        .content(Fill::Random, 1)
        .start()?;
    qemu.qmp.cont()?;
    Ok(qemu)
}

fn waiting(binary: &Binary) -> Result<Qemu> {
    Builder::bare(binary, RAM).incoming().start()
}

/// What a migration changes in a QEMU.
fn settings(qemu: &mut Qemu) -> Result<(Value, Value)> {
    let capabilities = qemu.qmp.execute("query-migrate-capabilities", json!({}))?;
    let parameters = qemu.qmp.execute("query-migrate-parameters", json!({}))?;
    Ok((capabilities, parameters))
}

#[test]
fn a_guest_that_is_paused_meanwhile_arrives_paused() -> Result<()> {
    for binary in available() {
        let b = Host::start(&[])?;
        let (mut at_a, mut at_b) = (guest(binary)?, waiting(binary)?);
        b.knows("vm", &at_b)?;
        let before = settings(&mut at_a)?;
        let migration = b.migrate(&at_a, "vm", &SLOW)?;
        migration.wait_for("active", LIMIT)?;
        at_a.qmp.stop()?;
        let ended = migration.finish(LIMIT)?;
        ended
            .success()
            .with_context(|| format!("QEMU {}", binary.version))?;
        ensure!(at_b.qmp.query_status()? == "paused");
        ensure!(settings(&mut at_a)? == before);
        ram::compare(at_a.ram(), at_b.ram())?;
        at_b.qmp.cont()?;
        at_b.qmp.wait_status("running", LIMIT)?;
    }
    Ok(())
}

#[test]
fn a_guest_that_is_paused_and_continued_meanwhile_arrives_running() -> Result<()> {
    for binary in available() {
        let b = Host::start(&[])?;
        let (mut at_a, mut at_b) = (guest(binary)?, waiting(binary)?);
        b.knows("vm", &at_b)?;
        at_a.qmp.stop()?;
        let migration = b.migrate(&at_a, "vm", &SLOW)?;
        migration.wait_for("active", LIMIT)?;
        at_a.qmp.cont()?;
        at_a.qmp.stop()?;
        at_a.qmp.cont()?;
        migration
            .finish(LIMIT)?
            .success()
            .with_context(|| format!("QEMU {}", binary.version))?;
        at_b.qmp.wait_status("running", LIMIT)?;
    }
    Ok(())
}

#[test]
fn a_guest_that_is_paused_meanwhile_stays_paused_when_it_is_cancelled() -> Result<()> {
    for binary in available() {
        let b = Host::start(&[])?;
        let (mut at_a, at_b) = (guest(binary)?, waiting(binary)?);
        b.knows("vm", &at_b)?;
        let before = settings(&mut at_a)?;
        let migration = b.migrate(&at_a, "vm", &VERY_SLOW)?;
        migration.wait_for("active", LIMIT)?;
        at_a.qmp.stop()?;
        migration.signal(Signal::INT)?;
        migration
            .finish(LIMIT)?
            .failure(" here.")
            .with_context(|| format!("QEMU {}", binary.version))?;
        ensure!(at_a.qmp.query_status()? == "paused");
        ensure!(settings(&mut at_a)? == before);
        // Its owner's, as before.
        at_a.qmp.cont()?;
        at_a.qmp.wait_status("running", LIMIT)?;
    }
    Ok(())
}

/// A guest that does nothing but read its disk.
struct Disk {
    _dir: TempDir,
    image: PathBuf,
}

impl Disk {
    fn new() -> Result<Self> {
        // The BIOS reads the first sector to 0x8000, again and again.
        let code = [
            0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xc0, 0xb8, 0x01, 0x02, 0xb9, 0x01, 0x00, 0xba, 0x80,
            0x00, 0xbb, 0x00, 0x80, 0xcd, 0x13, 0xeb, 0xf0,
        ];
        let mut sector = [0; 512];
        sector[..code.len()].copy_from_slice(&code);
        sector[510..].copy_from_slice(&[0x55, 0xaa]);
        let dir = TempDir::new()?;
        let image = dir.path().join("image");
        fs::write(&image, sector)?;
        File::options()
            .write(true)
            .open(&image)?
            .set_len(16 * MIB)?;
        Ok(Self { _dir: dir, image })
    }

    /// A machine that has this disk; `fails`: and cannot read it.
    fn machine(&self, binary: &Binary, fails: bool) -> Builder {
        let file = match fails {
            false => "file.driver=file,file.filename",
            true => {
                "file.driver=blkdebug,file.inject-error.0.event=read_aio,file.inject-error.0.errno=5,\
                 file.image.driver=file,file.image.filename"
            }
        };
        let image = self.image.display();
        [
            "-machine".to_owned(),
            "pc-i440fx-7.2".to_owned(),
            "-blockdev".to_owned(),
            format!("driver=raw,node-name=disk,{file}={image}"),
            "-device".to_owned(),
            "ide-hd,drive=disk,cyls=32,heads=16,secs=63,rerror=stop,werror=stop".to_owned(),
        ]
        .into_iter()
        .fold(Builder::bare(binary, 16 * MIB), Builder::argument)
    }

    /// Whether a QEMU has the disk: no other one can.
    fn is_used(path: &Path, binary: &Binary) -> Result<bool> {
        let blockdev = format!("driver=file,node-name=disk,filename={}", path.display());
        let other = Builder::bare(binary, MIB)
            .argument("-machine")
            .argument("pc-i440fx-7.2");
        let other = other.argument("-blockdev").argument(blockdev);
        let other = other
            .argument("-device")
            .argument("ide-hd,drive=disk")
            .start();
        match other {
            Ok(_) => Ok(false),
            Err(error) if format!("{error:#}").contains("lock") => Ok(true),
            Err(error) => Err(error),
        }
    }
}

/// The destination takes `cont`, and its disk fails: it has the guest, and that is what is said.
#[test]
fn a_guest_that_stops_when_it_was_continued_has_moved() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let disk = Disk::new()?;
    let b = Host::start(&[])?;
    let mut at_a = disk.machine(&binary, false).start()?;
    at_a.qmp.cont()?;
    let mut at_b = disk.machine(&binary, true).incoming().start()?;
    b.knows("vm", &at_b)?;
    let migration = b.migrate(&at_a, "vm", &["--downtime-max", "2"])?;
    let first = migration.finish(LIMIT)?;
    at_b.qmp.wait_status("io-error", LIMIT)?;
    // It may still have run when the server looked.
    if !first.status.success() {
        first.failure("the guest is at the destination")?;
    }
    ensure!(at_a.qmp.query_status()? == "postmigrate");
    let again = b.migrate(&at_a, "vm", &[])?.finish(LIMIT)?;
    let again = again.failure("the guest is at the destination")?;
    ensure!(
        again.stderr.contains("it is `io-error`"),
        "{}",
        again.stderr
    );
    ensure!(again.stderr.contains("its storage has failed or is full"));
    Ok(())
}

/// Somebody else has the image: QEMU refuses to continue the guest at the destination, which has decided nothing, and the guest
/// goes back.
#[test]
fn a_guest_whose_disk_is_taken_goes_back() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let disk = Disk::new()?;
    let b = Host::start(&[])?;
    let gate = Gate::start(&b.address)?;
    let mut at_a = disk.machine(&binary, false).start()?;
    at_a.qmp.cont()?;
    let mut at_b = disk.machine(&binary, false).incoming().start()?;
    b.knows("vm", &at_b)?;
    gate.rule(COMMIT, Fate::Held);
    let migration = migrate(&at_a.qmp_socket(), &gate.address, "vm", &[])?;
    gate.wait_until_held()?;
    at_a.qmp.wait_status("postmigrate", LIMIT)?;
    at_b.qmp.wait_migration(&["completed"], LIMIT)?;
    let thief = disk.machine(&binary, false).start()?;
    gate.release(Fate::Passes);
    // Before the source is told, the image is free again.
    gate.rule(Message::Answer("aborted"), Fate::Held);
    at_b.wait_exit(LIMIT)?;
    drop(thief);
    gate.release(Fate::Passes);
    migration.finish(LIMIT)?.failure(" here.")?;
    at_a.qmp.wait_status("running", LIMIT)?;
    Ok(())
}

/// The commit of a paused guest is aborted. It is its owner's again, with its disk, and can be moved as soon as QEMU allows that.
#[test]
fn a_paused_guest_comes_back_with_its_disk() -> Result<()> {
    for binary in available() {
        let disk = Disk::new()?;
        let b = Host::start(&[])?;
        let gate = Gate::start(&b.address)?;
        let mut at_a = disk.machine(binary, false).start()?;
        at_a.qmp.cont()?;
        at_a.qmp.stop()?;
        let mut at_b = disk.machine(binary, false).incoming().start()?;
        b.knows("vm", &at_b)?;
        gate.rule(COMMIT, Fate::Held);
        let migration = migrate(&at_a.qmp_socket(), &gate.address, "vm", &[])?;
        gate.wait_until_held()?;
        at_a.qmp.wait_status("postmigrate", LIMIT)?;
        at_b.kill()?;
        gate.release(Fate::Passes);
        migration.finish(LIMIT)?.failure(" here.")?;
        let version = binary.version;
        ensure!(at_a.qmp.query_status()? == "postmigrate", "QEMU {version}");
        ensure!(
            Disk::is_used(&disk.image, binary)?,
            "QEMU {version}: no disk"
        );

        b.forgets("vm")?;
        let mut again_at_b = disk.machine(binary, false).incoming().start()?;
        b.knows("vm", &again_at_b)?;
        b.migrate(&at_a, "vm", &[])?
            .finish(LIMIT)?
            .failure("will not send it again until the guest has run")?;
        at_a.qmp.cont()?;
        at_a.qmp.stop()?;
        b.migrate(&at_a, "vm", &[])?
            .finish(LIMIT)?
            .success()
            .with_context(|| format!("QEMU {version}"))?;
        ensure!(again_at_b.qmp.query_status()? == "paused");
        at_a.kill()?;
        ensure!(
            Disk::is_used(&disk.image, binary)?,
            "QEMU {version}: no disk"
        );
        again_at_b.qmp.cont()?;
        again_at_b.qmp.wait_status("running", LIMIT)?;
    }
    Ok(())
}
