//! Processes by their pidfd: waits with a limit, signals and resource limits; children are killed and reaped on drop.

use std::fs;
use std::os::fd::AsFd;
use std::process::{self, Command, ExitStatus};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, Signal, getrlimit, pidfd_open, pidfd_send_signal, prlimit,
};

use crate::proc;

/// A process, identified by its pidfd, so that its id is never confused with a later process's.
#[derive(Clone, Debug)]
pub struct Process {
    pid: Pid,
    handle: Arc<OwnedFd>,
    /// When it was first found dead.
    ended: Arc<OnceLock<Duration>>,
}

impl Process {
    /// Opens a child of this process that has not been reaped.
    pub fn open(pid: u32) -> Result<Self> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pid = pid.context("not a process id")?;
        let handle = pidfd_open(pid, PidfdFlags::empty()).context("opening a pidfd")?;
        Ok(Self {
            pid,
            handle: Arc::new(handle),
            ended: Arc::default(),
        })
    }

    /// Sends a signal, unless the process has ended.
    pub fn signal(&self, signal: Signal) {
        let _ = pidfd_send_signal(&*self.handle, signal);
    }

    /// Kills the process and waits until it is dead.
    pub fn kill(&self) {
        self.signal(Signal::KILL);
        self.wait(Duration::from_secs(5));
    }

    /// Waits for the end of the process; whether it came in time.
    pub fn wait(&self, within: Duration) -> bool {
        let ended = wait_readable([self.as_fd()], within).is_ok_and(|[ended]| ended);
        if ended {
            self.ended.get_or_init(now);
        }
        ended
    }

    /// Whether the process has ended.
    pub fn has_ended(&self) -> bool {
        self.wait(Duration::ZERO)
    }

    /// When the process was first found dead, since 1970.
    pub fn ended_at(&self) -> Option<Duration> {
        self.has_ended();
        self.ended.get().copied()
    }

    /// Limits the process to `more` open files than it has now. Returns the earlier limit.
    pub fn limit_files(&self, more: u64) -> Result<Rlimit> {
        let folder = format!("/proc/{}/fd", self.pid.as_raw_nonzero());
        let open = fs::read_dir(&folder).context(folder)?.count() as u64;
        let limit = Rlimit {
            current: Some(open + more),
            maximum: getrlimit(Resource::Nofile).maximum,
        };
        prlimit(Some(self.pid), Resource::Nofile, limit).context("limiting files")
    }

    /// Restores the limit that [`Process::limit_files`] returned.
    pub fn allow_files(&self, limit: Rlimit) {
        // Its id may be another process's after its end.
        if !self.has_ended() {
            let _ = prlimit(Some(self.pid), Resource::Nofile, limit);
        }
    }
}

/// Readable once the process has ended.
impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.handle.as_fd()
    }
}

/// A child process. Killed and reaped on drop.
#[derive(Debug)]
pub struct Child {
    /// The standard library's child, with its pipes.
    pub pipes: process::Child,
    process: Process,
}

impl Child {
    /// Starts a command.
    pub fn start(command: &mut Command) -> Result<Self> {
        let pipes = command
            .spawn()
            .with_context(|| format!("cannot start {command:?}"))?;
        let process = Process::open(pipes.id())?;
        Ok(Self { pipes, process })
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.pipes.id()
    }

    /// A handle for other threads.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Kills and reaps the process.
    pub fn kill(&mut self) -> Result<()> {
        self.pipes.kill().context("cannot kill a child")?;
        self.pipes.wait().context("cannot wait for a child")?;
        Ok(())
    }

    /// Waits for the end of the process; `None` if it still runs after `within`.
    pub fn wait(&mut self, within: Duration) -> Result<Option<ExitStatus>> {
        if !self.process.wait(within) {
            return Ok(None);
        }
        let status = self.pipes.wait().context("cannot wait for a child")?;
        Ok(Some(status))
    }

    /// Waits for the end of the process. Returns its status and the CPU seconds it used, which are readable until it is reaped.
    pub fn finish(&mut self, within: Duration) -> Result<(ExitStatus, f64)> {
        ensure!(
            self.process.wait(within),
            "process {} still runs after {within:?}",
            self.id()
        );
        let cpu_seconds = proc::cpu_seconds(self.id())?;
        Ok((self.pipes.wait()?, cpu_seconds))
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.kill();
    }
}

/// The time since 1970, like the timestamps of QEMU's events.
pub fn now() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

/// Waits until one of `files` is readable or closed, at most for `within`. Returns which are.
pub fn wait_readable<const N: usize>(
    files: [BorrowedFd<'_>; N],
    within: Duration,
) -> Result<[bool; N]> {
    let deadline = Instant::now() + within;
    let mut files = files.map(|file| PollFd::from_borrowed_fd(file, PollFlags::IN));
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).context("waiting that long")?;
        match poll(&mut files, Some(&left)) {
            Err(rustix::io::Errno::INTR) => {}
            result => {
                result.context("waiting for a file")?;
                return Ok(files.map(|file| !file.revents().is_empty()));
            }
        }
    }
}
