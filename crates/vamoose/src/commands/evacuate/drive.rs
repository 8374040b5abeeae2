//! Carries out the plan: one thread for each migration, and one that polls them and follows the scheduler.

use std::{
    collections::BTreeMap,
    io::{self, Read as _},
    os::unix::net::UnixStream,
    sync::mpsc::{self, Receiver, Sender},
    thread::{self, Scope},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use evacuation::{
    Action, At, End, Event, Failure, FailureKind, GuestId, HostId, Move, Plan, Scheduler, Stop,
};
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    low_level::pipe,
};
use tracing::{debug, error, info, warn};

use super::{
    Options,
    host::LibvirtHost,
    libvirt::{self, Connection, Domain, Migration, State},
    summary::{GuestReport, Report},
    survey::{Known, SOURCE, Survey},
};
use vamoose::progress::Bar;

/// Interval at which migrations are polled.
const POLL: Duration = Duration::from_millis(250);

/// Interval of progress lines if there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Time for both hosts to agree on a guest's location after its migration.
const SETTLE: Duration = Duration::from_secs(30);

/// Totals of one guest's tries.
#[derive(Clone, Debug, Default)]
pub(super) struct Account {
    began: Option<Instant>,
    /// From the start of the first try to the end of the last one.
    pub(super) took: Duration,
    /// Bytes sent by the last try.
    pub(super) bytes: u64,
    pub(super) downtime_ms: Option<u64>,
    /// State on the host that has the guest.
    pub(super) state: Option<&'static str>,
    /// Bytes of memory at the destination, in the last try.
    pub(super) done: u64,
}

/// Moves the guests.
pub(super) fn run(options: &Options, survey: &Survey, plan: &Plan) -> Result<Report> {
    let memory = |step: &Move| survey.fleet.guest(step.guest).memory;
    let scheduler = Scheduler::new(&survey.fleet, plan, options.limits());
    let signals = Signals::catch(&[SIGINT, SIGTERM]).context("cannot catch signals")?;
    let (send, finished) = mpsc::channel();
    let mut drive = Drive {
        options,
        survey,
        scheduler,
        start: Instant::now(),
        running: BTreeMap::new(),
        accounts: vec![Account::default(); survey.fleet.guests().len()],
        stop: None,
        bar: Bar::on_stderr(LINE_EVERY),
        moved: (0, 0),
        total: (plan.moves.iter().map(memory).sum(), plan.moves.len()),
    };
    thread::scope(|scope| drive.until_done(scope, &send, &finished, &signals));
    drive.bar.end();
    let Drive {
        scheduler,
        accounts,
        ..
    } = &drive;
    let guests = accounts.iter().enumerate();
    let guests =
        guests.map(|(at, account)| GuestReport::of(survey, scheduler, GuestId(at), account));
    let was_stopped = drive.stop.is_some();
    Ok(Report::of(
        survey,
        guests.collect(),
        was_stopped,
        drive.start.elapsed(),
    ))
}

/// Signals that are counted: each is a byte in a socket, so two between two polls are two.
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

/// A migration that has ended.
struct Finished {
    end: End,
    state: Option<State>,
    /// Statistics that the destination keeps.
    job: Option<libvirt::Job>,
}

struct Drive<'a> {
    options: &'a Options,
    survey: &'a Survey,
    scheduler: Scheduler<'a>,
    start: Instant,
    running: BTreeMap<GuestId, Running>,
    accounts: Vec<Account>,
    stop: Option<Stop>,
    bar: Bar,
    /// Memory and number of the guests that have moved.
    moved: (u64, usize),
    /// Memory and number of the guests that are to move.
    total: (u64, usize),
}

/// A migration under way.
#[derive(Clone, Copy)]
struct Running {
    to: HostId,
    /// New limit in bytes per second, until libvirt has taken it.
    rate: Option<u64>,
    is_cancelled: bool,
}

