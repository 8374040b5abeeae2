//! Two hosts, a guest on one of them, and its clients.

use std::fmt;
use std::mem;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use lab::guest::{Guest, Image};
use lab::net::{Lan, Link};
use lab::qemu::Builder;
use lab::serial::Log;
use serde_json::Value;

use crate::Conditions;
use crate::clients::{Clients, Sample};
use crate::contender::{Contender, Helpers};
use crate::workload::Workload;

/// Everything that a workload's migrations need.
pub(crate) struct Stage<'a> {
    workload: Workload,
    conditions: &'a Conditions,
    clients: Option<Box<dyn Clients>>,
    // Before the networks: what runs in them ends first.
    guest: Option<Guest>,
    machine: Builder,
    is_there: bool,
    /// What the guest has said on serial ports that it has left.
    logs: Vec<Log>,
    _lan: Lan,
    link: Link,
    _image: Image,
}

/// One migration.
#[derive(Clone, Debug)]
pub(crate) struct Migration {
    pub(crate) contender: Contender,
    /// It was cancelled, as it took too long.
    pub(crate) is_cancelled: bool,
    pub(crate) from: Instant,
    pub(crate) to: Instant,
    /// From STOP at the source to RESUME at the destination, in milliseconds.
    pub(crate) downtime: Option<f64>,
    /// Rounds over memory.
    pub(crate) rounds: u64,
    /// Sent over the link, headers included.
    pub(crate) bytes: u64,
    /// The most that auto-converge has throttled the guest, in percent.
    pub(crate) throttle: u64,
    /// MiB of memory that the guest changed in a second, before.
    pub(crate) dirty_rate: u64,
    /// That of `vamoose migrate`.
    pub(crate) report: Option<Value>,
}

/// Where a guest has just arrived, QEMU must translate all of its code again, which slows it down.
const SETTLE: Duration = Duration::from_secs(2);

/// Then it is left alone so long before it is moved on.
pub(crate) const REST: Duration = Duration::from_secs(3);

/// How long clients work before they are looked at: PostgreSQL still writes its tables then.
const WARM_UP: Duration = Duration::from_secs(5);

/// Part of [`REST`] in which the guest's changes are counted.
const DIRTY_TIME: Duration = Duration::from_secs(1);

const LIMIT: Duration = Duration::from_secs(180);

impl<'a> Stage<'a> {
    pub(crate) fn set(workload: Workload, conditions: &'a Conditions) -> Result<Self> {
        let rate = conditions.terms.rate * 1_000_000;
        let link = Link::new(Some(rate))?;
        let lan = Lan::new(&link)?;
        let (image, machine) = workload.machine(&conditions.qemu, rate)?;
        let guest = Guest::start(&machine.clone().namespace(link.source.name()))?;
        guest.wait_ready(LIMIT)?;
        let clients = workload.clients(&lan.clients)?;
        thread::sleep(WARM_UP);
        Ok(Self {
            workload,
            conditions,
            clients,
            guest: Some(guest),
            machine,
            is_there: false,
            logs: Vec::new(),
            _lan: lan,
            link,
            _image: image,
        })
    }

    /// Moves the guest to the other host.
    pub(crate) fn migrate(&mut self, contender: Contender) -> Result<Migration> {
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
        let dirty_rate = source.qemu.qmp.dirty_rate(LIMIT)?;
        let sent_before = hosts[0].traffic()?.sent;
        source.qemu.qmp.take_events();
        let from = Instant::now();
        let ends = [&mut source, &mut destination];
        let helpers = contender.start(ends, hosts, self.conditions)?;
        let mut migration = Migration {
            contender,
            is_cancelled: false,
            from,
            to: from,
            downtime: None,
            rounds: 0,
            bytes: 0,
            throttle: 0,
            dirty_rate,
            report: None,
        };
        let watched = migration.watch(&mut source, &helpers, self.limit());
        migration.to = Instant::now();
        match watched.with_context(|| helpers.said())? {
            Watched::Completed => {
                let resumed = destination.qemu.qmp.wait_event("RESUME", |_| true, LIMIT)?;
                let stopped = source.qemu.qmp.wait_event("STOP", |_| true, LIMIT)?;
                let downtime = resumed.timestamp.saturating_sub(stopped.timestamp);
                migration.downtime = Some(downtime.as_secs_f64() * 1e3);
                migration.report = helpers.finish()?;
                mem::swap(&mut source, &mut destination);
                self.is_there = !self.is_there;
            }
            Watched::TookTooLong => {
                migration.is_cancelled = true;
                helpers.cancel(&mut source)?;
                if source.qemu.qmp.query_status()? != "running" {
                    bail!("the guest does not run after a cancelled migration");
                }
            }
        }
        migration.bytes = hosts[0].traffic()?.sent - sent_before;
        // Now the one that the guest has left, or has not reached.
        self.logs.push(destination.finish()?);
        source.log().check()?;
        self.guest = Some(source);
        Ok(migration)
    }

    fn limit(&self) -> Duration {
        Duration::from_secs(self.conditions.terms.limit)
    }

    /// Ends the clients and the guest; gives what the clients have noticed.
    pub(crate) fn end(mut self) -> Result<Vec<Sample>> {
        thread::sleep(REST);
        let of_clients = match self.clients.take() {
            Some(clients) => clients.end()?,
            None => Vec::new(),
        };
        let guest = self.guest.take().context("the guest is lost")?;
        if self.workload.checks_itself() {
            guest.wait_rounds(1, LIMIT)?;
        }
        let log = guest.finish()?;
        log.check()?;
        self.logs.push(log);
        Ok(match of_clients.is_empty() {
            true => self.signs(),
            false => of_clients,
        })
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

enum Watched {
    Completed,
    TookTooLong,
}

impl Migration {
    /// Follows the source's account to the end.
    fn watch(&mut self, source: &mut Guest, helpers: &Helpers, limit: Duration) -> Result<Watched> {
        // Until then, QEMU tells of the one before.
        let mut has_begun = false;
        loop {
            let have_ended = helpers.have_ended()?;
            let account = source.qemu.qmp.query_migrate()?;
            let rounds = account["ram"]["dirty-sync-count"].as_u64();
            let throttle = account["cpu-throttle-percentage"].as_u64();
            match account["status"].as_str() {
                // Without a downtime it is the migration that the guest came with.
                Some("completed") if account["downtime"].is_u64() => {
                    self.rounds = rounds.unwrap_or(0);
                    return Ok(Watched::Completed);
                }
                Some("failed" | "cancelled") if has_begun => {
                    bail!("the migration failed: {account}")
                }
                Some("active") => {
                    has_begun = true;
                    self.rounds = rounds.unwrap_or(self.rounds);
                    self.throttle = self.throttle.max(throttle.unwrap_or(0));
                }
                _ => {}
            }
            if have_ended {
                bail!("vamoose has ended, the migration has not: {account}");
            }
            if self.from.elapsed() > limit {
                return Ok(Watched::TookTooLong);
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    pub(crate) fn seconds(&self) -> f64 {
        (self.to - self.from).as_secs_f64()
    }
}

impl fmt::Display for Migration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, megabytes) = (self.seconds(), self.bytes / 1_000_000);
        match self.downtime {
            None => write!(f, "cancelled after {seconds:.0} s and {megabytes} MB"),
            Some(downtime) => write!(
                f,
                "{seconds:.1} s, {megabytes} MB, downtime {downtime:.0} ms"
            ),
        }
    }
}
