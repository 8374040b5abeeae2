//! `virsh migrate` between two hosts of libvirt through relays and gateways, also cancelled, and `vamoose libvirt`. `make libvirt`
//! tests more.

mod evacuate;
pub(crate) mod hosts;
pub(crate) mod matrix;

use std::{
    env, fs, os::unix::fs::PermissionsExt as _, path::Path, process::Command, time::Instant,
};

use anyhow::{Context as _, Result, ensure};
use lab::{
    guest::{Image, Load},
    vamoose::{Keys, Vamoose},
};
use rustix::process::Signal;
use tempfile::TempDir;

use self::hosts::{Copied, Domain, Ended, Generation, Hosts, Passage, Storage, Way, Where};
use crate::common::{LIMIT, vamoose};

/// The guest never writes more than can be sent.
const LOAD: Load = Load {
    fill: 32,
    hot: 4,
    rate: 100,
};

/// MiB.
const DISK: u64 = 32;

/// MiB per second, slow enough to cancel.
const SLOW: &str = "4";

#[test]
fn a_guest_moves_through_relays_and_stays_when_it_is_cancelled() -> Result<()> {
    with_all_generations(Way::Relays)
}

#[test]
fn a_guest_moves_through_gateways_and_stays_when_it_is_cancelled() -> Result<()> {
    with_all_generations(Way::Gateways)
}

#[test]
fn a_guest_moves_by_one_command_and_stays_when_it_is_cancelled() -> Result<()> {
    in_all_generations(|generation| by_one_command(generation, Storage::Shared))
}

#[test]
fn disks_are_copied_through_gateways_and_stay_when_it_is_cancelled() -> Result<()> {
    in_all_generations(copied)
}

#[test]
fn disks_are_copied_by_one_command_and_stay_when_it_is_cancelled() -> Result<()> {
    in_all_generations(|generation| {
        let copied = match generation.has_compression() {
            true => Copied::Increment,
            false => Copied::Qcow2,
        };
        by_one_command(generation, Storage::Copied(copied, DISK))
    })
}

#[test]
fn libvirt_is_set_up_for_gateways() -> Result<()> {
    in_all_generations(set_up)
}

fn with_all_generations(way: Way) -> Result<()> {
    in_all_generations(|generation| cancelled_and_moved(generation, way))
}

fn in_all_generations(test: impl Fn(&Generation) -> Result<()>) -> Result<()> {
    if Image::build_or_skip(1)?.is_none() {
        return Ok(());
    }
    for generation in hosts::available_or_skip()? {
        let context = || format!("libvirt {}", generation.version);
        test(&generation).with_context(context)?;
    }
    Ok(())
}

/// A destination QEMU 7.2 used to hang when a relay ended with an undelivered SYNC, and `virsh` with it.
fn cancelled_and_moved(generation: &Generation, way: Way) -> Result<()> {
    let (image, keys) = (Image::build(8)?, Keys::make(vamoose())?);
    let hosts = Hosts::start(generation, way, &image, 1_000_000_000)?;
    let mut passage = Passage::new(&hosts, &keys)?;
    let mut domain = Domain::start(&hosts, &image, 192, &LOAD, Storage::Shared)?;
    for _ in 0..2 {
        let arguments = passage.prepare(domain.at())?;
        let ended = cancelled(&hosts, &arguments, "Memory processed:")?;
        ensure!(!ended.is_success, "it was not cancelled");
        domain.has_stayed()?;
        passage.end();
    }
    let arguments = passage.prepare(domain.at())?;
    moves_paused(&hosts, &mut domain, &passage, &arguments)?;
    domain.ends_well()?;
    passage.finish()
}

/// Moves the guest while it is paused: QEMU 7.2 loses writes of a guest that runs.
fn moves_paused(
    hosts: &Hosts,
    domain: &mut Domain<'_>,
    passage: &Passage<'_>,
    arguments: &[String],
) -> Result<()> {
    let host = domain.at().of(hosts);
    host.virsh(["suspend", "web1"])?.success()?;
    let arguments = [migrate(arguments), vec!["--parallel"]].concat();
    let moved = host.virsh(arguments).and_then(Ended::success);
    moved.with_context(|| passage.said())?;
    domain.has_moved("paused")?;
    domain.resume()
}

