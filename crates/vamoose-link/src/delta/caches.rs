//! A limit for the memory of all page caches of a process.

use std::sync::{Arc, Mutex};

use crate::lock;

/// A limit for the page caches of all sessions that share a clone of it.
#[derive(Clone, Debug)]
pub struct PageCaches(Arc<Mutex<Memory>>);

#[derive(Debug)]
struct Memory {
    limit: usize,
    taken: usize,
}

/// The memory granted to one cache, returned when dropped.
#[derive(Debug)]
pub(crate) struct Share {
    of: PageCaches,
    bytes: usize,
}

/// No cache gets more than this fraction of the free memory, so that later migrations get some.
const PARTS: usize = 4;

impl PageCaches {
    /// A limit of `limit` bytes for all caches together.
    pub fn new(limit: usize) -> Self {
        Self(Arc::new(Mutex::new(Memory { limit, taken: 0 })))
    }

    /// Changes the limit. Memory that has been granted stays granted.
    pub fn set_limit(&self, limit: usize) {
        lock(&self.0).limit = limit;
    }

    /// Grants as much of `wanted` bytes as the limit allows, possibly nothing.
    pub(crate) fn take(&self, wanted: usize) -> Share {
        let mut memory = lock(&self.0);
        let bytes = wanted.min(memory.limit.saturating_sub(memory.taken) / PARTS);
        memory.taken += bytes;
        let of = self.clone();
        Share { of, bytes }
    }
}

/// No limit.
impl Default for PageCaches {
    fn default() -> Self {
        Self::new(usize::MAX)
    }
}

impl Share {
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        lock(&self.of.0).taken -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_caches_stay_below_the_limit_and_each_gets_a_part() {
        let caches = PageCaches::new(4096);
        let shares: Vec<_> = (0..16).map(|_| caches.take(256)).collect();
        let bytes: Vec<_> = shares.iter().map(Share::bytes).collect();
        assert_eq!(bytes[..13], [256; 13]);
        assert!(bytes.is_sorted_by(|before, after| before >= after));
        assert!(bytes.iter().all(|bytes| *bytes > 0));
        assert!(bytes.iter().sum::<usize>() <= 4096);
        drop(shares);
        assert_eq!(caches.take(256).bytes(), 256);
        caches.set_limit(400);
        let first = caches.take(256);
        assert_eq!(first.bytes(), 100);
        caches.set_limit(0);
        assert_eq!(caches.take(256).bytes(), 0);
        assert_eq!(PageCaches::default().take(1 << 40).bytes(), 1 << 40);
    }
}
