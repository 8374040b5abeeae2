//! A QEMU's monitor that falls silent for a while, as behind a main loop that is busy.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::Shutdown,
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use anyhow::{Result, ensure};
use tempfile::TempDir;

use super::LIMIT;

/// Stands before a QEMU's monitor. Nobody may mean to end this QEMU: it seems to be the test's process.
pub(crate) struct SilentMonitor {
    folder: TempDir,
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Talks,
    /// Falls silent at this command.
    WillBeSilentAt(&'static str),
    /// Says nothing until the next command comes, or for [`SILENCE`].
    Silent,
    /// It talks again: the late answer first.
    HasBeenSilent,
}

/// Longer than anybody waits for an answer.
const SILENCE: Duration = Duration::from_secs(25);

impl SilentMonitor {
    pub(crate) fn before(qmp: &Path) -> Result<Self> {
        let folder = TempDir::new()?;
        let listener = UnixListener::bind(folder.path().join("qmp"))?;
        let shared = Arc::new(Shared {
            state: Mutex::new(State::Talks),
            changed: Condvar::new(),
        });
        thread::spawn({
            let (qmp, shared) = (qmp.to_owned(), shared.clone());
            // Ends with the test's process. One client at a time, as QEMU has it.
            move || {
                for near in listener.incoming().flatten() {
                    let Ok(far) = UnixStream::connect(&qmp) else {
                        continue;
                    };
                    shared.serve(&near, &far);
                }
            }
        });
        Ok(Self { folder, shared })
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join("qmp")
    }

    /// The answer to the next such command comes late, when the next command has come or the wait is over.
    pub(crate) fn fall_silent_at(&self, command: &'static str) {
        *self.shared.state() = State::WillBeSilentAt(command);
    }

    /// Waits until the late answer has been given.
    pub(crate) fn wait_until_it_talks(&self) -> Result<()> {
        let over = |state: &mut State| *state != State::HasBeenSilent;
        let (state, _) = self
            .shared
            .changed
            .wait_timeout_while(self.shared.state(), LIMIT, over)
            .unwrap_or_else(PoisonError::into_inner);
        ensure!(
            *state == State::HasBeenSilent,
            "the monitor is {state:?} all the time"
        );
        Ok(())
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, near: &UnixStream, far: &UnixStream) {
        thread::scope(|scope| {
            scope.spawn(|| {
                pass_lines(near, far, |line| self.command(line));
                // The client has gone.
                self.command(&[]);
            });
            pass_lines(far, near, |_| self.answer());
        });
    }

    fn command(&self, line: &[u8]) {
        let mut state = self.state();
        *state = match *state {
            State::WillBeSilentAt(command) if contains(line, &format!("\"{command}\"")) => {
                State::Silent
            }
            State::Silent => State::HasBeenSilent,
            same => same,
        };
        self.changed.notify_all();
    }

    /// Returns when QEMU may send its line.
    fn answer(&self) {
        let silent = |state: &mut State| *state == State::Silent;
        let (mut state, waited) = self
            .changed
            .wait_timeout_while(self.state(), SILENCE, silent)
            .unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            *state = State::HasBeenSilent;
            self.changed.notify_all();
        }
    }
}

fn contains(line: &[u8], text: &str) -> bool {
    line.windows(text.len())
        .any(|window| window == text.as_bytes())
}

/// Passes lines on, each as `before` leaves it, until one side closes; then both are closed.
pub(crate) fn pass_lines(from: &UnixStream, mut to: &UnixStream, before: impl Fn(&mut Vec<u8>)) {
    let mut lines = BufReader::new(from);
    let mut line = Vec::new();
    while lines
        .read_until(b'\n', &mut line)
        .is_ok_and(|read| read > 0)
    {
        before(&mut line);
        if to.write_all(&line).is_err() {
            break;
        }
        line.clear();
    }
    // An end that is gone already has nothing to see.
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
