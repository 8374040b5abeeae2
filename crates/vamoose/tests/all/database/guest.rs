//! A Linux guest with a disk: a busy PostgreSQL on ext4 on a qcow2 image. Its commits can be counted: a client adds rows numbered
//! 1, 2, 3, ... and prints each number on the serial port after the commit. pgbench changes pages at the same time, and reads come
//! from the disk.
//!
//! Afterwards another guest checks the disk ([`check`]): `e2fsck`, `pg_checksums`, `pg_amcheck`, the sums
//! of pgbench's tables, and the numbers. The guest's script is `guest/database`; `scripts/setup guest workloads` fetches the
//! programs.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use lab::{
    guest::{Guest, Image},
    program::Program,
    qemu::{self, AWKWARD, Binary, Builder},
    serial::Log,
    skipped,
};

use crate::common::qcow2;

/// The guest's memory in bytes.
const RAM: u64 = (320 << 20) + AWKWARD;
/// The size of the disk in bytes; unused parts take no room.
const DISK: u64 = 192 << 20;
/// The limit for anything, on a very busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(600);

/// The boot image of guests with a database.
#[derive(Debug)]
pub(crate) struct System(Image);

/// The disk of one guest: an image on all hosts.
#[derive(Clone, Debug)]
pub(crate) struct Disk(PathBuf);

/// The commits that a guest has reported, in all its QEMUs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Committed {
    rows: u64,
    /// An incomplete line, whose end may come from the next QEMU.
    tail: String,
}

/// The content of a valid disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// The number of rows, numbered from 1.
    pub(crate) rows: u64,
    /// pgbench's transactions.
    pub(crate) transactions: u64,
}

impl System {
    /// Where `scripts/setup guest workloads` has not run, reports the test as skipped and returns `None`.
    pub(crate) fn build_or_skip() -> Result<Option<Self>> {
        if !Program::Postgres.is_there() {
            skipped("no PostgreSQL for guests, run scripts/setup guest workloads")?;
            return Ok(None);
        }
        Ok(Some(Self(Program::Postgres.image()?)))
    }

    /// A machine with this disk. It creates the database if the disk is empty.
    pub(crate) fn machine(&self, binary: &Binary, disk: &Disk) -> Builder {
        self.boot(binary, disk, "database")
    }

    fn boot(&self, binary: &Binary, disk: &Disk, workload: &str) -> Builder {
        let parameters = format!("vamoose.workload={workload}");
        let image = disk.0.display();
        self.0
            .boot(binary, RAM, &parameters)
            .argument("-blockdev")
            .argument(format!(
                "qcow2,node-name=disk,file.driver=file,file.filename={image}"
            ))
            .argument("-device")
            .argument("virtio-blk-pci,drive=disk")
    }
}

impl Disk {
    /// An empty disk in this file.
    pub(crate) fn new(path: &Path) -> Result<Self> {
        fs::write(path, qcow2::empty(DISK))
            .with_context(|| format!("writing {}", path.display()))?;
        Ok(Self(path.to_owned()))
    }

    /// The content so far.
    pub(crate) fn content(&self) -> Result<Vec<u8>> {
        fs::read(&self.0).with_context(|| format!("reading {}", self.0.display()))
    }

    /// Reverts every second page of a table that has changed since then: each is a whole old page.
    pub(crate) fn lose_writes(&self, since: &[u8]) -> Result<()> {
        let mut content = self.content()?;
        let is_page = |bytes: &[u8]| bytes[PAGE_FORMAT] == [4, 0x20];
        let last = since.len().min(content.len()).saturating_sub(PAGE);
        let places = (0..last).step_by(BLOCK).filter(|&at| {
            let (now, before) = (&content[at..at + PAGE], &since[at..at + PAGE]);
            now != before && is_page(now) && is_page(before)
        });
        let places = places.step_by(2).collect::<Vec<_>>();
        for at in places {
            content[at..at + PAGE].copy_from_slice(&since[at..at + PAGE]);
        }
        fs::write(&self.0, content).with_context(|| format!("writing {}", self.0.display()))
    }
}

/// Waits until the guest has committed this many more rows.
pub(crate) fn wait_rows(guest: &Guest, more: usize) -> Result<()> {
    let wanted = rows(&guest.log()) + more;
    guest.wait("rows", LIMIT, |log| rows(log) >= wanted)
}

/// Makes the guest stop its server, unmount its file system and turn itself off.
pub(crate) fn stop(guest: &mut Guest) -> Result<()> {
    guest.say("stop")?;
    let stopped = |log: &Log| log.lines.iter().any(|line| line.text == "stopped");
    guest.wait("'stopped'", LIMIT, stopped)?;
    guest.qemu.wait_exit(LIMIT).map(drop)
}

