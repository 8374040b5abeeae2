//! `vamoose relay`: one migration between two sockets.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use tracing::info;
use vamoose_link::{Address, Hangup, Listener, Peers, Stats};
use vamoose_relay::{Dialer, Outcome, Relay, ZeroPages};

use crate::{
    options::{Encoding, with_advice},
    report::Report,
};

/// Relay one migration from a source QEMU, or another relay, to a destination
///
/// The source migrates to --listen; a destination QEMU listens on --connect. With --method zlib or
/// zstd a stock destination decodes the pages itself (set its multifd-compression parameter), or
/// a second relay beside it restores them with --method none. Turn the return-path capability of the
/// source on: without it nobody says whether the guest has arrived.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Where the source connects to: tcp:HOST:PORT or unix:PATH
    #[arg(long, value_name = "URI")]
    listen: Address,
    /// Where the destination listens: tcp:HOST:PORT or unix:PATH
    #[arg(long, value_name = "URI")]
    connect: Address,
    #[command(flatten)]
    encoding: Encoding,
    /// Channels to the destination (its multifd-channels parameter) [default: as incoming]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    channels: Option<u8>,
    /// Channels that the source opens [default: found out]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    incoming_channels: Option<u8>,
    /// What becomes of zero pages: QEMUs before 9.0 lose those that are sent as such
    #[arg(long, value_enum, default_value_t = ZeroPagesName::Pass)]
    zero_pages: ZeroPagesName,
    /// Who looks for zero pages in this relay, for a source that does not
    #[arg(long, value_enum, default_value_t = ZeroPageDetection::None)]
    zero_page_detection: ZeroPageDetection,
    /// Listen on an address that other hosts can reach, on a network that is trusted
    #[arg(long)]
    insecure: bool,
    /// A user of this host that may connect, besides this program's own and root: the source QEMU's. Where we are root
    /// and there is one, a unix socket becomes theirs; else everybody can reach it, and others are turned away
    #[arg(long, value_name = "UID")]
    peer_uid: Vec<u32>,
    /// Write a report as JSON to a file, or to standard output with -
    #[arg(long, value_name = "FILE")]
    json: Option<String>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ZeroPagesName {
    /// Pass them on as they come
    Pass,
    /// Write them out as normal pages, for a destination before QEMU 9.0
    Expand,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ZeroPageDetection {
    /// Nobody: the source does, or it does not pay
    None,
    /// The processor
    Cpu,
    /// Not here: what a relay has just read is in the processor's cache. `live-demo` has it
    #[value(hide = true)]
    Dsa,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    refuse_open_address(&options.listen, options.insecure)?;
    if matches!(options.zero_page_detection, ZeroPageDetection::Dsa) {
        bail!(
            "--zero-page-detection dsa: a relay's pages have just come out of a socket and are in the processor's \
             cache, where it finds zeros cheaply: use cpu (live-demo, which reads a guest's memory, has dsa)"
        );
    }
    let mut config = options.encoding.config()?;
    config.outgoing_channels = options.channels.map(usize::from);
    config.incoming_channels = options.incoming_channels.map(usize::from);
    config.zero_pages = match (options.zero_pages, options.zero_page_detection) {
        (ZeroPagesName::Pass, ZeroPageDetection::None) => ZeroPages::Pass,
        (ZeroPagesName::Pass, _) => ZeroPages::Detect,
        (ZeroPagesName::Expand, ZeroPageDetection::None) => ZeroPages::Expand,
        (ZeroPagesName::Expand, _) => {
            bail!("--zero-page-detection cpu would undo --zero-pages expand: choose one");
        }
    };
    let peers = Peers::own_and(options.peer_uid.iter().copied());
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
    if let Some(target) = &options.json {
        report.write(target)?;
    }
    let summary = result.map_err(|error| with_advice(error.into()))?;
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

/// Until there is authentication, whoever can connect can migrate.
pub(crate) fn refuse_open_address(address: &Address, insecure: bool) -> Result<()> {
    if !address.is_local() && !insecure {
        bail!(
            "other hosts can reach {address}, and vamoose neither authenticates nor encrypts: listen \
             on a loopback address (behind a tunnel), or say --insecure if the network is trusted"
        );
    }
    Ok(())
}
