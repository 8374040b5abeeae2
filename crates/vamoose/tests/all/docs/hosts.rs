//! Two hosts to type the handbook's commands at, as they are there: each has a network, `/etc`, `/run` and `/srv` of its own, so that
//! addresses, ports and paths of the handbook are free. All else is this machine's.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use lab::{
    net::{self, Link, Namespace},
    process::Child,
    qemu::{self, Binary},
    vamoose::{Ended, Vamoose},
};
use rustix::process::{Pid, Signal, kill_process_group};
use tempfile::TempDir;

use super::guest;
use crate::common::{LIMIT, vamoose};

/// What stands for something else here, and what for.
pub(super) const PLACEHOLDERS: [(&str, &str); 1] = [
    // A machine of CI may have no KVM.
    ("accel=kvm -cpu host", "accel=tcg -cpu max"),
];

/// `KEY_OF_` and whose key it is: always the other host's, in the handbook.
pub(super) const KEY: &str = "KEY_OF_";

/// The addresses that pages give to the source and to the destination.
const ADDRESSES: [&str; 2] = ["192.0.2.10", "192.0.2.20"];

/// What a host has of the machine's `/etc`: who is who, and how programs find libraries and each other.
const ETC: [&str; 5] = [
    "passwd",
    "group",
    "nsswitch.conf",
    "ld.so.cache",
    "alternatives",
];

/// What keeps the namespaces of a host, until its standard input ends: with this process at the latest.
const START: &str = "set -eu
mount --make-rprivate /
for own in etc run srv; do mount --bind \"$0/$own\" /$own; done
echo started
exec cat";

/// The two, joined by a wire. Dropping them ends all that runs there.
pub(super) struct Hosts {
    pub(super) source: Host,
    pub(super) destination: Host,
    _programs: TempDir,
    // Behind the hosts, whose processes are in its namespaces.
    _link: Link,
}

impl Hosts {
    /// Starts them. Where that is not possible, says loudly that the test is skipped, and gives `None`.
    pub(super) fn start_or_skip() -> Result<Option<Self>> {
        let (Some(link), Some(qemu)) = (net::link_or_skip(None)?, qemu::newest_or_skip()?) else {
            return Ok(None);
        };
        for (host, address) in [&link.source, &link.destination].into_iter().zip(ADDRESSES) {
            let mut ip = Command::new("ip");
            ip.args(["-n", host.name(), "address", "add"]);
            lab::run(ip.args([&format!("{address}/24"), "dev", "wire0"]))?;
        }
        let programs = TempDir::new()?;
        for (name, built) in [
            ("vamoose", "vamoose"),
            ("vamoose-demo", "examples/vamoose-demo"),
        ] {
            let built = vamoose().with_file_name(built);
            program(&programs, name, &format!("exec {} \"$@\"", built.display()))?;
        }
        program(
            &programs,
            "qemu-system-x86_64",
            &format!("exec {} \"$@\"", qemu.path.display()),
        )?;
        let source = Host::new(&link.source, &programs, &qemu)?;
        let destination = Host::new(&link.destination, &programs, &qemu)?;
        // The handbook needs ssh in one direction, and no password.
        let ssh = format!(
            "shift; exec nsenter --target {} --mount --net sh -ec \"$*\"",
            destination.init.id()
        );
        program(&programs, "ssh", &ssh)?;
        Ok(Some(Self {
            source,
            destination,
            _programs: programs,
            _link: link,
        }))
    }

    /// Makes the keys of both, by the command, and lets each know that of the other.
    pub(super) fn make_keys(&mut self, command: &str) -> Result<()> {
        let of_source = self.source.run(command)?.stdout;
        let of_destination = self.destination.run(command)?.stdout;
        for (host, other) in [
            (&mut self.destination, of_source),
            (&mut self.source, of_destination),
        ] {
            let key = other.split_whitespace().next().context("no key")?;
            ensure!(key.starts_with("ed25519:"), "{key} is no key");
            host.key_of_other = key.to_owned();
        }
        Ok(())
    }
}

/// One of them.
pub(super) struct Host {
    /// It does [`START`].
    init: Child,
    programs: PathBuf,
    /// The QEMU of this host, for the lab.
    pub(super) qemu: Binary,
    key_of_other: String,
    folder: TempDir,
}

