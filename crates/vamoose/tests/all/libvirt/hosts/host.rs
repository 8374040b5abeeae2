//! A host: its file system, its processes, and `virsh` on it.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _},
    net::Ipv4Addr,
    os::unix::{fs::symlink, net::UnixListener},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use lab::{net::Namespace, process::Child, serial::Serial};
use tempfile::TempDir;

use super::LIMIT;

/// One of two hosts. Dropping it ends everything on it.
#[derive(Debug)]
pub(crate) struct Host {
    /// The name, for libvirt, too.
    pub(crate) name: &'static str,
    /// The address for the other host.
    pub(crate) address: Ipv4Addr,
    /// The process of `unshare`. Its end ends process 1 of the host, and that all others.
    _all: Child,
    /// The id of the host's process 1 outside of its namespace.
    init: u32,
    network: String,
    serial: UnixListener,
    folder: TempDir,
}

const SCRIPT: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/tests/all/libvirt/hosts/host.sh"
);

/// What runs on a host. The single libvirtd of Debian 12 still exists in newer versions.
const START: &str = "export PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C
busybox mkdir -p /run/libvirt /var/log/libvirt/qemu
virtlogd -d
libvirtd --listen -d
while :; do busybox sleep 3600; done
";

/// Guests are trusted: they run as root, without isolation.
const QEMU_CONF: &str = r#"
user = "root"
group = "root"
dynamic_ownership = 0
security_driver = "none"
namespaces = []
cgroup_controllers = []
default_tls_x509_verify = 1
"#;

const USERS: [(&str, &str); 2] = [
    (
        "passwd",
        "root:x:0:0::/:/bin/sh\nlibvirt-qemu:x:64055:64055::/:/bin/false\n",
    ),
    (
        "group",
        "root:x:0:\nlibvirt-qemu:x:64055:\nlibvirt:x:64056:\nkvm:x:64057:\n",
    ),
];

/// libvirtd's socket for `virsh`.
const SOCKET: &str = "run/libvirt/libvirt-sock";

impl Host {
    /// Starts a host in `network` that knows the names of `all`, with `libraries` at the same paths as here. `qemu_conf` is
    /// appended to qemu.conf.
    pub(crate) fn start(
        root: &Path,
        network: &Namespace,
        name: &'static str,
        all: &[(Ipv4Addr, &str)],
        libraries: &[&Path],
        qemu_conf: &str,
    ) -> Result<Self> {
        let folder = TempDir::with_prefix("vamoose-").context("creating a temporary directory")?;
        furnish(folder.path(), name, all, qemu_conf).context("making the file system of a host")?;
        let serial = UnixListener::bind(folder.path().join("run/serial"))?;
        serial.set_nonblocking(true)?;
        let mut command = network.command("unshare");
        command.args(["--mount", "--pid", "--uts", "--fork", "--kill-child"]);
        command.args(["sh", SCRIPT]).arg(root).arg(folder.path());
        command.arg(name).args(libraries);
        let output = fs::File::create(folder.path().join("stderr"))?;
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(output);
        let mut all = Child::start(&mut command)?;
        let mut line = String::new();
        let stdout = all.pipes.stdout.take().context("no stdout")?;
        BufReader::new(stdout).read_line(&mut line)?;
        let said = || fs::read_to_string(folder.path().join("stderr")).unwrap_or_default();
        let init = line.trim().parse();
        let init = init.with_context(|| format!("the host did not start: {}", said()))?;
        Ok(Self {
            name,
            address: network.address(),
            _all: all,
            init,
            network: network.name().to_owned(),
            serial,
            folder,
        })
    }

    /// Waits until libvirt answers.
    pub(crate) fn wait_ready(&self) -> Result<()> {
        let socket = self.path(SOCKET);
        let start = Instant::now();
        // Once the daemon has created its socket, it answers when it is ready.
        while !socket.exists() {
            ensure!(
                start.elapsed() < LIMIT,
                "libvirtd of {} did not start: {}",
                self.name,
                self.log()
            );
            thread::sleep(Duration::from_millis(20));
        }
        // On a busy machine, libvirtd 9.0 has left its first client without an answer (1 of some hundred starts).
        let ask = || self.start_virsh(["version"])?.finish(LIMIT / 3);
        ask().or_else(|_| ask())?.success()?;
        Ok(())
    }

    /// A program in the host's network with this machine's file system.
    pub(crate) fn outside(&self, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", &self.network])
            .arg(program)
            .stdin(Stdio::null());
        command
    }

