//! `vamoose gateway`: carries all migrations between this host and others, whatever drives the QEMUs.

mod config;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result};
use clap::Args;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sd_notify::NotifyState;
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};
use tracing::{debug, error, info, warn};
use vamoose_link::{Address, Listener, PageCaches, Peers, Session, Sessions};
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
    /// How many seconds migrations under way have to finish after SIGTERM
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
    /// Reads the file, and reports every error in it that can be found without listening.
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
            warn!("there are no peers: no host is accepted");
        }
        for peer in config.peers_with_own_ports() {
            let name = &peer.name;
            warn!(
                "peer {name} has ports of this host: libvirt here finds no free port for a migration to it"
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
    /// Where to answer with metrics.
    metrics: Option<Address>,
    /// The memory for the page caches of all migrations.
    page_caches: usize,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    if options.check {
        // What a gateway that reads the file again would find wrong.
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
    let fixed = Fixed::of(&config, metrics.as_ref());
    let passed = passed_listeners(config.sessions.stall_timeout)?;
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
    notify(NotifyState::Ready);
    thread::scope(|scope| {
        let _end = watchable::serve(scope, watchable.as_ref(), || gateway.under_way());
        scope.spawn(|| {
            let reload = || reload(&gateway, options, &counts, &fixed, &caches);
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
                info!("ending migrations under way");
                gateway.stop();
            }
            _ => {
                is_draining = true;
                notify(NotifyState::Stopping);
                gateway.drain();
                info!("no further migrations are taken; those under way finish");
            }
        }
    }
}

/// Reads the configuration again. An error in it leaves the previous one in force.
fn reload(
    gateway: &Gateway,
    options: &Options,
    counts: &Counts,
    fixed: &Fixed,
    caches: &PageCaches,
) {
    let reload = || {
        let read = options.read()?;
        let config = read.config.sharing(caches);
        let changed = fixed.changed(&Fixed::of(&config, read.metrics.as_ref()));
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

/// Settings that only a restart changes.
struct Fixed([(&'static str, String); 5]);

impl Fixed {
    fn of(config: &GatewayConfig, metrics: Option<&Address>) -> Self {
        let sessions = &config.sessions;
        Self([
            ("listen", format!("{:?}", config.listen)),
            ("metrics", format!("{metrics:?}")),
            (
                "reconnect-timeout (of migrations from peers)",
                format!("{:?}", sessions.reconnect_timeout),
            ),
            (
                "stall-timeout (of migrations from peers)",
                format!("{:?}", sessions.stall_timeout),
            ),
            (
                "page-cache (of migrations from peers)",
                sessions.page_cache.to_string(),
            ),
        ])
    }

    /// The keys in which `other` differs.
    fn changed(&self, other: &Self) -> Vec<&'static str> {
        let both = self.0.iter().zip(&other.0);
        let changed = both.filter(|(ours, theirs)| ours != theirs);
        changed.map(|((key, _), _)| *key).collect()
    }
}

/// The sockets that systemd listens on for this process. Each connection is judged when it has been accepted.
fn passed_listeners(stall_timeout: Duration) -> Result<Vec<Listener>> {
    let passed = sd_notify::listen_fds().context("LISTEN_FDS")?;
    let passed = passed.map(|number| {
        let listener = Listener::passed(number, stall_timeout, Peers::anyone());
        listener.with_context(|| {
            format!("descriptor {number} of LISTEN_FDS is no listening TCP socket")
        })
    });
    passed.collect()
}

fn notify(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        debug!("cannot notify systemd: {error}");
    }
}

/// Every peer needs one for each port, and every migration a dozen.
fn raise_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        info!("the limit of file descriptors stays as it is: {error}");
    }
}
