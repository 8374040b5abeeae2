//! `vamoose serve`: accepts migrations on the destination host.

use std::{fs, num::NonZeroU64, sync::Arc, thread, time::Duration};

use anyhow::{Context as _, Result, anyhow};
use clap::Args;
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};
use tracing::{error, info};
use vamoose_codec::Settings;
use vamoose_link::{Address, Hangup, Limit, PageCaches, SessionConfig};
use vamoose_relay::{Role, Server, ServerConfig};

use vamoose::exit::OrUsage as _;
use vamoose::link::{LinkOptions, PageStoreOptions, page_caches};
use vamoose::metrics::{self, Counts, MetricsOption};
use vamoose::options::{Access, Hardware, QmpDir, StallTimeout, StateDir};
use vamoose::values::{Rate, Size, positive_seconds, seconds};
use vamoose::watchable;

/// Accept incoming migrations for QEMUs waiting on this host
///
/// Start each QEMU like the source's, with -incoming defer, -S (without -S, vamoose turns its automatic start off) and its QMP
/// socket at DIR/GUEST.qmp. `vamoose migrate GUEST HOST` on the source host moves the guest into it. A QEMU whose migration
/// fails holds an incomplete guest and is terminated. The first Ctrl-C or SIGTERM lets migrations under way finish; a second
/// one aborts them. SIGHUP reads the file of --max-bandwidth again.
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
    /// Most that all migrations to this host receive together, such as 500Mbit or 80M (MiB per second), or the absolute path of
    /// a file that says so
    ///
    /// Guests share it equally; those that are paused or nearly finished come first. The file has a rate, or `none`.
    #[arg(long, value_name = "RATE|FILE")]
    max_bandwidth: Option<String>,
    #[command(flatten)]
    page_store: PageStoreOptions,
    #[command(flatten)]
    metrics: MetricsOption,
    #[command(flatten)]
    access: Access,
}

/// The limit that `given`, or the file of that name, has.
fn max_bandwidth(given: Option<&str>) -> Result<Option<NonZeroU64>> {
    let text = match given {
        Some(path) if path.starts_with('/') => {
            fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?
        }
        given => given.unwrap_or("none").to_owned(),
    };
    match text.trim() {
        "none" => Ok(None),
        rate => match rate.parse::<Rate>() {
            Ok(rate) => Ok(Some(rate.0)),
            Err(error) => Err(anyhow!("--max-bandwidth: {error}")),
        },
    }
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let stall_timeout = options.stall_timeout.duration();
    let bandwidth = options.max_bandwidth.as_deref();
    let limit = Limit::new(max_bandwidth(bandwidth).or_usage()?);
    let store = options.page_store.open()?;
    let sessions = SessionConfig {
        limit: limit.clone(),
        page_caches: PageCaches::new(page_caches(options.page_caches)),
        page_store: store.clone(),
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
    let limits = vec![(Role::Destination, limit.clone())];
    let _metrics = metrics
        .map(|at| metrics::serve(at, &counts, limits, store.as_ref()))
        .transpose()?;
    for address in server.addresses() {
        info!("taking migrations on {address}");
    }
    let stop = Hangup::new()?;
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM]).context("cannot catch signals")?;
    let handle = signals.handle();
    thread::scope(|scope| {
        let _end = watchable::serve(scope, watchable.as_ref(), || server.under_way());
        scope.spawn(|| {
            let mut told = signals.forever().filter(|signal| {
                if *signal == SIGHUP {
                    match max_bandwidth(bandwidth) {
                        Ok(rate) => {
                            limit.set(rate);
                            info!("the bandwidth limit has been read again");
                        }
                        Err(error) => error!("the previous limit stays in force: {error:#}"),
                    }
                }
                *signal != SIGHUP
            });
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
