//! The smallest running guest: 111 bytes of 16-bit code in place of the firmware, which count 200 times per second and write each
//! number into the next page of memory. It starts in a tenth of a second. Its counter determines the content of its memory, so
//! every page can be checked at any time, on any host.
//!
//! ```text
//!  0x00500             the last number, 32 bits
//!  0x10000 .. 0x90000  128 pages: number n goes to page n % 128
//!                      at 0 and at 4092: the last number of this page; at 4: the sum of all its numbers, added to what was there
//!  everything else     as it was at the start
//! ```
//! A page that a migration missed at some moment lacks a number in its sum for ever.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::qemu::{Binary, Builder};
use crate::ram::{self, Fill, PAGE};

/// Writes the firmware into a file, which must exist while QEMUs are started with it.
pub fn write_firmware(path: &Path) -> Result<()> {
    let mut rom = vec![0; 64 << 10];
    rom[..CODE.len()].copy_from_slice(&CODE);
    rom[RESET..][..JUMP.len()].copy_from_slice(&JUMP);
    fs::write(path, rom).with_context(|| format!("writing {}", path.display()))
}

/// A machine with this guest and `ram` bytes, filled with [`Fill::Mixed`] by `seed`.
pub fn machine(binary: &Binary, ram: u64, firmware: &Path, seed: u64) -> Builder {
    Builder::firmware(binary, ram, firmware).content(Fill::Mixed, seed)
}

/// The initial memory of a guest.
#[derive(Clone, Debug)]
pub struct Image {
    start: Vec<u8>,
    /// Memory above the guest's stack that its firmware uses while it runs.
    of_firmware: Vec<Range<usize>>,
}

impl Image {
    /// The initial memory of [`machine`] with the same `ram` and `seed`.
    pub fn new(size: u64, seed: u64) -> Result<Self> {
        let file = tempfile::NamedTempFile::new().context("creating a temporary file")?;
        ram::write(file.path(), size, &Fill::Mixed, seed)?;
        let bytes = fs::read(file.path()).context("reading the image back")?;
        ensure!(bytes.len() > PAGES.end, "a guest has 1 MiB at least");
        Ok(Self {
            start: bytes,
            of_firmware: Vec::new(),
        })
    }

    /// The initial memory of a guest that has begun to count, if its pages were zeros before.
    pub(crate) fn of_begun(ram: &Path, of_firmware: Vec<Range<usize>>) -> Result<Self> {
        let mut start = fs::read(ram).with_context(|| format!("reading {}", ram.display()))?;
        ensure!(start.len() > PAGES.end, "a guest has 1 MiB at least");
        start[COUNTER..COUNTER + 4].fill(0);
        start[PAGES].fill(0);
        Ok(Self { start, of_firmware })
    }

    /// Checks all memory of a paused guest. Returns its counter.
    ///
    /// # Errors
    /// When a page is wrong, or the file cannot be read.
    pub fn check(&self, ram: &Path) -> Result<u32> {
        let memory = fs::read(ram).with_context(|| format!("reading {}", ram.display()))?;
        ensure!(
            memory.len() == self.start.len(),
            "the guest has {} bytes of memory",
            memory.len()
        );
        // A guest that has never run has not set its counter to zero yet.
        let begun = memory[..PAGE] != self.start[..PAGE];
        let last = if begun { word(&memory, COUNTER) } else { 0 };
        let pages = memory.chunks(PAGE).zip(self.start.chunks(PAGE));
        for (number, (page, before)) in pages.enumerate() {
            let address = number * PAGE;
            if PAGES.contains(&address) {
                check_page(page, before, (address - PAGES.start) / PAGE, last)
                    .with_context(|| format!("page {number}, and the guest is at {last}"))?;
            } else if page != before && !self.changes(address) {
                bail!("page {number} was changed, but the guest never writes it");
            }
        }
        Ok(last)
    }

    fn changes(&self, address: usize) -> bool {
        let mut of_firmware = self.of_firmware.iter();
        address < PAGES.start || of_firmware.any(|range| range.contains(&address))
    }
}

