//! A guest that runs, and moves on from contender to contender, to and fro; its clients go on all the time.
//!
//! ```text
//!                         clients' namespace: Redis clients, pgbench
//!                     ┌──────────────────────┴──────────────────────┐
//!  namespace here     │                                             │     namespace there
//!    guest ─ source QEMU ═══════════════ the link ═════════════ destination QEMU ─ guest
//! ```

use std::mem;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use lab::cpu::QemuMeter;
use lab::guest::{Guest, Image, Load, Pattern};
use lab::net::{Lan, Link};
use lab::program::Program;
use lab::qemu::{Binary, Builder};
use lab::qmp::Event;
use lab::serial::Log;

use super::begin::Ends;
use super::{Host, MOMENTS, watch};
use crate::clients::{
    Clients, Sample,
    pgbench::Pgbench,
    redis::{Mix, Redis},
};
use crate::record::{Cell, Cpu, Figures, Latency, Outcome, Record, Service, Services};
use crate::scenario::{Rate, Who, Workload};

/// Everything that a guest's migrations need.
pub(crate) struct Running<'a> {
    host: &'a Host,
    workload: Workload,
    clients: Option<Box<dyn Clients>>,
    // Before the networks: what runs in them ends first.
    guest: Option<Guest>,
    machine: Builder,
    is_there: bool,
    /// What the guest has said on serial ports that it has left.
    logs: Vec<Log>,
    /// Until it is known what the clients have noticed.
    records: Vec<(Record, [Instant; 2])>,
    _lan: Option<Lan>,
    link: Link,
    _image: Image,
}

/// Where a guest has just arrived, QEMU must translate all of its code again, which slows it down.
const SETTLE: Duration = Duration::from_secs(2);

/// Then it is left alone so long before it is moved on.
const REST: Duration = Duration::from_secs(3);

/// How long clients work before they are looked at: PostgreSQL still writes its tables then.
const WARM_UP: Duration = Duration::from_secs(5);

/// Part of [`REST`] in which the guest's changes are counted.
const DIRTY_TIME: Duration = Duration::from_secs(1);

/// Latencies are kept for so long before and after a migration, one for each such part.
const AROUND: Duration = Duration::from_secs(3);
const PART: Duration = Duration::from_millis(100);

/// To boot.
const BOOT: Duration = Duration::from_secs(180);

impl<'a> Running<'a> {
    pub(super) fn start(host: &'a Host, workload: Workload, cell: &Cell) -> Result<Self> {
        let link = host.link(cell.link)?;
        let lan = workload.program().map(|_| Lan::new(&link)).transpose()?;
        let (image, machine) = workload.machine(&host.qemu, cell.link, cell.ram)?;
        let guest = Guest::start(&machine.clone().namespace(link.source.name()))?;
        guest.wait_ready(BOOT)?;
        let clients = match &lan {
            Some(lan) => workload.clients(lan)?,
            None => None,
        };
        thread::sleep(WARM_UP);
        Ok(Self {
            host,
            workload,
            clients,
            guest: Some(guest),
            machine,
            is_there: false,
            logs: Vec::new(),
            records: Vec::new(),
            _lan: lan,
            link,
            _image: image,
        })
    }

