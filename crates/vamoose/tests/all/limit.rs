//! One bandwidth limit over all guests of a host: what passes on the wire, between real QEMUs.
//!
//! The limit is a rate, so the bytes of a time are compared with the time that they took: a slow machine only takes longer.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use lab::{
    net::{self, Namespace},
    qemu::{self, Binary, Builder, Qemu},
    ram::{self, Fill},
    vamoose::{Vamoose, state_dir},
};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::common::{LIMIT, MIB, number, vamoose};

/// What may be on its way when a limit is set: a packet of each channel, and what windows and sockets have.
const UNDER_WAY: u64 = 4 * MIB;

/// Headers of frames, TCP, IP and Ethernet beside what is counted.
const HEADERS: f64 = 1.1;

#[test]
fn guests_keep_to_one_limit_and_to_its_change() -> Result<()> {
    run(3, 24, [200, 120]).map(drop)
}

/// `make load`: LIMIT_GUESTS of LIMIT_RAM MiB under 500 Mbit/s, and 200 after a third.
#[test]
#[ignore = "half a minute, 3 GiB of memory, as root"]
fn many_guests_keep_to_one_limit_and_to_its_change() -> Result<()> {
    let (guests, ram) = (number("LIMIT_GUESTS", 8)?, number("LIMIT_RAM", 96)?);
    net::available()?;
    run(guests, ram, [500, 200])?;
    Ok(())
}

/// A server whose limit is in a file.
struct Host {
    server: Vamoose,
    address: String,
    monitors: TempDir,
    state: TempDir,
    limit: PathBuf,
}

impl Host {
    fn start(at: &Namespace, megabits: u64) -> Result<Self> {
        let (monitors, state) = (TempDir::new()?, state_dir()?);
        let limit = state.path().join("max-bandwidth");
        fs::write(&limit, format!("{megabits}Mbit\n"))?;
        let mut command = at.command(vamoose());
        command
            .args(["serve", "--insecure", "--max-bandwidth"])
            .arg(&limit);
        command.args(["--listen", &format!("tcp:{}:0", at.address())]);
        command.arg("--qmp-dir").arg(monitors.path());
        command.arg("--state-dir").arg(state.path().join("there"));
        let server = Vamoose::start(&mut command)?;
        let address = server.wait_for("taking migrations on ", LIMIT)?;
        Ok(Self {
            server,
            address,
            monitors,
            state,
            limit,
        })
    }

    fn change_limit(&self, megabits: u64) -> Result<()> {
        fs::write(&self.limit, format!("{megabits}Mbit\n"))?;
        self.server.signal(Signal::HUP)?;
        let said = "the bandwidth limit has been read again";
        self.server.wait_for(said, LIMIT).map(drop)
    }

    /// A guest whose pages do not shrink, and its migration to here.
    fn guest(&self, binary: &Binary, from: &Namespace, number: u64, ram: u64) -> Result<Guest> {
        let source = Builder::bare(binary, ram * MIB)
            .content(Fill::Random, number)
            .start()?;
        let destination = Builder::bare(binary, ram * MIB).incoming().start()?;
        let name = format!("vm{number}");
        let monitor = self.monitors.path().join(format!("{name}.qmp"));
        std::os::unix::fs::symlink(destination.qmp_socket(), monitor)?;
        let mut command = from.command(vamoose());
        command.args(["migrate", "--json", "-", "--insecure", "--method", "none"]);
        command.args(["--name", &name, "--to", &self.address, "--qmp"]);
        command.arg(source.qmp_socket());
        command
            .arg("--state-dir")
            .arg(self.state.path().join("here"));
        Ok(Guest {
            source,
            destination,
            command,
        })
    }
}

struct Guest {
    source: Qemu,
    destination: Qemu,
    command: Command,
}

/// What passed on the wire in a time.
struct Phase<'a> {
    wire: &'a Namespace,
    megabits: u64,
    began: Instant,
    sent: u64,
    /// Mbit/s in each second, and the last one's end.
    seconds: Vec<f64>,
    sampled: (Instant, u64),
}

impl<'a> Phase<'a> {
    fn begin(wire: &'a Namespace, megabits: u64) -> Result<Self> {
        let (began, sent) = (Instant::now(), wire.traffic()?.sent);
        Ok(Self {
            wire,
            megabits,
            began,
            sent,
            seconds: Vec::new(),
            sampled: (began, 0),
        })
    }

