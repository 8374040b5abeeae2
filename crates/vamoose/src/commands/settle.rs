//! `vamoose settle`: an operator's decision about an attempt.

use anyhow::{Result, anyhow};
use clap::{Args, ValueEnum};
use vamoose_link::SessionConfig;
use vamoose_relay::{AttemptId, Journal, Settlement, Verdict};

use vamoose::{
    exit::{Exit, OrUsage as _},
    options::StateDir,
    security::SecurityOptions,
};

/// Decide the outcome of an attempt that is in doubt or orphaned
///
/// Check the destination first. Run this on the host where `vamoose attempts` lists the attempt: at the source to resume or
/// give up the paused guest, at the destination to resume or terminate the loaded one. Each step is printed before it is
/// taken. Before a guest resumes at the source, the destination is asked, and its answer prevails.
#[derive(Args, Debug)]
#[command(after_help = "\
Example:
  vamoose settle --attempt ID --as never-ran --dry-run")]
pub(crate) struct Options {
    /// Id of the attempt, from `vamoose attempts`
    #[arg(long, value_name = "ID")]
    attempt: AttemptId,
    /// What became of the guest
    #[arg(long = "as", value_enum)]
    verdict: Outcome,
    #[command(flatten)]
    state_dir: StateDir,
    #[command(flatten)]
    security: SecurityOptions,
    /// With never-ran: resume the guest at the source without asking the destination
    ///
    /// Only if the guest has never run there, and no QEMU there can still run it: the host is off for good, or that QEMU has
    /// ended.
    #[arg(long)]
    unreachable: bool,
    /// Print the steps without taking them
    #[arg(long)]
    dry_run: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Outcome {
    /// The guest belongs to the destination: it runs, or is to run, there
    RunningThere,
    /// The guest has never run at the destination: it resumes at the source
    NeverRan,
    /// Another tool has moved the guest from the source: its copies here are given up
    MovedElsewhere,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    if options.unreachable && !matches!(options.verdict, Outcome::NeverRan) {
        let error = anyhow!(
            "--unreachable is for --as never-ran: nothing else is asked of the destination"
        );
        return Err(Exit::Usage.with(error));
    }
    let journal = Journal::open(&options.state_dir.existing().or_usage()?)?;
    let verdict = match options.verdict {
        Outcome::RunningThere => Verdict::RunningThere,
        Outcome::NeverRan => Verdict::NeverRan,
        Outcome::MovedElsewhere => Verdict::MovedElsewhere,
    };
    // Without a key or an option, the destination cannot be asked; that matters only if it has to be.
    let security = (!options.unreachable).then(|| options.security.security());
    let config = (security.as_ref().and_then(|it| it.as_ref().ok()))
        .map(|it| SessionConfig::new(it.clone()));
    let settlement = Settlement::plan(&journal, options.attempt, verdict, config)?;
    for step in settlement.steps() {
        println!("{step}");
    }
    if options.dry_run {
        return Ok(());
    }
    if settlement.asks() {
        // The error names the options.
        security.transpose()?;
    }
    settlement.carry_out()?;
    println!("attempt {} is settled", options.attempt);
    Ok(())
}