/// The counter of a guest, running or not. Undefined before the guest has begun to count.
pub fn count(ram: &Path) -> Result<u32> {
    word_at(ram, COUNTER as u64)
}

/// A 32-bit word of a guest's memory.
pub(crate) fn word_at(ram: &Path, address: u64) -> Result<u32> {
    let mut bytes = [0; 4];
    let read =
        |bytes: &mut [u8]| -> io::Result<()> { File::open(ram)?.read_exact_at(bytes, address) };
    read(&mut bytes).with_context(|| format!("reading {}", ram.display()))?;
    Ok(u32::from_le_bytes(bytes))
}

/// The guest may have been paused between two stores, so its page may hold part of the number after `last`.
fn check_page(page: &[u8], before: &[u8], index: usize, last: u32) -> Result<()> {
    let mut expected = before.to_vec();
    let mut newest = None;
    for number in numbers_of(index, last) {
        store(&mut expected, number, 3);
        newest = Some(number);
    }
    let is_whole = page == expected;
    let next = last.wrapping_add(1);
    let is_begun = |stores| {
        let mut begun = expected.clone();
        store(&mut begun, next, stores);
        page == begun
    };
    if is_whole || next as usize % COUNT == index && (1..=3).any(is_begun) {
        return Ok(());
    }
    let Some(newest) = newest else {
        bail!("it was changed before its first number");
    };
    bail!(
        "its last number is {} and {} at its end, must be {newest}; its sum is {}, must be {}",
        word(page, 0),
        word(page, END),
        word(page, SUM),
        word(&expected, SUM)
    )
}

