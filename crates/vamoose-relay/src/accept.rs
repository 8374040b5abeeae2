//! Where a relay's incoming connections come from: a socket of its own, or another thread.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use tracing::warn;
use vamoose_link::{Listener, SocketError, Stream, lock};

use crate::chain;

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

/// Takes connections; pauses where the system has no file descriptors left, which may pass.
pub(crate) struct Acceptor<'a> {
    accept: &'a dyn Accept,
    again_at: Option<Instant>,
}

/// What waits in the listener's queue keeps it readable, so polling would be a busy wait.
const PAUSE: Duration = Duration::from_millis(100);

impl<'a> Acceptor<'a> {
    pub(crate) fn new(accept: &'a dyn Accept) -> Self {
        Self {
            accept,
            again_at: None,
        }
    }

    /// A connection that is waiting, unless it is time to pause.
    pub(crate) fn next(&mut self) -> Result<Option<Arc<Stream>>, SocketError> {
        let was_out = self.again_at.is_some();
        if self.again_at.is_some_and(|again| Instant::now() < again) {
            return Ok(None);
        }
        self.again_at = None;
        match self.accept.try_accept() {
            Err(error) if error.is_exhaustion() => {
                if !was_out {
                    warn!("{}; trying again", chain(&error));
                }
                self.again_at = Some(Instant::now() + PAUSE);
                Ok(None)
            }
            taken => taken,
        }
    }

    /// What to poll for connections, unless it is time to pause.
    pub(crate) fn poll_fd(&self) -> Option<PollFd<'a>> {
        let accept: &'a dyn Accept = self.accept;
        (self.again_at.is_none()).then(|| PollFd::from_borrowed_fd(accept.as_fd(), PollFlags::IN))
    }

    /// When the pause ends.
    pub(crate) fn again_at(&self) -> Option<Instant> {
        self.again_at
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
        lock(&self.waiting).push_back(stream);
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
        let mut waiting = lock(&self.waiting);
        let stream = waiting.pop_front();
        if waiting.is_empty() {
            // Resets the counter, so that polling waits again. Nothing to read is just as well.
            let _ = rustix::io::read(&self.event, &mut [0u8; 8]);
        }
        Ok(stream)
    }
}
