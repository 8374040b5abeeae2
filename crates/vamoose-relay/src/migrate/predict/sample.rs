//! A sample of a guest's pages, read from outside: nothing of the guest or its QEMU is changed.
//!
//! Memory that is shared is read from its file, which the QEMU's user may do; other memory through `/proc/PID/mem`, for which this
//! process needs the right to trace the QEMU (CAP_SYS_PTRACE, or the same user where the system permits it).

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::Path,
};

use vamoose_codec::is_zero;

use crate::ProcessId;

/// A guest's memory.
pub(super) struct Memory {
    file: File,
    /// Where the memory begins in the file.
    start: u64,
    len: u64,
}

/// Pages of a guest, spread over its memory.
pub(super) struct Sample {
    page_size: usize,
    bytes: Vec<u8>,
}

/// Pages of a sample, and most bytes of one.
const PAGES: u64 = 4096;
const BYTES: u64 = 16 << 20;
/// Most runs of neighbouring pages, and bytes of a run.
const RUNS: usize = 64;
const RUN: u64 = 256 << 10;

impl Memory {
    /// The memory of the guest of `process`, which has `ram` bytes.
    pub(super) fn open(process: ProcessId, ram: u64) -> io::Result<Self> {
        let proc = format!("/proc/{}", process.pid);
        let maps = fs::read_to_string(format!("{proc}/maps"))?;
        let mapping = Mapping::of_ram(&maps, ram).ok_or(io::ErrorKind::NotFound)?;
        let (file, start) = match mapping.inode {
            Some(inode) if let Ok(file) = open_shared(&proc, inode) => (file, mapping.offset),
            _ => (File::open(format!("{proc}/mem"))?, mapping.start),
        };
        // Only then did the files belong to this very process.
        let is_alive = process.is_alive().map_err(io::Error::other)?;
        let len = mapping.len.min(ram);
        let memory = Self { file, start, len };
        is_alive
            .then_some(memory)
            .ok_or(io::ErrorKind::NotFound.into())
    }

    /// Reads the same pages each time.
    pub(super) fn sample(&self, page_size: usize) -> io::Result<Sample> {
        let numbers: Vec<_> = self.numbers(page_size).collect();
        let mut bytes = vec![0; numbers.len() * page_size];
        for (number, out) in numbers.iter().zip(bytes.chunks_mut(page_size)) {
            self.read(*number, page_size, out)?;
        }
        Ok(Sample { page_size, bytes })
    }

    /// Pages that are not zero, in runs that begin with pages of the sample: packets hold neighbours, which resemble each other.
    pub(super) fn runs(&self, sample: &Sample) -> io::Result<Vec<u8>> {
        let page_size = sample.page_size;
        let pages = self.len / page_size as u64;
        let all = self.numbers(page_size).zip(sample.pages());
        let used: Vec<_> = all.filter(|(_, page)| !is_zero(page)).collect();
        let mut bytes = Vec::new();
        // From all over the memory.
        let stride = used.len().div_ceil(RUNS).max(1);
        for (first, _) in used.into_iter().step_by(stride) {
            let count = (RUN / page_size as u64).max(1).min(pages - first);
            let mut run = vec![0; usize::try_from(count).map_err(io::Error::other)? * page_size];
            self.read(first, page_size, &mut run)?;
            let pages = run.chunks(page_size).filter(|page| !is_zero(page));
            bytes.extend(pages.flatten());
        }
        Ok(bytes)
    }

    /// Numbers of the pages of a sample.
    fn numbers(&self, page_size: usize) -> impl Iterator<Item = u64> + use<> {
        let page = page_size as u64;
        let pages = self.len / page;
        let count = pages.min(PAGES).min(BYTES / page).max(1);
        (0..count).map(move |at| {
            // One of each part of the memory, not always the first: programs align what they keep.
            let (first, next) = (pages * at / count, pages * (at + 1) / count);
            let any = at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 17;
            first + any % (next - first).max(1)
        })
    }

    /// Reads from the page of this number on.
    fn read(&self, number: u64, page_size: usize, out: &mut [u8]) -> io::Result<()> {
        self.file
            .read_exact_at(out, self.start + number * page_size as u64)
    }
}

impl Sample {
    /// Share of pages that are not zero.
    pub(super) fn used(&self) -> f64 {
        let used = self.pages().filter(|page| !is_zero(page)).count();
        used as f64 / self.pages().count() as f64
    }

    /// Share of pages that differ in a later sample, and these pages: as they were, and as they are there.
    pub(super) fn changed(&self, later: &Self) -> (f64, [Vec<u8>; 2]) {
        let both = self.pages().zip(later.pages());
        let changed: Vec<_> = both.filter(|(before, after)| before != after).collect();
        let share = changed.len() as f64 / self.pages().count() as f64;
        let (before, after): (Vec<_>, Vec<_>) = changed.into_iter().unzip();
        (share, [before.concat(), after.concat()])
    }

    fn pages(&self) -> impl Iterator<Item = &[u8]> {
        self.bytes.chunks(self.page_size)
    }
}