/// Makes the first of the three stores that write a number to a page.
fn store(page: &mut [u8], number: u32, stores: usize) {
    let sum = word(page, SUM).wrapping_add(number);
    for (at, value) in [(0, number), (SUM, sum), (END, number)].iter().take(stores) {
        page[*at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
}

/// The numbers up to `last` that are written to a page.
fn numbers_of(index: usize, last: u32) -> impl Iterator<Item = u32> + Clone {
    (1..=last).filter(move |number| *number as usize % COUNT == index)
}

pub(crate) fn word(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

const COUNTER: usize = 0x500;
/// The pages that numbers are written to.
pub(crate) const PAGES: Range<usize> = 0x10000..0x90000;
const COUNT: usize = (PAGES.end - PAGES.start) / PAGE;
const SUM: usize = 4;
const END: usize = 4092;

/// The reset vector, 16 bytes below the end of the firmware: a jump to its start.
const RESET: usize = 0xfff0;
const JUMP: [u8; 5] = [0xea, 0x00, 0x00, 0x00, 0xf0];

#[rustfmt::skip]
const CODE: [u8; 111] = [
    0xfa,                               //        cli
    0x31, 0xc0,                         //        xor  ax, ax
    0x8e, 0xd8,                         //        mov  ds, ax
    0x8e, 0xd0,                         //        mov  ss, ax
    0xbc, 0x00, 0x70,                   //        mov  sp, 0x7000
    0x66, 0x31, 0xdb,                   //        xor  ebx, ebx
    0x66, 0x89, 0x1e, 0x00, 0x05,       //        mov  [0x500], ebx
    0xc7, 0x06, 0x20, 0x00, 0x68, 0x00, //        mov  word [8 * 4], tick
    0xc7, 0x06, 0x22, 0x00, 0x00, 0xf0, //        mov  word [8 * 4 + 2], 0xf000
    0xb0, 0x11, 0xe6, 0x20,             //        out  0x20, 0x11      the interrupt controller: vectors from 8 on,
    0xb0, 0x08, 0xe6, 0x21,             //        out  0x21, 8
    0xb0, 0x04, 0xe6, 0x21,             //        out  0x21, 4
    0xb0, 0x01, 0xe6, 0x21,             //        out  0x21, 1
    0xb0, 0xfe, 0xe6, 0x21,             //        out  0x21, 0xfe      nothing but the timer
    0xb0, 0x34, 0xe6, 0x43,             //        out  0x43, 0x34      the timer: 1193182 / 5966 = 200 times a second
    0xb0, 0x4e, 0xe6, 0x40,             //        out  0x40, 5966 & 255
    0xb0, 0x17, 0xe6, 0x40,             //        out  0x40, 5966 >> 8
    0xfb,                               //        sti
    0xf4,                               // again: hlt
    0x66, 0x43,                         //        inc  ebx
    0x89, 0xd8,                         //        mov  ax, bx
    0x83, 0xe0, 0x7f,                   //        and  ax, 127
    0xc1, 0xe0, 0x08,                   //        shl  ax, 8
    0x05, 0x00, 0x10,                   //        add  ax, 0x1000
    0x8e, 0xc0,                         //        mov  es, ax
    0x26, 0x66, 0x89, 0x1e, 0x00, 0x00, //        mov  es:[0], ebx
    0x26, 0x66, 0x01, 0x1e, 0x04, 0x00, //        add  es:[4], ebx
    0x26, 0x66, 0x89, 0x1e, 0xfc, 0x0f, //        mov  es:[4092], ebx
    0x66, 0x89, 0x1e, 0x00, 0x05,       //        mov  [0x500], ebx
    0xeb, 0xd7,                         //        jmp  again
    0x50,                               // tick:  push ax
    0xb0, 0x20, 0xe6, 0x20,             //        out  0x20, 0x20      the interrupt has been taken
    0x58,                               //        pop  ax
    0xcf,                               //        iret
];

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::qemu::{available, kvm_or_skip};

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_guest_may_stop_between_any_two_stores() {
        let before: Vec<u8> = (0..=u8::MAX).cycle().take(PAGE).collect();
        let index = 153 % COUNT;
        let mut page = before.clone();
        store(&mut page, 25, 3);
        check_page(&page, &before, index, 152).unwrap();
        for stores in 1..=3 {
            let mut begun = page.clone();
            store(&mut begun, 153, stores);
            check_page(&begun, &before, index, 152).unwrap();
            // Not before the guest is there, and not on another page.
            for last in [151, 24] {
                check_page(&begun, &before, index, last).unwrap_err();
            }
            check_page(&begun, &before, index + 1, 152).unwrap_err();
        }
        page[END] ^= 1;
        check_page(&page, &before, index, 152).unwrap_err();
    }

    #[test]
    fn it_counts_and_every_page_can_be_checked() {
        let dir = tempfile::tempdir().unwrap();
        let firmware = dir.path().join("firmware");
        write_firmware(&firmware).unwrap();
        let image = Image::new(2 * MIB, 1).unwrap();
        let tcg = |binary| machine(binary, 2 * MIB, &firmware, 1).paused();
        let mut machines: Vec<_> = available().iter().map(tcg).collect();
        if kvm_or_skip().unwrap() {
            machines.extend(machines.clone().into_iter().map(Builder::kvm));
        }
        for machine in machines {
            let mut qemu = machine.start().unwrap();
            assert_eq!(image.check(qemu.ram()).unwrap(), 0);
            qemu.qmp.cont().unwrap();
            let start = Instant::now();
            // Further than once round all its pages.
            while !(150..1 << 20).contains(&count(qemu.ram()).unwrap()) {
                assert!(start.elapsed() < Duration::from_secs(60), "{machine:?}");
                std::thread::sleep(Duration::from_millis(10));
            }
            qemu.qmp.stop().unwrap();
            let last = image.check(qemu.ram()).unwrap();
            assert!(last >= 150);

            let mut memory = fs::read(qemu.ram()).unwrap();
            for address in [PAGES.start + 77 * PAGE + 5, (2 << 20) - 1] {
                memory[address] ^= 1;
                fs::write(qemu.ram(), &memory).unwrap();
                let error = format!("{:#}", image.check(qemu.ram()).unwrap_err());
                assert!(
                    error.contains(&format!("page {}", address / PAGE)),
                    "{error}"
                );
                memory[address] ^= 1;
            }
        }
    }

    #[test]
    fn the_numbers_of_a_page() {
        let of = |index, last| numbers_of(index, last).collect::<Vec<_>>();
        assert_eq!(of(0, 300), [128, 256]);
        assert_eq!(of(1, 300), [1, 129, 257]);
        assert!(of(5, 4).is_empty());
    }
}
