//! Waiting with a deadline, and for locks.

use std::{
    io,
    sync::{
        Mutex, MutexGuard, PoisonError, TryLockError,
        mpsc::{Receiver, RecvTimeoutError},
    },
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, Timespec, poll},
    io::Errno,
};

/// Waits until one of `fds` is ready, or until `deadline`: false then.
///
/// # Errors
/// The system's.
pub fn wait_until(fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> io::Result<bool> {
    loop {
        // A time too long for the system means no deadline.
        let left = deadline.and_then(|deadline| Timespec::try_from(left(deadline)).ok());
        match poll(fds, left.as_ref()) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// As [`wait_until`], for at most `timeout`.
///
/// # Errors
/// The system's.
pub fn wait_for(fds: &mut [PollFd<'_>], timeout: Duration) -> io::Result<bool> {
    wait_until(fds, Some(Instant::now() + timeout))
}

/// Waits for the next message until `deadline`.
///
/// # Errors
/// When the deadline has passed, or all senders are gone.
pub fn receive_until<T>(
    messages: &Receiver<T>,
    deadline: Option<Instant>,
) -> Result<T, RecvTimeoutError> {
    match deadline {
        None => Ok(messages.recv()?),
        Some(deadline) => messages.recv_timeout(left(deadline)),
    }
}

/// The time until `deadline`; zero when it has passed.
pub fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// Locks `mutex`, even if a thread panicked while holding it: the protected data is consistent at all times.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As [`lock`]; `None` while another thread holds `mutex`.
pub(crate) fn try_lock<T: ?Sized>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}
