//! Runs `vamoose` as a user would, as a process, and reads what it says.

use std::{
    fs::Permissions,
    io::{BufRead as _, BufReader, Read},
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Child, ChildStderr, Command, ExitStatus, Stdio},
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open},
};
use tempfile::TempDir;

use crate::proc::{self, Memory};

/// A folder for `--state-dir`, in memory as the default one is: what is measured is not a disk.
pub fn state_dir() -> Result<TempDir> {
    let memory = Path::new("/dev/shm");
    let mut builder = tempfile::Builder::new();
    let private = builder.permissions(Permissions::from_mode(0o700));
    if memory.is_dir() {
        private.tempdir_in(memory)
    } else {
        private.tempdir()
    }
    .context("creating a state folder")
}

/// A running `vamoose`. Killed and reaped on drop.
pub struct Vamoose {
    child: Child,
    said: Arc<Said>,
    reader: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Said {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    lines: Vec<String>,
    ended: bool,
}

impl Vamoose {
    /// Starts `command`, a `vamoose` with its arguments.
    pub fn start(command: &mut Command) -> Result<Self> {
        let mut child = command
            .env("NO_COLOR", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {command:?}"))?;
        let stderr = child.stderr.take().context("no stderr")?;
        let said = Arc::new(Said::default());
        let reader = thread::spawn({
            let said = said.clone();
            move || read_lines(stderr, &said)
        });
        Ok(Self {
            child,
            said,
            reader: Some(reader),
        })
    }

    /// A relay from `listen` (which may end in port 0) to `connect`, ready for its source; returns
    /// the address to migrate to, too.
    pub fn relay(
        program: &Path,
        listen: &str,
        connect: &str,
        options: &[&str],
    ) -> Result<(Self, String)> {
        let mut command = Command::new(program);
        command.args(["relay", "--listen", listen, "--connect", connect]);
        let relay = Self::start(command.args(options))?;
        let address = relay.wait_for("listening on ", Duration::from_secs(20))?;
        Ok((relay, address))
    }

    /// The process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its memory.
    pub fn memory(&self) -> Result<Memory> {
        proc::memory(self.pid())
    }

    /// Waits for a line with `text` on stderr and returns what follows the text.
    pub fn wait_for(&self, text: &str, within: Duration) -> Result<String> {
        let deadline = Instant::now() + within;
        let mut state = self
            .said
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        loop {
            let found = state.lines.iter().find_map(|line| line.split_once(text));
            if let Some((_, rest)) = found {
                return Ok(rest.trim().to_owned());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if state.ended || left.is_zero() {
                bail!(
                    "vamoose never said `{text}`, but:\n{}",
                    state.lines.join("\n")
                );
            }
            state = self
                .said
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill_process(self.raw_pid()?, signal).context("cannot signal vamoose")
    }

    /// Ends it as a crash would; nothing of it is left when this returns.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill().context("cannot kill vamoose")?;
        self.child.wait().context("cannot wait for vamoose")?;
        Ok(())
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Waits for its end, about as long as this; whether it has ended. [`Vamoose::finish`] tells how.
    pub fn wait_end(&self, within: Duration) -> Result<bool> {
        let process = pidfd_open(self.raw_pid()?, PidfdFlags::empty())?;
        let timeout = Timespec::try_from(within)?;
        match poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&timeout)) {
            Err(Errno::INTR) => Ok(false),
            ready => Ok(ready? > 0),
        }
    }

    /// Waits for its end and returns how it ended, with all it wrote.
    pub fn finish(mut self, within: Duration) -> Result<Ended> {
        let process = pidfd_open(self.raw_pid()?, PidfdFlags::empty())?;
        let timeout = Timespec::try_from(within)?;
        let ready = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&timeout))?;
        ensure!(
            ready > 0,
            "vamoose still runs after {within:?}; it said:\n{}",
            self.stderr()
        );
        let cpu_seconds = proc::cpu_seconds(self.pid())?;
        let status = self.child.wait()?;
        let mut stdout = String::new();
        if let Some(mut pipe) = self.child.stdout.take() {
            pipe.read_to_string(&mut stdout)?;
        }
        if let Some(reader) = self.reader.take() {
            // It ends with the process.
            let _ = reader.join();
        }
        Ok(Ended {
            status,
            stdout,
            stderr: self.stderr(),
            cpu_seconds,
        })
    }

    /// What it has written to stderr so far.
    pub fn stderr(&self) -> String {
        let state = self
            .said
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        state.lines.join("\n")
    }

    fn raw_pid(&self) -> Result<Pid> {
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw);
        pid.context("not a process id")
    }
}

impl Drop for Vamoose {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A `vamoose` that has ended.
#[derive(Debug)]
pub struct Ended {
    /// How.
    pub status: ExitStatus,
    /// All that it wrote to stdout.
    pub stdout: String,
    /// All that it wrote to stderr.
    pub stderr: String,
    /// CPU time of the whole process, user and system.
    pub cpu_seconds: f64,
}

impl Ended {
    /// Passes only what ended with success.
    ///
    /// # Errors
    /// With what it said, when it failed.
    pub fn success(self) -> Result<Self> {
        ensure!(
            self.status.success(),
            "vamoose failed ({}):\n{}",
            self.status,
            self.stderr
        );
        Ok(self)
    }

    /// Passes only what ended with a failure and `text` on stderr.
    ///
    /// # Errors
    /// With what it said, otherwise.
    pub fn failure(self, text: &str) -> Result<Self> {
        ensure!(
            !self.status.success(),
            "vamoose did not fail:\n{}",
            self.stderr
        );
        ensure!(
            self.stderr.contains(text),
            "vamoose did not say `{text}` but:\n{}",
            self.stderr
        );
        Ok(self)
    }
}

fn read_lines(stderr: ChildStderr, said: &Said) {
    for line in BufReader::new(stderr).lines() {
        let Ok(line) = line else { break };
        let mut state = said.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.lines.push(line);
        said.changed.notify_all();
    }
    let mut state = said.state.lock().unwrap_or_else(PoisonError::into_inner);
    state.ended = true;
    said.changed.notify_all();
}
