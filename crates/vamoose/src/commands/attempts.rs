//! `vamoose attempts`: the journal of this host's attempts, and the migrations under way.

mod watch;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use clap::Args;
use vamoose_relay::{Attempt, Journal, Standing};

use vamoose::{
    exit::OrUsage as _,
    options::{JsonReport, StateDir},
};

/// List the migration attempts of this host
///
/// An attempt is running, unfinished (run the same command again), orphaned (a loaded guest without contact from its
/// source), in doubt, or over. `vamoose settle` ends an attempt that only an operator can decide.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  vamoose attempts
  vamoose attempts --watch")]
pub(crate) struct Options {
    #[command(flatten)]
    state_dir: StateDir,
    #[command(flatten)]
    json: JsonReport,
    /// Show the migrations under way instead, updated every second: bytes and rate on the wire, and progress
    ///
    /// With --json, a line per second on standard output.
    #[arg(long)]
    watch: bool,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    if options.watch {
        let dirs = options.state_dir.watched().or_usage()?;
        return watch::run(&dirs, options.json.is_wanted());
    }
    let journal = Journal::open(&options.state_dir.existing().or_usage()?)?;
    let attempts = vamoose_relay::attempts(&journal)?;
    if options.json.is_wanted() {
        return options.json.write(&attempts);
    }
    println!(
        "{:<32}  {:<11}  {:<14}  {:<10}  {:>8}  NAME",
        "ATTEMPT", "ROLE", "STANDING", "PHASE", "AGE"
    );
    for attempt in &attempts {
        println!("{}", line(attempt));
    }
    Ok(())
}

fn line(attempt: &Attempt) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let age = now
        .unwrap_or_default()
        .saturating_sub(Duration::from_millis(attempt.began));
    let mut line = format!(
        "{}  {:<11}  {:<14}  {:<10}  {:>8}  {}",
        attempt.attempt,
        attempt.role,
        standing(attempt.standing),
        attempt.phase,
        age_text(age),
        attempt.name,
    );
    if let Some(to) = &attempt.to {
        line.push_str(&format!(" -> {to}"));
    }
    if let Some(cause) = &attempt.cause {
        line.push_str(&format!(" ({cause})"));
    }
    line
}

fn standing(standing: Standing) -> &'static str {
    match standing {
        Standing::Running => "running",
        Standing::Unfinished => "unfinished",
        Standing::Orphaned => "orphaned",
        Standing::InDoubt => "in doubt",
        Standing::AtSource => "at source",
        Standing::AtDestination => "at destination",
        Standing::Lost => "lost",
        Standing::Gone => "gone",
    }
}

fn age_text(age: Duration) -> String {
    let seconds = age.as_secs();
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        _ => format!("{} h", seconds / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_short() {
        for (seconds, text) in [(0, "0 s"), (59, "59 s"), (60, "1 min"), (7300, "2 h")] {
            assert_eq!(age_text(Duration::from_secs(seconds)), text);
        }
    }
}
