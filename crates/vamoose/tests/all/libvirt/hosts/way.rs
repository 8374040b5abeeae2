//! The way of a guest's memory from host to host.

use std::{fmt, fs, net::Ipv4Addr, path::Path, time::Duration};

use anyhow::{Context, Result};
use lab::vamoose::{Keys, Vamoose};
use tempfile::TempDir;

use super::{Hosts, Where};
use crate::common::vamoose;

/// What is between the two QEMUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Nothing.
    Direct,
    /// Two relays with a session for each migration. libvirt makes the destination's QEMU listen on a loopback address and the
    /// source's QEMU connect to the same address, where the relay of its host listens.
    Relays,
    /// A gateway on each host for all migrations, configured only in qemu.conf.
    Gateways,
}

impl Way {
    /// The settings in qemu.conf of a host.
    pub(crate) fn qemu_conf(self, host: Where) -> String {
        match self {
            Self::Direct | Self::Relays => String::new(),
            Self::Gateways => {
                let (alias, first) = (alias(host), 49_152 + 64 * host as u16);
                format!(
                    "migration_address = \"{alias}\"\nmigration_host = \"{alias}\"\n\
                     migration_port_min = {first}\nmigration_port_max = {}\n",
                    first + 63
                )
            }
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Direct => "direct",
            Self::Relays => "relays",
            Self::Gateways => "gateways",
        })
    }
}

/// The alias of a host behind gateways.
pub(crate) fn alias(host: Where) -> Ipv4Addr {
    match host {
        Where::First => Ipv4Addr::new(127, 77, 0, 1),
        Where::Second => Ipv4Addr::new(127, 77, 0, 2),
    }
}

/// The programs between the QEMUs of two hosts, for consecutive migrations. They end when it is dropped.
pub(crate) struct Passage<'a> {
    hosts: &'a Hosts,
    keys: &'a Keys,
    /// By host. Killed programs stay for their output.
    running: [Option<Vamoose>; 2],
    configuration: TempDir,
}

/// A port that libvirt does not choose. Hosts have their own network namespaces.
const PORT: u16 = 49300;

/// The port of gateways.
const GATEWAY: u16 = 4440;

const LIMIT: Duration = Duration::from_secs(60);

impl<'a> Passage<'a> {
    /// `keys` are those of the two hosts.
    pub(crate) fn new(hosts: &'a Hosts, keys: &'a Keys) -> Result<Self> {
        Ok(Self {
            hosts,
            keys,
            running: [None, None],
            configuration: TempDir::new().context("creating a folder for configurations")?,
        })
    }

    /// Prepares a migration from a host. Returns the arguments for `virsh migrate`.
    pub(crate) fn prepare(&mut self, from: Where) -> Result<Vec<String>> {
        match self.hosts.way {
            Way::Direct => Ok(Vec::new()),
            Way::Relays => self.start_relays(from),
            Way::Gateways => {
                for host in [Where::First, Where::Second] {
                    self.ensure_gateway(host)?;
                }
                Ok(Vec::new())
            }
        }
    }

    /// Kills the program of a host.
    pub(crate) fn kill(&mut self, host: Where) -> Result<()> {
        let program = self.running[host as usize].as_mut();
        program.context("nothing is between the QEMUs")?.kill()
    }

    /// Expects relays to end successfully after a migration.
    pub(crate) fn finish(&mut self) -> Result<()> {
        if self.hosts.way != Way::Relays {
            return Ok(());
        }
        for relay in self.running.iter_mut().filter_map(Option::take) {
            relay.finish(LIMIT)?.success()?;
        }
        Ok(())
    }

    /// Ends relays after a failed migration, which may not have reached them.
    pub(crate) fn end(&mut self) {
        if self.hosts.way == Way::Relays {
            self.running = [None, None];
        }
    }

    /// The output of the programs.
    pub(crate) fn said(&self) -> String {
        let running = self.running.iter().flatten();
        let said = running.map(Vamoose::stderr).collect::<Vec<_>>();
        format!("{}: {}", self.hosts.way, said.join(" -- "))
    }

    fn start_relays(&mut self, from: Where) -> Result<Vec<String>> {
        let (near, far) = (from.of(self.hosts), from.other().of(self.hosts));
        let local = format!("tcp:127.0.0.1:{PORT}");
        let mut command = far.outside(vamoose());
        command.args(["relay", "--session", "listen", "--connect", &local]);
        command.args(["--listen", &format!("tcp:{}:0", far.address), "--keys"]);
        let far = Vamoose::start(command.arg(self.keys_of(from.other())))?;
        let between = far.wait_for("listening on ", LIMIT)?;
        let mut command = near.outside(vamoose());
        command.args(["relay", "--session", "connect", "--listen", &local]);
        command.args(["--connect", &between, "--keys"]);
        let near = Vamoose::start(command.arg(self.keys_of(from)))?;
        near.wait_for("listening on ", LIMIT)?;
        self.running[from as usize] = Some(near);
        self.running[from.other() as usize] = Some(far);
        let arguments = [
            "--listen-address".to_owned(),
            "127.0.0.1".to_owned(),
            "--migrateuri".to_owned(),
            format!("tcp://127.0.0.1:{PORT}"),
        ];
        Ok(arguments.into())
    }

    /// Starts the gateway of a host, if it does not run.
    fn ensure_gateway(&mut self, host: Where) -> Result<()> {
        if let Some(gateway) = &self.running[host as usize]
            && !gateway.has_ended()?
        {
            return Ok(());
        }
        let (own, peer) = (host.of(self.hosts), host.other().of(self.hosts));
        let key = &self.keys.public[host.other() as usize];
        let key = key.split_whitespace().next().context("a key")?;
        let text = format!(
            "listen = [\"{}:{GATEWAY}\"]\nalias = \"{}\"\nkeys = {:?}\n\
             peers.{} = {{ alias = \"{}\", to = [\"{}:{GATEWAY}\"], key = \"{key}\" }}\n",
            own.address,
            alias(host),
            self.keys_of(host),
            peer.name,
            alias(host.other()),
            peer.address,
        );
        let file = self.configuration.path().join(own.name);
        fs::write(&file, text).context("configuring a gateway")?;
        let mut command = own.outside(vamoose());
        let gateway = Vamoose::start(command.args(["gateway", "--config"]).arg(file))?;
        gateway.wait_for("ready for migrations", LIMIT)?;
        self.running[host as usize] = Some(gateway);
        Ok(())
    }

    fn keys_of(&self, host: Where) -> &Path {
        match host {
            Where::First => &self.keys.source,
            Where::Second => &self.keys.destination,
        }
    }
}
