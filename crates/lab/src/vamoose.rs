//! Runs `vamoose` as a process, as users do, and reads its output.

use std::{
    fs::{self, Permissions},
    io::{self, BufRead as _, BufReader, Read as _},
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::{ChildStderr, Command, ExitStatus, Stdio},
    sync::Arc,
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::{
    net::Namespace,
    proc,
    process::{Child, Process},
    qemu::Qemu,
    watched::Watched,
};

/// A folder for `--state-dir`, in memory like the default, so that no disk is measured.
pub fn state_dir() -> Result<TempDir> {
    let memory = Path::new("/dev/shm");
    let mut builder = tempfile::Builder::new();
    let private = builder.permissions(Permissions::from_mode(0o700));
    if memory.is_dir() {
        private.tempdir_in(memory)
    } else {
        private.tempdir()
    }
    .context("creating a state folder")
}

/// A program under test: `path`, or by default the program of this name beside this one, where cargo puts those of a workspace.
pub fn program(path: Option<&Path>, name: &str) -> Result<PathBuf> {
    let path = match path {
        Some(path) => path.to_owned(),
        None => std::env::current_exe()
            .context("cannot tell where this program is")?
            .with_file_name(name),
    };
    ensure!(
        path.is_file(),
        "there is no {}: build it with the same target directory, as the Makefile does, or name another one",
        path.display()
    );
    Ok(path)
}

/// Keys of two hosts that trust each other, made by `vamoose keys init`.
pub struct Keys {
    _dir: TempDir,
    /// The folder of the source host, for `--keys`.
    pub source: PathBuf,
    /// The folder of the destination host.
    pub destination: PathBuf,
    /// The public keys, the source's first.
    pub public: [String; 2],
}

impl Keys {
    /// Makes keys with `program`, a `vamoose`.
    pub fn make(program: &Path) -> Result<Self> {
        let dir = TempDir::new().context("creating a folder for keys")?;
        let [source, destination] = ["source", "destination"].map(|host| dir.path().join(host));
        let init = |folder: &Path| {
            let mut command = Command::new(program);
            crate::run(command.args(["keys", "init", "--keys"]).arg(folder))
        };
        let public = [init(&source)?, init(&destination)?];
        for (folder, key) in [(&destination, &public[0]), (&source, &public[1])] {
            fs::write(folder.join("trusted"), key).context("trusting a key")?;
        }
        Ok(Self {
            _dir: dir,
            source,
            destination,
            public,
        })
    }

    /// The options of a `migrate` and of its [`Server`] that use these keys.
    pub fn options(&self) -> [Vec<String>; 2] {
        let option = |folder: &PathBuf| vec!["--keys".to_owned(), folder.display().to_string()];
        [option(&self.source), option(&self.destination)]
    }
}

/// A `vamoose serve` for one destination QEMU, with a state folder of its own.
pub struct Server {
    serve: Vamoose,
    /// The address for sources.
    pub address: String,
    // The folder of monitors, and the state of both ends.
    _monitors: TempDir,
    state: TempDir,
}

impl Server {
    /// Starts a server with these options in the namespace `host` of the monitor's QEMU. Without `--keys` among the options it is
    /// insecure.
    pub fn start(
        program: &Path,
        host: &Namespace,
        monitor: &Path,
        options: &[String],
    ) -> Result<Self> {
        let monitors = TempDir::new().context("creating a temporary directory")?;
        let state = state_dir()?;
        let name = monitors.path().join(GUEST).with_extension("qmp");
        symlink(monitor, name).context("linking the monitor")?;
        let mut command = host.command(program);
        let listen = format!("tcp:{}:0", host.address());
        command.args(["serve", "--listen", &listen, "--qmp-dir"]);
        command.arg(monitors.path());
        command.arg("--state-dir").arg(state.path().join("there"));
        let serve = Vamoose::start(with_options(&mut command, options))?;
        let address = serve.wait_for("taking migrations on ", Duration::from_secs(60))?;
        Ok(Self {
            serve,
            address,
            _monitors: monitors,
            state,
        })
    }

    /// A `vamoose migrate` from the namespace `host` to this server, with these options.
    pub fn migrate(
        &self,
        program: &Path,
        host: &Namespace,
        source: &Qemu,
        options: &[String],
    ) -> Command {
        let mut command = host.command(program);
        command.args(["migrate", "--name", GUEST, "--to", &self.address]);
        command.arg("--qmp").arg(source.qmp_socket());
        command
            .arg("--state-dir")
            .arg(self.state.path().join("here"));
        with_options(&mut command, options);
        command
    }

    /// The server's process.
    pub fn process(&self) -> &Vamoose {
        &self.serve
    }
}

fn with_options<'a>(command: &'a mut Command, options: &[String]) -> &'a mut Command {
    if !options.iter().any(|option| option == "--keys") {
        command.arg("--insecure");
    }
    command.args(options)
}

/// The name of the guest of a [`Server`].
const GUEST: &str = "guest";

