//! Finds QEMUs on this machine and runs them.
//!
//! Three kinds of machine: a *bare* one, without CPU or firmware, whose whole content is a RAM file (migrates in milliseconds),
//! one that runs a few bytes of *firmware* (see [`crate::counter`]), and one with a *Linux* guest under TCG (see
//! [`crate::guest`]). RAM is always a file, so that two ends can be compared.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{self, File};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tempfile::TempDir;

use crate::qmp::Qmp;
use crate::ram::{self, Fill};
use crate::{proc, skipped, target_dir};

/// The machine type of Linux guests: the newest that every supported QEMU has, so that they can migrate to one another.
pub const MACHINE: &str = "pc-i440fx-7.2";

/// Major and minor versions that `scripts/setup qemu` fetches, oldest first: all that migrations are tested between.
pub const VERSIONS: [(u32, u32); 3] = [(7, 2), (10, 0), (11, 1)];

/// A version of QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// 10 in 10.0.2.
    pub major: u32,
    /// 0 in 10.0.2.
    pub minor: u32,
    /// 2 in 10.0.2.
    pub micro: u32,
}

impl Version {
    /// From what `qemu-system-x86_64 --version` prints.
    fn parse(banner: &str) -> Option<Self> {
        let (_, rest) = banner.split_once("version ")?;
        let digits = rest
            .split(|c: char| !c.is_ascii_digit() && c != '.')
            .next()?;
        let mut parts = digits.split('.').map(str::parse);
        let mut next = || parts.next()?.ok();
        Some(Self {
            major: next()?,
            minor: next()?,
            micro: next().unwrap_or(0),
        })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}

/// A QEMU that was found.
#[derive(Clone, Debug)]
pub struct Binary {
    /// The program, or a wrapper that becomes it.
    pub path: PathBuf,
    /// What it calls itself.
    pub version: Version,
}

/// The QEMUs of this machine, oldest first: those of `scripts/setup qemu`, those that the environment variable
/// `VAMOOSE_QEMU` names (paths with colons between), and the one on the PATH. Of one major and minor version only the first.
pub fn available() -> &'static [Binary] {
    static FOUND: OnceLock<Vec<Binary>> = OnceLock::new();
    FOUND.get_or_init(|| {
        let program = "qemu-system-x86_64";
        let mut paths: Vec<PathBuf> = std::env::var_os("VAMOOSE_QEMU")
            .iter()
            .flat_map(std::env::split_paths)
            .collect();
        for entry in fs::read_dir(target_dir().join("qemu"))
            .into_iter()
            .flatten()
            .flatten()
        {
            paths.push(entry.path().join(program));
        }
        paths.push(PathBuf::from(program));
        let mut found: Vec<Binary> = paths.into_iter().filter_map(probe).collect();
        // Stable: what was named first stays first among equals.
        found.sort_by_key(|binary| (binary.version.major, binary.version.minor));
        found.dedup_by_key(|binary| (binary.version.major, binary.version.minor));
        found
    })
}

/// The QEMU of this major and minor version. When there is none, says loudly that the test is skipped, and gives `None`.
pub fn find_or_skip(major: u32, minor: u32) -> Result<Option<Binary>> {
    let fits = |binary: &&Binary| (binary.version.major, binary.version.minor) == (major, minor);
    let found = available().iter().find(fits).cloned();
    if found.is_none() {
        skipped(&format!("no QEMU {major}.{minor}, run scripts/setup qemu"))?;
    }
    Ok(found)
}

/// Every QEMU of [`VERSIONS`] with every one, itself included: source and destination. Says loudly which are missing.
pub fn pairs_or_skip() -> Result<Vec<(Binary, Binary)>> {
    let mut found = Vec::new();
    for (major, minor) in VERSIONS {
        found.extend(find_or_skip(major, minor)?);
    }
    let with_all = |from: &Binary| {
        found
            .iter()
            .map(|to| (from.clone(), to.clone()))
            .collect::<Vec<_>>()
    };
    Ok(found.iter().flat_map(with_all).collect())
}

/// The newest QEMU there is. When there is none, says loudly that the test is skipped, and gives `None`.
pub fn newest_or_skip() -> Result<Option<Binary>> {
    let found = available().last().cloned();
    if found.is_none() {
        skipped("no QEMU, run scripts/setup qemu")?;
    }
    Ok(found)
}

