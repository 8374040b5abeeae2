//! `vamoose gateway` on two hosts, between stock QEMUs: migrations of all kinds, and failures.
//!
//! The hosts are this machine. Each test has addresses of its own in 127.0.0.0/8, so that its ports are free.

mod cloud_hypervisor;
mod limit;
pub(crate) mod load;
mod log;
pub(crate) mod metrics;
mod opaque;
mod service;
mod siblings;
mod storage;
mod streams;
mod trouble;

use std::{
    fs,
    net::Ipv4Addr,
    path::PathBuf,
    process::{self, Command},
    sync::atomic::{AtomicU32, Ordering},
};

use anyhow::{Context as _, Result, ensure};
use lab::{
    qemu::{self, Binary, Builder, Qemu},
    ram::Fill,
    vamoose::{Keys, Vamoose},
};
use serde_json::json;
use tempfile::TempDir;

use crate::common::{LIMIT, MIB, bare_pair, expect_equal, set_up, vamoose};

/// The ports at which QEMUs wait.
const PORTS: [u16; 2] = [49_152, 49_155];
pub(crate) const PORT: u16 = PORTS[0];

/// Two hosts that trust each other, with a gateway on each.
pub(crate) struct Hosts {
    pub(crate) near: Host,
    pub(crate) far: Host,
    _keys: Keys,
}

pub(crate) struct Host {
    gateway: Vamoose,
    /// Address that stands for the other host here.
    pub(crate) door: Ipv4Addr,
    /// Address at which QEMUs wait here.
    pub(crate) own: Ipv4Addr,
    setting: Setting,
}

/// Configuration of a gateway.
struct Setting {
    folder: TempDir,
    text: String,
    options: Vec<&'static str>,
}

impl Hosts {
    fn start() -> Result<Self> {
        Self::with("", "", &[])
    }

