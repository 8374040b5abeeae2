//! The destination's process, as seen from the source.

use std::{
    env,
    io::{BufRead as _, BufReader},
    os::unix::process::{CommandExt as _, ExitStatusExt as _},
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail};
use serde::de::DeserializeOwned;

use crate::messages::Order;

/// A running destination, which ends on drop.
pub(crate) struct Process {
    child: Child,
    /// The destination runs as long as this is open.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Process {
    /// Starts this program as the destination, through the command `via` if there is one.
    pub(crate) fn start(via: Option<&str>, order: &Order) -> Result<Self> {
        let program = env::current_exe().context("cannot find this program")?;
        let mut words = via.unwrap_or_default().split_ascii_whitespace();
        let mut command = match words.next() {
            Some(word) => {
                let mut command = Command::new(word);
                command.args(words).arg(program);
                command
            }
            None => Command::new(program),
        };
        command
            .arg("destination")
            .arg(serde_json::to_string(order)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C is for the source, which cancels the migration.
            .process_group(0);
        if env::var_os("VAMOOSE_LOG").is_none() {
            command.env("VAMOOSE_LOG", "warn");
        }
        let mut child = command.spawn().with_context(|| {
            let program = command.get_program().to_string_lossy();
            format!("cannot start the destination ({program})")
        })?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().context("no pipe")?);
        Ok(Self {
            child,
            input,
            output,
        })
    }

    /// Id of the process; with `via`, of that command.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the next message.
    pub(crate) fn receive<T: DeserializeOwned>(&mut self) -> Result<T> {
        let mut line = String::new();
        let length = self
            .output
            .read_line(&mut line)
            .context("cannot read from the destination")?;
        if length == 0 {
            return Err(self.ended());
        }
        match serde_json::from_str::<Result<T, String>>(&line) {
            Ok(Ok(message)) => Ok(message),
            Ok(Err(cause)) => bail!("the destination: {cause}"),
            Err(_) => bail!(
                "unexpected output of the destination: `{}`",
                line.trim_end()
            ),
        }
    }

    /// Ends the process. Returns the signal that had already killed it.
    pub(crate) fn end(mut self) -> Option<i32> {
        self.reap()?.signal()
    }

    fn ended(&mut self) -> anyhow::Error {
        match self.reap() {
            Some(status) => anyhow!("the destination's process has ended ({status})"),
            None => anyhow!("the destination's process did not end and was killed"),
        }
    }

    /// Waits for the end of the process, after closing its input. This ends the destination, but not every command of `via`.
    fn reap(&mut self) -> Option<ExitStatus> {
        const TIMEOUT: Duration = Duration::from_secs(5);
        self.input = None;
        let start = Instant::now();
        while start.elapsed() < TIMEOUT {
            match self.child.try_wait() {
                Ok(None) => thread::sleep(Duration::from_millis(5)),
                Ok(status) => return status,
                Err(_) => break,
            }
        }
        // Fails if the process has just ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
        None
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.reap();
    }
}
