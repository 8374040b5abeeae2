//! Survey before an evacuation: guests of the source, destinations, and reasons why a guest cannot move.

use std::collections::BTreeMap;

use anyhow::{Result, bail, ensure};
use evacuation::{Fleet, Guest, Host, HostId};
use tracing::{info, warn};

use super::{
    Options,
    description::{self, Description},
    host::LibvirtHost,
    libvirt::{Connection, Domain},
};

/// The host to be emptied; all others are destinations.
pub(super) const SOURCE: HostId = HostId(0);

/// Result of the survey.
pub(super) struct Survey {
    /// Hosts of the fleet, in its order.
    pub(super) hosts: Vec<LibvirtHost>,
    pub(super) fleet: Fleet,
    /// By guest of the fleet.
    pub(super) known: Vec<Known>,
    /// Number of guests that are shut off, and are not moved.
    pub(super) shut_off: usize,
}

/// Properties of a guest that the plan does not need.
#[derive(Clone, Debug)]
pub(super) struct Known {
    pub(super) uuid: String,
    pub(super) is_persistent: bool,
}

impl Survey {
    /// Asks all hosts.
    pub(super) fn make(options: &Options) -> Result<Self> {
        let source = LibvirtHost::new(&options.host);
        let of_source = source.ask(Connection::capabilities)?;
        let cpu = description::host_cpu(&of_source);
        let mut uuids = vec![description::host_uuid(&of_source)];
        let mut hosts = vec![source];
        let mut others = Vec::new();
        for text in &options.to {
            let host = LibvirtHost::new(text);
            ensure!(
                !options.p2p || !host.is_local(),
                "with --p2p the host itself connects to {}, which is a different host there: use another name",
                host.uri
            );
            match Destination::ask(&host, cpu.as_deref()) {
                Ok(found) => {
                    // The memory of a host with two names would be reserved twice.
                    let uuid = description::host_uuid(&found.capabilities);
                    let same = uuids.iter().position(|it| uuid.is_some() && *it == uuid);
                    if let Some(same) = same {
                        bail!("{} and {} are the same host", hosts[same].uri, host.uri);
                    }
                    uuids.push(uuid);
                    others.push(found);
                    hosts.push(host);
                }
                Err(error) => warn!("nothing moves to {}: {error:#}", host.name),
            }
        }
        ensure!(!others.is_empty(), "no destination can be reached");
        let (found, shut_off) = Guests::of(options, &hosts, &others)?;
        for name in &options.guests {
            expect(name, options, &found, &others)?;
        }
        let (guests, known) = found.into_iter().unzip();
        let source = Host {
            name: hosts[SOURCE.0].name.clone(),
            memory_free: 0,
            cpus: 0,
        };
        let destinations = others.into_iter().map(|it| it.host);
        let in_fleet: Vec<_> = [source].into_iter().chain(destinations).collect();
        let to = (1..in_fleet.len()).map(HostId).collect();
        Ok(Self {
            fleet: Fleet::new(in_fleet, guests, to)?,
            hosts,
            known,
            shut_off,
        })
    }
}

/// Checks that a guest named on the command line is on the source, or has already moved.
fn expect(
    name: &str,
    options: &Options,
    found: &[(Guest, Known)],
    destinations: &[Destination],
) -> Result<()> {
    if found.iter().any(|(guest, _)| guest.name == name) {
        return Ok(());
    }
    let has = |it: &&Destination| {
        let mut guests = it.guests.iter();
        guests.any(|it| it.state.is_active() && it.name == name)
    };
    match destinations.iter().find(has) {
        Some(destination) => info!("{name} is on {} already", destination.host.name),
        None => bail!("no guest {name} runs on {}", options.host),
    }
    Ok(())
}

/// A host that is to take guests.
struct Destination {
    host: Host,
    capabilities: String,
    /// It has all features of the source's CPU.
    has_source_cpu: bool,
    guests: Vec<Domain>,
}

