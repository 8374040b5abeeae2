//! `vamoose relay`: one migration between two sockets.

use std::{
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use tracing::{info, warn};
use vamoose_link::{Address, Hangup, Listener, Sessions, Stats};
use vamoose_relay::{Accept, Config, Dialer, Outcome, Relay, ZeroPages};

use vamoose::{
    exit::OrUsage as _,
    link::LinkOptions,
    options::{Access, Encoding, JsonReport, MethodName, Switch, refuse_open_address},
    report::Report,
};

/// Relay one migration from a source QEMU, or another relay, to a destination
///
/// The source migrates to --listen; a destination QEMU listens on --connect. With --method zlib or zstd, a stock destination
/// decodes the pages itself (set its multifd-compression parameter). With any other method, a second relay on the destination
/// host restores the pages with --method none. Enable the source's return-path capability: without it, nothing confirms
/// that the guest has arrived.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  vamoose relay --listen unix:/run/out.sock --connect tcp:kvm2:4444 --method zstd
  vamoose relay --listen unix:/run/out.sock --connect tcp:kvm2:4440 --session connect")]
pub(crate) struct Options {
    /// Address the source connects to: tcp:HOST:PORT or unix:PATH
    #[arg(long, value_name = "URI")]
    listen: Address,
    /// Address the destination listens on: tcp:HOST:PORT or unix:PATH
    ///
    /// With --session connect, repeat this option for further addresses of the other relay's host.
    #[arg(long, value_name = "URI", required = true)]
    connect: Vec<Address>,
    /// Which side is another relay, on another host, instead of a QEMU
    ///
    /// The two relays then authenticate each other, encrypt and check all data, and survive the loss of connections. The
    /// other relay needs --session for the opposite side.
    #[arg(long, value_enum, value_name = "SIDE")]
    session: Option<Side>,
    /// Address of this host from which to connect to the other relay: one for each --connect, in the same order
    #[arg(long, value_name = "ADDRESS", requires = "session")]
    bind: Vec<IpAddr>,
    #[command(flatten)]
    link: LinkOptions,
    #[command(flatten)]
    encoding: Encoding,
    /// Channels to the destination (its multifd-channels parameter) [default: as incoming]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    channels: Option<u8>,
    /// Channels from the source [default: auto-detect]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    incoming_channels: Option<u8>,
    /// Treatment of zero pages in packets; QEMU before 9.0 loses them
    #[arg(long, value_enum, default_value_t = ZeroPagesName::Pass)]
    zero_pages: ZeroPagesName,
    /// Zero-page detection in this relay, for a source that does not detect zero pages
    #[arg(long, value_enum, default_value_t = ZeroPageDetection::None)]
    zero_page_detection: ZeroPageDetection,
    #[command(flatten)]
    access: Access,
    #[command(flatten)]
    json: JsonReport,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Side {
    /// Accept `vamoose relay --session connect` at --listen
    Listen,
    /// Connect to `vamoose relay --session listen` at --connect
    Connect,
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

impl Options {
    /// The best method that the other end is certain to decode.
    fn default_method(&self) -> MethodName {
        match self.session {
            Some(Side::Connect) => MethodName::Auto,
            _ => MethodName::NONE,
        }
    }

    fn config(&self) -> Result<Config> {
        let mut config = self.encoding.config(self.default_method())?;
        if self.encoding.delta == Some(Switch::On) && self.session != Some(Side::Connect) {
            bail!(
                "--delta on needs --session connect: only another relay keeps the pages that differences refer to"
            );
        }
        config.restore = self.session == Some(Side::Listen) && !self.encoding.has_method();
        if config.restore {
            info!(
                "pages are encoded by the method of the source's QEMU, if the other relay reports it"
            );
        }
        config.outgoing_channels = self.channels.map(usize::from);
        config.incoming_channels = self.incoming_channels.map(usize::from);
        config.zero_pages = match (self.zero_pages, self.zero_page_detection) {
            (ZeroPagesName::Pass, ZeroPageDetection::None) => ZeroPages::Pass,
            (ZeroPagesName::Pass, ZeroPageDetection::Cpu) => ZeroPages::Detect,
            (ZeroPagesName::Expand, ZeroPageDetection::None) => ZeroPages::Expand,
            (ZeroPagesName::Expand, ZeroPageDetection::Cpu) => {
                bail!("--zero-page-detection cpu would undo --zero-pages expand: choose one");
            }
        };
        Ok(config)
    }

    fn dialer(&self, stall_timeout: Duration) -> Result<Dialer> {
        if self.session == Some(Side::Connect) {
            let remote = self.link.remote(&self.connect, &self.bind, stall_timeout)?;
            return Ok(Dialer::remote(remote));
        }
        match &self.connect[..] {
            [address] if self.bind.is_empty() => Ok(Dialer::new(address.clone())),
            _ => bail!("several addresses to connect to, and --bind, need --session connect"),
        }
    }

    fn accept(&self, stall_timeout: Duration) -> Result<Box<dyn Accept>> {
        let listener = Listener::bind_for(&self.listen, stall_timeout, self.access.peers())?;
        let address = listener.address().clone();
        let accept: Box<dyn Accept> = match self.session {
            Some(Side::Listen) => {
                let config = self.link.config([&self.listen], stall_timeout).or_usage()?;
                Box::new(Sessions::new(vec![listener], config)?)
            }
            _ => {
                refuse_open_address(&self.listen, self.link.security.is_insecure()).or_usage()?;
                Box::new(listener)
            }
        };
        info!("listening on {address}");
        Ok(accept)
    }
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let config = options.config().or_usage()?;
    let dialer = options.dialer(config.stall_timeout).or_usage()?;
    options.json.check().or_usage()?;
    let accept = options.accept(config.stall_timeout)?;
    let start = Instant::now();
    let stats = Arc::new(Stats::default());
    let result = Relay {
        accept: &*accept,
        dialer: &dialer,
        config: &config,
        hangup: &Hangup::new()?,
        stats: &stats,
        reached: &|_| (),
    }
    .run();
    if result.is_ok() {
        accept.drain(config.stall_timeout);
        if dialer
            .with()
            .is_some_and(|session| !session.drain(config.stall_timeout))
        {
            warn!("the other relay has not acknowledged the end");
        }
    }
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
    let report = report.of_link(dialer.with().as_ref());
    options.json.write(&report)?;
    let summary = result?;
    info!(
        "{}: {} normal and {} zero pages in {} ms, {} bytes on the wire",
        match summary.outcome {
            Outcome::Loaded => "the destination has loaded the guest",
            Outcome::Unconfirmed => "delivered, unconfirmed",
            Outcome::Unseen =>
                "passed on behind TLS; whether a guest has moved only the QEMUs know",
        },
        report.ram.normal,
        report.zero_pages,
        report.total_time,
        report.wire_bytes,
    );
    Ok(())
}
