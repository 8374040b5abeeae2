//! `vamoose-demo`: migrates a small guest between two processes with `vamoose-live`, and proves that it arrived intact.
//!
//! ```text
//!  vamoose-demo (source)                          vamoose-demo destination, started by the source
//!  makes the guest, lets it run                   makes its memory, listens
//!        │ ══ the migration, by vamoose-live ═══════════> loads the guest, does not let it run yet
//!  digest of all memory                           verifies its checksum, digest of all memory
//!        │ <──────────────── both, and CPU time ────────  │
//!  compares, verifies its own                     resumes the guest, pauses it, verifies again
//! ```
//!
//! If the migration fails, the guest resumes at the source, and is verified there.

#![deny(unsafe_code)]

mod destination;
mod digest;
mod dirty_log;
mod dsa;
mod guest;
mod link;
mod messages;
mod process;
mod report;
mod source;

use std::{
    process::ExitCode,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use anyhow::{Context as _, Error, Result, bail};
use clap::{Args, Parser, Subcommand};
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};
use testguest::{Fill, Guest, fill};
use tracing::info;
use vamoose::{
    log::LogOptions,
    options::{Hardware, JsonReport, MethodName},
    values::{Rate, milliseconds, positive_seconds},
};
use vamoose_live::{Address, GuestLocation, Ram, Source, SourceConfig, SourceError};

use crate::{
    digest::digest,
    dsa::DsaOptions,
    guest::{Shape, ram_of, run_briefly},
    link::LinkOptions,
    messages::{Arrived, Order},
    process::Process,
    report::Outcome,
    source::Run,
};

/// Migrate a small guest between two processes, and prove that it arrived intact
///
/// The guest writes its memory all the time and keeps a checksum of it. At the switchover, all of the memory is compared too. The
/// destination holds the guest back during the comparison, which does not count as downtime. Then the guest runs for some thousand
/// writes and is checked again. CPU time is reported for both sides, without making and comparing the memory. The exit code is 0
/// if all checks pass. Ctrl-C cancels: the guest resumes at the source.
#[derive(Parser, Debug)]
#[command(
    name = "vamoose-demo",
    version,
    max_term_width = 100,
    args_conflicts_with_subcommands = true
)]
struct Options {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    guest: GuestOptions,
    #[command(flatten)]
    migration: MigrationOptions,
    /// Address the destination listens on: tcp:HOST:PORT or unix:PATH
    #[arg(long, value_name = "URI", default_value = "tcp:127.0.0.1:0")]
    listen: Address,
    /// Command that starts the destination in another place on this host: `ip netns exec NAME`, or `taskset -c 1`
    #[arg(long, value_name = "COMMAND")]
    via: Option<String>,
    #[command(flatten)]
    link: LinkOptions,
    #[command(flatten)]
    json: JsonReport,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Receive the guest; started by the source, which knows the order
    #[command(hide = true)]
    Destination { order: String },
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Guest")]
struct GuestOptions {
    #[command(flatten)]
    shape: Shape,
    /// Initial content of the memory
    #[arg(long, value_enum, default_value_t = Fill::Mixed)]
    fill: Fill,
    /// Populate the destination's memory before the migration (at the source, every --fill but `untouched` does)
    #[arg(long)]
    prealloc: bool,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "Migration")]
struct MigrationOptions {
    /// Encoding of pages towards the destination
    #[arg(long, value_enum, default_value_t = MethodName::Auto)]
    method: MethodName,
    /// Level of the method [default: 1]
    #[arg(long, allow_negative_numbers = true, value_name = "N")]
    level: Option<i32>,
    #[command(flatten)]
    hardware: Hardware,
    /// Number of data channels, 1 to 64
    #[arg(long, default_value_t = 2, value_name = "N")]
    channels: u8,
    /// Send pages without copying them, for method none and plain connections
    #[arg(long, requires = "plain")]
    zero_copy: bool,
    #[command(flatten)]
    dsa: DsaOptions,
    /// Bandwidth limit towards the destination, such as 80M (MiB per second), 80MB/s or 500Mbit
    #[arg(long, value_name = "RATE")]
    max_bandwidth: Option<Rate>,
    /// Longest downtime of the guest to accept; a number alone is in milliseconds
    #[arg(long, default_value = "300ms", value_name = "TIME", value_parser = milliseconds)]
    downtime_limit: Duration,
    /// Abort if the migration has not converged after this time
    #[arg(long, value_name = "TIME", value_parser = positive_seconds)]
    timeout: Option<Duration>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    vamoose::program("vamoose-demo", &LogOptions::default(), || {
        match &options.command {
            Some(Command::Destination { order }) => destination::run(order),
            None => run(&options),
        }
    })
}

