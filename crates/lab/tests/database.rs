//! The disk of a database that nobody has moved is in order, and writes that are missing on it are found.

use anyhow::{Result, ensure};
use lab::database::{self, Committed, Disk, System};
use lab::guest::Guest;
use lab::qemu;

/// Enough for every table to have changed.
const ROWS: usize = 100;

#[test]
fn lost_writes_are_found() -> Result<()> {
    let (Some(binary), Some(system)) = (qemu::newest_or_skip()?, System::build_or_skip()?) else {
        return Ok(());
    };
    let folder = tempfile::tempdir()?;
    let disk = Disk::new(&folder.path().join("disk"))?;
    let mut guest = Guest::start(&system.machine(&binary, &disk))?;
    guest.wait_ready(database::LIMIT)?;
    database::wait_rows(&guest, ROWS)?;
    let before = disk.content()?;
    database::wait_rows(&guest, ROWS)?;
    database::stop(&mut guest)?;
    let mut committed = Committed::default();
    committed.add(&guest.finish()?)?;
    let found = database::check(&system, &binary, &disk, &committed)?;
    ensure!(found.rows >= 2 * ROWS as u64, "{found:?}");

    disk.lose_writes(&before)?;
    let found = database::check(&system, &binary, &disk, &committed);
    ensure!(found.is_err(), "writes are missing: {found:?}");
    println!("{:#}", found.unwrap_err());
    Ok(())
}
