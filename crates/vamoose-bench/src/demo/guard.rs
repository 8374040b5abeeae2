//! Ctrl-C at any moment leaves nothing behind.
//!
//! A signal kills the processes that were made known here. Whatever the story waits for is one of them, so its wait fails,
//! and the story ends as by any other error: on its variant out the owners of processes, namespaces and files remove them.
//! Ctrl-C in a terminal also hits the commands that do that, so [`Guard::sweep`] does what they may have left undone.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use anyhow::{Context, Result, bail};
use lab::process::Process;
use rustix::process::Signal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

pub(crate) struct Guard {
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    interrupted: bool,
    processes: Vec<Process>,
}

impl Guard {
    /// From here on the signals that would end this process end the story instead.
    pub(crate) fn new() -> Result<Self> {
        let state = Arc::new(Mutex::new(State::default()));
        let mut signals =
            Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot catch signals")?;
        thread::spawn({
            let state = Arc::clone(&state);
            move || {
                for _ in signals.forever() {
                    lock(&state).interrupt();
                }
            }
        });
        Ok(Self { state })
    }

    /// Makes a process known that the story will wait for.
    pub(crate) fn watch(&self, process: &Process) -> Result<()> {
        let mut state = lock(&self.state);
        state.processes.push(process.clone());
        if state.interrupted {
            state.interrupt();
            bail!("interrupted");
        }
        Ok(())
    }

    pub(crate) fn interrupted(&self) -> bool {
        lock(&self.state).interrupted
    }

    /// Removes the network namespaces of this process that are still there, for the end of it.
    pub(crate) fn sweep(&self) {
        let ours = format!("vm{}-", std::process::id());
        for entry in fs::read_dir("/run/netns").into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(&ours) {
                // In a process group of its own the terminal's signals do not reach it. Errors are
                // ignored.
                let _ = Command::new("ip")
                    .args(["netns", "delete"])
                    .arg(entry.file_name())
                    .process_group(0)
                    .stderr(Stdio::null())
                    .status();
            }
        }
    }
}

impl State {
    fn interrupt(&mut self) {
        self.interrupted = true;
        for process in &self.processes {
            process.signal(Signal::KILL);
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lab::process::Child;
    use std::os::unix::process::ExitStatusExt;

    #[test]
    fn an_interrupt_ends_what_runs_and_what_is_started_later() {
        let guard = Guard {
            state: Arc::default(),
        };
        let sleep = || Child::start(Command::new("sleep").arg("1000")).unwrap();
        let mut before = sleep();
        guard.watch(before.process()).unwrap();
        assert!(!guard.interrupted());
        lock(&guard.state).interrupt();
        assert_eq!(before.pipes.wait().unwrap().signal(), Some(9));
        let mut after = sleep();
        assert!(guard.watch(after.process()).is_err() && guard.interrupted());
        assert_eq!(after.pipes.wait().unwrap().signal(), Some(9));
    }
}
