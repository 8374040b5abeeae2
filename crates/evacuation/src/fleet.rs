//! Fleet: the guests that are to move, and the hosts that accept guests.

use std::collections::BTreeMap;

/// A destination of a [`Fleet`]: its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub usize);

/// A guest of a [`Fleet`]: its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestId(pub usize);

/// A host that guests leave: any number that distinguishes it from other sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceId(pub usize);

/// A host that accepts guests.
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
    pub source: SourceId,
    /// Bytes needed at a destination.
    pub memory: u64,
    /// Number of CPUs.
    pub cpus: u32,
    /// What its disks are made from. Guests of the same image are siblings: they have pages in common, and move one after the other,
    /// to one host if they can.
    pub image: Option<String>,
    /// Reasons why the guest cannot move at all.
    pub obstacles: Vec<String>,
    /// Reasons why the guest cannot move to a host.
    pub barred: BTreeMap<HostId, String>,
}

/// Guests and their possible destinations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fleet {
    /// The hosts that accept guests. None of them is a source.
    pub destinations: Vec<Host>,
    /// The guests that are to move.
    pub guests: Vec<Guest>,
}

impl Fleet {
    /// A destination of this fleet.
    pub fn host(&self, id: HostId) -> &Host {
        &self.destinations[id.0]
    }

    /// A guest of this fleet.
    pub fn guest(&self, id: GuestId) -> &Guest {
        &self.guests[id.0]
    }

    pub(crate) fn host_ids(&self) -> impl Iterator<Item = HostId> + Clone + use<> {
        (0..self.destinations.len()).map(HostId)
    }
}
