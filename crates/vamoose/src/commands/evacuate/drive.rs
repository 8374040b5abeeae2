//! Carries out the plan: one thread per migration, and one that polls all migrations and follows the scheduler.

use std::{
    collections::BTreeMap,
    io::{self, Read as _},
    os::unix::{net::UnixStream, process::CommandExt as _},
    process::Command,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use evacuation::{Action, At, End, Event, Failure, GuestId, HostId, Move, Plan, Scheduler, Stop};
use rustix::process::{Signal, set_parent_process_death_signal};
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    low_level::pipe,
};
use tracing::{debug, error, info, warn};
use vamoose_link::millis;

use super::{
    OnTimeout, Options,
    description::Description,
    libvirt::{Domain, Job, LibvirtHost, State},
    summary::{Report, in_doubt},
    survey::Survey,
};
use crate::commands::virsh;
use vamoose::progress::{Mode, ProgressLine};

/// Interval at which migrations are polled.
const POLL: Duration = Duration::from_millis(250);

/// Interval of progress lines without a terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Time for both hosts to agree on a guest's location after its migration.
const SETTLE: Duration = Duration::from_secs(30);

/// Moves the guests, and completes the report.
pub(super) fn run(
    options: &Options,
    survey: &Survey,
    plan: &Plan,
    report: &mut Report,
) -> Result<()> {
    let memory = |step: &Move| survey.domain(step.guest).memory;
    let signals = Signals::catch(&[SIGINT, SIGTERM]).context("cannot catch signals")?;
    let mut drive = Drive {
        options,
        survey,
        scheduler: Scheduler::new(&survey.fleet, plan, options.limits()),
        start: Instant::now(),
        running: BTreeMap::new(),
        report,
        stop: None,
        line: ProgressLine::new(Mode::Auto, LINE_EVERY),
        moved: (0, 0),
        total: (plan.moves.iter().map(memory).sum(), plan.moves.len()),
    };
    drive.until_done(&signals);
    drive.line.end();
    let (was_stopped, took) = (drive.stop.is_some(), drive.start.elapsed());
    drive
        .report
        .conclude(survey, &drive.scheduler, was_stopped, took);
    Ok(())
}

/// Counts signals. Each signal is a byte in a socket, so none is lost between two polls.
struct Signals(UnixStream);

impl Signals {
    fn catch(signals: &[i32]) -> io::Result<Self> {
        let (seen, caught) = UnixStream::pair()?;
        seen.set_nonblocking(true)?;
        for signal in signals {
            pipe::register(*signal, caught.try_clone()?)?;
        }
        Ok(Self(seen))
    }

    /// Number of signals since the last call.
    fn pending(&self) -> usize {
        // An error means that no signal is pending.
        (&self.0).read(&mut [0; 16]).unwrap_or(0)
    }
}

struct Drive<'a> {
    options: &'a Options,
    survey: &'a Survey,
    scheduler: Scheduler<'a>,
    start: Instant,
    running: BTreeMap<GuestId, Running>,
    report: &'a mut Report,
    stop: Option<Stop>,
    line: ProgressLine,
    /// Memory and number of the guests that have moved.
    moved: (u64, usize),
    /// Memory and number of the guests that are to move.
    total: (u64, usize),
}

/// A migration under way.
#[derive(Clone, Copy, Default)]
struct Running {
    /// Bytes of memory at the destination.
    done: u64,
    /// Time of the request to cancel.
    cancelled: Option<Instant>,
}

impl<'a> Drive<'a> {
    fn until_done(&mut self, signals: &Signals) {
        let (send, finished) = mpsc::channel();
        let mut events = vec![Event::Tick];
        thread::scope(|scope| {
            loop {
                for event in events {
                    for action in self.scheduler.handle(self.start.elapsed(), event) {
                        match action {
                            Action::Start { guest, to } => {
                                let migration = self.begin(guest, to);
                                let send = send.clone();
                                // The receiver outlives it.
                                scope.spawn(move || drop(send.send(migration.run(guest))));
                            }
                            Action::Cancel { guest } => {
                                if let Some(running) = self.running.get_mut(&guest) {
                                    running.cancelled = Some(Instant::now());
                                }
                            }
                        }
                    }
                }
                if self.scheduler.is_done() {
                    return;
                }
                events = match finished.recv_timeout(POLL) {
                    Ok(finished) => vec![self.finished(finished)],
                    Err(_) => {
                        self.poll();
                        vec![Event::Tick]
                    }
                };
                events.extend((0..signals.pending()).map(|_| self.signalled()));
            }
        });
    }

