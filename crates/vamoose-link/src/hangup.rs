//! Ends all blocking calls of a migration at once.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex, OnceLock, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use rustix::event::{EventfdFlags, eventfd};

use crate::{Pacer, Stream, lock};

/// Shuts down all streams of a migration, and wakes the threads that poll [`Hangup::as_fd`].
///
/// A failed migration must end on all its connections: a QEMU with one still open would wait forever.
///
/// ```
/// # fn main() -> std::io::Result<()> {
/// let hangup = vamoose_link::Hangup::new()?;
/// std::thread::scope(|scope| {
///     let _guard = hangup.guard(); // Ends the threads, however this closure is left.
///     // scope.spawn(...)
/// });
/// assert!(hangup.is_hung_up());
/// # Ok(())
/// # }
/// ```
pub struct Hangup {
    hung_up: AtomicBool,
    streams: Mutex<Vec<Weak<Stream>>>,
    event: OwnedFd,
    pacer: OnceLock<Arc<Pacer>>,
}

impl Hangup {
    /// A switch without streams.
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

    /// Makes the switch close the migration's pacer too, so that no thread waits for it. Call once, before threads use it.
    pub fn set_pacer(&self, pacer: Arc<Pacer>) {
        let _ = self.pacer.set(pacer);
    }

    /// Adds a stream, which is shut down immediately if the switch has been thrown already.
    pub fn register(&self, stream: &Arc<Stream>) {
        let mut streams = lock(&self.streams);
        streams.retain(|known| known.strong_count() > 0);
        streams.push(Arc::downgrade(stream));
        // Under the lock: either `hang_up` sees the stream, or this call sees the flag.
        if self.is_hung_up() {
            stream.shut_down();
        }
    }

    /// Removes `stream`: its owner ends it.
    pub fn spare(&self, stream: &Arc<Stream>) {
        let spared = Arc::downgrade(stream);
        lock(&self.streams).retain(|known| !known.ptr_eq(&spared));
    }

    /// Throws the switch. Further calls have no effect.
    pub fn hang_up(&self) {
        let streams = lock(&self.streams);
        self.hung_up.store(true, Ordering::Release);
        let mut open: Vec<_> = streams.iter().filter_map(Weak::upgrade).collect();
        // A session's first: who reads a socket would forward its end as if the bytes were complete.
        open.sort_by_key(|stream| stream.socket().is_some());
        for stream in open {
            stream.shut_down();
        }
        if let Some(pacer) = self.pacer.get() {
            pacer.close();
        }
        // Fails only if the counter is full; then all threads are awake.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// Throws the switch when the guard is dropped.
    pub fn guard(&self) -> HangupGuard<'_> {
        HangupGuard(self)
    }

    /// Whether the switch has been thrown.
    pub fn is_hung_up(&self) -> bool {
        self.hung_up.load(Ordering::Acquire)
    }
}

impl AsFd for Hangup {
    /// Readable once the switch has been thrown.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// See [`Hangup::guard`].
#[must_use = "the switch is thrown when the guard is dropped"]
pub struct HangupGuard<'a>(&'a Hangup);

impl Drop for HangupGuard<'_> {
    fn drop(&mut self) {
        self.0.hang_up();
    }
}
