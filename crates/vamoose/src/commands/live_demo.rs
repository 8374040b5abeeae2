//! `vamoose live-demo`: migrates a small guest between two processes, and proves that it arrived whole.
//!
//! ```text
//!  live-demo (source)                             live-demo-destination, started by the source
//!  makes the guest, lets it run                   makes its memory, listens
//!        │ ══ the migration, by the crate `live` ═══════> loads the guest, does not let it run yet
//!  digest of all memory                           verifies its checksum, digest of all memory
//!        │ <──────────────── both, and CPU time ────────  │
//!  compares, verifies its own                     lets the guest go on, pauses, verifies again
//! ```
//!
//! Where the migration fails, the guest goes on at the source, and is verified there.

mod child;
mod cpu;
pub(crate) mod destination;
mod digest;
mod dsa;
mod log;
mod report;
mod shape;
mod source;
mod talk;
mod verdict;

use std::{
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use anyhow::{Context as _, Error, Result, anyhow, bail};
use clap::Args;
use multifd::Layout;
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};
use testguest::{Fill, Guest, fill};
use tracing::info;
use vamoose_codec::Engines;
use vamoose_link::Address;
use vamoose_live::{AutoConverge, GuestLocation, Ram, Source, SourceConfig, SourceError};

use crate::{
    commands::relay::refuse_open_address,
    options::{Hardware, MethodName, Size},
    report::write_json,
};
use child::Destination;
use digest::Digest;
use dsa::{Done, DsaOptions};
use log::LogName;
use report::{GuestReport, Report};
use shape::{
    BackingName, KindName, PatternName, Rate, Shape, best_kind, check_kind, go_on, parse_fill,
    ram_of,
};
use source::Run;
use talk::Order;

/// Migrate a small guest between two processes of this program, and prove that it arrived whole
///
/// The guest writes its memory all the time and keeps a checksum of it. At the switchover all of the memory is compared too: the
/// destination holds the guest back meanwhile, which is not in the downtime. Then it goes on for some thousand writes, and is
/// checked again. CPU time is told for both sides, without making and comparing the memory. The exit code says whether
/// everything holds. Ctrl-C cancels: the guest goes on at the source.
#[derive(Args, Debug)]
pub(crate) struct Options {
    #[command(flatten)]
    guest: GuestOptions,
    #[command(flatten)]
    migration: MigrationOptions,
    /// Where the destination listens: tcp:HOST:PORT or unix:PATH
    #[arg(long, value_name = "URI", default_value = "tcp:127.0.0.1:0")]
    listen: Address,
    /// Command that starts the destination elsewhere, before the words that start it here: `ip netns exec NAME`,
    /// `taskset -c 1`, `ssh HOST` (with this program in the same place)
    #[arg(long, value_name = "COMMAND")]
    via: Option<String>,
    /// Listen on an address that other hosts can reach, on a network that is trusted
    #[arg(long)]
    insecure: bool,
    /// Write a report as JSON to a file, or to standard output with -
    #[arg(long, value_name = "FILE")]
    json: Option<String>,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "The guest")]
struct GuestOptions {
    /// Its memory
    #[arg(long, default_value = "256M", value_name = "SIZE")]
    ram: Size,
    /// What is in the memory at first: `mixed` (as of a guest at work), `zero` (zeros that were written), `untouched`, or the bytes
    /// of a file
    #[arg(long, default_value = "mixed", value_name = "FILE|zero|untouched|mixed", value_parser = parse_fill)]
    fill: Fill,
    /// What runs it [default: kvm where it can be had]
    #[arg(long, value_enum)]
    guest: Option<KindName>,
    /// How many vCPUs write, 1 to 8
    #[arg(long, default_value_t = 1, value_name = "N")]
    vcpus: u8,
    /// Pages that all vCPUs together write per second: 0 is none, `max` as many as they can
    #[arg(long, default_value = "10000", value_name = "PAGES_PER_S")]
    rate: Rate,
    /// Which pages they write
    #[arg(long, value_enum, default_value_t = PatternName::Random)]
    pattern: PatternName,
    /// What the pattern hot-set writes
    #[arg(long, default_value = "4M", value_name = "SIZE")]
    hot_set: Size,
    /// How much of the memory, at its end, is written at all [default: everything]
    #[arg(long, value_name = "SIZE")]
    working_set: Option<Size>,
    /// What the memory is made of
    #[arg(long, value_enum, default_value_t = BackingName::Anonymous)]
    backing: BackingName,
    /// Populate the destination's memory before the migration (at the source every --fill but `untouched` does)
    #[arg(long)]
    prealloc: bool,
}

