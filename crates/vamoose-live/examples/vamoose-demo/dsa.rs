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
use vamoose_live::{
    ZeroPageDetection,
    dsa::{DsaDetection, PageCopy},
};

#[derive(Args, Clone, Debug, Serialize, Deserialize)]
pub(crate) struct DsaOptions {
    /// Zero-page detection at the source
    #[arg(long, value_enum, default_value_t = Detection::Cpu)]
    pub(crate) zero_page_detection: Detection,
    /// Engine that copies decoded pages into the guest's memory at the destination
    #[arg(long, value_enum, default_value_t = CopyEngine::Cpu)]
    copy: CopyEngine,
    /// DSA work queues: `auto` (all usable ones), wqX.Y[,wqZ.W...], or `model[:N]` (N devices modelled in software, for tests)
    #[arg(long, default_value = "auto", value_name = "QUEUES")]
    #[serde(with = "as_text")]
    dsa_path: DevicePath,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Detection {
    /// Off; untouched memory still costs nothing
    None,
    /// On the CPU
    Cpu,
    /// On DSA, with the CPU as fallback
    Dsa,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
enum CopyEngine {
    /// The CPU
    Cpu,
    /// DSA, with the CPU as fallback; for populated memory (--prealloc)
    Dsa,
}

/// Pages of a packet, which are a batch of a device.
const BATCH: u32 = 128;

impl DsaOptions {
    /// Checks the options against the method, which decodes pages or receives them in place.
    pub(crate) fn check(&self, pages_are_decoded: bool) -> Result<()> {
        let copies = self.copy == CopyEngine::Dsa;
        if copies && !pages_are_decoded {
            bail!("--copy dsa: pages of --method none are received in place and need no copy");
        }
        let unused = !copies && self.zero_page_detection != Detection::Dsa;
        if unused && self.dsa_path != DevicePath::AUTO {
            bail!("--dsa-path: only used with --zero-page-detection dsa or --copy dsa");
        }
        Ok(())
    }

    /// The source's zero-page detection. Opens the devices.
    pub(crate) fn detection(&self, hardware: &Hardware) -> Result<ZeroPageDetection> {
        Ok(match self.zero_page_detection {
            Detection::None => ZeroPageDetection::None,
            Detection::Cpu => ZeroPageDetection::Cpu,
            Detection::Dsa => ZeroPageDetection::Dsa(DsaDetection {
                devices: self.open().context("--zero-page-detection dsa")?,
                verify: hardware.verify,
            }),
        })
    }

    /// The destination's copies. Opens the devices.
    pub(crate) fn page_copy(&self) -> Result<PageCopy> {
        Ok(match self.copy {
            CopyEngine::Cpu => PageCopy::Cpu,
            CopyEngine::Dsa => PageCopy::Dsa(self.open().context("--copy dsa")?),
        })
    }

    fn open(&self) -> Result<Arc<Devices>> {
        let options = Options::batches(BATCH);
        let path = &self.dsa_path;
        let devices = path
            .open(Kind::Dsa, &options)
            .with_context(|| format!("--dsa-path {path} (`vamoose probe` lists the queues)"))?;
        Ok(Arc::new(devices))
    }
}
