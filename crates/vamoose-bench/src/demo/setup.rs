//! Setup that all moves share: programs, network, keys, and the guest's image.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use lab::guest::{Image, Load, Pattern};
use lab::qemu::{self, Binary, Builder};
use lab::vamoose::{Keys, program};

use super::content::Content;
use super::guard::Guard;
use super::network::Network;
use super::screen::note;

const MIB: u64 = 1 << 20;
/// Memory of the guest.
pub(crate) const RAM: u64 = 1024 * MIB;
/// MiB that the guest changes.
const HOT: u32 = 32;
/// Without a disk: MiB of files in the image, and of memory to fill with these, over and over.
const IN_IMAGE: u32 = 64;
const FILLED: u32 = 640;
/// Pages that the guest changes in a second: enough for several rounds, and less than the slowest method moves.
pub(crate) const RATE: u32 = 2000;
/// Changed words of a page: a quarter.
const CHANGED: u32 = 128;

pub(crate) struct Setup<'a> {
    pub(crate) guard: &'a Guard,
    binary: Binary,
    pub(crate) vamoose: PathBuf,
    image: Image,
    /// `None`: files of the image.
    content: Option<Content>,
    pub(crate) load: Load,
    pub(crate) keys: Keys,
    pub(crate) network: Network,
}

impl<'a> Setup<'a> {
    pub(crate) fn new(guard: &'a Guard, vamoose: Option<&Path>) -> Result<Self> {
        let vamoose = program(vamoose, "vamoose")?;
        let binary = qemu::available().last().cloned();
        let binary = binary.context("there is no QEMU here: run scripts/setup qemu")?;
        note(format!("two unmodified QEMUs {}", binary.version));
        let network = Network::new();
        note(network.describe());
        let content = Image::has_disks().then(Content::gather);
        let content = content.transpose()?;
        // The image's own files are not used if there is a disk.
        let image = Image::build(if content.is_some() { 1 } else { IN_IMAGE })?;
        let filled = content.as_ref().map_or(Ok(FILLED), Content::mebibytes)?;
        let load = Load {
            fill: filled + HOT,
            hot: HOT,
            rate: RATE,
        };
        note(format!(
            "a Linux guest with {} MiB of RAM and 2 emulated CPUs, which fills its memory with real content: {}; \
             programs in the guest would take minutes for that, as its CPUs are emulated\n\
             it changes a quarter of each of {RATE} pages a second, verifies all content over and over, and ticks every 100 ms",
            RAM / MIB,
            content.as_ref().map_or_else(
                || format!("{IN_IMAGE} MiB of this machine's files, over and over"),
                Content::describe,
            ),
        ));
        let keys = Keys::make(&vamoose)?;
        for key in &keys.public {
            note(format!(
                "$ vamoose keys init --keys DIR -> {}",
                key.trim_end()
            ));
        }
        note("both hosts have a key each, and trust each other's key");
        Ok(Self {
            guard,
            binary,
            vamoose,
            image,
            content,
            load,
            keys,
            network,
        })
    }

    /// The guest's machine, equal at both ends.
    pub(crate) fn machine(&self) -> Builder {
        let pattern = Pattern::First(CHANGED);
        let (image, binary, load) = (&self.image, &self.binary, &self.load);
        match &self.content {
            Some(content) => image.machine_with_content(binary, RAM, load, pattern, content.path()),
            None => image.machine_that_writes(binary, RAM, load, pattern),
        }
    }
}
