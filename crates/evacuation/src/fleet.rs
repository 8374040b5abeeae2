//! Hosts, and the guests that are to move.

use std::collections::BTreeMap;

use thiserror::Error;

/// A host of a [`Fleet`]: its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub usize);

/// A guest of a [`Fleet`]: its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestId(pub usize);

/// A host, to be emptied or to take guests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// What it is called in messages.
    pub name: String,
    /// Bytes of memory free for guests.
    pub memory_free: u64,
    /// A guest with more CPUs does not move here.
    pub cpus: u32,
}

/// A guest that is to move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guest {
    /// What it is called in messages.
    pub name: String,
    /// Where it is.
    pub host: HostId,
    /// Bytes that it needs at a destination.
    pub memory: u64,
    /// Its CPUs.
    pub cpus: u32,
    /// Bytes a second that it is known to write. Its migration needs more than that to end.
    pub dirty_rate: Option<u64>,
    /// Reasons why the guest cannot move at all.
    pub obstacles: Vec<String>,
    /// Reasons why the guest cannot move to a host.
    pub barred: BTreeMap<HostId, String>,
}

/// Hosts, guests and destinations. All indices in it are valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fleet {
    hosts: Vec<Host>,
    guests: Vec<Guest>,
    destinations: Vec<HostId>,
}

/// A fleet that contradicts itself.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum FleetError {
    /// The index of a host is too large.
    #[error("{what} is host {}, of {hosts}", host.0)]
    NoSuchHost {
        /// What refers to it.
        what: String,
        /// The index.
        host: HostId,
        /// How many hosts there are.
        hosts: usize,
    },
    /// A host is named twice as a destination.
    #[error("{0} is named twice as a destination")]
    Twice(String),
    /// A guest is where guests are to go.
    #[error("guest {guest} is on {host}, which is a destination")]
    AtDestination {
        /// The guest's name.
        guest: String,
        /// The host's name.
        host: String,
    },
}

impl Fleet {
    /// Checks that all referenced hosts exist.
    pub fn new(
        hosts: Vec<Host>,
        guests: Vec<Guest>,
        destinations: Vec<HostId>,
    ) -> Result<Self, FleetError> {
        let exists = |host: HostId, what: &dyn Fn() -> String| match hosts.get(host.0) {
            Some(_) => Ok(()),
            None => Err(FleetError::NoSuchHost {
                what: what(),
                host,
                hosts: hosts.len(),
            }),
        };
        let mut takes = vec![false; hosts.len()];
        for &host in &destinations {
            exists(host, &|| "a destination".to_owned())?;
            if std::mem::replace(&mut takes[host.0], true) {
                return Err(FleetError::Twice(hosts[host.0].name.clone()));
            }
        }
        for guest in &guests {
            exists(guest.host, &|| format!("the host of guest {}", guest.name))?;
            if takes[guest.host.0] {
                return Err(FleetError::AtDestination {
                    guest: guest.name.clone(),
                    host: hosts[guest.host.0].name.clone(),
                });
            }
        }
        Ok(Self {
            hosts,
            guests,
            destinations,
        })
    }

    /// All hosts, in the order of their indices.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// All guests, in the order of their indices.
    pub fn guests(&self) -> &[Guest] {
        &self.guests
    }

    /// The hosts that take guests.
    pub fn destinations(&self) -> &[HostId] {
        &self.destinations
    }

    /// A host of this fleet.
    pub fn host(&self, id: HostId) -> &Host {
        &self.hosts[id.0]
    }

    /// A guest of this fleet.
    pub fn guest(&self, id: GuestId) -> &Guest {
        &self.guests[id.0]
    }

    pub(crate) fn guest_ids(&self) -> impl Iterator<Item = GuestId> + use<> {
        (0..self.guests.len()).map(GuestId)
    }
}
