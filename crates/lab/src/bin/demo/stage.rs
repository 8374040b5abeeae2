//! What all runs share: the programs, the network, the guest's image and `vamoose serve` on the destination host.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use lab::guest::{Image, Load};
use lab::qemu::{self, Binary, Builder};
use lab::vamoose::{Vamoose, program, state_dir};
use tempfile::TempDir;

use crate::guard::Guard;
use crate::network::Network;
use crate::screen::note;

const MIB: u64 = 1 << 20;
/// Of the guest.
const RAM: u64 = 1024 * MIB;
/// MiB of files that the guest fills its memory with, over and over.
const CONTENT: u32 = 64;
/// MiB that the guest fills and verifies.
pub(crate) const FILLED: u32 = 700;
/// Writes 8 MiB a second into 64 MiB: enough for several rounds, and slower than the slowest method moves pages.
const LOAD: Load = Load {
    fill: FILLED,
    hot: 64,
    rate: 2000,
};

pub(crate) struct Stage<'a> {
    pub(crate) guard: &'a Guard,
    binary: Binary,
    pub(crate) vamoose: PathBuf,
    image: Image,
    /// Before what it uses: it goes first.
    pub(crate) server: Vamoose,
    /// Where `server` listens.
    pub(crate) to: String,
    /// The folder in which `server` finds the monitors of QEMUs by name.
    pub(crate) monitors: TempDir,
    /// Where both hosts remember attempts, in a folder each.
    pub(crate) state: TempDir,
    pub(crate) network: Network,
}

impl<'a> Stage<'a> {
    pub(crate) fn set(guard: &'a Guard) -> Result<Self> {
        // Beside this program, unless $VAMOOSE says otherwise.
        let vamoose = std::env::var_os("VAMOOSE").map(PathBuf::from);
        let vamoose = program(vamoose.as_deref(), "vamoose")?;
        let binary = qemu::available().last().cloned();
        let binary = binary.context("there is no QEMU here: run scripts/setup qemu")?;
        note(format!(
            "two QEMUs {}, as their makers built them",
            binary.version
        ));
        let network = Network::new();
        note(network.describe());
        let image = Image::build(CONTENT)?;
        note(format!(
            "a Linux guest with {} MiB of RAM and 2 vCPUs (emulated): {} MiB filled with this machine's files,\n\
             {} pages a second rewritten, all of it verified again and again, a tick every 100 ms",
            RAM / MIB,
            LOAD.fill,
            LOAD.rate,
        ));

        let monitors = TempDir::new().context("creating a temporary directory")?;
        let state = state_dir()?;
        let host = network.destination();
        let mut command = host.command(&vamoose);
        // The namespace's address is not a loopback one, but the link is private.
        command.args(["serve", "--insecure", "--listen"]);
        command.arg(format!("tcp:{}:0", host.address()));
        command.arg("--qmp-dir").arg(monitors.path());
        command.arg("--state-dir").arg(state.path().join("there"));
        let server = Vamoose::start(&mut command)?;
        guard.watch(server.process())?;
        let to = server.wait_for("taking migrations on ", Duration::from_secs(20))?;
        note(format!(
            "on the destination host: vamoose serve --listen {to} --qmp-dir DIR"
        ));
        Ok(Self {
            guard,
            binary,
            vamoose,
            image,
            server,
            to,
            monitors,
            state,
            network,
        })
    }

    /// The guest's machine, the same at both ends.
    pub(crate) fn machine(&self) -> Builder {
        self.image.machine(&self.binary, RAM, &LOAD)
    }
}
