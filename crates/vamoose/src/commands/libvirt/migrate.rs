//! `vamoose libvirt migrate`: migrates one guest between two hosts that are not set up for Vamoose.
//!
//! ```text
//!  virsh ── migrate ──> libvirt ─> QEMU ─ 127.0.0.1:PORT ─> relay, in this process
//!                                          ─ 127.0.0.1:DISKS ┤
//!                                                             ║ one-time keys
//!  ssh HOST vamoose libvirt receive ────────────────────────> relay ─ 127.0.0.1:PORT ─> QEMU of HOST
//! ```

use std::{
    io::{self, BufRead as _, BufReader, IsTerminal as _, Write as _},
    ops::Range,
    process::{self, Child, Command, ExitStatus, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use clap::{Args, ValueEnum};
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};
use tracing::{error, info};
use vamoose_link::{
    Address, Hangup, Listener, OneTimeKey, Remote, Security, SessionConfig, Stats, chain,
};
use vamoose_relay::{Config, Dialer, Moved, Relay, RelayError};

use super::receive::{MARK, Ready, Request, at};
use crate::commands::{gateway, virsh};
use vamoose::exit::{Exit, OrUsage as _};
use vamoose::{
    options::{Access, Encoding, MethodName},
    outcome,
    terminal::{self, wrap},
};

/// Migrate a running guest to another host of libvirt, which needs only ssh and this program
///
/// Relays on both hosts carry the guest's memory, and disks that are copied, with one-time keys, and end with the migration. Ctrl-C
/// cancels the migration, and the guest keeps running here.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  vamoose libvirt migrate web1 kvm2
  vamoose libvirt migrate --copy-storage all web1 kvm2
  vamoose libvirt migrate web1 root@kvm2 -- --persistent --undefinesource")]
pub(super) struct Options {
    /// Name of the guest
    domain: String,
    /// The other host, as ssh knows it
    host: String,
    /// URI of the other host's libvirt, as seen from this host [default: qemu+ssh://HOST/system]
    #[arg(long, value_name = "URI")]
    desturi: Option<String>,
    /// Command, with options, that runs a command on another host
    #[arg(long, default_value = "ssh", value_name = "COMMAND")]
    ssh: String,
    /// Path of this program on the other host
    #[arg(long, default_value = "vamoose", value_name = "PATH")]
    remote_vamoose: String,
    /// Address of the other host for the guest's memory [default: the address that ssh uses]
    #[arg(long, value_name = "ADDRESS")]
    address: Option<String>,
    /// Port of the other host for the guest's memory [default: any]
    #[arg(
        long,
        default_value_t = 0,
        hide_default_value = true,
        value_name = "PORT"
    )]
    port: u16,
    /// Number of data channels
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    channels: u8,
    /// Copy the guest's disks to images of the same size on the other host: all of their content, or (inc) what they have on top
    /// of backing files that both hosts have
    #[arg(long, value_name = "WHAT")]
    copy_storage: Option<CopyStorage>,
    #[command(flatten)]
    encoding: Encoding,
    #[command(flatten)]
    access: Access,
    /// Further options for `virsh migrate`, such as --persistent or --timeout 60
    #[arg(last = true, value_name = "VIRSH_OPTION")]
    virsh_options: Vec<String>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum CopyStorage {
    All,
    Inc,
}

