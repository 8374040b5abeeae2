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
    vamoose::{Keys, Vamoose},
};
use rustix::{
    process::{Uid, geteuid},
    thread::set_thread_res_uid,
};

use super::{Host, Hosts, addresses};
use crate::common::{LIMIT, MIB, number, set_up, vamoose};

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
    let migrations = number("LOAD_MIGRATIONS", 64)?;
    let strangers: u16 = number("LOAD_STRANGERS", 10_000)?;
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
    let crowd = Crowd::new(migrations, Ok)?;
    let gateways = crowd.gateways();
    let mut guests = crowd.guests(&qemu)?;
    let meter = Meter::start(&gateways.map(Vamoose::pid))?;
    let since = Instant::now();
    let failed = crowd.moves(&mut guests, strangers)?;
    ensure!(
        failed.is_empty(),
        "{} of {migrations} failed:\n{}\n{}",
        failed.len(),
        failed.join("\n"),
        crowd.said()
    );
    Ok(Some(Cost {
        strangers,
        seconds: since.elapsed().as_secs_f64(),
        cpu: meter.read()?,
        peaks: [gateways[0].peak_memory()?, gateways[1].peak_memory()?],
    }))
}
/// Two hosts that allow many concurrent migrations.
pub(crate) struct Crowd {
    hosts: Hosts,
    ports: RangeInclusive<u16>,
}

impl Crowd {
    /// The near gateway reaches the other one by what `through` makes of that one's address.
    pub(crate) fn new(
        migrations: u16,
        through: impl FnOnce(SocketAddr) -> Result<SocketAddr>,
    ) -> Result<Self> {
        let ports = 49_152..=49_152 + (migrations - 1);
        let hosts = hosts(&ports, through)?;
        Ok(Self { hosts, ports })
    }

    /// That of the source, and that of the destination.
    pub(crate) fn gateways(&self) -> [&Vamoose; 2] {
        [&self.hosts.near.gateway, &self.hosts.far.gateway]
    }

    /// What the gateways said.
    pub(crate) fn said(&self) -> String {
        let [near, far] = self.gateways().map(Vamoose::stderr);
        format!("the source's gateway:\n{near}\nthe destination's gateway:\n{far}")
    }

    /// Guests with unique memory, each with the QEMU that waits for it.
    pub(crate) fn guests(&self, qemu: &Binary) -> Result<Vec<(Qemu, Qemu)>> {
        let ports = self.ports.clone();
        ports.map(|port| guest(&self.hosts, qemu, port)).collect()
    }

    /// Starts all migrations among strangers, and compares the memory of each guest that moved. Returns why others did not; these
    /// Starts all migrations among strangers, and compares the memory of each guest that moved. Returns why others have stayed.
    pub(crate) fn moves(
        &self,
        guests: &mut [(Qemu, Qemu)],
        strangers: usize,
    ) -> Result<Vec<String>> {
        let Self { hosts, ports } = self;
        // A quarter of the strangers are there before the first migration.
        let begun = Barrier::new(3);
        thread::scope(|scope| {
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
            let moved = move_all(hosts, guests, ports);
            for place in places {
                place
                    .join()
                    .map_err(|_| anyhow!("the strangers panicked"))??;
            }
            moved
        })
    }
}

/// Two hosts that allow as many concurrent migrations as there are ports. The gateways connect from the hosts' own addresses, as
/// strangers come from another address.
fn hosts(
    ports: &RangeInclusive<u16>,
    through: impl FnOnce(SocketAddr) -> Result<SocketAddr>,
) -> Result<Hosts> {
    let keys = Keys::make(vamoose())?;
    let [near, near_door, far, far_door] = addresses();
    let host = |own: Ipv4Addr, door: Ipv4Addr, other: SocketAddr, key, of_other: &str| {
        let of_other = of_other.split_whitespace().next().context("no key")?;
        let most = ports.len();
        let ports = format!("ports = \"{}-{}\"", ports.start(), ports.end());
        let text = format!(
            "listen = [\"{own}:4440\"]\nalias = \"{own}\"\n{ports}\nkeys = {key:?}\n\
             peers.other = {{ alias = \"{door}\", {ports}, to = [\"{other}\"], bind = [\"{own}\"], \
             key = \"{of_other}\", migrations = {most} }}\n",
        );
        Host::start(own, door, text, &[])
    };
    let [of_near, of_far] = &keys.public;
    let to_near = (near, 4440).into();
    let far_host = host(far, far_door, to_near, &keys.destination, of_near)?;
    let to_far = through((far, 4440).into())?;
    Ok(Hosts {
        near: host(near, near_door, to_far, &keys.source, of_far)?,
        far: far_host,
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

fn move_all(
    hosts: &Hosts,
    guests: &mut [(Qemu, Qemu)],
    ports: &RangeInclusive<u16>,
) -> Result<Vec<String>> {
    for ((source, _), port) in guests.iter_mut().zip(ports.clone()) {
        hosts.near.sends(source, port)?;
    }
    let mut failed = Vec::new();
    for ((source, destination), port) in guests.iter_mut().zip(ports.clone()) {
        let context = || format!("port {port}");
        let ended = source.qmp.wait_migration(&["completed", "failed"], LIMIT);
        let ended = ended.with_context(context)?;
        if ended["status"] == "completed" {
            let arrived = destination.qmp.wait_migration(&["completed"], LIMIT);
            arrived.with_context(context)?;
            ram::compare(source.ram(), destination.ram()).with_context(context)?;
            continue;
        }
        let status = source.qmp.query_status()?;
        ensure!(status != "postmigrate", "port {port}: the guest is lost");
        failed.push(format!("port {port}: {}", ended["error-desc"]));
    }
    Ok(failed)
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