#[derive(Args, Debug)]
#[command(next_help_heading = "The migration")]
struct MigrationOptions {
    /// How pages are encoded on the way to the destination
    #[arg(long, value_enum, default_value_t = MethodName::None)]
    method: MethodName,
    /// Level of the method; its default is 1
    #[arg(long, allow_negative_numbers = true)]
    level: Option<i32>,
    #[command(flatten)]
    hardware: Hardware,
    /// Data channels, 1 to 64
    #[arg(long, default_value_t = 2, value_name = "N")]
    channels: u8,
    /// Most bytes of pages in a packet: a power of two, 64k to 4M
    #[arg(long, default_value = "512k", value_name = "SIZE")]
    packet_size: Size,
    /// Send pages without copying them, for method none
    #[arg(long)]
    zero_copy: bool,
    /// How the source finds what the guest writes [default: kvm for a KVM guest, else userfaultfd]
    #[arg(long, value_enum)]
    dirty_log: Option<LogName>,
    #[command(flatten)]
    dsa: DsaOptions,
    /// Percentage of zero pages to send as normal ones all the same: traffic for benchmarks
    #[arg(long, default_value_t = 0, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(..=100))]
    normal_page_ratio: u8,
    /// Most bytes per second on the way to the destination
    #[arg(long, value_name = "RATE")]
    max_bandwidth: Option<Size>,
    /// Longest downtime to aim at, in milliseconds
    #[arg(long, default_value_t = 300, value_name = "MS")]
    downtime_limit: u64,
    /// Abort after this many seconds of downtime: the guest goes on at the source
    #[arg(long, default_value_t = 10, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    downtime_max: u64,
    /// Slow the vCPUs down, step by step, if they write faster than the link moves memory
    #[arg(long)]
    auto_converge: bool,
    /// Give up if the guest has not been paused within so many seconds
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    timeout: Option<u64>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let order = options.order()?;
    let mut config = options.migration.config()?;
    // Over one loopback; what a command leads through is not known.
    config.direct_link = options.via.is_none();
    let dirty_log = options.migration.dirty_log(order.shape.kind)?;
    let cancel = cancelled_by_signals()?;
    let mut destination = Destination::start(options.via.as_deref(), &order)?;
    let guest = options.guest.make(&order.shape)?;
    let ram = ram_of(guest.memory())?;
    let log = log::open(dirty_log, &guest, &ram)?;
    let source = Source::new(ram.clone(), log, config.clone())?;
    let address = destination.listening()?;
    info!(
        "the destination, process {}, listens on {address}",
        destination.pid()
    );
    if order.shape.rate != Rate::Idle {
        guest.resume()?;
    }
    let run = source::migrate(source, &address.parse()?, &guest, &cancel);
    let mut report = Report::new(
        &config.engines,
        config.channels,
        config.packet_bytes,
        config.zero_copy,
        Done::detection(&config.zero_page_detection, run.status.zero_page_detection),
        GuestReport {
            shape: order.shape.clone(),
            at: "destination",
            writes: guest.written(),
            writes_after: 0,
            throttle_percentage: run.status.cpu_throttle_percentage,
            dirty_log,
        },
        &run,
    );
    let verdict = match &run.result {
        Ok(()) => moved(&run, &guest, &ram, &mut destination, &mut report),
        Err(error) => Err(stayed(error, &guest, destination, &mut report)),
    };
    if let Some(target) = &options.json {
        write_json(&report, target)?;
    }
    verdict
}

