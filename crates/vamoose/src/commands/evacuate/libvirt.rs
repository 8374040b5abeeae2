//! The libvirt of a host: its guests, their states, and the progress of their migrations.

use std::{collections::HashMap, io::Write as _, str::FromStr, sync::Mutex};

use anyhow::{Context as _, Result};
use tempfile::NamedTempFile;
use vamoose_link::lock;

use crate::commands::virsh::{Shell, quoted};

/// A host, as named on the command line.
#[derive(Debug)]
pub(super) struct LibvirtHost {
    /// For messages.
    pub(super) name: String,
    /// libvirt's URI of it.
    pub(super) uri: String,
    /// Shared by all threads. Migrations, which take long, have a `virsh` of their own.
    shell: Mutex<Option<Shell>>,
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
    /// Whether the host keeps the description after the guest has ended.
    pub(super) is_persistent: bool,
    pub(super) state: State,
    /// Maximum memory, in bytes.
    pub(super) memory: u64,
    /// Memory that its QEMU has in use, at most that; the maximum if it is unknown.
    pub(super) resident: u64,
    pub(super) cpus: u32,
}

/// Progress of a migration.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Job {
    /// Whether there is a job.
    pub(super) is_active: bool,
    /// Bytes.
    pub(super) processed: u64,
    pub(super) remaining: u64,
    pub(super) downtime_ms: Option<u64>,
}

impl LibvirtHost {
    /// A URI of libvirt, `localhost`, or a name that ssh knows.
    pub(super) fn new(text: &str) -> Self {
        let (name, uri) = match text {
            _ if text.contains("://") => (host_of(text), text.to_owned()),
            "localhost" => (text.to_owned(), "qemu:///system".to_owned()),
            _ => (text.to_owned(), format!("qemu+ssh://{text}/system")),
        };
        Self {
            name,
            uri,
            shell: Mutex::default(),
        }
    }

    /// Whether the URI means a different host on each host.
    pub(super) fn is_local(&self) -> bool {
        self.uri.contains(":///")
    }

    /// The URI for use on this host, where `virsh` runs in the background and ssh cannot ask for a password.
    pub(super) fn uri_here(&self) -> String {
        let uri = &self.uri;
        let scheme = uri.split_once("://").map(|(scheme, _)| scheme);
        let is_by_ssh = scheme.is_some_and(|scheme| scheme.ends_with("+ssh"));
        if !is_by_ssh || uri.contains("no_tty=") {
            return uri.clone();
        }
        let separator = if uri.contains('?') { '&' } else { '?' };
        format!("{uri}{separator}no_tty=1")
    }

    pub(super) fn node(&self) -> Result<Node> {
        let info = self.run("nodeinfo")?;
        let info = Fields::of(&info);
        let stats = self.run("nodememstats")?;
        let stats = Fields::of(&stats);
        let available = ["free", "buffers", "cached"].map(|name| stats.number(name).unwrap_or(0));
        let memory = info.number("Memory size");
        Ok(Node {
            memory: kib(memory.context("virsh printed no memory")?),
            available: kib(available.iter().sum()),
            cpus: info.number("CPU(s)").context("virsh printed no CPUs")?,
        })
    }

    /// The host's description of itself.
    pub(super) fn capabilities(&self) -> Result<String> {
        self.run("capabilities")
    }

    /// Whether this host has every feature of another host's CPU.
    pub(super) fn has_cpu(&self, xml: &str) -> Result<bool> {
        let mut file = NamedTempFile::new()?;
        file.write_all(xml.as_bytes())?;
        let path = quoted(&file.path().to_string_lossy());
        let said = self.run(&format!("cpu-compare --file {path}"))?;
        Ok(!said.contains("is incompatible with"))
    }

