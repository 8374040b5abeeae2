//! The program that runs in a test guest: fills memory with real file contents, goes on rewriting a part of it, checks all
//! of it over and over, writes to a disk, if there is one, and shows on the serial port that the guest lives.
//!
//! Output, one line each: `tick N MS` every 100 ms (MS: milliseconds of the guest's CLOCK_MONOTONIC since the program
//! started), `ready` once memory is filled and the writer runs, `rounds N` whenever all memory was verified once more,
//! `written N` now and then, when the disk has number N, `corrupt ...` when memory does not hold what was written to it,
//! `fatal ...` when the program cannot go on.
//!
//! Parameters, on the kernel's command line: `vamoose.fill=MIB` of memory in all, `vamoose.hot=MIB` of it to rewrite,
//! `vamoose.rate=PAGES` rewritten a second, `vamoose.change=WORDS` of 8 bytes in each of them, or all where it is not given;
//! with `vamoose.change=counters` each second word is four counters, to which something is added.
//!
//! Built by `scripts/setup guest` with rustc alone, so it uses nothing but std.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

const PAGE: usize = 4096;
const PAGES_PER_MIB: usize = 256;
const TICK: Duration = Duration::from_millis(100);
/// The writer sleeps this long between bursts, so that it never keeps a virtual CPU to itself.
const BURST: Duration = Duration::from_millis(10);
const DISK: &str = "/dev/vda";
/// What is read and written does not stay in the page cache.
const O_DIRECT: i32 = 0o40_000;
/// Cold pages checked in a burst at least: 64 MiB a second.
const CHECKED: usize = 164;

fn main() {
    let ticks = thread::spawn(tick);
    match Parameters::read().and_then(begin) {
        Ok(memory) => {
            println!("ready");
            memory.churn();
        }
        // Process 1 must not end, and the host reads this line.
        Err(error) => println!("fatal {error}"),
    }
    let _ = ticks.join();
}

fn begin(parameters: Parameters) -> io::Result<Memory> {
    thread::spawn(|| {
        if let Err(error) = write_disk() {
            println!("fatal disk: {error}");
        }
    });
    Memory::filled(&parameters)
}

fn tick() {
    let start = Instant::now();
    let mut due = Duration::ZERO;
    for n in 0_u64.. {
        println!("tick {n} {}", start.elapsed().as_millis());
        // A late tick delays the later ones instead of being followed by a burst.
        due = (due + TICK).max(start.elapsed());
        thread::sleep(due.saturating_sub(start.elapsed()));
    }
}

