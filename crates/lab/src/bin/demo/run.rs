//! One migration of a freshly booted guest, and everything that is measured of it.

use std::fs;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lab::guest::Guest;
use lab::process::Child;
use serde_json::{Value, json};

use crate::cpu::{Cpu, Meter};
use crate::cut;
use crate::hold::Hold;
use crate::proof::Life;
use crate::screen::note;
use crate::stage::Stage;
use crate::witness::Witness;
use crate::{METHOD, Way};

/// In every way.
const CHANNELS: u8 = 2;
/// In every way, in milliseconds.
const DOWNTIME_LIMIT: u64 = 300;
/// Nothing takes this long unless something hangs.
const LIMIT: Duration = Duration::from_secs(180);

/// A migration that was successful.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) way: Way,
    /// From the command until the guest ran at the destination.
    pub(crate) total: Duration,
    /// As it is reported, without [`Run::held`].
    pub(crate) downtime: Duration,
    /// Over the link, where that is known.
    pub(crate) link_bytes: Option<u64>,
    /// Contents of the pages that were sent, without zero pages.
    pub(crate) page_bytes: u64,
    pub(crate) cpu: Cpu,
    pub(crate) life: Life,
    /// For how long the guest waited at the destination, until all of its memory had been compared.
    pub(crate) held: Duration,
}

/// What the programs say themselves.
struct Reported {
    downtime: Duration,
    wire_bytes: Option<u64>,
    page_bytes: u64,
    /// CPU seconds of `vamoose migrate`.
    migrating: f64,
    held: Duration,
}