pub(super) fn run(options: &Options) -> Result<()> {
    let (domain, host) = (&*options.domain, &*options.host);
    if host.starts_with('-') {
        return Err(anyhow!("{host} is not the name of a host")).or_usage();
    }
    check_storage(&options.virsh_options).or_usage()?;
    let state = virsh::state(domain).context("on this host")?;
    ensure!(
        ["running", "paused"].contains(&&*state),
        "on this host, {domain} is {state}: only a guest that runs, or is paused, can be migrated live"
    );
    let config = options.encoding.config(MethodName::Auto).or_usage()?;
    let own = OneTimeKey::generate()?;
    let mut listeners = listeners(options, config.stall_timeout)?;
    let request = Request {
        key: own.public().to_string(),
        ports: listeners.iter().map(|(port, _)| *port).collect(),
        listen: options.port,
        disks: options.copy_storage.is_some(),
        page_size: u32::try_from(options.encoding.page_size.0)?,
        stall_timeout: config.stall_timeout.as_secs().max(1),
    };
    let (far, ready) = Far::start(options, &request)?;
    let mut chosen = |chosen: Option<u16>| {
        let at = listeners.iter().position(|(it, _)| Some(*it) == chosen);
        let chosen = at.map(|at| listeners.swap_remove(at));
        chosen.with_context(|| format!("{host} has chosen a port that was not offered"))
    };
    let (port, listener) = chosen(Some(ready.port))?;
    let disks = options.copy_storage.map(|_| chosen(ready.disks_port));
    let disks = disks.transpose()?;
    drop(listeners);
    let peer = ready
        .key
        .parse()
        .with_context(|| format!("the key of {host}"))?;
    let session = SessionConfig {
        stall_timeout: config.stall_timeout,
        ..SessionConfig::new(Security::OneTime { own, peer })
    };
    let name = host.rsplit('@').next().unwrap_or(host).to_owned();
    let to = Address::Tcp {
        host: options.address.clone().or(ready.address).unwrap_or(name),
        port: ready.listen,
    };
    let remote = Remote {
        paths: vec![to.into()],
        config: session,
    };
    let listeners = Listeners {
        port,
        memory: listener,
        disks,
    };
    let moved = relayed(options, &listeners, remote, &config);
    match moved {
        Ok(moved) => {
            far.finish()?;
            let moved = Moved {
                is_running: state == "running",
                ..moved
            };
            let result = outcome::moved(domain, host, &moved);
            info!("{}", wrap(&result, terminal::width()));
            Ok(())
        }
        Err(error) => {
            far.end();
            let state = virsh::state(domain);
            Err(match state {
                Ok(state) => error.context(format!(
                    "{domain} has not moved to {host}: here it is {state}"
                )),
                Err(_) => Exit::InDoubt.with(error.context(format!(
                    "{domain} is no longer known here: look for it on {host}"
                ))),
            })
        }
    }
}

/// Refuses virsh's own options to copy disks. libvirt would send them to a port of 127.0.0.1 that is not a relay's, perhaps to
/// another disk of this host.
fn check_storage(virsh_options: &[String]) -> Result<()> {
    const STORAGE: [&str; 3] = ["--copy-storage-all", "--copy-storage-inc", "--disks-"];
    let copies = |option: &&String| STORAGE.iter().any(|it| option.starts_with(it));
    if let Some(option) = virsh_options.iter().find(copies) {
        bail!(
            "{option}: give --copy-storage all or --copy-storage inc before `--` instead, which leads the disks through the relays"
        );
    }
    Ok(())
}

/// Where this host's QEMU connects to.
struct Listeners {
    port: u16,
    memory: Listener,
    /// For disks, with their port.
    disks: Option<(u16, Listener)>,
}

/// Runs `virsh migrate` through a relay in this process. A signal cancels it.
fn relayed(
    options: &Options,
    listeners: &Listeners,
    remote: Remote,
    config: &Config,
) -> Result<Moved> {
    let (hangup, of_disks) = (Hangup::new()?, Arc::default());
    let stats = Arc::<Stats>::default();
    let dialers = (Dialer::remote(remote.clone()), Dialer::remote_bytes(remote));
    let (dialer, disks_dialer) = &dialers;
    let relay = Relay {
        accept: &listeners.memory,
        dialer,
        config,
        hangup: &hangup,
        stats: &stats,
        reached: &|_| (),
    };
    let cancel = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        flag::register(signal, cancel.clone()).context("cannot catch signals")?;
    }
    let mut virsh = options
        .virsh(listeners)
        .spawn()
        .map_err(virsh::cannot_run)?;
    let (relayed, status) = thread::scope(|scope| {
        if let Some((_, accept)) = &listeners.disks {
            let (dialer, stats) = (disks_dialer, &of_disks);
            let relay = Relay {
                accept,
                dialer,
                stats,
                ..relay
            };
            scope.spawn(move || {
                relay
                    .pass_bytes()
                    .inspect_err(|it| error!("disks: {}", chain(it)))
            });
        }
        let relay = scope.spawn(|| relay.run());
        // QEMU sets its channels up after the disks have been copied.
        let is_outside_setup = || match stats.snapshot() {
            memory if memory.wire_bytes > 0 => memory.packets > 0,
            _ => of_disks.snapshot().wire_bytes > 0,
        };
        let status = wait(&mut virsh, &options.domain, &cancel, is_outside_setup);
        if !status.as_ref().is_ok_and(ExitStatus::success) {
            hangup.hang_up();
        }
        let relayed = relay.join();
        hangup.hang_up();
        (relayed, status)
    });
    let Ok(relayed) = relayed else {
        bail!("the relay of this host has panicked");
    };
    if status.context("waiting for virsh")?.success() {
        let summary = relayed.context("the guest has moved, but the relay of this host failed")?;
        if let Some(session) = dialer.with() {
            session.drain(config.stall_timeout);
        }
        if listeners.disks.is_some() {
            let moved = of_disks.snapshot();
            let [disks, sent] = [moved.received_bytes, moved.wire_bytes].map(|it| it >> 20);
            info!("disks: {disks} MiB as {sent} MiB");
        }
        return Ok(Moved {
            moved: stats.snapshot(),
            total_time: summary.total_time,
            ..Moved::default()
        });
    }
    match relayed {
        _ if cancel.load(Ordering::Relaxed) => Err(Exit::Cancelled.with(anyhow!("cancelled"))),
        Err(error) if !matches!(error, RelayError::Cancelled) => {
            Err(error).context("virsh migrate failed, see above, and so did the relay of this host")
        }
        _ => bail!("virsh migrate failed, see above"),
    }
}