    fn begin(&mut self, guest: GuestId, to: HostId) -> Migration<'a> {
        let migration = Migration {
            options: self.options,
            domain: self.survey.domain(guest),
            from: &self.survey.source,
            to: self.survey.host(to),
        };
        self.running.insert(guest, Running::default());
        let report = self.report.guest(guest);
        report.began.get_or_insert_with(Instant::now);
        report.bytes = 0;
        let again = match self.scheduler.tries(guest) {
            0 | 1 => String::new(),
            tries => format!(", try {tries}"),
        };
        let (name, to) = (&migration.domain.name, &migration.to.name);
        info!("{name} moves to {to}{again}");
        migration
    }

    /// The first signal stops new migrations, the second one cancels those under way.
    fn signalled(&mut self) -> Event {
        let stop = match self.stop {
            None => Stop::Finish,
            Some(_) => Stop::Cancel,
        };
        if self.stop != Some(stop) {
            let running = self.running.len();
            match stop {
                Stop::Finish => warn!(
                    "no further guests; {running} migrations are under way and end first, or are cancelled by another signal"
                ),
                Stop::Cancel => warn!("cancelling {running} migrations"),
            }
        }
        self.stop = Some(stop);
        Event::Stop(stop)
    }

    fn finished(&mut self, finished: Finished<'_>) -> Event {
        let Finished {
            end,
            to,
            state,
            job,
        } = finished;
        let guest = end.guest;
        self.running.remove(&guest);
        let report = self.report.guest(guest);
        let took = report.began.map_or(Duration::ZERO, |it| it.elapsed());
        report.total_time = millis(took);
        report.state = state.map(State::name);
        report.downtime = job.and_then(|job| job.downtime_ms);
        report.bytes = job.map_or(report.bytes, |job| job.processed);
        let Domain { name, memory, .. } = self.survey.domain(guest);
        let took = took.as_secs_f64();
        let why = match &end.result {
            Ok(()) => String::new(),
            Err(failure) => format!(": {failure}"),
        };
        match end.at {
            At::Destination => info!("{name} has moved to {to} in {took:.1} s"),
            At::Source => warn!("{name} has not moved to {to}{why}"),
            at => error!("{name} IS IN DOUBT, {}{why}", in_doubt(at, to)),
        }
        if end.at == At::Destination {
            self.moved = (self.moved.0 + memory, self.moved.1 + 1);
        }
        Event::Ended(end)
    }

    /// Polls all migrations, cancels those that are to be cancelled, and shows progress.
    fn poll(&mut self) {
        let source = &self.survey.source;
        for (guest, running) in &mut self.running {
            let Domain { uuid, memory, .. } = self.survey.domain(*guest);
            // After an error the guest is no longer there. Without a job there is nothing to cancel.
            let Some(job) = source.job(uuid).ok().filter(|job| job.is_active) else {
                continue;
            };
            if job.processed > 0 {
                running.done = memory.saturating_sub(job.remaining);
            }
            let has_set_up =
                |requested: Instant| job.processed > 0 || requested.elapsed() >= virsh::SETUP;
            if running.cancelled.is_some_and(has_set_up)
                && let Err(error) = source.abort(uuid)
            {
                debug!("{uuid}: {error:#}");
            }
            let report = self.report.guest(*guest);
            report.bytes = report.bytes.max(job.processed);
        }
        let sent: u64 = self.running.values().map(|running| running.done).sum();
        let ((memory, moved), (total, all)) = (self.moved, self.total);
        let under_way = self.running.len();
        let parts = [
            (0, format!("{moved} of {all} guests moved")),
            (1, format!("{under_way} under way")),
        ];
        self.line.show(memory + sent, total, &parts);
    }
}

/// One migration of one guest.
#[derive(Clone, Copy)]
struct Migration<'a> {
    options: &'a Options,
    domain: &'a Domain,
    from: &'a LibvirtHost,
    to: &'a LibvirtHost,
}

/// A migration that has ended.
struct Finished<'a> {
    end: End,
    /// Name of the destination.
    to: &'a str,
    state: Option<State>,
    /// Statistics that the destination keeps.
    job: Option<Job>,
}