/// Writes one number after another, a hundred a second at most, into the sectors of the disk in turn, as the guest of
/// `lab::writer` does: each sector has its last number at both ends, the sum of its numbers, and how often it was written.
fn write_disk() -> io::Result<()> {
    const SECTOR: usize = 512;
    const SECTORS: u64 = 1024;
    const O_DSYNC: i32 = 0o10_000;
    #[repr(align(512))]
    struct Sector([u8; SECTOR]);

    let mut options = File::options();
    options.read(true).write(true);
    let disk = match options.custom_flags(O_DIRECT | O_DSYNC).open(DISK) {
        Ok(disk) => disk,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let mut sector = Sector([0; SECTOR]);
    for number in 1_u32.. {
        thread::sleep(BURST);
        let at = (1 + u64::from(number) % SECTORS) * SECTOR as u64;
        disk.read_exact_at(&mut sector.0, at)?;
        for (at, added) in [(4, number), (8, 1)] {
            let word = &mut sector.0[at..at + 4];
            let before = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
            word.copy_from_slice(&before.wrapping_add(added).to_le_bytes());
        }
        for at in [0, SECTOR - 4] {
            sector.0[at..at + 4].copy_from_slice(&number.to_le_bytes());
        }
        disk.write_all_at(&sector.0, at)?;
        if number % 10 == 0 {
            println!("written {number}");
        }
    }
    Ok(())
}

struct Parameters {
    fill: usize,
    hot: usize,
    rate: usize,
    change: Change,
}

/// What changes in a hot page.
#[derive(Clone, Copy)]
enum Change {
    First(usize),
    Counters,
}

impl Change {
    /// What is in a hot page before it is rewritten for the first time.
    fn begin(self, page: &mut [u8], index: usize) {
        match self {
            Self::First(_) => fill_page(page, UNCHANGED + index as u64, PAGE / 8),
            // Nothing of it can be compressed.
            Self::Counters => {
                for (word, number) in page.chunks_exact_mut(8).zip((index * PAGE) as u64..) {
                    let noise = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                    word.copy_from_slice(&noise.to_le_bytes());
                }
            }
        }
    }
}

impl Parameters {
    fn read() -> io::Result<Self> {
        let line = fs::read_to_string("/proc/cmdline")?;
        let word = |name: &str| {
            line.split_whitespace()
                .find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
        };
        let value = |name: &str| {
            word(name)
                .map_or(Ok(0), str::parse)
                .map_err(|error| io::Error::other(format!("{name}: {error}")))
        };
        let (fill, hot) = (value("vamoose.fill")?, value("vamoose.hot")?);
        let change = match word("vamoose.change") {
            None => Change::First(PAGE / 8),
            Some("counters") => Change::Counters,
            Some(_) => Change::First(value("vamoose.change")?),
        };
        Ok(Self {
            fill,
            hot: hot.min(fill),
            rate: value("vamoose.rate")?,
            change,
        })
    }
}

/// The guest memory under test: the hot pages first, the cold ones after them.
struct Memory {
    bytes: Vec<u8>,
    /// Where the first whole page starts in `bytes`.
    start: usize,
    /// What each hot page was last written with; how often, if it is counters.
    counters: Vec<u64>,
    /// The checksum of each cold page.
    sums: Vec<u64>,
    rate: usize,
    change: Change,
}

impl Memory {
    fn filled(parameters: &Parameters) -> io::Result<Self> {
        let hot = parameters.hot * PAGES_PER_MIB;
        let cold = parameters.fill * PAGES_PER_MIB - hot;
        let mut bytes = vec![0; (hot + cold + 1) * PAGE];
        let start = bytes.as_ptr().align_offset(PAGE);
        let (written, rest) = bytes[start..].split_at_mut(hot * PAGE);
        for (index, page) in written.chunks_exact_mut(PAGE).enumerate() {
            parameters.change.begin(page, index);
        }
        let filled = &mut rest[..cold * PAGE];
        copy_files(filled)?;
        let sums = filled.chunks_exact(PAGE).map(sum).collect();
        let counters = match parameters.change {
            Change::First(_) => (UNCHANGED..).take(hot).collect(),
            Change::Counters => vec![0; hot],
        };
        Ok(Self {
            bytes,
            start,
            counters,
            sums,
            rate: parameters.rate,
            change: parameters.change,
        })
    }

    /// Rewrites hot pages at the rate asked for, after checking that they still hold what was written last, and checks the
    /// cold ones, at least a quarter of them a second. Never returns.
    fn churn(mut self) {
        let (hot, cold) = (self.counters.len(), self.sums.len());
        let (mut next_hot, mut next_cold, mut rounds) = (0, 0, 0_u64);
        let (mut debt, mut counter) = (0_f64, 0_u64);
        let mut last = Instant::now();
        loop {
            thread::sleep(BURST);
            // After a stall the backlog is forgiven: a burst of it would hog the CPU.
            let elapsed = last.elapsed().min(BURST * 5);
            last = Instant::now();
            debt += elapsed.as_secs_f64() * self.rate as f64;
            while hot > 0 && debt >= 1.0 {
                debt -= 1.0;
                counter += 1;
                self.rewrite(next_hot, counter);
                next_hot = (next_hot + 1) % hot;
            }
            for _ in 0..cold.div_ceil(400).max(CHECKED).min(cold) {
                self.verify(next_cold);
                next_cold += 1;
                if next_cold == cold {
                    next_cold = 0;
                    rounds += 1;
                    println!("rounds {rounds}");
                }
            }
        }
    }

    fn rewrite(&mut self, index: usize, counter: u64) {
        let at = self.start + index * PAGE;
        let page = &mut self.bytes[at..at + PAGE];
        let mut expected = [0; PAGE];
        self.change.begin(&mut expected, index);
        let written = self.counters[index];
        match self.change {
            Change::First(words) => fill_page(&mut expected, written, words),
            Change::Counters => count(&mut expected, written),
        }
        if page != expected {
            println!("corrupt hot page {index}: not what was written with counter {written}");
        }
        self.counters[index] = match self.change {
            Change::First(words) => {
                fill_page(page, counter, words);
                counter
            }
            Change::Counters => {
                count(page, 1);
                written + 1
            }
        };
    }

    fn verify(&mut self, index: usize) {
        let at = self.start + (self.counters.len() + index) * PAGE;
        let found = sum(&self.bytes[at..at + PAGE]);
        if found != self.sums[index] {
            println!(
                "corrupt cold page {index}: checksum {found:x} instead of {:x}",
                self.sums[index]
            );
        }
    }
}

/// The first page is filled with this counter, the next with the next one.
const UNCHANGED: u64 = 1 << 40;

/// Half of the page is noise, half is a repeated word: it compresses, but not to nothing. Only the first `words` are written.
fn fill_page(page: &mut [u8], counter: u64, words: usize) {
    let (noise, text) = page.split_at_mut(PAGE / 2);
    let mut state = counter.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for word in noise.chunks_exact_mut(8).take(words) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes());
    }
    for word in text
        .chunks_exact_mut(8)
        .take(words.saturating_sub(PAGE / 16))
    {
        word.copy_from_slice(&counter.to_le_bytes());
    }
}

