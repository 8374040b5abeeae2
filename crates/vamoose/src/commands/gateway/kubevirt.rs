//! `vamoose gateway --kubevirt`: gateways by key, in the place of the proxies of KubeVirt's virt-handler.

use std::{path::Path, sync::Arc, thread};

use anyhow::{Context as _, Result};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};
use tracing::info;
use vamoose::{
    metrics::{self, Counts},
    watchable,
};
use vamoose_link::PageCaches;
use vamoose_relay::KubeVirt;

use super::{File, Options, obey, raise_descriptors, systemd};

pub(super) fn run(options: &Options, control: &Path) -> Result<()> {
    raise_descriptors();
    let watchable = options.watchable();
    let file = File::read(&options.config)?;
    let metrics = options.metrics(&file)?;
    let caches = PageCaches::new(file.page_caches()?);
    let mut config = options.interpret_kubevirt(file, control)?;
    config.node.remote.config.page_caches = caches.clone();
    config.template = config.template.sharing(&caches);
    let counts = Arc::<Counts>::default();
    let kubevirt = KubeVirt::bind(config)?.observed_by(counts.clone());
    let _metrics = metrics.map(|at| metrics::serve(&at, &counts)).transpose()?;
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM]).context("cannot catch signals")?;
    let handle = signals.handle();
    info!("ready for requests on {}", control.display());
    systemd::notify("READY=1");
    thread::scope(|scope| {
        let _end = watchable::serve(scope, watchable.as_ref(), || kubevirt.under_way());
        scope.spawn(|| {
            let reload = || info!("certificates are read again whenever a key is started");
            obey(
                &mut signals,
                &|| kubevirt.drain(),
                &|| kubevirt.stop(),
                &reload,
            );
        });
        let served = kubevirt.run();
        handle.close();
        served
    })?;
    info!("ended");
    Ok(())
}
