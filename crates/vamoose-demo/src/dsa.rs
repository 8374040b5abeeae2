//! DSA offloads of the demo: zero-page detection at the source, copies at the destination.

use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum};
use idxd::{
    Kind,
    offload::{Devices, Options},
};
use serde::{Deserialize, Serialize};
use vamoose::{
    devices::DevicePath,
    options::{Hardware, as_text},
};
use vamoose_live::{DsaDetection, PageCopy};

#[derive(Args, Debug)]
pub(crate) struct DsaOptions {
    /// Zero-page detection at the source
    #[arg(long, value_enum, default_value_t = ZeroPageDetection::Cpu)]
    zero_page_detection: ZeroPageDetection,
    /// Engine that copies decoded pages into the guest's memory at the destination
    #[arg(long, value_enum, default_value_t = CopyName::Cpu)]
    copy: CopyName,
    /// DSA work queues: `auto` (all usable ones), wqX.Y[,wqZ.W...], or `model[:N]` (N devices modelled in software, for tests)
    /// [default: auto]
    #[arg(long, value_name = "QUEUES")]
    dsa_path: Option<DevicePath>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ZeroPageDetection {
    /// Off; untouched memory still costs nothing
    None,
    /// On the CPU
    Cpu,
    /// On DSA, with the CPU as fallback
    Dsa,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum CopyName {
    /// The CPU
    Cpu,
    /// DSA, with the CPU as fallback; for populated memory (--prealloc)
    Dsa,
}

impl DsaOptions {
    /// Checks the options against the method, which decodes pages or receives them in place.
    pub(crate) fn check(&self, pages_are_decoded: bool) -> Result<()> {
        let copies = self.copy == CopyName::Dsa;
        if copies && !pages_are_decoded {
            bail!("--copy dsa: pages of --method none are received in place and need no copy");
        }
        let none = !copies && self.zero_page_detection != ZeroPageDetection::Dsa;
        if none && self.dsa_path.is_some() {
            bail!("--dsa-path: only used with --zero-page-detection dsa or --copy dsa");
        }
        Ok(())
    }

    /// The zero-page detection of packets of up to `pages` pages. Opens the devices.
    pub(crate) fn detection(
        &self,
        pages: u32,
        hardware: &Hardware,
    ) -> Result<vamoose_live::ZeroPageDetection> {
        Ok(match self.zero_page_detection {
            ZeroPageDetection::None => vamoose_live::ZeroPageDetection::None,
            ZeroPageDetection::Cpu => vamoose_live::ZeroPageDetection::Cpu,
            ZeroPageDetection::Dsa => vamoose_live::ZeroPageDetection::Dsa(DsaDetection {
                devices: self
                    .queues(pages)
                    .open(hardware)
                    .context("--zero-page-detection dsa")?,
                verify: hardware.verify,
            }),
        })
    }

    /// The queues that copy packets of up to `pages` pages at the destination; `None` for the CPU.
    pub(crate) fn copy(&self, pages: u32) -> Option<Queues> {
        (self.copy == CopyName::Dsa).then(|| self.queues(pages))
    }

    fn queues(&self, pages: u32) -> Queues {
        let path = self.dsa_path.clone().unwrap_or(DevicePath::AUTO);
        Queues { path, pages }
    }
}

/// Work queues to use, here or at the destination.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Queues {
    #[serde(with = "as_text")]
    path: DevicePath,
    /// Maximum number of pages in a batch.
    pages: u32,
}

impl Queues {
    fn open(&self, hardware: &Hardware) -> Result<Arc<Devices>> {
        let mut options = Options::batches(self.pages);
        options.shares = hardware.shares.of_devices();
        let devices = self.path.open(Kind::Dsa, &options).with_context(|| {
            format!(
                "--dsa-path {} (`vamoose probe` lists the queues)",
                self.path
            )
        })?;
        Ok(Arc::new(devices))
    }

    /// The copies of a destination.
    pub(crate) fn copy(queues: Option<&Self>, hardware: &Hardware) -> Result<PageCopy> {
        Ok(match queues {
            None => PageCopy::Cpu,
            Some(queues) => PageCopy::Dsa(queues.open(hardware).context("--copy dsa")?),
        })
    }
}
