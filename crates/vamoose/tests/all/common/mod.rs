//! What the end-to-end tests share: bare QEMUs around one or two relays.

pub(crate) mod gate;
pub(crate) mod monitor;
pub(crate) mod qcow2;

use std::{
    env,
    fs::DirBuilder,
    os::unix::fs::{DirBuilderExt as _, symlink},
    path::{Path, PathBuf},
    process::Command,
    str::FromStr,
    time::Duration,
};

use anyhow::{Context as _, Result};
use lab::{
    qemu::{Binary, Builder, Qemu},
    ram::{self, Fill},
    vamoose::Vamoose,
};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Longer than anything may take on a machine that is very busy.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);
pub(crate) const MIB: u64 = 1 << 20;

/// The number in an environment variable, or `default`.
pub(crate) fn number<T: FromStr<Err: std::error::Error + Send + Sync + 'static>>(
    variable: &'static str,
    default: T,
) -> Result<T> {
    let text = env::var(variable);
    text.map_or(Ok(default), |text| text.parse().context(variable))
}

/// The program under test.
pub(crate) fn vamoose() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_vamoose"))
}

/// A source full of pages of all kinds and a destination that waits for it.
pub(crate) fn bare_pair(from: &Binary, to: &Binary, ram: u64) -> Result<(Qemu, Qemu)> {
    let source = Builder::bare(from, ram)
        .content(Fill::Mixed, 1)
        .peer(to.version)
        .start()?;
    let destination = Builder::bare(to, ram)
        .peer(from.version)
        .incoming()
        .start()?;
    Ok((source, destination))
}

/// Turns multifd on with `channels` and `method`.
pub(crate) fn set_up(qemu: &mut Qemu, channels: u8, method: &str) -> Result<()> {
    qemu.qmp.use_multifd(channels)?;
    qemu.qmp
        .set_parameters(json!({ "multifd-compression": method }))
}

/// An address on which `qemu` (or a relay beside it) can listen.
pub(crate) fn listen_address(qemu: &Qemu, name: &str, tcp: bool) -> String {
    if tcp {
        "tcp:127.0.0.1:0".to_owned()
    } else {
        format!("unix:{}", qemu.socket(name).display())
    }
}

/// Lets a destination listen and returns where.
pub(crate) fn incoming(destination: &mut Qemu, tcp: bool) -> Result<String> {
    let address = listen_address(destination, "in", tcp);
    destination.qmp.migrate_incoming(&address)?;
    if tcp {
        let port = destination.qmp.incoming_port()?;
        return Ok(format!("tcp:127.0.0.1:{port}"));
    }
    Ok(address)
}

/// Waits until both QEMUs have completed and compares their whole memory.
pub(crate) fn expect_equal(
    source: &mut Qemu,
    destination: &mut Qemu,
    relays: &[&Vamoose],
) -> Result<Value> {
    let said = || {
        let relays = relays.iter().map(|relay| relay.stderr());
        relays.collect::<Vec<_>>().join("\n--\n")
    };
    let account = source
        .qmp
        .wait_migration(&["completed"], LIMIT)
        .with_context(|| {
            format!(
                "relays:\n{}\ndestination:\n{}",
                said(),
                destination.stderr()
            )
        })?;
    destination.qmp.wait_migration(&["completed"], LIMIT)?;
    ram::compare(source.ram(), destination.ram())?;
    Ok(account)
}

/// A host: its server, the folder in which its QEMUs' monitors are linked by name, and what its commands remember.
pub(crate) struct Host {
    pub(crate) server: Vamoose,
    pub(crate) address: String,
    pub(crate) monitors: TempDir,
    memory: TempDir,
    limits: String,
    options: Vec<String>,
}

impl Host {
    pub(crate) fn start(options: &[&str]) -> Result<Self> {
        Self::start_under(":", options)
    }

    /// The server runs in a shell that has set these limits, such as `ulimit -n 64`.
    pub(crate) fn start_under(limits: &str, options: &[&str]) -> Result<Self> {
        let (monitors, memory) = (TempDir::new()?, TempDir::new()?);
        let options: Vec<_> = options.iter().map(|&option| option.to_owned()).collect();
        let (server, address) = serve(limits, monitors.path(), &state_in(&memory), &options)?;
        Ok(Self {
            server,
            address,
            monitors,
            memory,
            limits: limits.to_owned(),
            options,
        })
    }

    /// Where it remembers attempts.
    pub(crate) fn state_dir(&self) -> PathBuf {
        state_in(&self.memory)
    }

