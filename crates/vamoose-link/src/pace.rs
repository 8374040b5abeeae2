//! Pacing: a limit in bytes per second shared by all channels of a migration.

use std::{
    num::NonZeroU64,
    sync::{Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

use crate::{left, lock};

/// Limits the bytes per second of all callers together.
///
/// Each caller reserves its bytes and then waits until they are due. Unused time is kept for a few
/// milliseconds, so that a short pause of the source costs nothing.
pub struct Pacer {
    bytes_per_second: NonZeroU64,
    state: Mutex<State>,
    changed: Condvar,
}

/// Unused time that is kept.
const BURST: Duration = Duration::from_millis(20);

struct State {
    /// When everything reserved so far will have gone out.
    due: Instant,
    closed: bool,
}

impl Pacer {
    /// A pacer for `bytes_per_second`.
    pub fn new(bytes_per_second: NonZeroU64) -> Self {
        Self {
            bytes_per_second,
            state: Mutex::new(State {
                due: Instant::now(),
                closed: false,
            }),
            changed: Condvar::new(),
        }
    }

    /// Waits until `bytes` may go out, or the pacer is closed.
    pub fn wait_for(&self, bytes: usize) {
        let mut state = lock(&self.state);
        let start = reserve(&mut state, Instant::now(), self.duration_of(bytes));
        while !state.closed {
            let wait = left(start);
            if wait.is_zero() {
                return;
            }
            state = self
                .changed
                .wait_timeout(state, wait)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Counts `bytes` that are sent without waiting; later callers wait longer for them.
    pub fn charge(&self, bytes: usize) {
        let mut state = lock(&self.state);
        reserve(&mut state, Instant::now(), self.duration_of(bytes));
    }

    /// Stops limiting: the migration is over.
    pub fn close(&self) {
        let mut state = lock(&self.state);
        state.closed = true;
        self.changed.notify_all();
    }

    fn duration_of(&self, bytes: usize) -> Duration {
        let nanos = bytes as u128 * 1_000_000_000 / u128::from(self.bytes_per_second.get());
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

/// Reserves the next `length` of time; returns its beginning.
fn reserve(state: &mut State, now: Instant, length: Duration) -> Instant {
    let earliest = now.checked_sub(BURST).unwrap_or(now);
    let start = state.due.max(earliest);
    state.due = start.checked_add(length).unwrap_or(start);
    start
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, thread};

    use super::*;

    #[test]
    fn reservations_queue_up_behind_each_other() {
        let now = Instant::now();
        let mut state = State {
            due: now,
            closed: false,
        };
        let second = Duration::from_secs(1);
        assert_eq!(reserve(&mut state, now, second), now);
        assert_eq!(reserve(&mut state, now, second), now + second);
        assert_eq!(state.due, now + 2 * second);
        // After a long pause only the burst is kept.
        let later = now + 60 * second;
        assert_eq!(reserve(&mut state, later, second), later - BURST);
    }

    #[test]
    fn bytes_take_their_time() {
        let pacer = Pacer::new(NonZeroU64::new(1000).unwrap());
        assert_eq!(pacer.duration_of(250), Duration::from_millis(250));
        assert_eq!(
            pacer.duration_of(usize::MAX).as_secs(),
            u64::MAX / 1_000_000_000
        );
    }

    #[test]
    fn closing_wakes_waiting_callers() {
        let pacer = Arc::new(Pacer::new(NonZeroU64::MIN));
        pacer.wait_for(1 << 40);
        let waiter = thread::spawn({
            let pacer = pacer.clone();
            move || pacer.wait_for(1)
        });
        pacer.close();
        waiter.join().unwrap();
    }
}
