//! What the campaign needs of an engine: experiments, and a rehearsal.

use anyhow::{Context, Result, anyhow, bail};

use crate::fault::Fault;
use crate::report::{Ended, Report, Trouble};

/// Programs between which a guest moves.
pub(crate) trait Engine: Sync {
    /// Runs the experiment of this number.
    fn experiment(&self, seed: u64, number: u64) -> Experiment;
}

/// An experiment that has been made.
pub(crate) struct Experiment {
    /// Everything that was random.
    pub(crate) plan: String,
    pub(crate) faults: Vec<Fault>,
    pub(crate) result: Result<Report, Trouble>,
}

/// Observes a migration without faults. An earlier one warms caches.
pub(crate) fn rehearse(migrate: impl Fn() -> Result<Report, Trouble>) -> Result<Report> {
    let report = migrate()
        .and_then(|_| migrate())
        .map_err(|trouble| match trouble {
            Trouble::Violation { kind, what, story } => {
                anyhow!("{kind}: {what}\n{}", story.join("\n"))
            }
            Trouble::Experiment(error) => error,
        })
        .context("a migration without faults")?;
    match report.ended {
        Ended::Destination => Ok(report),
        ended => bail!("after a migration without faults the guest is {ended}"),
    }
}
