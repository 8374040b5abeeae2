//! `vamoose serve`: takes migrations on the destination host.

use std::{path::PathBuf, thread, time::Duration};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    iterator::Signals,
};
use tracing::info;
use vamoose_codec::Settings;
use vamoose_link::{Address, Hangup, Peers};
use vamoose_relay::{Server, ServerConfig};

use crate::{
    commands::relay::refuse_open_address,
    options::{Hardware, StateDir},
};

/// Take migrations for the QEMUs that wait on this host
///
/// A QEMU is started as the source's was, with -incoming defer and -S (without -S vamoose tells it
/// not to start by itself) and its monitor at DIR/NAME.qmp; `vamoose migrate --name NAME` on the source
/// host moves a guest into it. A QEMU whose migration fails holds half a guest and is ended.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// Where `vamoose migrate` connects to: tcp:HOST:PORT
    #[arg(long, value_name = "URI")]
    listen: Address,
    /// Folder of the QEMUs' monitors, NAME.qmp each
    #[arg(long, value_name = "DIR")]
    qmp_dir: PathBuf,
    #[command(flatten)]
    hardware: Hardware,
    /// Seconds for which a peer may neither send nor take a byte while one is awaited
    #[arg(long, default_value_t = 15, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    stall_timeout: u64,
    #[command(flatten)]
    state_dir: StateDir,
    /// Seconds after which a loaded guest whose source is silent is reported as an orphan: it is not
    /// ended and not run
    #[arg(long, default_value_t = 300, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    orphan_timeout: u64,
    /// A user of this host that may connect, besides this program's own and root: that of a tunnel's process
    #[arg(long, value_name = "UID")]
    peer_uid: Vec<u32>,
    /// Listen on an address that other hosts can reach, on a network that is trusted
    #[arg(long)]
    insecure: bool,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    refuse_open_address(&options.listen, options.insecure)?;
    if !options.qmp_dir.is_dir() {
        bail!("--qmp-dir: {} is not a folder", options.qmp_dir.display());
    }
    let engines = options.hardware.engines(Settings::default())?;
    let config = ServerConfig {
        qmp_dir: options.qmp_dir.clone(),
        state_dir: options.state_dir.path()?,
        engines,
        stall_timeout: Duration::from_secs(options.stall_timeout),
        peers: Peers::own_and(options.peer_uid.iter().copied()),
        orphan_timeout: Duration::from_secs(options.orphan_timeout),
    };
    let server = Server::bind(&options.listen, config)?;
    info!("taking migrations on {}", server.address());
    let stop = Hangup::new()?;
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("cannot catch signals")?;
    let handle = signals.handle();
    thread::scope(|scope| {
        scope.spawn(|| {
            if signals.forever().next().is_some() {
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