impl Options {
    /// What the destination is to do; everything in it has been checked.
    fn order(&self) -> Result<Order> {
        refuse_open_address(&self.listen, self.insecure)?;
        let migration = &self.migration;
        let pages_are_decoded = migration.method != MethodName::None;
        migration.dsa.check(pages_are_decoded)?;
        Ok(Order {
            shape: self.guest.shape()?,
            prealloc: self.guest.prealloc,
            hardware: migration.hardware.clone(),
            copy: migration.dsa.copy(migration.pages()),
            listen: self.listen.to_string(),
        })
    }
}

impl GuestOptions {
    fn shape(&self) -> Result<Shape> {
        let kind = self.guest.unwrap_or_else(best_kind);
        check_kind(kind)?;
        Ok(Shape {
            ram_bytes: self.ram.0,
            backing: self.backing,
            kind,
            vcpus: self.vcpus,
            pattern: self.pattern,
            hot_set_bytes: self.hot_set.0,
            working_set_bytes: self.working_set.map(|size| size.0),
            rate: self.rate,
        })
    }

    /// The guest at the source, paused.
    fn make(&self, shape: &Shape) -> Result<Guest> {
        let memory = shape.memory()?;
        fill(&memory, &self.fill).with_context(|| match &self.fill {
            Fill::File(path) => format!("--fill {}", path.display()),
            _ => "cannot fill the memory".to_owned(),
        })?;
        Ok(Guest::new(&shape.config(memory)?)?)
    }
}

impl MigrationOptions {
    fn config(&self) -> Result<SourceConfig> {
        if self.zero_copy && self.method != MethodName::None {
            bail!("--zero-copy: what is compressed is a copy already; it needs --method none");
        }
        let mut config = SourceConfig::new(self.engines()?);
        config.channels = self.channels;
        config.packet_bytes = u32::try_from(self.packet_size.0).unwrap_or(u32::MAX);
        config.zero_copy = self.zero_copy;
        config.zero_page_detection = self.dsa.detection(self.pages(), &self.hardware)?;
        config.normal_page_ratio = self.normal_page_ratio;
        config.max_bandwidth = self.max_bandwidth.map(Size::rate).transpose()?;
        config.downtime_limit = Duration::from_millis(self.downtime_limit);
        config.downtime_max = Duration::from_secs(self.downtime_max);
        config.timeout = self.timeout.map(Duration::from_secs);
        config.auto_converge = self.auto_converge.then(AutoConverge::default);
        Ok(config)
    }

    /// Most pages of a packet.
    fn pages(&self) -> u32 {
        let pages = self.packet_size.0 / Layout::X86.page_size() as u64;
        u32::try_from(pages.clamp(1, MOST_PAGES)).unwrap_or(1)
    }

    fn dirty_log(&self, guest: KindName) -> Result<LogName> {
        match (self.dirty_log, guest) {
            (Some(LogName::Kvm), KindName::Threads) => {
                bail!("--dirty-log kvm: it is of a --guest kvm")
            }
            (Some(log), _) => Ok(log),
            (None, KindName::Kvm) => Ok(LogName::Kvm),
            (None, KindName::Threads) => Ok(LogName::Userfaultfd),
        }
    }

    fn engines(&self) -> Result<Engines> {
        self.hardware.engines(self.method.settings(self.level)?)
    }
}

/// Pages of the largest packets: 4 MiB.
const MOST_PAGES: u64 = 1024;