/// Waits for the end of `virsh migrate`. Cancels the migration if requested, as soon as that is safe ([`virsh::SETUP`]).
fn wait(
    virsh: &mut Child,
    domain: &str,
    cancel: &AtomicBool,
    is_outside_setup: impl Fn() -> bool,
) -> io::Result<ExitStatus> {
    const POLL: Duration = Duration::from_millis(200);
    let mut requested = None;
    loop {
        if let Some(status) = virsh.try_wait()? {
            return Ok(status);
        }
        if cancel.load(Ordering::Relaxed) {
            let requested = requested.get_or_insert_with(Instant::now);
            if is_outside_setup() || requested.elapsed() >= virsh::SETUP {
                // Fails before the migration has begun, and after it was cancelled.
                let _ = virsh::output(["domjobabort", "--domain", domain]);
            }
        }
        thread::sleep(POLL);
    }
}

impl Options {
    fn virsh(&self, listeners: &Listeners) -> Command {
        let mut command = virsh::command();
        let (channels, uri) = (self.channels.to_string(), self.desturi());
        let at = format!("tcp://127.0.0.1:{}", listeners.port);
        command.args(["migrate", "--live", "--parallel", "--parallel-connections"]);
        command.args([&channels, "--listen-address", "127.0.0.1", "--migrateuri"]);
        command.arg(at);
        if let (Some(copy), Some((port, _))) = (self.copy_storage, &listeners.disks) {
            let option = match copy {
                CopyStorage::All => "--copy-storage-all",
                CopyStorage::Inc => "--copy-storage-inc",
            };
            // libvirt takes the address from the listen address and the URI.
            command.args([option, "--disks-port", &port.to_string()]);
        }
        if io::stderr().is_terminal() {
            command.arg("--verbose");
        }
        command.args(&self.virsh_options);
        command.args(["--domain", &self.domain, "--desturi", &uri]);
        command
    }

    fn desturi(&self) -> String {
        let default = || format!("qemu+ssh://{}/system", self.host);
        self.desturi.clone().unwrap_or_else(default)
    }
}

/// Ports for this host's QEMU, with their listeners; the other host chooses one. Neither libvirt nor the system allocates ports
/// in this range.
fn listeners(options: &Options, stall_timeout: Duration) -> Result<Vec<(u16, Listener)>> {
    const PORTS: Range<u16> = 20_000..32_000;
    const ENOUGH: usize = 8;
    let peers = options.access.peers_besides(gateway::qemu_users());
    // Concurrent migrations start their search at different ports.
    let before = process::id() as usize % PORTS.len();
    let ports = PORTS.cycle().skip(before).take(PORTS.len());
    let bound = ports.filter_map(|port| {
        let listener = Listener::bind_for(&at(port), stall_timeout, peers.clone()).ok()?;
        Some((port, listener))
    });
    let bound: Vec<_> = bound.take(ENOUGH).collect();
    ensure!(
        !bound.is_empty(),
        "on this host, none of the ports {PORTS:?} is free"
    );
    Ok(bound)
}

/// `vamoose libvirt receive` on the other host. It ends when its standard input is closed.
struct Far<'a> {
    host: &'a str,
    child: Child,
}

