//! Survey before an evacuation: guests of the source, destinations, and reasons why a guest cannot move.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail, ensure};
use evacuation::{Fleet, Guest, GuestId, Host, HostId, SourceId};
use tracing::{info, warn};

use super::{
    Options,
    description::{self, Description},
    libvirt::{Domain, LibvirtHost, State},
};

/// Result of the survey.
pub(super) struct Survey {
    /// The host to be emptied.
    pub(super) source: LibvirtHost,
    /// Destinations of the fleet, in its order.
    destinations: Vec<LibvirtHost>,
    pub(super) fleet: Fleet,
    /// Guests of the fleet, in its order.
    pub(super) domains: Vec<Domain>,
    /// Number of guests that are shut off, and are not moved.
    pub(super) shut_off: usize,
}

impl Survey {
    /// Asks all hosts.
    pub(super) fn make(options: &Options) -> Result<Self> {
        let source = LibvirtHost::new(&options.host);
        let capabilities = source.capabilities()?;
        let cpu = description::host_cpu(&capabilities);
        let uuid = description::host_uuid(&capabilities);
        // URIs of the hosts, by UUID.
        let mut known: BTreeMap<_, _> = uuid
            .map(|it| (it, source.uri.clone()))
            .into_iter()
            .collect();
        let (mut hosts, mut destinations) = (Vec::new(), Vec::new());
        for text in &options.to {
            let host = LibvirtHost::new(text);
            ensure!(
                !options.p2p || !host.is_local(),
                "with --p2p the host itself connects to {}, which is a different host there: use another name",
                host.uri
            );
            match Destination::ask(&host, cpu.as_deref()) {
                Ok(found) => {
                    // The memory of a host that is named twice would be reserved twice.
                    let uuid = found.uuid.clone();
                    if let Some(same) = uuid.and_then(|it| known.insert(it, host.uri.clone())) {
                        bail!("{same} and {} are the same host", host.uri);
                    }
                    destinations.push(found);
                    hosts.push(host);
                }
                Err(error) => warn!("nothing moves to {}: {error:#}", host.name),
            }
        }
        ensure!(!destinations.is_empty(), "no destination can be reached");
        let wanted = source.domains()?.into_iter();
        let wanted = wanted.filter(|domain| options.wants(&domain.name));
        let (active, shut_off): (Vec<_>, Vec<_>) =
            wanted.partition(|domain| domain.state.is_active());
        let (mut guests, mut domains) = (Vec::new(), Vec::new());
        for domain in active {
            match guest(options, &source, &destinations, &domain) {
                Ok(guest) => {
                    guests.push(guest);
                    domains.push(domain);
                }
                // A guest that has ended meanwhile does not matter.
                Err(_) if source.active(&domain.uuid)?.is_none() => {}
                Err(error) => return Err(error.context(format!("asking for {}", domain.name))),
            }
        }
        for name in &options.guests {
            if domains.iter().all(|domain| domain.name != *name) {
                expect_moved(name, options, &destinations)?;
            }
        }
        Ok(Self {
            source,
            destinations: hosts,
            fleet: Fleet {
                destinations: destinations.into_iter().map(|it| it.host).collect(),
                guests,
            },
            domains,
            shut_off: shut_off.len(),
        })
    }

    pub(super) fn host(&self, id: HostId) -> &LibvirtHost {
        &self.destinations[id.0]
    }

    pub(super) fn domain(&self, id: GuestId) -> &Domain {
        &self.domains[id.0]
    }
}

/// Checks that a guest from the command line that is not on the source has already moved.
fn expect_moved(name: &str, options: &Options, destinations: &[Destination]) -> Result<()> {
    let has = |it: &&Destination| {
        let mut guests = it.guests.iter();
        guests.any(|it| it.state.is_active() && it.name == name)
    };
    let found = destinations.iter().find(has);
    let found = found.with_context(|| format!("no guest {name} runs on {}", options.host))?;
    info!("{name} is on {} already", found.host.name);
    Ok(())
}

/// A guest, with all reasons why it cannot move.
fn guest(
    options: &Options,
    source: &LibvirtHost,
    destinations: &[Destination],
    domain: &Domain,
) -> Result<Guest> {
    let mut obstacles = Vec::new();
    if !matches!(domain.state, State::Running | State::PausedByUser) {
        obstacles.push(format!("it is {}", domain.state.name()));
    }
    if source.job(&domain.uuid)?.is_active {
        let job = "libvirt has a job for it under way, such as another migration";
        obstacles.push(job.to_owned());
    }
    let (mut barred, mut image) = (BTreeMap::new(), None);
    let has_all_disks = options.shared_storage || options.copy_storage;
    match Description::parse(&source.description(&domain.uuid)?, has_all_disks) {
        Ok(description) => {
            obstacles.extend(description.obstacles);
            image = description.image.filter(|_| options.siblings_together);
            for (at, destination) in destinations.iter().enumerate() {
                if let Some(why) = destination.bars(domain, description.has_host_cpu) {
                    barred.insert(HostId(at), why.to_owned());
                }
            }
        }
        Err(error) => obstacles.push(format!("its description cannot be read: {error}")),
    }
    Ok(Guest {
        name: domain.name.clone(),
        source: SourceId(0),
        memory: domain.memory,
        cpus: domain.cpus,
        image,
        obstacles,
        barred,
    })
}

/// A destination and its guests.
struct Destination {
    host: Host,
    uuid: Option<String>,
    /// It has all features of the source's CPU.
    has_source_cpu: bool,
    guests: Vec<Domain>,
}

impl Destination {
    fn ask(host: &LibvirtHost, source_cpu: Option<&str>) -> Result<Self> {
        let node = host.node()?;
        let guests = host.domains()?;
        let active = guests.iter().filter(|guest| guest.state.is_active());
        let promised = active.map(|guest| guest.memory).sum();
        // Memory that the guests there have not touched yet is free, but promised to them.
        let memory_free = node.available.min(node.memory.saturating_sub(promised));
        Ok(Self {
            host: Host {
                name: host.name.clone(),
                memory_free,
                cpus: node.cpus,
            },
            uuid: description::host_uuid(&host.capabilities()?),
            // If libvirt cannot compare CPUs now, it will when the migration begins.
            has_source_cpu: source_cpu.is_none_or(|cpu| {
                host.has_cpu(cpu).unwrap_or_else(|error| {
                    warn!("{} cannot compare CPUs: {error:#}", host.name);
                    true
                })
            }),
            guests,
        })
    }

    /// Why a guest cannot move here.
    fn bars(&self, guest: &Domain, has_host_cpu: bool) -> Option<&'static str> {
        let is_same = |other: &&Domain| other.uuid == guest.uuid;
        let mut same = self.guests.iter().filter(is_same);
        let mut others = self.guests.iter().filter(|it| !is_same(it));
        if same.any(|it| it.state.is_active()) {
            Some("the same guest is active there, too: find out which one is right")
        } else if others.any(|it| it.name == guest.name) {
            Some("it has another guest of this name")
        } else if has_host_cpu && !self.has_source_cpu {
            Some("its CPU lacks something that the guest has")
        } else {
            None
        }
    }
}
