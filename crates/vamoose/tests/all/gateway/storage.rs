//! `make storage`: what a disk costs that QEMU mirrors over NBD, as for `virsh migrate --copy-storage-all`: directly, over QEMU's TLS,
//! and through gateways. Half of the disk is zeros, a quarter this machine's files, and a quarter random.

use std::{
    env, fs,
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use lab::{
    net::{self, End, Link, Namespace},
    proc,
    qemu::{self, Binary, Builder, Qemu},
    vamoose::{Keys, Vamoose},
};
use serde_json::json;
use tempfile::TempDir;

use super::{PORT, PORTS};
use crate::common::{LIMIT, MIB, number, vamoose};

/// The link's rate in Mbit/s; none for as much as the CPU can.
const RATES: [Option<u64>; 2] = [Some(1000), None];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Direct,
    Tls,
    Gateways,
}

const WAYS: [Way; 3] = [Way::Direct, Way::Tls, Way::Gateways];

/// What a disk's way costs.
#[derive(Clone)]
struct Cost {
    seconds: f64,
    cpu: f64,
    sent: f64,
}

/// STORAGE_SIZE is the disk's size in MiB, STORAGE_RUNS how often each case runs, in turn, and STORAGE_ONLY a part of the names of
/// the rows that run.
#[test]
#[ignore = "minutes, as root"]
fn a_mirrored_disk_is_measured() -> Result<()> {
    let (size, runs) = (number("STORAGE_SIZE", 4096)?, number("STORAGE_RUNS", 3)?);
    net::available()?;
    let binary = qemu::available().last().context("there is no QEMU here")?;
    let folder = TempDir::new()?;
    let disk = folder.path().join("disk");
    make_disk(&disk, size)?;
    let only = env::var("STORAGE_ONLY").unwrap_or_default();
    println!("A disk of {size} MiB, medians of {runs}:\n");
    println!("| link | way | seconds | sent, MB | CPU seconds |\n|---|---|---:|---:|---:|");
    for rate in RATES {
        let link = rate.map_or("open".to_owned(), |rate| format!("{rate} Mbit/s"));
        let ways = WAYS
            .iter()
            .filter(|way| format!("{link} {way:?}").contains(&only));
        let ways: Vec<_> = ways.collect();
        let mut costs = vec![Vec::new(); ways.len()];
        for _ in 0..runs {
            for (way, costs) in ways.iter().zip(&mut costs) {
                let cost = mirror(binary, &disk, rate, **way, |_, _| Ok(()));
                costs.push(cost.with_context(|| format!("{way:?} at {rate:?}"))?);
            }
        }
        for (way, costs) in ways.iter().zip(&costs) {
            let median =
                |value: fn(&Cost) -> f64| lab::median(costs.iter().map(value)).context("no runs");
            let (seconds, cpu) = (median(|it| it.seconds)?, median(|it| it.cpu)?);
            let sent = median(|it| it.sent)? / 1e6;
            println!("| {link} | {way:?} | {seconds:.2} | {sent:.0} | {cpu:.2} |");
        }
    }
    Ok(())
}

/// Requests of 28 bytes, as NBD has them, each answered before the next.
#[test]
#[ignore = "as root"]
fn a_round_trip_is_measured() -> Result<()> {
    const REQUESTS: usize = 20_000;
    net::available()?;
    let link = Link::new(None)?;
    let _gateways = gateways(&link, "")?;
    println!("| round trip of 28 bytes | median, us | 99 of 100, us |\n|---|---:|---:|");
    for way in [Way::Direct, Way::Gateways] {
        let (waits_at, goes_to) = addresses(way, &link);
        let listener = in_namespace(&link.destination, || TcpListener::bind((&*waits_at, PORT)))?;
        let client = in_namespace(&link.source, || TcpStream::connect((&*goes_to, PORT)))?;
        let times = thread::scope(|scope| {
            scope.spawn(move || -> Result<()> {
                let (mut server, _) = listener.accept()?;
                server.set_nodelay(true)?;
                let mut request = [0; 28];
                while server.read_exact(&mut request).is_ok() {
                    server.write_all(&request)?;
                }
                Ok(())
            });
            let mut client = client;
            client.set_nodelay(true)?;
            let mut times = Vec::new();
            for number in 0..REQUESTS {
                let start = Instant::now();
                client.write_all(&[number.to_be_bytes()[7]; 28])?;
                client.read_exact(&mut [0; 28])?;
                times.push(start.elapsed());
            }
            anyhow::Ok(times)
        });
        let mut times = times?;
        times.sort();
        let [median, most] = [REQUESTS / 2, REQUESTS / 100 * 99].map(|at| times[at].as_micros());
        println!("| {way:?} | {median} | {most} |");
    }
    Ok(())
}

