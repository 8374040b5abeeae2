//! A queue between threads whose reader can poll it.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Mutex,
};

use rustix::event::{EventfdFlags, eventfd};

use crate::lock;

/// A queue whose file descriptor is readable while it has items.
#[derive(Debug)]
pub struct PollQueue<T> {
    waiting: Mutex<VecDeque<T>>,
    event: OwnedFd,
}

impl<T> PollQueue<T> {
    /// An empty queue.
    ///
    /// # Errors
    /// When the system is out of file descriptors.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            waiting: Mutex::default(),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Adds an item.
    pub fn push(&self, item: T) {
        let mut waiting = lock(&self.waiting);
        waiting.push_back(item);
        // Under the lock: an event written after its item was taken would wake the reader for nothing. The write fails only if the
        // counter is full; then the descriptor is readable anyway.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// The oldest item, if there is one.
    pub fn pop(&self) -> Option<T> {
        let mut waiting = lock(&self.waiting);
        let item = waiting.pop_front();
        if waiting.is_empty() {
            // Resets the counter, so that poll waits again. Fails only if the counter is zero already.
            let _ = rustix::io::read(&self.event, &mut [0u8; 8]);
        }
        item
    }
}

impl<T> AsFd for PollQueue<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering::SeqCst},
        thread,
        time::Duration,
    };

    use rustix::event::{PollFd, PollFlags};

    use super::*;
    use crate::wait_for;

    #[test]
    fn empty_queue_is_not_readable() {
        const ITEMS: usize = 1_000;
        let queue = PollQueue::new().unwrap();
        let (pushed, taken) = (AtomicUsize::new(0), AtomicUsize::new(0));
        thread::scope(|scope| {
            scope.spawn(|| {
                for item in 1..=ITEMS {
                    queue.push(item);
                    pushed.store(item, SeqCst);
                    while taken.load(SeqCst) < item {
                        thread::yield_now();
                    }
                }
            });
            let mut readable = 0;
            for item in 1..=ITEMS {
                // May take the item before the call that pushes it returns.
                while queue.pop().is_none() {}
                while pushed.load(SeqCst) < item {
                    thread::yield_now();
                }
                let mut fds = [PollFd::new(&queue, PollFlags::IN)];
                readable += usize::from(wait_for(&mut fds, Duration::ZERO).unwrap());
                taken.store(item, SeqCst);
            }
            assert_eq!(readable, 0);
        });
    }
}
