//! Measures a running guest, which each contender moves to the other host. Clients of Redis send requests all the time; other guests
//! have their load inside.
//!
//! ```text
//!                         clients' namespace: clients of Redis
//!                     ┌──────────────────────┴──────────────────────┐
//!  namespace here     │                                             │     namespace there
//!    guest ─ source QEMU ═══════════════ the link ═════════════ destination QEMU ─ guest
//! ```

use std::mem;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lab::guest::{Guest, Image, Load, Pattern};
use lab::middlebox::Middlebox;
use lab::net::{Lan, Link};
use lab::program::Program;
use lab::qemu::{Binary, Builder};
use lab::serial::Log;

use super::begin::Ends;
use super::moving::{self, Moved};
use super::{Host, MOMENTS};
use crate::clients::Sample;
use crate::clients::redis::{Mix, Redis};
use crate::record::{Cell, Outcome, Record, Service, Services};
use crate::scenario::{Guest as Kind, Rate};

/// A running guest, its clients and networks.
pub(crate) struct Running<'a> {
    host: &'a Host,
    kind: Kind,
    clients: Option<Redis>,
    // Dropped before the networks in which the guest runs.
    guest: Option<Guest>,
    machine: Builder,
    is_there: bool,
    /// The guest's output on the serial ports of QEMUs that it has left.
    logs: Vec<Log>,
    /// Records without the service of the clients, with the span of each migration.
    records: Vec<(Record, [Instant; 2])>,
    _lan: Option<Lan>,
    link: Link,
    _image: Image,
}

/// Time after an arrival during which the guest is slow, because QEMU translates all of its code again.
const SETTLE: Duration = Duration::from_secs(2);

/// Time after [`SETTLE`] during which the guest is left alone before its next migration.
const REST: Duration = Duration::from_secs(3);

/// Time before the first measurement, in which the guest settles.
const WARM_UP: Duration = Duration::from_secs(5);

/// Part of [`REST`] in which changed memory is counted.
const DIRTY_TIME: Duration = Duration::from_secs(1);

/// Time limit of booting.
const BOOT: Duration = Duration::from_secs(180);

impl<'a> Running<'a> {
    pub(crate) fn start(host: &'a Host, cell: &Cell) -> Result<Self> {
        let kind = cell.guest;
        let link = host.link(cell.link)?;
        let lan = kind.program().map(|_| Lan::new(&link)).transpose()?;
        let (image, machine) = kind.machine(&host.qemu, cell.link, cell.ram)?;
        let guest = Guest::start(&machine.clone().namespace(link.source.name()))?;
        guest.wait_ready(BOOT)?;
        let mix = lan.as_ref().zip(kind.mix());
        let start = |(lan, mix): (&Lan, Mix)| Redis::start(&lan.clients, mix);
        let clients = mix.map(start).transpose()?;
        thread::sleep(WARM_UP);
        Ok(Self {
            host,
            kind,
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

    /// Moves the guest to the other host, and adds the record.
    pub(super) fn migrate(&mut self, cell: &Cell, round: u32) -> Result<()> {
        let moved = self.go(cell, None, |_| Ok(()))?;
        let outcome = match (moved.is_there, self.kind.program()) {
            (false, _) => Outcome::Cancelled,
            (true, Some(_)) => Outcome::Served,
            (true, None) => Outcome::Checked,
        };
        let span = moved.span;
        self.records
            .push((moved.record(cell, round, outcome), span));
        Ok(())
    }

    /// Moves the guest to the other host, through `proxy` if there is one. `meanwhile` is called at each look.
    pub(crate) fn go(
        &mut self,
        cell: &Cell,
        proxy: Option<&Middlebox>,
        mut meanwhile: impl FnMut(&Link) -> Result<()>,
    ) -> Result<Moved> {
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
        let ends = Ends {
            source: &mut source.qemu,
            destination: &mut destination.qemu,
            here: hosts[0],
            there: hosts[1],
            vamoose: &self.host.vamoose,
            proxy,
        };
        let mut moved = moving::migrate(ends, cell, || meanwhile(&self.link))?;
        moved.figures.dirty_rate = Some(dirty_rate);
        if moved.is_there {
            let left = source.qemu.qmp.query_status()?;
            ensure!(
                left == "postmigrate",
                "the guest the source has left is {left}"
            );
            mem::swap(&mut source, &mut destination);
            self.is_there = !self.is_there;
        }
        // `destination` is now the QEMU that the guest has left, or has not reached.
        self.logs.push(destination.finish()?);
        if moved.is_there && self.kind.program().is_none() {
            // All of its memory: the first round may have begun at the source.
            source.wait_rounds(2, MOMENTS)?;
        }
        source.log().check()?;
        self.guest = Some(source);
        Ok(moved)
    }

    /// The guest's output at the host that it has left last.
    pub(crate) fn left(&self) -> Option<&Log> {
        self.logs.last()
    }

    /// The guest's output where it is.
    pub(crate) fn log(&self) -> Result<Log> {
        Ok(self.guest.as_ref().context("the guest is lost")?.log())
    }

    /// Ends the clients and the guest; returns all records.
    pub(super) fn finish(mut self) -> Result<Vec<Record>> {
        thread::sleep(REST);
        let of_clients = self.clients.take().map(Redis::end).transpose()?;
        let guest = self.guest.take().context("the guest is lost")?;
        let log = guest.finish()?;
        log.check()?;
        self.logs.push(log);
        let samples = of_clients.unwrap_or_else(|| self.ticks());
        let with_service = |(mut record, [from, to]): (Record, [Instant; 2])| {
            record.service = Some(Services {
                before: Service::of(&samples, from - REST, from),
                // A request during the migration may be answered shortly after it.
                during: Service::of(&samples, from, to + REST / 3),
            });
            record
        };
        Ok(self.records.into_iter().map(with_service).collect())
    }

    /// Ticks on the serial ports. The latency of a tick is the time since the previous tick.
    fn ticks(&self) -> Vec<Sample> {
        let lines = self.logs.iter().flat_map(|log| &log.lines);
        let signs = lines.filter(|line| line.text.starts_with("tick "));
        let mut times: Vec<_> = signs.map(|line| line.at).collect();
        times.sort();
        let sample = |pair: &[Instant]| Sample {
            at: pair[1],
            latency: pair[1] - pair[0],
        };
        times.windows(2).map(sample).collect()
    }
}

impl Kind {
    /// The real program in the guest; `None` where the guest checks its own memory.
    pub(crate) fn program(self) -> Option<Program> {
        match self {
            Self::Pgbench => Some(Program::Postgres),
            _ => self.mix().map(|_| Program::Redis),
        }
    }

    /// Boot image and machine.
    fn machine(self, binary: &Binary, link: Rate, ram: u64) -> Result<(Image, Builder)> {
        if let Some(program) = self.program() {
            let image = program.image()?;
            let machine = program.machine(&image, binary, ram);
            return Ok((image, machine));
        }
        let image = Image::build(16)?;
        let mebibytes = u32::try_from(ram >> 20).context("the guest is too large")?;
        let carried = link.limit().unwrap_or(10_000_000_000) / 8 / 4096;
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

    /// The mix of the clients' requests; `None` where ticks on the serial port replace clients.
    fn mix(self) -> Option<Mix> {
        match self {
            Self::RedisRandom => Some(Mix::RANDOM),
            Self::RedisA => Some(Mix::A),
            Self::RedisB => Some(Mix::B),
            _ => None,
        }
    }
}
