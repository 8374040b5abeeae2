//! Linux guests under TCG that run real programs: Redis or PostgreSQL. `scripts/setup workloads` fetches them. The guest's script
//! is `guest/workload`; the network is [`Lan`].

use std::fs;
use std::io::Cursor;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use cpio::NewcBuilder as Entry;

use crate::guest::{DEVICE, DIRECTORY, Image, PROGRAM, Part};
use crate::net::Lan;
use crate::qemu::{Binary, Builder};
use crate::target_dir;

/// The program in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// Redis on port 6379.
    Redis,
    /// PostgreSQL on port 5432, user `postgres` without a password.
    Postgres,
}

impl Program {
    /// Whether `scripts/setup guest workloads` has fetched it.
    pub fn is_there(self) -> bool {
        let tree = target_dir().join("workloads").join(self.name());
        tree.is_dir() && target_dir().join("guest/drivers").is_dir()
    }

    /// The boot image of a guest with this program.
    pub fn image(self) -> Result<Image> {
        let tree = target_dir().join("workloads").join(self.name());
        ensure!(
            self.is_there(),
            "no {}: run scripts/setup guest workloads",
            tree.display()
        );
        let mut content = Content::system(include_bytes!("../guest/workload"))?;
        content.add_tree(&tree, "")?;
        let part = include_bytes!("../guest/database");
        content.add("database", PROGRAM, part.to_vec());
        content.image()
    }

    /// A machine with `ram` bytes that runs this program, on the [`Lan`].
    pub fn machine(self, image: &Image, binary: &Binary, ram: u64) -> Builder {
        let parameters = format!("vamoose.workload={}", self.name());
        Lan::connect(image.boot(binary, ram, &parameters))
    }

    /// The name of its file tree, and of the function in the guest's script.
    fn name(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::Postgres => "postgres",
        }
    }
}

/// The content of an initramfs.
pub(crate) struct Content(Vec<(Entry, Cursor<Vec<u8>>)>);

impl Content {
    /// A system of busybox, drivers, and this script as its first process.
    pub(crate) fn system(script: &[u8]) -> Result<Self> {
        let mut content = Self(Vec::new());
        content.add_tree(&target_dir().join("guest/drivers"), "drivers")?;
        for name in ["bin", "dev", "etc", "proc", "sys"] {
            content.add(name, DIRECTORY, Vec::new());
        }
        let console = Entry::new("dev/console").rdev_major(5).rdev_minor(1);
        content.0.push((console.mode(DEVICE), Cursor::default()));
        content.add("init", PROGRAM, script.to_vec());
        let busybox = fs::read(Part::Busybox.path()?).context("reading busybox")?;
        content.add("bin/busybox", PROGRAM, busybox);
        Ok(content)
    }

    pub(crate) fn image(self) -> Result<Image> {
        Image::of(self.0)
    }

    pub(crate) fn add(&mut self, name: &str, mode: u32, bytes: Vec<u8>) {
        self.0
            .push((Entry::new(name).mode(mode), Cursor::new(bytes)));
    }

    /// Adds a folder and everything below it. There are no links.
    fn add_tree(&mut self, folder: &Path, name: &str) -> Result<()> {
        if !name.is_empty() {
            self.add(name, DIRECTORY, Vec::new());
        }
        let context = || format!("reading {}", folder.display());
        let mut below: Vec<_> = fs::read_dir(folder)
            .and_then(Iterator::collect)
            .with_context(context)?;
        below.sort_by_key(fs::DirEntry::file_name);
        for entry in below {
            let (path, file_name) = (entry.path(), entry.file_name());
            let file_name = file_name.to_str().with_context(context)?;
            let name = match name {
                "" => file_name.to_owned(),
                _ => format!("{name}/{file_name}"),
            };
            let metadata = entry.metadata().with_context(context)?;
            if metadata.is_dir() {
                self.add_tree(&path, &name)?;
            } else {
                let bytes = fs::read(&path).with_context(context)?;
                self.add(
                    &name,
                    0o100_000 | metadata.permissions().mode() & 0o777,
                    bytes,
                );
            }
        }
        Ok(())
    }
}
