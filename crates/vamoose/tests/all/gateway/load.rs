//! Many concurrent migrations among many foreign connections: no guest is lost, and no byte of its memory.
//!
//! Strangers connect to the aliases as a user who is not accepted, and to the gateway's port as a host without a key. Some close at
//! once, some send garbage, and some stay and are silent.

use std::{
    collections::VecDeque,
    io::Write as _,
    net::{Ipv4Addr, SocketAddr, TcpStream},
    ops::RangeInclusive,
    sync::Barrier,
    thread,
    time::Instant,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use lab::{
    cpu::Meter,
    qemu::{self, Binary, Builder, Qemu},
    ram::{self, Fill},
    skipped,
    vamoose::Keys,
};
use rustix::{
    process::{Uid, geteuid},
    thread::set_thread_res_uid,
};

use super::{Host, Hosts, addresses};
use crate::common::{LIMIT, MIB, set_up, vamoose};

/// A guest with all kinds of pages.
const RAM: u64 = 16 * MIB;
const CHANNELS: u8 = 2;

/// Number of silent strangers at one address: more than may be in their handshake.
const SILENT: usize = 300;

/// User `nobody`, who is not in `users`.
const STRANGER: u32 = 65_534;

#[test]
fn migrations_at_once_among_strangers() -> Result<()> {
    run(8, 500).map(drop)
}

/// `make load`: LOAD_MIGRATIONS at once, among LOAD_STRANGERS.
#[test]
#[ignore = "a minute, and 3 GiB of memory"]
fn migrations_at_once_among_many_strangers() -> Result<()> {
    let number = |name: &'static str, default| {
        let text = std::env::var(name).ok();
        text.map_or(Ok(default), |text| text.parse::<u16>().context(name))
    };
    let migrations = number("LOAD_MIGRATIONS", 64)?;
    let strangers = number("LOAD_STRANGERS", 10_000)?;
    if let Some(cost) = run(migrations, strangers.into())? {
        cost.print(migrations);
    }
    Ok(())
}

/// Result of a run.
struct Cost {
    strangers: usize,
    seconds: f64,
    /// By gateway: the near one, the far one.
    cpu: Vec<f64>,
    peaks: [u64; 2],
}

impl Cost {
    fn print(&self, migrations: u16) {
        println!(
            "{migrations} migrations of {} MiB at once among {} strangers: 0 lost, all memory equal, {:.1} s",
            RAM / MIB,
            self.strangers,
            self.seconds
        );
        for (name, (cpu, peak)) in ["source", "destination"]
            .iter()
            .zip(self.cpu.iter().zip(self.peaks))
        {
            println!(
                "gateway of the {name}: peak {:.1} MiB resident, {cpu:.2} s CPU, {:.1} ms a migration",
                peak as f64 / MIB as f64,
                cpu * 1000.0 / f64::from(migrations)
            );
        }
    }
}

/// `None` if this machine cannot run it.
fn run(migrations: u16, strangers: usize) -> Result<Option<Cost>> {
    let Some(qemu) = qemu::newest_or_skip()? else {
        return Ok(None);
    };
    if !geteuid().is_root() {
        skipped("not root: nobody else can be a stranger")?;
        return Ok(None);
    }
    let ports = 49_152..=49_152 + (migrations - 1);
    let hosts = hosts(&ports)?;
    let mut guests = ports
        .clone()
        .map(|port| guest(&hosts, &qemu, port))
        .collect::<Result<Vec<_>>>()?;
    let gateways = [&hosts.near.gateway, &hosts.far.gateway];
    let meter = Meter::start(&gateways.map(|gateway| gateway.pid()))?;
    // A quarter of the strangers are there before the first migration.
    let begun = Barrier::new(3);
    let seconds = thread::scope(|scope| {
        let spawn = |places: Vec<SocketAddr>| {
            let strangers = Strangers {
                places,
                number: strangers / 2,
                begun: &begun,
            };
            scope.spawn(move || strangers.come())
        };
        let doors = ports.clone().map(|port| (hosts.near.door, port).into());
        let link = [hosts.near.own, hosts.far.own].map(|own| (own, 4440).into());
        let places = [spawn(doors.collect()), spawn(link.to_vec())];
        begun.wait();
        let since = Instant::now();
        let moved = move_all(&hosts, &mut guests, &ports);
        let seconds = since.elapsed().as_secs_f64();
        for place in places {
            place
                .join()
                .map_err(|_| anyhow!("the strangers panicked"))??;
        }
        moved.map(|()| seconds)
    })?;
    Ok(Some(Cost {
        strangers,
        seconds,
        cpu: meter.read()?,
        peaks: [gateways[0].peak_memory()?, gateways[1].peak_memory()?],
    }))
}

