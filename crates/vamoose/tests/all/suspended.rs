//! A guest that has suspended itself (ACPI S3) arrives suspended and can be woken; where a QEMU would lose it, it stays.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::Path,
    time::Instant,
};

use anyhow::{Context as _, Result, ensure};
use lab::{
    qemu::{self, Binary, Builder, Qemu},
    ram::Fill,
};
use serde_json::json;
use tempfile::TempDir;

use crate::common::{Host, LIMIT, MIB};

/// 16-bit code in place of the firmware. At its first start it enables the power management of the machine's chipset at port
/// 0x600, waits until the byte at 0x604 is 1, and suspends; when it has been woken it counts, in the word at 0x602.
const CODE: [u8; 92] = [
    0xfa, 0x31, 0xc0, 0x8e, 0xd8, 0x81, 0x3e, 0x00, 0x06, 0x53, 0x53, 0x74, 0x49, 0xc7, 0x06, 0x00,
    0x06, 0x53, 0x53, 0xc7, 0x06, 0x02, 0x06, 0x00, 0x00, 0xc6, 0x06, 0x04, 0x06, 0x00, 0xba, 0xf8,
    0x0c, 0x66, 0xb8, 0x40, 0x0b, 0x00, 0x80, 0x66, 0xef, 0xba, 0xfc, 0x0c, 0x66, 0xb8, 0x01, 0x06,
    0x00, 0x00, 0x66, 0xef, 0xba, 0xf8, 0x0c, 0x66, 0xb8, 0x80, 0x0b, 0x00, 0x80, 0x66, 0xef, 0xba,
    0xfc, 0x0c, 0xb0, 0x01, 0xee, 0x80, 0x3e, 0x04, 0x06, 0x01, 0x75, 0xf9, 0xba, 0x04, 0x06, 0xb8,
    0x00, 0x24, 0xef, 0xf4, 0xeb, 0xfd, 0xff, 0x06, 0x02, 0x06, 0xeb, 0xfa,
];
/// At the reset vector: to the code.
const JUMP: [u8; 5] = [0xea, 0x00, 0x00, 0x00, 0xf0];
const COUNTER: u64 = 0x602;
const SUSPENDS: u64 = 0x604;

fn machine(binary: &Binary, folder: &Path) -> Result<Builder> {
    let firmware = folder.join("firmware");
    let mut rom = vec![0; 64 << 10];
    rom[..CODE.len()].copy_from_slice(&CODE);
    rom[0xfff0..][..JUMP.len()].copy_from_slice(&JUMP);
    fs::write(&firmware, rom)?;
    Ok(Builder::firmware(binary, 4 * MIB, &firmware))
}

fn count(guest: &Qemu) -> Result<u16> {
    let mut word = [0; 2];
    File::open(guest.ram())?.read_exact_at(&mut word, COUNTER)?;
    Ok(u16::from_le_bytes(word))
}

fn suspend(guest: &mut Qemu) -> Result<()> {
    let memory = File::options().write(true).open(guest.ram())?;
    let deadline = Instant::now() + LIMIT;
    // It may have begun by making that byte 0 just now.
    while guest.qmp.query_status()? != "suspended" {
        ensure!(Instant::now() < deadline, "it does not suspend itself");
        memory.write_all_at(&[1], SUSPENDS)?;
    }
    Ok(())
}

fn expect_woken(guest: &mut Qemu) -> Result<()> {
    ensure!(count(guest)? == 0, "it has been woken");
    guest.qmp.execute("system_wakeup", json!({}))?;
    guest.qmp.wait_status("running", LIMIT)?;
    let deadline = Instant::now() + LIMIT;
    while count(guest)? == 0 {
        ensure!(Instant::now() < deadline, "it does not go on");
    }
    Ok(())
}

#[test]
fn a_suspended_guest_arrives_suspended_and_can_be_woken() -> Result<()> {
    for (from, to) in qemu::pairs_or_skip()? {
        let result = move_suspended(&from, &to);
        result.with_context(|| format!("{} to {}", from.version, to.version))?;
    }
    Ok(())
}

fn move_suspended(from: &Binary, to: &Binary) -> Result<()> {
    let folder = TempDir::new()?;
    let host = Host::start(&[])?;
    let mut source = machine(from, folder.path())?.start()?;
    let mut destination = machine(to, folder.path())?.incoming().start()?;
    host.knows("vm", &destination)?;
    suspend(&mut source)?;
    let migrated = host.migrate(&source, "vm", &[])?.finish(LIMIT)?;
    if from.version.major < 9 || to.version.major < 9 {
        migrated.failure("the guest is suspended (ACPI S3), and QEMU 7.2.")?;
        source.qmp.wait_status("suspended", LIMIT)?;
        return expect_woken(&mut source);
    }
    migrated.success()?;
    destination.qmp.wait_status("suspended", LIMIT)?;
    expect_woken(&mut destination)
}

#[test]
fn a_guest_that_suspends_itself_under_way_stays_where_it_would_be_lost() -> Result<()> {
    let Some(binary) = qemu::find_or_skip(7, 2)? else {
        return Ok(());
    };
    let folder = TempDir::new()?;
    let host = Host::start(&[])?;
    let machine = machine(&binary, folder.path())?;
    let mut source = machine.clone().content(Fill::Mixed, 1).start()?;
    let destination = machine.incoming().start()?;
    host.knows("vm", &destination)?;
    let migration = host.migrate(&source, "vm", &["--max-bandwidth", "16k"])?;
    migration.wait_for("active", LIMIT)?;
    suspend(&mut source)?;
    let ended = migration.finish(LIMIT)?;
    ended.failure("the guest is suspended (ACPI S3), and QEMU 7.2.")?;
    source.qmp.wait_status("suspended", LIMIT)?;
    expect_woken(&mut source)
}
