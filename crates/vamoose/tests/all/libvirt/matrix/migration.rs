//! Runs a case and checks the guest.

use std::{
    fs,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use lab::{
    guest::{Image, Load},
    vamoose::Keys,
};

use super::{
    RATE,
    case::{Case, Event, Phase, Victim},
};
use crate::libvirt::hosts::{
    self, Domain, Ended, Generation, Hosts, LIMIT, Passage, Virsh, Way, Where,
};

/// The result of a case, as text.
pub(super) struct Found {
    pub(super) ended: String,
    pub(super) guest: String,
}

pub(super) const RAM: u32 = 256;

/// Rewrites little enough for every migration to end.
pub(super) const QUIET: Load = Load {
    fill: 64,
    hot: 8,
    rate: 500,
};

/// Rewrites more than a slow migration sends.
pub(super) const BUSY: Load = Load {
    fill: 64,
    hot: 32,
    rate: 6000,
};

/// Runs a case on hosts of its own.
pub(super) fn run(
    generation: &Generation,
    way: Way,
    case: &Case,
    image: &Image,
    keys: &Keys,
) -> Result<Found> {
    let hosts = Hosts::start(generation, way, image, RATE)?;
    let mut passage = Passage::new(&hosts, keys)?;
    if case.flags.contains(&"--tls") {
        certify(&hosts)?;
    }
    let load = match case.event {
        Event::Abort(_) | Event::Kill(..) => &BUSY,
        _ => &QUIET,
    };
    let mut domain = Domain::start(&hosts, image, RAM, load, case.storage)?;
    let found = migrate(&hosts, &mut domain, &mut passage, case);
    let found = found.and_then(|found| domain.ends_well().map(|()| found));
    found.with_context(|| said(&hosts))
}

/// What libvirt and QEMU said last on both hosts.
pub(super) fn said(hosts: &Hosts) -> String {
    let said = hosts.hosts.each_ref().map(|host| {
        let (libvirt, qemu) = (tail(&host.log()), tail(&host.log_of_guest()));
        format!("{}: {libvirt}; its QEMU: {qemu}", host.name)
    });
    format!("libvirt says: {}", said.join(" "))
}

/// The end of a log, on one line.
fn tail(log: &str) -> String {
    let lines = log.lines().rev().filter(|line| !line.contains("/dev/kvm"));
    let mut last = lines.take(4).collect::<Vec<_>>();
    last.reverse();
    last.join(" / ")
}

/// Migrates a guest, and checks it.
pub(super) fn migrate(
    hosts: &Hosts,
    domain: &mut Domain<'_>,
    passage: &mut Passage<'_>,
    case: &Case,
) -> Result<Found> {
    match case.event {
        Event::None => moves(hosts, domain, passage, case, "running"),
        Event::Paused => {
            domain.at().of(hosts).virsh(["suspend", GUEST])?.success()?;
            let found = moves(hosts, domain, passage, case, "paused")?;
            domain.resume()?;
            Ok(found)
        }
        Event::Cut(phase) => {
            let virsh = start(hosts, domain, passage, case.flags)?;
            wait_for(hosts, domain, &virsh, phase)?;
            hosts.cut()?;
            let ended = has_succeeded(virsh, passage)?;
            domain.has_moved("running")?;
            Ok(found(&ended, domain))
        }
        Event::ToAndFro => {
            let mut took = Duration::ZERO;
            for number in 1..=10 {
                let context = || format!("migration {number}");
                let virsh = start(hosts, domain, passage, case.flags)?;
                let ended = has_succeeded(virsh, passage).with_context(context)?;
                took += ended.took;
                domain.has_moved("running").with_context(context)?;
                passage.end();
            }
            Ok(Found {
                ended: format!("10 completed, {:.1} s in all", took.as_secs_f64()),
                guest: format!("runs on {}", domain.at()),
            })
        }
        Event::Postcopy => {
            let virsh = start_postcopy(hosts, domain, passage, case.flags)?;
            let ended = has_succeeded(virsh, passage)?;
            domain.has_moved("running")?;
            Ok(found(&ended, domain))
        }
        Event::PostcopyResumed => {
            let virsh = start_postcopy(hosts, domain, passage, case.flags)?;
            // If the connection breaks earlier, libvirt ends the destination's QEMU, and with it the guest.
            let there = domain.at().other();
            while domain.state(there)?.as_deref() != Some("running") && !virsh.has_ended() {}
            wait_for(hosts, domain, &virsh, Phase::FirstRound)?;
            let host = domain.at().of(hosts);
            until_done(&virsh, || host.virsh(["domjobabort", GUEST, "--postcopy"]))?;
            let broken = finish(virsh, passage).context("the migration that is broken")?;
            ensure!(!broken.is_success, "virsh says that the guest has moved");
            let flags = [case.flags, &["--postcopy-resume"]].concat();
            let resumed = start(hosts, domain, passage, &flags)?;
            let ended = finish(resumed, passage).context("the one that resumes it")?;
            // libvirt 9.0 says that it has failed when the destination's QEMU has not been reached yet, and it goes on all the
            // same.
            let start = Instant::now();
            while domain.state(domain.at())?.is_some() {
                ensure!(
                    start.elapsed() < LIMIT,
                    "it did not go on: {}; {}",
                    ended.reason(),
                    passage.said()
                );
                thread::sleep(Duration::from_millis(100));
            }
            domain.has_moved("running")?;
            let says = if ended.is_success {
                "completed"
            } else {
                "completed, though virsh says that it failed"
            };
            Ok(Found {
                ended: format!("{says} ({:.1} s)", ended.took.as_secs_f64()),
                guest: format!("is on {}", domain.at()),
            })
        }
        Event::Abort(phase) => {
            let virsh = start(hosts, domain, passage, case.flags)?;
            wait_for(hosts, domain, &virsh, phase)?;
            let host = domain.at().of(hosts);
            host.virsh(["domjobabort", GUEST])?.success()?;
            has_failed(hosts, domain, passage, virsh)
        }
        Event::Kill(victim, phase) => {
            let virsh = start(hosts, domain, passage, case.flags)?;
            wait_for(hosts, domain, &virsh, phase)?;
            let far = domain.at().other().of(hosts);
            match victim {
                Victim::NearProgram => passage.kill(domain.at())?,
                Victim::FarProgram => passage.kill(domain.at().other())?,
                Victim::DestinationQemu => far.kill("libvirt/qemu/web1.pid")?,
                Victim::DestinationLibvirtd => {
                    far.kill("libvirtd.pid")?;
                    // libvirt keeps waiting, as the QEMUs still run.
                    let host = domain.at().of(hosts);
                    host.virsh(["domjobabort", GUEST])?.success()?;
                    let ended = finish(virsh, passage)?;
                    far.start_libvirtd()?;
                    // libvirtd finds the waiting QEMU and ends it.
                    let start = Instant::now();
                    while domain.state(domain.at().other())?.is_some() {
                        ensure!(start.elapsed() < LIMIT, "the guest stays on both hosts");
                        thread::sleep(Duration::from_millis(20));
                    }
                    passage.end();
                    return has_stayed(hosts, domain, passage, &ended);
                }
            }
            has_failed(hosts, domain, passage, virsh)
        }
    }
}

fn moves(
    hosts: &Hosts,
    domain: &mut Domain<'_>,
    passage: &mut Passage<'_>,
    case: &Case,
    state: &str,
) -> Result<Found> {
    let virsh = start(hosts, domain, passage, case.flags)?;
    let ended = has_succeeded(virsh, passage)?;
    domain.has_moved(state)?;
    passage.finish()?;
    Ok(found(&ended, domain))
}

/// Starts a migration and switches it to post-copy.
fn start_postcopy(
    hosts: &Hosts,
    domain: &Domain<'_>,
    passage: &mut Passage<'_>,
    flags: &[&str],
) -> Result<Virsh> {
    let virsh = start(hosts, domain, passage, flags)?;
    wait_for(hosts, domain, &virsh, Phase::Setup)?;
    let host = domain.at().of(hosts);
    until_done(&virsh, || host.virsh(["migrate-postcopy", GUEST]))?;
    Ok(virsh)
}

/// Repeats a call until it succeeds: libvirt refuses it before the migration has begun. Gives up when the migration has ended.
fn until_done(virsh: &Virsh, call: impl Fn() -> Result<Ended>) -> Result<()> {
    while !virsh.has_ended() {
        if call()?.is_success {
            break;
        }
    }
    Ok(())
}

fn has_failed(
    hosts: &Hosts,
    domain: &mut Domain<'_>,
    passage: &mut Passage<'_>,
    virsh: Virsh,
) -> Result<Found> {
    let ended = finish(virsh, passage)?;
    let said = passage.said();
    passage.end();
    has_stayed(hosts, domain, passage, &ended).context(said)
}

/// Checks that the guest has stayed, and that it can be moved now.
fn has_stayed(
    hosts: &Hosts,
    domain: &mut Domain<'_>,
    passage: &mut Passage<'_>,
    ended: &Ended,
) -> Result<Found> {
    ensure!(!ended.is_success, "virsh says that the guest has moved");
    domain.has_stayed()?;
    let found = Found {
        ended: format!("{} ({:.1} s)", ended.reason(), ended.took.as_secs_f64()),
        guest: format!("runs on {}; moves later", domain.at()),
    };
    moves_later(hosts, domain, passage).context("the next migration")?;
    Ok(found)
}

/// Moves the guest. It is paused at a source before QEMU 8, which would lose writes of a busy guest (docs/qemu.md).
fn moves_later(hosts: &Hosts, domain: &mut Domain<'_>, passage: &mut Passage<'_>) -> Result<()> {
    let state = match hosts.generation.loses_writes() {
        true => {
            let host = domain.at().of(hosts);
            host.virsh(["suspend", GUEST])?.success()?;
            "paused"
        }
        false => "running",
    };
    let virsh = start(hosts, domain, passage, &["--parallel"])?;
    has_succeeded(virsh, passage)?;
    domain.has_moved(state)?;
    if state == "paused" {
        domain.resume()?;
    }
    Ok(())
}

pub(super) const GUEST: &str = "web1";

/// Starts `virsh migrate` to the other host.
pub(super) fn start(
    hosts: &Hosts,
    domain: &Domain<'_>,
    passage: &mut Passage<'_>,
    flags: &[&str],
) -> Result<Virsh> {
    let to = domain.at().other().of(hosts);
    let uri = format!("qemu+tcp://{}/system", to.name);
    // libvirt does not recognize the file system as shared.
    let own = ["migrate", "--live", "--unsafe", GUEST, &uri];
    let arguments = passage.prepare(domain.at())?;
    let all = own.into_iter().chain(arguments.iter().map(String::as_str));
    let all = all.chain(domain.storage().options().iter().copied());
    let all = all.chain(flags.iter().copied());
    domain.at().of(hosts).start_virsh(all)
}

/// Waits for `virsh`, which must never hang.
fn finish(virsh: Virsh, passage: &Passage<'_>) -> Result<Ended> {
    virsh.finish(LIMIT).with_context(|| passage.said())
}

pub(super) fn has_succeeded(virsh: Virsh, passage: &Passage<'_>) -> Result<Ended> {
    let ended = finish(virsh, passage)?;
    ensure!(
        ended.is_success,
        "virsh failed: {}; {}",
        ended.reason(),
        passage.said()
    );
    Ok(ended)
}

fn found(ended: &Ended, domain: &Domain<'_>) -> Found {
    Found {
        ended: format!("completed ({:.1} s)", ended.took.as_secs_f64()),
        guest: format!("is on {}", domain.at()),
    }
}

/// Waits until a migration is in this phase, by libvirt's statistics.
fn wait_for(hosts: &Hosts, domain: &Domain<'_>, virsh: &Virsh, phase: Phase) -> Result<()> {
    let host = domain.at().of(hosts);
    let start = Instant::now();
    loop {
        ensure!(start.elapsed() < LIMIT, "the phase {phase:?} never came");
        ensure!(!virsh.has_ended(), "virsh ended before phase {phase:?}");
        // There is no event for a phase.
        let info = host.virsh(["domjobinfo", GUEST])?;
        if is_in(&info.stdout, phase) {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// A number in the output of `virsh domjobinfo`, without its unit.
pub(super) fn number_in(info: &str, name: &str) -> Option<f64> {
    value_in(info, name)?.split(' ').next()?.parse().ok()
}

fn value_in<'a>(info: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = info.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = lines.find(|(key, _)| *key == name)?;
    Some(value.trim())
}

fn is_in(info: &str, phase: Phase) -> bool {
    let value = |name: &str| value_in(info, name);
    let number = |name: &str| number_in(info, name);
    let is_active = value("Operation") == Some("Outgoing migration");
    let rounds = number("Iteration").unwrap_or(0.0);
    // virsh chooses the unit; 10 MiB or more.
    let processed = |name: &str| {
        let is_in_mib = value(name).is_some_and(|it| it.ends_with("MiB"));
        is_in_mib && number(name).is_some_and(|it| it >= 10.0)
    };
    is_active
        && match phase {
            Phase::Setup => true,
            Phase::Disks => processed("File processed"),
            Phase::FirstRound => processed("Memory processed"),
            Phase::LaterRound => rounds >= 2.0,
        }
}

/// Makes certificates with the hosts' certtool, in the folder that QEMU searches.
pub(super) fn certify(hosts: &Hosts) -> Result<()> {
    let [first, _] = &hosts.hosts;
    let here = first.path("etc/host");
    let template = |name: &str, text: &str| fs::write(here.join(name), text);
    template(
        "ca",
        "cn = \"lab\"\nca\ncert_signing_key\nexpiration_days = 2\n",
    )?;
    let certtool = |arguments: &[&str]| -> Result<()> {
        let mut command: Command = first.command("certtool");
        lab::run(command.args(arguments)).map(drop)
    };
    let (ca_key, ca) = ("/etc/host/ca-key.pem", "/etc/host/ca-cert.pem");
    let key = |path: &str| certtool(&["--generate-privkey", "--rsa", "--outfile", path]);
    key(ca_key)?;
    certtool(&[
        "--generate-self-signed",
        "--load-privkey",
        ca_key,
        "--template",
        "/etc/host/ca",
        "--outfile",
        ca,
    ])?;
    for at in [Where::First, Where::Second] {
        let host = at.of(hosts);
        let text = format!(
            "cn = \"{name}\"\ndns_name = \"{name}\"\nip_address = \"{at}\"\nip_address = \"127.0.0.1\"\n\
             ip_address = \"{alias}\"\n\
             tls_www_server\ntls_www_client\nsigning_key\nencryption_key\nexpiration_days = 2\n",
            name = host.name,
            at = host.address,
            alias = hosts::alias(at),
        );
        template("host", &text)?;
        let (own_key, own) = ("/etc/host/key.pem", "/etc/host/cert.pem");
        key(own_key)?;
        certtool(&[
            "--generate-certificate",
            "--load-privkey",
            own_key,
            "--load-ca-privkey",
            ca_key,
            "--load-ca-certificate",
            ca,
            "--template",
            "/etc/host/host",
            "--outfile",
            own,
        ])?;
        let folder = host.path("etc/pki/qemu");
        fs::create_dir_all(&folder)?;
        for (from, to) in [
            ("ca-cert.pem", "ca-cert.pem"),
            ("cert.pem", "server-cert.pem"),
            ("cert.pem", "client-cert.pem"),
            ("key.pem", "server-key.pem"),
            ("key.pem", "client-key.pem"),
        ] {
            if fs::copy(here.join(from), folder.join(to)).is_err() {
                bail!("certtool has made no {from}");
            }
        }
    }
    Ok(())
}
