//! A host's libvirt, through `virsh`.
//!
//! A [`Connection`] is a `virsh` in interactive mode, so that a host over ssh is logged in to once, not once per question.
//! Each migration is a `virsh` of its own ([`migrate`]). Every `virsh` and its ssh are in a process group of their own: Ctrl-C
//! reaches this process only.

#![allow(
    unsafe_code,
    reason = "Command::pre_exec, called once, in dies_with_this_process"
)]

use std::{
    collections::HashMap,
    io::{self, BufRead, BufReader, Read as _, Write as _},
    os::unix::process::CommandExt as _,
    process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Stdio},
};

use evacuation::FailureKind;
use rustix::process::{Signal, set_parent_process_death_signal};
use tempfile::NamedTempFile;
use thiserror::Error;

use crate::commands::virsh;

/// A call of libvirt failed.
#[derive(Debug, Error)]
pub(super) enum Error {
    /// In `virsh`'s words.
    #[error("{0}")]
    Virsh(String),
    #[error("cannot talk to virsh (Debian has it in libvirt-clients, Fedora in libvirt-client)")]
    Io(#[from] io::Error),
    #[error("virsh printed no {0}")]
    Missing(&'static str),
}

pub(super) type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Whether a failed migration is worth another try. `virsh` does not print error numbers; the texts are libvirt's own, of
    /// `virErrorNumber`.
    pub(super) fn kind(&self) -> FailureKind {
        const PERMANENT: [&str; 4] = [
            "this function is not supported by the connection driver",
            "invalid argument",
            "unsupported configuration",
            "Unsafe migration",
        ];
        let Self::Virsh(text) = self else {
            return FailureKind::Temporary;
        };
        if text.contains("operation aborted") {
            FailureKind::Cancelled
        } else if PERMANENT.iter().any(|it| text.contains(it)) {
            FailureKind::Permanent
        } else {
            FailureKind::Temporary
        }
    }
}

/// Memory and CPUs of a host.
#[derive(Clone, Copy, Debug)]
pub(super) struct Node {
    /// Bytes.
    pub(super) memory: u64,
    /// Bytes that are free or can be freed: buffers and caches.
    pub(super) available: u64,
    pub(super) cpus: u32,
}

/// A guest, running or not.
#[derive(Clone, Debug)]
pub(super) struct Domain {
    pub(super) name: String,
    pub(super) uuid: String,
    pub(super) state: State,
    /// The most memory it may have, in bytes.
    pub(super) memory: u64,
    pub(super) cpus: u32,
}

/// A connection to the libvirt of a host.
#[derive(Debug)]
pub(super) struct Connection {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    stderr: BufReader<ChildStderr>,
    calls: u64,
}

impl Connection {
    pub(super) fn open(uri: &str) -> Result<Self> {
        let mut child = command(uri)
            // The user's history of commands is not ours to write.
            .env("XDG_CACHE_HOME", "/dev/null")
            .env("TERM", "dumb")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let missing = || io::Error::other("no pipe");
        let mut connection = Self {
            stdin: child.stdin.take().ok_or_else(missing)?,
            stdout: BufReader::new(child.stdout.take().ok_or_else(missing)?),
            stderr: BufReader::new(child.stderr.take().ok_or_else(missing)?),
            child,
            calls: 0,
        };
        connection.run("uri")?;
        Ok(connection)
    }