/// The descriptor of the process for a file that it has mapped.
fn open_shared(proc: &str, inode: (u64, u64)) -> io::Result<File> {
    let is_it =
        |path: &Path| fs::metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == inode);
    let entries = fs::read_dir(format!("{proc}/fd"))?;
    let mut paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    File::open(
        paths
            .find(|path| is_it(path))
            .ok_or(io::ErrorKind::NotFound)?,
    )
}

/// A line of `/proc/PID/maps`.
#[derive(Debug, PartialEq)]
struct Mapping {
    start: u64,
    len: u64,
    offset: u64,
    /// Device and inode of a shared file.
    inode: Option<(u64, u64)>,
}

impl Mapping {
    /// The guest's RAM: the smallest mapping for data that can hold it, or the largest part of it.
    fn of_ram(maps: &str, ram: u64) -> Option<Self> {
        let all = || maps.lines().filter_map(Self::parse);
        let whole = all().filter(|it| it.len >= ram).min_by_key(|it| it.len);
        whole.or_else(|| all().max_by_key(|it| it.len))
    }

    /// `None` for code, and for what is not written.
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let permissions = fields.next()?;
        let (offset, device, inode) = (fields.next()?, fields.next()?, fields.next()?);
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let (major, minor) = device.split_once(':')?;
        let device =
            rustix::fs::makedev(hex(major)?.try_into().ok()?, hex(minor)?.try_into().ok()?);
        let start = hex(start)?;
        let is_shared = permissions.ends_with('s');
        permissions.starts_with("rw-").then_some(Self {
            start,
            len: hex(end)?.checked_sub(start)?,
            offset: hex(offset)?,
            inode: is_shared.then_some((device, inode.parse().ok()?)),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::process;

    use super::*;

    const MAPS: &str = "\
55d000000000-55d000100000 rw-p 00000000 00:00 0          [heap]
7f0000000000-7f0040000000 rwxp 00000000 00:00 0
7f1000000000-7f1010000000 rw-p 00000000 00:00 0
7f2000000000-7f2008000000 rw-s 00200000 00:1b 4711       /dev/shm/ram (deleted)
7f3000000000-7f3100000000 r--s 00000000 08:01 12         /usr/share/x";

    #[test]
    fn ram_is_the_mapping_that_just_holds_it() {
        for (ram, start) in [
            (128 << 20, 0x7f20_0000_0000),
            (129 << 20, 0x7f10_0000_0000),
            (256 << 20, 0x7f10_0000_0000),
            // Of several parts, the largest.
            (1 << 30, 0x7f10_0000_0000),
        ] {
            assert_eq!(Mapping::of_ram(MAPS, ram).unwrap().start, start, "{ram}");
        }
        let shared = Mapping::of_ram(MAPS, 128 << 20).unwrap();
        assert_eq!(
            (shared.offset, shared.inode),
            (0x20_0000, Some((0x1b, 4711)))
        );
        assert_eq!(Mapping::of_ram("nonsense\n1-2 rw-p", 1), None);
    }

    #[test]
    fn shares_of_a_sample_are_those_of_the_memory() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let pages = 20_000_u64;
        let page = |number: u64| [u8::from(number.is_multiple_of(4)) * 7; 4096];
        let bytes: Vec<u8> = (0..pages).flat_map(page).collect();
        fs::write(path.path(), &bytes).unwrap();
        let memory = Memory {
            file: File::options()
                .read(true)
                .write(true)
                .open(path.path())
                .unwrap(),
            start: 0,
            len: bytes.len() as u64,
        };
        let before = memory.sample(4096).unwrap();
        assert!((0.22..0.28).contains(&before.used()), "{}", before.used());
        // Every fourth page of each run.
        let runs = memory.runs(&before).unwrap();
        assert!((3 << 20..=4 << 20).contains(&runs.len()), "{}", runs.len());
        assert!(runs.iter().all(|byte| *byte == 7));
        let half = bytes.len() / 2;
        memory
            .file
            .write_all_at(&vec![9; half], half as u64)
            .unwrap();
        let (share, [old, new]) = before.changed(&memory.sample(4096).unwrap());
        assert!((0.48..0.52).contains(&share), "{share}");
        assert!(old.len() == new.len() && new.iter().all(|byte| *byte == 9));
    }

    #[test]
    fn own_memory_is_read() {
        let marked = vec![0xa5_u8; 300 << 20];
        let stat = fs::read_to_string("/proc/self/stat").unwrap();
        let after_name = stat.rsplit_once(')').unwrap().1;
        let start_time = after_name
            .split_whitespace()
            .nth(19)
            .unwrap()
            .parse()
            .unwrap();
        let this = ProcessId {
            pid: process::id(),
            start_time,
        };
        let memory = Memory::open(this, marked.len() as u64).unwrap();
        let sample = memory.sample(4096).unwrap();
        let runs = memory.runs(&sample).unwrap();
        let marked = runs.iter().filter(|byte| **byte == 0xa5).count();
        assert!(marked > 1 << 22, "{marked}");
        let another = ProcessId {
            start_time: start_time + 1,
            ..this
        };
        assert!(Memory::open(another, 1 << 20).is_err());
    }
}
