//! Waiting for file descriptors.

use std::{
    io,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, Timespec, poll},
    io::Errno,
};

/// Waits until one of `fds` is ready, or until `deadline`: false then.
pub(crate) fn wait_until(fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> io::Result<bool> {
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(fds, left.as_ref()) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// The same, for at most `timeout`.
pub(crate) fn wait_for(fds: &mut [PollFd<'_>], timeout: Duration) -> io::Result<bool> {
    wait_until(fds, Some(Instant::now() + timeout))
}