    pub(super) fn is_alive(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    pub(super) fn node(&mut self) -> Result<Node> {
        let info = self.run("nodeinfo")?;
        let info = Fields::of(&info);
        let stats = self.run("nodememstats")?;
        let stats = Fields::of(&stats);
        let available = ["free", "buffers", "cached"].map(|name| stats.number(name).unwrap_or(0));
        Ok(Node {
            memory: kib(info.number("Memory size").ok_or(Error::Missing("memory"))?),
            available: kib(available.iter().sum()),
            cpus: info.number("CPU(s)").ok_or(Error::Missing("CPUs"))?,
        })
    }

    /// The host's description of itself.
    pub(super) fn capabilities(&mut self) -> Result<String> {
        self.run("capabilities")
    }

    /// Whether this host has every feature of another host's CPU.
    pub(super) fn has_cpu(&mut self, xml: &str) -> Result<bool> {
        let mut file = NamedTempFile::new()?;
        file.write_all(xml.as_bytes())?;
        let path = quoted(&file.path().to_string_lossy());
        let said = self.run(&format!("cpu-compare --file {path}"))?;
        Ok(!said.contains("is incompatible with"))
    }

    /// All guests that the host knows, running or not.
    ///
    /// Only a list proves that a guest is gone: for a single guest, `virsh` reports a broken connection, too, as
    /// `failed to get domain`.
    pub(super) fn domains(&mut self) -> Result<Vec<Domain>> {
        let list = self.run("list --all --uuid --name")?;
        let lines = list.lines().map(str::trim);
        let uuids: HashMap<_, _> = lines
            .filter_map(|line| line.split_once(' '))
            .map(|(uuid, name)| (name.trim(), uuid))
            .collect();
        let stats = self.run("domstats --raw --nowait --state --balloon --vcpu")?;
        let domains = stats.split("Domain: '").skip(1).filter_map(|stats| {
            let (name, stats) = stats.split_once("'\n")?;
            let stats = Fields::of(stats);
            Some(Domain {
                name: name.to_owned(),
                // None: it has appeared since the first command.
                uuid: (*uuids.get(name)?).to_owned(),
                state: State {
                    state: stats.number("state.state")?,
                    reason: stats.number("state.reason")?,
                },
                memory: kib(stats.number("balloon.maximum").unwrap_or(0)),
                cpus: stats.number("vcpu.current").unwrap_or(0),
            })
        });
        Ok(domains.collect())
    }

    /// The guest with this UUID, if the host knows it.
    pub(super) fn domain(&mut self, uuid: &str) -> Result<Option<Domain>> {
        let domains = self.domains()?;
        Ok(domains.into_iter().find(|domain| domain.uuid == uuid))
    }

    /// UUIDs of the guests whose descriptions this host keeps.
    pub(super) fn persistent(&mut self) -> Result<Vec<String>> {
        let list = self.run("list --all --persistent --uuid")?;
        Ok(list.split_whitespace().map(str::to_owned).collect())
    }

    /// A guest's description as it would be migrated, with all features of its CPU.
    pub(super) fn description(&mut self, uuid: &str) -> Result<String> {
        self.run(&format!("dumpxml --update-cpu --migratable {uuid}"))
    }

    /// The job under way.
    pub(super) fn job(&mut self, uuid: &str) -> Result<Job> {
        self.job_of(uuid, "")
    }

    /// The last completed job. At the destination it has the downtime.
    pub(super) fn completed_job(&mut self, uuid: &str) -> Result<Job> {
        self.job_of(uuid, "--completed")
    }

    fn job_of(&mut self, uuid: &str, option: &str) -> Result<Job> {
        let stats = self.run(&format!("domjobinfo --rawstats {option} {uuid}"))?;
        let stats = Fields::of(&stats);
        let kind: u32 = stats
            .number("Job type")
            .ok_or(Error::Missing("type of job"))?;
        let page = stats.number("memory_page_size").unwrap_or(4096);
        let pages: u64 = stats.number("memory_dirty_rate").unwrap_or(0);
        Ok(Job {
            is_active: kind != 0,
            processed: stats.number("data_processed").unwrap_or(0),
            remaining: stats.number("data_remaining").unwrap_or(0),
            dirty_rate: pages.saturating_mul(page),
            downtime_ms: stats.number("downtime"),
        })
    }

    pub(super) fn abort(&mut self, uuid: &str) -> Result<()> {
        self.run(&format!("domjobabort {uuid}")).map(drop)
    }

    /// Changes the rate of a migration, in MiB per second.
    pub(super) fn set_rate(&mut self, uuid: &str, rate: u64) -> Result<()> {
        self.run(&format!("migrate-setspeed {uuid} {rate}"))
            .map(drop)
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
    fn run(&mut self, command: &str) -> Result<String> {
        self.calls += 1;
        let n = self.calls;
        let (begin, end) = (format!("BEGIN-{n}-"), format!("END-{n}-"));
        let input = format!(
            "echo 'BEGIN'\"-{n}-\"; {command}\necho 'END'\"-{n}-\"\necho --err 'END'\"-{n}-\"\n"
        );
        // A virsh that cannot connect has ended, with the reason on stderr.
        let written = self.stdin.write_all(input.as_bytes());
        let stdout = written.and_then(|()| read_to(&mut self.stdout, &end));
        let (stdout, stderr) = match stdout {
            Ok(stdout) => (stdout, read_to(&mut self.stderr, &end)?),
            Err(error) => {
                let mut stderr = Vec::new();
                self.stderr.read_to_end(&mut stderr)?;
                let reason = complaint(&String::from_utf8_lossy(&stderr));
                return Err(reason.map_or(Error::Io(error), Error::Virsh));
            }
        };
        if let Some(reason) = complaint(&stderr) {
            return Err(Error::Virsh(reason));
        }
        let output = stdout
            .rsplit_once("virsh ")
            .map_or("", |(output, _)| output);
        let output = output.split_once(&begin).map(|(_, output)| output);
        Ok(output.ok_or(Error::Missing("answer"))?.trim().to_owned())
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // No command is running.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads up to `mark`. At most a prompt follows, which is left for the next call.
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

/// The errors that `virsh` printed, on one line. Other messages, such as that of a missing locale, are left out.
fn complaint(stderr: &str) -> Option<String> {
    let lines = stderr.lines().filter_map(|it| it.strip_prefix("error: "));
    let lines: Vec<_> = lines.filter(|line| !line.starts_with("END-")).collect();
    (!lines.is_empty()).then(|| lines.join("; "))
}

/// A word for `virsh`, which has no escapes within single quotes.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace(['\'', '\n'], ""))
}

fn kib(kib: u64) -> u64 {
    kib.saturating_mul(1024)
}

/// Lines such as `name: value` and `name=value`.
struct Fields<'a>(HashMap<&'a str, &'a str>);

impl<'a> Fields<'a> {
    fn of(text: &'a str) -> Self {
        let lines = text.lines().filter_map(|line| line.split_once([':', '=']));
        Self(
            lines
                .map(|(name, value)| (name.trim(), value.trim()))
                .collect(),
        )
    }

    /// The number that a value begins with; a unit may follow.
    fn number<T: std::str::FromStr>(&self, name: &str) -> Option<T> {
        self.0.get(name)?.split_whitespace().next()?.parse().ok()
    }
}

/// State of a guest, in libvirt's numbers (`virDomainState` and the reason for it).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct State {
    state: i32,
    reason: i32,
}

impl State {
    const RUNNING: i32 = 1;
    const BLOCKED: i32 = 2;
    const PAUSED: i32 = 3;
    const SHUT_OFF: i32 = 5;
    const CRASHED: i32 = 6;
    const SUSPENDED: i32 = 7;
    /// Reasons of `PAUSED`.
    const BY_USER: i32 = 1;
    const MIGRATING: i32 = 2;
    /// Reasons of `SHUT_OFF`.
    const SHUT_DOWN: i32 = 1;
    const DESTROYED: i32 = 2;
    const HAS_CRASHED: i32 = 3;
    const MIGRATED: i32 = 4;
    const SAVED: i32 = 5;

    #[cfg(test)]
    pub(super) fn new(state: i32, reason: i32) -> Self {
        Self { state, reason }
    }

    /// Whether it has a process.
    pub(super) fn is_active(self) -> bool {
        self.state != Self::SHUT_OFF
    }

    pub(super) fn runs(self) -> bool {
        matches!(self.state, Self::RUNNING | Self::BLOCKED)
    }

    /// Whether a user has paused it, as opposed to a failure.
    pub(super) fn is_paused_by_user(self) -> bool {
        (self.state, self.reason) == (Self::PAUSED, Self::BY_USER)
    }

    /// Whether it is paused for an incoming or outgoing migration.
    pub(super) fn is_migrating(self) -> bool {
        (self.state, self.reason) == (Self::PAUSED, Self::MIGRATING)
    }

    /// Whether it ran on this host and ended there.
    pub(super) fn has_ended(self) -> bool {
        let ends = [
            Self::SHUT_DOWN,
            Self::DESTROYED,
            Self::HAS_CRASHED,
            Self::SAVED,
        ];
        self.state == Self::SHUT_OFF && ends.contains(&self.reason)
    }

    /// Whether it has left this host for another.
    pub(super) fn has_left(self) -> bool {
        (self.state, self.reason) == (Self::SHUT_OFF, Self::MIGRATED)
    }

    pub(super) fn name(self) -> &'static str {
        match (self.state, self.reason) {
            (Self::RUNNING | Self::BLOCKED, _) => "running",
            (Self::PAUSED, Self::BY_USER) => "paused",
            (Self::PAUSED, Self::MIGRATING) => "paused for a migration",
            (Self::PAUSED, 5) => "paused by an I/O error",
            (Self::PAUSED, 6) => "paused by its watchdog",
            (Self::PAUSED, 10) => "paused after a crash",
            (Self::PAUSED, 12 | 13) => "paused in a post-copy migration",
            (Self::PAUSED, _) => "paused for another reason",
            (Self::SHUT_OFF, Self::SHUT_DOWN) => "shut down",
            (Self::SHUT_OFF, Self::DESTROYED) => "destroyed",
            (Self::SHUT_OFF | Self::CRASHED, Self::HAS_CRASHED) => "crashed",
            (Self::SHUT_OFF, Self::SAVED) => "saved",
            (Self::SHUT_OFF, _) => "shut off",
            (Self::CRASHED, _) => "crashed",
            (Self::SUSPENDED, _) => "suspended",
            _ => "in an unknown state",
        }
    }
}

/// Progress of a migration.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Job {
    /// Whether there is a job.
    pub(super) is_active: bool,
    /// Bytes.
    pub(super) processed: u64,
    pub(super) remaining: u64,
    /// Bytes that the guest writes per second.
    pub(super) dirty_rate: u64,
    pub(super) downtime_ms: Option<u64>,
}

/// Options of a migration.
#[derive(Clone, Copy, Debug)]
pub(super) struct Migration {
    pub(super) is_persistent: bool,
    pub(super) copies_storage: bool,
    pub(super) converges: bool,
    pub(super) channels: u8,
    /// MiB per second; none is no limit.
    pub(super) rate: Option<u64>,
    /// Whether the source host itself connects to the destination.
    pub(super) is_by_host: bool,
}

/// Migrates a guest, and returns after the end. If this process dies, `virsh` dies with it, and libvirt cancels the
/// migration, unless the source host carries it out.
pub(super) fn migrate(from: &str, uuid: &str, to: &str, migration: &Migration) -> Result<()> {
    let mut command = command(from);
    command.args(["migrate", "--live", "--parallel"]);
    let channels = migration.channels.to_string();
    command.args(["--parallel-connections", &channels]);
    for (is_set, options) in [
        (
            migration.is_persistent,
            &["--persistent", "--undefinesource"][..],
        ),
        (migration.copies_storage, &["--copy-storage-all"]),
        (migration.converges, &["--auto-converge"]),
        (migration.is_by_host, &["--p2p"]),
    ] {
        if is_set {
            command.args(options);
        }
    }
    if let Some(rate) = migration.rate {
        command.args(["--bandwidth", &rate.to_string()]);
    }
    dies_with_this_process(&mut command);
    let output = command.args([uuid, to]).output()?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    Err(Error::Virsh(
        complaint(&stderr).unwrap_or_else(|| output.status.to_string()),
    ))
}

fn command(uri: &str) -> Command {
    let mut command = virsh::command();
    command.args(["--quiet", "--connect", uri]).process_group(0);
    command
}

fn dies_with_this_process(command: &mut Command) {
    let ask = || Ok(set_parent_process_death_signal(Some(Signal::KILL))?);
    // SAFETY: the closure is one system call, which may be made between fork and exec.
    unsafe { command.pre_exec(ask) };
}
