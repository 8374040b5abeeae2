//! A Linux guest that fills its memory, rewrites part of it, checks all of it, and ticks ten times per second on its serial port.
//! Its program is `guest/ticker.rs`, which documents the lines.
//!
//! ```no_run
//! # fn main() -> anyhow::Result<()> {
//! # use std::time::Duration;
//! use lab::guest::{Guest, Image, Load};
//! let Some(binary) = lab::qemu::newest_or_skip()? else { return Ok(()) };
//! let image = Image::build(16)?;
//! let guest = image.machine(&binary, 256 << 20, &Load { fill: 64, hot: 8, rate: 1000 });
//! let (mut source, mut destination) = (Guest::start(&guest)?, Guest::start(&guest.incoming().paused())?);
//! source.wait_ready(Duration::from_secs(60))?;
//! // ... migrate, continue at the destination ...
//! destination.wait_ticks(3, Duration::from_secs(10))?;
//! let continuity = lab::serial::follow(&source.finish()?, &destination.finish()?)?;
//! println!("the guest was away for {:?}", continuity.gap());
//! # Ok(()) }
//! ```

use std::fs::{self, File};
use std::io::{BufWriter, Cursor, Write};
use std::ops::Deref;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use cpio::NewcBuilder as Entry;
use tempfile::TempDir;

use crate::qemu::{Binary, Builder, Qemu};
use crate::serial::{Log, Serial};
use crate::{ram, skipped, target_dir};

/// A boot image: kernel and initramfs. All guests of a test can share one.
#[derive(Debug)]
pub struct Image {
    kernel: PathBuf,
    initrd: PathBuf,
    _dir: TempDir,
}

/// A part of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The Linux kernel.
    Kernel,
    /// A static busybox.
    Busybox,
    /// The program in the guest.
    Ticker,
}

/// The load of the program in the guest.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Memory that it fills and checks, in MiB.
    pub fill: u32,
    /// The rewritten part of `fill`, in MiB.
    pub hot: u32,
    /// Pages rewritten per second. Under TCG a page costs about 10 µs of CPU.
    pub rate: u32,
}

/// The part of a page that a rewrite changes.
#[derive(Clone, Copy, Debug)]
pub enum Pattern {
    /// Everything.
    All,
    /// The first so many words of 8 bytes.
    First(u32),
    /// Every second word: four counters, to each of which one to three is added.
    Counters,
}

impl Image {
    /// A part that is missing for building images.
    pub fn missing() -> Option<Part> {
        let parts = [Part::Kernel, Part::Busybox, Part::Ticker];
        parts.into_iter().find(|part| part.find().is_none())
    }

    /// Builds an initramfs with `content` MiB of this machine's files to fill memory from. A guest needs about twice that besides
    /// the filled memory, and 100 MiB for itself.
    pub fn build(content: u32) -> Result<Self> {
        let mut left = usize::try_from(content)? << 20;
        let mut content = Content::system(include_bytes!("../guest/init"))?;
        content.add("ticker", PROGRAM, read(&Part::Ticker.path()?)?);
        content.add("fill", DIRECTORY, Vec::new());
        for (number, path) in ram::host_files(left as u64)?.iter().enumerate() {
            let mut bytes = read(path)?;
            bytes.truncate(left);
            left -= bytes.len();
            content.add(&format!("fill/{number:05}"), FILE, bytes);
        }
        Self::of(content)
    }

    /// Builds an image with this content of the initramfs.
    pub(crate) fn of(content: Content) -> Result<Self> {
        let kernel = Part::Kernel.path()?;
        let dir = TempDir::with_prefix("vamoose-").context("creating a temporary directory")?;
        let initrd = dir.path().join("initrd");
        let out = BufWriter::new(File::create(&initrd).context("creating the initramfs")?);
        cpio::write_cpio(content.0.into_iter(), out)
            .and_then(|mut out| out.flush())
            .context("writing the initramfs")?;
        Ok(Self {
            kernel,
            initrd,
            _dir: dir,
        })
    }

