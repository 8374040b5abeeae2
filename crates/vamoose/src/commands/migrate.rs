//! `vamoose migrate`: drives a source QEMU through a migration.

use std::{
    convert::Infallible,
    fs,
    net::IpAddr,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use clap::{Args, ValueEnum};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    flag,
};
use tracing::{info, warn};
use vamoose_link::{Address, DialError, Remote, lock, millis};
use vamoose_relay::{
    AttemptId, AutoConverge, Cause, ControlError, Failure, Fit, GuestLocation, Migration, News,
    OnTimeout, Role, Storage, UnderWay,
};

use vamoose::{
    exit::OrUsage as _,
    forecast, hosts,
    link::LinkOptions,
    options::{
        BUSY, CONNECTIONS, ENCODING, Encoding, HAND_OVER, JsonReport, MethodName, OUTPUT, QmpDir,
        StateDir,
    },
    outcome::{self, NotMoved},
    progress::{Display, Mode, Progress, remaining},
    report::Report,
    terminal::{self, wrap},
    values::{Rate, milliseconds, positive_seconds},
    watchable,
};

/// Migrate a running guest to a QEMU that waits behind `vamoose serve`
///
/// Ctrl-C or the loss of the terminal cancels the migration, and the guest keeps running here. If the server cannot be reached
/// once the source is paused for good, this command keeps asking for the outcome. If the command is killed meanwhile, run it
/// again: it then continues the attempt, or reports where the guest is.
///
/// Exit codes: 0 the guest has moved; 1 failed, the guest stays here; 2 wrong options; 3 cancelled; 4 the guest is no longer here, or in doubt: see the message.
#[derive(Args, Debug)]
#[command(override_usage = "vamoose migrate [OPTIONS] <GUEST> <HOST>")]
#[command(after_help = "\
Examples:
  vamoose migrate web1 kvm2
  vamoose migrate web1 192.0.2.20:4450 --max-bandwidth 500Mbit
  vamoose migrate web1 kvm2 --storage all")]