/// Opens sockets in a namespace, on a thread of its own.
fn in_namespace<T: Send>(
    at: &Namespace,
    open: impl FnOnce() -> std::io::Result<T> + Send,
) -> Result<T> {
    thread::scope(|scope| {
        let opened = scope.spawn(|| -> Result<T> {
            at.enter()?;
            Ok(open()?)
        });
        opened.join().map_err(|_| anyhow!("a thread panicked"))?
    })
}

/// Where a server waits at the destination, and where its client connects to.
fn addresses(way: Way, link: &Link) -> (String, String) {
    match way {
        Way::Gateways => (OWN.to_owned(), DOOR.to_owned()),
        Way::Direct | Way::Tls => {
            let address = link.destination.address().to_string();
            (address.clone(), address)
        }
    }
}

/// STORAGE_CUTS is the number of cuts: one in the middle of each disk, for 3 s.
#[test]
#[ignore = "minutes, as root"]
fn a_disk_survives_cuts() -> Result<()> {
    const SIZE: u64 = 512;
    let cuts = number("STORAGE_CUTS", 20)?;
    net::available()?;
    let binary = qemu::available().last().context("there is no QEMU here")?;
    let folder = TempDir::new()?;
    let disk = folder.path().join("disk");
    make_disk(&disk, SIZE)?;
    for number in 0..cuts {
        let at = SIZE * MIB / cuts * number;
        let cut = |source: &mut Qemu, link: &Link| {
            while copied(source)? < at {}
            let wire = &link.wires[0];
            match number % 2 {
                0 => wire.pull(End::Source)?,
                _ => wire.lose(End::Source)?,
            }
            thread::sleep(Duration::from_secs(3));
            wire.deliver()?;
            wire.plug()
        };
        let cost = mirror(binary, &disk, Some(1000), Way::Gateways, cut);
        let cost = cost.with_context(|| format!("cut {number}, after {at} bytes"))?;
        println!("cut after {} MiB: equal, {:.1} s", at / MIB, cost.seconds);
    }
    Ok(())
}

/// Bytes that a mirror has copied.
fn copied(source: &mut Qemu) -> Result<u64> {
    let jobs = source.qmp.execute("query-block-jobs", json!({}))?;
    jobs[0]["offset"].as_u64().context("no job")
}

/// Mirrors a disk to another host, calls `then` meanwhile, compares both disks, and returns the cost.
fn mirror(
    binary: &Binary,
    disk: &Path,
    rate: Option<u64>,
    way: Way,
    then: impl FnOnce(&mut Qemu, &Link) -> Result<()>,
) -> Result<Cost> {
    let link = Link::new(rate.map(|rate| rate * 1_000_000))?;
    let copy = TempDir::new()?;
    let copied = copy.path().join("disk");
    fs::File::create(&copied)?.set_len(disk.metadata()?.len())?;
    let creds = (way == Way::Tls).then(credentials).transpose()?;
    let mut source = qemu(binary, &link.source, disk, creds.as_ref(), "client")?;
    let mut destination = qemu(binary, &link.destination, &copied, creds.as_ref(), "server")?;
    let gateways = match way {
        Way::Gateways => Some(gateways(&link, "")?),
        Way::Direct | Way::Tls => None,
    };
    let (waits_at, goes_to) = addresses(way, &link);
    let mut server = json!({
        "addr": { "type": "inet", "data": { "host": waits_at, "port": PORT.to_string() } },
    });
    let mut client = json!({
        "driver": "nbd", "node-name": "far", "export": "disk",
        "server": { "type": "inet", "host": goes_to, "port": PORT.to_string() },
    });
    if creds.is_some() {
        for settings in [&mut server, &mut client] {
            settings["tls-creds"] = json!("creds");
        }
    }
    destination.qmp.execute("nbd-server-start", server)?;
    let export = json!({ "type": "nbd", "id": "disk", "node-name": "disk", "writable": true });
    destination.qmp.execute("block-export-add", export)?;
    let mut processes = vec![source.pid(), destination.pid()];
    processes.extend(gateways.iter().flat_map(|(_, both)| both).map(Vamoose::pid));
    let cpu = || -> Result<f64> { processes.iter().map(|pid| proc::cpu_seconds(*pid)).sum() };
    let (before, sent, start) = (cpu()?, link.source.traffic()?.sent, Instant::now());
    source.qmp.execute("blockdev-add", client)?;
    let job = json!({ "job-id": "mirror", "device": "disk", "target": "far", "sync": "full" });
    source.qmp.execute("blockdev-mirror", job)?;
    then(&mut source, &link)?;
    source
        .qmp
        .wait_event("BLOCK_JOB_READY", |_| true, Duration::from_secs(300))?;
    let cost = Cost {
        seconds: start.elapsed().as_secs_f64(),
        cpu: cpu()? - before,
        sent: (link.source.traffic()?.sent - sent) as f64,
    };
    source
        .qmp
        .execute("block-job-cancel", json!({ "device": "mirror" }))?;
    source
        .qmp
        .wait_event("BLOCK_JOB_COMPLETED", |_| true, LIMIT)?;
    ensure!(is_equal(disk, &copied)?, "the disks differ");
    Ok(cost)
}

