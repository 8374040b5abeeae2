//! The moves of the guest, with their measurements.

use std::fmt;
use std::mem;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lab::guest::Guest;
use lab::net::Namespace;
use lab::vamoose::Server;

use super::Variant;
use super::cut::Cut;
use super::proof::Life;
use super::screen::{note, say};
use super::setup::{RAM, RATE, Setup};
use crate::measure::begin::Ends;
use crate::measure::moving::{self, Moved};
use crate::record::Cell;
use crate::scenario::{Contender, Guest as Kind, Rate, Who, Workload};

/// Time limit of each step; a step that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(180);

/// Ticks before the first move and after each, in which the guest settles.
const REST: usize = 15;

/// The guest, which moves from one host to the other and back.
pub(crate) struct Travel<'a> {
    pub(crate) setup: &'a Setup<'a>,
    guest: Guest,
    /// Whether it is at the second host.
    is_there: bool,
}

/// A successful move.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) measured: Measured,
    /// From the guest's stop to its start.
    pub(crate) downtime: Duration,
    pub(crate) life: Life,
}

/// What is compared.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Measured {
    /// From the command until the guest ran at the destination.
    pub(crate) seconds: f64,
    pub(crate) mebibytes: f64,
    /// CPU seconds of all processes, without the guest's.
    pub(crate) cpu: f64,
    /// Milliseconds.
    pub(crate) downtime: f64,
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:>7.2} s{:>8.0} MiB{:>9.2} s{:>9.0} ms",
            self.seconds, self.mebibytes, self.cpu, self.downtime
        )
    }
}

impl<'a> Travel<'a> {
    /// Boots the guest.
    pub(crate) fn begin(setup: &'a Setup<'a>) -> Result<Self> {
        let start = Instant::now();
        let machine = setup.machine().namespace(setup.network.link.source.name());
        let guest = Guest::start(&machine)?;
        setup.guard.watch(guest.qemu.process())?;
        guest.wait_ready(LIMIT)?;
        guest.wait_ticks(REST, LIMIT)?;
        note(format!(
            "the guest has booted and filled its memory ({:.1} s)",
            start.elapsed().as_secs_f64()
        ));
        Ok(Self {
            setup,
            guest,
            is_there: false,
        })
    }

    /// Moves the guest to the other host.
    pub(crate) fn go(&mut self, variant: Variant, rate: Rate) -> Result<Run> {
        self.try_go(variant, rate)
            .with_context(|| variant.to_string())
    }

    /// Waits until the guest has verified all of its memory.
    pub(crate) fn verify(&self) -> Result<()> {
        // The first round may have begun before the last move.
        self.guest.wait_rounds(2, LIMIT)
    }

    fn try_go(&mut self, variant: Variant, rate: Rate) -> Result<Run> {
        let [_, there] = self.hosts();
        let machine = self.setup.machine().incoming().preallocate();
        // Vamoose resumes the guest itself, once the source has stopped for good.
        let machine = match variant {
            Variant::Stock(_) => machine,
            Variant::Cut | Variant::Vamoose => machine.paused(),
        };
        let mut destination = Guest::start(&machine.namespace(there.name()))?;
        self.setup.guard.watch(destination.qemu.process())?;
        let moved = self.migrate(variant, rate, &mut destination);
        let source = &mut self.guest;
        let moved = moved.with_context(|| fates(source, &mut destination))?;
        ensure!(moved.is_there, "it took longer than {LIMIT:?}");
        expect_status(source, "postmigrate").context("source")?;
        expect_status(&mut destination, "running").context("destination")?;
        destination.wait_ticks(REST, LIMIT)?;
        let source = mem::replace(&mut self.guest, destination);
        self.is_there = !self.is_there;
        let life = Life::of(&source.finish()?, &self.guest.log(), moved.commanded)?;
        let run = Run::of(&moved, life)?;
        say(format!("   {:<30}{}", variant.to_string(), run.measured));
        Ok(run)
    }

    /// The host with the guest, and the other.
    fn hosts(&self) -> [&'a Namespace; 2] {
        let link = &self.setup.network.link;
        match self.is_there {
            false => [&link.source, &link.destination],
            true => [&link.destination, &link.source],
        }
    }

