//! The smallest guest with a disk: a boot sector that counts 100 times per second and writes each number into the next sector, by
//! BIOS calls. It starts in a second. Its counter determines the content of its disk.
//!
//! ```text
//!  disk    sector 0           the guest
//!          sectors 1 .. 1025  number n goes to sector 1 + n % 1024, which is read, changed and written
//!                             at 0 and at 508: the last number of this sector; at 4: the sum of all its numbers;
//!                             at 8: how often the sector was written
//!  memory  like `counter`: the last number, and 128 pages; once number n is on the disk, it is written to page n % 128
//!          0x504: the number of failed calls; 0x508: AX after the last one
//!  serial  a dot for each number on the disk, a `!` for each failed call
//! ```
//! A lost write, a repeated one, and one of a guest with old memory stay visible in a sector's sum for ever. Every sector is a
//! cluster of the image, so until all sectors have been written once, each write also changes the image's tables, which have to be
//! right at the destination host, too.

use std::fs::{self, File};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::OFlags;
use tempfile::TempDir;

use crate::counter::{self, Image, PAGES, word};
use crate::qemu::{Binary, Builder, Qemu};
use crate::{run, skipped};

/// The disk of one guest, a qcow2 image that all hosts open by the same path. Removed on drop.
#[derive(Debug)]
pub struct Disk {
    folder: TempDir,
    is_direct: bool,
}

/// How the last QEMU that wrote to a disk ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// After its guest had been paused, or had moved on.
    Stopped,
    /// While its guest was running, possibly in the middle of a write.
    Running,
}

/// Whether disks can be made and checked. If not, reports the test as skipped.
pub fn available_or_skip() -> Result<bool> {
    let tried = Command::new("qemu-img")
        .arg("--version")
        .stdout(Stdio::null())
        .status();
    let is_there = tried.is_ok_and(|status| status.success());
    if !is_there {
        skipped("no qemu-img, run scripts/setup build")?;
    }
    Ok(is_there)
}

impl Disk {
    /// A disk whose guest has not begun to write.
    pub fn new() -> Result<Self> {
        let memory = Path::new("/dev/shm");
        let folder = match memory.is_dir() {
            true => TempDir::with_prefix_in("vamoose-", memory),
            false => TempDir::with_prefix("vamoose-"),
        };
        let folder = folder.context("creating a folder for a disk")?;
        let raw = folder.path().join("raw");
        fs::write(&raw, initial()).context("writing a disk")?;
        let disk = Self {
            is_direct: can_be_direct(&raw),
            folder,
        };
        let options = format!("cluster_size={SECTOR}");
        let mut convert = Command::new("qemu-img");
        convert.args(["convert", "-f", "raw", "-O", "qcow2", "-o", &options]);
        run(convert.arg(&raw).arg(disk.path()))?;
        Ok(disk)
    }

    /// The image.
    pub fn path(&self) -> PathBuf {
        self.folder().join("disk.qcow2")
    }

    /// The folder of the image, used by nothing but this disk.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Whether QEMU can bypass the host's page cache, as is usual for shared storage.
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// A machine with this disk and `ram` bytes, which boots from the disk unless it is made to wait for an incoming migration.
    pub fn machine(&self, binary: &Binary, ram: u64) -> Builder {
        // Both flush after each write, as the BIOS has no call for it.
        let cache = match self.is_direct {
            true => "directsync",
            false => "writethrough",
        };
        let drive = format!(
            "if=none,id=disk,format=qcow2,cache={cache},file={}",
            self.path().display()
        );
        Builder::bios(binary, ram)
            .argument("-drive")
            .argument(drive)
            .argument("-device")
            .argument("virtio-blk-pci,drive=disk,bootindex=1")
    }