    /// All guests that the host knows, running or not.
    ///
    /// Only a list proves that a guest is gone: for a single guest, `virsh` reports a broken connection as `failed to get
    /// domain`, too.
    pub(super) fn domains(&self) -> Result<Vec<Domain>> {
        let list = self.run("list --all --uuid --name")?;
        let lines = list.lines().map(str::trim);
        let uuids: HashMap<_, _> = lines
            .filter_map(|line| line.split_once(' '))
            .map(|(uuid, name)| (name.trim(), uuid))
            .collect();
        let persistent = self.run("list --all --persistent --uuid")?;
        let stats = self.run("domstats --raw --nowait --state --balloon --vcpu")?;
        let domains = stats.split("Domain: '").skip(1).filter_map(|stats| {
            let (name, stats) = stats.split_once("'\n")?;
            let stats = Fields::of(stats);
            // `None`: the guest has appeared since the first command.
            let uuid = *uuids.get(name)?;
            let memory = kib(stats.number("balloon.maximum").unwrap_or(0));
            let resident = stats.number("balloon.rss").map_or(memory, kib);
            Some(Domain {
                name: name.to_owned(),
                uuid: uuid.to_owned(),
                is_persistent: persistent.contains(uuid),
                state: State::new(stats.number("state.state")?, stats.number("state.reason")?),
                memory,
                resident: resident.min(memory),
                cpus: stats.number("vcpu.current").unwrap_or(0),
            })
        });
        Ok(domains.collect())
    }

    /// The guest with this UUID, if the host knows it.
    pub(super) fn domain(&self, uuid: &str) -> Result<Option<Domain>> {
        let domains = self.domains()?;
        Ok(domains.into_iter().find(|domain| domain.uuid == uuid))
    }

    /// The guest with this UUID, if it has a process on the host.
    pub(super) fn active(&self, uuid: &str) -> Result<Option<Domain>> {
        Ok(self.domain(uuid)?.filter(|it| it.state.is_active()))
    }

    /// A guest's description as it would be migrated, with all features of its CPU.
    pub(super) fn description(&self, uuid: &str) -> Result<String> {
        self.run(&format!("dumpxml --update-cpu --migratable {uuid}"))
    }

    /// The job under way.
    pub(super) fn job(&self, uuid: &str) -> Result<Job> {
        self.job_of(uuid, "")
    }

    /// The last completed job. At the destination it has the downtime.
    pub(super) fn completed_job(&self, uuid: &str) -> Result<Job> {
        self.job_of(uuid, "--completed")
    }

    fn job_of(&self, uuid: &str, option: &str) -> Result<Job> {
        let stats = self.run(&format!("domjobinfo --rawstats {option} {uuid}"))?;
        let stats = Fields::of(&stats);
        let kind: Option<u32> = stats.number("Job type");
        Ok(Job {
            is_active: kind.context("virsh printed no type of job")? != 0,
            processed: stats.number("data_processed").unwrap_or(0),
            remaining: stats.number("data_remaining").unwrap_or(0),
            downtime_ms: stats.number("downtime"),
        })
    }

    /// Begins to measure for a second how fast a guest writes.
    pub(super) fn begin_dirty_rate(&self, uuid: &str) -> Result<()> {
        self.run(&format!("domdirtyrate-calc {uuid} --seconds 1"))
            .map(drop)
    }

    /// MiB per second that a guest has written; `None` while that is being measured.
    pub(super) fn dirty_rate(&self, uuid: &str) -> Result<Option<u64>> {
        const MEASURED: u32 = 2;
        let stats = self.run(&format!("domstats --raw --dirtyrate {uuid}"))?;
        let stats = Fields::of(&stats);
        let is_measured = stats.number("dirtyrate.calc_status") == Some(MEASURED);
        Ok(stats
            .number("dirtyrate.megabytes_per_second")
            .filter(|_| is_measured))
    }

    pub(super) fn abort(&self, uuid: &str) -> Result<()> {
        self.run(&format!("domjobabort {uuid}")).map(drop)
    }

    fn run(&self, command: &str) -> Result<String> {
        let mut shell = lock(&self.shell);
        if !shell.as_mut().is_some_and(Shell::is_alive) {
            let context = || format!("cannot reach libvirt of {} by {}", self.name, self.uri);
            *shell = Some(Shell::open(&self.uri_here()).with_context(context)?);
        }
        shell.as_mut().context("no connection")?.run(command)
    }
}

/// The host in a URI.
fn host_of(uri: &str) -> String {
    let authority = uri.split_once("://").map_or(uri, |(_, rest)| rest);
    let authority = authority.split(['/', '?']).next().unwrap_or_default();
    let host = authority.rsplit('@').next().unwrap_or_default();
    let host = match host.strip_prefix('[').and_then(|host| host.split_once(']')) {
        Some((address, _)) => address,
        None => host.split(':').next().unwrap_or_default(),
    };
    let host = if host.is_empty() { "localhost" } else { host };
    host.to_owned()
}