/// Set by Ctrl-C. A second one ends this process at once, and the destination with it.
fn cancelled_by_signals() -> Result<Arc<AtomicBool>> {
    /// What a shell says of a process that Ctrl-C has ended.
    const INTERRUPTED: i32 = 130;
    let cancel = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        flag::register_conditional_shutdown(signal, INTERRUPTED, cancel.clone())
            .and_then(|_| flag::register(signal, cancel.clone()))
            .context("cannot catch signals")?;
    }
    Ok(cancel)
}

/// Whether the guest that has moved is whole, in words for the user and in the report.
fn moved(
    run: &Run,
    guest: &Guest,
    ram: &Ram,
    destination: &mut Destination,
    report: &mut Report,
) -> Result<()> {
    if let Err(error) = prove(guest, ram, destination, report) {
        report.verdict.wrong.push(crate::one_line(&error));
    }
    say(run, report);
    if report.verdict.wrong.is_empty() {
        return Ok(());
    }
    let wrong = report.verdict.wrong.join("; ");
    report.error_desc = Some(wrong.clone());
    bail!("the guest has moved, but {wrong}");
}

fn prove(
    guest: &Guest,
    ram: &Ram,
    destination: &mut Destination,
    report: &mut Report,
) -> Result<()> {
    // The destination reads its memory meanwhile.
    let digest = Digest::of(ram)?;
    let checksum = guest.verify()?.into();
    let arrived = destination.arrived()?;
    report.account_for(&arrived);
    report.verdict.arrived(&checksum, &digest, &arrived);
    let went_on = destination.went_on()?;
    report.guest.writes_after = went_on.writes;
    report.verdict.went_on(&went_on);
    Ok(())
}

/// What became of a guest that has not moved, in words for the user and in the report.
fn stayed(
    error: &SourceError,
    guest: &Guest,
    destination: Destination,
    report: &mut Report,
) -> Error {
    report.status = match error {
        SourceError::Cancelled => "cancelled",
        _ => "failed",
    };
    let mut cause = vamoose_live::chain(error);
    if let Some(signal) = destination.end() {
        cause = format!("{cause}; the destination's process was killed by signal {signal}");
    }
    report.error_desc = Some(cause.clone());
    if error.guest() != GuestLocation::Source {
        report.guest.at = "undecided";
        return anyhow!(cause);
    }
    report.guest.at = "source";
    guest.pause();
    report.guest.writes = guest.written();
    let proven = go_on(guest, report.guest.shape.rate).and_then(|writes| {
        report.guest.writes_after = writes;
        Ok(guest.verify()?)
    });
    match proven {
        Ok(_) => {
            report.verdict.checksum_holds = true;
            anyhow!(
                "{cause}: the guest went on at the source, and its checksum holds ({} pages written since)",
                report.guest.writes_after
            )
        }
        Err(error) => anyhow!("{cause}: the guest stayed at the source, and {error}"),
    }
}

fn say(run: &Run, report: &Report) {
    let cpu = &report.cpu_seconds;
    info!(
        "moved in {} ms, downtime {} ms, {} rounds, {} MiB on the wire ({:.2}x)",
        report.total_time,
        report.downtime.unwrap_or_default(),
        run.rounds.len(),
        report.wire_bytes >> 20,
        report.page_bytes as f64 / report.wire_bytes.max(1) as f64,
    );
    let yes = |holds| if holds { "yes" } else { "NO" };
    info!(
        "all {} MiB of memory equal: {}; checksum holds: {} ({} pages written before, {} after)",
        report.guest.shape.ram_bytes >> 20,
        report.verdict.memory_equal.map_or("unknown", yes),
        yes(report.verdict.checksum_holds),
        report.guest.writes,
        report.guest.writes_after,
    );
    info!(
        "CPU seconds: source {:.3}, destination {}, the guest meanwhile {}",
        cpu.source,
        seconds(cpu.destination),
        seconds(cpu.guest),
    );
}

fn seconds(seconds: Option<f64>) -> String {
    seconds.map_or_else(|| "unknown".to_owned(), |seconds| format!("{seconds:.3}"))
}
