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
/// Pages that the guest changes in a second: enough for several rounds, and less than the slowest method moves.
pub(crate) const RATE: u32 = 2000;
/// Changed words of a page: a quarter.
const CHANGED: u32 = 128;

pub(crate) struct Setup<'a> {
    pub(crate) guard: &'a Guard,
    binary: Binary,
    pub(crate) vamoose: PathBuf,
    image: Image,
    content: Content,
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
        // The image's own files are not used.
        let image = Image::build(1)?;
        let content = Content::gather(guard)?;
        let load = Load {
            fill: content.mebibytes()? + HOT,
            hot: HOT,
            rate: RATE,
        };
        note(format!(
            "a Linux guest with {} MiB of RAM and 2 emulated CPUs, which fills its memory with real content: {}; \
             programs in the guest would take minutes for that, as its CPUs are emulated\n\
             it changes a quarter of each of {RATE} pages a second, verifies all content over and over, and ticks every 100 ms",
            RAM / MIB,
            content.describe(),
        ));
        let keys = Keys::make(&vamoose)?;
        for key in &keys.public {
            note(format!(
                "$ vamoose keys init --dir DIR -> {}",
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
        let content = self.content.path();
        self.image
            .machine_with_content(&self.binary, RAM, &self.load, pattern, content)
    }
}
