//! The disks of a guest: one that both hosts reach, or disks of each host that libvirt copies.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use lab::ram::{self, Fill};

use super::{Hosts, Where};

/// The disks of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Storage {
    /// An image on both hosts, see [`lab::writer`]. libvirt does not recognize the file system as shared, so `virsh migrate` needs
    /// `--unsafe`.
    Shared,
    /// Two images on each host: one that the guest writes to, and [`DATA`] of so many MiB, which the guest leaves alone.
    Copied(Copied, u64),
}

/// The form of the images that libvirt copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copied {
    Raw,
    Qcow2,
    /// Images over backing files that both hosts reach.
    Increment,
}

/// What the guest writes to, and what it leaves alone, in each host's `/var/lib`.
const WRITTEN: &str = "var/lib/written";
const DATA: &str = "var/lib/data";

impl Storage {
    /// The options of `virsh migrate` for it.
    pub(crate) fn options(self) -> &'static [&'static str] {
        match self {
            Self::Shared => &[],
            Self::Copied(Copied::Raw | Copied::Qcow2, _) => &["--copy-storage-all"],
            Self::Copied(Copied::Increment, _) => &["--copy-storage-inc"],
        }
    }

    /// Makes images that are copied: with content at the first host, and without it at the second one.
    pub(super) fn make(self, hosts: &Hosts) -> Result<()> {
        let Self::Copied(copied, mib) = self else {
            return Ok(());
        };
        let size = mib << 20;
        let data = hosts.disk.folder().join("data");
        ram::write(&data, size, &content()?, 1)?;
        let shared = [(hosts.disk.path(), "qcow2", WRITTEN), (data, "raw", DATA)];
        for (content, format, name) in shared {
            let [first, second] = hosts.hosts.each_ref().map(|host| host.path(name));
            let content = content.as_path();
            match copied {
                Copied::Raw => {
                    convert(content, "raw", &first)?;
                    fs::File::create(second)?.set_len(fs::metadata(first)?.len())?;
                }
                Copied::Qcow2 => {
                    convert(content, "qcow2", &first)?;
                    // Without the content of this file, but with its size.
                    over(content, format, &second)?;
                    qemu_img(&["rebase", "-u", "-f", "qcow2", "-b", ""], [&second])?;
                }
                Copied::Increment => {
                    for image in [&first, &second] {
                        over(content, format, image)?;
                    }
                }
            }
        }
        if copied == Copied::Increment {
            let mut write = Command::new("qemu-io");
            let half = format!("write -P 85 0 {}", size / 2);
            let image = hosts.hosts[0].path(DATA);
            lab::run(write.args(["-f", "qcow2", "-c", &half]).arg(image))?;
        }
        Ok(())
    }

    /// The disks in libvirt's XML. The guest has no driver for IDE.
    pub(super) fn disks(self, hosts: &Hosts) -> String {
        const VIRTIO: &str = "dev='vda' bus='virtio'";
        let disk = |format, cache, path: PathBuf, target| {
            format!(
                "<disk type='file' device='disk'>\
                 <driver name='qemu' type='{format}' cache='{cache}'/><source file='{}'/><target {target}/>\
                 </disk>",
                path.display()
            )
        };
        let copied = match self {
            Self::Shared => {
                let cache = match hosts.disk.is_direct() {
                    true => "none",
                    false => "writethrough",
                };
                return disk("qcow2", cache, hosts.disk.path(), VIRTIO);
            }
            Self::Copied(copied, _) => copied,
        };
        let format = copied.format();
        let disks = [(WRITTEN, VIRTIO), (DATA, "dev='hda' bus='ide'")];
        let disks = disks.map(|(name, target)| {
            let path = Path::new("/").join(name);
            disk(format, "writethrough", path, target)
        });
        disks.concat()
    }

    /// Once the guest has ended: puts what it has written at this host on the shared disk, and compares the copies, if it has moved.
    pub(super) fn collect(self, hosts: &Hosts, at: Where) -> Result<()> {
        let Self::Copied(copied, _) = self else {
            return Ok(());
        };
        let collected = hosts.disk.folder().join("collected");
        convert(&at.of(hosts).path(WRITTEN), "qcow2", &collected).context("what was written")?;
        fs::rename(collected, hosts.disk.path())?;
        if at == Where::First {
            return Ok(());
        }
        let compare = ["compare", "-f", copied.format(), "-F", copied.format()];
        let images = hosts.hosts.each_ref().map(|host| host.path(DATA));
        qemu_img(&compare, images.each_ref()).context("the disks differ")
    }
}

impl Copied {
    fn format(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 | Self::Increment => "qcow2",
        }
    }
}

/// Half zeros, half this machine's files.
fn content() -> Result<Fill> {
    let files = ram::host_files(32 << 20)?;
    Ok(Fill::WithZeros(50, Box::new(Fill::Files(files))))
}

fn convert(from: &Path, format: &str, to: &Path) -> Result<()> {
    // With zeros as allocated as anything else, as a disk that was in use has them.
    qemu_img(&["convert", "-S", "0", "-O", format], [from, to])
}

/// Makes a qcow2 image over a backing file.
fn over(backing: &Path, format: &str, image: &Path) -> Result<()> {
    let backing = backing.to_str().context("the name of an image")?;
    let create = ["create", "-q", "-f", "qcow2", "-F", format, "-b", backing];
    qemu_img(&create, [image])
}

fn qemu_img<const N: usize>(
    arguments: &[&str],
    images: [&(impl AsRef<Path> + ?Sized); N],
) -> Result<()> {
    let mut command = Command::new("qemu-img");
    command.args(arguments);
    for image in images {
        command.arg(image.as_ref());
    }
    lab::run(&mut command).map(drop)
}