    /// Checks the whole disk: every number is in its sector once, up to the guest's counter, which is returned, and no call has
    /// failed. `ram` is the memory of the QEMU that had the guest last. No QEMU may have the image open for writing.
    ///
    /// # Errors
    /// When a sector or the image is wrong, or a process has the image locked.
    pub fn check(&self, ram: &Path, ended: Ended) -> Result<u32> {
        let failures = counter::word_at(ram, FAILURES)?;
        ensure!(
            failures == 0,
            "{failures} calls have failed, the last one with AX = {:#x}",
            counter::word_at(ram, FAILURES + 4)? & 0xffff
        );
        let last = counter::count(ram)?;
        check_sectors(&self.content(ended)?, last)?;
        Ok(last)
    }

    /// Checks the disk of a guest that had reported this number, and may have made any further consecutive writes.
    pub fn check_since(&self, told: u32, ended: Ended) -> Result<u32> {
        let content = self.content(ended)?;
        let sectors = content.chunks(SECTOR).skip(1);
        let last = sectors.map(|sector| word(sector, 0)).max().unwrap_or(0);
        ensure!(
            last >= told,
            "the guest was at {told}, and the disk at {last}"
        );
        check_sectors(&content, last)?;
        Ok(last)
    }

    /// The content of the disk, if its image is valid.
    fn content(&self, ended: Ended) -> Result<Vec<u8>> {
        self.check_image(ended)?;
        let raw = self.folder.path().join("raw");
        let mut convert = Command::new("qemu-img");
        convert.args(["convert", "-f", "qcow2", "-O", "raw"]);
        run(convert.arg(self.path()).arg(&raw))?;
        fs::read(&raw).context("reading what is on a disk")
    }

    /// Checks that the image is valid, and not locked.
    fn check_image(&self, ended: Ended) -> Result<()> {
        /// Exit status of `qemu-img check` if its only finding is leaked clusters.
        const LEAKS: i32 = 3;
        let output = Command::new("qemu-img")
            .args(["check", "-f", "qcow2"])
            .arg(self.path())
            .output()
            .context("running qemu-img")?;
        match output.status.code() {
            Some(0) => Ok(()),
            Some(LEAKS) if ended == Ended::Running => Ok(()),
            _ => bail!(
                "qemu-img check: {} {}",
                String::from_utf8_lossy(&output.stdout).trim(),
                String::from_utf8_lossy(&output.stderr).trim()
            ),
        }
    }
}

/// Waits until the guest has written for the first time, and returns its initial memory.
pub fn wait_begun(qemu: &Qemu, within: Duration) -> Result<Image> {
    let begin = Instant::now();
    loop {
        let printed = qemu.printed()?;
        if printed.starts_with('.') {
            break;
        }
        ensure!(
            printed.is_empty() && begin.elapsed() < within,
            "the guest has not begun to write: it has printed `{printed}`, and QEMU says: {}",
            qemu.stderr()
        );
        thread::sleep(LOOK);
    }
    let size = fs::metadata(qemu.ram())
        .context("the guest's memory")?
        .len();
    let size = usize::try_from(size)?;
    let bios = size.saturating_sub(BIOS)..size;
    Image::of_begun(qemu.ram(), vec![PAGES.end..1 << 20, bios])
}

/// Waits until the guest has written this many more numbers.
pub fn wait_written(qemu: &Qemu, more: u32, within: Duration) -> Result<()> {
    let (start, begin) = (counter::count(qemu.ram())?, Instant::now());
    while counter::count(qemu.ram())? < start + more {
        ensure!(
            begin.elapsed() < within,
            "the guest does not write on from number {start}; it has printed `{}`",
            qemu.printed()?
        );
        thread::sleep(LOOK);
    }
    Ok(())
}

/// The initial content of the disk.
fn initial() -> Vec<u8> {
    let mut content = vec![0; (1 + SECTORS) * SECTOR];
    content[..CODE.len()].copy_from_slice(&CODE);
    content[SECTOR - 2..SECTOR].copy_from_slice(&BOOTABLE);
    content
}