    /// Starts gateways, with further lines in the near one's configuration, further keys of its peer, and further options.
    pub(crate) fn with(lines: &str, keys: &str, options: &[&'static str]) -> Result<Self> {
        Self::through(lines, keys, options, |far| Ok(far.to_owned()))
    }

    /// Like [`with`](Self::with); the near gateway reaches the other at `to`.
    fn through(
        lines: &str,
        of_peer: &str,
        options: &[&'static str],
        to: impl FnOnce(&str) -> Result<String>,
    ) -> Result<Self> {
        let keys = Keys::make(vamoose())?;
        let [near, near_door, far, far_door] = addresses();
        let host = |own: Ipv4Addr,
                    door: Ipv4Addr,
                    key: &PathBuf,
                    peer: &str,
                    to: &str,
                    lines: &str,
                    of_peer: &str| {
            let ports = format!("ports = \"{}-{}\"", PORTS[0], PORTS[1]);
            let peer = peer.split_whitespace().next().unwrap_or_default();
            let text = format!(
                "{lines}\nlisten = [\"{own}:4440\"]\nalias = \"{own}\"\n{ports}\nkeys = {key:?}\n\
                 peers.other = {{ alias = \"{door}\", {ports}, to = [\"{to}\"], key = \"{peer}\"{of_peer} }}\n",
            );
            Host::start(own, door, text, options)
        };
        let [near_key, far_key] = &keys.public;
        let far_to = format!("{near}:4440");
        let far = host(far, far_door, &keys.destination, near_key, &far_to, "", "")?;
        let near_to = to(&format!("{}:4440", far.own))?;
        let near = host(
            near,
            near_door,
            &keys.source,
            far_key,
            &near_to,
            lines,
            of_peer,
        )?;
        Ok(Self {
            near,
            far,
            _keys: keys,
        })
    }

    /// A source, and a destination that waits at `port` of the far host.
    fn pair(&self, from: &Binary, to: &Binary, port: u16, channels: u8) -> Result<(Qemu, Qemu)> {
        self.pair_with(from, to, port, channels, "none")
    }

    /// The same, with a compression method of QEMU.
    fn pair_with(
        &self,
        from: &Binary,
        to: &Binary,
        port: u16,
        channels: u8,
        method: &str,
    ) -> Result<(Qemu, Qemu)> {
        let (mut source, mut destination) = bare_pair(from, to, 16 * MIB)?;
        for qemu in [&mut source, &mut destination] {
            set_up(qemu, channels, method)?;
        }
        self.far.receives(&mut destination, port)?;
        Ok((source, destination))
    }

    fn expect_moved(&self, source: &mut Qemu, destination: &mut Qemu) -> Result<()> {
        expect_equal(
            source,
            destination,
            &[&self.near.gateway, &self.far.gateway],
        )?;
        Ok(())
    }
}

impl Host {
    fn start(
        own: Ipv4Addr,
        door: Ipv4Addr,
        text: String,
        options: &[&'static str],
    ) -> Result<Self> {
        let setting = Setting {
            folder: TempDir::new()?,
            text,
            options: options.to_vec(),
        };
        setting.write(&setting.text)?;
        Ok(Self {
            gateway: setting.start()?,
            door,
            own,
            setting,
        })
    }

    /// Makes a destination wait for its migration at this port.
    pub(crate) fn receives(&self, destination: &mut Qemu, port: u16) -> Result<()> {
        let at = format!("tcp:{}:{port}", self.own);
        destination.qmp.migrate_incoming(&at)
    }

    /// Migrates a guest to the other host's QEMU at this port.
    pub(crate) fn sends(&self, source: &mut Qemu, port: u16) -> Result<()> {
        source.qmp.migrate(&format!("tcp:{}:{port}", self.door))
    }

    /// Waits for a line of the journal.
    fn says(&self, text: &str) -> Result<String> {
        self.gateway.wait_for(text, LIMIT)
    }

    /// Waits for a migration's last line, and returns its MiB before and after compression.
    fn carried(&self, end: &str) -> Result<(f64, f64)> {
        let line = self.says(end)?;
        let sizes = line.split_once(" MiB as ").and_then(|(before, after)| {
            let before = before.rsplit(' ').next()?.parse().ok()?;
            Some((before, after.split(' ').next()?.parse().ok()?))
        });
        sizes.with_context(|| format!("no sizes in {line:?}"))
    }

    fn restart(&mut self) -> Result<()> {
        self.gateway.kill()?;
        self.gateway = self.setting.start()?;
        Ok(())
    }
}

impl Setting {
    fn path(&self) -> PathBuf {
        self.folder.path().join("gateway.toml")
    }

    fn write(&self, text: &str) -> Result<()> {
        fs::write(self.path(), text).context("writing the configuration")
    }

    fn start(&self) -> Result<Vamoose> {
        let mut command = Command::new(vamoose());
        command.args(["gateway", "--config"]).arg(self.path());
        let gateway = Vamoose::start(command.args(&self.options))?;
        gateway.wait_for("ready for migrations to ", LIMIT)?;
        Ok(gateway)
    }
}

/// Addresses that no other test on this machine uses.
fn addresses() -> [Ipv4Addr; 4] {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let first = NEXT.fetch_add(4, Ordering::Relaxed);
    let [_, high, middle, low] = process::id().to_be_bytes();
    let network = [127, 16 + (high ^ middle) % 200, low];
    [0, 1, 2, 3].map(|at| {
        let host = u8::try_from(first + at).unwrap();
        Ipv4Addr::new(network[0], network[1], network[2], host)
    })
}

#[test]
fn migrations_follow_each_other_over_any_number_of_channels() -> Result<()> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let hosts = Hosts::start()?;
    for channels in [2, 4, 8] {
        let (mut source, mut destination) = hosts.pair(&qemu, &qemu, PORT, channels)?;
        hosts.near.sends(&mut source, PORT)?;
        hosts
            .expect_moved(&mut source, &mut destination)
            .with_context(|| format!("{channels} channels"))?;
    }
    Ok(())
}

#[test]
fn old_and_new_qemus() -> Result<()> {
    let pairs = qemu::pairs_or_skip()?;
    let hosts = Hosts::start()?;
    for (from, to) in pairs {
        let (mut source, mut destination) = hosts.pair(&from, &to, PORT, 2)?;
        hosts.near.sends(&mut source, PORT)?;
        hosts
            .expect_moved(&mut source, &mut destination)
            .with_context(|| format!("{} to {}", from.version, to.version))?;
    }
    Ok(())
}

/// QEMUs as libvirt sets them up for `--compressed`.
#[test]
fn qemus_with_their_own_compression_get_their_method() -> Result<()> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let hosts = Hosts::start()?;
    for method in ["zlib", "zstd"] {
        let (mut source, mut destination) = hosts.pair_with(&qemu, &qemu, PORT, 2, method)?;
        hosts.near.sends(&mut source, PORT)?;
        hosts
            .expect_moved(&mut source, &mut destination)
            .with_context(|| method.to_owned())?;
    }
    Ok(())
}

#[test]
fn both_logs_name_the_guest_and_the_cost() -> Result<()> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let hosts = Hosts::start()?;
    let mut source = Builder::bare(&qemu, 16 * MIB)
        .content(Fill::Mixed, 1)
        .argument("-name")
        .argument("guest=web1,debug-threads=on")
        .start()?;
    let mut destination = Builder::bare(&qemu, 16 * MIB).incoming().start()?;
    for qemu in [&mut source, &mut destination] {
        set_up(qemu, 2, "none")?;
    }
    hosts.far.receives(&mut destination, PORT)?;
    hosts.near.sends(&mut source, PORT)?;
    hosts.expect_moved(&mut source, &mut destination)?;
    let line = hosts
        .near
        .says("guest web1 to other, port 49152: loaded; ")?;
    let mut sizes = line.split(" MiB");
    let mut size = || -> Result<f64> {
        let words = sizes.next().context("no size")?;
        let number = words.split_whitespace().last().context("no size")?;
        Ok(number.parse()?)
    };
    let (before, after) = (size()?, size()?);
    ensure!(before > after && after > 0.0, "{line}");
    hosts
        .far
        .says("guest web1 from other, port 49152: loaded; ")?;
    Ok(())
}