fn copied(generation: &Generation) -> Result<()> {
    let (image, keys) = (Image::build(8)?, Keys::make(vamoose())?);
    let hosts = Hosts::start(generation, Way::Gateways, &image, 1_000_000_000)?;
    let mut passage = Passage::new(&hosts, &keys)?;
    let storage = Storage::Copied(Copied::Qcow2, DISK);
    let mut domain = Domain::start(&hosts, &image, 192, &LOAD, storage)?;
    let mut arguments = passage.prepare(domain.at())?;
    arguments.extend(storage.options().iter().map(|it| (*it).to_owned()));
    let ended = cancelled(&hosts, &arguments, "File processed:")?;
    ensure!(!ended.is_success, "it was not cancelled");
    domain.has_stayed()?;
    moves_paused(&hosts, &mut domain, &passage, &arguments)?;
    domain.ends_well()
}

/// Cancels a migration that has processed memory or files.
fn cancelled(hosts: &Hosts, arguments: &[String], processed: &str) -> Result<Ended> {
    let host = &hosts.hosts[0];
    let slow = vec!["--parallel", "--bandwidth", SLOW];
    let virsh = host.start_virsh([migrate(arguments), slow].concat())?;
    let start = Instant::now();
    // Before memory is sent, QEMU 10.0 may abort (docs/qemu.md).
    while !has_processed(hosts, processed)? {
        ensure!(start.elapsed() < LIMIT, "nothing was sent");
        ensure!(!virsh.has_ended(), "{}", virsh.finish(LIMIT)?.reason());
    }
    host.virsh(["domjobabort", "web1"])?.success()?;
    let ended = virsh.finish(LIMIT);
    ended.context("the migration that was cancelled")
}

/// Whether a MiB or more has been processed; virsh chooses the unit. The first disk is smaller.
fn has_processed(hosts: &Hosts, name: &str) -> Result<bool> {
    let info = hosts.hosts[0].virsh(["domjobinfo", "web1"])?.stdout;
    let mut lines = info.lines();
    let sent = lines.find_map(|line| line.strip_prefix(name));
    Ok(sent.is_some_and(|sent| sent.ends_with("MiB")))
}

fn migrate(arguments: &[String]) -> Vec<&str> {
    let command = ["migrate", "--live", "web1", "qemu+tcp://host2/system"];
    // libvirt does not recognize the file system as shared.
    let command = command.into_iter().chain(["--unsafe"]);
    let arguments = arguments.iter().map(String::as_str);
    command.chain(arguments).collect()
}

/// Between hosts without any set-up.
fn by_one_command(generation: &Generation, storage: Storage) -> Result<()> {
    let image = Image::build(8)?;
    let hosts = Hosts::start(generation, Way::Direct, &image, 1_000_000_000)?;
    let mut domain = Domain::start(&hosts, &image, 192, &LOAD, storage)?;
    let tools = Tools::of(&hosts)?;
    let host = &hosts.hosts[0];
    let copies: &[&str] = match storage {
        Storage::Shared => &[],
        Storage::Copied(Copied::Increment, _) => &["--copy-storage", "inc"],
        Storage::Copied(..) => &["--copy-storage", "all"],
    };
    let mut slow = tools.migrate(&hosts, &[copies, &["--max-bandwidth", "4M"]].concat());
    let slow = Vamoose::start(slow.args(["--bandwidth", SLOW]))?;
    let start = Instant::now();
    // No message tells that the migration has begun.
    while !host
        .virsh(["domjobinfo", "web1"])?
        .stdout
        .contains("Outgoing")
        || storage != Storage::Shared && !has_processed(&hosts, "File processed:")?
    {
        ensure!(
            start.elapsed() < LIMIT,
            "it did not begin: {}",
            slow.stderr()
        );
        ensure!(!slow.has_ended()?, "{}", slow.stderr());
    }
    slow.signal(Signal::INT)?;
    let said = slow.finish(LIMIT)?.failure("cancelled")?;
    domain
        .has_stayed()
        .with_context(|| format!("{}\n{}", said.stderr, host.log_of_guest()))?;
    // QEMU 7.2 loses writes of a guest that runs.
    host.virsh(["suspend", "web1"])?.success()?;
    let moved = Vamoose::start(&mut tools.migrate(&hosts, copies))?.finish(LIMIT)?;
    let said = moved.success()?.stderr;
    ensure!(
        (storage == Storage::Shared) != said.contains("disks: "),
        "{said}"
    );
    domain.has_moved("paused")?;
    domain.resume()?;
    let absent = Vamoose::start(&mut tools.migrate(&hosts, &[]))?.finish(LIMIT)?;
    absent.failure("failed to get domain 'web1'")?;
    domain.ends_well()
}

