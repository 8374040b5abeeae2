//! What one thread changes and others wait for.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A value that threads share, and whose changes they can wait for.
#[derive(Debug, Default)]
pub struct Watched<T> {
    value: Mutex<T>,
    changed: Condvar,
}

impl<T> Watched<T> {
    /// A value that nothing waits for yet.
    pub fn new(value: T) -> Self {
        Self {
            value: Mutex::new(value),
            changed: Condvar::new(),
        }
    }

    /// The value, for a look, or for changes that nothing waits for. A thread that panicked has left it valid.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the value, and lets those look that wait.
    pub fn update<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let result = change(&mut self.lock());
        self.changed.notify_all();
        result
    }

    /// Waits until `find` finds something in the value. After `within` the last look counts.
    pub fn wait<R>(&self, within: Duration, find: impl Fn(&T) -> Option<R>) -> Option<R> {
        let deadline = Instant::now() + within;
        let mut value = self.lock();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let found = find(&value);
            if found.is_some() || left.is_zero() {
                return found;
            }
            let waited = self.changed.wait_timeout(value, left);
            value = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
