//! The memory that all page caches of a process may have together, handed out to one migration after the other.

use std::sync::{Arc, Mutex};

use crate::lock;

/// A limit for the page caches of all sessions that have a clone of it.
#[derive(Clone, Debug)]
pub struct PageCaches(Arc<Mutex<Memory>>);

#[derive(Debug)]
struct Memory {
    limit: usize,
    taken: usize,
}

/// What one cache may have. Dropping it gives it back.
#[derive(Debug)]
pub(crate) struct Share {
    of: PageCaches,
    bytes: usize,
}

/// Nobody gets more than one of so many parts of what is left, so that something is left for those who come later.
const PARTS: usize = 4;

impl PageCaches {
    /// Caches of `limit` bytes in all.
    pub fn new(limit: usize) -> Self {
        Self(Arc::new(Mutex::new(Memory { limit, taken: 0 })))
    }

    /// Hands out no more than `limit` bytes in all from now on. What has been handed out stays.
    pub fn set_limit(&self, limit: usize) {
        lock(&self.0).limit = limit;
    }

    /// As much of `wanted` bytes as there may be, which can be nothing.
    pub(crate) fn take(&self, wanted: usize) -> Share {
        let mut memory = lock(&self.0);
        let bytes = wanted.min(memory.limit.saturating_sub(memory.taken) / PARTS);
        memory.taken += bytes;
        let of = self.clone();
        Share { of, bytes }
    }
}

/// Without a limit.
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
    fn all_caches_together_stay_below_the_limit_and_each_gets_some_of_it() {
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