impl<'a> Drive<'a> {
    fn until_done<'scope>(
        &mut self,
        scope: &'scope Scope<'scope, 'a>,
        send: &Sender<Finished>,
        finished: &Receiver<Finished>,
        signals: &Signals,
    ) where
        'a: 'scope,
    {
        let mut events = vec![Event::Tick];
        loop {
            for event in events {
                let now = self.start.elapsed();
                for action in self.scheduler.handle(now, event) {
                    self.act(scope, send, action);
                }
            }
            if self.scheduler.is_done() {
                return;
            }
            events = match finished.recv_timeout(POLL) {
                Ok(finished) => vec![self.finished(finished)],
                Err(_) => self.poll(),
            };
            events.extend((0..signals.pending()).map(|_| self.signalled()));
        }
    }

    fn act<'scope>(
        &mut self,
        scope: &'scope Scope<'scope, 'a>,
        send: &Sender<Finished>,
        action: Action,
    ) where
        'a: 'scope,
    {
        match action {
            Action::Start { guest, to, rate } => {
                let account = &mut self.accounts[guest.0];
                account.began.get_or_insert_with(Instant::now);
                (account.done, account.bytes) = (0, 0);
                let running = Running {
                    to,
                    rate: None,
                    is_cancelled: false,
                };
                self.running.insert(guest, running);
                let job = Job::new(self.options, self.survey, guest, to, rate);
                let tries = self.scheduler.tries(guest);
                let again = if tries > 1 {
                    format!(", try {tries}")
                } else {
                    String::new()
                };
                self.bar
                    .suspend(|| info!("{} moves to {}{again}", job.name, job.to.name));
                let send = send.clone();
                // The receiver outlives it.
                scope.spawn(move || drop(send.send(job.run(guest))));
            }
            Action::SetRate { guest, rate } => {
                if let Some(running) = self.running.get_mut(&guest) {
                    running.rate = Some(rate);
                }
                self.ask(guest);
            }
            Action::Cancel { guest } => {
                if let Some(running) = self.running.get_mut(&guest) {
                    running.is_cancelled = true;
                }
                self.ask(guest);
            }
        }
    }

    /// The first signal stops new migrations, the second one cancels those under way.
    fn signalled(&mut self) -> Event {
        let stop = match self.stop {
            None => Stop::Finish,
            Some(_) => Stop::Cancel,
        };
        if self.stop != Some(stop) {
            let running = self.running.len();
            self.bar.suspend(|| match stop {
                Stop::Finish => warn!(
                    "no further guests; {running} migrations are under way and end first, or are cancelled by another signal"
                ),
                Stop::Cancel => warn!("cancelling {running} migrations"),
            });
        }
        self.stop = Some(stop);
        Event::Stop(stop)
    }

    fn finished(&mut self, finished: Finished) -> Event {
        let Finished { end, state, job } = finished;
        let guest = end.guest;
        let to = self.running.remove(&guest).map(|running| running.to);
        let account = &mut self.accounts[guest.0];
        account.took = account
            .began
            .map_or(Duration::ZERO, |began| began.elapsed());
        account.state = state.map(State::name);
        account.downtime_ms = job.and_then(|job| job.downtime_ms);
        account.bytes = job.map_or(account.bytes, |job| job.processed);
        account.done = 0;
        let is = self.survey.fleet.guest(guest);
        let (name, took) = (&is.name, account.took.as_secs_f64());
        let to = to.map_or("?", |to| &self.survey.hosts[to.0].name);
        let why = match &end.result {
            Ok(()) => String::new(),
            Err(failure) => format!(": {failure}"),
        };
        self.bar.suspend(|| match end.at {
            At::Destination => info!("{name} has moved to {to} in {took:.1} s"),
            At::Source => warn!("{name} has not moved to {to}{why}"),
            at => error!("{name} IS IN DOUBT, {}{why}", in_doubt(at, to)),
        });
        if end.at == At::Destination {
            self.moved = (self.moved.0 + is.memory, self.moved.1 + 1);
        }
        Event::Ended(end)
    }

    /// Polls all migrations, and shows progress.
    fn poll(&mut self) -> Vec<Event> {
        let guests: Vec<_> = self.running.keys().copied().collect();
        let mut events = vec![Event::Tick];
        for guest in &guests {
            let rate = self.ask(*guest);
            events.extend(rate.map(|rate| Event::DirtyRate {
                guest: *guest,
                rate,
            }));
        }
        let sent: u64 = guests.iter().map(|guest| self.accounts[guest.0].done).sum();
        let ((memory, moved), (total, all)) = (self.moved, self.total);
        let text = format!("{moved} of {all} guests moved, {} under way", guests.len());
        self.bar.show(memory + sent, total, text);
        events
    }

    /// Polls a migration, and passes a new rate or a cancellation on. Errors are ignored: a guest that is gone has moved.
    fn ask(&mut self, guest: GuestId) -> Option<u64> {
        let source = &self.survey.hosts[SOURCE.0];
        let uuid = &self.survey.known[guest.0].uuid;
        let job = source.ask(|it| it.job(uuid)).ok()?;
        let running = self.running.get_mut(&guest)?;
        // Without a job there is nothing to cancel, and a rate set before the start would be replaced by the initial one.
        if !job.is_active {
            return None;
        }
        if running.is_cancelled {
            if let Err(error) = source.ask(|it| it.abort(uuid)) {
                debug!("{uuid}: {error:#}");
            }
        } else if job.processed > 0
            && let Some(rate) = running.rate
            && source.ask(|it| it.set_rate(uuid, mib(rate))).is_ok()
        {
            debug!("{uuid}: {} MiB/s", mib(rate));
            running.rate = None;
        }
        let account = &mut self.accounts[guest.0];
        account.bytes = account.bytes.max(job.processed);
        if job.processed > 0 {
            let memory = self.survey.fleet.guest(guest).memory;
            account.done = memory.saturating_sub(job.remaining);
        }
        (job.dirty_rate > 0).then_some(job.dirty_rate)
    }
}

