//! A shared value whose changes threads can wait for.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A shared value whose changes threads can wait for.
#[derive(Debug, Default)]
pub struct Watched<T> {
    value: Mutex<T>,
    changed: Condvar,
}

impl<T> Watched<T> {
    /// Wraps a value.
    pub fn new(value: T) -> Self {
        Self {
            value: Mutex::new(value),
            changed: Condvar::new(),
        }
    }

    /// The value, to read, or for changes that no thread waits for. A thread that panicked has left it valid.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the value and wakes waiting threads.
    pub fn update<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let result = change(&mut self.lock());
        self.changed.notify_all();
        result
    }

    /// Waits until `find` finds something in the value; after `within` it is called a last time.
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
