//! `vamoose migrate`: drives a source QEMU through a migration.

use std::{
    path::PathBuf,
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Error, Result};
use clap::{Args, ValueEnum};
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};
use tracing::info;
use vamoose_link::{Address, Snapshot};
use vamoose_relay::{Cause, Failure, GuestLocation, Migration, Moved};

use crate::{
    options::{self, Encoding, StateDir},
    progress::Display,
    report::{Report, millis},
};

/// Move a running guest to a QEMU that waits at a `vamoose serve`
///
/// Ctrl-C cancels: the guest runs on here. When the source has stopped for good and the server cannot
/// be reached, this goes on asking; run the same command again if it was ended meanwhile: it continues
/// its attempt, or says what became of it.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Monitor of the source QEMU, a unix socket
    #[arg(long, value_name = "SOCKET")]
    qmp: PathBuf,
    /// Where `vamoose serve` listens: tcp:HOST:PORT
    #[arg(long, value_name = "URI")]
    to: Address,
    /// Name of the waiting QEMU there: its monitor is NAME.qmp
    #[arg(long)]
    name: String,
    #[command(flatten)]
    encoding: Encoding,
    /// Data channels
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    channels: u8,
    /// Longest downtime to aim at, in milliseconds [default: QEMU's setting]
    #[arg(long, value_name = "MS")]
    downtime_limit: Option<u64>,
    /// Longest time, in seconds, for which the guest may stand still before the destination has all of
    /// it: the migration fails then, and the guest goes on here
    #[arg(long, default_value_t = 10, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    downtime_max: u64,
    #[command(flatten)]
    state_dir: StateDir,
    /// How the source finds zero pages [default: the best that both QEMUs know]
    #[arg(long, value_enum)]
    zero_page_detection: Option<ZeroPageDetection>,
    /// Write a report as JSON to a file, or to standard output with -
    #[arg(long, value_name = "FILE")]
    json: Option<String>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ZeroPageDetection {
    /// Zero pages are sent like any other
    None,
    /// In the migration thread, sent on the main stream
    Legacy,
    /// In the channel threads (QEMU 9.0 and newer on both sides)
    Multifd,
}

impl ZeroPageDetection {
    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Legacy => "legacy",
            Self::Multifd => "multifd",
        }
    }
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let config = options.encoding.config()?;
    let method = config.method.clone();
    let cancel = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        flag::register(signal, cancel.clone()).context("cannot catch signals")?;
    }
    let state_dir = options.state_dir.path()?;
    let start = Instant::now();
    let mut display = Display::new();
    let mut last = Snapshot::default();
    let moved = Migration {
        qmp: &options.qmp,
        to: &options.to,
        state_dir: &state_dir,
        name: &options.name,
        channels: options.channels,
        config,
        downtime_limit: options.downtime_limit.map(Duration::from_millis),
        downtime_max: Duration::from_secs(options.downtime_max),
        zero_page_detection: options.zero_page_detection.map(ZeroPageDetection::name),
        cancel: &cancel,
    }
    .run(&mut |progress| {
        last = progress.moved;
        display.show(progress);
    });
    display.end();
    let report = match &moved {
        Ok(moved) => {
            Report::new(&method, moved.moved, moved.total_time, Duration::ZERO).of_guest(moved)
        }
        Err(failure) => {
            let elapsed = start.elapsed();
            Report::new(&method, last, elapsed, Duration::ZERO).failed(status(failure), failure)
        }
    };
    if let Some(target) = &options.json {
        report.write(target)?;
    }
    let moved = moved.map_err(with_advice).map_err(options::with_advice)?;
    say(&options.name, &moved, &report);
    Ok(())
}

/// Adds what is to be done about a guest that is nowhere for certain.
fn with_advice(failure: Failure) -> Error {
    let advice = match (failure.guest, failure.attempt) {
        (GuestLocation::InDoubt, Some(attempt)) => format!(
            "run the same command again to finish the migration, and continue the guest on neither host by hand \
             before. If the destination is gone for good, look there whether the guest runs, then: \
             vamoose settle --attempt {attempt} --as running-there|never-ran"
        ),
        _ => return failure.into(),
    };
    let failure = Error::from(failure);
    let line = crate::one_line(&failure);
    failure.context(format!("{line}: {advice}"))
}

/// QEMU's word for how it ended.
fn status(failure: &Failure) -> &'static str {
    match failure.cause {
        Cause::Cancelled => "cancelled",
        _ => "failed",
    }
}

fn say(name: &str, moved: &Moved, report: &Report) {
    let ratio = report.page_bytes as f64 / report.wire_bytes.max(1) as f64;
    info!(
        "{name}: moved in {:.1} s, downtime {}, {} MiB on the wire ({ratio:.2}x)",
        moved.total_time.as_secs_f64(),
        moved.downtime.map_or_else(
            || "none (it was paused)".to_owned(),
            |downtime| format!("{} ms", millis(downtime))
        ),
        report.wire_bytes >> 20,
    );
}
