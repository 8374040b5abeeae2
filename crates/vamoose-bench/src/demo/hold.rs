//! Holds the guest back at the destination at the end of a move, until all of its memory has been compared with the source's.
//!
//! ```text
//!  vamoose serve ──> hold-monitor, a process of its own ──> monitor of the destination QEMU
//!                    compares before it forwards `cont`
//! ```
//!
//! The proxy is a separate process because `vamoose serve` takes the process that listens on a monitor for the QEMU, and kills that
//! process when a migration fails. The demo itself must survive, to remove its network.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use lab::process::Child;
use lab::ram;

use super::guard::Guard;

/// The subcommand that makes this program the proxy.
const COMMAND: &str = "hold-monitor";

/// Options of the proxy.
#[derive(Args, Debug)]
pub(crate) struct Proxy {
    /// Where it listens.
    at: PathBuf,
    monitor: PathBuf,
    /// The memory of the source QEMU.
    source: PathBuf,
    /// The memory of the destination QEMU.
    destination: PathBuf,
}

/// A guest that will be held back. The proxy ends on drop.
pub(crate) struct Hold {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Hold {
    /// Starts a proxy of `monitor` that listens at `at`. Before the guest may run, the two files of memory are compared.
    pub(crate) fn start(
        guard: &Guard,
        at: &Path,
        monitor: &Path,
        memory: [&Path; 2],
    ) -> Result<Self> {
        let program = std::env::current_exe().context("cannot tell where this program is")?;
        let mut command = Command::new(program);
        command.arg(COMMAND).args([at, monitor]).args(memory);
        let mut child = Child::start(command.stdout(Stdio::piped()))?;
        guard.watch(child.process())?;
        let output = child.pipes.stdout.take().context("no pipe")?;
        let mut output = BufReader::new(output);
        let said = line(&mut output)?;
        ensure!(said == LISTENING, "the proxy of the monitor says '{said}'");
        Ok(Self { child, output })
    }

    /// At the end of the migration, returns how long the comparison held the guest back.
    ///
    /// # Errors
    /// If the memories differ, or the guest was never started.
    pub(crate) fn finish(mut self) -> Result<Duration> {
        self.child.kill()?;
        let said = line(&mut self.output)?;
        match said.strip_prefix(EQUAL).map(str::parse) {
            Some(Ok(millis)) => Ok(Duration::from_millis(millis)),
            _ => bail!("comparing the memory of both QEMUs: {said}"),
        }
    }
}

const LISTENING: &str = "listening";
/// Followed by the milliseconds that the comparison took.
const EQUAL: &str = "equal ";

fn line(output: &mut BufReader<ChildStdout>) -> Result<String> {
    let mut line = String::new();
    output.read_line(&mut line)?;
    Ok(line.trim_end().to_owned())
}

impl Proxy {
    /// Runs until it is killed.
    pub(crate) fn serve(&self) -> Result<()> {
        let listener = UnixListener::bind(&self.at).context("listening as a monitor")?;
        say(LISTENING)?;
        thread::scope(|scope| {
            for near in listener.incoming() {
                let near = near.context("accepting a connection to the monitor")?;
                let far =
                    UnixStream::connect(&self.monitor).context("connecting to the monitor")?;
                let (mut from, mut to) = (far.try_clone()?, near.try_clone()?);
                scope.spawn(move || {
                    // Either end may close at any time.
                    let _ = io::copy(&mut from, &mut to);
                    let _ = to.shutdown(Shutdown::Both);
                });
                scope.spawn(move || {
                    let _ = self.forward(&near, &far);
                    let _ = far.shutdown(Shutdown::Both);
                });
            }
            Ok(())
        })
    }

    /// Forwards commands, one a line.
    fn forward(&self, near: &UnixStream, mut far: &UnixStream) -> Result<()> {
        let mut near = BufReader::new(near);
        let mut line = Vec::new();
        while near.read_until(b'\n', &mut line)? > 0 {
            let command: serde_json::Value = serde_json::from_slice(&line).unwrap_or_default();
            if command["execute"] == "cont" {
                let start = Instant::now();
                // Whatever the result, the guest may run: the migration would not end otherwise.
                say(&match ram::compare(&self.source, &self.destination) {
                    Ok(()) => format!("{EQUAL}{}", start.elapsed().as_millis()),
                    Err(mismatch) => format!("{mismatch}"),
                })?;
            }
            far.write_all(&line)?;
            line.clear();
        }
        Ok(())
    }
}

fn say(text: &str) -> io::Result<()> {
    let mut output = io::stdout().lock();
    writeln!(output, "{text}")?;
    output.flush()
}
