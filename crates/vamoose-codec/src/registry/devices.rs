//! The devices that encode: IAA for method qpl, QAT for method qatzip.

use std::{error::Error, iter, path::Path, sync::Arc};

use idxd::{
    Kind,
    offload::{Choice, Devices, OffloadCounters, Options},
};

use super::{Accel, Engines, Hardware, Registry};
use crate::{engine::Missing, iaa::Iaa, qat::Qat, qpl};

impl Registry {
    /// The registry of this host, with all of its IAAs' work queues that a process can use.
    pub fn new() -> Self {
        Self::with_iaa(|| {
            let options = Options::pages(qpl::PAGE_SIZE);
            let opened = Devices::open(Kind::Iaa, &Choice::Auto, &options);
            opened.map(Arc::new).map_err(|error| {
                let causes = iter::successors(Some(&error as &dyn Error), |&error| error.source());
                let causes: Vec<_> = causes.map(ToString::to_string).collect();
                causes.join(": ")
            })
        })
    }

    /// The registry of this host, with the IAAs that `open` returns when they are first requested, or the reason why there
    /// are none. Their slots have a buffer of 4096 bytes ([`Options::pages`]).
    pub fn with_iaa(
        open: impl Fn() -> Result<Arc<Devices>, String> + Send + Sync + 'static,
    ) -> Self {
        let iaa = Hardware::new(Iaa::NAME, Iaa::METHODS, Some(Accel::Iaa), move || {
            Ok(Iaa::new(open()?))
        });
        let mut registry = Self::with_qat(Qat::of_host);
        registry.hardware.push(iaa);
        registry
    }

    /// Only software, and QAT through the libqatzip in `file`.
    pub fn with_libqatzip(file: &Path) -> Self {
        let file = file.to_owned();
        Self::with_qat(move || Qat::open(file.as_os_str()))
    }

    /// Only software and QAT.
    pub(crate) fn with_qat(
        open: impl Fn() -> Result<Qat, Missing> + Send + Sync + 'static,
    ) -> Self {
        let qat = Hardware::new(Qat::NAME, Qat::METHODS, Some(Accel::Qat), open);
        let mut registry = Self::software();
        registry.hardware.push(qat);
        registry
    }
}

impl Engines {
    /// Counters of the devices that work page by page, as far as these engines have used them; `None` without such devices.
    pub fn device_work(&self) -> Option<OffloadCounters> {
        let hardware = self.registry.hardware.iter();
        let mut chosen = hardware.filter(|hardware| hardware.is_allowed(self.accel));
        chosen.find_map(|hardware| hardware.opened.get()?.as_ref().ok()?.work())
    }
}
