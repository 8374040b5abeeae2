//! Another QEMU in the place of one whose guest has left.

use std::{
    fs,
    io::Read as _,
    os::unix::{fs::symlink, net::UnixStream},
};

use anyhow::{Result, ensure};
use lab::{
    qemu::{self, Builder, Qemu},
    ram::Fill,
};
use tempfile::TempDir;

use crate::common::{Host, LIMIT, MIB, migrate};

/// The monitor of the second QEMU is held, so that it cannot be told from the first. What became of the first one's guest is no
/// answer, whether that still runs or not.
#[test]
fn a_busy_monitor_is_no_success_of_an_earlier_guest() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let guest = || -> Result<Qemu> {
        let guest = Builder::bare(&binary, 4 * MIB).content(Fill::Mixed, 1);
        let mut guest = guest.start()?;
        guest.qmp.cont()?;
        Ok(guest)
    };
    let host = Host::start(&[])?;
    let place = TempDir::new()?;
    let monitor = place.path().join("vm.qmp");
    let (mut first, mut moved) = (
        guest()?,
        Builder::bare(&binary, 4 * MIB).incoming().start()?,
    );
    host.knows("vm", &moved)?;
    symlink(first.qmp_socket(), &monitor)?;
    migrate(&monitor, &host.address, "vm", &[])?
        .finish(LIMIT)?
        .success()?;
    first.kill()?;
    // As long as nobody has its place, the answer is about the first one.
    let again = migrate(&monitor, &host.address, "vm", &[])?;
    again.finish(LIMIT)?.success()?;

    let mut second = guest()?;
    fs::remove_file(&monitor)?;
    symlink(second.qmp_socket(), &monitor)?;
    let mut client = UnixStream::connect(second.qmp_socket())?;
    // Greeted, so it is the one that QEMU serves.
    client.read_exact(&mut [0])?;
    for is_running_there in [true, false] {
        if !is_running_there {
            moved.kill()?;
        }
        let busy = migrate(&monitor, &host.address, "vm", &[])?.finish(LIMIT)?;
        let busy = busy.failure("QEMU did not accept a connection to its monitor")?;
        busy.failure(" here.")?;
    }
    ensure!(second.qmp.query_status()? == "running");
    Ok(())
}