    /// As [`Image::build`], but where `scripts/setup guest` has not run, reports the test as skipped and returns `None`.
    ///
    /// # Errors
    /// As [`Image::build`], and when skipping is forbidden, see [`skipped`].
    pub fn build_or_skip(content: u32) -> Result<Option<Self>> {
        if Self::missing().is_some() {
            skipped("no kernel for test guests, run scripts/setup guest")?;
            return Ok(None);
        }
        Self::build(content).map(Some)
    }

    /// The files of the kernel and the initramfs.
    pub fn files(&self) -> [&Path; 2] {
        [&self.kernel, &self.initrd]
    }

    /// A machine with `ram` bytes that boots this image with these kernel parameters.
    pub fn boot(&self, binary: &Binary, ram: u64, parameters: &str) -> Builder {
        let command_line = command_line(parameters);
        Builder::linux(binary, ram, &self.kernel, &self.initrd, &command_line)
    }

    /// A machine with `ram` bytes that boots this image and runs the load. Both ends of a migration need the same one.
    pub fn machine(&self, binary: &Binary, ram: u64, load: &Load) -> Builder {
        self.machine_that_writes(binary, ram, load, Pattern::All)
    }

    /// A machine whose load changes part of a page when it rewrites the page.
    pub fn machine_that_writes(
        &self,
        binary: &Binary,
        ram: u64,
        load: &Load,
        pattern: Pattern,
    ) -> Builder {
        let parameters = format!("{}{}", load.parameters(), pattern.parameter());
        self.boot(binary, ram, &parameters)
    }
}

impl Pattern {
    fn parameter(self) -> String {
        match self {
            Self::All => String::new(),
            Self::First(words) => format!(" vamoose.change={words}"),
            Self::Counters => " vamoose.change=counters".to_owned(),
        }
    }
}

impl Load {
    /// The kernel command line of a guest with this load.
    pub fn command_line(&self) -> String {
        command_line(&self.parameters())
    }

    fn parameters(&self) -> String {
        let Self { fill, hot, rate } = self;
        format!("vamoose.fill={fill} vamoose.hot={hot} vamoose.rate={rate}")
    }
}

fn command_line(parameters: &str) -> String {
    format!("{QUIET} {parameters}")
}

/// loglevel: kernel messages would mix with the lines. panic: with -no-reboot, a panic ends QEMU. no_timer_check: on a busy machine
/// the ticks that the kernel counts come too late, and it panics.
const QUIET: &str = "console=ttyS0 quiet loglevel=2 panic=-1 mitigations=off no_timer_check";

/// A QEMU with a watched guest.
#[derive(Debug)]
pub struct Guest {
    /// The QEMU that runs the guest.
    pub qemu: Qemu,
    serial: Serial,
}

impl Guest {
    /// Starts a machine of [`Image::machine`].
    pub fn start(machine: &Builder) -> Result<Self> {
        let mut qemu = machine.start()?;
        let serial = qemu
            .take_serial()
            .context("this machine has no serial port")?;
        Ok(Self {
            serial: Serial::new(serial, Some(qemu.stderr_file()))?,
            qemu,
        })
    }

    /// What has become of QEMU and of its guest, for error messages.
    pub fn fate(&mut self) -> String {
        let end = self.serial.log().end();
        format!("{}\nIts guest says:\n{end}", self.qemu.fate())
    }

    /// Kills QEMU and returns all output of the guest.
    pub fn finish(mut self) -> Result<Log> {
        self.qemu.kill()?;
        Ok(self.serial.finish())
    }
}

/// What the guest prints, and waits for it.
impl Deref for Guest {
    type Target = Serial;

    fn deref(&self) -> &Serial {
        &self.serial
    }
}

impl Part {
    /// The file from `scripts/setup guest`, or else a usable one of the host.
    fn find(self) -> Option<PathBuf> {
        let ours = target_dir().join("guest").join(self.name());
        if ours.exists() {
            return Some(ours);
        }
        let host: &[_] = match self {
            Self::Kernel => &["/vmlinuz", "/boot/vmlinuz"],
            Self::Busybox => &["/bin/busybox"],
            Self::Ticker => &[],
        };
        let can_be_used = |path: &&Path| match self {
            Self::Busybox => is_static(path).unwrap_or(false),
            // Some distributions let only root read it.
            _ => File::open(path).is_ok(),
        };
        let found = host.iter().map(Path::new).find(can_be_used);
        found.map(Path::to_owned)
    }