fn probe(path: PathBuf) -> Option<Binary> {
    let output = Command::new(&path)
        .arg("--version")
        .stderr(Stdio::null())
        .output()
        .ok()?;
    let version = Version::parse(&String::from_utf8_lossy(&output.stdout))?;
    Some(Binary { path, version })
}

/// How to start a QEMU.
#[derive(Clone, Debug)]
pub struct Builder {
    binary: Binary,
    machine: Machine,
    ram: u64,
    cpus: u32,
    content: Option<(Fill, u64)>,
    ram_file: Option<PathBuf>,
    preallocate: bool,
    incoming: bool,
    paused: bool,
    namespace: Option<String>,
    arguments: Vec<OsString>,
}

#[derive(Clone, Debug)]
enum Machine {
    Bare,
    Firmware(PathBuf),
    Linux {
        kernel: PathBuf,
        initrd: PathBuf,
        command_line: String,
    },
}

impl Builder {
    /// A machine that is nothing but `ram` bytes of memory.
    pub fn bare(binary: &Binary, ram: u64) -> Self {
        Self::new(binary, Machine::Bare, ram, 1)
    }

    /// A machine of type [`MACHINE`] with `ram` bytes and one CPU under TCG that runs this firmware and nothing else.
    pub fn firmware(binary: &Binary, ram: u64, firmware: &Path) -> Self {
        Self::new(binary, Machine::Firmware(firmware.to_owned()), ram, 1)
    }

    /// A machine of type [`MACHINE`] with `ram` bytes and two CPUs under TCG that boots a Linux kernel.
    pub fn linux(
        binary: &Binary,
        ram: u64,
        kernel: &Path,
        initrd: &Path,
        command_line: &str,
    ) -> Self {
        let machine = Machine::Linux {
            kernel: kernel.to_owned(),
            initrd: initrd.to_owned(),
            command_line: command_line.to_owned(),
        };
        Self::new(binary, machine, ram, 2)
    }

    fn new(binary: &Binary, machine: Machine, ram: u64, cpus: u32) -> Self {
        Self {
            binary: binary.clone(),
            machine,
            ram,
            cpus,
            content: None,
            ram_file: None,
            preallocate: false,
            incoming: false,
            paused: false,
            namespace: None,
            arguments: Vec::new(),
        }
    }

    /// Virtual CPUs of a Linux machine.
    pub fn cpus(mut self, cpus: u32) -> Self {
        self.cpus = cpus;
        self
    }

    /// What RAM holds at the start, see [`ram::write`]. Nothing (zeros) by default.
    pub fn content(mut self, fill: Fill, seed: u64) -> Self {
        self.content = Some((fill, seed));
        self
    }

    /// Keeps RAM in this file, which stays when QEMU ends. By default it is a temporary one, in memory if there is room.
    pub fn ram_file(mut self, path: &Path) -> Self {
        self.ram_file = Some(path.to_owned());
        self
    }

    /// Has QEMU touch all RAM before it starts, as a destination in production would.
    pub fn preallocate(mut self) -> Self {
        self.preallocate = true;
        self
    }

    /// Waits for a migration: nothing runs before [`Qmp::migrate_incoming`] and its completion.
    pub fn incoming(mut self) -> Self {
        self.incoming = true;
        self
    }

    /// Does not let the guest run before [`Qmp::cont`], not even after an incoming migration. Bare machines never run.
    pub fn paused(mut self) -> Self {
        self.paused = true;
        self
    }

    /// Runs QEMU in a network namespace, see [`crate::net::Namespace::name`].
    pub fn namespace(mut self, name: &str) -> Self {
        self.namespace = Some(name.to_owned());
        self
    }

    /// Has a bare machine of a newer QEMU keep to the habits of an older one at the other end (possibly behind a relay):
    /// a SYNC after each section, zero pages in the main stream, no announcement of the switchover. Linux machines do by
    /// their versioned type, but a bare one has no version, and without this the two ends wait for each other for ever.
    pub fn peer(mut self, other: Version) -> Self {
        let habits = [
            (9, "multifd-flush-after-each-section=on"),
            (9, "zero-page-detection=legacy"),
            (10, "send-switchover-start=off"),
        ];
        for (since, habit) in habits {
            if self.binary.version.major >= since && other.major < since {
                self.arguments.push("-global".into());
                self.arguments.push(format!("migration.{habit}").into());
            }
        }
        self
    }