fn kib(kib: u64) -> u64 {
    kib.saturating_mul(1024)
}

/// Lines such as `name: value` and `name=value`.
struct Fields<'a>(HashMap<&'a str, &'a str>);

impl<'a> Fields<'a> {
    fn of(text: &'a str) -> Self {
        let fields = text.lines().filter_map(|line| line.split_once([':', '=']));
        let fields = fields.map(|(name, value)| (name.trim(), value.trim()));
        Self(fields.collect())
    }

    /// The number at the start of a value; a unit may follow.
    fn number<T: FromStr>(&self, name: &str) -> Option<T> {
        self.0.get(name)?.split_whitespace().next()?.parse().ok()
    }
}

/// State of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Running,
    PausedByUser,
    /// Paused for an incoming or outgoing migration.
    Migrating,
    /// Ended on this host.
    Ended(&'static str),
    /// Migrated from this host to another.
    Left,
    /// Shut off for another reason, or an unknown one.
    ShutOff,
    /// Active, but in a state in which the guest cannot move.
    Stuck(&'static str),
}

impl State {
    /// From libvirt's numbers, `virDomainState` and the reason for it.
    pub(super) fn new(state: u32, reason: u32) -> Self {
        match (state, reason) {
            (1 | 2, _) => Self::Running,
            (3, 1) => Self::PausedByUser,
            (3, 2) => Self::Migrating,
            (3, 5) => Self::Stuck("paused by an I/O error"),
            (3, 6) => Self::Stuck("paused by its watchdog"),
            (3, 10) => Self::Stuck("paused after a crash"),
            (3, 12 | 13) => Self::Stuck("paused in a post-copy migration"),
            (3, _) => Self::Stuck("paused for another reason"),
            (5, 1) => Self::Ended("shut down"),
            (5, 2) => Self::Ended("destroyed"),
            (5, 3) => Self::Ended("crashed"),
            (5, 4) => Self::Left,
            (5, 5) => Self::Ended("saved"),
            (5, _) => Self::ShutOff,
            (6, _) => Self::Stuck("crashed"),
            (7, _) => Self::Stuck("suspended"),
            _ => Self::Stuck("in an unknown state"),
        }
    }

    /// Whether the guest has a process.
    pub(super) fn is_active(self) -> bool {
        !matches!(self, Self::Ended(_) | Self::Left | Self::ShutOff)
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::PausedByUser => "paused",
            Self::Migrating => "paused for a migration",
            Self::Left | Self::ShutOff => "shut off",
            Self::Ended(name) | Self::Stuck(name) => name,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_uris_are_distinguished() {
        for (text, name, uri) in [
            ("kvm1", "kvm1", "qemu+ssh://kvm1/system"),
            ("root@kvm1", "root@kvm1", "qemu+ssh://root@kvm1/system"),
            ("localhost", "localhost", "qemu:///system"),
            ("qemu:///system", "localhost", "qemu:///system"),
            (
                "qemu+tcp://a@kvm2:1/system",
                "kvm2",
                "qemu+tcp://a@kvm2:1/system",
            ),
            (
                "qemu+tls://[fd00::2]:1/system?x=y",
                "fd00::2",
                "qemu+tls://[fd00::2]:1/system?x=y",
            ),
        ] {
            let host = LibvirtHost::new(text);
            assert_eq!((&*host.name, &*host.uri), (name, uri));
        }
    }

    #[test]
    fn ssh_asks_for_no_password() {
        for (uri, expected) in [
            ("qemu+ssh://a/system", "qemu+ssh://a/system?no_tty=1"),
            (
                "qemu+ssh://a/system?keyfile=/x",
                "qemu+ssh://a/system?keyfile=/x&no_tty=1",
            ),
            (
                "qemu+ssh://a/system?no_tty=0",
                "qemu+ssh://a/system?no_tty=0",
            ),
            ("qemu+tcp://a/system", "qemu+tcp://a/system"),
        ] {
            assert_eq!(LibvirtHost::new(uri).uri_here(), expected);
        }
    }
}
