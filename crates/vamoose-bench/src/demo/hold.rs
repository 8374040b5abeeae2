//! Holds the guest back at the destination at the end of a move, until all of its memory has been compared with the source's.
//!
//! ```text
//!  vamoose serve ──> Hold, a process of its own ──> monitor of the destination QEMU      `cont` waits in it
//!                     │ "held"       ^ "go on"
//!                     └──> the demo ─┘ compares
//! ```
//!
//! `vamoose serve` takes the process that listens on a monitor for the QEMU, and kills it when a migration fails. That must not be
//! the demo itself, which would leave its network behind.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lab::process::Child;
use lab::ram;

use super::guard::Guard;

/// The subcommand that makes this program the proxy.
const COMMAND: &str = "hold-monitor";

/// A guest that will be held back. The proxy ends on drop.
pub(crate) struct Hold {
    child: Child,
    comparing: JoinHandle<Result<Duration>>,
}

impl Hold {
    /// Starts a proxy of `monitor` that listens at `at`. Before the guest may run, the two files of memory are compared.
    pub(crate) fn start(
        guard: &Guard,
        at: &Path,
        monitor: &Path,
        memory: [PathBuf; 2],
    ) -> Result<Self> {
        let program = std::env::current_exe().context("cannot tell where this program is")?;
        let mut command = Command::new(program);
        command.arg(COMMAND).args([at, monitor]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = Child::start(&mut command)?;
        guard.watch(child.process())?;
        let pipes = (child.pipes.stdin.take()).zip(child.pipes.stdout.take());
        let (input, output) = pipes.context("no pipes")?;
        let mut output = BufReader::new(output);
        wait_for(&mut output, LISTENING)?;
        let comparing = thread::spawn(move || compare(&mut output, input, &memory));
        Ok(Self { child, comparing })
    }

    /// At the end of the migration, returns how long the comparison held the guest back.
    ///
    /// # Errors
    /// When the memories differ, or the guest was never started.
    pub(crate) fn finish(mut self) -> Result<Duration> {
        self.child.kill()?;
        let compared = self.comparing.join();
        compared.unwrap_or_else(|_| anyhow::bail!("the comparison failed"))
    }
}

const LISTENING: &str = "listening";
const HELD: &str = "held";

fn compare(
    output: &mut BufReader<ChildStdout>,
    mut input: ChildStdin,
    [source, destination]: &[PathBuf; 2],
) -> Result<Duration> {
    wait_for(output, HELD)?;
    let start = Instant::now();
    let compared = ram::compare(source, destination);
    let took = start.elapsed();
    // Whatever the result: without an answer the migration would not end.
    writeln!(input).context("letting the guest run")?;
    compared.context("comparing the memory of both QEMUs")?;
    Ok(took)
}

fn wait_for(output: &mut BufReader<ChildStdout>, word: &str) -> Result<()> {
    let mut line = String::new();
    output.read_line(&mut line)?;
    ensure!(
        line.trim_end() == word,
        "the proxy of the monitor never said '{word}'"
    );
    Ok(())
}

/// The proxy: runs until it is killed.
pub(crate) fn serve(at: &Path, monitor: &Path) -> Result<()> {
    let listener = UnixListener::bind(at).context("listening as a monitor")?;
    say(LISTENING)?;
    for near in listener.incoming() {
        let near = near.context("accepting a connection to the monitor")?;
        let far = UnixStream::connect(monitor).context("connecting to the monitor")?;
        let back = (far.try_clone()?, near.try_clone()?);
        thread::spawn(move || {
            let (mut from, mut to) = back;
            // Either end may close at any time.
            let _ = io::copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Both);
        });
        thread::spawn(move || {
            let _ = forward(&near, &far);
            let _ = far.shutdown(Shutdown::Both);
        });
    }
    Ok(())
}

/// Forwards commands, one a line.
fn forward(near: &UnixStream, mut far: &UnixStream) -> Result<()> {
    let mut near = BufReader::new(near);
    let mut line = Vec::new();
    while near.read_until(b'\n', &mut line)? > 0 {
        let command: serde_json::Value = serde_json::from_slice(&line).unwrap_or_default();
        if command["execute"] == "cont" {
            say(HELD)?;
            let go_on = io::stdin().read(&mut [0])?;
            ensure!(go_on > 0, "the demo has ended");
        }
        far.write_all(&line)?;
        line.clear();
    }
    Ok(())
}

fn say(word: &str) -> io::Result<()> {
    let mut output = io::stdout().lock();
    writeln!(output, "{word}")?;
    output.flush()
}
