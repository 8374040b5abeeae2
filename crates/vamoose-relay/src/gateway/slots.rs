//! Limits the number of migrations with each peer.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use vamoose_link::lock;

use crate::Role;

/// Number of migrations with each peer, in each direction.
#[derive(Default)]
pub(super) struct Slots(Mutex<HashMap<(Role, String), usize>>);

/// A counted migration, until dropped.
pub(super) struct Slot {
    slots: Arc<Slots>,
    key: (Role, String),
}

impl Slots {
    /// Counts a migration, if there are fewer than `most`.
    pub(super) fn take(self: &Arc<Self>, role: Role, peer: &str, most: usize) -> Option<Slot> {
        let key = (role, peer.to_owned());
        let mut taken = lock(&self.0);
        let count = taken.entry(key.clone()).or_default();
        if *count >= most {
            return None;
        }
        *count += 1;
        let slots = self.clone();
        Some(Slot { slots, key })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(count) = lock(&self.slots.0).get_mut(&self.key) {
            *count -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_counted_per_peer_and_direction() {
        let slots = Arc::<Slots>::default();
        let take = |role, peer| slots.take(role, peer, 1);
        let first = take(Role::Source, "a");
        assert!(first.is_some() && take(Role::Source, "a").is_none());
        assert!(take(Role::Destination, "a").is_some() && take(Role::Source, "b").is_some());
        drop(first);
        assert!(take(Role::Source, "a").is_some());
    }
}
