//! `vamoose evacuate`: moves all running guests off a host with libvirt's own migrations, through gateways if the hosts have them.
//!
//! ```text
//!  survey: hosts and guests ──> plan ──> drive: migrations, as the scheduler says ──> summary
//!     a virsh for each host                a thread and a virsh for each one            where each guest is
//! ```

mod description;
mod drive;
mod forecast;
mod libvirt;
mod summary;
mod survey;

use std::{num::NonZeroUsize, time::Duration};

use anyhow::{Result, anyhow, bail, ensure};
use clap::{Args, ValueEnum};
use evacuation::{Limits, Plan};
use tracing::{info, warn};

use self::{summary::Report, survey::Survey};
use vamoose::exit::{Exit, OrUsage as _};
use vamoose::options::JsonReport;
use vamoose::values::{Rate, positive_seconds, seconds};
use vamoose_link::Bytes;

/// Move all running guests off a host of libvirt
///
/// Guests that cannot move are listed with reasons before anything starts; the others move. After Ctrl-C, no further guests
/// start, and the command waits for the migrations under way; a second Ctrl-C cancels them. The same command continues with the
/// guests that are still on the host.
#[derive(Args, Debug)]
#[command(override_usage = "vamoose evacuate [OPTIONS] <HOST> --to <HOST>...")]
#[command(after_help = "\
Examples:
  vamoose evacuate kvm1 --to kvm2 kvm3 --dry-run
  vamoose evacuate kvm1 --to kvm2 kvm3 --parallel 4 --max-bandwidth 10Gbit")]
pub(crate) struct Options {
    /// Host to be emptied: its name for ssh, `localhost`, or a URI of libvirt
    host: String,
    /// Hosts to move the guests to
    #[arg(long, value_name = "HOST", required = true, num_args = 1..)]
    to: Vec<String>,
    /// Move only this guest (repeatable)
    #[arg(long = "guest", value_name = "NAME")]
    guests: Vec<String>,
    /// Move all guests but this one (repeatable)
    #[arg(long, value_name = "NAME", conflicts_with = "guests")]
    except: Vec<String>,
    /// Migrations at once from the host, and to each destination
    #[arg(long, default_value = "2", value_name = "N")]
    parallel: NonZeroUsize,
    /// Bandwidth limit of all migrations together, as QEMU sends them, such as 1G (GiB per second) or 10Gbit
    ///
    /// Each migration may use an equal part of it: RATE divided by --parallel.
    #[arg(long, value_name = "RATE", alias = "bandwidth")]
    max_bandwidth: Option<Rate>,
    /// Further tries for a guest whose migration failed, on other destinations if possible
    #[arg(long, default_value_t = 2, value_name = "N")]
    retries: u32,
    /// Time before a failed guest's second try; twice as long before each further one
    #[arg(long, default_value = "5s", value_name = "TIME", value_parser = seconds)]
    backoff: Duration,
    /// Time after which --on-timeout acts on a guest whose migration has not ended
    #[arg(long, value_name = "TIME", value_parser = positive_seconds)]
    timeout: Option<Duration>,
    /// What to do then
    #[arg(
        long,
        value_enum,
        default_value = "abort",
        value_name = "ACTION",
        requires = "timeout"
    )]
    on_timeout: OnTimeout,
    /// Number of data channels of each migration
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    channels: u8,
    /// Disks that are files or block devices are shared by all hosts
    #[arg(long)]
    shared_storage: bool,
    /// Copy disks that are files or block devices; the destinations need images of the same size
    #[arg(long, conflicts_with = "shared_storage")]
    copy_storage: bool,
    /// Move guests of the same image one after the other, to one host if it has room, for destinations with a page store
    ///
    /// Of the same image are guests whose disks have the same image below them, or else the same operating system.
    #[arg(long)]
    siblings_together: bool,
    /// Slow down guests that write faster than their memory is sent
    #[arg(long)]
    auto_converge: bool,
    /// Let the host itself connect to the destinations, with the same URIs
    ///
    /// The migrations then do not depend on this process.
    #[arg(long)]
    p2p: bool,
    /// Print the plan only, with the time and bytes that it will take
    ///
    /// The time needs --max-bandwidth, as the link is not measured.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    json: JsonReport,
}

