//! Two libvirt hosts: each with its own file system, processes and network, and a wire between them. Needs root, and
//! `scripts/setup libvirt`.
//!
//! ```text
//!  host1: virsh ─> libvirtd ─> QEMU ──── 192.0.2.1 ═══ wire ═══ 192.0.2.2 ──── QEMU <─ libvirtd  :host2
//!                                │ │ serial port                  │ │ serial port
//!                                │ └────────── the lab: Domain ───│─┘
//!                                └───────── one disk image ───────┘
//! ```
//! A [`Host`] consists of the namespaces (mount, PID, UTS, network) of a process 1, `hosts/host.sh`; when that ends, so does
//! everything in them. A [`Domain`] is a guest that is followed across both hosts, see [`lab::guest`].

mod crowd;
mod domain;
mod host;
mod storage;
mod way;

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::{Context, Result};
use lab::{
    guest::Image,
    net,
    net::{End, Link},
    skipped, target_dir,
    writer::{self, Disk},
};

pub(crate) use self::{
    crowd::{Crowd, Member},
    domain::{Domain, LIMIT, Where},
    host::{Ended, Host, Virsh},
    storage::{Copied, Storage},
    way::{Passage, Way, alias},
};

/// The versions of libvirt that `scripts/setup libvirt` fetches, oldest first.
pub(crate) const GENERATIONS: [&str; 2] = ["9.0", "11.3"];

/// A fetched libvirt with its QEMU: the root of a host.
#[derive(Clone, Debug)]
pub(crate) struct Generation {
    /// The version, one of [`GENERATIONS`].
    pub(crate) version: &'static str,
    root: PathBuf,
}

impl Generation {
    /// Whether libvirt supports compression by QEMU on multifd's channels.
    pub(crate) fn has_compression(&self) -> bool {
        self.version != GENERATIONS[0]
    }

    /// Whether its QEMU loses writes of a running guest at the source, see docs/qemu.md.
    pub(crate) fn loses_writes(&self) -> bool {
        self.version == GENERATIONS[0]
    }
}

/// All fetched generations. Reports missing ones as skipped.
pub(crate) fn available_or_skip() -> Result<Vec<Generation>> {
    let mut found = Vec::new();
    if let Err(error) = net::available() {
        skipped(&format!("no hosts of libvirt: {error:#}"))?;
        return Ok(found);
    }
    if !writer::available_or_skip()? {
        return Ok(found);
    }
    for version in GENERATIONS {
        match fs::canonicalize(target_dir().join("libvirt").join(version)) {
            Ok(root) => found.push(Generation { version, root }),
            Err(_) => skipped(&format!("no libvirt {version}, run scripts/setup libvirt"))?,
        }
    }
    Ok(found)
}

/// Two hosts of the same generation. Dropping them ends everything on them.
#[derive(Debug)]
pub(crate) struct Hosts {
    /// The first host, where guests start, and the second one.
    pub(crate) hosts: [Host; 2],
    /// The generation of both.
    pub(crate) generation: Generation,
    /// What is between their QEMUs.
    pub(crate) way: Way,
    /// A folder that both hosts have at the same path.
    disk: Disk,
    // Dropped after the hosts, whose processes are in its namespaces.
    link: Link,
}

impl Hosts {
    /// Starts both hosts, set up for `way` and guests of `image`, with a wire of `rate` bits per second.
    pub(crate) fn start(
        generation: &Generation,
        way: Way,
        image: &Image,
        rate: u64,
    ) -> Result<Self> {
        let folders = image.files().map(|file| file.parent());
        let folders = folders
            .into_iter()
            .collect::<Option<Vec<_>>>()
            .context("a kernel without a folder")?;
        Self::with_folders(generation, way, &folders, rate)
    }

    /// Starts both hosts with these folders, which have the same path there as here.
    pub(crate) fn with_folders(
        generation: &Generation,
        way: Way,
        folders: &[&Path],
        rate: u64,
    ) -> Result<Self> {
        let (link, disk) = (Link::new(Some(rate))?, Disk::new()?);
        let folders = [folders, &[disk.folder()]].concat();
        let names = [(&link.source, "host1"), (&link.destination, "host2")];
        let all = names.map(|(network, name)| (network.address(), name));
        let start = |at: Where| {
            let (network, name) = names[at as usize];
            let qemu_conf = way.qemu_conf(at);
            Host::start(&generation.root, network, name, &all, &folders, &qemu_conf)
                .with_context(|| format!("starting {name} with libvirt {}", generation.version))
        };
        let hosts = [start(Where::First)?, start(Where::Second)?];
        for host in &hosts {
            host.wait_ready()?;
        }
        Ok(Self {
            hosts,
            generation: generation.clone(),
            way,
            disk,
            link,
        })
    }

    /// Cuts the wire for 3 s.
    pub(crate) fn cut(&self) -> Result<()> {
        let wire = &self.link.wires[0];
        wire.pull(End::Source)?;
        thread::sleep(Duration::from_secs(3));
        wire.plug()
    }

    /// Bytes that the first host has sent to the other one.
    pub(crate) fn sent(&self) -> Result<u64> {
        Ok(self.link.source.traffic()?.sent)
    }
}