impl Stage<'_> {
    /// Boots a guest, moves it and follows it until it has verified all of its memory at its new place.
    pub(crate) fn run(&self, way: Way) -> Result<Run> {
        self.try_run(way).with_context(|| way.to_string())
    }

    fn try_run(&self, way: Way) -> Result<Run> {
        let (mut source, mut destination) = self.boot(way)?;
        let server = self.server(way).vamoose.pid();
        let meter = Meter::start(&mut source.qemu, &mut destination.qemu, server)?;
        let sent_before = self.network.sent()?;

        let witness = Witness::start();
        let start = Instant::now();
        let moved = match way {
            Way::Stock => self.by_qemu(&mut source, &mut destination),
            _ => self.by_vamoose(way, &source, &destination),
        };
        let total = start.elapsed();
        let reported = moved.with_context(|| fates(&mut source, &mut destination))?;

        let cpu = meter.read(reported.migrating)?;
        let sent = self.network.sent()?.zip(sent_before);
        note(format!(
            "{way}: moved in {:.1} s, reported downtime {} ms; now the guest verifies its memory",
            total.as_secs_f64(),
            reported.downtime.as_millis()
        ));
        expect_status(&mut source, "postmigrate").context("source")?;
        expect_status(&mut destination, "running").context("destination")?;
        // The first round may have begun at the source; the second one is all of memory after the move.
        destination.wait_rounds(2, LIMIT)?;
        Ok(Run {
            way,
            total,
            downtime: reported.downtime,
            link_bytes: sent
                .map(|(after, before)| after - before)
                .or(reported.wire_bytes),
            page_bytes: reported.page_bytes,
            cpu,
            life: Life::of(
                &source.finish()?,
                &destination.finish()?,
                start,
                witness.finish(),
            )?,
            held: reported.held,
        })
    }

    /// A source whose guest is at work and a destination that waits.
    fn boot(&self, way: Way) -> Result<(Guest, Guest)> {
        let start = Instant::now();
        let source = Guest::start(&self.network.source().place(self.machine()))?;
        self.guard.watch(source.qemu.process())?;
        // Vamoose continues the guest itself, once the source has stopped for good.
        let waiting = match way {
            Way::Stock => self.machine().incoming(),
            _ => self.machine().incoming().paused(),
        };
        let waiting = self.network.destination().place(waiting.preallocate());
        let destination = Guest::start(&waiting)?;
        self.guard.watch(destination.qemu.process())?;
        source.wait_ready(LIMIT)?;
        source.wait_ticks(5, LIMIT)?;
        note(format!(
            "{way}: the guest has booted and filled its memory ({:.1} s)",
            start.elapsed().as_secs_f64()
        ));
        Ok((source, destination))
    }

    /// Its progress is shown as a user would see it.
    fn by_vamoose(&self, way: Way, source: &Guest, destination: &Guest) -> Result<Reported> {
        let server = self.server(way);
        let name = format!("{way:?}").to_lowercase();
        let monitor = server.monitors.path().join(format!("{name}.qmp"));
        let socket = destination.qemu.qmp_socket();
        let memory = [&source.qemu, &destination.qemu].map(|qemu| qemu.ram().to_owned());
        let (cable, hold) = if way == Way::Cut {
            let cable = self.network.cable(&server.to)?;
            let hold = Hold::start(self.guard, &monitor, &socket, memory)?;
            (Some(cable), Some(hold))
        } else {
            std::os::unix::fs::symlink(socket, monitor)
                .context("linking the destination's monitor")?;
            (None, None)
        };
        let report = server.monitors.path().join(format!("{name}.json"));

        let to = match &cable {
            Some(cable) => cable.address(&server.to),
            None => server.to.clone(),
        };
        let options = format!(
            "--to {to} --name {name} --channels {CHANNELS} --downtime-limit {DOWNTIME_LIMIT}"
        );
        let mut command = self.network.source().command(&self.vamoose);
        command.args(["migrate", "--qmp"]);
        command.arg(source.qemu.qmp_socket());
        let security = if way == Way::Plain {
            command.arg("--insecure");
            "--insecure"
        } else {
            command.arg("--keys").arg(&self.keys.source);
            "--keys DIR"
        };
        note(format!(
            "$ vamoose migrate --qmp SOCKET {security} {options}"
        ));
        command.args(options.split(' '));
        command.arg("--state-dir").arg(self.state.path());
        command.arg("--json").arg(&report).stdin(Stdio::null());
        let mut migrating = Child::start(&mut command)?;
        self.guard.watch(migrating.process())?;
        let said = || format!("vamoose serve says:\n{}", server.vamoose.stderr());
        if let Some(cable) = &cable {
            cut::pull_and_plug(cable, migrating.process(), source).with_context(said)?;
        }
        let (status, cpu) = migrating.finish(LIMIT).with_context(said)?;
        ensure!(status.success(), "vamoose migrate: {status}; {}", said());

        let text = fs::read(&report).context("reading the report")?;
        let report: Value = serde_json::from_slice(&text).context("the report is not JSON")?;
        if cable.is_some() {
            cut::show(&report["link"])?;
        }
        let held = hold.map_or(Ok(Duration::ZERO), Hold::finish)?;
        let downtime = Duration::from_millis(number(&report["downtime"], "downtime")?);
        Ok(Reported {
            held,
            downtime: downtime.saturating_sub(held),
            wire_bytes: Some(number(&report["wire-bytes"], "wire-bytes")?),
            page_bytes: number(&report["page-bytes"], "page-bytes")?,
            migrating: cpu,
        })
    }

    /// QEMU to QEMU. The destination is not told to wait (no -S), which is the fastest way that it has.
    fn by_qemu(&self, source: &mut Guest, destination: &mut Guest) -> Result<Reported> {
        for qmp in [&mut source.qemu.qmp, &mut destination.qemu.qmp] {
            qmp.use_multifd(CHANNELS)?;
            // The level is 1 by default, as Vamoose's.
            qmp.set_parameters(json!({
                "multifd-compression": METHOD, "downtime-limit": DOWNTIME_LIMIT
            }))?;
        }
        let address = self.network.destination().address();
        let waiting = &mut destination.qemu.qmp;
        waiting.migrate_incoming(&format!("tcp:{address}:0"))?;
        let port = waiting.incoming_port()?;
        source.qemu.qmp.migrate(&format!("tcp:{address}:{port}"))?;
        let account = source.qemu.qmp.wait_migration(&["completed"], LIMIT)?;
        destination.qemu.qmp.wait_status("running", LIMIT)?;
        let ram = &account["ram"];
        Ok(Reported {
            downtime: Duration::from_millis(number(&account["downtime"], "downtime")?),
            // Older QEMUs count pages as if they were not compressed.
            wire_bytes: if source.qemu.version.major < 9 {
                None
            } else {
                Some(number(&ram["transferred"], "transferred")?)
            },
            page_bytes: number(&ram["normal-bytes"], "normal-bytes")?,
            migrating: 0.0,
            held: Duration::ZERO,
        })
    }
}

fn expect_status(guest: &mut Guest, wanted: &str) -> Result<()> {
    let status = guest.qemu.qmp.query_status()?;
    ensure!(status == wanted, "is '{status}' instead of '{wanted}'");
    Ok(())
}

/// What has become of the QEMUs of a migration that failed.
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

fn number(value: &Value, name: &str) -> Result<u64> {
    let number = value.as_u64();
    number.with_context(|| format!("no {name} reported"))
}