/// The actions that libvirt has, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OnTimeout {
    /// Cancel the migration: the guest stays, or is tried again
    Abort,
    /// Pause the guest and send the rest, however long that takes
    Pause,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    options.check_rate().or_usage()?;
    options.json.check().or_usage()?;
    let survey = Survey::make(options)?;
    let plan = Plan::new(&survey.fleet);
    let mut report = Report::of_plan(&survey, &plan);
    if options.siblings_together {
        say_siblings(&survey, &plan);
    }
    if options.dry_run {
        let all = forecast::add(options, &survey, &plan, &mut report);
        let moves = plan.moves.iter().map(|step| step.guest);
        let stays = plan.stays.iter().map(|(guest, _)| *guest);
        for guest in moves.chain(stays) {
            println!("{}", report.guest(guest).line());
        }
        println!("{all}");
        say_shut_off(&survey);
        options.json.write(&report)?;
        let stay = plan.stays.len();
        ensure!(stay == 0, "{stay} guests cannot move");
        return Ok(());
    }
    for (guest, why) in &plan.stays {
        warn!("{} cannot move: {why}", survey.domain(*guest).name);
    }
    say_shut_off(&survey);
    drive::run(options, &survey, &plan, &mut report)?;
    for guest in &report.guests {
        vamoose::say(guest.line());
    }
    options.json.write(&report)?;
    let (all, moved) = (report.guests.len(), report.count("moved"));
    match (report.count("in-doubt"), report.status) {
        (_, "completed") => Ok(()),
        (0, "stopped") => Err(Exit::Cancelled.with(anyhow!(
            "stopped: {moved} of {all} guests have moved; the same command continues"
        ))),
        (0, _) => bail!("{moved} of {all} guests have moved"),
        (doubt, _) => Err(Exit::InDoubt.with(anyhow!(
            "{moved} of {all} guests have moved, and {doubt} ARE IN DOUBT: look for them on both hosts before anything else"
        ))),
    }
}

fn say_shut_off(survey: &Survey) {
    if survey.shut_off > 0 {
        warn!("{} guests are shut off, and are not moved", survey.shut_off);
    }
}

/// Bytes that a guest is not sent when its destination's page store has a sibling's pages, in percent: after work, freshly booted.
const SAVED: [u64; 2] = [45, 75];

fn say_siblings(survey: &Survey, plan: &Plan) {
    let followers = plan.followers(&survey.fleet);
    let memory = followers.map(|guest| survey.domain(guest).resident);
    let (count, bytes) = memory.fold((0, 0), |(count, sum), it| (count + 1, sum + it));
    let [least, most] = SAVED.map(|percent| (bytes >> 20) * percent / 100);
    info!(
        "{count} guests follow a sibling to its host: a page store there saves about {least} to {most} of their {} MiB",
        bytes >> 20
    );
}

/// Lowest rate of a QEMU in bytes per second: a packet of 512 KiB ten times a second, even below its limit.
const LEAST_RATE: u64 = 5 << 20;

impl Options {
    fn wants(&self, name: &str) -> bool {
        let is_one_of = |names: &[String]| names.iter().any(|other| other == name);
        (self.guests.is_empty() || is_one_of(&self.guests)) && !is_one_of(&self.except)
    }

    fn check_rate(&self) -> Result<()> {
        if let (Some(Rate(all)), Some(each)) = (self.max_bandwidth, self.rate_of_each()) {
            ensure!(
                each >= LEAST_RATE,
                "--max-bandwidth: {}/s is too little for {} migrations at once: each sends at least 5 MiB/s",
                Bytes(all.get()),
                self.parallel
            );
        }
        Ok(())
    }

    /// Bandwidth limit of each migration.
    fn rate_of_each(&self) -> Option<u64> {
        let parallel = u64::try_from(self.parallel.get()).unwrap_or(u64::MAX);
        Some(self.max_bandwidth?.0.get() / parallel)
    }

    fn limits(&self) -> Limits {
        Limits {
            per_host: self.parallel,
            retries: self.retries,
            backoff: self.backoff,
            timeout: self.timeout.filter(|_| self.on_timeout == OnTimeout::Abort),
        }
    }
}