/// Whether the file system supports direct I/O.
fn can_be_direct(file: &Path) -> bool {
    let flags = OFlags::DIRECT.bits().cast_signed();
    let mut options = File::options();
    options.read(true).custom_flags(flags).open(file).is_ok()
}

fn check_sectors(content: &[u8], last: u32) -> Result<()> {
    let start = initial();
    ensure!(content.len() == start.len(), "the disk has another size");
    ensure!(
        content[..SECTOR] == start[..SECTOR],
        "the boot sector was changed"
    );
    for (index, sector) in content.chunks(SECTOR).skip(1).enumerate() {
        check_sector(sector, index, last)
            .with_context(|| format!("sector {}, and the guest is at {last}", index + 1))?;
    }
    Ok(())
}

/// A write that was in progress when the guest was paused may be on the disk before the guest knows it.
fn check_sector(sector: &[u8], index: usize, last: u32) -> Result<()> {
    let is_under_way = (last as usize + 1) % SECTORS == index;
    if sector == sector_at(index, last) || is_under_way && sector == sector_at(index, last + 1) {
        return Ok(());
    }
    let words = |sector: &[u8]| [0, SUM, WRITES, END].map(|at| word(sector, at));
    let ([newest, sum, writes, end], must_be) = (words(sector), words(&sector_at(index, last)));
    let [expected, expected_sum, expected_writes, _] = must_be;
    bail!(
        "its last number is {newest} and {end} at its end, must be {expected}; its sum is {sum}, must be {expected_sum}; \
         it was written {writes} times, must be {expected_writes}"
    )
}

