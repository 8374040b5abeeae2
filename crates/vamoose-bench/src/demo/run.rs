//! One migration of a freshly booted guest, with its measurements.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lab::guest::Guest;
use lab::vamoose::Server;

use super::cut::Cut;
use super::hold::Hold;
use super::network::RATE;
use super::proof::Life;
use super::screen::note;
use super::setup::{LOAD, RAM, Setup};
use super::{METHOD, Variant};
use crate::measure::begin::Ends;
use crate::measure::moving::{self, Moved};
use crate::record::{Cell, Figures};
use crate::scenario::{Contender, Guest as Kind, Rate, Who, Workload};

/// Time limit of each step; a step that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(180);

/// A successful migration.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) variant: Variant,
    pub(crate) figures: Figures,
    /// From the command until the guest ran at the destination.
    pub(crate) total: Duration,
    /// From the guest's stop to its start, without [`Run::held`].
    pub(crate) downtime: Duration,
    /// CPU seconds of the guest, in both QEMUs.
    pub(crate) guest_cpu: f64,
    pub(crate) life: Life,
    /// How long the guest was held back at the destination, until all of its memory had been compared.
    pub(crate) held: Duration,
}

impl Setup<'_> {
    /// Boots a guest, moves it, and waits until it has verified all of its memory at the destination.
    pub(crate) fn run(&self, variant: Variant) -> Result<Run> {
        self.try_run(variant).with_context(|| variant.to_string())
    }

    fn try_run(&self, variant: Variant) -> Result<Run> {
        let (mut source, mut destination) = self.boot(variant)?;
        let moved = self.migrate(variant, &mut source, &mut destination);
        let (moved, held) = moved.with_context(|| fates(&mut source, &mut destination))?;
        ensure!(moved.is_there, "it took longer than {LIMIT:?}");
        let total = moved.span[1] - moved.commanded;
        let downtime = moved.figures.downtime.context("no downtime measured")?;
        let downtime = Duration::from_secs_f64(downtime / 1e3).saturating_sub(held);
        note(format!(
            "{variant}: moved in {:.1} s, downtime {} ms; now the guest verifies its memory",
            total.as_secs_f64(),
            downtime.as_millis()
        ));
        expect_status(&mut source, "postmigrate").context("source")?;
        expect_status(&mut destination, "running").context("destination")?;
        // The first round may have begun at the source; the second one covers all memory after the move.
        destination.wait_rounds(2, LIMIT)?;
        Ok(Run {
            variant,
            figures: moved.figures,
            total,
            downtime,
            guest_cpu: moved.guest_cpu,
            life: Life::of(&source.finish()?, &destination.finish()?, moved.commanded)?,
            held,
        })
    }

    /// Boots a source with a working guest, and starts a waiting destination.
    fn boot(&self, variant: Variant) -> Result<(Guest, Guest)> {
        let start = Instant::now();
        let link = &self.network.link;
        let source = Guest::start(&self.machine().namespace(link.source.name()))?;
        self.guard.watch(source.qemu.process())?;
        // Vamoose resumes the guest itself, once the source has stopped for good.
        let waiting = match variant {
            Variant::Stock => self.machine().incoming(),
            _ => self.machine().incoming().paused(),
        };
        let waiting = waiting.namespace(link.destination.name());
        let destination = Guest::start(&waiting.preallocate())?;
        self.guard.watch(destination.qemu.process())?;
        source.wait_ready(LIMIT)?;
        source.wait_ticks(5, LIMIT)?;
        note(format!(
            "{variant}: the guest has booted and filled its memory ({:.1} s)",
            start.elapsed().as_secs_f64()
        ));
        Ok((source, destination))
    }

    /// Moves the guest; also returns how long it was held back.
    fn migrate(
        &self,
        variant: Variant,
        source: &mut Guest,
        destination: &mut Guest,
    ) -> Result<(Moved, Duration)> {
        let cell = self.cell(variant);
        let link = &self.network.link;
        let monitor = destination.qemu.qmp_socket();
        let hold = if variant == Variant::Cut {
            let at = destination.qemu.socket("held");
            let memory = [source.qemu.ram(), destination.qemu.ram()];
            Some((Hold::start(self.guard, &at, &monitor, memory)?, at))
        } else {
            None
        };
        let (mut server, mut cable) = (None, None);
        if variant != Variant::Stock {
            let monitor = hold.as_ref().map_or(&monitor, |(_, at)| at);
            let options = &cell.contender.far_options;
            let mut started = Server::start(&self.vamoose, &link.destination, monitor, options)?;
            let to = started.address.clone();
            if variant == Variant::Cut {
                let pulled = self.network.cable(&to)?;
                started.address = pulled.address(&to);
                cable = Some(pulled);
            }
            let to = &started.address;
            let security = variant.security();
            note(format!(
                "there$ vamoose serve {security} --listen {to} --qmp-dir DIR\n\
                 here$  vamoose migrate --qmp SOCKET {security} --to {to} --name guest --channels {} --downtime-limit {}",
                cell.channels, cell.downtime_limit
            ));
            server = Some(started);
        }
        let mut cut = cable.as_ref().map(Cut::new).transpose()?;
        let ends = Ends {
            source: &mut source.qemu,
            destination: &mut destination.qemu,
            here: &link.source,
            there: &link.destination,
            vamoose: &self.vamoose,
            server,
            is_shown: true,
        };
        let moved = moving::migrate(ends, &cell, || cut.as_mut().map_or(Ok(()), Cut::look))?;
        if let Some(cut) = cut {
            cut.show(&source.log(), moved.report.as_ref())?;
        }
        let held = hold.map_or(Ok(Duration::ZERO), |(hold, _)| hold.finish())?;
        Ok((moved, held))
    }

    fn cell(&self, variant: Variant) -> Cell {
        let [options, far_options] = match variant {
            Variant::Cut | Variant::Tls => self.keys.options(),
            Variant::Plain | Variant::Stock => Default::default(),
        };
        let (who, method) = match variant {
            Variant::Stock => (Who::Qemu, METHOD),
            _ => (Who::Migrate, "auto"),
        };
        Cell {
            scenario: "demo".to_owned(),
            guest: Kind::Running(Workload::Dirty(LOAD.rate)),
            link: Rate::Constant(RATE),
            channels: 2,
            contender: Contender {
                who,
                method: method.to_owned(),
                tls: false,
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