#[test]
fn two_guests_move_at_once_and_a_third_one_back() -> Result<()> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let hosts = Hosts::start()?;
    let (mut back, mut waits) = bare_pair(&qemu, &qemu, 16 * MIB)?;
    for qemu in [&mut back, &mut waits] {
        set_up(qemu, 2, "none")?;
    }
    hosts.near.receives(&mut waits, PORT)?;
    let mut pairs = [PORTS[0], PORTS[1]].map(|port| (port, hosts.pair(&qemu, &qemu, port, 4)));
    for (port, pair) in &mut pairs {
        let (source, _) = pair
            .as_mut()
            .map_err(|error| anyhow::anyhow!("{error:#}"))?;
        hosts.near.sends(source, *port)?;
    }
    hosts.far.sends(&mut back, PORT)?;
    for (_, pair) in pairs {
        let (mut source, mut destination) = pair?;
        hosts.expect_moved(&mut source, &mut destination)?;
    }
    hosts.expect_moved(&mut back, &mut waits)
}

/// Migrates without multifd, with further capabilities.
fn plain(
    hosts: &Hosts,
    (from, to): (&Binary, &Binary),
    further: &[(&str, bool)],
) -> Result<(Qemu, Qemu)> {
    let (mut source, mut destination) = bare_pair(from, to, 16 * MIB)?;
    let capabilities = [&[("events", true), ("return-path", true)], further].concat();
    source.qmp.set_capabilities(&capabilities)?;
    destination.qmp.set_capabilities(&capabilities)?;
    hosts.far.receives(&mut destination, PORT)?;
    Ok((source, destination))
}

#[test]
fn without_multifd() -> Result<()> {
    let pairs = qemu::pairs_or_skip()?;
    let hosts = Hosts::start()?;
    for (from, to) in pairs {
        let (mut source, mut destination) = plain(&hosts, (&from, &to), &[])?;
        hosts.near.sends(&mut source, PORT)?;
        hosts
            .expect_moved(&mut source, &mut destination)
            .with_context(|| format!("{} to {}", from.version, to.version))?;
    }
    let (before, after) = hosts.near.carried("port 49152: loaded; ")?;
    ensure!(after < before, "{before} MiB as {after} MiB");
    Ok(())
}

/// With and without a separate connection for requested pages, which is silent at first. The gateway must still see that there are
/// no channels.
#[test]
fn post_copy() -> Result<()> {
    let pairs = qemu::pairs_or_skip()?;
    let of_one_version = pairs.iter().filter(|(from, to)| from.version == to.version);
    for (from, to) in of_one_version {
        for preempt in [false, true] {
            let context = || format!("QEMU {}, preempt {preempt}", from.version);
            let hosts = Hosts::start()?;
            let capabilities = [("postcopy-ram", true), ("postcopy-preempt", preempt)];
            let (mut source, mut destination) = plain(&hosts, (from, to), &capabilities)?;
            source
                .qmp
                .set_parameters(json!({ "max-bandwidth": 4 * MIB }))?;
            hosts.near.sends(&mut source, PORT)?;
            source
                .qmp
                .wait_transferred(MIB, LIMIT)
                .with_context(context)?;
            source.qmp.execute("migrate-start-postcopy", json!({}))?;
            hosts
                .expect_moved(&mut source, &mut destination)
                .with_context(context)?;
            hosts
                .near
                .says("port 49152: loaded; ")
                .with_context(context)?;
            let said = hosts.near.gateway.stderr();
            let is_seen = said.contains("the source uses a single main connection");
            ensure!(is_seen, "{}: {said}", context());
        }
    }
    Ok(())
}