impl Destination {
    fn ask(host: &LibvirtHost, source_cpu: Option<&str>) -> Result<Self> {
        let node = host.ask(Connection::node)?;
        let guests = host.ask(Connection::domains)?;
        let active = guests.iter().filter(|guest| guest.state.is_active());
        let promised = active.map(|guest| guest.memory).sum();
        // Memory that guests there have not touched yet is free, but theirs.
        let memory_free = node.available.min(node.memory.saturating_sub(promised));
        Ok(Self {
            host: Host {
                name: host.name.clone(),
                memory_free,
                cpus: node.cpus,
            },
            capabilities: host.ask(Connection::capabilities)?,
            // If libvirt cannot tell in advance, the migration will.
            has_source_cpu: source_cpu.is_none_or(|cpu| {
                let compared = host.ask(|it| it.has_cpu(cpu));
                compared.unwrap_or_else(|error| {
                    warn!("{} cannot compare CPUs: {error:#}", host.name);
                    true
                })
            }),
            guests,
        })
    }
}

/// Collects the guests of the source.
struct Guests<'a> {
    options: &'a Options,
    hosts: &'a [LibvirtHost],
    destinations: &'a [Destination],
    found: Vec<(Guest, Known)>,
    shut_off: usize,
}

impl<'a> Guests<'a> {
    /// The guests of the first host, and how many more of them are shut off.
    fn of(
        options: &'a Options,
        hosts: &'a [LibvirtHost],
        destinations: &'a [Destination],
    ) -> Result<(Vec<(Guest, Known)>, usize)> {
        let mut guests = Self {
            options,
            hosts,
            destinations,
            found: Vec::new(),
            shut_off: 0,
        };
        let source = &hosts[SOURCE.0];
        let persistent = source.ask(Connection::persistent)?;
        for domain in source.ask(Connection::domains)? {
            let is_persistent = persistent.contains(&domain.uuid);
            if let Err(error) = guests.add(&domain, is_persistent) {
                // A guest that has ended since then does not matter.
                let now = source.ask(|it| it.domain(&domain.uuid))?;
                if now.is_some_and(|now| now.state.is_active()) {
                    return Err(error.context(format!("asking for {}", domain.name)));
                }
            }
        }
        Ok((guests.found, guests.shut_off))
    }

    fn add(&mut self, domain: &Domain, is_persistent: bool) -> Result<()> {
        let Domain {
            name, uuid, state, ..
        } = domain;
        if !self.options.wants(name) {
            return Ok(());
        }
        if !state.is_active() {
            self.shut_off += 1;
            return Ok(());
        }
        let source = &self.hosts[SOURCE.0];
        let mut obstacles = Vec::new();
        if !state.runs() && !state.is_paused_by_user() {
            obstacles.push(format!("it is {}", state.name()));
        }
        if source.ask(|it| it.job(uuid))?.is_active {
            let job = "libvirt has a job for it under way, such as another migration";
            obstacles.push(job.to_owned());
        }
        let mut barred = BTreeMap::new();
        let xml = source.ask(|it| it.description(uuid))?;
        match Description::parse(&xml, self.options.storage()) {
            Ok(mut description) => {
                obstacles.append(&mut description.obstacles);
                for (at, destination) in self.destinations.iter().enumerate() {
                    if let Some(why) = destination.bars(domain, description.has_host_cpu) {
                        barred.insert(HostId(at + 1), why.to_owned());
                    }
                }
            }
            Err(error) => obstacles.push(format!("its description cannot be read: {error}")),
        }
        let guest = Guest {
            name: name.clone(),
            host: SOURCE,
            memory: domain.memory,
            cpus: domain.cpus,
            dirty_rate: None,
            obstacles,
            barred,
        };
        let known = Known {
            uuid: uuid.clone(),
            is_persistent,
        };
        self.found.push((guest, known));
        Ok(())
    }
}

impl Destination {
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