    /// Moves the guest to the other host.
    pub(super) fn migrate(&mut self, cell: &Cell, round: u32) -> Result<()> {
        ensure!(
            !matches!(cell.contender.who, Who::Live | Who::Sockets),
            "{} cannot move a guest of QEMU",
            cell.contender
        );
        let mut source = self.guest.take().context("the guest is lost")?;
        let mut hosts = [&self.link.source, &self.link.destination];
        if self.is_there {
            hosts.reverse();
        }
        let incoming = self.machine.clone().incoming().preallocate();
        let mut destination = Guest::start(&incoming.namespace(hosts[1].name()))?;
        thread::sleep(SETTLE);
        source.qemu.qmp.begin_dirty_rate(DIRTY_TIME)?;
        thread::sleep(REST);
        let dirty_rate = source.qemu.qmp.dirty_rate(MOMENTS)?;
        source.qemu.qmp.take_events();
        let meters = [
            QemuMeter::start(&mut source.qemu)?,
            QemuMeter::start(&mut destination.qemu)?,
        ];
        let sent_before = hosts[0].traffic().ok();
        let ends = Ends {
            source: &mut source.qemu,
            destination: &mut destination.qemu,
            here: hosts[0],
            there: hosts[1],
            vamoose: &self.host.vamoose,
        };
        let mut helpers = ends.begin(cell)?;
        let seen = watch::watch(&mut source.qemu, &mut helpers, cell, |_| Ok(()));
        let seen = seen.with_context(|| helpers.said())?;
        let to = Instant::now();
        let (mut figures, outcome);
        if seen.account.is_some() {
            let resumed = destination
                .qemu
                .qmp
                .wait_event("RESUME", |_| true, MOMENTS)?;
            // QEMU has said it before it said that the migration is completed.
            let stopped = last_stop(&source.qemu.qmp.drain_events(), resumed.timestamp)?;
            let used = [meters[0].read()?.0, meters[1].read()?.0];
            let finished = helpers.finish()?;
            figures = watch::figures(&seen, &finished)?;
            figures.downtime = Some((resumed.timestamp - stopped).as_secs_f64() * 1e3);
            let stopped = stopped.checked_sub(seen.began_at);
            figures.stopped = stopped.map(|stopped| stopped.as_secs_f64() * 1e3);
            figures.cpu = Cpu {
                source: used[0],
                sender: finished.cpu[0],
                receiver: finished.cpu[1],
                destination: used[1],
            };
            outcome = match self.workload.program() {
                Some(_) => Outcome::Served,
                None => Outcome::Checked,
            };
            mem::swap(&mut source, &mut destination);
            self.is_there = !self.is_there;
        } else {
            outcome = Outcome::Cancelled;
            helpers.cancel(&mut source.qemu)?;
            figures = Figures {
                seconds: seen.seconds,
                throttle: Some(seen.throttle).filter(|throttle| *throttle > 0),
                ..Figures::default()
            };
            if source.qemu.qmp.query_status()? != "running" {
                bail!("the guest does not run after a cancelled migration");
            }
        }
        figures.dirty_rate = Some(dirty_rate);
        figures.link_bytes =
            sent_before.and_then(|before| Some(hosts[0].traffic().ok()?.sent - before.sent));
        // Now the one that the guest has left, or has not reached.
        self.logs.push(destination.finish()?);
        if outcome == Outcome::Checked {
            // It has looked at all its memory.
            source.wait_rounds(1, MOMENTS)?;
        }
        source.log().check()?;
        self.guest = Some(source);
        let record = Record {
            cell: cell.clone(),
            round,
            outcome,
            figures,
            timeline: seen.timeline,
            service: None,
        };
        self.records.push((record, [seen.began, to]));
        Ok(())
    }

    /// Ends the clients and the guest; gives what all have noticed.
    pub(super) fn end(mut self) -> Result<Vec<Record>> {
        thread::sleep(REST);
        let of_clients = match self.clients.take() {
            Some(clients) => clients.end()?,
            None => Vec::new(),
        };
        let guest = self.guest.take().context("the guest is lost")?;
        let log = guest.finish()?;
        log.check()?;
        self.logs.push(log);
        let samples = match of_clients.is_empty() {
            true => self.signs(),
            false => of_clients,
        };
        let unit = self.workload.unit();
        let with_service = |(mut record, span): (Record, [Instant; 2])| {
            record.service = Some(services(&samples, unit, span));
            record
        };
        Ok(self.records.into_iter().map(with_service).collect())
    }

    /// The signs of life on the serial ports: the latency of one is the time since the one before.
    fn signs(&self) -> Vec<Sample> {
        let lines = self.logs.iter().flat_map(|log| &log.lines);
        let signs = lines.filter(|line| self.workload.is_sign(&line.text));
        let mut times: Vec<_> = signs.map(|line| line.at).collect();
        times.sort();
        let sample = |pair: &[Instant]| Sample {
            at: pair[1],
            latency: pair[1] - pair[0],
        };
        times.windows(2).map(sample).collect()
    }
}

/// When the guest stopped for good, of what its source has said. It may have stopped before, and gone on when the end of a
/// migration was put off: it was not down in between.
fn last_stop(said: &[Event], resumed: Duration) -> Result<Duration> {
    let stops = said.iter().filter(|event| event.name == "STOP");
    let stop = stops.map(|event| event.timestamp).max();
    let stop = stop.context("the source did not say that it stopped the guest")?;
    ensure!(
        stop <= resumed,
        "the source stopped the guest at {stop:?}, after it ran at the destination, from {resumed:?}"
    );
    Ok(stop)
}