fn qemu(
    binary: &Binary,
    at: &Namespace,
    disk: &Path,
    creds: Option<&TempDir>,
    endpoint: &str,
) -> Result<Qemu> {
    let disk = format!(
        "raw,node-name=disk,file.driver=file,file.filename={}",
        disk.display()
    );
    let mut machine = Builder::bare(binary, 16 * MIB).namespace(at.name());
    machine = machine.argument("-blockdev").argument(disk);
    if let Some(creds) = creds {
        let creds = format!(
            "tls-creds-psk,id=creds,endpoint={endpoint},dir={}",
            creds.path().display()
        );
        machine = machine.argument("-object").argument(creds);
    }
    machine.start()
}

/// A key that both QEMUs share.
pub(super) fn credentials() -> Result<TempDir> {
    let folder = TempDir::new()?;
    fs::write(
        folder.path().join("keys.psk"),
        format!("qemu:{}\n", "6b".repeat(32)),
    )?;
    Ok(folder)
}

/// Where QEMUs wait at the destination, and what stands for that at the source. Each namespace has its own.
pub(super) const OWN: &str = "127.0.0.2";
pub(super) const DOOR: &str = "127.0.0.3";

/// A gateway at each end of the link, with further lines in their configuration.
pub(super) fn gateways(link: &Link, lines: &str) -> Result<((Keys, TempDir), [Vamoose; 2])> {
    let (keys, folder) = (Keys::make(vamoose())?, TempDir::new()?);
    let ports = format!("ports = \"{}-{}\"", PORTS[0], PORTS[1]);
    let start = |at: &Namespace, key: &PathBuf, to: &Namespace, peer: &str| -> Result<Vamoose> {
        let (own, other) = (at.address(), to.address());
        let peer = peer.split_whitespace().next().unwrap_or_default();
        let text = format!(
            "{lines}\nlisten = [\"{own}:4440\"]\nalias = \"{OWN}\"\n{ports}\nkeys = {key:?}\n\
             peers.other = {{ alias = \"{DOOR}\", {ports}, to = [\"{other}:4440\"], key = \"{peer}\" }}\n",
        );
        let config = folder.path().join(format!("{own}.toml"));
        fs::write(&config, text)?;
        let mut command = at.command(vamoose());
        let gateway = Vamoose::start(command.args(["gateway", "--config"]).arg(config))?;
        gateway.wait_for("ready for migrations to ", LIMIT)?;
        Ok(gateway)
    };
    let [near_key, far_key] = &keys.public;
    let far = start(&link.destination, &keys.destination, &link.source, near_key)?;
    let near = start(&link.source, &keys.source, &link.destination, far_key)?;
    Ok(((keys, folder), [near, far]))
}

/// Pieces of 16 MiB: zeros, files, zeros, random bytes.
fn make_disk(path: &Path, mib: u64) -> Result<()> {
    let piece = 16 * usize::try_from(MIB)?;
    let mut disk = fs::File::create(path)?;
    let mut random = fs::File::open("/dev/urandom")?;
    let mut files = files();
    let (mut text, mut noise) = (Vec::new(), vec![0; piece]);
    for number in 0..mib / 16 {
        match number % 4 {
            1 => {
                while text.len() < piece {
                    let file = files.next().context("this machine has too few files")?;
                    text.extend(fs::read(file).unwrap_or_default());
                }
                disk.write_all(&text[..piece])?;
                text.drain(..piece);
            }
            3 => {
                random.read_exact(&mut noise)?;
                disk.write_all(&noise)?;
            }
            _ => disk.write_all(&vec![0; piece])?,
        }
    }
    Ok(())
}

/// Files of this machine, over and over.
fn files() -> impl Iterator<Item = PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::from("/usr/lib"), PathBuf::from("/usr/bin")];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        for entry in entries {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                Ok(kind) if kind.is_file() => found.push(entry.path()),
                _ => {}
            }
        }
    }
    found.sort();
    found.into_iter().cycle()
}

fn is_equal(one: &Path, other: &Path) -> Result<bool> {
    let (mut one, mut other) = (fs::File::open(one)?, fs::File::open(other)?);
    let mut buffers = [vec![0; 1 << 20], vec![0; 1 << 20]];
    loop {
        let read = one.read(&mut buffers[0])?;
        let (a, b) = buffers.split_at_mut(1);
        other.read_exact(&mut b[0][..read])?;
        if a[0][..read] != b[0][..read] {
            return Ok(false);
        }
        if read == 0 {
            return Ok(true);
        }
    }
}