/// A running `vamoose`. Killed and reaped on drop.
pub struct Vamoose {
    child: Child,
    said: Arc<Watched<Said>>,
    reader: JoinHandle<()>,
    output: JoinHandle<io::Result<String>>,
}

#[derive(Default)]
struct Said {
    lines: Vec<String>,
    ended: bool,
}

impl Vamoose {
    /// Starts `command`, a `vamoose` with its arguments.
    pub fn start(command: &mut Command) -> Result<Self> {
        command.env("NO_COLOR", "1").stderr(Stdio::piped());
        let mut child = Child::start(command.stdin(Stdio::null()).stdout(Stdio::piped()))?;
        let stderr = child.pipes.stderr.take();
        let said = Arc::<Watched<Said>>::default();
        let reader = thread::spawn({
            let said = said.clone();
            move || read_lines(stderr, &said)
        });
        // A report may be longer than what a pipe takes.
        let stdout = child.pipes.stdout.take();
        let output = thread::spawn(move || {
            let mut output = String::new();
            let read = stdout.map(|mut pipe| pipe.read_to_string(&mut output));
            read.transpose().map(|_| output)
        });
        Ok(Self {
            child,
            said,
            reader,
            output,
        })
    }

    /// Starts a relay from `listen`, possibly at port 0, to `connect`. Also returns the address to migrate to.
    pub fn relay(
        program: &Path,
        listen: &str,
        connect: &str,
        options: &[&str],
    ) -> Result<(Self, String)> {
        let mut command = Command::new(program);
        command.args(["relay", "--listen", listen, "--connect", connect]);
        let relay = Self::start(command.args(options))?;
        let address = relay.wait_for("listening on ", Duration::from_secs(20))?;
        Ok((relay, address))
    }

    /// The process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A handle for other threads.
    pub fn process(&self) -> &Process {
        self.child.process()
    }

    /// The most bytes of memory that the process had at any time.
    pub fn peak_memory(&self) -> Result<u64> {
        proc::peak_memory(self.pid())
    }

    /// Waits for a line with `text` on stderr and returns what follows the text.
    pub fn wait_for(&self, text: &str, within: Duration) -> Result<String> {
        let found = |said: &Said| {
            let mut rests = said.lines.iter().filter_map(|line| line.split_once(text));
            rests.next().map(|(_, rest)| rest.trim().to_owned())
        };
        let ended = |said: &Said| said.ended.then_some(None);
        let rest = self
            .said
            .wait(within, |said| found(said).map(Some).or_else(|| ended(said)));
        rest.flatten()
            .with_context(|| format!("vamoose never said `{text}`, but:\n{}", self.stderr()))
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        self.process().signal(signal);
        Ok(())
    }

    /// Kills and reaps the process.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> Result<bool> {
        Ok(self.process().has_ended())
    }

    /// Waits for the end of the process; returns its status and output.
    pub fn finish(mut self, within: Duration) -> Result<Ended> {
        let ended = self.child.finish(within);
        let (status, cpu_seconds) =
            ended.with_context(|| format!("vamoose said:\n{}", self.stderr()))?;
        // The readers end with the process.
        let stdout = self.output.join().unwrap_or_else(|_| Ok(String::new()))?;
        let _ = self.reader.join();
        let stderr = self.said.lock().lines.join("\n");
        Ok(Ended {
            status,
            stdout,
            stderr,
            cpu_seconds,
        })
    }

    /// The output on stderr so far.
    pub fn stderr(&self) -> String {
        self.said.lock().lines.join("\n")
    }
}

/// A `vamoose` that has ended.
#[derive(Debug)]
pub struct Ended {
    /// The exit status.
    pub status: ExitStatus,
    /// The output on stdout.
    pub stdout: String,
    /// The output on stderr.
    pub stderr: String,
    /// CPU time of the whole process, user and system.
    pub cpu_seconds: f64,
}

impl Ended {
    /// Expects success.
    ///
    /// # Errors
    /// The output, after a failure.
    pub fn success(self) -> Result<Self> {
        ensure!(
            self.status.success(),
            "vamoose failed ({}):\n{}",
            self.status,
            self.stderr
        );
        Ok(self)
    }

    /// Expects a failure with `text` on stderr.
    ///
    /// # Errors
    /// The output, otherwise.
    pub fn failure(self, text: &str) -> Result<Self> {
        ensure!(
            !self.status.success(),
            "vamoose did not fail:\n{}",
            self.stderr
        );
        ensure!(
            self.stderr.contains(text),
            "vamoose did not say `{text}` but:\n{}",
            self.stderr
        );
        Ok(self)
    }
}

fn read_lines(stderr: Option<ChildStderr>, said: &Watched<Said>) {
    let lines = stderr.map(|stderr| BufReader::new(stderr).lines());
    for line in lines.into_iter().flatten().map_while(Result::ok) {
        said.update(|said| said.lines.push(line));
    }
    said.update(|said| said.ended = true);
}