/// Two hosts that allow as many concurrent migrations as there are ports. The gateways connect from the hosts' own addresses, as
/// strangers come from another address.
fn hosts(ports: &RangeInclusive<u16>) -> Result<Hosts> {
    let keys = Keys::make(vamoose())?;
    let [near, near_door, far, far_door] = addresses();
    let host = |own: Ipv4Addr, door: Ipv4Addr, other: Ipv4Addr, key, of_other: &str| {
        let of_other = of_other.split_whitespace().next().context("no key")?;
        let most = ports.len();
        let ports = format!("ports = \"{}-{}\"", ports.start(), ports.end());
        let text = format!(
            "listen = [\"{own}:4440\"]\nalias = \"{own}\"\n{ports}\nkeys = {key:?}\n\
             peers.other = {{ alias = \"{door}\", {ports}, to = [\"{other}:4440\"], bind = [\"{own}\"], \
             key = \"{of_other}\", migrations = {most} }}\n",
        );
        Host::start(own, door, text, &[])
    };
    Ok(Hosts {
        near: host(near, near_door, far, &keys.source, &keys.public[1])?,
        far: host(far, far_door, near, &keys.destination, &keys.public[0])?,
        _keys: keys,
    })
}

/// A guest with unique memory, and the QEMU that waits for it at `port`.
fn guest(hosts: &Hosts, qemu: &Binary, port: u16) -> Result<(Qemu, Qemu)> {
    let content = Builder::bare(qemu, RAM).content(Fill::Mixed, port.into());
    let mut source = content.start()?;
    let mut destination = Builder::bare(qemu, RAM).incoming().start()?;
    for qemu in [&mut source, &mut destination] {
        set_up(qemu, CHANNELS, "none")?;
    }
    hosts.far.receives(&mut destination, port)?;
    Ok((source, destination))
}

/// Starts all migrations, and compares each guest's memory.
fn move_all(hosts: &Hosts, guests: &mut [(Qemu, Qemu)], ports: &RangeInclusive<u16>) -> Result<()> {
    for ((source, _), port) in guests.iter_mut().zip(ports.clone()) {
        hosts.near.sends(source, port)?;
    }
    let mut lost = Vec::new();
    for ((source, destination), port) in guests.iter_mut().zip(ports.clone()) {
        let completed = source.qmp.wait_migration(&["completed"], LIMIT);
        let arrived = completed.and_then(|_| destination.qmp.wait_migration(&["completed"], LIMIT));
        let equal = arrived.and_then(|_| Ok(ram::compare(source.ram(), destination.ram())?));
        lost.extend(equal.err().map(|error| format!("port {port}: {error:#}")));
    }
    ensure!(
        lost.is_empty(),
        "{} of {} are lost:\n{}\nthe source's gateway:\n{}\nthe destination's gateway:\n{}",
        lost.len(),
        guests.len(),
        lost.join("\n"),
        hosts.near.gateway.stderr(),
        hosts.far.gateway.stderr()
    );
    Ok(())
}

/// Strangers that connect to some addresses, one after the other as fast as possible.
struct Strangers<'a> {
    places: Vec<SocketAddr>,
    number: usize,
    begun: &'a Barrier,
}

impl Strangers<'_> {
    fn come(&self) -> Result<()> {
        // Only for this thread.
        let uid = Uid::from_raw(STRANGER);
        let changed = set_thread_res_uid(uid, uid, uid);
        let (mut silent, mut came) = (VecDeque::new(), 0);
        let mut come = |at: &SocketAddr| -> Result<()> {
            let mut stranger = TcpStream::connect_timeout(at, LIMIT)?;
            match came % 3 {
                0 => drop(stranger),
                // The gateway may have closed the connection already.
                1 => drop(stranger.write_all(b"GET / HTTP/1.1\r\n\r\n")),
                _ => silent.push_back(stranger),
            }
            if silent.len() > SILENT {
                silent.pop_front();
            }
            came += 1;
            Ok(())
        };
        let mut places = self.places.iter().cycle();
        let mut next = || places.next().context("no place");
        let first = (0..self.number / 4).try_for_each(|_| come(next()?));
        // Threads that wait must go on, even after a failure.
        self.begun.wait();
        changed?;
        first?;
        (self.number / 4..self.number).try_for_each(|_| come(next()?))
    }
}