pub(crate) struct Options {
    /// Guest to migrate: the name of its QEMU on both hosts
    #[arg(required_unless_present = "name")]
    guest: Option<String>,
    /// Host to migrate it to: one of hosts.toml, or a name or address
    ///
    /// `vamoose serve` runs there, on port 4440 if :PORT does not follow. The file hosts.toml is beside the keys. It has a table for each host, such as [kvm2], with `address` or `addresses`, and
    /// optionally `key`, the only one to accept from it, and `bind`.
    #[arg(required_unless_present = "to")]
    host: Option<String>,
    /// QMP socket of the source QEMU [default: QMP_DIR/GUEST.qmp]
    #[arg(long, value_name = "SOCKET", value_parser = socket)]
    qmp: Option<PathBuf>,
    #[command(flatten)]
    qmp_dir: QmpDir,
    /// Address of the server instead of HOST, as tcp:HOST:PORT
    ///
    /// Repeat it for further addresses of that host. The data channels are spread over all addresses. While one cannot be reached, the others carry everything.
    #[arg(long, value_name = "URI", conflicts_with = "host")]
    to: Vec<Address>,
    /// Address of this host from which to connect: one for each address of the other host, in the same order
    #[arg(help_heading = CONNECTIONS, long, value_name = "ADDRESS", hide_short_help = true)]
    bind: Vec<IpAddr>,
    /// Time to reach the server at first, and longest wait for a QMP socket that another client holds
    #[arg(help_heading = CONNECTIONS, long, default_value = "10s", value_name = "TIME", value_parser = positive_seconds)]
    connect_timeout: Duration,
    #[command(flatten)]
    link: LinkOptions,
    /// Name of the waiting QEMU, whose QMP socket is NAME.qmp there [default: GUEST]
    #[arg(long, hide_short_help = true)]
    name: Option<String>,
    #[command(flatten)]
    encoding: Encoding,
    /// Number of data channels
    #[arg(help_heading = ENCODING, long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    channels: u8,
    /// Longest downtime to accept, such as 300ms
    ///
    /// The guest is paused for as short as its writing allows. A number alone is in milliseconds. Default: QEMU's setting.
    #[arg(help_heading = HAND_OVER, long, value_name = "TIME", value_parser = milliseconds)]
    downtime_limit: Option<Duration>,
    /// Abort after this downtime, until the hand-over
    ///
    /// The guest then resumes here. After the commit, it stays paused until the link is back.
    #[arg(help_heading = HAND_OVER, long, default_value = "10s", value_name = "TIME", value_parser = positive_seconds)]
    downtime_max: Duration,
    /// Time after which --on-timeout acts on a guest that has not been paused
    #[arg(help_heading = BUSY, long, value_name = "TIME", value_parser = positive_seconds)]
    timeout: Option<Duration>,
    /// What to do then
    #[arg(help_heading = BUSY, long, value_enum, default_value = "abort", value_name = "ACTION", requires = "timeout")]
    on_timeout: OnTimeoutName,
    /// Switch to post-copy after the first round: the guest then runs at the destination, and fetches its memory from here
    ///
    /// From the switch on, the guest needs both QEMUs, and the migration can no longer be cancelled. If this command is killed then,
    /// the guest waits for missing memory until the command is run again. Post-copy has no data channels: --channels has no effect.
    #[arg(help_heading = BUSY, long, conflicts_with_all = ["timeout", "storage"])]
    postcopy: bool,
    /// Slow the guest down from the beginning as far as it writes faster than it is moved
    ///
    /// By QEMU's auto-converge, which stops all its CPUs for a part of the time: 20 % at first, and 10 % more with each round.
    #[arg(help_heading = BUSY, long)]
    auto_converge: bool,
    /// Highest part of the time for which a guest's CPUs are stopped that is slowed down
    #[arg(help_heading = BUSY, long, default_value_t = AutoConverge::default().max, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=99))]
    throttle_max: u8,
    /// Bytes per second that each CPU of the guest may write at most, such as 100M
    ///
    /// By QEMU's dirty-limit (8.1 and newer), which needs KVM with a dirty ring: -accel kvm,dirty-ring-size=4096.
    #[arg(help_heading = BUSY, long, value_name = "RATE", conflicts_with = "auto_converge", hide_short_help = true)]
    dirty_limit: Option<Rate>,
    /// Finish this attempt, and confirm that no other tool has moved the guest since
    ///
    /// Only for an attempt that an earlier run asks to confirm.
    #[arg(help_heading = HAND_OVER, long, value_name = "ID", hide_short_help = true)]
    confirm: Option<AttemptId>,
    /// Copy the guest's disks to the images that the waiting QEMU has for them
    ///
    /// The images there must have the same virtual sizes. inc is for images on top of backing files that both hosts have.
    #[arg(long, value_enum, value_name = "WHAT")]
    storage: Option<What>,
    /// Copy this disk only: a drive's id, or the id of a device
    ///
    /// Repeat it for several disks. Default: all that are writable.
    #[arg(
        long,
        value_name = "NAME",
        requires = "storage",
        hide_short_help = true
    )]
    storage_disk: Vec<String>,
    /// Check everything at both ends, compare both QEMUs, predict the migration, and stop before anything is changed
    ///
    /// The report of --json has the prediction. `vamoose predict` is the same.
    #[arg(long)]
    pub(super) dry_run: bool,
    /// End the QEMU here (QMP `quit`) when the guest has certainly moved
    #[arg(long, conflicts_with = "dry_run")]
    quit_source: bool,
    #[command(flatten)]
    state_dir: StateDir,
    /// Zero-page detection of the source QEMU [default: the best that both QEMUs support]
    #[arg(help_heading = ENCODING, long, value_enum, value_name = "HOW", hide_short_help = true)]
    zero_page_detection: Option<ZeroPageDetection>,
    #[command(flatten)]
    json: JsonReport,
    /// How to show the progress
    #[arg(help_heading = OUTPUT, long, value_enum, default_value = "auto", value_name = "HOW")]
    progress: Mode,
}

