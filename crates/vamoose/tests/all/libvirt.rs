//! `virsh migrate` between two hosts of libvirt through relays and through gateways, and cancelled in the middle. `make libvirt`
//! does more.

use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use lab::{
    guest::{Image, Load},
    libvirt::{self, Domain, Ended, Generation, Hosts, Passage, Way},
    vamoose::Keys,
};

use crate::common::{LIMIT, vamoose};

/// Never more than can be sent meanwhile.
const LOAD: Load = Load {
    fill: 32,
    hot: 4,
    rate: 100,
};

/// So slow that there is time to cancel: MiB a second.
const SLOW: &str = "4";

#[test]
fn a_guest_moves_through_relays_and_stays_when_it_is_cancelled() -> Result<()> {
    with_all_generations(Way::Relays)
}

#[test]
fn a_guest_moves_through_gateways_and_stays_when_it_is_cancelled() -> Result<()> {
    with_all_generations(Way::Gateways)
}

fn with_all_generations(way: Way) -> Result<()> {
    if Image::build_or_skip(1)?.is_none() {
        return Ok(());
    }
    for generation in libvirt::available_or_skip()? {
        let context = || format!("libvirt {}", generation.version);
        cancelled_and_moved(&generation, way).with_context(context)?;
    }
    Ok(())
}

/// QEMU 7.2 at the destination used to hang when a relay was gone with a SYNC inside, and `virsh` with it.
fn cancelled_and_moved(generation: &Generation, way: Way) -> Result<()> {
    let (image, keys) = (Image::build(8)?, Keys::make(vamoose())?);
    let hosts = Hosts::start(generation, way, &image, 1_000_000_000)?;
    let mut passage = Passage::new(&hosts, vamoose(), &keys)?;
    let mut domain = Domain::start(&hosts, &image, 192, &LOAD, false)?;
    for _ in 0..2 {
        let arguments = passage.prepare(domain.at())?;
        let ended = cancelled(&hosts, &arguments)?;
        ensure!(!ended.is_success, "it was not cancelled");
        domain.has_stayed()?;
        passage.end();
    }
    // QEMU 7.2 loses writes of a guest that runs.
    let host = domain.at().of(&hosts);
    host.virsh(["suspend", "web1"])?.success()?;
    let arguments = passage.prepare(domain.at())?;
    let arguments = [migrate(&arguments), vec!["--parallel"]].concat();
    let moved = host.virsh(arguments)?.success();
    moved.with_context(|| passage.said())?;
    domain.has_moved("paused")?;
    domain.resume()?;
    passage.finish()
}

fn cancelled(hosts: &Hosts, arguments: &[String]) -> Result<Ended> {
    let host = &hosts.hosts[0];
    let slow = vec!["--parallel", "--bandwidth", SLOW];
    let virsh = host.start_virsh([migrate(arguments), slow].concat())?;
    let start = Instant::now();
    // Refused as long as there is nothing to cancel.
    while !host.virsh(["domjobabort", "web1"])?.is_success {
        ensure!(start.elapsed() < LIMIT, "there was nothing to cancel");
    }
    virsh.finish(LIMIT)
}

fn migrate(arguments: &[String]) -> Vec<&str> {
    let command = ["migrate", "--live", "web1", "qemu+tcp://host2/system"];
    let arguments = arguments.iter().map(String::as_str);
    command.into_iter().chain(arguments).collect()
}