    fn bytes(&mut self) -> Result<u64> {
        let bytes = self.wire.traffic()?.sent - self.sent;
        let (since, before) = self.sampled;
        let passed = since.elapsed().as_secs_f64();
        if passed >= 1.0 {
            let bits = (bytes - before) as f64 * 8.0;
            self.seconds.push(bits / passed / 1e6);
            self.sampled = (Instant::now(), bytes);
        }
        Ok(bytes)
    }

    fn end(mut self) -> Result<()> {
        let (bytes, seconds) = (self.bytes()?, self.began.elapsed().as_secs_f64());
        let most = self.megabits as f64 * 1e6 / 8.0 * seconds * HEADERS;
        let rate = bytes as f64 * 8.0 / seconds / 1e6;
        let limit = self.megabits;
        println!("limit {limit} Mbit/s: {rate:.1} Mbit/s on the wire over {seconds:.2} s");
        let each: Vec<_> = self
            .seconds
            .iter()
            .map(|rate| format!("{rate:.0}"))
            .collect();
        println!("in each second: {}", each.join(" "));
        ensure!(
            bytes as f64 <= most + UNDER_WAY as f64,
            "{bytes} bytes in {seconds:.2} s: {rate:.1} Mbit/s, where the limit is {limit}"
        );
        Ok(())
    }
}

/// Moves guests of `ram` MiB under the first limit, and under the second after a third of their memory.
fn run(number: u64, ram: u64, [first, second]: [u64; 2]) -> Result<()> {
    let Some(binary) = qemu::newest_or_skip()? else {
        return Ok(());
    };
    let Some(link) = net::link_or_skip(None)? else {
        return Ok(());
    };
    let host = Host::start(&link.destination, first)?;
    let mut guests = (0..number)
        .map(|at| host.guest(&binary, &link.source, at, ram))
        .collect::<Result<Vec<_>>>()?;
    let mut phase = Phase::begin(&link.source, first)?;
    let began = phase.began;
    let migrations = guests
        .iter_mut()
        .map(|guest| Vamoose::start(&mut guest.command))
        .collect::<Result<Vec<_>>>()?;
    while phase.bytes()? < number * ram * MIB / 3 {
        ensure!(began.elapsed() < LIMIT, "a third takes too long");
        thread::sleep(Duration::from_millis(10));
    }
    phase.end()?;
    host.change_limit(second)?;
    let mut phase = Phase::begin(&link.source, second)?;
    let ends = thread::scope(|scope| {
        let ends: Vec<_> = migrations
            .into_iter()
            .map(|migration| {
                scope.spawn(move || -> Result<_> {
                    let ended = migration.finish(LIMIT)?.success()?;
                    let at = began.elapsed().as_secs_f64();
                    let report: Value = serde_json::from_str(&ended.stdout)?;
                    Ok((at, report))
                })
            })
            .collect();
        while !ends.iter().all(|end| end.is_finished()) {
            phase.bytes()?;
            thread::sleep(Duration::from_millis(10));
        }
        let ends = ends.into_iter().map(|end| end.join());
        ends.map(|end| end.map_err(|_| anyhow::anyhow!("a thread panicked"))?)
            .collect::<Result<Vec<_>>>()
    });
    let ends = ends.with_context(|| host.server.stderr())?;
    phase.end()?;
    for (at, (seconds, report)) in ends.iter().enumerate() {
        let took = &report["total-time"];
        println!("guest {at}: moved after {seconds:.2} s, in {took} ms");
    }
    for guest in &guests {
        ram::compare(guest.source.ram(), guest.destination.ram())?;
    }
    // A file with an error leaves the limit in force, and a start with it fails.
    fs::write(&host.limit, "much")?;
    host.server.signal(Signal::HUP)?;
    let said = "the previous limit stays in force: ";
    host.server.wait_for(said, LIMIT)?;
    fails_with(&host.limit)
}

fn fails_with(limit: &Path) -> Result<()> {
    let mut command = Command::new(vamoose());
    command.args(["serve", "--insecure", "--listen", "tcp:127.0.0.1:0"]);
    command.arg("--max-bandwidth").arg(limit);
    command
        .arg("--qmp-dir")
        .arg(limit.parent().context("no folder")?);
    Vamoose::start(&mut command)?
        .finish(LIMIT)?
        .failure("`much` is not a bandwidth")?;
    Ok(())
}