fn run(options: &Options) -> Result<()> {
    let (shape, migration) = (&options.guest.shape, &options.migration);
    shape.check()?;
    migration.dsa.check()?;
    let ([link, link_there], _keys) = options.link.sides()?;
    let order = Order {
        shape: shape.clone(),
        prealloc: options.guest.prealloc,
        hardware: migration.hardware.clone(),
        listen: options.listen.to_string(),
        link: link_there,
    };
    let mut config = migration.config()?;
    // Without a command, the link is loopback; with one, its path is unknown.
    config.direct_link = options.via.is_none();
    let cancel = cancelled_by_signals()?;
    let mut destination = Process::start(options.via.as_deref(), &order)?;
    let guest = options.guest.make()?;
    let ram = ram_of(guest.memory())?;
    let log = dirty_log::open(&guest, &ram)?;
    let source = Source::with_config(ram.clone(), log, config.clone())?;
    let address: String = destination.receive()?;
    let process = destination.id();
    info!("the destination, process {process}, listens on {address}");
    let to = link.to(&address)?;
    if shape.rate != 0 {
        guest.resume()?;
    }
    let (run, result) = source::migrate(source, &to, &guest, &cancel);
    let outcome = match result {
        Ok(()) => moved(&guest, &ram, &mut destination),
        Err(error) => stayed(error, &guest, shape.rate, destination),
    };
    let report = report::json(
        &config,
        migration.dsa.zero_page_detection,
        shape,
        &run,
        &outcome,
    )?;
    if outcome.at == "destination" {
        summarise(&run, shape, &outcome);
    }
    options.json.write(&report)?;
    match outcome.failure {
        None => Ok(()),
        Some(failure) => bail!(failure),
    }
}

impl GuestOptions {
    /// The guest at the source, paused.
    fn make(&self) -> Result<Guest> {
        let memory = self.shape.memory()?;
        fill(&memory, self.fill);
        Guest::new(&self.shape.config(memory))
    }
}

impl MigrationOptions {
    fn config(&self) -> Result<SourceConfig> {
        if self.zero_copy && self.method != MethodName::NONE {
            bail!("--zero-copy needs --method none: compressed pages are copies");
        }
        let mut config = SourceConfig::new(self.method.choose(self.level, &self.hardware)?);
        config.channels = self.channels;
        config.zero_copy = self.zero_copy;
        config.zero_page_detection = self.dsa.detection(&self.hardware)?;
        config.max_bandwidth = self.max_bandwidth.map(|rate| rate.0);
        config.downtime_limit = self.downtime_limit;
        config.timeout = self.timeout;
        Ok(config)
    }
}

/// Returns a flag that Ctrl-C sets. A second Ctrl-C ends this process and the destination immediately.
fn cancelled_by_signals() -> Result<Arc<AtomicBool>> {
    /// Exit code of a process that Ctrl-C has ended, as shells report it.
    const INTERRUPTED: i32 = 130;
    let cancel = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        flag::register_conditional_shutdown(signal, INTERRUPTED, cancel.clone())
            .and_then(|_| flag::register(signal, cancel.clone()))
            .context("cannot catch signals")?;
    }
    Ok(cancel)
}

/// Proves that the guest at the destination is intact.
fn moved(guest: &Guest, ram: &Ram, destination: &mut Process) -> Outcome {
    let mut outcome = Outcome {
        status: "completed",
        at: "destination",
        writes: guest.written(),
        ..Outcome::default()
    };
    if let Err(error) = prove(guest, ram, destination, &mut outcome) {
        outcome.failure = Some(format!("the guest has moved, but {error:#}"));
    }
    outcome
}

fn prove(guest: &Guest, ram: &Ram, destination: &mut Process, outcome: &mut Outcome) -> Result<()> {
    // The destination reads its memory at the same time.
    let digest = digest(ram)?;
    let checksum = guest.verify()?;
    let arrived: Arrived = destination.receive()?;
    outcome.memory_equal = Some(arrived.digest == digest);
    let verdict = arrived.check(&checksum, &digest);
    outcome.arrived = Some(arrived);
    verdict?;
    outcome.writes_after = destination.receive()?;
    outcome.checksum_holds = true;
    Ok(())
}

/// Resumes and verifies the guest, if it is at the source.
fn stayed(error: SourceError, guest: &Guest, rate: u64, destination: Process) -> Outcome {
    let here = error.guest() == GuestLocation::Source;
    let status = match error {
        SourceError::Cancelled => "cancelled",
        _ => "failed",
    };
    let mut cause = format!("{:#}", Error::from(error));
    if let Some(signal) = destination.end() {
        cause += &format!("; the destination's process was killed by signal {signal}");
    }
    let mut outcome = Outcome {
        status,
        failure: Some(cause.clone()),
        at: if here { "source" } else { "undecided" },
        writes: guest.written(),
        ..Outcome::default()
    };
    if !here {
        return outcome;
    }
    guest.pause();
    outcome.writes = guest.written();
    let proven = run_briefly(guest, rate).and_then(|writes| {
        outcome.writes_after = writes;
        guest.verify()
    });
    outcome.checksum_holds = proven.is_ok();
    outcome.failure = Some(match proven {
        Ok(_) => format!(
            "{cause}: the guest resumed at the source, and its checksum holds ({} pages written since)",
            outcome.writes_after
        ),
        Err(error) => format!("{cause}: the guest stayed at the source, and {error:#}"),
    });
    outcome
}

/// Logs whether the guest is intact.
fn summarise(run: &Run, shape: &Shape, outcome: &Outcome) {
    let status = run.handle.status();
    info!(
        "moved in {:?}, downtime {:?}, {} rounds",
        status.total_time,
        status.downtime.unwrap_or_default(),
        status.ram.dirty_sync_count,
    );
    let yes = |holds| if holds { "yes" } else { "NO" };
    info!(
        "all {} MiB of memory equal: {}; checksum holds: {} ({} pages written before, {} after)",
        shape.ram_bytes >> 20,
        outcome.memory_equal.map_or("unknown", yes),
        yes(outcome.checksum_holds),
        outcome.writes,
        outcome.writes_after,
    );
}