/// A path, which may be written as in a URI of QEMU.
fn socket(text: &str) -> Result<PathBuf, Infallible> {
    Ok(text.strip_prefix("unix:").unwrap_or(text).into())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OnTimeoutName {
    /// Cancel: the guest stays here
    Abort,
    /// Slow the guest down from then on, as --auto-converge does
    Throttle,
    /// Pause the guest and send the rest, however long that takes
    Pause,
    /// Let the guest run at the destination, and send the rest afterwards
    Postcopy,
    /// Accept any downtime up to --downtime-max
    Force,
}

impl OnTimeoutName {
    /// What the policy of pre-copy does then. `None` if post-copy follows.
    fn action(self) -> Option<OnTimeout> {
        Some(match self {
            Self::Abort => OnTimeout::Abort,
            Self::Throttle => OnTimeout::Throttle,
            Self::Pause => OnTimeout::Pause,
            Self::Force => OnTimeout::Force,
            Self::Postcopy => return None,
        })
    }
}

/// What of each disk to copy.
#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum What {
    /// All of it
    All,
    /// What its image has on top of its backing file
    Inc,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ZeroPageDetection {
    /// Off
    None,
    /// In the migration thread, sent on the main stream
    Legacy,
    /// In the channel threads (QEMU 9.0 and newer on both sides)
    Multifd,
}

impl ZeroPageDetection {
    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Legacy => "legacy",
            Self::Multifd => "multifd",
        }
    }
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let config = options.encoding.config(MethodName::Auto).or_usage()?;
    let mut to = options.remote(config.stall_timeout).or_usage()?;
    to.config.takes_store = config.takes_store();
    let (name, qmp) = options.names().or_usage()?;
    let method = config.method.clone();
    let cancel = Arc::new(AtomicBool::new(false));
    let lost_terminal = Arc::new(AtomicBool::new(false));
    for (signal, flag) in [
        (SIGINT, &cancel),
        (SIGTERM, &cancel),
        (SIGHUP, &lost_terminal),
    ] {
        if signal != SIGHUP || !ignores_sighup() {
            flag::register(signal, flag.clone()).context("cannot catch signals")?;
        }
    }
    let state_dir = options.state_dir.path().or_usage()?;
    let auto_converge = options.auto_converge().or_usage()?;
    let post_copy = options.post_copy().or_usage()?;
    options.json.check().or_usage()?;
    let start = Instant::now();
    let guest = options.guest.as_deref().unwrap_or(name);
    let peer = options.host.clone().unwrap_or_else(|| to.address());
    let display = Display::new(options.progress, &*peer);
    let mut last = Progress::default();
    let watched = Mutex::new(None);
    let watchable = watchable::bind(&state_dir);
    let storage = options.storage();
    let migration = Migration {
        qmp: &qmp,
        to: &to,
        host: &peer,
        connect_timeout: options.connect_timeout,
        state_dir: &state_dir,
        name,
        channels: options.channels,
        config,
        downtime_limit: options.downtime_limit,
        downtime_max: options.downtime_max,
        timeout: options
            .timeout
            .and_then(|after| options.on_timeout.action().map(|action| (after, action))),
        post_copy,
        auto_converge,
        dirty_limit: options.dirty_limit.map(|Rate(rate)| rate.get()),
        storage: storage.as_ref(),
        zero_page_detection: options.zero_page_detection.map(ZeroPageDetection::name),
        confirm: options.confirm,
        quit_source: options.quit_source,
        cancel: &cancel,
    };
    if options.dry_run {
        return options.check(&migration, guest);
    }
    let moved = thread::scope(|scope| {
        let list = || lock(&watched).iter().map(Watched::now).collect();
        let _end = watchable::serve(scope, watchable.as_ref(), list);
        migration.run(&mut |news| {
            let progress = match news {
                News::WaitsFor(what) => return display.wait_for(what),
                News::Progress(progress) => progress,
            };
            // No progress is reported during the commit, so a lost terminal does not cancel it.
            if lost_terminal.load(Ordering::Relaxed) {
                cancel.store(true, Ordering::Relaxed);
            }
            display.show(progress);
            *lock(&watched) = Some(Watched::of(progress, name, &to, method.name(), start));
            last = progress.clone();
        })
    });
    display.end();
    let report = match &moved {
        Ok(moved) => {
            let result = outcome::moved(guest, &peer, moved);
            info!("{}", wrap(&result, terminal::width()));
            if !options.quit_source {
                info!("End its QEMU here (--quit-source does).");
            }
            Report::new(&method, moved.moved, moved.total_time, Duration::ZERO)
                .of_guest(moved)
                .of_policy(&moved.source)
                .of_attempt(guest, moved.attempt, GuestLocation::Destination)
                .of_disks(moved.disks)
        }
        Err(failure) => {
            let elapsed = start.elapsed();
            Report::new(&method, last.moved, elapsed, Duration::ZERO)
                .failed(status(failure), failure)
                .of_policy(&last.source)
                .of_attempt(guest, failure.attempt, failure.guest)
                .of_disks(last.disks)
        }
    };
    let report = report.of_link(last.session.as_ref());
    let written = options.json.write(&report);
    // The exit code tells the outcome of the migration, not that of the report.
    if let Err(error) = &written {
        warn!("{error:#}");
    }
    moved.map_err(|failure| options.not_moved(guest, failure))?;
    Ok(())
}

