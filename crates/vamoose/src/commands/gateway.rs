//! `vamoose gateway`: carries all migrations between this host and others, whatever drives the QEMUs.

mod config;
mod systemd;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use clap::Args;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};
use tracing::{error, info, warn};
use vamoose_link::{Address, PageCaches, Session, Sessions};
use vamoose_relay::{Gateway, GatewayConfig, Watchable};

use self::config::File;
use vamoose::{
    metrics::{self, Counts, MetricsOption},
    options::Hardware,
    watchable,
};

pub(crate) use self::config::{qemu_users, uid};

/// Carry all migrations between this host and others, compressed and encrypted
///
/// Runs until a signal ends it. To migrate a guest, libvirt (or another caller) has QEMU connect to an address of this host that
/// stands for the other host; the gateways of both hosts do the rest. SIGHUP reloads the configuration, keys and certificates.
/// SIGTERM lets migrations under way finish; a second SIGTERM ends them.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Configuration, in TOML: see docs/gateway.md
    #[arg(long, default_value = "/etc/vamoose/gateway.toml", value_name = "FILE")]
    config: PathBuf,
    /// Check the configuration, with its keys or certificates, and exit
    #[arg(long)]
    check: bool,
    /// Seconds for migrations under way to finish after SIGTERM
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    drain_timeout: u64,
    /// Directory in which `vamoose attempts --watch` finds this gateway
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    #[command(flatten)]
    metrics: MetricsOption,
    #[command(flatten)]
    hardware: Hardware,
}

impl Options {
    /// Reads the file, and reports every error that can be found without listening.
    fn read(&self) -> Result<Setting> {
        let file = File::read(&self.config)?;
        let metrics = self.metrics.metrics.clone().or_else(|| file.metrics());
        let page_caches = file.page_caches();
        let config = file.into_config(&self.hardware, self.drain_timeout());
        let config = config.with_context(|| self.config.display().to_string())?;
        Sessions::check(&config.sessions)?;
        for peer in config.dialled() {
            let name = &peer.name;
            Session::check(&peer.remote.config).with_context(|| format!("peer {name}"))?;
        }
        if config.peers.is_empty() {
            warn!("no peers are configured: connections from all hosts are refused");
        }
        for peer in config.peers_with_own_ports() {
            let name = &peer.name;
            warn!(
                "the ports of peer {name} overlap this host's: libvirt here finds no free port for a migration to it"
            );
        }
        Ok(Setting {
            config,
            metrics,
            page_caches,
        })
    }

    fn watchable(&self) -> Option<Watchable> {
        watchable::bind(self.state_dir.as_deref()?)
    }

    fn drain_timeout(&self) -> Duration {
        Duration::from_secs(self.drain_timeout)
    }
}

/// The contents of the configuration.
struct Setting {
    config: GatewayConfig,
    /// Address at which to serve metrics.
    metrics: Option<Address>,
    /// The memory for the page caches of all migrations.
    page_caches: usize,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    if options.check {
        // The same errors that SIGHUP would find.
        return options.read().map(drop);
    }
    raise_descriptors();
    let Setting {
        config,
        metrics,
        page_caches,
    } = options.read()?;
    let caches = PageCaches::new(page_caches);
    let config = config.sharing(&caches);
    let at_start = fixed(&config, metrics.as_ref());
    let passed = systemd::passed_listeners(config.sessions.stall_timeout)?;
    let peers: Vec<_> = config.peers.iter().map(|peer| peer.name.clone()).collect();
    let counts = Arc::<Counts>::default();
    counts.expect(peers.iter().map(String::as_str));
    let watchable = options.watchable();
    let gateway = Gateway::bind(config, passed)?.observed_by(counts.clone());
    let _metrics = metrics.map(|at| metrics::serve(&at, &counts)).transpose()?;
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM]).context("cannot catch signals")?;
    let handle = signals.handle();
    for address in gateway.addresses() {
        info!("reached by other gateways on {address}");
    }
    info!("ready for migrations to {}", peers.join(", "));
    systemd::notify("READY=1");
    thread::scope(|scope| {
        let _end = watchable::serve(scope, watchable.as_ref(), || gateway.under_way());
        scope.spawn(|| {
            let reload = || reload(&gateway, options, &counts, &at_start, &caches);
            obey(&mut signals, &gateway, &reload);
        });
        let served = gateway.run();
        handle.close();
        served
    })?;
    info!("ended");
    Ok(())
}

/// The configuration of a gateway with this file.
pub(crate) fn configuration(file: &Path) -> Result<GatewayConfig> {
    let config = File::read(file)?.into_config(&Hardware::default(), Duration::ZERO);
    config.with_context(|| file.display().to_string())
}

fn obey(signals: &mut Signals, gateway: &Gateway, reload: &dyn Fn()) {
    let mut is_draining = false;
    for signal in signals.forever() {
        match signal {
            SIGHUP => reload(),
            _ if is_draining => {
                info!("aborting migrations under way");
                gateway.stop();
            }
            _ => {
                is_draining = true;
                systemd::notify("STOPPING=1");
                gateway.drain();
                info!("no further migrations are accepted; those under way finish");
            }
        }
    }
}

/// Reads the configuration again. An error in it leaves the previous one in force.
fn reload(
    gateway: &Gateway,
    options: &Options,
    counts: &Counts,
    at_start: &Fixed,
    caches: &PageCaches,
) {
    let reload = || {
        let read = options.read()?;
        let config = read.config.sharing(caches);
        let now = fixed(&config, read.metrics.as_ref());
        let changed = at_start
            .iter()
            .zip(&now)
            .filter(|(before, now)| before != now);
        let changed: Vec<_> = changed.map(|((key, _), _)| *key).collect();
        let peers: Vec<_> = config.peers.iter().map(|peer| peer.name.clone()).collect();
        gateway.reload(config)?;
        caches.set_limit(read.page_caches);
        counts.expect(peers.iter().map(String::as_str));
        anyhow::Ok(changed)
    };
    match reload() {
        Ok(changed) => {
            info!("the configuration has been read again");
            if !changed.is_empty() {
                let names = changed.join(", ");
                warn!("these changes take effect only when the gateway is restarted: {names}");
            }
        }
        Err(error) => error!("the previous configuration stays in force: {error:#}"),
    }
}

/// Settings that only a restart changes, with their keys.
type Fixed = [(&'static str, String); 5];

fn fixed(config: &GatewayConfig, metrics: Option<&Address>) -> Fixed {
    let sessions = &config.sessions;
    let [reconnect, stall] = [sessions.reconnect_timeout, sessions.stall_timeout];
    [
        ("listen", format!("{:?}", config.listen)),
        ("metrics", format!("{metrics:?}")),
        (
            "reconnect-timeout (of migrations from peers)",
            format!("{reconnect:?}"),
        ),
        (
            "stall-timeout (of migrations from peers)",
            format!("{stall:?}"),
        ),
        (
            "page-cache (of migrations from peers)",
            sessions.page_cache.to_string(),
        ),
    ]
}

/// The gateway needs a descriptor for each peer and port, and a dozen for each migration.
fn raise_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        info!("cannot raise the limit of file descriptors: {error}");
    }
}
