//! `vamoose serve`: accepts migrations on the destination host.

use std::{sync::Arc, thread, time::Duration};

use anyhow::{Context as _, Result, anyhow};
use clap::Args;
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    iterator::Signals,
};
use tracing::info;
use vamoose_codec::Settings;
use vamoose_link::{Address, Hangup, PageCaches, SessionConfig};
use vamoose_relay::{Server, ServerConfig};

use vamoose::exit::OrUsage as _;
use vamoose::link::{LinkOptions, page_caches};
use vamoose::metrics::{self, Counts, MetricsOption};
use vamoose::options::{Access, Hardware, QmpDir, StallTimeout, StateDir};
use vamoose::values::{Size, positive_seconds, seconds};
use vamoose::watchable;

/// Accept incoming migrations for QEMUs waiting on this host
///
/// Start each QEMU like the source's, with -incoming defer, -S (without -S, vamoose turns its automatic start off) and its QMP
/// socket at DIR/GUEST.qmp. `vamoose migrate GUEST HOST` on the source host moves the guest into it. A QEMU whose migration
/// fails holds an incomplete guest and is terminated. The first Ctrl-C or SIGTERM lets migrations under way finish; a second
/// one aborts them.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  vamoose serve
  vamoose serve --listen tcp:192.0.2.20:4440 --qmp-dir /run/vms")]
pub(crate) struct Options {
    /// Address to listen on: tcp:HOST:PORT, where no HOST means all addresses of this host (repeatable)
    #[arg(long, value_name = "URI", default_value = "tcp::4440")]
    listen: Vec<Address>,
    #[command(flatten)]
    link: LinkOptions,
    #[command(flatten)]
    qmp_dir: QmpDir,
    #[command(flatten)]
    hardware: Hardware,
    #[command(flatten)]
    stall_timeout: StallTimeout,
    #[command(flatten)]
    state_dir: StateDir,
    /// Report a loaded guest as orphaned after this time without contact from its source
    ///
    /// An orphaned guest is neither run nor terminated: `vamoose attempts` lists it.
    #[arg(long, default_value = "5min", value_name = "TIME", value_parser = positive_seconds)]
    orphan_timeout: Duration,
    /// Time for migrations under way to finish after SIGTERM
    #[arg(long, default_value = "5min", value_name = "TIME", value_parser = seconds)]
    drain_timeout: Duration,
    /// Most memory for the page caches of all migrations together [default: a quarter of the host's, at most 4 GiB]
    ///
    /// When this memory is used up, migrations use smaller caches, or none.
    #[arg(long, value_name = "SIZE")]
    page_caches: Option<Size>,
    #[command(flatten)]
    metrics: MetricsOption,
    #[command(flatten)]
    access: Access,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let stall_timeout = options.stall_timeout.duration();
    let sessions = SessionConfig {
        page_caches: PageCaches::new(page_caches(options.page_caches)),
        ..(options.link.config(&options.listen, stall_timeout)).or_usage()?
    };
    let qmp_dir = &options.qmp_dir.qmp_dir;
    if !qmp_dir.is_dir() {
        return Err(anyhow!(
            "--qmp-dir: {} is not a directory",
            qmp_dir.display()
        ))
        .or_usage();
    }
    let engines = options.hardware.engines(Settings::default()).or_usage()?;
    let config = ServerConfig {
        qmp_dir: qmp_dir.clone(),
        state_dir: options.state_dir.path().or_usage()?,
        engines,
        sessions,
        peers: options.access.peers(),
        orphan_timeout: options.orphan_timeout,
    };
    let counts = Arc::<Counts>::default();
    let watchable = watchable::bind(&config.state_dir);
    let server = Server::bind(&options.listen, config)?.observed_by(counts.clone());
    let metrics = options.metrics.metrics.as_ref();
    let _metrics = metrics.map(|at| metrics::serve(at, &counts)).transpose()?;
    for address in server.addresses() {
        info!("taking migrations on {address}");
    }
    let stop = Hangup::new()?;
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("cannot catch signals")?;
    let handle = signals.handle();
    thread::scope(|scope| {
        let _end = watchable::serve(scope, watchable.as_ref(), || server.under_way());
        scope.spawn(|| {
            let mut told = signals.forever();
            if told.next().is_some() {
                info!("no further migrations are accepted; those under way finish");
                server.drain(options.drain_timeout);
            }
            if told.next().is_some() {
                info!("stopping; migrations under way are aborted");
                stop.hang_up();
            }
        });
        let served = server.run(&stop);
        handle.close();
        served
    })?;
    Ok(())
}