impl Options {
    /// The server: HOST, or the addresses that options give.
    fn remote(&self, stall_timeout: Duration) -> Result<Remote> {
        let Some(name) = &self.host else {
            return self.link.remote(&self.to, &self.bind, stall_timeout);
        };
        let host = hosts::find(&self.hosts_file()?, name)?;
        let mut link = self.link.clone();
        if let Some(key) = host.key {
            link.security.trust(key);
        }
        let bind = match self.bind.is_empty() {
            true => &host.bind,
            false => &self.bind,
        };
        link.remote(&host.to, bind, stall_timeout)
    }

    fn hosts_file(&self) -> Result<PathBuf> {
        Ok(hosts::file(&self.link.security.keys_directory()?))
    }

    /// The steps in which the guest is slowed down, from the beginning or after the timeout.
    fn auto_converge(&self) -> Result<Option<AutoConverge>> {
        let is_later = self.on_timeout == OnTimeoutName::Throttle;
        ensure!(
            !(is_later && self.auto_converge),
            "--auto-converge: --on-timeout throttle does the same, but later"
        );
        ensure!(
            !(is_later && self.dirty_limit.is_some()),
            "--dirty-limit: QEMU cannot use it together with --on-timeout throttle"
        );
        let default = AutoConverge::default();
        let max = self.throttle_max;
        Ok((is_later || self.auto_converge).then_some(AutoConverge {
            initial: default.initial.min(max),
            max,
            ..default
        }))
    }

    /// When to switch to post-copy, if at all.
    fn post_copy(&self) -> Result<Option<Duration>> {
        let is_later = self.on_timeout == OnTimeoutName::Postcopy;
        ensure!(
            !(is_later && self.storage.is_some()),
            "--storage: the copies of disks have to be complete before the guest runs there, and post-copy does not wait for them"
        );
        let now = self.postcopy.then_some(Duration::ZERO);
        Ok(now.or(self.timeout.filter(|_| is_later)))
    }

