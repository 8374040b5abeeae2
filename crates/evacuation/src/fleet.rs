//! Fleet: hosts, guests and destinations.

use std::collections::BTreeMap;

use thiserror::Error;

/// A host of a [`Fleet`]: its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub usize);

/// A guest of a [`Fleet`]: its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestId(pub usize);

/// A host: a source or a destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Name in messages.
    pub name: String,
    /// Bytes of memory free for guests.
    pub memory_free: u64,
    /// Number of CPUs; a guest with more CPUs cannot move here.
    pub cpus: u32,
}

/// A guest that is to move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guest {
    /// Name in messages.
    pub name: String,
    /// The host that has the guest.
    pub host: HostId,
    /// Bytes needed at a destination.
    pub memory: u64,
    /// Number of CPUs.
    pub cpus: u32,
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

/// An inconsistent fleet.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum FleetError {
    /// A host does not exist.
    #[error("there is no host {}", .0.0)]
    NoSuchHost(HostId),
    /// A guest is on a destination already.
    #[error("guest {guest} is on {host}, which is a destination")]
    AtDestination {
        /// The guest's name.
        guest: String,
        /// The host's name.
        host: String,
    },
}

impl Fleet {
    /// Checks that all referenced hosts exist, and that no guest is at a destination.
    pub fn new(
        hosts: Vec<Host>,
        guests: Vec<Guest>,
        mut destinations: Vec<HostId>,
    ) -> Result<Self, FleetError> {
        let mut named = destinations.iter().chain(guests.iter().map(|it| &it.host));
        if let Some(host) = named.find(|host| host.0 >= hosts.len()) {
            return Err(FleetError::NoSuchHost(*host));
        }
        destinations.sort();
        destinations.dedup();
        let is_there = |guest: &&Guest| destinations.binary_search(&guest.host).is_ok();
        if let Some(guest) = guests.iter().find(is_there) {
            return Err(FleetError::AtDestination {
                guest: guest.name.clone(),
                host: hosts[guest.host.0].name.clone(),
            });
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

    /// The hosts that accept guests, in the order of their indices.
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