    /// A program of the host's file system, in its network. Its process is the program itself.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.init.to_string()]);
        command.args(["--mount", "--uts", "--net", "--root", "--wd=/", program]);
        command.env("LC_ALL", "C").stdin(Stdio::null());
        command
    }

    /// Runs `virsh` to its end, at most for [`LIMIT`].
    pub(crate) fn virsh<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> Result<Ended> {
        self.start_virsh(arguments)?.finish(LIMIT)
    }

    /// Starts `virsh`.
    pub(crate) fn start_virsh<'a>(
        &self,
        arguments: impl IntoIterator<Item = &'a str>,
    ) -> Result<Virsh> {
        let mut command = self.command("virsh");
        command.args(arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Ok(Virsh {
            start: Instant::now(),
            child: Child::start(&mut command)?,
        })
    }

    /// Kills the process whose id is in this file of `/run`.
    pub(crate) fn kill(&self, pid_file: &str) -> Result<()> {
        let kill = format!("kill -9 $(busybox cat /run/{pid_file})");
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.init.to_string(), "--mount", "--pid"]);
        command.args(["--root", "--wd=/", "/bin/busybox", "sh", "-c", &kill]);
        lab::run(&mut command).map(drop)
    }

    /// Starts libvirtd after [`Host::kill`], and waits until it answers.
    pub(crate) fn start_libvirtd(&self) -> Result<()> {
        fs::remove_file(self.path(SOCKET)).context("removing the socket of who was killed")?;
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.init.to_string(), "--mount", "--uts"]);
        command.args(["--net", "--pid", "--root", "--wd=/"]);
        command.args(["libvirtd", "--listen", "-d"]);
        lab::run(&mut command)?;
        self.wait_ready()
    }

    /// The host's own file at `/path`: in `/etc`, `/run` or `/var`.
    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    /// libvirt's log.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.path("var/log/libvirtd.log")).unwrap_or_default()
    }

    /// libvirt's log of the guest's QEMU.
    pub(crate) fn log_of_guest(&self) -> String {
        let path = format!("var/log/libvirt/qemu/{}.log", super::domain::NAME);
        fs::read_to_string(self.path(&path)).unwrap_or_default()
    }

    /// The serial port of the last QEMU started since the last call, if any.
    pub(crate) fn serial(&self) -> Result<Option<Serial>> {
        let mut last = None;
        loop {
            match self.serial.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false)?;
                    last = Some(Serial::new(stream, None)?);
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(last),
                Err(error) => return Err(error).context("accepting a serial port"),
            }
        }
    }
}

fn furnish(folder: &Path, name: &str, all: &[(Ipv4Addr, &str)], qemu_conf: &str) -> Result<()> {
    for below in ["etc/libvirt", "etc/host", "run", "var/log", "var/lib"] {
        fs::create_dir_all(folder.join(below))?;
    }
    symlink("/run", folder.join("var/run"))?;
    let etc = folder.join("etc");
    for (file, text) in USERS {
        fs::write(etc.join(file), text)?;
    }
    let hosts = all.iter().map(|(at, name)| format!("{at} {name}\n"));
    let hosts = hosts.collect::<String>();
    fs::write(etc.join("hosts"), format!("127.0.0.1 localhost\n{hosts}"))?;
    fs::write(etc.join("host/start"), START)?;
    fs::write(
        etc.join("libvirt/qemu.conf"),
        format!("{QEMU_CONF}{qemu_conf}"),
    )?;
    let number = all.iter().position(|(_, other)| *other == name);
    let number = number.context("a host that does not know itself")?;
    fs::write(
        etc.join("libvirt/libvirtd.conf"),
        format!(
            "listen_tls = 0\nlisten_tcp = 1\nauth_tcp = \"none\"\nauth_unix_rw = \"none\"\n\
             host_uuid = \"00000000-0000-4000-8000-00000000000{number}\"\n\
             log_outputs = \"2:file:/var/log/libvirtd.log\"\n"
        ),
    )?;
    Ok(())
}

/// A running `virsh`. Killed and reaped on drop.
#[derive(Debug)]
pub(crate) struct Virsh {
    start: Instant,
    child: Child,
}

impl Virsh {
    /// Whether it has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.child.process().has_ended()
    }

    /// Waits for its end.
    pub(crate) fn finish(mut self, within: Duration) -> Result<Ended> {
        let Some(status) = self.child.wait(within)? else {
            bail!("virsh hangs: it still runs after {within:?}");
        };
        let took = self.start.elapsed();
        let (mut stdout, mut stderr) = (String::new(), String::new());
        if let Some(mut pipe) = self.child.pipes.stdout.take() {
            pipe.read_to_string(&mut stdout)?;
        }
        if let Some(mut pipe) = self.child.pipes.stderr.take() {
            pipe.read_to_string(&mut stderr)?;
        }
        Ok(Ended {
            is_success: status.success(),
            took,
            stdout,
            stderr,
        })
    }
}

/// A `virsh` that has ended.
#[derive(Clone, Debug)]
pub(crate) struct Ended {
    /// Whether it succeeded.
    pub(crate) is_success: bool,
    /// How long it ran.
    pub(crate) took: Duration,
    /// The output.
    pub(crate) stdout: String,
    /// The error output.
    pub(crate) stderr: String,
}

impl Ended {
    /// Expects success, and returns the output.
    pub(crate) fn success(self) -> Result<String> {
        ensure!(self.is_success, "virsh failed: {}", self.reason());
        Ok(self.stdout)
    }

    /// The error output on one line.
    pub(crate) fn reason(&self) -> String {
        let lines = self.stderr.lines().map(str::trim);
        let lines = lines.filter(|line| !line.is_empty());
        lines.collect::<Vec<_>>().join("; ")
    }
}
