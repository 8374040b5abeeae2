//! One switch that ends everything that blocks in one migration.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use rustix::event::{EventfdFlags, eventfd};

use crate::{Pacer, Stream};

/// Shuts every socket of a migration down at once and wakes whoever polls [`Hangup::as_fd`].
///
/// A broken migration must end on all its connections: a QEMU that keeps one open waits forever.
pub struct Hangup {
    hung_up: AtomicBool,
    streams: Mutex<Vec<Weak<Stream>>>,
    event: OwnedFd,
    pacer: OnceLock<Arc<Pacer>>,
}

/// Hangs up when it is dropped, also by a panic: for scopes that wait for their threads.
pub struct HangupGuard<'a>(&'a Hangup);

impl Drop for HangupGuard<'_> {
    fn drop(&mut self) {
        self.0.hang_up();
    }
}

impl Hangup {
    /// A switch without sockets.
    ///
    /// # Errors
    /// When the system is out of file descriptors.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            hung_up: AtomicBool::new(false),
            streams: Mutex::default(),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            pacer: OnceLock::new(),
        })
    }

    /// Hangs up at the end of a scope.
    pub fn on_drop(&self) -> HangupGuard<'_> {
        HangupGuard(self)
    }

    /// Closes `pacer` too, which threads may wait for. There is one for all channels.
    pub fn set_pacer(&self, pacer: Arc<Pacer>) {
        let _ = self.pacer.set(pacer);
        if self.is_hung_up() {
            self.close_pacer();
        }
    }

    /// Adds a socket, which is shut down at once if the switch has been thrown already.
    pub fn register(&self, stream: &Arc<Stream>) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.retain(|known| known.strong_count() > 0);
        streams.push(Arc::downgrade(stream));
        // Under the lock, so that a socket is either seen by `hang_up` or sees the flag.
        if self.is_hung_up() {
            stream.shut_down();
        }
    }

    /// Throws the switch. More than once is as good as once.
    pub fn hang_up(&self) {
        let streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        self.hung_up.store(true, Ordering::Release);
        for stream in streams.iter().filter_map(Weak::upgrade) {
            stream.shut_down();
        }
        self.close_pacer();
        // Can only fail when the counter is full, and then everybody is awake.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    fn close_pacer(&self) {
        if let Some(pacer) = self.pacer.get() {
            pacer.close();
        }
    }

    /// Whether the switch has been thrown.
    pub fn is_hung_up(&self) -> bool {
        self.hung_up.load(Ordering::Acquire)
    }
}

impl AsFd for Hangup {
    /// Readable from the moment on that the switch is thrown.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
