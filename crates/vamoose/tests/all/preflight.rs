//! What `migrate` checks before it begins, and what it says of a QEMU that cannot take its guest.

use std::{fs, os::unix::net::UnixStream, path::Path};

use anyhow::{Context as _, Result, ensure};
use lab::{
    qemu::{self, Binary, Builder, Qemu},
    ram,
    vamoose::Ended,
};

use crate::common::{Host, LIMIT, MIB, migrate};

/// A machine with a disk's controller and firmware, with more `arguments`.
fn machine(binary: &Binary, arguments: &[&str]) -> Builder {
    let machine = Builder::bios(binary, 32 * MIB).paused();
    let arguments = arguments.iter();
    arguments.fold(machine, |machine, argument| machine.argument(*argument))
}

struct Scene {
    host: Host,
    source: Qemu,
    destination: Qemu,
}

impl Scene {
    fn new(binary: &Binary, here: &[&str], there: &[&str]) -> Result<Self> {
        let host = Host::start(&[])?;
        let source = machine(binary, here).start()?;
        let destination = machine(binary, there).incoming().start()?;
        host.knows("web1", &destination)?;
        Ok(Self {
            host,
            source,
            destination,
        })
    }

    fn migrate(&self, options: &[&str]) -> Result<Ended> {
        self.host
            .migrate(&self.source, "web1", options)?
            .finish(LIMIT)
    }

    /// Nothing was begun and nothing is remembered, at either end.
    fn is_untouched(&mut self) -> Result<()> {
        ensure!(self.destination.qmp.query_status()? == "inmigrate");
        ensure!(self.destination.qmp.query_migrate()?["status"].is_null());
        ensure!(self.source.qmp.query_migrate()?["status"].is_null());
        let here = self.source.qmp_socket().with_file_name("state");
        ensure!(entries(&here)? == 0 && entries(&self.host.state_dir())? == 0);
        Ok(())
    }
}

fn entries(state: &Path) -> Result<usize> {
    let mut count = 0;
    for file in fs::read_dir(state)? {
        count += usize::from(file?.path().extension().is_some_and(|it| it == "json"));
    }
    Ok(count)
}

/// As they are found on the command line of the other one.
const RNG: &[&str] = &["-device", "virtio-rng-pci,id=rng,addr=0x8"];

#[test]
fn a_qemu_that_is_not_made_for_the_guest_is_refused_and_stays() -> Result<()> {
    for binary in qemu::available() {
        for (here, there, line) in [
            (
                [].as_slice(),
                ["-machine", "pc-q35-7.2"].as_slice(),
                "machine type: pc-i440fx-7.2 here, pc-q35-7.2 at tcp:",
            ),
            (&["-smp", "2"], &[], "vCPUs: 2 here, 1 at tcp:"),
            (
                RNG,
                &[],
                "PCI device 00:08.0: virtio-rng-pci `rng` here, none at tcp:",
            ),
            (
                &["-name", "web1"],
                &["-name", "web2"],
                "guest: web1 here, web2 at tcp:",
            ),
        ] {
            let mut scene = Scene::new(binary, here, there)?;
            for options in [[].as_slice(), &["--dry-run"]] {
                let refused = scene.migrate(options)?.failure(line)?;
                ensure!(!refused.stderr.contains("has not confirmed"), "{line}");
                if !options.is_empty() {
                    let said = refused.stderr.lines().any(|said| {
                        said.strip_prefix("fails ")
                            .is_some_and(|said| said.contains(line))
                    });
                    ensure!(said, "{}", refused.stderr);
                }
            }
            scene
                .is_untouched()
                .with_context(|| format!("{}, {line}", binary.version))?;
        }
    }
    Ok(())
}

#[test]
fn what_may_fail_is_a_warning() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let here = ["-name", "web2", "-cpu", "qemu64,+aes"];
    let scene = Scene::new(&binary, &here, RNG)?;
    let moved = scene.migrate(&[])?.success()?;
    for line in [
        "guest: web2 here, web1 at tcp:",
        "CPU features: CPUID 1 ECX bit 25 here, not at tcp:",
        "PCI device 00:08.0: none here, virtio-rng-pci `rng` at tcp:",
    ] {
        ensure!(moved.stderr.contains(line), "{line}: {}", moved.stderr);
    }
    ram::compare(scene.source.ram(), scene.destination.ram())?;
    Ok(())
}