pub(super) fn in_doubt(at: At, to: &str) -> String {
    match at {
        At::Both => format!("IT IS ACTIVE ON ITS HOST AND ON {to}: end one of the two"),
        At::Neither => format!("it is active neither on its host nor on {to}"),
        At::Unknown | At::Source | At::Destination => {
            format!("its host and {to} did not both answer")
        }
    }
}

/// libvirt's unit of rates.
fn mib(rate: u64) -> u64 {
    rate >> 20
}

/// One try of one guest.
struct Job<'a> {
    name: &'a str,
    known: &'a Known,
    from: &'a LibvirtHost,
    to: &'a LibvirtHost,
    migration: Migration,
}

impl<'a> Job<'a> {
    fn new(
        options: &Options,
        survey: &'a Survey,
        guest: GuestId,
        to: HostId,
        rate: Option<u64>,
    ) -> Self {
        let known = &survey.known[guest.0];
        Self {
            name: &survey.fleet.guest(guest).name,
            known,
            from: &survey.hosts[SOURCE.0],
            to: &survey.hosts[to.0],
            migration: Migration {
                is_persistent: known.is_persistent,
                rate: rate.map(mib),
                ..options.migration()
            },
        }
    }

    fn run(&self, guest: GuestId) -> Finished {
        let result = match self.begin() {
            Ok(result) => result,
            // Nothing has begun: the guest is where it was.
            Err(error) => {
                let reason = format!("{error:#}");
                let kind = FailureKind::Temporary;
                let end = End {
                    guest,
                    at: At::Source,
                    result: Err(Failure { kind, reason }),
                };
                return Finished {
                    end,
                    state: None,
                    job: None,
                };
            }
        };
        let (at, state) = self.observe();
        let job = match at {
            At::Destination => {
                let completed = |it: &mut Connection| it.completed_job(&self.known.uuid);
                self.to.ask(completed).ok()
            }
            _ => None,
        };
        // A guest that ended before its migration is not in doubt, and is not tried again.
        let at = match (&result, at) {
            (Err(failure), At::Neither) if failure.reason == ENDED => At::Source,
            _ => at,
        };
        let has_ended = |state: &State| at == At::Source && state.has_ended();
        let result = match state.filter(has_ended) {
            Some(state) => Err(Failure {
                kind: FailureKind::Permanent,
                reason: format!("{ENDED}: {}", state.name()),
            }),
            None => result,
        };
        Finished {
            end: End { guest, at, result },
            state,
            job,
        }
    }

