//! `make siblings`: what guests that are alike cost from one host to another at 1 Gbit/s, one after the other: by QEMU alone with TLS
//! and zstd, through gateways, and through gateways with a page store. All memory is compared.
//!
//! The guests are bare machines with the memory of Linux guests, each of which booted and worked by itself ([`lab::real`]).

use std::env;

use anyhow::{Context as _, Result, ensure};
use lab::{
    net::{self, Link},
    proc,
    qemu::{self, Binary, Builder, Qemu},
    ram::{self, Fill},
    real::Real,
    vamoose::Vamoose,
};
use serde_json::json;

use super::{
    PORT,
    storage::{DOOR, OWN, credentials, gateways},
};
use crate::common::{MIB, expect_equal, number, set_up};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Qemu,
    Gateways,
    Store(&'static str),
}

const WAYS: [Way; 3] = [Way::Qemu, Way::Gateways, Way::Store("4G")];

/// Guests of one size that move one after the other.
struct Fleet {
    ram: u64,
    memories: Vec<Fill>,
    ways: &'static [Way],
}

/// What a guest's way costs.
#[derive(Clone, Copy, Default)]
struct Cost {
    sent: u64,
    seconds: f64,
    cpu: f64,
}

/// SIBLINGS_ONLY selects fleets by a part of their names, SIBLINGS_GUESTS is their greatest number, SIBLINGS_RUNS how often each
/// runs, SIBLINGS_RATE the link's rate in Mbit/s, 0 for as much as the CPU can.
#[test]
#[ignore = "an hour, as root, and 20 GB of disk: the first time the guests boot and work"]
fn siblings_are_measured() -> Result<()> {
    let (runs, rate) = (number("SIBLINGS_RUNS", 1)?, number("SIBLINGS_RATE", 1000)?);
    let only = env::var("SIBLINGS_ONLY").unwrap_or_default();
    net::available()?;
    let binary = qemu::available().last().context("there is no QEMU here")?;
    println!(
        "| guests | number | way | MB sent | of these by the first | seconds | CPU seconds | memory, MiB |\n|---|---:|---|---:|---:|---:|---:|---:|"
    );
    for (name, make) in FLEETS.iter().filter(|(name, _)| name.contains(&only)) {
        let fleet = make(binary).with_context(|| format!("guests: {name}"))?;
        for (way, run) in (0..runs).flat_map(|run| fleet.ways.iter().map(move |way| (*way, run))) {
            let what = format!("{name}, {way:?}, run {run}");
            let (costs, store) = fleet.migrate(binary, rate, way).context(what)?;
            let sum = |value: fn(&Cost) -> f64| costs.iter().map(value).sum::<f64>();
            println!(
                "| {name} | {} | {way:?} | {:.1} | {:.1} | {:.2} | {:.2} | {:.0} |",
                costs.len(),
                sum(|it| it.sent as f64) / 1e6,
                costs.first().map_or(0.0, |it| it.sent as f64) / 1e6,
                sum(|it| it.seconds),
                sum(|it| it.cpu),
                store / 1_048_576.0,
            );
        }
    }
    Ok(())
}

/// Guests that are equal, through gateways with a store that is too small, and then through new ones.
#[test]
fn evictions_and_restarts_cost_only_bytes() -> Result<()> {
    const RAM: u64 = 32 * MIB;
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let Some(link) = net::link_or_skip(None)? else {
        return Ok(());
    };
    for run in ["first", "after the restart"] {
        let (_keys, both) = gateways(&link, "method = \"zstd-frames\"\npage-store = \"16M\"")?;
        let mut sent = Vec::new();
        for _ in 0..3 {
            let files = Fill::Files(ram::host_files(RAM)?);
            let (mut source, mut destination) = pair(&binary, &link, RAM, (files, 1))?;
            for qemu in [&mut source, &mut destination] {
                set_up(qemu, 2, "none")?;
            }
            sent.push(move_one(&link, Some(&both), &mut source, &mut destination)?.sent);
        }
        ensure!(sent[1] < sent[0] && sent[2] < sent[0], "{run}: {sent:?}");
    }
    Ok(())
}

type Make = fn(&Binary) -> Result<Fleet>;

const FLEETS: [(&str, Make); 7] = [
    ("freshly booted, 256 MiB", |binary| {
        siblings(binary, Real::Base, 256 * MIB, 8)
    }),
    ("many freshly booted, 256 MiB", |binary| {
        siblings(binary, Real::Base, 256 * MIB, 32)
    }),
    ("PostgreSQL after pgbench, 512 MiB", |binary| {
        siblings(binary, Real::Postgres, 512 * MIB, 8)
    }),
    ("home after pgbench, 512 MiB", |binary| {
        let after = Real::Postgres.sibling(binary, 512 * MIB, 0)?;
        let before = after.with_extension("before");
        Ok(Fleet::new(512 * MIB, [before, after].map(Fill::Image)))
    }),
    ("strangers: random, 512 MiB", |_| {
        Ok(Fleet::new(512 * MIB, vec![Fill::Random; 2]))
    }),
    ("strangers: other images, 512 MiB", |binary| {
        let files = ram::host_files(512 * MIB)?;
        let real = Real::Postgres.sibling(binary, 512 * MIB, 0)?;
        let memories = [Fill::Files(files), Fill::Image(real)];
        Ok(Fleet::new(512 * MIB, memories))
    }),
    ("freshly booted, small store", |binary| {
        let mut fleet = siblings(binary, Real::Base, 256 * MIB, 8)?;
        fleet.ways = &[Way::Store("16M"), Way::Store("64M")];
        Ok(fleet)
    }),
];