#[test]
fn a_dry_run_compares_and_changes_nothing() -> Result<()> {
    for (from, to) in qemu::pairs_or_skip()? {
        let host = Host::start(&[])?;
        let source = machine(&from, &["-name", "web1"]).start()?;
        let destination = machine(&to, &["-name", "web1"]).incoming().start()?;
        host.knows("web1", &destination)?;
        let mut scene = Scene {
            host,
            source,
            destination,
        };
        let ended = scene.migrate(&["--dry-run"])?.success()?;
        for line in [
            "same      guest: web1\n",
            "same      machine type: pc-i440fx-7.2\n",
            "same      RAM: 32 MiB\n",
            "same      CPU features: all there\n",
            "Nothing was changed.\n",
        ] {
            ensure!(ended.stderr.contains(line), "{line}: {}", ended.stderr);
        }
        let differs = ended.stderr.contains("fail");
        ensure!(
            !differs,
            "{} to {}: {}",
            from.version,
            to.version,
            ended.stderr
        );
        scene.is_untouched()?;
        scene.migrate(&[])?.success()?;
        let again = scene.migrate(&["--dry-run"])?;
        again.failure("has already sent this guest")?;
    }
    Ok(())
}

/// A device that the comparison only warns of, as it has no PCI address.
#[test]
fn a_qemu_that_cannot_load_the_guest_tells_why() -> Result<()> {
    for binary in qemu::available() {
        let serial = ["-chardev", "null,id=n", "-device", "isa-serial,chardev=n"];
        let mut scene = Scene::new(binary, &[], &[])?;
        let running = Builder::bios(binary, 32 * MIB);
        let running = serial.iter().fold(running, |it, &text| it.argument(text));
        scene.source = running.start()?;
        let ended = scene
            .migrate(&[])?
            .failure("isa-serial: 1 here, 0 at tcp:")?;
        let ended = ended.failure("destination: its QEMU could not load the guest: ")?;
        let ended = ended
            .failure("section or instance 'serial'")
            .with_context(|| {
                format!(
                    "{}\n{}",
                    scene.destination.stderr(),
                    scene.host.server.stderr()
                )
            })?;
        let error = ended.stderr.lines().last().unwrap_or_default();
        ensure!(!error.contains("roken pipe"), "{}: {error}", binary.version);
        scene.destination.wait_exit(LIMIT)?;
        ensure!(scene.source.qmp.query_status()? == "running");

        let next = scene.migrate(&[])?;
        next.failure("start it (again, after a failure) with -incoming defer -S")?;
    }
    Ok(())
}

#[test]
fn errors_before_the_beginning_are_not_remembered() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let scene = Scene::new(&binary, &[], &[])?;
    let source = scene.source.qmp_socket();
    let briefly = ["--connect-timeout", "1"];
    for (to, name, reason) in [
        ("tcp:127.0.0.1:1", "web1", "cannot connect"),
        ("tcp:nobody.invalid:1", "web1", "nobody.invalid"),
        (&*scene.host.address, "web2", "no QEMU waits there"),
    ] {
        let ended = migrate(&source, to, name, &briefly)?.finish(LIMIT)?;
        let ended = ended.failure(reason)?;
        ensure!(!ended.stderr.contains("confirmed"), "{}", ended.stderr);
        ensure!(entries(&source.with_file_name("state"))? == 0, "{reason}");
    }
    Ok(())
}

#[test]
fn a_second_migration_of_the_same_guest_is_told_of_the_first() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let scene = Scene::new(&binary, &[], &[])?;
    let slowly = ["--max-bandwidth", "10k"];
    let first = scene.host.migrate(&scene.source, "web1", &slowly)?;
    first.wait_for("active", LIMIT)?;
    for options in [[].as_slice(), &["--dry-run"]] {
        let second = scene.migrate(options)?;
        let second = second.failure("is under way: another process is moving the guest")?;
        let said = second.stderr;
        ensure!(said.contains("nothing was changed"), "{said}");
        ensure!(!said.contains("stays here"), "{said}");
    }
    ensure!(!first.has_ended()?);
    Ok(())
}

#[test]
fn a_monitor_that_is_held_is_reported_in_time() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    for held_there in [false, true] {
        let scene = Scene::new(&binary, &[], &[])?;
        let held = match held_there {
            true => &scene.destination,
            false => &scene.source,
        };
        let _client = UnixStream::connect(held.qmp_socket())?;
        let ended = scene.migrate(&["--connect-timeout", "3"])?;
        let ended = ended.failure("another client (libvirt?) probably holds it")?;
        let early = match held_there {
            true => "the server does not answer yet",
            false => "holds its monitor; waiting for 3 s",
        };
        ended.failure(early)?;
    }
    Ok(())
}

#[test]
fn the_sources_qemu_is_ended_on_request_once_the_guest_has_moved() -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let mut scene = Scene::new(&binary, &["-smp", "2"], &[])?;
    scene.migrate(&["--quit-source"])?.failure("vCPUs")?;
    ensure!(scene.source.qmp.query_status()? == "prelaunch");

    let mut scene = Scene::new(&binary, &[], &[])?;
    scene.migrate(&["--quit-source"])?.success()?;
    scene.source.wait_exit(LIMIT)?;
    ensure!(scene.destination.qmp.query_migrate()?["status"] == "completed");
    Ok(())
}
