//! Cleans up when the demo is interrupted at any moment.
//!
//! A signal kills the processes registered here. The demo only ever waits for one of these, so its wait fails, and the demo ends as
//! after any other error: the owners of processes, namespaces and files remove them. Ctrl-C in a terminal also reaches the commands
//! that remove namespaces, so [`Guard::sweep`] removes what is left.

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
    /// Installs the signal handler: signals that would end this process end the demo instead.
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

    /// Registers a process that the demo will wait for.
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

    /// At the end, removes the network namespaces of this process that still exist.
    pub(crate) fn sweep(&self) {
        let ours = format!("vm{}-", std::process::id());
        for entry in fs::read_dir("/run/netns").into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(&ours) {
                // In a process group of its own, the terminal's signals do not reach it. Errors are ignored.
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
    fn an_interrupt_ends_present_and_later_processes() {
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
