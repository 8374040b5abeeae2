//! Where a relay's incoming connections come from: a socket of its own, or another thread.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, PoisonError},
};

use rustix::event::{EventfdFlags, eventfd};
use transfer::{Listener, SocketError, Stream};

/// A source of connections that can be polled.
pub trait Accept: AsFd + Sync {
    /// A connection that is waiting, if there is one. The file descriptor is readable while there
    /// may be one.
    ///
    /// # Errors
    /// When the system refuses.
    fn try_accept(&self) -> Result<Option<Arc<Stream>>, SocketError>;
}

impl Accept for Listener {
    fn try_accept(&self) -> Result<Option<Arc<Stream>>, SocketError> {
        Ok(Listener::try_accept(self)?.map(Arc::new))
    }
}

/// Connections that another thread has accepted and hands over to a relay.
pub struct AcceptQueue {
    waiting: Mutex<VecDeque<Arc<Stream>>>,
    event: OwnedFd,
}

impl AcceptQueue {
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

    /// Gives the relay a connection.
    pub fn push(&self, stream: Arc<Stream>) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.push_back(stream);
        // Fails only when the counter is full, and then it is readable anyway.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }
}

impl AsFd for AcceptQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl Accept for AcceptQueue {
    fn try_accept(&self) -> Result<Option<Arc<Stream>>, SocketError> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let stream = waiting.pop_front();
        if waiting.is_empty() {
            // Resets the counter, so that polling waits again. Nothing to read is just as well.
            let _ = rustix::io::read(&self.event, &mut [0u8; 8]);
        }
        Ok(stream)
    }
}