fn siblings(binary: &Binary, kind: Real, ram: u64, count: usize) -> Result<Fleet> {
    let most = number("SIBLINGS_GUESTS", count)?;
    let memories =
        (0..count.min(most)).map(|number| kind.sibling(binary, ram, number).map(Fill::Image));
    Ok(Fleet::new(ram, memories.collect::<Result<Vec<_>>>()?))
}

impl Fleet {
    fn new(ram: u64, memories: impl Into<Vec<Fill>>) -> Self {
        Self {
            ram,
            memories: memories.into(),
            ways: &WAYS,
        }
    }

    /// Moves the guests. Returns the cost of each, and the memory of the destination's gateway, in bytes.
    fn migrate(&self, binary: &Binary, rate: u64, way: Way) -> Result<(Vec<Cost>, f64)> {
        let link = Link::new((rate > 0).then_some(rate * 1_000_000))?;
        let creds = credentials()?;
        let start = |lines: &str| gateways(&link, lines).map(Some);
        let gateways = match way {
            Way::Qemu => None,
            Way::Gateways => start("")?,
            Way::Store(size) => start(&format!("page-store = \"{size}\""))?,
        };
        let gateways = gateways.as_ref().map(|(_, both)| both);
        let mut costs = Vec::new();
        for (number, memory) in (0..).zip(&self.memories) {
            let content = (memory.clone(), number);
            let (mut source, mut destination) = pair(binary, &link, self.ram, content)?;
            let both = [(&mut source, "client"), (&mut destination, "server")];
            for (qemu, endpoint) in both {
                match way {
                    Way::Qemu => use_tls(qemu, endpoint, &creds.path().display().to_string())?,
                    _ => set_up(qemu, 2, "none")?,
                }
            }
            costs.push(move_one(&link, gateways, &mut source, &mut destination)?);
        }
        let store = gateways.map_or(Ok(0), |[_, far]| far.peak_memory())?;
        Ok((costs, store as f64))
    }
}

/// A source with this content and seed, and its destination.
fn pair(binary: &Binary, link: &Link, ram: u64, content: (Fill, u64)) -> Result<(Qemu, Qemu)> {
    let machine = Builder::bare(binary, ram);
    let source = machine.clone().namespace(link.source.name());
    let destination = machine.namespace(link.destination.name()).incoming();
    Ok((
        source.content(content.0, content.1).start()?,
        destination.start()?,
    ))
}

fn move_one(
    link: &Link,
    gateways: Option<&[Vamoose; 2]>,
    source: &mut Qemu,
    destination: &mut Qemu,
) -> Result<Cost> {
    let (waits_at, goes_to) = match gateways {
        Some(_) => (OWN.to_owned(), DOOR.to_owned()),
        None => {
            let address = link.destination.address().to_string();
            (address.clone(), address)
        }
    };
    let gateways: Vec<_> = gateways.into_iter().flatten().collect();
    let mut processes = vec![source.pid(), destination.pid()];
    processes.extend(gateways.iter().map(|gateway| gateway.pid()));
    let cpu = || -> Result<f64> { processes.iter().map(|pid| proc::cpu_seconds(*pid)).sum() };
    let (before, sent) = (cpu()?, link.source.traffic()?.sent);
    destination
        .qmp
        .migrate_incoming(&format!("tcp:{waits_at}:{PORT}"))?;
    source.qmp.migrate(&format!("tcp:{goes_to}:{PORT}"))?;
    let account = expect_equal(source, destination, &gateways)?;
    let milliseconds = account["total-time"].as_f64().context("no time")?;
    Ok(Cost {
        sent: link.source.traffic()?.sent - sent,
        seconds: milliseconds / 1000.0,
        cpu: cpu()? - before,
    })
}

/// Sets up QEMU's own zstd over its own TLS.
fn use_tls(qemu: &mut Qemu, endpoint: &str, folder: &str) -> Result<()> {
    set_up(qemu, 2, "zstd")?;
    let mut creds = json!({ "qom-type": "tls-creds-psk", "id": "creds", "dir": folder });
    creds["endpoint"] = json!(endpoint);
    qemu.qmp.execute("object-add", creds)?;
    qemu.qmp
        .set_parameters(json!({ "tls-creds": "creds", "tls-hostname": "" }))
}
