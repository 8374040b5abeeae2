//! What all runs share: the programs, the network, the keys, the guest's image and `vamoose serve` on the destination host.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use lab::guest::{Image, Load};
use lab::qemu::{self, Binary, Builder};
use lab::vamoose::{Keys, Vamoose, program, state_dir};
use tempfile::TempDir;

use crate::Way;
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
    /// Before what they use: they go first.
    secure: Server,
    plain: Server,
    /// The source host's.
    pub(crate) state: TempDir,
    pub(crate) keys: Keys,
    pub(crate) network: Network,
}

/// A `vamoose serve` on the destination host.
pub(crate) struct Server {
    pub(crate) vamoose: Vamoose,
    /// Where it listens.
    pub(crate) to: String,
    /// The folder in which it finds the monitors of QEMUs by name.
    pub(crate) monitors: TempDir,
    /// Where it remembers attempts.
    _state: TempDir,
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
        let keys = Keys::make(&vamoose)?;
        for key in &keys.public {
            note(format!(
                "$ vamoose keys init --dir DIR  ->  {}",
                key.trim_end()
            ));
        }
        note("the source host and the destination host have a key each, and trust each other's");
        let folder = keys.destination.to_string_lossy();
        let secure = Server::start(guard, &network, &vamoose, &["--keys", &folder])?;
        note(format!(
            "on the destination host: vamoose serve --keys DIR --listen {} --qmp-dir DIR",
            secure.to
        ));
        let plain = Server::start(guard, &network, &vamoose, &["--insecure"])?;
        note(format!(
            "and, for the comparison with stock QEMU: vamoose serve --insecure --listen {} --qmp-dir DIR",
            plain.to
        ));
        Ok(Self {
            guard,
            binary,
            vamoose,
            image,
            secure,
            plain,
            state: state_dir()?,
            keys,
            network,
        })
    }

    /// The one that takes guests that move in this way. A stock QEMU needs none.
    pub(crate) fn server(&self, way: Way) -> &Server {
        match way {
            Way::Cut | Way::Tls => &self.secure,
            Way::Plain | Way::Stock => &self.plain,
        }
    }

    /// The guest's machine, the same at both ends.
    pub(crate) fn machine(&self) -> Builder {
        self.image.machine(&self.binary, RAM, &LOAD)
    }
}

impl Server {
    fn start(guard: &Guard, network: &Network, vamoose: &Path, security: &[&str]) -> Result<Self> {
        let monitors = TempDir::new().context("creating a temporary directory")?;
        let state = state_dir()?;
        let host = network.destination();
        let mut command = host.command(vamoose);
        command.arg("serve").args(security).arg("--listen");
        command.arg(format!("tcp:{}:0", host.address()));
        command.arg("--qmp-dir").arg(monitors.path());
        command.arg("--state-dir").arg(state.path());
        let vamoose = Vamoose::start(&mut command)?;
        guard.watch(vamoose.process())?;
        let to = vamoose.wait_for("taking migrations on ", Duration::from_secs(20))?;
        Ok(Self {
            vamoose,
            to,
            monitors,
            _state: state,
        })
    }
}
