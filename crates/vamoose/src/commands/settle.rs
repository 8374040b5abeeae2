//! `vamoose settle`: a person's word on an attempt.

use anyhow::Result;
use clap::{Args, ValueEnum};
use vamoose_relay::{AttemptId, Journal, Settlement, Verdict};

use vamoose::options::StateDir;

/// End an attempt that only a person can decide
///
/// Look at the destination first. What will be done is printed before it is done; a destination that can be asked and
/// contradicts is believed more. Run it on the host that `vamoose attempts` lists the attempt on: at the source to
/// continue or give up the paused guest, at the destination to continue or end the loaded one.
#[derive(Args, Debug)]
pub(crate) struct Options {
    /// The attempt, as `vamoose attempts` lists it
    #[arg(long, value_name = "ID")]
    attempt: AttemptId,
    /// What became of the guest
    #[arg(long = "as", value_enum)]
    verdict: Outcome,
    #[command(flatten)]
    state_dir: StateDir,
    /// Only print what would be done
    #[arg(long)]
    dry_run: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Outcome {
    /// The guest is the destination's: it runs there, or is to run there
    RunningThere,
    /// The guest has never run at the destination: it goes on at the source
    NeverRan,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let journal = Journal::open(&options.state_dir.path()?)?;
    let verdict = match options.verdict {
        Outcome::RunningThere => Verdict::RunningThere,
        Outcome::NeverRan => Verdict::NeverRan,
    };
    let settlement = Settlement::plan(&journal, options.attempt, verdict)?;
    for step in settlement.steps() {
        println!("{step}");
    }
    if options.dry_run {
        return Ok(());
    }
    settlement.carry_out()?;
    println!("attempt {} is settled", options.attempt);
    Ok(())
}