    /// # Errors
    /// When there is none.
    fn path(self) -> Result<PathBuf> {
        self.find()
            .with_context(|| format!("no {} for guests: run scripts/setup guest", self.name()))
    }

    fn name(self) -> &'static str {
        match self {
            Self::Kernel => "vmlinuz",
            Self::Busybox => "busybox",
            Self::Ticker => "ticker",
        }
    }
}

/// Whether a 64-bit program needs no loader, which the guest does not have.
fn is_static(program: &Path) -> Result<bool> {
    // The lower half of a program header's type.
    const INTERPRETER: u16 = 3;
    let bytes = fs::read(program)?;
    let number = |at: usize| -> Result<u16> {
        let bytes = bytes.get(at..at + 2).context("not a program")?;
        Ok(u16::from_le_bytes(bytes.try_into()?))
    };
    // The table of program headers is right behind the ELF header.
    let (size, count) = (usize::from(number(54)?), usize::from(number(56)?));
    for part in 0..count {
        if number(64 + part * size)? == INTERPRETER {
            return Ok(false);
        }
    }
    Ok(bytes.starts_with(b"\x7fELF\x02"))
}

pub(crate) const DIRECTORY: u32 = 0o040_755;
const DEVICE: u32 = 0o020_600;
pub(crate) const PROGRAM: u32 = 0o100_755;
const FILE: u32 = 0o100_644;

/// The content of an initramfs.
pub(crate) struct Content(Vec<(Entry, Cursor<Vec<u8>>)>);

impl Content {
    /// A system of busybox, drivers, and this script as its first process.
    pub(crate) fn system(script: &[u8]) -> Result<Self> {
        let mut content = Self(Vec::new());
        for name in ["bin", "dev", "drivers", "etc", "proc", "sys"] {
            content.add(name, DIRECTORY, Vec::new());
        }
        let console = Entry::new("dev/console").rdev_major(5).rdev_minor(1);
        content.0.push((console.mode(DEVICE), Cursor::default()));
        content.add("init", PROGRAM, script.to_vec());
        content.add("bin/busybox", PROGRAM, read(&Part::Busybox.path()?)?);
        // Drivers may be missing: with the host's own kernel, guests have no disk.
        let drivers = fs::read_dir(target_dir().join("guest/drivers"));
        for driver in drivers.into_iter().flatten().flatten() {
            let name = format!("drivers/{}", driver.file_name().to_string_lossy());
            content.add(&name, FILE, read(&driver.path())?);
        }
        Ok(content)
    }

    pub(crate) fn add(&mut self, name: &str, mode: u32, bytes: Vec<u8>) {
        self.0
            .push((Entry::new(name).mode(mode), Cursor::new(bytes)));
    }

    /// Adds everything in a folder. There are no links.
    pub(crate) fn add_tree(&mut self, folder: &Path, name: &str) -> Result<()> {
        let context = || format!("reading {}", folder.display());
        let mut below: Vec<_> = fs::read_dir(folder)
            .and_then(Iterator::collect)
            .with_context(context)?;
        below.sort_by_key(fs::DirEntry::file_name);
        for entry in below {
            let name = format!("{name}{}", entry.file_name().to_string_lossy());
            let metadata = entry.metadata().with_context(context)?;
            if metadata.is_dir() {
                self.add(&name, DIRECTORY, Vec::new());
                self.add_tree(&entry.path(), &format!("{name}/"))?;
            } else {
                self.add(&name, metadata.permissions().mode(), read(&entry.path())?);
            }
        }
        Ok(())
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("reading {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_with_a_loader_are_not_static() {
        assert!(!is_static(Path::new("/bin/sh")).unwrap());
        assert!(is_static(Path::new("/dev/null")).is_err());
        let ticker = target_dir().join("guest/ticker");
        if !ticker.exists() {
            return skipped("no ticker, run scripts/setup guest").unwrap();
        }
        assert!(is_static(&ticker).unwrap());
    }
}
