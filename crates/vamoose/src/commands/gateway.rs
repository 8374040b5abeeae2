//! `vamoose gateway`: carries all migrations between this host and others, whichever program drives the QEMUs.

mod config;
mod systemd;

use std::{
    fmt::Debug,
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
use vamoose_link::{End, Limit, PageCaches, PageStore};
use vamoose_relay::{Gateway, GatewayConfig, Role};

use self::config::{File, GatewaySettings};
use vamoose::{
    metrics::{self, Counts, MetricsOption},
    options::Hardware,
    values::seconds,
    watchable,
};

pub(crate) use self::config::{qemu_users, uid};

/// Carry all migrations between this host and others, compressed and encrypted
///
/// Runs until a signal ends it. To migrate a guest, libvirt (or another program) tells QEMU to connect to an address of this host
/// that stands for the other host; the gateways of both hosts do the rest. SIGHUP reloads the configuration, keys and
/// certificates. SIGTERM lets migrations under way finish; a second SIGTERM aborts them.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Configuration, in TOML: see docs/gateway.md
    #[arg(long, default_value = "/etc/vamoose/gateway.toml", value_name = "FILE")]
    config: PathBuf,
    /// Check the configuration, with its keys or certificates, and exit
    #[arg(long)]
    check: bool,
    /// Time for migrations under way to finish after SIGTERM
    #[arg(long, default_value = "5min", value_name = "TIME", value_parser = seconds)]
    drain_timeout: Duration,
    /// Directory in which `vamoose attempts --watch` finds this gateway
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    #[command(flatten)]
    metrics: MetricsOption,
    #[command(flatten)]
    hardware: Hardware,
}

impl Options {
    /// Reads the file, and finds all errors that can be found without listening.
    fn read(&self) -> Result<GatewaySettings> {
        let file = File::read(&self.config)?;
        let settings = file.settings(&self.hardware, self.drain_timeout);
        let mut settings = settings.with_context(|| self.config.display().to_string())?;
        settings.metrics = self.metrics.metrics.clone().or(settings.metrics);
        let config = &settings.config;
        config.sessions.check(End::Server)?;
        for peer in config.dialled() {
            let name = &peer.name;
            let usable = peer.remote.config.check(End::Client);
            usable.with_context(|| format!("peer {name}"))?;
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
        Ok(settings)
    }
}

/// Keys whose changes take effect only at the start, with their values. A copy of the whole configuration would keep its devices
/// open.
fn at_start(settings: &GatewaySettings) -> [(&'static str, String); 7] {
    let (config, sessions) = (&settings.config, &settings.config.sessions);
    let values: [(_, &dyn Debug); 7] = [
        ("listen", &config.listen),
        ("metrics", &settings.metrics),
        (
            "reconnect-timeout (of migrations from peers)",
            &sessions.reconnect_timeout,
        ),
        (
            "stall-timeout (of migrations from peers)",
            &sessions.stall_timeout,
        ),
        (
            "page-cache (of migrations from peers)",
            &sessions.page_cache,
        ),
        ("page-store (on or off)", &(settings.page_store > 0)),
        ("page-store-groups", &settings.page_store_groups),
    ];
    values.map(|(key, value)| (key, format!("{value:?}")))
}

pub(crate) fn run(options: &Options) -> Result<()> {
    if options.check {
        // Reading finds the same errors as SIGHUP.
        return options.read().map(drop);
    }
    raise_descriptors();
    let settings = options.read()?;
    let before = at_start(&settings);
    let caches = PageCaches::new(settings.page_caches);
    let [outgoing, incoming] = [(); 2].map(|()| Limit::new(settings.max_bandwidth));
    let limits = [&outgoing, &incoming];
    let store = match settings.page_store {
        0 => None,
        size => Some(PageStore::new(size, settings.page_store_groups.clone())?),
    };
    let config = settings.config.sharing(&caches, store.as_ref(), limits);
    let passed = systemd::passed_listeners(config.sessions.stall_timeout)?;
    let peers = names(&config);
    let counts = Arc::<Counts>::default();
    counts.expect(peers.iter().map(String::as_str));
    let state_dir = options.state_dir.as_deref();
    let watchable = state_dir.and_then(watchable::bind);
    let gateway = Gateway::bind(config, passed)?.observed_by(counts.clone());
    let metrics = settings.metrics.as_ref();
    let shown = [
        (Role::Source, outgoing.clone()),
        (Role::Destination, incoming.clone()),
    ];
    let _metrics = metrics
        .map(|at| metrics::serve(at, &counts, shown.into(), store.as_ref()))
        .transpose()?;
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM]).context("cannot catch signals")?;
    let handle = signals.handle();
    for address in gateway.addresses() {
        info!("reached by other gateways on {address}");
    }
    info!("ready for migrations to {}", peers.join(", "));
    systemd::notify("READY=1");
    // An error in the file leaves the previous configuration in force.
    let reload = || {
        let settings = options.read()?;
        let now = at_start(&settings);
        let peers = names(&settings.config);
        gateway.reload(settings.config.sharing(&caches, store.as_ref(), limits))?;
        caches.set_limit(settings.page_caches);
        outgoing.set(settings.max_bandwidth);
        incoming.set(settings.max_bandwidth);
        if let Some(store) = &store {
            store.set_limit(settings.page_store);
        }
        counts.expect(peers.iter().map(String::as_str));
        let changed = now
            .iter()
            .zip(&before)
            .filter(|(now, before)| now != before);
        Ok(changed.map(|((key, _), _)| *key).collect())
    };
    thread::scope(|scope| {
        let _end = watchable::serve(scope, watchable.as_ref(), || gateway.under_way());
        scope.spawn(|| obey(&mut signals, &gateway, &reload));
        let served = gateway.run();
        handle.close();
        served
    })?;
    info!("ended");
    Ok(())
}

fn names(config: &GatewayConfig) -> Vec<String> {
    config.peers.iter().map(|peer| peer.name.clone()).collect()
}

/// The configuration of a gateway with this file.
pub(crate) fn configuration(file: &Path) -> Result<GatewayConfig> {
    let settings = File::read(file)?.settings(&Hardware::default(), Duration::ZERO);
    let settings = settings.with_context(|| file.display().to_string())?;
    Ok(settings.config)
}

fn obey(signals: &mut Signals, gateway: &Gateway, reload: &dyn Fn() -> Result<Vec<&'static str>>) {
    let mut is_draining = false;
    for signal in signals.forever() {
        match signal {
            SIGHUP => match reload() {
                Ok(unchanged) => {
                    info!("the configuration has been read again");
                    if !unchanged.is_empty() {
                        let keys = unchanged.join(", ");
                        warn!(
                            "these changes take effect only when the gateway is restarted: {keys}"
                        );
                    }
                }
                Err(error) => error!("the previous configuration stays in force: {error:#}"),
            },
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

/// The gateway needs a descriptor for each port of each peer, and a dozen for each migration.
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
