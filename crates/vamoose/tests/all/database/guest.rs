//! A Linux guest with a disk: PostgreSQL on ext4 on a qcow2 image, at work all the time. What it was told is done can be counted:
//! one of its clients adds rows with the numbers 1, 2, 3, ... and says each on the serial port when the commit is done;
//! pgbench changes pages beside it, and what is read comes from the disk.
//!
//! Afterwards a guest that has seen nothing of it looks at the disk ([`check`]): `e2fsck`, `pg_checksums`, `pg_amcheck`, the sums
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

/// Of the guest, in bytes.
const RAM: u64 = (320 << 20) + AWKWARD;
/// Of the disk, in bytes; what is not used of it takes no room.
const DISK: u64 = 192 << 20;
/// For what takes a minute on a machine that is very busy.
pub(crate) const LIMIT: Duration = Duration::from_secs(600);

/// What all guests with a database boot from.
#[derive(Debug)]
pub(crate) struct System(Image);

/// The disk of one guest: an image that all hosts reach.
#[derive(Clone, Debug)]
pub(crate) struct Disk(PathBuf);

/// What a guest has said that is done, in all QEMUs that it has been in.
#[derive(Clone, Debug, Default)]
pub(crate) struct Committed {
    rows: u64,
    /// A line whose end may come from the next QEMU.
    tail: String,
}

/// What was found on a disk that is in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// The rows, which have the numbers from 1 on.
    pub(crate) rows: u64,
    /// What pgbench has done.
    pub(crate) transactions: u64,
}

impl System {
    /// Where `scripts/setup guest workloads` has not run, says loudly that the test is skipped and gives `None`.
    pub(crate) fn build_or_skip() -> Result<Option<Self>> {
        if !Program::Postgres.is_there() {
            skipped("no PostgreSQL for guests, run scripts/setup guest workloads")?;
            return Ok(None);
        }
        Ok(Some(Self(Program::Postgres.image()?)))
    }

    /// A machine with this disk, on which it makes the database first if the disk is empty.
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
    /// An empty one, in this file.
    pub(crate) fn new(path: &Path) -> Result<Self> {
        fs::write(path, qcow2::empty(DISK))
            .with_context(|| format!("writing {}", path.display()))?;
        Ok(Self(path.to_owned()))
    }

    /// What has been written to it so far.
    pub(crate) fn content(&self) -> Result<Vec<u8>> {
        fs::read(&self.0).with_context(|| format!("reading {}", self.0.display()))
    }

    /// Takes every second page of a table that has changed since then back to what it was: each is whole, and an old one.
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

/// Waits until the guest has said that so many rows more are done.
pub(crate) fn wait_rows(guest: &Guest, more: usize) -> Result<()> {
    let wanted = rows(&guest.log()) + more;
    guest.wait("rows", LIMIT, |log| rows(log) >= wanted)
}

/// Has a guest end its server and its file system as an administrator does, and turn itself off.
pub(crate) fn stop(guest: &mut Guest) -> Result<()> {
    guest.say("stop")?;
    let stopped = |log: &Log| log.lines.iter().any(|line| line.text == "stopped");
    guest.wait("'stopped'", LIMIT, stopped)?;
    guest.qemu.wait_exit(LIMIT).map(drop)
}

/// Looks at a disk that no QEMU has, in a guest of its own. Everything that was said to be committed has to be there.
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
    // The last one may have been committed without a word.
    ensure!(
        (committed.rows..=committed.rows + 1).contains(&rows),
        "{} rows were committed, and there are {rows}",
        committed.rows
    );
    Ok(Found { rows, transactions })
}

impl Committed {
    /// Adds what a guest has said in one QEMU: the one that it was in next.
    ///
    /// # Errors
    /// When the guest is not in order, or a number is missing or comes again.
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

    /// How many rows.
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

/// Of the file system.
const BLOCK: usize = 1024;
/// Of PostgreSQL.
const PAGE: usize = 8192;
/// Where a page of PostgreSQL's tables and indexes has its size and its version.
const PAGE_FORMAT: std::ops::Range<usize> = 18..20;

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