    /// Migrates the guest. An error if the migration did not begin; otherwise its result.
    fn begin(&self) -> Result<std::result::Result<(), Failure>> {
        let uuid = &self.known.uuid;
        if active(self.from, uuid)?.is_none() {
            return Ok(Err(Failure {
                kind: FailureKind::Permanent,
                reason: ENDED.to_owned(),
            }));
        }
        let to = match self.migration.is_by_host {
            true => self.to.uri.clone(),
            false => self.to.uri_here(),
        };
        let migrated = libvirt::migrate(&self.from.uri_here(), uuid, &to, &self.migration);
        Ok(migrated.map_err(|error| Failure {
            kind: error.kind(),
            reason: error.to_string(),
        }))
    }

    /// Asks both hosts where the guest is, until both answer and no migration is under way.
    fn observe(&self) -> (At, Option<State>) {
        let start = Instant::now();
        loop {
            let found = [self.from, self.to].map(|host| active(host, &self.known.uuid));
            let is_last = start.elapsed() >= SETTLE;
            let is_settled = |of: &Domain| !of.state.is_migrating() || is_last;
            match found {
                [Ok(Some(it)), Ok(None)] if is_settled(&it) => {
                    return (At::Source, Some(it.state));
                }
                [Ok(None), Ok(Some(it))] if is_settled(&it) => {
                    return (At::Destination, Some(it.state));
                }
                [Ok(Some(_)), Ok(Some(_))] if is_last => return (At::Both, None),
                [Ok(None), Ok(None)] if is_last => {
                    let [from, to] = [self.from, self.to].map(|it| known(it, &self.known.uuid));
                    let [from, to] =
                        [from, to].map(|known| known.ok().flatten().map(|it| it.state));
                    return ended(from, to);
                }
                [Err(error), _] | [_, Err(error)] if is_last => {
                    warn!("{}: {error:#}", self.name);
                    return (At::Unknown, None);
                }
                _ => thread::sleep(POLL),
            }
        }
    }
}

/// Reason for a guest that was shut off before its migration began.
const ENDED: &str = "it no longer runs";

/// Location of a guest that runs nowhere, from the last state that both hosts keep of a persistent guest.
fn ended(from: Option<State>, to: Option<State>) -> (At, Option<State>) {
    match (from, to) {
        (Some(here), _) if here.has_ended() => (At::Source, from),
        (Some(here), Some(there)) if here.has_left() && there.has_ended() => (At::Destination, to),
        _ => (At::Neither, None),
    }
}

/// The guest, if it has a process there.
fn active(host: &LibvirtHost, uuid: &str) -> Result<Option<Domain>> {
    Ok(known(host, uuid)?.filter(|it| it.state.is_active()))
}

fn known(host: &LibvirtHost, uuid: &str) -> Result<Option<Domain>> {
    host.ask(|it| it.domain(uuid))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHUT_OFF: i32 = 5;

    /// By libvirt's numbers of the reason for which a guest is shut off.
    #[test]
    fn an_ended_guest_is_not_in_doubt() {
        let state = |reason| Some(State::new(SHUT_OFF, reason));
        for (from, to, at) in [
            // Shut down, destroyed, crashed, saved; whatever its last end at the other host was.
            (state(1), None, At::Source),
            (state(2), state(1), At::Source),
            (state(3), None, At::Source),
            (state(5), None, At::Source),
            // It has migrated, and was shut down there.
            (state(4), state(1), At::Destination),
            // It has migrated, and the other host knows nothing of it, or only of an older time.
            (state(4), None, At::Neither),
            (state(4), state(0), At::Neither),
            // The source has failed, or nothing is known.
            (state(6), state(1), At::Neither),
            (state(0), None, At::Neither),
            (None, state(1), At::Neither),
        ] {
            assert_eq!(ended(from, to).0, at, "{from:?}, {to:?}");
        }
    }
    #[test]
    fn two_signals_between_two_polls_are_two() {
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