/// What samples tell of the time around a migration.
fn services(samples: &[Sample], unit: &str, [from, to]: [Instant; 2]) -> Services {
    let mut parts: Vec<Latency> = Vec::new();
    let mut around: Vec<_> = samples
        .iter()
        .filter(|it| (from - AROUND..to + AROUND).contains(&it.at))
        .collect();
    around.sort_by_key(|sample| sample.at);
    for sample in around {
        let at = match sample.at.checked_duration_since(from) {
            Some(after) => after.as_millis().cast_signed(),
            None => -(from - sample.at).as_millis().cast_signed(),
        };
        let part = PART.as_millis().cast_signed();
        let at = i64::try_from(at.div_euclid(part) * part).unwrap_or(i64::MAX);
        let milliseconds = sample.latency.as_secs_f64() * 1e3;
        match parts.last_mut() {
            Some(last) if last.at == at => last.milliseconds = last.milliseconds.max(milliseconds),
            _ => parts.push(Latency { at, milliseconds }),
        }
    }
    Services {
        unit: unit.to_owned(),
        before: Service::of(samples, from - REST, from),
        // What was asked during the migration may have been answered shortly after.
        during: Service::of(samples, from, to + REST / 3),
        latencies: parts,
    }
}

impl Workload {
    /// The program that clients use; none is a load that checks its own memory.
    pub(crate) fn program(self) -> Option<Program> {
        match self {
            Self::RedisRandom | Self::RedisA | Self::RedisB | Self::RedisF => Some(Program::Redis),
            Self::Postgres => Some(Program::Postgres),
            Self::Compile => Some(Program::Compiler),
            Self::Idle | Self::Dirty(_) | Self::Writer | Self::Updates | Self::Counters => None,
        }
    }

    /// What the guest boots from, and the machine.
    fn machine(self, binary: &Binary, link: Rate, ram: u64) -> Result<(Image, Builder)> {
        if let Some(program) = self.program() {
            let image = program.image()?;
            let machine = program.machine(&image, binary, ram);
            return Ok((image, machine));
        }
        let image = Image::build(16)?;
        let mebibytes = u32::try_from(ram >> 20).context("the guest is too large")?;
        let carried = link.first().unwrap_or(10_000_000_000) / 8 / 4096;
        // More than a link of 1 Gbit/s carries within the downtime limit, so that the limit decides when the source stops.
        let (hot, rate) = match self {
            Self::Idle => (1, 1),
            Self::Dirty(pages) => (mebibytes / 8, pages),
            _ => (mebibytes * 3 / 16, u32::try_from(3 * carried)?),
        };
        let load = Load {
            fill: mebibytes * 3 / 8,
            hot,
            rate,
        };
        let pattern = match self {
            Self::Updates => Pattern::First(40),
            Self::Counters => Pattern::Counters,
            _ => Pattern::All,
        };
        let machine = image.machine_that_writes(binary, ram, &load, pattern);
        Ok((image, machine))
    }

    /// The clients, at work; `None` where the guest's serial port tells what it does.
    fn clients(self, lan: &Lan) -> Result<Option<Box<dyn Clients>>> {
        let network = &lan.clients;
        Ok(Some(match self {
            Self::RedisRandom => Box::new(Redis::start(network, Mix::RANDOM)?),
            Self::RedisA => Box::new(Redis::start(network, Mix::A)?),
            Self::RedisB => Box::new(Redis::start(network, Mix::B)?),
            Self::RedisF => Box::new(Redis::start(network, Mix::F)?),
            Self::Postgres => Box::new(Pgbench::start(network)?),
            _ => return Ok(None),
        }))
    }

    /// What a sample of the clients is.
    fn unit(self) -> &'static str {
        match self {
            Self::Postgres => "transactions",
            Self::Compile => "files",
            _ if self.program().is_none() => "ticks",
            _ => "requests",
        }
    }

    /// Whether a line of the guest's serial port shows that it has done something.
    fn is_sign(self, line: &str) -> bool {
        match self {
            Self::Compile => line.starts_with("compiled "),
            _ => self.program().is_none() && line.starts_with("tick "),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn the_downtime_begins_with_the_last_stop() {
        let event = |name: &str, millis| Event {
            name: name.to_owned(),
            data: Value::Null,
            timestamp: Duration::from_millis(millis),
        };
        let resumed = Duration::from_millis(900);
        let said = [
            event("STOP", 100),
            event("RESUME", 200),
            event("STOP", 700),
            event("MIGRATION", 800),
        ];
        let stop = last_stop(&said, resumed).unwrap();
        assert_eq!(stop, Duration::from_millis(700));
        let error = last_stop(&said[1..2], resumed).unwrap_err();
        assert!(error.to_string().contains("did not say"), "{error}");
        let both = last_stop(&[event("STOP", 901)], resumed).unwrap_err();
        assert!(both.to_string().contains("after it ran"), "{both}");
    }
}