impl<'a> Migration<'a> {
    fn run(&self, guest: GuestId) -> Finished<'a> {
        let uuid = &self.domain.uuid;
        let (at, state, result) = match self.from.active(uuid) {
            Ok(active) => {
                let result = match active {
                    Some(_) => self.migrate(),
                    None => Err(Failure::permanent(ENDED)),
                };
                let (at, state) = self.observe(active.is_some());
                // The guest has ended, so another try is useless.
                match state {
                    Some(State::Ended(how)) if at == At::Source => {
                        let reason = format!("{ENDED}: {how}");
                        (at, state, Err(Failure::permanent(reason)))
                    }
                    _ => (at, state, result),
                }
            }
            // No migration has begun, so the guest is at its source.
            Err(error) => (
                At::Source,
                None,
                Err(Failure::temporary(format!("{error:#}"))),
            ),
        };
        let job = match at {
            At::Destination => self.to.completed_job(uuid).ok(),
            _ => None,
        };
        Finished {
            end: End { guest, at, result },
            to: &self.to.name,
            state,
            job,
        }
    }

    /// Migrates the guest, and returns at the end of the migration.
    fn migrate(&self) -> Result<(), Failure> {
        // `virsh` prints no error numbers. These are libvirt's texts for `virErrorNumber`.
        const PERMANENT: [&str; 5] = [
            "operation aborted",
            "this function is not supported by the connection driver",
            "invalid argument",
            "unsupported configuration",
            "Unsafe migration",
        ];
        let disks = self.disks_to_copy();
        let disks = disks.map_err(|error| Failure::temporary(format!("{error:#}")))?;
        let failure = match virsh::output_of(&mut self.command(&disks)) {
            Ok(_) => return Ok(()),
            Err(error) => format!("{error:#}"),
        };
        match PERMANENT.iter().any(|it| failure.contains(it)) {
            true => Err(Failure::permanent(failure)),
            false => Err(Failure::temporary(failure)),
        }
    }

    /// The targets of the disks that go with the guest.
    fn disks_to_copy(&self) -> Result<Vec<String>> {
        if !self.options.copy_storage {
            return Ok(Vec::new());
        }
        let description = self.from.description(&self.domain.uuid)?;
        Ok(Description::parse(&description, true)?.own_disks)
    }

    /// This `virsh` dies with this process. Libvirt then cancels the migration, unless the source host carries it out.
    fn command(&self, disks: &[String]) -> Command {
        let (options, is_persistent) = (self.options, self.domain.is_persistent);
        let mut command = virsh::command_at(&self.from.uri_here());
        command.args(["migrate", "--live", "--parallel", "--parallel-connections"]);
        command.arg(options.channels.to_string());
        for (is_set, option) in [
            (is_persistent, "--persistent"),
            (is_persistent, "--undefinesource"),
            (options.auto_converge, "--auto-converge"),
            (options.p2p, "--p2p"),
        ] {
            if is_set {
                command.arg(option);
            }
        }
        if let (OnTimeout::Pause, Some(after)) = (options.on_timeout, options.timeout) {
            let seconds = after.as_secs().max(1).to_string();
            command.args(["--timeout", &seconds, "--timeout-suspend"]);
        }
        if !disks.is_empty() {
            command.args(["--copy-storage-all", "--migrate-disks", &disks.join(",")]);
        }
        if let Some(rate) = options.rate_of_each() {
            // libvirt's unit is MiB a second.
            command.args(["--bandwidth", &(rate >> 20).to_string()]);
        }
        let ask = || Ok(set_parent_process_death_signal(Some(Signal::KILL))?);
        #[allow(unsafe_code, reason = "the only use of Command::pre_exec")]
        // SAFETY: the closure is one system call, which may be made between fork and exec.
        unsafe {
            command.pre_exec(ask);
        }
        let to = match options.p2p {
            true => self.to.uri.clone(),
            false => self.to.uri_here(),
        };
        command.args([&self.domain.uuid, &to]);
        command
    }

    /// Asks both hosts where the guest is, until both answer and no migration is under way. A guest that had ended before its
    /// migration is not in doubt.
    fn observe(&self, has_run: bool) -> (At, Option<State>) {
        let (start, uuid) = (Instant::now(), &self.domain.uuid);
        loop {
            let found = [self.from, self.to].map(|host| host.active(uuid));
            let is_last = start.elapsed() >= SETTLE;
            let is_settled = |of: &Domain| of.state != State::Migrating || is_last;
            match found {
                [Ok(Some(it)), Ok(None)] if is_settled(&it) => {
                    return (At::Source, Some(it.state));
                }
                [Ok(None), Ok(Some(it))] if is_settled(&it) => {
                    return (At::Destination, Some(it.state));
                }
                [Ok(Some(_)), Ok(Some(_))] if is_last => return (At::Both, None),
                [Ok(None), Ok(None)] if is_last => {
                    let [from, to] = [self.from, self.to].map(|host| {
                        let known = host.domain(uuid).ok().flatten();
                        known.map(|it| it.state)
                    });
                    return match ended(from, to) {
                        (At::Neither, state) if !has_run => (At::Source, state),
                        ended => ended,
                    };
                }
                [Err(error), _] | [_, Err(error)] if is_last => {
                    warn!("{}: {error:#}", self.domain.name);
                    return (At::Unknown, None);
                }
                _ => thread::sleep(POLL),
            }
        }
    }
}