/// Adds to the counters of a page, `times` times: one to three to each.
fn count(page: &mut [u8], times: u64) {
    for (number, word) in page.chunks_exact_mut(16).enumerate() {
        for (lane, counter) in word[8..].chunks_exact_mut(2).enumerate() {
            let amount = (1 + (number * 31 + lane * 17) / 7 % 3) as u16;
            let value = u16::from_le_bytes([counter[0], counter[1]]);
            let value = value.wrapping_add((times as u16).wrapping_mul(amount));
            counter.copy_from_slice(&value.to_le_bytes());
        }
    }
}

fn sum(page: &[u8]) -> u64 {
    page.chunks_exact(8)
        .fold(0xcbf2_9ce4_8422_2325, |sum, word| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(word);
            (sum.rotate_left(5) ^ u64::from_le_bytes(bytes)).wrapping_mul(0x0000_0100_0000_01b3)
        })
}

/// Fills `memory` with the files under /fill, over and over; each time round starts elsewhere in each file, so that memory
/// isn't one block repeated at a fixed distance.
fn copy_files(mut memory: &mut [u8]) -> io::Result<()> {
    let mut paths: Vec<PathBuf> = fs::read_dir("/fill")?
        .map(|entry| Ok(entry?.path()))
        .collect::<io::Result<_>>()?;
    paths.sort();
    let mut round = 0_u64;
    while !memory.is_empty() {
        let before = memory.len();
        for path in &paths {
            let mut file = File::open(path)?;
            let length = file.metadata()?.len();
            file.seek(SeekFrom::Start(if length == 0 {
                0
            } else {
                round * 12_345 % length
            }))?;
            while !memory.is_empty() {
                let read = file.read(memory)?;
                if read == 0 {
                    break;
                }
                memory = &mut memory[read..];
            }
        }
        if memory.len() == before {
            return Err(io::Error::other("no content under /fill"));
        }
        round += 1;
    }
    Ok(())
}
