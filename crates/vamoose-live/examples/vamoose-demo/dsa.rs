//! The demo's offload to DSA: zero-page detection at the source.

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
use vamoose_live::{ZeroPageDetection, dsa::DsaDetection};

#[derive(Args, Clone, Debug, Serialize, Deserialize)]
pub(crate) struct DsaOptions {
    /// Zero-page detection at the source
    #[arg(long, value_enum, default_value_t = Detection::Cpu)]
    pub(crate) zero_page_detection: Detection,
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

/// Pages of a packet, which are a batch of a device.
const BATCH: u32 = 128;

impl DsaOptions {
    /// Checks the options against each other.
    pub(crate) fn check(&self) -> Result<()> {
        if self.zero_page_detection != Detection::Dsa && self.dsa_path != DevicePath::AUTO {
            bail!("--dsa-path: only used with --zero-page-detection dsa");
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

    fn open(&self) -> Result<Arc<Devices>> {
        let options = Options::batches(BATCH);
        let path = &self.dsa_path;
        let devices = path
            .open(Kind::Dsa, &options)
            .with_context(|| format!("--dsa-path {path} (`vamoose probe` lists the queues)"))?;
        Ok(Arc::new(devices))
    }
}
