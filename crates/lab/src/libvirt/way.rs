//! Which way a guest's memory takes from host to host.

use std::{fmt, path::Path, time::Duration};

use anyhow::Result;

use super::{Hosts, Where};
use crate::vamoose::{Keys, Vamoose};

/// What is between the two QEMUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Nothing.
    Direct,
    /// Two relays with a session, started for each migration. libvirt makes the destination's QEMU listen at an address of
    /// loopback, and the source's dial the same: there the relay of its own host listens.
    Relays,
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Direct => "direct",
            Self::Relays => "relays",
        })
    }
}

/// A way that is ready for one migration.
pub struct Passage {
    /// What `virsh migrate` is told of it.
    pub arguments: Vec<String>,
    /// The programs on the way: at the source, and at the destination.
    pub relays: Vec<Vamoose>,
}

/// In network namespaces of their own, hosts have all ports for themselves. This one is none that libvirt chooses.
const PORT: u16 = 49300;

const LIMIT: Duration = Duration::from_secs(60);

impl Way {
    /// Makes it ready for a migration from a host; `program` is a `vamoose`, and `keys` are those of the two hosts.
    pub fn prepare(
        self,
        hosts: &Hosts,
        from: Where,
        program: &Path,
        keys: &Keys,
    ) -> Result<Passage> {
        if self == Self::Direct {
            return Ok(Passage {
                arguments: Vec::new(),
                relays: Vec::new(),
            });
        }
        let (near, far) = (from.of(hosts), from.other().of(hosts));
        let local = format!("tcp:127.0.0.1:{PORT}");
        let (near_keys, far_keys) = match from {
            Where::First => (&keys.source, &keys.destination),
            Where::Second => (&keys.destination, &keys.source),
        };
        let mut command = far.outside(program);
        command.args(["relay", "--session", "listen", "--connect", &local]);
        command.args(["--listen", &format!("tcp:{}:0", far.address), "--keys"]);
        let far = Vamoose::start(command.arg(far_keys))?;
        let between = far.wait_for("listening on ", LIMIT)?;
        let mut command = near.outside(program);
        command.args(["relay", "--session", "connect", "--listen", &local]);
        command.args(["--connect", &between, "--keys"]);
        let near = Vamoose::start(command.arg(near_keys))?;
        near.wait_for("listening on ", LIMIT)?;
        let arguments = [
            "--listen-address".to_owned(),
            "127.0.0.1".to_owned(),
            "--migrateuri".to_owned(),
            format!("tcp://127.0.0.1:{PORT}"),
        ];
        Ok(Passage {
            arguments: arguments.into(),
            relays: vec![near, far],
        })
    }
}