/// After it, qemu.conf alone leads a migration through the gateways.
fn set_up(generation: &Generation) -> Result<()> {
    let (image, keys) = (Image::build(8)?, Keys::make(vamoose())?);
    let mut hosts = Hosts::start(generation, Way::Direct, &image, 1_000_000_000)?;
    let tools = Tools::of(&hosts)?;
    for (at, other) in [(Where::First, Where::Second), (Where::Second, Where::First)] {
        let host = at.of(&hosts);
        let config = tools.folder.path().join("gateway.toml");
        let text = format!(
            "listen = [\"{}:4440\"]\nalias = \"{}\"\ninsecure = true\n\
             peers.localhost = {{ alias = \"{}\", to = [\"{}:4440\"] }}\n",
            host.address,
            hosts::alias(at),
            hosts::alias(other),
            other.of(&hosts).address
        );
        fs::write(&config, text)?;
        let qemu_conf = host.path("etc/libvirt/qemu.conf");
        let before = fs::read_to_string(&qemu_conf)?;
        let setup = |more: &[&str]| {
            let mut command = host.outside(vamoose());
            command.args(["libvirt", "setup", "--config"]).arg(&config);
            command.arg("--qemu-conf").arg(&qemu_conf).args(more);
            Vamoose::start(command.env("PATH", &tools.path))?.finish(LIMIT)
        };
        setup(&[])?.failure("4 problems")?;
        ensure!(fs::read_to_string(&qemu_conf)? == before, "it has written");
        let said = setup(&["--write"])?.success()?.stdout;
        ensure!(said.contains("restart virtqemud"), "{said}");
        ensure!(
            said.contains(&format!("ok: libvirt {}", generation.version)),
            "{said}"
        );
        let written = fs::read_to_string(&qemu_conf)?;
        ensure!(written.starts_with(&before), "{written}");
        let again = setup(&["--write"])?.success()?.stdout;
        ensure!(again.contains("no setting is missing"), "{again}");
        host.kill("libvirtd.pid")?;
        host.start_libvirtd()?;
    }
    hosts.way = Way::Gateways;
    let mut domain = Domain::start(&hosts, &image, 192, &LOAD, Storage::Shared)?;
    hosts.hosts[0].virsh(["suspend", "web1"])?.success()?;
    let mut passage = Passage::new(&hosts, &keys)?;
    let arguments = passage.prepare(domain.at())?;
    let arguments = [migrate(&arguments), vec!["--parallel"]].concat();
    hosts.hosts[0].virsh(arguments)?.success()?;
    domain.has_moved("paused")?;
    domain.resume()?;
    ensure!(passage.said().contains("guest web1"), "{}", passage.said());
    domain.ends_well()
}

/// Programs of a lab host that run in other namespaces than `vamoose`.
struct Tools {
    folder: TempDir,
    path: String,
    ssh: String,
}

impl Tools {
    fn of(hosts: &Hosts) -> Result<Self> {
        let folder = TempDir::new()?;
        let [first, second] = &hosts.hosts;
        script(&folder.path().join("virsh"), "", &first.command("virsh"))?;
        let ssh = folder.path().join("ssh");
        // Its first argument is the host.
        script(&ssh, "shift", &second.outside(Path::new("env")))?;
        let others = env::var("PATH").unwrap_or_default();
        Ok(Self {
            path: format!("{}:{others}", folder.path().display()),
            ssh: ssh.display().to_string(),
            folder,
        })
    }

    fn migrate(&self, hosts: &Hosts, options: &[&str]) -> Command {
        let [first, second] = &hosts.hosts;
        let mut command = first.outside(vamoose());
        command.args(["libvirt", "migrate", "web1", second.name]);
        command.args(["--desturi", "qemu+tcp://host2/system", "--ssh", &self.ssh]);
        command.args(["--address", &second.address.to_string()]);
        command.arg("--remote-vamoose").arg(vamoose()).args(options);
        command.args(["--", "--unsafe"]);
        command.env("PATH", &self.path);
        command
    }
}

fn script(path: &Path, before: &str, command: &Command) -> Result<()> {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words = words.map(|word| format!("'{}' ", word.to_string_lossy()));
    let words: String = words.collect();
    fs::write(path, format!("#!/bin/sh\n{before}\nexec {words} \"$@\"\n"))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    Ok(())
}