/// The content of a sector at the number `last`.
fn sector_at(index: usize, last: u32) -> [u8; SECTOR] {
    let mut sector = [0; SECTOR];
    let numbers = (1..=last).filter(|number| *number as usize % SECTORS == index);
    let [mut newest, mut sum, mut writes] = [0_u32; 3];
    for number in numbers {
        (newest, sum, writes) = (number, sum.wrapping_add(number), writes + 1);
    }
    for (at, value) in [(0, newest), (SUM, sum), (WRITES, writes), (END, newest)] {
        sector[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
    sector
}

const SECTOR: usize = 512;
/// The number of sectors that are written.
const SECTORS: usize = 1024;
const SUM: usize = 4;
const WRITES: usize = 8;
const END: usize = 508;
/// Address in guest memory of the number of failed BIOS calls.
const FAILURES: u64 = 0x504;
/// SeaBIOS reserves this much at the end of memory, for device queues among others.
const BIOS: usize = 256 << 10;
const LOOK: Duration = Duration::from_millis(2);

/// At the end of a boot sector.
const BOOTABLE: [u8; 2] = [0x55, 0xaa];

/// At 0x7c00, where the BIOS loads it, with the disk's number in DL.
#[rustfmt::skip]
const CODE: [u8; 201] = [
    0xfa,                                                 //         cli
    0x31, 0xc0,                                           //         xor  ax, ax
    0x8e, 0xd8,                                           //         mov  ds, ax
    0x8e, 0xd0,                                           //         mov  ss, ax
    0xbc, 0x00, 0x7c,                                     //         mov  sp, 0x7c00
    0x88, 0x16, 0xb8, 0x7c,                               //         mov  [drive], dl
    0xb0, 0x34,                                           //         mov  al, 0x34
    0xe6, 0x43,                                           //         out  0x43, al              the timer: 1193182 / 11932 = 100 times a second
    0xb0, 0x9c,                                           //         mov  al, 11932 & 255
    0xe6, 0x40,                                           //         out  0x40, al
    0xb0, 0x2e,                                           //         mov  al, 11932 >> 8
    0xe6, 0x40,                                           //         out  0x40, al
    0x66, 0x31, 0xed,                                     //         xor  ebp, ebp
    0x66, 0x89, 0x2e, 0x00, 0x05,                         //         mov  [0x500], ebp
    0x66, 0x89, 0x2e, 0x04, 0x05,                         //         mov  [0x504], ebp
    0xbb, 0x00, 0x10,                                     //         mov  bx, 0x1000
    0xfc,                                                 //         cld
    0x8e, 0xc3,                                           // zero:   mov  es, bx
    0x31, 0xff,                                           //         xor  di, di
    0x31, 0xc0,                                           //         xor  ax, ax
    0xb9, 0x00, 0x80,                                     //         mov  cx, 0x8000
    0xf3, 0xab,                                           //         rep  stosw                 64 KiB of zeros
    0x81, 0xc3, 0x00, 0x10,                               //         add  bx, 0x1000
    0x81, 0xfb, 0x00, 0x90,                               //         cmp  bx, 0x9000
    0x75, 0xeb,                                           //         jne  zero
    0xfb,                                                 //         sti
    0xf4,                                                 // next:   hlt                        until the next tick
    0x66, 0x89, 0xeb,                                     //         mov  ebx, ebp
    0x66, 0x43,                                           //         inc  ebx
    0x89, 0xd8,                                           //         mov  ax, bx
    0x25, 0xff, 0x03,                                     //         and  ax, 1023
    0x40,                                                 //         inc  ax
    0xa3, 0xc1, 0x7c,                                     //         mov  [sector], ax
    0xb4, 0x42,                                           //         mov  ah, 0x42              read
    0xe8, 0x59, 0x00,                                     //         call disk
    0x72, 0x4b,                                           //         jc   failed
    0x66, 0x89, 0x1e, 0x00, 0x80,                         //         mov  [0x8000], ebx
    0x66, 0x01, 0x1e, 0x04, 0x80,                         //         add  [0x8004], ebx
    0x66, 0xff, 0x06, 0x08, 0x80,                         //         inc  dword [0x8008]
    0x66, 0x89, 0x1e, 0xfc, 0x81,                         //         mov  [0x81fc], ebx
    0xb8, 0x00, 0x43,                                     //         mov  ax, 0x4300            write
    0xe8, 0x3d, 0x00,                                     //         call disk
    0x72, 0x2f,                                           //         jc   failed
    0x66, 0x89, 0xdd,                                     //         mov  ebp, ebx
    0x89, 0xd8,                                           //         mov  ax, bx
    0x83, 0xe0, 0x7f,                                     //         and  ax, 127
    0xc1, 0xe0, 0x08,                                     //         shl  ax, 8
    0x05, 0x00, 0x10,                                     //         add  ax, 0x1000
    0x8e, 0xc0,                                           //         mov  es, ax
    0x26, 0x66, 0x89, 0x1e, 0x00, 0x00,                   //         mov  [es:0], ebx
    0x26, 0x66, 0x01, 0x1e, 0x04, 0x00,                   //         add  [es:4], ebx
    0x26, 0x66, 0x89, 0x1e, 0xfc, 0x0f,                   //         mov  [es:4092], ebx
    0x66, 0x89, 0x1e, 0x00, 0x05,                         //         mov  [0x500], ebx
    0xb0, 0x2e,                                           //         mov  al, '.'
    0xba, 0xf8, 0x03,                                     // say:    mov  dx, 0x3f8             the serial port
    0xee,                                                 //         out  dx, al
    0xeb, 0x9f,                                           //         jmp  next
    0xa3, 0x08, 0x05,                                     // failed: mov  [0x508], ax
    0x66, 0xff, 0x06, 0x04, 0x05,                         //         inc  dword [0x504]
    0xb0, 0x21,                                           //         mov  al, '!'
    0xeb, 0xee,                                           //         jmp  say
    0x8a, 0x16, 0xb8, 0x7c,                               // disk:   mov  dl, [drive]
    0xbe, 0xb9, 0x7c,                                     //         mov  si, packet
    0xcd, 0x13,                                           //         int  0x13
    0xc3,                                                 //         ret
    0x00,                                                 // drive:  db   0
    0x10, 0x00,                                           // packet: db   16, 0
    0x01, 0x00,                                           //         dw   1
    0x00, 0x80, 0x00, 0x00,                               //         dw   0x8000, 0
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,       // sector: dd   0, 0
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qemu::{available, kvm_or_skip, newest_or_skip};

    const MIB: u64 = 1 << 20;
    const LIMIT: Duration = Duration::from_secs(120);

    /// Starts a guest, has it write so many numbers, stops it and checks all that can be checked.
    fn writes(machine: &Builder, disk: &Disk, numbers: u32) {
        let mut qemu = machine.start().unwrap();
        let image = wait_begun(&qemu, LIMIT).unwrap();
        wait_written(&qemu, numbers, LIMIT).unwrap();
        qemu.qmp.stop().unwrap();
        let last = image.check(qemu.ram()).unwrap();
        assert!(last > numbers);
        let locked = disk.check(qemu.ram(), Ended::Stopped).unwrap_err();
        assert!(format!("{locked:#}").contains("lock"), "{locked:#}");
        qemu.kill().unwrap();
        assert_eq!(disk.check(qemu.ram(), Ended::Stopped).unwrap(), last);

        let mut memory = fs::read(qemu.ram()).unwrap();
        let mut refused = |address: usize, what: &str| {
            memory[address] ^= 16;
            fs::write(qemu.ram(), &memory).unwrap();
            memory[address] ^= 16;
            let error = disk.check(qemu.ram(), Ended::Stopped).unwrap_err();
            assert!(format!("{error:#}").contains(what), "{error:#}");
        };
        refused(0x500, "its last number is");
        refused(0x504, "16 calls have failed");
    }

    #[test]
    fn it_writes_and_every_sector_can_be_checked() {
        if !available_or_skip().unwrap() {
            return;
        }
        for binary in available() {
            let disk = Disk::new().unwrap();
            writes(&disk.machine(binary, 4 * MIB), &disk, 10);
        }
    }

    #[test]
    fn it_writes_under_kvm() {
        let Some(binary) = newest_or_skip().unwrap() else {
            return;
        };
        if available_or_skip().unwrap() && kvm_or_skip().unwrap() {
            let disk = Disk::new().unwrap();
            writes(&disk.machine(&binary, 4 * MIB).kvm(), &disk, 10);
        }
    }

    #[test]
    fn it_comes_to_each_sector_again() {
        let Some(binary) = newest_or_skip().unwrap() else {
            return;
        };
        if available_or_skip().unwrap() {
            let disk = Disk::new().unwrap();
            writes(&disk.machine(&binary, 4 * MIB), &disk, 1030);
        }
    }

    #[test]
    fn what_is_wrong_with_a_sector() {
        let at = |last| sector_at(5, last);
        check_sector(&at(3), 5, 3).unwrap();
        check_sector(&at(5), 5, 1028).unwrap();
        check_sector(&at(1029), 5, 1029).unwrap();
        // The next number may be there already, one that was made later may not.
        check_sector(&at(1029), 5, 1028).unwrap();
        check_sector(&at(1029), 5, 1027).unwrap_err();
        let lost = check_sector(&at(5), 5, 1029).unwrap_err();
        assert!(format!("{lost}").contains("is 5 and 5 at its end, must be 1029"));
        let mut twice = at(1029);
        twice[SUM..SUM + 4].copy_from_slice(&(5 + 2 * 1029_u32).to_le_bytes());
        twice[WRITES] = 3;
        let twice = check_sector(&twice, 5, 1029).unwrap_err();
        let expected = "its sum is 2063, must be 1034; it was written 3 times, must be 2";
        assert!(format!("{twice}").contains(expected), "{twice}");
    }
}
