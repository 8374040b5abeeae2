//! Finds QEMUs on this machine and runs them.
//!
//! There are four kinds of machine: a *bare* one without CPU and firmware, which consists of a RAM file and migrates in
//! milliseconds; one that runs a few bytes of *firmware* ([`crate::counter`]); one whose BIOS boots from a *disk*
//! ([`crate::writer`]); and one with a *Linux* guest under TCG ([`crate::guest`]). RAM is a file, so that two ends can be compared.

use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use tempfile::TempDir;

use crate::net::command_in;
use crate::process::{Child, Process, wait_readable};
use crate::qmp::Qmp;
use crate::ram::{self, Fill};
use crate::{proc, skipped, target_dir};

/// The machine type of guests: the newest one that all supported QEMUs have, so that guests can migrate between them.
pub const MACHINE: &str = "pc-i440fx-7.2";

/// The major and minor versions that `scripts/setup qemu` fetches and migrations are tested with, oldest first.
pub const VERSIONS: [(u32, u32); 3] = [(7, 2), (10, 0), (11, 1)];

/// The versions that move a writing guest without KVM by post-copy. Not 11.1: a source that may switch to post-copy loses writes of
/// such a guest, whoever migrates it (docs/qemu.md). The lab's guests run without KVM.
pub const FOR_POST_COPY: [(u32, u32); 2] = [(7, 2), (10, 0)];

/// Bytes to add to the memory of a running guest that leaves a QEMU before 8.0 under TCG. Memory of whole multiples of 256 KiB
/// takes QEMU's fast path of collecting dirty pages, which loses writes there.
pub const AWKWARD: u64 = 8 << 10;

/// A version of QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// For example 10 in 10.0.2.
    pub major: u32,
    /// For example 0 in 10.0.2.
    pub minor: u32,
    /// For example 2 in 10.0.2.
    pub micro: u32,
}

impl Version {
    /// Parses the output of `qemu-system-x86_64 --version`.
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

    /// Whether a source of this version loses writes of a running guest, a defect of QEMU (docs/qemu.md).
    pub fn loses_writes(&self) -> bool {
        self.major < 8
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}

/// An installed QEMU.
#[derive(Clone, Debug)]
pub struct Binary {
    /// The program, or a wrapper that replaces itself by it.
    pub path: PathBuf,
    /// The version it reports.
    pub version: Version,
}

/// The QEMUs of this machine, oldest first: those of `scripts/setup qemu`, those in the environment variable `VAMOOSE_QEMU` (paths
/// separated by colons), and the one on the PATH. Of each major and minor version only the first counts.
pub fn available() -> &'static [Binary] {
    static FOUND: OnceLock<Vec<Binary>> = OnceLock::new();
    FOUND.get_or_init(|| {
        let program = "qemu-system-x86_64";
        let mut paths: Vec<PathBuf> = std::env::var_os("VAMOOSE_QEMU")
            .iter()
            .flat_map(std::env::split_paths)
            .collect();
        let fetched = fs::read_dir(target_dir().join("qemu"));
        let fetched = fetched.into_iter().flatten().flatten();
        paths.extend(fetched.map(|entry| entry.path().join(program)));
        paths.push(PathBuf::from(program));
        let mut found: Vec<Binary> = paths.into_iter().filter_map(probe).collect();
        // A stable sort: among equals, the first one named stays first.
        found.sort_by_key(|binary| (binary.version.major, binary.version.minor));
        found.dedup_by_key(|binary| (binary.version.major, binary.version.minor));
        found
    })
}

/// The QEMU of this major and minor version. If there is none, reports the test as skipped and returns `None`.
pub fn find_or_skip(major: u32, minor: u32) -> Result<Option<Binary>> {
    let fits = |binary: &&Binary| (binary.version.major, binary.version.minor) == (major, minor);
    let found = available().iter().find(fits).cloned();
    if found.is_none() {
        skipped(&format!("no QEMU {major}.{minor}, run scripts/setup qemu"))?;
    }
    Ok(found)
}

/// Those of [`FOR_POST_COPY`], oldest first. Reports missing versions as skipped.
pub fn for_post_copy_or_skip() -> Result<Vec<Binary>> {
    versions_or_skip(&FOR_POST_COPY)
}

