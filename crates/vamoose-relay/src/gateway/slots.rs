//! Limits the number of migrations with each peer.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use vamoose_link::lock;

use crate::Way;

/// Counts migrations: to each peer, and from each.
#[derive(Default)]
pub(super) struct Slots(Mutex<HashMap<(Way, String), usize>>);

/// One migration that counts, until it is dropped.
pub(super) struct Slot {
    slots: Arc<Slots>,
    key: (Way, String),
}

impl Slots {
    /// Counts a migration, if there are fewer than `most`.
    pub(super) fn take(self: &Arc<Self>, way: Way, peer: &str, most: usize) -> Option<Slot> {
        let key = (way, peer.to_owned());
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
    fn each_peer_has_its_own_places_each_way() {
        let slots = Arc::<Slots>::default();
        let take = |way, peer| slots.take(way, peer, 1);
        let first = take(Way::To, "a");
        assert!(first.is_some() && take(Way::To, "a").is_none());
        assert!(take(Way::From, "a").is_some() && take(Way::To, "b").is_some());
        drop(first);
        assert!(take(Way::To, "a").is_some());
    }
}
