//! The destination's process, as the source has it.

use std::{
    env,
    io::{BufRead as _, BufReader, Write as _},
    os::unix::process::{CommandExt as _, ExitStatusExt as _},
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};

use super::talk::{Arrived, Order, Said, WentOn};

/// A running destination. Dropped, it ends.
pub(super) struct Destination {
    process: Child,
    /// As long as it is open, the destination lives.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

/// The hidden command that the destination is.
const COMMAND: &str = "live-demo-destination";

impl Destination {
    /// Starts this program as the destination, behind the words of `via` if there are some.
    pub(super) fn start(via: Option<&str>, order: &Order) -> Result<Self> {
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
            .arg(COMMAND)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C is for the source, which cancels: the destination has to hear it from there.
            .process_group(0);
        if env::var_os("VAMOOSE_LOG").is_none() {
            command.env("VAMOOSE_LOG", "warn");
        }
        let mut process = command.spawn().with_context(|| {
            let program = command.get_program().to_string_lossy();
            format!("cannot start the destination ({program})")
        })?;
        let mut input = process.stdin.take().context("no pipe")?;
        let output = BufReader::new(process.stdout.take().context("no pipe")?);
        let mut line = serde_json::to_string(order)?;
        line.push('\n');
        let told = input.write_all(line.as_bytes());
        let mut destination = Self {
            process,
            input: Some(input),
            output,
        };
        match told {
            Ok(()) => Ok(destination),
            Err(_) => bail!("{}", destination.obituary()),
        }
    }

    /// Its process; that of `via` if there is one.
    pub(super) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Where it waits for the guest.
    pub(super) fn listening(&mut self) -> Result<String> {
        match self.hear()? {
            Said::Listening { address } => Ok(address),
            said => out_of_turn(&said),
        }
    }

    /// What it has received.
    pub(super) fn arrived(&mut self) -> Result<Arrived> {
        match self.hear()? {
            Said::Arrived(arrived) => Ok(arrived),
            said => out_of_turn(&said),
        }
    }

    /// How the guest did there.
    pub(super) fn went_on(&mut self) -> Result<WentOn> {
        match self.hear()? {
            Said::WentOn(went_on) => Ok(went_on),
            said => out_of_turn(&said),
        }
    }

    /// Ends it; returns the signal that has killed it before.
    pub(super) fn end(mut self) -> Option<i32> {
        self.bury()?.signal()
    }

    fn hear(&mut self) -> Result<Said> {
        let mut line = String::new();
        let length = self
            .output
            .read_line(&mut line)
            .context("cannot read from the destination")?;
        if length == 0 {
            bail!("{}", self.obituary());
        }
        match serde_json::from_str(&line) {
            Ok(Said::Failed { cause }) => bail!("the destination: {cause}"),
            Ok(said) => Ok(said),
            Err(_) => bail!("the destination says `{}`", line.trim_end()),
        }
    }

    fn obituary(&mut self) -> String {
        match self.bury() {
            Some(status) => format!("the destination's process has ended ({status})"),
            None => "the destination's process does not answer and was killed".to_owned(),
        }
    }

    /// Waits for its end. It needs no more than the end of its input for that, but what runs `via` may.
    fn bury(&mut self) -> Option<ExitStatus> {
        const PATIENCE: Duration = Duration::from_secs(5);
        self.input = None;
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            match self.process.try_wait() {
                Ok(None) => thread::sleep(Duration::from_millis(5)),
                Ok(status) => return status,
                Err(_) => break,
            }
        }
        // It may have ended just now.
        let _ = self.process.kill();
        let _ = self.process.wait();
        None
    }
}

impl Drop for Destination {
    fn drop(&mut self) {
        self.bury();
    }
}

fn out_of_turn<T>(said: &Said) -> Result<T> {
    bail!("the destination says {said:?} where that makes no sense")
}
