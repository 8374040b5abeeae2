//! `vamoose evacuate`: moves all running guests off a host by libvirt's own migrations, through gateways if hosts have them.
//!
//! ```text
//!  survey: hosts and guests ──> plan ──> drive: migrations, as the scheduler says ──> summary
//!     a virsh for each host                a thread and a virsh for each one            where each guest is
//! ```

mod description;
mod drive;
mod host;
mod libvirt;
mod summary;
mod survey;

use std::{
    num::{NonZeroU64, NonZeroUsize},
    time::Duration,
};

use anyhow::{Result, bail, ensure};
use clap::Args;
use evacuation::{Limits, Plan};
use tracing::warn;

use self::{description::Storage, libvirt::Migration, summary::Report, survey::Survey};
use vamoose::options::{JsonReport, Size};

/// Move all running guests off a host of libvirt
///
/// Guests that cannot move are listed, with reasons, before anything starts; the others move. Ctrl-C starts no further guests and
/// waits for those under way; a second one cancels them. The same command continues with the guests that are still on the host.
#[derive(Args, Debug)]
#[command(override_usage = "vamoose evacuate [OPTIONS] <HOST> --to <HOST>...")]
pub(crate) struct Options {
    /// Host to be emptied: its name for ssh, `localhost`, or a URI of libvirt
    host: String,
    /// Hosts that take the guests
    #[arg(long, value_name = "HOST", required = true, num_args = 1..)]
    to: Vec<String>,
    /// Only this guest (repeatable)
    #[arg(long = "guest", value_name = "NAME")]
    guests: Vec<String>,
    /// All guests but this one (repeatable)
    #[arg(long, value_name = "NAME", conflicts_with = "guests")]
    except: Vec<String>,
    /// Migrations at once from the host, and to each destination
    #[arg(long, default_value = "2", value_name = "N")]
    parallel: NonZeroUsize,
    /// Bandwidth limit of all migrations together, in bytes per second, as QEMU sends them
    #[arg(long, value_name = "RATE")]
    bandwidth: Option<Size>,
    /// Further tries for a guest whose migration failed, on other destinations if possible
    #[arg(long, default_value_t = 2, value_name = "N")]
    retries: u32,
    /// Seconds before a failed guest's second try; twice as long before each further one
    #[arg(long, default_value_t = 5, value_name = "SECONDS")]
    backoff: u64,
    /// Cancel a migration after this many seconds
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    timeout: Option<u64>,
    /// Number of data channels of each migration
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    channels: u8,
    /// Disks that are files or block devices are the same on all hosts
    #[arg(long)]
    shared_storage: bool,
    /// Copy disks that are files or block devices; the destinations need images of the same size
    #[arg(long, conflicts_with = "shared_storage")]
    copy_storage: bool,
    /// Throttle guests that write faster than their memory is sent
    #[arg(long)]
    auto_converge: bool,
    /// Let the host itself connect to the destinations, by the same URIs
    ///
    /// Its migrations then do not depend on this process.
    #[arg(long)]
    p2p: bool,
    /// Print the plan only
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    json: JsonReport,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let is_too_little = |rate: &Size| rate.0 < RATE_UNIT.get();
    if let Some(rate) = options.bandwidth.filter(is_too_little) {
        bail!("--bandwidth {rate}: at least 1M");
    }
    let survey = Survey::make(options)?;
    let plan = Plan::new(&survey.fleet);
    let report = Report::of_plan(&survey, &plan);
    if options.dry_run {
        report.lines().for_each(|line| println!("{line}"));
        say_shut_off(&survey);
        options.json.write(&report)?;
        let stay = plan.stays.len();
        ensure!(stay == 0, "{stay} guests cannot move");
        return Ok(());
    }
    for (guest, why) in &plan.stays {
        warn!("{} cannot move: {why}", survey.fleet.guest(*guest).name);
    }
    say_shut_off(&survey);
    let report = drive::run(options, &survey, &plan)?;
    report.lines().for_each(vamoose::say);
    options.json.write(&report)?;
    let (all, moved) = (report.guests.len(), report.count("moved"));
    match (report.count("in-doubt"), report.status) {
        (_, "completed") => Ok(()),
        (0, "stopped") => {
            bail!("stopped: {moved} of {all} guests have moved; the same command continues")
        }
        (0, _) => bail!("{moved} of {all} guests have moved"),
        (doubt, _) => bail!(
            "{moved} of {all} guests have moved, and {doubt} ARE IN DOUBT: look for them on both hosts before anything else"
        ),
    }
}

fn say_shut_off(survey: &Survey) {
    if survey.shut_off > 0 {
        warn!("{} guests are shut off, and are not moved", survey.shut_off);
    }
}

/// libvirt's unit of rates, MiB a second.
const RATE_UNIT: NonZeroU64 = NonZeroU64::MIN.saturating_add((1 << 20) - 1);

/// QEMU sends at least one packet of 512 KiB ten times a second, whatever its limit.
const LEAST_RATE: u64 = 5 << 20;

impl Options {
    fn wants(&self, name: &str) -> bool {
        let is_one_of = |names: &[String]| names.iter().any(|other| other == name);
        (self.guests.is_empty() || is_one_of(&self.guests)) && !is_one_of(&self.except)
    }

    fn storage(&self) -> Storage {
        match (self.shared_storage, self.copy_storage) {
            (true, _) => Storage::Shared,
            (_, true) => Storage::Copied,
            _ => Storage::Local,
        }
    }

    fn limits(&self) -> Limits {
        Limits {
            per_source: self.parallel,
            per_destination: self.parallel,
            bandwidth: self.bandwidth.map(|rate| rate.0),
            rate_unit: RATE_UNIT,
            least_rate: LEAST_RATE,
            retries: self.retries,
            backoff: Duration::from_secs(self.backoff),
            timeout: self.timeout.map(Duration::from_secs),
        }
    }

    fn migration(&self) -> Migration {
        Migration {
            is_persistent: false,
            copies_storage: self.copy_storage,
            converges: self.auto_converge,
            channels: self.channels,
            rate: None,
            is_by_host: self.p2p,
        }
    }
}
