//! `vamoose gateway`: all migrations between this host and others, for whoever drives the QEMUs.

mod config;
mod systemd;

use std::{path::PathBuf, thread, time::Duration};

use anyhow::{Context as _, Result};
use clap::Args;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};
use tracing::{error, info};
use vamoose_relay::{Gateway, GatewayConfig};

use self::config::File;
use vamoose::options::Hardware;

/// Pass all migrations between this host and others on, compressed and encrypted
///
/// Runs until it is told to end. Whoever migrates a guest (libvirt, for example) has QEMU connect to an address of this host that
/// stands for the other one; the gateways of both hosts do the rest. SIGHUP reads the configuration, keys and certificates
/// again; SIGTERM lets migrations under way finish, a second one ends them.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Configuration, in TOML: see docs/gateway.md
    #[arg(long, default_value = "/etc/vamoose/gateway.toml", value_name = "FILE")]
    config: PathBuf,
    /// How many seconds migrations under way have to finish after SIGTERM
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    drain_timeout: u64,
    #[command(flatten)]
    hardware: Hardware,
}

impl Options {
    fn load(&self) -> Result<GatewayConfig> {
        let drain_timeout = Duration::from_secs(self.drain_timeout);
        let file = File::read(&self.config)?;
        let config = file.into_config(&self.hardware, drain_timeout);
        config.with_context(|| self.config.display().to_string())
    }
}

pub(crate) fn run(options: &Options) -> Result<()> {
    raise_descriptors();
    let config = options.load()?;
    let passed = systemd::passed_listeners(config.sessions.stall_timeout)?;
    let peers: Vec<_> = config.peers.iter().map(|peer| peer.name.clone()).collect();
    let gateway = Gateway::bind(config, passed)?;
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM]).context("cannot catch signals")?;
    let handle = signals.handle();
    for address in gateway.addresses() {
        info!("reached by other gateways on {address}");
    }
    info!("ready for migrations to {}", peers.join(", "));
    systemd::notify("READY=1");
    thread::scope(|scope| {
        scope.spawn(|| obey(&mut signals, &gateway, options));
        let served = gateway.run();
        handle.close();
        served
    })?;
    info!("ended");
    Ok(())
}

fn obey(signals: &mut Signals, gateway: &Gateway, options: &Options) {
    let mut is_draining = false;
    for signal in signals.forever() {
        match signal {
            SIGHUP => reload(gateway, options),
            _ if is_draining => {
                info!("ending migrations under way");
                gateway.stop();
            }
            _ => {
                is_draining = true;
                systemd::notify("STOPPING=1");
                info!("no further migrations are taken; those under way finish");
                gateway.drain();
            }
        }
    }
}

/// What is wrong in the new configuration leaves the old one in force.
fn reload(gateway: &Gateway, options: &Options) {
    let loaded = options.load();
    match loaded.and_then(|config| Ok(gateway.reload(config)?)) {
        Ok(()) => info!("the configuration has been read again"),
        Err(error) => error!("the configuration before stays in force: {error:#}"),
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
