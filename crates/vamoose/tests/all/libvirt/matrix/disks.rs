//! What `virsh migrate --copy-storage-all` costs for a disk of 1 GiB, directly, with libvirt's TLS, and through gateways, over a link of
//! 1 Gbit/s.

use anyhow::{Context as _, Result};
use lab::{guest::Image, median, vamoose::Keys};

use super::{
    RATE, generations,
    migration::{self, QUIET, RAM},
};
use crate::{
    common::{number, vamoose},
    libvirt::hosts::{Copied, Domain, Generation, Hosts, Passage, Storage, Way},
};

const CONTENDERS: [(&str, Way, &[&str]); 3] = [
    ("direct", Way::Direct, &["--parallel"]),
    ("direct, TLS", Way::Direct, &["--parallel", "--tls"]),
    ("gateways", Way::Gateways, &["--parallel"]),
];

/// Half of it is zeros, the other half this machine's files.
const DISK: Storage = Storage::Copied(Copied::Qcow2, 1024);

/// LIBVIRT_ROUNDS is the number of measurements of each.
#[test]
#[ignore = "minutes, as root"]
fn disks() -> Result<()> {
    let rounds: usize = number("LIBVIRT_ROUNDS", 3)?;
    let (keys, image) = (Keys::make(vamoose())?, Image::build(16)?);
    println!("| libvirt | | virsh, s | sent, MB |\n|---|---|---:|---:|");
    for generation in generations()? {
        for (name, way, flags) in CONTENDERS {
            let runs = (0..rounds).map(|_| copy(&generation, way, flags, &image, &keys));
            let runs = runs.collect::<Result<Vec<_>>>().context(name)?;
            let [seconds, sent] = [0, 1].map(|at| median(runs.iter().map(|run| run[at])));
            let (seconds, sent) = seconds.zip(sent).context("no rounds")?;
            println!(
                "| {} | {name} | {seconds:.1} | {:.0} |",
                generation.version,
                sent / 1e6
            );
        }
    }
    Ok(())
}

/// The seconds that `virsh` ran, and the bytes that were sent to the other host.
fn copy(
    generation: &Generation,
    way: Way,
    flags: &[&str],
    image: &Image,
    keys: &Keys,
) -> Result<[f64; 2]> {
    let hosts = Hosts::start(generation, way, image, RATE)?;
    let mut passage = Passage::new(&hosts, keys)?;
    if flags.contains(&"--tls") {
        migration::certify(&hosts)?;
    }
    let mut domain = Domain::start(&hosts, image, RAM, &QUIET, DISK)?;
    let before = hosts.sent()?;
    let virsh = migration::start(&hosts, &domain, &mut passage, flags)?;
    let ended = migration::has_succeeded(virsh, &passage)?;
    let sent = hosts.sent()? - before;
    domain.has_moved("running")?;
    domain.ends_well()?;
    Ok([ended.took.as_secs_f64(), sent as f64])
}