/// All pairs of source and destination from [`VERSIONS`], including equal ones. Reports missing versions as skipped.
pub fn pairs_or_skip() -> Result<Vec<(Binary, Binary)>> {
    let found = versions_or_skip(&VERSIONS)?;
    let mut pairs = Vec::new();
    for from in &found {
        pairs.extend(found.iter().map(|to| (from.clone(), to.clone())));
    }
    Ok(pairs)
}

fn versions_or_skip(versions: &[(u32, u32)]) -> Result<Vec<Binary>> {
    let mut found = Vec::new();
    for (major, minor) in versions {
        found.extend(find_or_skip(*major, *minor)?);
    }
    Ok(found)
}

/// The newest QEMU. If there is none, reports the test as skipped and returns `None`.
pub fn newest_or_skip() -> Result<Option<Binary>> {
    let found = available().last().cloned();
    if found.is_none() {
        skipped("no QEMU, run scripts/setup qemu")?;
    }
    Ok(found)
}

/// Whether QEMUs can use KVM. If not, reports it as skipped.
pub fn kvm_or_skip() -> Result<bool> {
    let opened = File::options().read(true).write(true).open("/dev/kvm");
    if let Err(error) = &opened {
        skipped(&format!("no KVM: /dev/kvm: {error}"))?;
    }
    Ok(opened.is_ok())
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

/// The configuration of a QEMU to start.
#[derive(Clone, Debug)]
pub struct Builder {
    binary: Binary,
    machine: Machine,
    ram: u64,
    content: (Fill, u64),
    preallocate: bool,
    incoming: bool,
    paused: bool,
    kvm: bool,
    /// Empty for the host's own.
    namespace: String,
    arguments: Vec<OsString>,
}

#[derive(Clone, Debug)]
enum Machine {
    Bare,
    Firmware(PathBuf),
    Bios,
    Linux {
        kernel: PathBuf,
        initrd: PathBuf,
        command_line: String,
    },
}

impl Builder {
    /// A bare machine with `ram` bytes of memory.
    pub fn bare(binary: &Binary, ram: u64) -> Self {
        Self::new(binary, Machine::Bare, ram)
    }

    /// A machine of type [`MACHINE`] with `ram` bytes and one CPU that runs only this firmware.
    pub fn firmware(binary: &Binary, ram: u64, firmware: &Path) -> Self {
        Self::new(binary, Machine::Firmware(firmware.to_owned()), ram)
    }

    /// A machine of type [`MACHINE`] with `ram` bytes and one CPU, whose BIOS boots from a disk that the caller adds. Its serial
    /// output goes to a file, see [`Qemu::printed`].
    pub fn bios(binary: &Binary, ram: u64) -> Self {
        Self::new(binary, Machine::Bios, ram)
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
        Self::new(binary, machine, ram)
    }

    fn new(binary: &Binary, machine: Machine, ram: u64) -> Self {
        Self {
            binary: binary.clone(),
            machine,
            ram,
            content: (Fill::Zero, 0),
            preallocate: false,
            incoming: false,
            paused: false,
            kvm: false,
            namespace: String::new(),
            arguments: Vec::new(),
        }
    }

    /// Sets the initial content of RAM, see [`ram::write`]. The default is zeros.
    pub fn content(mut self, fill: Fill, seed: u64) -> Self {
        self.content = (fill, seed);
        self
    }

    /// Makes QEMU touch all RAM before it starts, like a destination in production.
    pub fn preallocate(mut self) -> Self {
        self.preallocate = true;
        self
    }

    /// Waits for a migration by [`Qmp::migrate_incoming`]; the guest does not run before.
    pub fn incoming(mut self) -> Self {
        self.incoming = true;
        self
    }

    /// The guest does not run before [`Qmp::cont`], not even after an incoming migration. Bare machines never run.
    pub fn paused(mut self) -> Self {
        self.paused = true;
        self
    }

    /// Runs a machine with firmware or Linux under KVM instead of TCG. Firmware also runs under nested KVM that emulates instruction
    /// by instruction, where Linux does not boot and a BIOS takes seconds.
    pub fn kvm(mut self) -> Self {
        self.kvm = true;
        self
    }

    /// Runs QEMU in a network namespace, see [`crate::net::Namespace::name`].
    pub fn namespace(mut self, name: &str) -> Self {
        name.clone_into(&mut self.namespace);
        self
    }

    /// Makes a bare machine compatible with an older QEMU at the other end, possibly behind a relay: a SYNC after each section,
    /// zero pages in the main stream, no announcement of the switchover. The other machines have a versioned type that does this.
    /// Without it the two ends would wait for each other for ever.
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

    /// Names this QEMU's process.
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
        if !self.ram.is_multiple_of(8192) {
            bail!("{} bytes of RAM are not a multiple of 8 KiB", self.ram);
        }
        let dir = TempDir::with_prefix("vamoose-").context("creating a temporary directory")?;
        let ram_dir = ram_dir(self.ram)?;
        let ram = ram_dir.path().join("ram");
        let (fill, seed) = &self.content;
        if !matches!(fill, Fill::Zero) {
            ram::write(&ram, self.ram, fill, *seed)?;
        }
        let qmp = listen(&dir.path().join("qmp-lab"))?;
        let serial = listen(&dir.path().join("serial"))?;
        let stderr = dir.path().join("stderr");

        let mut command = self.command(dir.path(), &ram);
        let output = File::create(&stderr).context("creating the file for QEMU's stderr")?;
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(output);
        let mut qemu = Starting {
            child: Child::start(&mut command)?,
            stderr: stderr.clone(),
        };
        let qmp = Qmp::greet(qemu.accept(&qmp)?, Some(stderr.clone()))?;
        let serial = match self.machine {
            Machine::Bare | Machine::Firmware(_) | Machine::Bios => None,
            Machine::Linux { .. } => Some(qemu.accept(&serial)?),
        };
        Ok(Qemu {
            qmp,
            version: self.binary.version,
            child: qemu.child,
            stderr,
            serial,
            ram,
            dir,
            _ram_dir: ram_dir,
        })
    }

    fn command(&self, dir: &Path, ram: &Path) -> Command {
        let mut command = command_in(&self.namespace, &self.binary.path);
        let kib = self.ram >> 10;
        let prealloc = if self.preallocate { "on" } else { "off" };
        let (dir, ram) = (dir.display(), ram.display());
        command.args(["-nodefaults", "-no-user-config", "-display", "none"]);
        // First, so that QEMU listens here once it has connected to the other socket.
        command.args(["-qmp", &format!("unix:{dir}/qmp,server=on,wait=off")]);
        command.args(["-qmp", &format!("unix:{dir}/qmp-lab")]);
        let backend = format!(
            "memory-backend-file,share=on,mem-path={ram},id=mem,size={kib}K,prealloc={prealloc}"
        );
        command.args(["-object", &backend, "-m", &format!("{kib}k")]);
        let machine = match &self.machine {
            Machine::Bare => "none",
            _ => MACHINE,
        };
        command.args(["-machine", &format!("{machine},memory-backend=mem")]);
        command.args(["-no-reboot", "-accel"]);
        let accelerator = if self.kvm { "kvm" } else { "tcg,tb-size=4" };
        match &self.machine {
            Machine::Bare => {
                command.arg("tcg");
            }
            Machine::Firmware(path) => {
                command.args([accelerator, "-cpu", "qemu64,-apic", "-bios"]);
                command.arg(path);
            }
            Machine::Bios => {
                command.args([accelerator, "-cpu", "qemu64", "-serial"]);
                command.arg(format!("file:{dir}/printed"));
            }
            Machine::Linux {
                kernel,
                initrd,
                command_line,
            } => {
                // The translation cache is 1 GiB by default.
                let accelerator = if self.kvm {
                    "kvm"
                } else {
                    "tcg,thread=multi,tb-size=128"
                };
                command.args([accelerator, "-cpu", "qemu64"]);
                command.args(["-smp", "2", "-serial", "chardev:serial", "-chardev"]);
                command.arg(format!("socket,id=serial,path={dir}/serial"));
                command.args(["-append", command_line, "-kernel"]);
                command.arg(kernel).arg("-initrd").arg(initrd);
            }
        }
        if self.paused || matches!(self.machine, Machine::Bare) {
            command.arg("-S");
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
    /// The version.
    pub version: Version,
    // Dropped before the directories.
    child: Child,
    stderr: PathBuf,
    serial: Option<UnixStream>,
    ram: PathBuf,
    dir: TempDir,
    _ram_dir: TempDir,
}

impl Qemu {
    /// The process id of QEMU itself.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A handle for other threads.
    pub fn process(&self) -> &Process {
        self.child.process()
    }

    /// The file that holds the guest's memory; a memfd exists as long as QEMU runs.
    pub fn ram(&self) -> &Path {
        &self.ram
    }

    /// A second QMP socket, for other clients than the lab.
    pub fn qmp_socket(&self) -> PathBuf {
        self.dir.path().join("qmp")
    }

    /// A path for a socket, removed with this QEMU. Its URI for QEMU is `unix:` and the path.
    pub fn socket(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The serial output so far of a guest of [`Builder::bios`], if it has not moved here.
    pub fn printed(&self) -> Result<String> {
        let path = self.dir.path().join("printed");
        fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
    }

    /// QEMU's stderr so far.
    pub fn stderr(&self) -> String {
        read_stderr(&self.stderr)
    }

    pub(crate) fn stderr_file(&self) -> PathBuf {
        self.stderr.clone()
    }

    /// Waits until QEMU exits by itself.
    pub fn wait_exit(&mut self, within: Duration) -> Result<ExitStatus> {
        let ended = self.child.wait(within)?;
        ended.with_context(|| {
            let stderr = self.stderr();
            format!("QEMU did not end within {within:?}; it says: {stderr}")
        })
    }

    /// Whether it runs or how it has ended, and what it says, for error messages.
    pub fn fate(&mut self) -> String {
        let fate = match self.child.wait(Duration::ZERO) {
            Ok(None) => "runs".to_owned(),
            Ok(Some(status)) => format!("has ended ({status})"),
            Err(error) => format!("{error:#}"),
        };
        format!("QEMU {} {fate}, and says:\n{}", self.version, self.stderr())
    }

    /// Kills QEMU.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()
    }

    /// The host's end of the guest's serial port; available once.
    pub(crate) fn take_serial(&mut self) -> Option<UnixStream> {
        self.serial.take()
    }
}

/// Starting takes longest if all memory is touched first.
const START: Duration = Duration::from_secs(60);

/// A starting QEMU.
struct Starting {
    child: Child,
    stderr: PathBuf,
}

impl Starting {
    /// Accepts QEMU's connection, unless QEMU exits first.
    fn accept(&mut self, listener: &UnixListener) -> Result<UnixStream> {
        let files = [listener.as_fd(), self.child.process().as_fd()];
        let [connects, _] = wait_readable(files, START)?;
        if connects {
            let (stream, _) = listener
                .accept()
                .context("accepting a connection from QEMU")?;
            return Ok(stream);
        }
        let problem = match self.child.wait(Duration::ZERO)? {
            Some(status) => anyhow!("QEMU ended at once ({status})"),
            None => anyhow!("QEMU did not connect within {START:?}"),
        };
        Err(problem.context(format!("QEMU says: {}", read_stderr(&self.stderr))))
    }
}

pub(crate) fn read_stderr(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.trim().to_owned()
}

fn listen(path: &Path) -> Result<UnixListener> {
    UnixListener::bind(path).with_context(|| format!("listening at {}", path.display()))
}

/// A directory for this much guest memory: in memory if enough is free, else on disk.
fn ram_dir(size: u64) -> Result<TempDir> {
    const RESERVE: u64 = 1 << 30;
    let shm = Path::new("/dev/shm");
    let room =
        rustix::fs::statvfs(shm).map_or(0, |stat| stat.f_bavail.saturating_mul(stat.f_frsize));
    let fits = room > size && proc::available_memory()? > size.saturating_add(RESERVE);
    let parent = match fits {
        true => shm.to_owned(),
        false => PathBuf::from("/var/tmp"),
    };
    TempDir::with_prefix_in("vamoose-", &parent)
        .with_context(|| format!("creating a directory in {}", parent.display()))
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
