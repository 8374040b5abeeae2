//! Setup that all runs share: programs, network, keys, and the guest's image.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use lab::guest::{Image, Load};
use lab::qemu::{self, Binary, Builder};
use lab::vamoose::{Keys, program};

use super::guard::Guard;
use super::network::Network;
use super::screen::note;

const MIB: u64 = 1 << 20;
/// Memory of the guest.
pub(crate) const RAM: u64 = 1024 * MIB;
/// MiB of files with which the guest fills its memory, repeatedly.
const CONTENT: u32 = 64;
/// MiB that the guest fills and verifies.
pub(crate) const FILLED: u32 = 700;
/// 8 MiB a second, written into 64 MiB: enough for several rounds, and less than the slowest method moves.
pub(crate) const LOAD: Load = Load {
    fill: FILLED,
    hot: 64,
    rate: 2000,
};

pub(crate) struct Setup<'a> {
    pub(crate) guard: &'a Guard,
    binary: Binary,
    pub(crate) vamoose: PathBuf,
    image: Image,
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
        let image = Image::build(CONTENT)?;
        note(format!(
            "a Linux guest with {} MiB of RAM and 2 vCPUs (emulated): {} MiB filled with this machine's files,\n\
             {} pages a second rewritten, all of it verified continuously, a tick every 100 ms",
            RAM / MIB,
            LOAD.fill,
            LOAD.rate,
        ));
        let keys = Keys::make(&vamoose)?;
        for key in &keys.public {
            note(format!(
                "$ vamoose keys init --dir DIR  ->  {}",
                key.trim_end()
            ));
        }
        note(
            "the source host and the destination host have a key each, and trust each other's key",
        );
        Ok(Self {
            guard,
            binary,
            vamoose,
            image,
            keys,
            network,
        })
    }

    /// The guest's machine, equal at both ends.
    pub(crate) fn machine(&self) -> Builder {
        self.image.machine(&self.binary, RAM, &LOAD)
    }
}