    /// Has the guest moved.
    fn migrate(&mut self, variant: Variant, rate: Rate, destination: &mut Guest) -> Result<Moved> {
        let (setup, [here, there]) = (self.setup, self.hosts());
        let source = &mut self.guest;
        let cell = setup.cell(variant, rate);
        let monitor = destination.qemu.qmp_socket();
        let (mut server, mut cable) = (None, None);
        if !matches!(variant, Variant::Stock(_)) {
            let options = &cell.contender.far_options;
            server = Some(Server::start(&setup.vamoose, there, &monitor, options)?);
        }
        if let (Variant::Cut, Some(server)) = (variant, &mut server) {
            let to = server.address.clone();
            let pulled = setup.network.cable(&to)?;
            server.address = pulled.address(&to);
            cable = Some(pulled);
            let to = &server.address;
            note(format!(
                "there$ vamoose serve --keys DIR --listen {to} --qmp-dir DIR\n\
                 here$ vamoose migrate --qmp SOCKET --keys DIR --to {to} --name guest --channels {} --downtime-limit {}",
                cell.channels, cell.downtime_limit
            ));
        }
        let mut cut = cable.as_ref().map(Cut::new).transpose()?;
        let ends = Ends {
            source: &mut source.qemu,
            destination: &mut destination.qemu,
            here,
            there,
            vamoose: &setup.vamoose,
            server,
        };
        let moved = moving::migrate(ends, &cell, || cut.as_mut().map_or(Ok(()), Cut::look))?;
        if let Some(cut) = cut {
            cut.show(&source.log(), moved.report.as_ref())?;
        }
        Ok(moved)
    }
}

impl Run {
    fn of(moved: &Moved, life: Life) -> Result<Self> {
        let figures = &moved.figures;
        let downtime = figures.downtime.context("no downtime measured")?;
        let stopped = figures.stopped.context("no end at the source measured")?;
        let bytes = figures
            .link_bytes
            .or(figures.wire_bytes)
            .context("no bytes counted")?;
        let measured = Measured {
            seconds: (moved.span[0] - moved.commanded).as_secs_f64() + (stopped + downtime) / 1e3,
            mebibytes: bytes as f64 / f64::from(1 << 20),
            cpu: figures.cpu.total(),
            downtime,
        };
        let downtime = Duration::from_secs_f64(downtime / 1e3);
        Ok(Self {
            measured,
            downtime,
            life,
        })
    }
}

impl Setup<'_> {
    fn cell(&self, variant: Variant, rate: Rate) -> Cell {
        let (who, method) = match variant {
            Variant::Stock(method) => (Who::Qemu, method),
            Variant::Cut | Variant::Vamoose => (Who::Migrate, "auto"),
        };
        let is_stock = who == Who::Qemu;
        let [options, far_options] = match is_stock {
            true => Default::default(),
            false => self.keys.options(),
        };
        Cell {
            scenario: "demo".to_owned(),
            guest: Kind::Running(Workload::Dirty(RATE)),
            link: rate,
            channels: 2,
            contender: Contender {
                who,
                method: method.to_owned(),
                tls: is_stock,
                options,
                far_options,
            },
            ram: RAM,
            downtime_limit: 300,
            timeout: LIMIT.as_secs(),
        }
    }
}

fn expect_status(guest: &mut Guest, wanted: &str) -> Result<()> {
    let status = guest.qemu.qmp.query_status()?;
    ensure!(status == wanted, "is '{status}' instead of '{wanted}'");
    Ok(())
}

/// The state of the QEMUs after a failed migration.
fn fates(source: &mut Guest, destination: &mut Guest) -> String {
    let fate = |guest: &mut Guest| {
        let fate = match guest.qemu.wait_exit(Duration::from_millis(500)) {
            Ok(status) => format!("has ended ({status})"),
            Err(_) => "runs".to_owned(),
        };
        format!("{fate} {}", guest.qemu.stderr()).trim().to_owned()
    };
    format!(
        "the source QEMU {}; the destination QEMU {}",
        fate(source),
        fate(destination)
    )
}
