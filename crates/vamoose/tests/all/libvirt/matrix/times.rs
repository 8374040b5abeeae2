//! The duration of `virsh migrate`, directly and through gateways, alternating, over a link of 1 Gbit/s.

use anyhow::{Context, Result};
use lab::{
    guest::{Image, Load},
    median,
    vamoose::Keys,
};

use super::{
    RATE, generations,
    migration::{self, GUEST},
};
use crate::{
    common::{number, vamoose},
    libvirt::hosts::{Domain, Hosts, Passage, Storage, Way},
};

struct Contender {
    name: &'static str,
    way: Way,
    flags: &'static [&'static str],
    /// Whether QEMU compresses.
    compresses: bool,
}

const CONTENDERS: [Contender; 5] = [
    Contender {
        name: "direct",
        way: Way::Direct,
        flags: &["--parallel"],
        compresses: false,
    },
    Contender {
        name: "direct, zstd of QEMU",
        way: Way::Direct,
        flags: &["--parallel", "--compressed", "--comp-methods", "zstd"],
        compresses: true,
    },
    Contender {
        name: "gateways, auto, TLS",
        way: Way::Gateways,
        flags: &["--parallel"],
        compresses: false,
    },
    Contender {
        name: "direct, one stream",
        way: Way::Direct,
        flags: &[],
        compresses: false,
    },
    Contender {
        name: "gateways, one stream",
        way: Way::Gateways,
        flags: &[],
        compresses: false,
    },
];

/// MiB.
const RAM: u32 = 1024;

const LOAD: Load = Load {
    fill: 700,
    hot: 8,
    rate: 500,
};

/// The seconds that `virsh` ran, the downtime in milliseconds by libvirt, and the bytes that were sent to the other host.
struct Took {
    seconds: f64,
    downtime: f64,
    sent: f64,
}

/// LIBVIRT_ROUNDS is the number of measurements of each.
#[test]
#[ignore = "half an hour, as root"]
fn times() -> Result<()> {
    let rounds: usize = number("LIBVIRT_ROUNDS", 3)?;
    let (keys, image) = (Keys::make(vamoose())?, Image::build(16)?);
    println!("| libvirt | | virsh, s | downtime, ms | sent, MB |\n|---|---|---|---|---|");
    for generation in generations()? {
        let can = |it: &&Contender| !it.compresses || generation.has_compression();
        let contenders: Vec<_> = CONTENDERS.iter().filter(can).collect();
        let mut took: Vec<Vec<Took>> = contenders.iter().map(|_| Vec::new()).collect();
        for round in 0..rounds {
            for turn in 0..contenders.len() {
                let at = (round + turn) % contenders.len();
                let hosts = Hosts::start(&generation, contenders[at].way, &image, RATE)?;
                let mut passage = Passage::new(&hosts, &keys)?;
                let found = migrate(&hosts, &mut passage, &image, contenders[at].flags);
                took[at].push(found.with_context(|| contenders[at].name)?);
            }
        }
        for (contender, took) in contenders.iter().zip(&took) {
            let seconds = spread(took.iter().map(|it| it.seconds), 2);
            let downtime = spread(took.iter().map(|it| it.downtime), 0);
            let sent = spread(took.iter().map(|it| it.sent / 1e6), 0);
            let (version, name) = (generation.version, contender.name);
            println!("| {version} | {name} | {seconds} | {downtime} | {sent} |");
        }
    }
    Ok(())
}

fn migrate(
    hosts: &Hosts,
    passage: &mut Passage<'_>,
    image: &Image,
    flags: &[&str],
) -> Result<Took> {
    let mut domain = Domain::start(hosts, image, RAM, &LOAD, Storage::Shared)?;
    let before = hosts.sent()?;
    let virsh = migration::start(hosts, &domain, passage, flags)?;
    let ended = migration::has_succeeded(virsh, passage)?;
    let sent = (hosts.sent()? - before) as f64;
    domain.has_moved("running")?;
    let at = domain.at().of(hosts);
    let info = at.virsh(["domjobinfo", GUEST, "--completed"])?.success()?;
    let downtime = migration::number_in(&info, "Total downtime").context("no downtime")?;
    Ok(Took {
        seconds: ended.took.as_secs_f64(),
        downtime,
        sent,
    })
}

/// The median, minimum and maximum.
fn spread(values: impl Iterator<Item = f64> + Clone, digits: usize) -> String {
    let (least, most) = values
        .clone()
        .fold((f64::MAX, 0.0_f64), |(least, most), it| {
            (least.min(it), most.max(it))
        });
    let middle = median(values).unwrap_or(f64::NAN);
    format!("{middle:.digits$} ({least:.digits$}-{most:.digits$})")
}
