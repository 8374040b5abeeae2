//! The memory of Linux guests in which real programs have worked, as a file. Such a guest runs once, some minutes long, and its
//! memory then fills bare machines: they are the same guest, idle, in each migration.
//!
//! The guest's script is `guest/real`; it has its programs from a disk that `scripts/setup workloads` makes, and the records of
//! `scripts/corpus` as data.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::guest::{Content, DIRECTORY, Guest, Image, PROGRAM};
use crate::qemu::{Binary, Builder};
use crate::target_dir;

/// What has filled the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Real {
    /// Debian, with a quarter of the memory full of its files.
    Base,
    /// PostgreSQL after pgbench.
    Postgres,
    /// A Java service with its objects.
    Jvm,
    /// nginx, and services in node and Python.
    Web,
}

/// The least memory, in bytes, that the programs need. Half of it is enough for [`Real::Base`].
pub const LEAST: u64 = 512 << 20;

/// Time in which Linux begins to run under a usable KVM.
const BOOT: Duration = Duration::from_secs(20);

/// Time limit of the programs, under TCG and on a busy machine.
const LIMIT: Duration = Duration::from_secs(3600);

/// The data of the programs.
const PROGRAMS: [(&str, &[u8]); 4] = [
    (
        "records.py",
        include_bytes!("../../../scripts/corpus.d/records.py"),
    ),
    (
        "Fill.java",
        include_bytes!("../../../scripts/corpus.d/Fill.java"),
    ),
    (
        "fill.js",
        include_bytes!("../../../scripts/corpus.d/fill.js"),
    ),
    (
        "fill.py",
        include_bytes!("../../../scripts/corpus.d/fill.py"),
    ),
];

impl Real {
    /// Whether `scripts/setup guest workloads` has fetched what it needs.
    pub fn is_there() -> bool {
        disk().is_file() && target_dir().join("guest/drivers").is_dir()
    }

    /// The file with the memory of such a guest of `ram` bytes. Makes it if it is missing, and tells the user.
    pub fn memory(self, binary: &Binary, ram: u64) -> Result<PathBuf> {
        self.file(binary, ram, "")
    }

    /// The same of another guest, which booted and worked by itself: a sibling.
    pub fn sibling(self, binary: &Binary, ram: u64, number: usize) -> Result<PathBuf> {
        self.file(binary, ram, &format!("-{number}"))
    }

    fn file(self, binary: &Binary, ram: u64, which: &str) -> Result<PathBuf> {
        let folder = target_dir().join("corpus/guests");
        let file = folder.join(format!("{}-{}{which}.mem", self.name(), ram >> 20));
        if !file.is_file() {
            eprintln!(
                "filling the memory of a guest ({}), once, for {}",
                self.name(),
                file.display()
            );
            fs::create_dir_all(&folder)
                .with_context(|| format!("creating {}", folder.display()))?;
            self.make(binary, ram, &file)
                .with_context(|| format!("making {}", file.display()))?;
        }
        Ok(file)
    }

    fn make(self, binary: &Binary, ram: u64, file: &Path) -> Result<()> {
        ensure!(
            Self::is_there(),
            "no {}: run scripts/setup guest workloads",
            disk().display()
        );
        let least = if self == Self::Base { LEAST / 2 } else { LEAST };
        ensure!(ram >= least, "a guest needs {} MiB", least >> 20);
        let image = image()?;
        let machine = self.machine(&image, binary, ram);
        let mut guest = start(&machine)?;
        if self == Self::Postgres {
            guest.wait("tables", LIMIT, |log| {
                log.lines.iter().any(|line| line.text.starts_with("loaded"))
            })?;
            dump(&mut guest, &file.with_extension("before"))?;
            guest.qemu.qmp.cont()?;
        }
        guest.wait_ready(LIMIT)?;
        dump(&mut guest, file)
    }

    fn machine(self, image: &Image, binary: &Binary, ram: u64) -> Builder {
        let parameters = format!("vamoose.real={}", self.name());
        // What the guest writes goes into a temporary file.
        let drive = format!(
            "file={},format=raw,if=virtio,snapshot=on,cache=unsafe",
            disk().display()
        );
        image
            .boot(binary, ram, &parameters)
            .argument("-drive")
            .argument(drive)
    }

    /// The name of the function in the guest's script.
    fn name(self) -> &'static str {
        match self {
            Self::Base => "base",
            Self::Postgres => "postgres",
            Self::Jvm => "jvm",
            Self::Web => "web",
        }
    }
}

/// Stops the guest, and writes its memory to a file. A reader of the file finds all of it, or nothing.
fn dump(guest: &mut Guest, file: &Path) -> Result<()> {
    guest.qemu.qmp.stop()?;
    let new = file.with_extension("new");
    fs::copy(guest.qemu.ram(), &new)?;
    fs::rename(new, file)?;
    Ok(())
}

/// Starts the guest under KVM if Linux runs under this host's, else under TCG.
fn start(machine: &Builder) -> Result<Guest> {
    let kvm = File::options().read(true).write(true).open("/dev/kvm");
    let begun = kvm.context("/dev/kvm").and_then(|_| {
        let guest = Guest::start(&machine.clone().kvm())?;
        guest.wait("a sign of life", BOOT, |log| !log.lines.is_empty())?;
        Ok(guest)
    });
    begun.or_else(|why| {
        eprintln!("no KVM for this guest, which therefore takes some minutes: {why:#}");
        Guest::start(machine)
    })
}

fn disk() -> PathBuf {
    target_dir().join("workloads/debian.ext4")
}

fn image() -> Result<Image> {
    let mut content = Content::system(include_bytes!("../guest/real"))?;
    content.add("programs", DIRECTORY, Vec::new());
    for (name, text) in PROGRAMS {
        content.add(&format!("programs/{name}"), PROGRAM, text.to_vec());
    }
    Image::of(content)
}