    /// What this QEMU's process is to be called, instead of after its program or its loader.
    pub fn process_name(self, name: &str) -> Self {
        self.argument("-name").argument(format!("x,process={name}"))
    }

    /// Adds an argument to QEMU's command line.
    pub fn argument(mut self, argument: impl Into<OsString>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// Starts QEMU and connects to its QMP.
    pub fn start(&self) -> Result<Qemu> {
        if !self.ram.is_multiple_of(1 << 20) {
            bail!("{} bytes of RAM are not whole MiB", self.ram);
        }
        let dir = tempfile::Builder::new()
            .prefix("vamoose-")
            .tempdir()
            .context("creating a temporary directory")?;
        let (ram, ram_dir) = self.make_ram()?;
        let qmp = listen(&dir.path().join("qmp-lab"))?;
        let serial = listen(&dir.path().join("serial"))?;
        let stderr = dir.path().join("stderr");

        let mut command = self.command(dir.path(), &ram);
        let output = File::create(&stderr).context("creating the file for QEMU's stderr")?;
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(output);
        let child = command
            .spawn()
            .with_context(|| format!("starting {}", self.binary.path.display()))?;
        let mut process = Process {
            child,
            stderr: stderr.clone(),
        };

        let qmp = Qmp::greet(process.accept(&qmp, START)?, Some(stderr))?;
        let serial = match self.machine {
            Machine::Bare | Machine::Firmware(_) => None,
            Machine::Linux { .. } => Some(process.accept(&serial, START)?),
        };
        Ok(Qemu {
            qmp,
            version: self.binary.version,
            process,
            serial,
            ram,
            dir,
            _ram_dir: ram_dir,
        })
    }

    /// Creates the RAM file, and the directory that owns it if it is a temporary one.
    fn make_ram(&self) -> Result<(PathBuf, Option<TempDir>)> {
        let (path, dir) = match &self.ram_file {
            Some(path) => (path.clone(), None),
            None => {
                let dir = ram_dir(self.ram)?;
                (dir.path().join("ram"), Some(dir))
            }
        };
        let (fill, seed) = self
            .content
            .as_ref()
            .map_or((&Fill::Zero, 0), |(fill, seed)| (fill, *seed));
        ram::write(&path, self.ram, fill, seed)?;
        Ok((path, dir))
    }

    fn command(&self, dir: &Path, ram: &Path) -> Command {
        let mut command = match &self.namespace {
            None => Command::new(&self.binary.path),
            Some(name) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", name]).arg(&self.binary.path);
                command
            }
        };
        let megabytes = self.ram >> 20;
        let prealloc = if self.preallocate { "on" } else { "off" };
        command.args(["-nodefaults", "-no-user-config", "-display", "none"]);
        // This one first: then it listens when QEMU has connected to the other one.
        command
            .arg("-qmp")
            .arg(joined("unix:", &dir.join("qmp"), ",server=on,wait=off"));
        command
            .arg("-qmp")
            .arg(joined("unix:", &dir.join("qmp-lab"), ""));
        let backend = format!(
            "memory-backend-file,id=mem,size={megabytes}M,share=on,prealloc={prealloc},mem-path="
        );
        command
            .arg("-object")
            .arg(joined(&backend, ram, ""))
            .arg("-m")
            .arg(megabytes.to_string());
        match &self.machine {
            Machine::Bare => {
                command.args(["-machine", "none,memory-backend=mem", "-accel", "tcg", "-S"]);
            }
            Machine::Firmware(path) => {
                command
                    .arg("-machine")
                    .arg(format!("{MACHINE},memory-backend=mem"));
                command.args([
                    "-accel",
                    "tcg,tb-size=4",
                    "-cpu",
                    "qemu64,-apic",
                    "-no-reboot",
                ]);
                command.arg("-bios").arg(path);
                if self.paused {
                    command.arg("-S");
                }
            }
            Machine::Linux {
                kernel,
                initrd,
                command_line,
            } => {
                command
                    .arg("-machine")
                    .arg(format!("{MACHINE},memory-backend=mem"));
                // The cache for translated code is 1 GiB by default.
                command.args([
                    "-accel",
                    "tcg,thread=multi,tb-size=128",
                    "-cpu",
                    "qemu64",
                    "-no-reboot",
                ]);
                command.arg("-smp").arg(self.cpus.to_string());
                command.arg("-chardev").arg(joined(
                    "socket,id=serial,path=",
                    &dir.join("serial"),
                    "",
                ));
                command.args(["-serial", "chardev:serial", "-append", command_line]);
                command
                    .arg("-kernel")
                    .arg(kernel)
                    .arg("-initrd")
                    .arg(initrd);
                if self.paused {
                    command.arg("-S");
                }
            }
        }
        if self.incoming {
            command.args(["-incoming", "defer"]);
        }
        command.args(&self.arguments);
        command
    }
}

