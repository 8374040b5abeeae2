//! `vamoose relay`: one migration between two sockets.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use tracing::info;
use vamoose_link::{Address, Hangup, Listener, Stats};
use vamoose_relay::{Dialer, Outcome, Relay, ZeroPages};

use vamoose::{
    options::{Access, Encoding, JsonReport},
    report::Report,
};

/// Relay one migration from a source QEMU, or another relay, to a destination
///
/// The source migrates to --listen; a destination QEMU listens on --connect. With --method zlib or zstd a stock destination
/// decodes the pages itself (set its multifd-compression parameter); with any other method, a second relay on the destination
/// host restores them with --method none. Enable the source's return-path capability: without it, nothing confirms
/// that the guest has arrived.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Address the source connects to: tcp:HOST:PORT or unix:PATH
    #[arg(long, value_name = "URI")]
    listen: Address,
    /// Address the destination listens on: tcp:HOST:PORT or unix:PATH
    #[arg(long, value_name = "URI")]
    connect: Address,
    #[command(flatten)]
    encoding: Encoding,
    /// Channels to the destination (its multifd-channels parameter) [default: as incoming]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    channels: Option<u8>,
    /// Channels from the source [default: auto-detect]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    incoming_channels: Option<u8>,
    /// Treatment of zero pages; QEMU before 9.0 loses those that are marked as such
    #[arg(long, value_enum, default_value_t = ZeroPagesName::Pass)]
    zero_pages: ZeroPagesName,
    /// Zero-page detection in this relay, for a source that has it turned off
    #[arg(long, value_enum, default_value_t = ZeroPageDetection::None)]
    zero_page_detection: ZeroPageDetection,
    #[command(flatten)]
    access: Access,
    #[command(flatten)]
    json: JsonReport,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ZeroPagesName {
    /// Forward them as they arrive
    Pass,
    /// Send them as normal pages, for a destination before QEMU 9.0
    Expand,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ZeroPageDetection {
    /// Off
    None,
    /// On the CPU
    Cpu,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let peers = options.access.peers(&options.listen)?;
    let mut config = options.encoding.config()?;
    config.outgoing_channels = options.channels.map(usize::from);
    config.incoming_channels = options.incoming_channels.map(usize::from);
    config.zero_pages = match (options.zero_pages, options.zero_page_detection) {
        (ZeroPagesName::Pass, ZeroPageDetection::None) => ZeroPages::Pass,
        (ZeroPagesName::Pass, ZeroPageDetection::Cpu) => ZeroPages::Detect,
        (ZeroPagesName::Expand, ZeroPageDetection::None) => ZeroPages::Expand,
        (ZeroPagesName::Expand, ZeroPageDetection::Cpu) => {
            bail!("--zero-page-detection cpu would undo --zero-pages expand: choose one");
        }
    };
    let listener = Listener::bind_for(&options.listen, config.stall_timeout, peers)?;
    info!("listening on {}", listener.address());
    let start = Instant::now();
    let stats = Arc::new(Stats::default());
    let result = Relay {
        accept: &listener,
        dialer: &Dialer::new(options.connect.clone()),
        config: &config,
        hangup: &Hangup::new()?,
        stats: &stats,
        on_loaded: &|| (),
    }
    .run();
    let moved = stats.snapshot();
    let report = match &result {
        Ok(summary) => Report::new(
            &config.method,
            moved,
            summary.total_time,
            summary.setup_time,
        ),
        Err(error) => Report::new(&config.method, moved, start.elapsed(), Duration::ZERO)
            .failed("failed", error),
    };
    options.json.write(&report)?;
    let summary = result?;
    info!(
        "{}: {} normal and {} zero pages in {} ms, {} bytes on the wire",
        match summary.outcome {
            Outcome::Loaded => "the destination has loaded the guest",
            Outcome::Unconfirmed => "delivered, unconfirmed",
        },
        report.ram.normal,
        report.zero_pages,
        report.total_time,
        report.wire_bytes,
    );
    Ok(())
}