impl Host {
    fn new(network: &Namespace, programs: &TempDir, qemu: &Binary) -> Result<Self> {
        let folder = TempDir::with_prefix("vamoose-")?;
        for own in ["etc/vamoose", "run/vms", "srv", "home"] {
            fs::create_dir_all(folder.path().join(own))?;
        }
        // Not every machine has them all.
        let etc = ETC.map(|file| Path::new("/etc").join(file));
        for file in etc.iter().filter(|file| file.exists()) {
            let mut copy = Command::new("cp");
            lab::run(copy.arg("-a").arg(file).arg(folder.path().join("etc")))?;
        }
        let mut command = network.command("unshare");
        command
            .args(["--mount", "sh", "-c", START])
            .arg(folder.path());
        let mut init = Child::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()))?;
        let mut said = String::new();
        let stdout = init.pipes.stdout.take().context("no stdout")?;
        BufReader::new(stdout).read_line(&mut said)?;
        ensure!(said == "started\n", "a host has not started");
        let enter = format!(
            "exec nsenter --target {} --mount --net {} \"$@\"",
            init.id(),
            qemu.path.display()
        );
        let path = program(programs, &format!("qemu-{}", network.name()), &enter)?;
        Ok(Self {
            init,
            programs: programs.path().to_owned(),
            qemu: Binary {
                path,
                version: qemu.version,
            },
            key_of_other: String::new(),
            folder,
        })
    }

    /// The file that the host has there, of those that are its own.
    pub(super) fn path(&self, path: &str) -> PathBuf {
        self.folder.path().join(path.trim_start_matches('/'))
    }

    /// A file in the folder in which commands are typed.
    pub(super) fn home(&self, file: &str) -> PathBuf {
        self.path("home").join(file)
    }

    /// Types commands that end, and succeed.
    pub(super) fn run(&self, commands: &str) -> Result<Ended> {
        let ended = self.start(commands)?.finish();
        ended
            .and_then(Ended::success)
            .with_context(|| commands.to_owned())
    }

    /// Types commands that start a guest. What comes out of its serial port is in the file `console`.
    pub(super) fn start_guest(&self, commands: &str) -> Result<Terminal> {
        self.start(&format!("exec >console\n{commands}"))
    }

    /// Types commands.
    pub(super) fn start(&self, commands: &str) -> Result<Terminal> {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.init.id().to_string(), "--mount", "--net"]);
        let home = self.path("home");
        command.arg(format!("--wd={}", home.display()));
        command.args(["sh", "-ec", &self.filled_in(commands)]);
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", self.programs.display()));
        command.env("HOME", home).process_group(0);
        Ok(Terminal(Some(Vamoose::start(&mut command)?)))
    }

    fn filled_in(&self, commands: &str) -> String {
        let mut text = commands.to_owned();
        for (placeholder, value) in PLACEHOLDERS {
            text = text.replace(placeholder, value);
        }
        let mut parts = text.split(KEY);
        let mut filled = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let is_name = |letter: char| letter.is_ascii_alphanumeric() || "_.".contains(letter);
            filled += &self.key_of_other;
            filled += part.trim_start_matches(is_name);
        }
        filled
    }
}

/// Commands that run. Dropping it ends them all.
pub(super) struct Terminal(Option<Vamoose>);

impl Terminal {
    /// What the commands say, which are there until it is dropped.
    pub(super) fn wait_for(&self, text: &str) -> Result<String> {
        self.running()?.wait_for(text, LIMIT)
    }

    /// What they have said.
    pub(super) fn said(&self) -> String {
        self.0.as_ref().map(Vamoose::stderr).unwrap_or_default()
    }

    /// Whether they have ended.
    pub(super) fn has_ended(&self) -> Result<bool> {
        self.running()?.has_ended()
    }

    /// Waits for their end.
    pub(super) fn finish(mut self) -> Result<Ended> {
        let running = self.running()?;
        ensure!(
            running.process().wait(LIMIT),
            "it does not end:\n{}",
            self.said()
        );
        self.0.take().context("nothing runs")?.finish(LIMIT)
    }

    fn running(&self) -> Result<&Vamoose> {
        self.0.as_ref().context("nothing runs")
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let Some(running) = &self.0 else { return };
        // The shell leads a group of its own, which is not reaped yet. It may have ended by itself.
        if let Some(group) = running.pid().try_into().ok().and_then(Pid::from_raw) {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

/// The guest of the handbook has its disk on both hosts, as on shared storage.
pub(super) fn share_disk(hosts: &Hosts) -> Result<()> {
    let disk = hosts.source.path("srv/web1.qcow2");
    guest::write_disk(&disk)?;
    fs::hard_link(disk, hosts.destination.path("srv/web1.qcow2")).context("sharing a disk")
}

/// Makes a program of this text.
fn program(folder: &TempDir, name: &str, text: &str) -> Result<PathBuf> {
    let path = folder.path().join(name);
    fs::write(&path, format!("#!/bin/sh\n{text}\n"))?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    Ok(path)
}