/// A running QEMU. Dropping it kills it and removes its files.
#[derive(Debug)]
pub struct Qemu {
    /// The lab's own QMP connection.
    pub qmp: Qmp,
    /// What runs.
    pub version: Version,
    // Before the directories: the process goes first.
    process: Process,
    serial: Option<UnixStream>,
    ram: PathBuf,
    dir: TempDir,
    _ram_dir: Option<TempDir>,
}

impl Qemu {
    /// The process id of QEMU itself.
    pub fn pid(&self) -> u32 {
        self.process.child.id()
    }

    /// The file that is the guest's memory.
    pub fn ram(&self) -> &Path {
        &self.ram
    }

    /// A second QMP socket, on which QEMU listens for others than the lab.
    pub fn qmp_socket(&self) -> PathBuf {
        self.dir.path().join("qmp")
    }

    /// A path for a socket that goes away with this QEMU; the URI for QEMU is `unix:` and this.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// What QEMU has written to stderr so far.
    pub fn stderr(&self) -> String {
        self.process.stderr()
    }

    /// CPU seconds (user and system) that QEMU has used.
    pub fn cpu_seconds(&self) -> Result<f64> {
        proc::cpu_seconds(self.pid())
    }

    /// QEMU's memory, with what it has touched of the guest's.
    pub fn memory(&self) -> Result<proc::Memory> {
        proc::memory(self.pid())
    }

    /// Waits for QEMU to end by itself.
    pub fn wait_exit(&mut self, within: Duration) -> Result<ExitStatus> {
        self.process.wait_exit(within)
    }

    /// Ends QEMU as a crash would.
    pub fn kill(&mut self) -> Result<()> {
        self.process.child.kill().context("killing QEMU")?;
        self.process
            .child
            .wait()
            .context("waiting for QEMU")
            .map(drop)
    }

    /// The host's end of the guest's serial port, once.
    pub(crate) fn take_serial(&mut self) -> Option<UnixStream> {
        self.serial.take()
    }
}

/// Starting takes longest where all memory is touched first.
const START: Duration = Duration::from_secs(60);

/// The process, killed on drop.
#[derive(Debug)]
struct Process {
    child: Child,
    stderr: PathBuf,
}

impl Process {
    /// Takes the connection that QEMU makes, unless it ends first.
    fn accept(&mut self, listener: &UnixListener, within: Duration) -> Result<UnixStream> {
        let end = self.end()?;
        let mut fds = [
            PollFd::new(listener, PollFlags::IN),
            PollFd::new(&end, PollFlags::IN),
        ];
        poll_within(&mut fds, within)?;
        if !fds[0].revents().is_empty() {
            let (stream, _) = listener
                .accept()
                .context("accepting a connection of QEMU's")?;
            return Ok(stream);
        }
        let ended = self.child.try_wait().context("waiting for QEMU")?;
        let problem = match ended {
            Some(status) => anyhow!("QEMU ended at once ({status})"),
            None => anyhow!("QEMU did not connect within {within:?}"),
        };
        Err(problem.context(format!("QEMU says: {}", self.stderr())))
    }

    fn wait_exit(&mut self, within: Duration) -> Result<ExitStatus> {
        let end = self.end()?;
        poll_within(&mut [PollFd::new(&end, PollFlags::IN)], within)?;
        match self.child.try_wait().context("waiting for QEMU")? {
            Some(status) => Ok(status),
            None => bail!(
                "QEMU did not end within {within:?}; it says: {}",
                self.stderr()
            ),
        }
    }

