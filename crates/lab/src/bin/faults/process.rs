//! Processes that are about to be harmed.

use std::fs;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, Signal, getrlimit, pidfd_open, pidfd_send_signal, prlimit,
};

use crate::proxy::now;

/// A process, which stays the same one even when its number is another's.
#[derive(Clone, Debug)]
pub(crate) struct Process {
    pid: Pid,
    handle: Arc<OwnedFd>,
    /// When it was first seen dead.
    ended: Arc<OnceLock<Duration>>,
}

impl Process {
    /// One of our children that has not been reaped.
    pub(crate) fn open(pid: u32) -> Result<Self> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pid = pid.context("not a process id")?;
        let handle = pidfd_open(pid, PidfdFlags::empty()).context("opening a pidfd")?;
        Ok(Self {
            pid,
            handle: Arc::new(handle),
            ended: Arc::default(),
        })
    }

    /// Sends a signal; nothing happens if it has ended.
    pub(crate) fn signal(&self, signal: Signal) {
        let _ = pidfd_send_signal(&*self.handle, signal);
    }

    /// Kills it, and waits until it is dead.
    pub(crate) fn kill(&self) {
        self.signal(Signal::KILL);
        self.wait(Duration::from_secs(5));
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.wait(Duration::ZERO)
    }

    /// When it was first seen dead, if it is.
    pub(crate) fn ended_at(&self) -> Option<Duration> {
        self.has_ended();
        self.ended.get().copied()
    }

    /// Lets it have `more` files than it has now, and returns what it was allowed before.
    pub(crate) fn limit_files(&self, more: u64) -> Result<Rlimit> {
        let folder = format!("/proc/{}/fd", self.pid.as_raw_nonzero());
        let open = fs::read_dir(&folder)
            .with_context(|| folder.clone())?
            .count() as u64;
        let maximum = getrlimit(Resource::Nofile).maximum;
        let limit = Rlimit {
            current: Some(open + more),
            maximum,
        };
        prlimit(Some(self.pid), Resource::Nofile, limit).context("limiting files")
    }

    /// Gives back what [`Process::limit_files`] took.
    pub(crate) fn allow_files(&self, limit: Rlimit) {
        // It may have ended.
        if !self.has_ended() {
            let _ = prlimit(Some(self.pid), Resource::Nofile, limit);
        }
    }

    /// Whether it has ended, within this time.
    pub(crate) fn wait(&self, within: Duration) -> bool {
        let Ok(within) = Timespec::try_from(within) else {
            return false;
        };
        let mut fds = [PollFd::new(&*self.handle, PollFlags::IN)];
        let ended = poll(&mut fds, Some(&within)).is_ok_and(|ready| ready > 0);
        if ended {
            self.ended.get_or_init(now);
        }
        ended
    }
}