    /// The waiting QEMU's name, and the source's QMP socket.
    fn names(&self) -> Result<(&str, PathBuf)> {
        let guest = self.guest.as_deref().or(self.name.as_deref());
        let guest = guest.context("a guest is needed: vamoose migrate GUEST HOST")?;
        let qmp = self.qmp.clone();
        let qmp = qmp.unwrap_or_else(|| self.qmp_dir.qmp_dir.join(format!("{guest}.qmp")));
        Ok((self.name.as_deref().unwrap_or(guest), qmp))
    }

    /// The disks to copy.
    fn storage(&self) -> Option<Storage> {
        self.storage.map(|what| Storage {
            increments: what == What::Inc,
            only: self.storage_disk.clone(),
        })
    }

    /// Prints what `migrate` would compare, what it would do, and what that would take.
    fn check(&self, migration: &Migration<'_>, guest: &str) -> Result<()> {
        let say = |text: &str| match self.json.takes_stdout() {
            true => vamoose::say(text),
            false => println!("{text}"),
        };
        let checked = migration.check(&mut |fact| {
            let fit = match fact.fit {
                Fit::Same => "same",
                Fit::MayFail => "may fail",
                Fit::Fails => "fails",
            };
            say(&format!("{fit:8}  {fact}"));
        });
        let forecast = checked.map_err(|failure| self.not_moved(guest, failure))?;
        let host = migration.host;
        let (method, channels) = (migration.config.method.name(), migration.channels);
        let how = match migration.post_copy {
            Some(_) => "prepared for post-copy".to_owned(),
            None => format!("{channels} channels"),
        };
        say(&format!(
            "{guest} can move to {host}: method {method}, {how}. Nothing was changed."
        ));
        say(forecast::text(&forecast).trim_end());
        self.json.write(&forecast::report(guest, &forecast))
    }

    fn not_moved(&self, guest: &str, failure: Failure) -> NotMoved {
        NotMoved {
            guest: guest.to_owned(),
            remark: self.remark(&failure),
            failure,
        }
    }

    /// What the user may have meant by a HOST that has no address.
    fn remark(&self, failure: &Failure) -> Option<String> {
        let is_unknown = matches!(
            &failure.cause,
            Cause::Control(ControlError::Dial(DialError::Socket(error))) if error.is_unknown_name()
        );
        let host = self.host.as_ref().filter(|_| is_unknown)?;
        Some(format!(
            "{host} is neither a host of {} nor a name that this host can resolve",
            self.hosts_file().ok()?.display()
        ))
    }
}

/// Whether this command was started with SIGHUP ignored, for example by `nohup`.
fn ignores_sighup() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & (1 << (SIGHUP - 1)) != 0)
}

/// The migration as `vamoose attempts --watch` shows it.
struct Watched {
    under_way: UnderWay,
    began: Instant,
    paused_since: Option<Instant>,
}

impl Watched {
    fn of(progress: &Progress, name: &str, to: &Remote, method: &str, began: Instant) -> Self {
        let ram = |key: &str| progress.source["ram"][key].as_u64();
        let paused_since = Instant::now().checked_sub(progress.stopped_for);
        Self {
            under_way: UnderWay {
                name: Some(name.to_owned()),
                status: Some(progress.status.clone()),
                method: Some(method.to_owned()),
                rounds: ram("dirty-sync-count"),
                remaining: remaining(&progress.source),
                total: ram("total"),
                ..UnderWay::new(
                    "migrate",
                    Role::Source,
                    to.address(),
                    began,
                    &progress.moved,
                )
            },
            began,
            paused_since: paused_since.filter(|_| !progress.stopped_for.is_zero()),
        }
    }

    fn now(&self) -> UnderWay {
        UnderWay {
            total_time: millis(self.began.elapsed()),
            downtime: self.paused_since.map(|since| millis(since.elapsed())),
            ..self.under_way.clone()
        }
    }
}

/// QEMU's migration status for the failure.
fn status(failure: &Failure) -> &'static str {
    match failure.cause {
        Cause::Cancelled => "cancelled",
        _ => "failed",
    }
}