    /// Kills the server and starts another one in its place, which listens at another port.
    pub(crate) fn restart(&mut self) -> Result<()> {
        self.server.kill()?;
        let (monitors, state) = (self.monitors.path(), state_in(&self.memory));
        (self.server, self.address) = serve(&self.limits, monitors, &state, &self.options)?;
        Ok(())
    }

    /// Kills the server and starts another one, which remembers nothing of what its predecessor wrote down.
    pub(crate) fn restart_without_memory(&mut self) -> Result<()> {
        self.server.kill()?;
        self.memory = TempDir::new()?;
        self.restart()
    }

    /// Makes `qemu` known here by `name`.
    pub(crate) fn knows(&self, name: &str, qemu: &Qemu) -> Result<()> {
        let link = self.monitors.path().join(format!("{name}.qmp"));
        symlink(qemu.qmp_socket(), link).context("cannot link the monitor")
    }

    /// Makes the name free for another QEMU.
    pub(crate) fn forgets(&self, name: &str) -> Result<()> {
        let link = self.monitors.path().join(format!("{name}.qmp"));
        std::fs::remove_file(link).context("no such name")
    }

    /// Moves a guest to this host.
    pub(crate) fn migrate(&self, source: &Qemu, name: &str, options: &[&str]) -> Result<Vamoose> {
        migrate(&source.qmp_socket(), &self.address, name, options)
    }

    /// Moves a guest of this host's to `to`.
    pub(crate) fn migrate_away(&self, source: &Qemu, to: &str, name: &str) -> Result<Vamoose> {
        let state = state_in(&self.memory);
        migrate_from(&state, &source.qmp_socket(), to, name, &[])
    }
}

/// Not the folder itself: a host's records are in a folder that is private to it.
fn state_in(memory: &TempDir) -> PathBuf {
    memory.path().join("state")
}

fn serve(
    limits: &str,
    monitors: &Path,
    state: &Path,
    options: &[String],
) -> Result<(Vamoose, String)> {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{limits}; exec \"$0\" \"$@\"")]);
    command.arg(vamoose());
    command.args(["serve", "--listen", "tcp:127.0.0.1:0", "--qmp-dir"]);
    command.arg(monitors).args(options).args(link(options));
    remember_in(&mut command, state)?;
    let server = Vamoose::start(&mut command)?;
    let address = server.wait_for("taking migrations on ", LIMIT)?;
    Ok((server, address))
}

/// Moves the guest of the QEMU with this monitor, whose host remembers beside the monitor what became of it.
pub(crate) fn migrate(qmp: &Path, to: &str, name: &str, options: &[&str]) -> Result<Vamoose> {
    migrate_from(&qmp.with_file_name("state"), qmp, to, name, options)
}

/// Moves the guest of a QEMU on the host that keeps its memory in `state`.
pub(crate) fn migrate_from(
    state: &Path,
    qmp: &Path,
    to: &str,
    name: &str,
    options: &[&str],
) -> Result<Vamoose> {
    // Whoever runs the tests may ignore SIGHUP, as `nohup` does, and vamoose would then, too.
    let mut command = Command::new("env");
    command.arg("--default-signal=HUP").arg(vamoose());
    command.args([
        "migrate", "--json", "-", "--to", to, "--name", name, "--qmp",
    ]);
    command.arg(qmp).args(options).args(link(options));
    command.args(encoding(options));
    remember_in(&mut command, state)?;
    Vamoose::start(&mut command)
}

/// Pages as they are, so that a test's bandwidth decides how long a migration takes; unless the test has chosen a method.
fn encoding(options: &[&str]) -> &'static [&'static str] {
    match options.contains(&"--method") {
        true => &[],
        false => &["--method", "none"],
    }
}

/// A link in plain text, so that a test's network sees the messages, on which the loss of a connection is noticed at once;
/// unless the test has chosen another one.
pub(crate) fn link<'a>(options: &[impl AsRef<str> + 'a]) -> &'static [&'static str] {
    let chosen = ["--insecure", "--keys", "--peer-key", "--tls-creds"];
    match options
        .iter()
        .any(|option| chosen.contains(&option.as_ref()))
    {
        true => &[],
        false => &["--insecure", "--reconnect-timeout", "0"],
    }
}

/// Tells a command where its host keeps what it has to remember, so that no test knows of another.
fn remember_in(command: &mut Command, state: &Path) -> Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(state)
        .context("cannot create the state directory")?;
    command.arg("--state-dir").arg(state);
    Ok(())
}
