//! Limits the number of migrations with each peer.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use vamoose_link::lock;

use crate::Role;

/// The migrations with each peer, in each direction.
#[derive(Default)]
pub(super) struct Slots(Mutex<HashMap<(Role, String), Slot>>);

/// Counts a migration until it is dropped.
pub(super) type Slot = Arc<()>;

impl Slots {
    /// Counts a migration, if there are fewer than `most`.
    pub(super) fn take(&self, role: Role, peer: &str, most: usize) -> Option<Slot> {
        let mut slots = lock(&self.0);
        let slot = slots.entry((role, peer.to_owned())).or_default();
        // One is the map's.
        (Arc::strong_count(slot) <= most).then(|| slot.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_counted_per_peer_and_direction() {
        let slots = Slots::default();
        let take = |role, peer| slots.take(role, peer, 1);
        let first = take(Role::Source, "a");
        assert!(first.is_some() && take(Role::Source, "a").is_none());
        assert!(take(Role::Destination, "a").is_some() && take(Role::Source, "b").is_some());
        drop(first);
        assert!(take(Role::Source, "a").is_some());
    }
}