impl<'a> Far<'a> {
    fn start(options: &'a Options, request: &Request) -> Result<(Self, Ready)> {
        let host = &*options.host;
        let ssh = options.ssh.split_whitespace();
        let program = options.ssh.split_whitespace().next();
        let program = program.context("--ssh: a command is needed")?;
        let mut command = Command::new("sh");
        // Ctrl-C cancels the migration, which then ends ssh.
        command.args(["-c", "trap '' INT; exec \"$@\"", "sh"]);
        command.args(ssh).arg(host);
        command.args([&options.remote_vamoose, "libvirt", "receive"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot run sh")?;
        let pipes = (&mut child.stdin, child.stdout.take(), child.stderr.take());
        let (Some(stdin), Some(stdout), Some(stderr)) = pipes else {
            bail!("{program} has no pipes");
        };
        let name = host.to_owned();
        // This thread ends with the child.
        thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                eprintln!("{name}: {line}");
            }
        });
        // If the child has ended, reading its answer fails as well.
        let _ = writeln!(stdin, "{}", serde_json::to_string(request)?);
        let mut far = Self { host, child };
        let mut lines = BufReader::new(stdout).lines().map_while(Result::ok);
        let ready = lines.find_map(|line| line.strip_prefix(MARK).map(str::to_owned));
        let Some(ready) = ready else {
            let status = far.child.wait().context("waiting for ssh")?;
            bail!(far.reason(status, options));
        };
        let ready = serde_json::from_str(&ready);
        let ready =
            ready.with_context(|| format!("the vamoose of {host} is of another version"))?;
        Ok((far, ready))
    }

    /// Why the relay of the other host has not started.
    fn reason(&self, status: ExitStatus, options: &Options) -> String {
        let (host, vamoose) = (self.host, &options.remote_vamoose);
        match status.code() {
            Some(255) => format!("cannot reach {host} by `{}`, see above", options.ssh),
            Some(126 | 127) => format!(
                "`{}` is not installed here, or `{vamoose}` is not installed on {host}: install it there, or name its path with --remote-vamoose",
                options.ssh
            ),
            _ => format!(
                "`{vamoose}` failed on {host} ({status}), see above: is it of the same version?"
            ),
        }
    }

    /// Ends the relay of the other host.
    fn end(mut self) {
        // This closes its standard input.
        let _ = self.child.wait();
    }

    /// Waits until the relay has ended by itself, after the guest is loaded.
    fn finish(mut self) -> Result<()> {
        let _stdin = self.child.stdin.take();
        let status = self.child.wait().context("waiting for ssh")?;
        let host = self.host;
        ensure!(
            status.success(),
            "the relay of {host} failed ({status}), see above"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use clap::Parser;
    use tempfile::TempDir;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    /// The error of [`Far::start`] when this script is `ssh`.
    fn complaint(ssh: &str) -> String {
        let folder = TempDir::new().unwrap();
        let script = folder.path().join("ssh");
        fs::write(&script, ssh).unwrap();
        complaint_of(&format!("sh {}", script.display()))
    }

    fn complaint_of(ssh: &str) -> String {
        let words = ["x", "web1", "kvm2", "--ssh", ssh];
        let words = words.into_iter().chain(["--remote-vamoose", "/no/vamoose"]);
        let options = Line::parse_from(words).options;
        let request = Request {
            key: String::new(),
            ports: vec![20_000],
            listen: 0,
            disks: false,
            page_size: 4096,
            stall_timeout: 1,
        };
        let started = Far::start(&options, &request);
        format!("{:#}", started.err().unwrap())
    }

    /// The check comes before anything else.
    #[test]
    fn storage_options_of_virsh_are_refused() {
        for option in [
            "--copy-storage-all",
            "--copy-storage-inc",
            "--copy-storage-all=yes",
            "--disks-port",
            "--disks-uri=tcp://kvm2:10809",
        ] {
            let words = ["x", "web1", "kvm2", "--", "--persistent", option];
            let refused = run(&Line::parse_from(words).options)
                .unwrap_err()
                .to_string();
            let start = format!("{option}: give --copy-storage all");
            assert!(refused.starts_with(&start), "{refused}");
        }
        for others in [
            ["--persistent", "--timeout=60"],
            ["--migrate-disks=vda", "--copy-storage-synchronous-writes"],
        ] {
            assert!(check_storage(&others.map(str::to_owned)).is_ok());
        }
    }

    #[test]
    fn unreachable_host() {
        let said = complaint("exit 255");
        assert!(said.starts_with("cannot reach kvm2 by `sh "), "{said}");
    }

    #[test]
    fn host_without_vamoose() {
        let said = complaint("shift; exec \"$@\"");
        let found = said.contains("`/no/vamoose` is not installed on kvm2: install it there");
        assert!(found && said.contains("--remote-vamoose"), "{said}");
    }

    #[test]
    fn missing_ssh_command() {
        let said = complaint_of("no-such-ssh -q");
        assert!(
            said.starts_with("`no-such-ssh -q` is not installed here"),
            "{said}"
        );
    }

    #[test]
    fn remote_vamoose_that_fails_or_is_of_another_version() {
        let said = complaint("exit 3");
        assert!(
            said.starts_with("`/no/vamoose` failed on kvm2 (exit status: 3)"),
            "{said}"
        );
        let said = complaint(&format!("echo '{MARK}[1]'"));
        assert!(
            said.starts_with("the vamoose of kvm2 is of another version"),
            "{said}"
        );
    }
}