    /// A descriptor that is readable once the process has ended.
    fn end(&self) -> Result<rustix::fd::OwnedFd> {
        pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty())
            .context("opening a pidfd of QEMU")
    }

    fn stderr(&self) -> String {
        fs::read_to_string(&self.stderr)
            .unwrap_or_default()
            .trim()
            .to_owned()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only when there is nothing left to end.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn listen(path: &Path) -> Result<UnixListener> {
    UnixListener::bind(path).with_context(|| format!("listening at {}", path.display()))
}

fn joined(before: &str, path: &Path, after: &str) -> OsString {
    [OsStr::new(before), path.as_os_str(), OsStr::new(after)]
        .into_iter()
        .collect()
}

fn poll_within(fds: &mut [PollFd<'_>], within: Duration) -> Result<()> {
    let deadline = Instant::now() + within;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).context("waiting that long")?;
        match poll(fds, Some(&left)) {
            Err(rustix::io::Errno::INTR) => {}
            result => return result.context("waiting for QEMU").map(drop),
        }
    }
}

/// A directory with room for this much guest memory: in memory if it can be there without hurting, else on disk.
fn ram_dir(size: u64) -> Result<TempDir> {
    const RESERVE: u64 = 1 << 30;
    let shm = Path::new("/dev/shm");
    let room =
        rustix::fs::statvfs(shm).map_or(0, |stat| stat.f_bavail.saturating_mul(stat.f_frsize));
    let fits = room > size && proc::available_memory()? > size.saturating_add(RESERVE);
    let parent = if fits {
        shm.to_owned()
    } else {
        target_dir().join("tmp")
    };
    fs::create_dir_all(&parent).with_context(|| format!("creating {}", parent.display()))?;
    let dir = tempfile::Builder::new()
        .prefix("vamoose-")
        .tempdir_in(&parent);
    dir.with_context(|| {
        format!(
            "creating a directory for guest memory in {}",
            parent.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_parsed() {
        let parse = |text| Version::parse(text).map(|version| version.to_string());
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright (c) 2003-2022\n";
        assert_eq!(parse(debian).as_deref(), Some("7.2.22"));
        assert_eq!(
            parse("QEMU emulator version 10.1.0-rc2").as_deref(),
            Some("10.1.0")
        );
        assert_eq!(
            parse("QEMU emulator version 11.0").as_deref(),
            Some("11.0.0")
        );
        assert_eq!(parse("not QEMU"), None);
        let version = |micro| Version {
            major: 10,
            minor: 0,
            micro,
        };
        assert!(version(2) < version(10));
    }

    #[test]
    fn every_version_meets_every_version() {
        let pairs = pairs_or_skip().unwrap();
        let versions = |(from, to): &(Binary, Binary)| (from.version, to.version);
        let mut versions = pairs.iter().map(versions).collect::<Vec<_>>();
        versions.sort();
        versions.dedup();
        assert_eq!(versions.len(), pairs.len());
        assert!(pairs.len().isqrt().pow(2) == pairs.len());
    }

    #[test]
    fn a_qemu_that_does_not_start_says_why() {
        let Some(binary) = newest_or_skip().unwrap() else {
            return;
        };
        let error = Builder::bare(&binary, 1 << 20)
            .argument("-nonsense")
            .start()
            .unwrap_err();
        assert!(format!("{error:#}").contains("nonsense"), "{error:#}");
    }

    #[test]
    fn a_bare_machine_starts_and_leaves_nothing_behind() {
        let Some(binary) = newest_or_skip().unwrap() else {
            return;
        };
        let mut qemu = Builder::bare(&binary, 1 << 20)
            .preallocate()
            .start()
            .unwrap();
        assert_eq!(qemu.qmp.query_status().unwrap(), "prelaunch");
        Qmp::connect(&qemu.qmp_socket())
            .unwrap()
            .query_status()
            .unwrap();
        assert!(qemu.memory().unwrap().resident > 0);
        let paths = [
            qemu.ram().to_owned(),
            qemu.qmp_socket(),
            PathBuf::from(format!("/proc/{}", qemu.pid())),
        ];
        for path in &paths {
            assert!(path.exists(), "{}", path.display());
        }
        drop(qemu);
        for path in &paths {
            assert!(!path.exists(), "{}", path.display());
        }
    }
}
