//! What DSAs do for the demo's migration: at the source they look for zero pages, at the destination they copy.

use std::sync::Arc;

use anyhow::{Context as _, Error, Result, bail};
use clap::{Args, ValueEnum};
use idxd::{
    Kind,
    offload::{Choice, Devices, Options},
};
use serde::{Deserialize, Serialize};
use vamoose_codec::open_devices;
use vamoose_live::{DsaDetection, Offload, PageCopy};

use crate::options::{Hardware, as_text};

#[derive(Args, Debug)]
pub(super) struct DsaOptions {
    /// Who looks for zero pages
    #[arg(long, value_enum, default_value_t = ZeroPageDetection::Cpu)]
    zero_page_detection: ZeroPageDetection,
    /// Who copies decoded pages into the guest's memory at the destination
    #[arg(long, value_enum, default_value_t = CopyName::Cpu)]
    copy: CopyName,
    /// Work queues of DSAs: `wq0.1,wq2.0`, `auto` (all that can be used), or `model`, `model:4` (devices in software,
    /// to try it out) [default: auto]
    #[arg(long, value_name = "QUEUES")]
    dsa_path: Option<Choice>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ZeroPageDetection {
    /// Nobody; memory that was never touched costs nothing all the same
    None,
    /// The processor
    Cpu,
    /// DSAs, and the processor where they do not
    Dsa,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum CopyName {
    /// The processor
    Cpu,
    /// DSAs, and the processor where they do not; for memory that is populated (--prealloc)
    Dsa,
}

impl DsaOptions {
    /// Whether the options go together, with pages that nobody decodes or with others.
    pub(super) fn check(&self, pages_are_decoded: bool) -> Result<()> {
        let copies = self.copy == CopyName::Dsa;
        if copies && !pages_are_decoded {
            bail!(
                "--copy dsa: pages of --method none are received where they belong, and nobody copies them"
            );
        }
        let none = !copies && self.zero_page_detection != ZeroPageDetection::Dsa;
        if none && self.dsa_path.is_some() {
            bail!("--dsa-path: it is for --zero-page-detection dsa and --copy dsa");
        }
        Ok(())
    }

    /// Who looks for zero pages, in packets of up to `pages` pages. Devices are open then.
    pub(super) fn detection(
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

    /// What the destination uses to copy packets of up to `pages` pages, if it is not only the processor.
    pub(super) fn copy(&self, pages: u32) -> Option<Queues> {
        (self.copy == CopyName::Dsa).then(|| self.queues(pages))
    }

    fn queues(&self, pages: u32) -> Queues {
        let path = self.dsa_path.clone().unwrap_or_default();
        Queues { path, pages }
    }
}

/// Work queues to be used, here or by the destination.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct Queues {
    #[serde(with = "as_text")]
    path: Choice,
    /// Most pages of a batch.
    pages: u32,
}

impl Queues {
    fn open(&self, hardware: &Hardware) -> Result<Arc<Devices>> {
        let mut options = Options::batches(self.pages);
        options.shares = hardware.shares.of_devices();
        let devices = open_devices(Kind::Dsa, &self.path, options)
            .map_err(Error::msg)
            .with_context(|| format!("--dsa-path {}", self.path))?;
        Ok(Arc::new(devices))
    }

    /// The copies of a destination.
    pub(super) fn copy(queues: Option<&Self>, hardware: &Hardware) -> Result<PageCopy> {
        Ok(match queues {
            None => PageCopy::Cpu,
            Some(queues) => PageCopy::Dsa(queues.open(hardware).context("--copy dsa")?),
        })
    }
}

/// Who did it, and what devices did of it, for the report.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Done {
    by: &'static str,
    #[serde(flatten)]
    offload: Option<Offload>,
}

impl Done {
    pub(super) fn detection(
        detection: &vamoose_live::ZeroPageDetection,
        offload: Option<Offload>,
    ) -> Self {
        let by = match detection {
            vamoose_live::ZeroPageDetection::None => "none",
            vamoose_live::ZeroPageDetection::Cpu => "cpu",
            vamoose_live::ZeroPageDetection::Dsa(_) => "dsa",
        };
        Self { by, offload }
    }

    pub(super) fn copy(offload: Option<Offload>) -> Self {
        let by = if offload.is_some() { "dsa" } else { "cpu" };
        Self { by, offload }
    }
}
