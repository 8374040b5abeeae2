//! `vamoose predict`: what `migrate` would take, by its own `--dry-run`.

use anyhow::Result;
use clap::Args;

use super::migrate;

/// Predict how long a migration takes, its bytes and downtime, and whether it converges
///
/// Checks both ends as `migrate --dry-run` does, of which this is another name, and measures for about five seconds how the guest
/// writes, how its pages compress, and what the link carries. Changes nothing. The options are those of `migrate`.
///
/// Exit codes: 0 the guest can move, also if it does not converge; 1 it cannot; 2 wrong options; 4 the guest is no longer here, or in doubt.
#[derive(Args, Debug)]
#[command(override_usage = "vamoose predict [OPTIONS] <GUEST> <HOST>")]
#[command(after_help = "\
Examples:
  vamoose predict web1 kvm2
  vamoose predict web1 kvm2 --max-bandwidth 500Mbit --downtime-limit 1s --json -")]
#[command(mut_args(|arg| match arg.get_id().as_str() {
    "dry_run" | "quit_source" | "confirm" | "progress" => arg.hide(true),
    _ => arg,
}))]
#[group(skip)]
pub(crate) struct Options {
    #[command(flatten)]
    migrate: migrate::Options,
}

pub(crate) fn run(mut options: Options) -> Result<()> {
    options.migrate.dry_run = true;
    migrate::run(&options.migrate)
}
