//! A queue between threads whose reader polls other things, too.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Mutex,
};

use rustix::event::{EventfdFlags, eventfd};

use crate::lock;

/// Items for a thread that polls: the file descriptor is readable while there is one.
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
        lock(&self.waiting).push_back(item);
        // Fails only when the counter is full, and then it is readable anyway.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// The oldest item, if there is one.
    pub fn pop(&self) -> Option<T> {
        let mut waiting = lock(&self.waiting);
        let item = waiting.pop_front();
        if waiting.is_empty() {
            // Resets the counter, so that polling waits again. Nothing to read is just as well.
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