/// Reason for a guest that has ended by itself, or was ended by a user.
const ENDED: &str = "it no longer runs";

/// Location of a guest that has ended, from the last states that both hosts keep of a persistent guest.
fn ended(from: Option<State>, to: Option<State>) -> (At, Option<State>) {
    match (from, to) {
        (Some(State::Ended(_)), _) => (At::Source, from),
        (Some(State::Left), Some(State::Ended(_))) => (At::Destination, to),
        _ => (At::Neither, None),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use clap::Parser;

    use super::*;

    const SHUT_OFF: u32 = 5;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    /// Arguments of `virsh` for a persistent guest with these disks.
    fn arguments(options: &[&str], disks: &[&str]) -> String {
        let words = ["vamoose", "kvm1", "--to", "kvm2"].iter().chain(options);
        let options = Line::parse_from(words).options;
        let [from, to] = ["kvm1", "kvm2"].map(LibvirtHost::new);
        let domain = Domain {
            name: "web1".to_owned(),
            uuid: "UUID".to_owned(),
            is_persistent: true,
            state: State::Running,
            memory: 0,
            resident: 0,
            cpus: 1,
        };
        let migration = Migration {
            options: &options,
            domain: &domain,
            from: &from,
            to: &to,
        };
        let disks: Vec<_> = disks.iter().map(|it| (*it).to_owned()).collect();
        let command = migration.command(&disks);
        let words: Vec<_> = command.get_args().filter_map(OsStr::to_str).collect();
        words.join(" ")
    }

    #[test]
    fn options_reach_virsh() {
        assert_eq!(
            arguments(&["--channels", "4"], &[]),
            "--quiet --connect qemu+ssh://kvm1/system?no_tty=1 migrate --live --parallel --parallel-connections 4 \
             --persistent --undefinesource UUID qemu+ssh://kvm2/system?no_tty=1"
        );
        let all = ["--p2p", "--copy-storage", "--auto-converge"];
        let end = "--auto-converge --p2p --copy-storage-all --migrate-disks vda,vdb UUID qemu+ssh://kvm2/system";
        assert!(arguments(&all, &["vda", "vdb"]).ends_with(end));
        assert!(!arguments(&all, &[]).contains("storage"));
    }

    #[test]
    fn libvirt_pauses_a_guest_at_the_timeout() {
        let paused = arguments(&["--timeout", "5min", "--on-timeout", "pause"], &[]);
        let timeout = " --timeout 300 --timeout-suspend UUID ";
        assert!(paused.contains(timeout), "{paused}");
        // The scheduler's.
        assert!(!arguments(&["--timeout", "5min"], &[]).contains("timeout"));
    }

    #[test]
    fn each_migration_gets_its_part_of_the_bandwidth() {
        let limited = arguments(&["--parallel", "4", "--max-bandwidth", "1200M"], &[]);
        assert!(limited.contains(" --bandwidth 300 UUID "), "{limited}");
    }

    /// The numbers are libvirt's reasons for being shut off.
    #[test]
    fn ended_guest_is_not_in_doubt() {
        let state = |reason| Some(State::new(SHUT_OFF, reason));
        for (from, to, at) in [
            // Shut down, destroyed, crashed, saved; its last end at the other host does not matter.
            (state(1), None, At::Source),
            (state(2), state(1), At::Source),
            (state(3), None, At::Source),
            (state(5), None, At::Source),
            // Migrated, and then shut down at the destination.
            (state(4), state(1), At::Destination),
            // Migrated, but unknown to the other host, or known only from an earlier time.
            (state(4), None, At::Neither),
            (state(4), state(0), At::Neither),
            // Failed at the source, or nothing is known.
            (state(6), state(1), At::Neither),
            (state(0), None, At::Neither),
            (None, state(1), At::Neither),
        ] {
            assert_eq!(ended(from, to).0, at, "{from:?}, {to:?}");
        }
    }

    #[test]
    fn signals_between_two_polls_are_counted() {
        use signal_hook::{consts::SIGUSR1, low_level::raise};

        let signals = Signals::catch(&[SIGUSR1]).unwrap();
        assert_eq!(signals.pending(), 0);
        for _ in 0..2 {
            raise(SIGUSR1).unwrap();
        }
        assert_eq!(signals.pending(), 2);
        assert_eq!(signals.pending(), 0);
    }
}