/// Checks a disk that no QEMU has open, in another guest. All reported commits have to be there.
pub(crate) fn check(
    system: &System,
    binary: &Binary,
    disk: &Disk,
    committed: &Committed,
) -> Result<Found> {
    let mut guest = Guest::start(&system.boot(binary, disk, "check"))?;
    let checked = |log: &Log| log.lines.iter().any(|line| line.text == "checked");
    guest.wait("'checked'", LIMIT, checked)?;
    guest.qemu.wait_exit(LIMIT)?;
    let log = guest.finish()?;
    let number = |text: Option<&str>| -> Result<u64> {
        text.and_then(|text| text.parse().ok())
            .context("the guest has not said what there is")
    };
    let said = |what: &str| {
        log.lines
            .iter()
            .find_map(|line| line.text.strip_prefix(what))
    };
    let transactions = number(said("transactions "))?;
    let range = said("rows ").and_then(|range| range.split_once(" to "));
    let rows = number(range.map(|(rows, _)| rows))?;
    let last = number(range.map(|(_, last)| last))?;
    ensure!(
        rows == last,
        "there are {rows} rows, and the last one has the number {last}"
    );
    // The last commit may not have been reported.
    ensure!(
        (committed.rows..=committed.rows + 1).contains(&rows),
        "{} rows were committed, and there are {rows}",
        committed.rows
    );
    Ok(Found { rows, transactions })
}

impl Committed {
    /// Adds the output of the guest in its next QEMU.
    ///
    /// # Errors
    /// When the guest has reported an error, or a number is missing or repeated.
    pub(crate) fn add(&mut self, log: &Log) -> Result<()> {
        log.check()?;
        for line in &log.lines {
            let text = std::mem::take(&mut self.tail) + &line.text;
            let Some(row) = row(text.trim()) else {
                continue;
            };
            if row != self.rows + 1 {
                bail!("row {} is followed by row {row}", self.rows);
            }
            self.rows = row;
        }
        self.tail += &log.tail;
        Ok(())
    }

    /// The number of committed rows.
    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }
}

fn rows(log: &Log) -> usize {
    log.lines
        .iter()
        .filter(|line| row(&line.text).is_some())
        .count()
}

fn row(line: &str) -> Option<u64> {
    line.strip_prefix("committed ")?.parse().ok()
}

/// The block size of the file system.
const BLOCK: usize = 1024;
/// The page size of PostgreSQL.
const PAGE: usize = 8192;
/// The position of size and version in a page of PostgreSQL.
const PAGE_FORMAT: std::ops::Range<usize> = 18..20;

/// Enough for every table to have changed.
const ROWS: usize = 100;

#[test]
#[ignore = "minutes: make databases"]
fn lost_writes_are_found() -> Result<()> {
    let (Some(binary), Some(system)) = (qemu::newest_or_skip()?, System::build_or_skip()?) else {
        return Ok(());
    };
    let folder = tempfile::tempdir()?;
    let disk = Disk::new(&folder.path().join("disk"))?;
    let mut guest = Guest::start(&system.machine(&binary, &disk))?;
    guest.wait_ready(LIMIT)?;
    wait_rows(&guest, ROWS)?;
    let before = disk.content()?;
    wait_rows(&guest, ROWS)?;
    stop(&mut guest)?;
    let mut committed = Committed::default();
    committed.add(&guest.finish()?)?;
    let found = check(&system, &binary, &disk, &committed)?;
    ensure!(found.rows >= 2 * ROWS as u64, "{found:?}");

    disk.lose_writes(&before)?;
    let found = check(&system, &binary, &disk, &committed);
    ensure!(found.is_err(), "writes are missing: {found:?}");
    Ok(())
}

mod tests {
    use super::*;
    use lab::serial::Line;
    use std::time::Instant;

    fn log(lines: &[&str], tail: &str) -> Log {
        let line = |text: &&str| Line {
            at: Instant::now(),
            text: (*text).to_owned(),
        };
        Log {
            lines: lines.iter().map(line).collect(),
            tail: tail.to_owned(),
            ended: true,
        }
    }

    #[test]
    fn rows_are_followed_from_one_qemu_to_the_next() {
        let mut committed = Committed::default();
        committed
            .add(&log(&["ready", "committed 1"], "commit"))
            .unwrap();
        committed.add(&log(&[], "ted")).unwrap();
        committed
            .add(&log(&[" 2", "committed 3"], "committed 4\r"))
            .unwrap();
        committed.add(&log(&["", "committed 5"], "")).unwrap();
        assert_eq!(committed.rows(), 5);
        for next in ["committed 5", "committed 7", "fatal the disk"] {
            assert!(committed.clone().add(&log(&[next], "")).is_err(), "{next}");
        }
    }
}
