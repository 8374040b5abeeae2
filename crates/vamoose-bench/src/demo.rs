//! `vamoose bench demo`, `make demo`: Vamoose moves a running Linux guest, which writes memory, between two unmodified QEMUs over a
//! link of 1 Gbit/s. During the move the cable is pulled; the demo proves that the guest lost nothing. Then it compares moves over
//! intact links, with Vamoose and without, always encrypted: the scenario `demo.toml`.
//!
//! ```text
//!   namespace A                                    namespace B
//!   source QEMU ─unix─> vamoose migrate ──TLS──> vamoose serve ─unix─> destination QEMU     with Vamoose
//!   source QEMU ──────────────────────────TLS────────────────────────> destination QEMU     stock
//! ```
//!
//! Where no network namespaces can be made (not root, a restricted container), both ends use loopback.

mod cut;
mod proof;
mod screen;

use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use lab::middlebox::Middlebox;
use tempfile::TempDir;

use crate::measure::Host;
use crate::measure::running::Running;
use crate::needs::Found;
use crate::plan::Plan;
use crate::record::{Cell, Machine};
use crate::report::comparison;
use crate::results::Results;
use crate::scenario::{Scenario, Who};
use crate::stop_by_signals;
use cut::Cut;
use screen::{note, say, step};

const SCENARIO: &str = include_str!("../scenarios/demo.toml");

/// Runs the demo, with this `vamoose` or the one beside this program.
pub(crate) fn run(vamoose: Option<&Path>) -> ExitCode {
    let stop = match stop_by_signals() {
        Ok(stop) => stop,
        Err(error) => return lab::exit_code("demo", Err(error)),
    };
    let ended = demonstrate(vamoose, &stop);
    if ended.is_err() && stop.load(Ordering::Relaxed) {
        say("\nInterrupted. All processes, files and networks were removed.");
        // The exit code of a program that SIGINT has ended, as shells report it.
        return ExitCode::from(130);
    }
    lab::exit_code("\ndemo", ended)
}

/// Removes everything that it started or made before it returns.
fn demonstrate(vamoose: Option<&Path>, stop: &AtomicBool) -> Result<()> {
    say("Vamoose: a running guest moves between two unmodified QEMUs");

    step(1, "Prepare the hosts and the guest");
    let (host, found) = Host::look("", vamoose, None)?;
    note(format!("two unmodified QEMUs {}", host.qemu.version));
    note(match host.has_links {
        true => "two network namespaces, joined by a link",
        false => {
            "LOOPBACK, as no link can be made\n\
             NOTE: times say little about a real network, bytes are as reported, and in place of a pulled cable a proxy drops all \
             data and refuses connections"
        }
    });
    let cells = cells(&found)?;
    let cell = cells.iter().find(|cell| cell.contender.who == Who::Migrate);
    let cell = cell.context("the demo cannot be shown on this host")?;
    let mut running = Running::start(&host, cell)?;
    note(format!(
        "a Linux guest ({}) with {} MiB of RAM has booted and filled a part of it with files; it verifies all of that over and over, \
         and ticks every 100 ms",
        cell.guest,
        cell.ram >> 20
    ));

    step(
        2,
        "Move the running guest with Vamoose, and pull the cable in the middle",
    );
    note(format!(
        "there$ vamoose serve --keys DIR --listen tcp:HOST:PORT --qmp-dir DIR\n\
         here$ vamoose migrate --qmp SOCKET --keys DIR --to tcp:HOST:PORT --name guest --channels {} --downtime-limit {}",
        cell.channels, cell.downtime_limit
    ));
    let proxy = match host.has_links {
        true => None,
        // It leads to the server once there is one.
        false => Some(Middlebox::new(([127, 0, 0, 1], 0).into())?),
    };
    let mut cut = Cut::new(proxy.as_ref());
    let moved = running.go(cell, proxy.as_ref(), |link| cut.look(link))?;
    let source = running.left().context("the guest has not moved")?;
    cut.show(source, moved.report.as_ref())?;

    step(3, "Prove that the guest lost nothing");
    let silence = proof::show(source, &running.log()?, &moved)?;
    drop(running);

    step(
        4,
        "Move the guest back and forth, with Vamoose and with stock QEMU's own TLS",
    );
    let folder = TempDir::new().context("a folder for the results")?;
    let mut results = Results::open(folder.path(), &Machine::look(&host)?)?;
    let mut plan = Plan::new();
    plan.add(&cells, Scenario::parse(SCENARIO)?.rounds);
    plan.carry_out(&host, &mut results, stop)?;

    step(
        5,
        "Compare: both encrypt, and both ends authenticate each other",
    );
    say(comparison(folder.path())?);
    note(LEGEND);
    say("");
    screen::wrap(format!(
        "Proved: Vamoose moved a running guest between unmodified QEMUs while the cable was pulled for {} s. No tick was lost or \
         repeated, the silence was {} ms, the guest found all of its content intact, and the source did not run on.",
        cut::LASTS.as_secs(),
        silence.as_millis(),
    ));
    Ok(())
}

/// The cells to compare.
fn cells(found: &Found) -> Result<Vec<Cell>> {
    let all = Scenario::parse(SCENARIO)?.cells("demo", u64::MAX, 0);
    let (cells, missing) = found.sort(all);
    missing.iter().for_each(note);
    Ok(cells)
}

const LEGEND: &str = "\
    Medians, on cores that carry both hosts, the guest and the link.\n\
    seconds: total time of the migration; MB: sent to the destination; CPU: seconds of all processes at both ends, without the guest's \
    own; downtime: from the guest's stop to its start, by one clock\n\
    stock QEMU: x509 certificates, no compression or zstd level 1; the guest resumes as soon as it has arrived\n\
    Vamoose: its defaults, with keys; it also checks all pages by CRC-32C, survives lost connections, and resumes the guest only when \
    the source has stopped for good";
