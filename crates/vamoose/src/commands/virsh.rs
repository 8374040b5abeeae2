//! `virsh`, through which all commands use libvirt.
//!
//! [`output`] runs one command on this host. A [`Shell`] is a `virsh` in interactive mode, so that a host over ssh is logged in
//! to once, not once per question.

use std::{
    io::{self, BufRead, BufReader, Read as _, Write as _},
    os::unix::process::CommandExt as _,
    process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Error, Result, bail};

/// Longest time that QEMU is given to set up its channels before libvirt is told to cancel the migration.
///
/// QEMU 10.0 aborts, and the guest ends, if libvirt cancels while QEMU sets up its channels and then switches multifd off before
/// QEMU has cleaned up (docs/qemu.md). Therefore a migration that has sent nothing is not cancelled before this time has passed.
pub(crate) const SETUP: Duration = Duration::from_secs(5);

/// A `virsh` whose output does not depend on the locale.
pub(crate) fn command() -> Command {
    let mut command = Command::new("virsh");
    command.env("LC_ALL", "C").stdin(Stdio::null());
    command
}

/// A `virsh` for the libvirt at `uri`, in a process group of its own with its ssh: Ctrl-C reaches this process only.
pub(crate) fn command_at(uri: &str) -> Command {
    let mut command = command();
    command.args(["--quiet", "--connect", uri]).process_group(0);
    command
}

/// The output of a `virsh` command on this host, or its error.
pub(crate) fn output<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Result<String> {
    output_of(command().args(arguments))
}

pub(crate) fn output_of(command: &mut Command) -> Result<String> {
    let output = command.output().map_err(cannot_run)?;
    if !output.status.success() {
        let reason = complaint(&String::from_utf8_lossy(&output.stderr));
        bail!(reason.unwrap_or_else(|| format!("virsh: {}", output.status)));
    }
    String::from_utf8(output.stdout).context("virsh prints no text")
}

/// `running`, `paused`, ...
pub(crate) fn state(domain: &str) -> Result<String> {
    Ok(output(["domstate", "--domain", domain])?.trim().to_owned())
}

pub(crate) fn cannot_run(error: io::Error) -> Error {
    let is_missing = error.kind() == io::ErrorKind::NotFound;
    Error::new(error).context(match is_missing {
        true => "virsh is missing on this host: install libvirt-clients (Debian) or libvirt-client (Fedora)",
        false => "cannot run virsh",
    })
}

/// The errors that `virsh` printed, on one line. Other messages, such as that of a missing locale, are left out.
fn complaint(stderr: &str) -> Option<String> {
    let lines = stderr.lines().filter_map(|it| it.strip_prefix("error: "));
    let lines: Vec<_> = lines.filter(|line| !line.starts_with("END-")).collect();
    (!lines.is_empty()).then(|| lines.join("; "))
}

/// A `virsh` that runs one command after the other.
#[derive(Debug)]
pub(crate) struct Shell {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    stderr: BufReader<ChildStderr>,
    calls: u64,
}

impl Shell {
    pub(crate) fn open(uri: &str) -> Result<Self> {
        let mut child = command_at(uri)
            // Keeps these commands out of the user's history.
            .env("XDG_CACHE_HOME", "/dev/null")
            .env("TERM", "dumb")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(cannot_run)?;
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(stdin), Some(stdout), Some(stderr)) = pipes else {
            bail!("virsh has no pipes");
        };
        let mut shell = Self {
            child,
            stdin,
            stdout: BufReader::new(stdout),
            stderr: BufReader::new(stderr),
            calls: 0,
        };
        shell.run("uri")?;
        Ok(shell)
    }

    pub(crate) fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Runs a command and returns its output. `virsh` also prints prompts, and may repeat its input (readline).
    ///
    /// ```text
    /// stdin            echo 'BEGIN'"-1"; COMMAND        echo 'END'"-1"           echo --err 'END'"-1"
    /// stdout  virsh # [...]        BEGIN-1 OUTPUT    virsh # [...]  END-1   virsh # [...]
    /// stderr                               error: REASON                                 error: END-1
    /// ```
    ///
    /// The quotes keep repeated input from looking like a mark. The marks behind a command are lines of their own, as `virsh`
    /// rejects a whole line with an option that it does not know.
    pub(crate) fn run(&mut self, command: &str) -> Result<String> {
        self.calls += 1;
        let n = self.calls;
        let (begin, end) = (format!("BEGIN-{n}-"), format!("END-{n}-"));
        let input = format!(
            "echo 'BEGIN'\"-{n}-\"; {command}\necho 'END'\"-{n}-\"\necho --err 'END'\"-{n}-\"\n"
        );
        let written = self.stdin.write_all(input.as_bytes());
        let stdout = written.and_then(|()| read_to(&mut self.stdout, &end));
        let (stdout, stderr) = match stdout {
            Ok(stdout) => (Ok(stdout), read_to(&mut self.stderr, &end)?),
            // A virsh that cannot connect has ended, with the reason on stderr.
            Err(error) => {
                let mut stderr = Vec::new();
                self.stderr.read_to_end(&mut stderr)?;
                (Err(error), String::from_utf8_lossy(&stderr).into_owned())
            }
        };
        if let Some(reason) = complaint(&stderr) {
            bail!(reason);
        }
        let stdout = stdout.context("cannot talk to virsh")?;
        let output = stdout
            .rsplit_once("virsh ")
            .map_or("", |(output, _)| output);
        let output = output.split_once(&begin).map(|(_, output)| output);
        Ok(output.context("virsh printed no answer")?.trim().to_owned())
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // No command is running.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads up to `mark`. A prompt may follow, which is left for the next call.
fn read_to(from: &mut impl BufRead, mark: &str) -> io::Result<String> {
    let mut text = Vec::new();
    let last = *mark.as_bytes().last().unwrap_or(&b'\n');
    while !text.ends_with(mark.as_bytes()) {
        if from.read_until(last, &mut text)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// A word for a [`Shell`], which has no escapes within single quotes.
pub(crate) fn quoted(word: &str) -> String {
    format!("'{}'", word.replace(['\'', '\n'], ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_virsh_names_its_package() {
        let missing = Command::new("/no/virsh").output().unwrap_err();
        let said = cannot_run(missing).to_string();
        assert!(
            said.starts_with("virsh is missing on this host: install libvirt-clients"),
            "{said}"
        );
        let not_executable = Command::new("/etc/passwd").output().unwrap_err();
        assert_eq!(cannot_run(not_executable).to_string(), "cannot run virsh");
    }
}
