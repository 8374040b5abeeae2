//! `migrate`: one process a command.
//!
//! Shipped: [`SourceDriver`] with its machine, [`FoundGuest`], the messages and their framing, the states in the journal, and the
//! policy of pre-copy ([`Convergence`]). Model: what `vamoose-relay`'s `migrate/` does with monitors, sockets and threads, line
//! by line ([`Side`] is `hand_over.rs`; [`World::look_at_qemu`] `watch.rs` and `source.rs`; [`World::look_into_journal`] `earlier.rs`).

use std::{collections::VecDeque, time::Duration};

use convergence::{Convergence, OnTimeout, Policy};
use handover::{
    AttemptId, ConnectionKind, Decision, DestinationMessage, FoundGuest, GuestLocation,
    Incarnation, LastSeen, Preamble, Prepare, Source, SourceDriver, SourceEvent, SourceHost,
    SourceMessage, SourceState, Step, encode, to_details,
};
use serde::{Deserialize, Serialize};

use crate::{
    destination::Request,
    mutants::Mutant,
    net::SOCKET,
    qemu::{CHUNK, Happened, Packet, State, Status},
    session::CLIENT,
    world::{Event, Process, Role, World},
};

pub(crate) struct Migrate {
    pub(crate) guest: usize,
    pub(crate) host: usize,
    pub(crate) to: usize,
    pub(crate) qemu: Option<usize>,
    pub(crate) confirm: bool,
    pub(crate) is_cancelled: bool,
    /// It is `settle --as never-ran`, not `migrate`.
    pub(crate) settles: bool,
    pub(crate) since: Duration,
    /// It has a driver of its own attempt or of an earlier one.
    pub(crate) began: bool,
    pub(crate) has_committed: bool,
    phase: Phase,
    driver: Option<SourceDriver>,
    pub(crate) record: Option<AtSource>,
    control: Option<usize>,
    notices: VecDeque<AttemptId>,
    // What it has seen of its QEMU.
    is_wanted: bool,
    stopped: Option<Duration>,
    has_gone_on: bool,
    is_here: bool,
    // The migration.
    stopping: Option<(Duration, bool)>,
    without_relay: Option<Duration>,
    sent: Vec<u64>,
    convergence: Convergence,
    round: u64,
    began_to_move: Duration,
    samples: VecDeque<(Duration, u64)>,
    // The hand-over.
    is_warned: bool,
    unclear_since: Option<Duration>,
    has_aborted: bool,
    is_answered: bool,
    pub(crate) report: Option<GuestLocation>,
}

#[derive(Clone, Debug, PartialEq)]
enum Phase {
    Connecting,
    /// A session for a new attempt is being made.
    Reaching(usize),
    /// The destination is told of an attempt that has failed.
    Notifying(AttemptId, usize, Duration),
    Preparing(Duration),
    Opening,
    Watching,
    Deciding(Wait),
    Confirming(Duration),
    /// The destination of an attempt that went through is asked.
    Asking(usize, Duration),
    /// It is asked for a person who is sure that the guest never ran there.
    Settling(usize, Duration),
    Over,
}

/// What a hand-over waits for.
#[derive(Clone, Debug, PartialEq)]
enum Wait {
    Nothing,
    Answer(Duration),
    Dialling(usize),
    /// A pause before the next question, or before the next attempt to connect.
    Question(Duration),
    Dial(Duration),
    /// QEMU is still in its switchover.
    Resuming(Duration),
}

#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct AtSource {
    pub(crate) attempt: AttemptId,
    began: u64,
    pub(crate) guest: usize,
    pub(crate) qemu: usize,
    pub(crate) to: usize,
    resume: bool,
    confirmed: bool,
    pub(crate) state: SourceState,
}

/// As in `vamoose-relay`.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
const ABORTED_WITHIN: Duration = Duration::from_secs(15);
const ASK_AGAIN: Duration = Duration::from_secs(1);
const PREPARED_WITHIN: Duration = Duration::from_secs(60);
const SETTLING: Duration = Duration::from_secs(10);
const CANCELLING: Duration = Duration::from_secs(5);
const ASK_EVERY: Duration = Duration::from_millis(200);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const DOWNTIME_LIMIT: Duration = Duration::from_millis(300);
const DOWNTIME_MAX: Duration = Duration::from_secs(10);

const MAIN: usize = 1;

impl Migrate {
    pub(crate) fn is_alive(&self) -> bool {
        self.phase != Phase::Over
    }

    /// QEMU has not been told to migrate yet.
    pub(crate) fn is_getting_ready(&self) -> bool {
        matches!(
            self.phase,
            Phase::Connecting
                | Phase::Reaching(_)
                | Phase::Notifying(..)
                | Phase::Preparing(_)
                | Phase::Opening
        )
    }

    /// Nothing has failed, and nobody has given it up.
    pub(crate) fn is_undisturbed(&self, disturbed: Duration, now: Duration) -> bool {
        let is_given_up = self.is_cancelled || self.stopping.is_some();
        self.driver.is_some() && !is_given_up && self.without_relay.is_none() && now < disturbed
    }

    fn last_seen(&self) -> LastSeen {
        match (self.is_wanted && self.stopped.is_none(), self.has_gone_on) {
            (true, _) => LastSeen::Running,
            // Another tool may have sent it.
            (false, false) if self.is_here => LastSeen::Unknown,
            (false, false) => LastSeen::Stopped,
            (false, true) => LastSeen::Unknown,
        }
    }

    fn policy(timeout: Option<(Duration, OnTimeout)>) -> Policy {
        Policy {
            downtime_limit: DOWNTIME_LIMIT,
            downtime_max: DOWNTIME_MAX,
            timeout,
            auto_converge: None,
        }
    }
}

impl World<'_> {
    /// A person runs `migrate` on a host.
    pub(crate) fn start_migrate(
        &mut self,
        guest: usize,
        host: usize,
        to: usize,
        confirm: bool,
    ) -> usize {
        let id = self.migrates.len();
        self.counts.commands += 1;
        self.note(format_args!(
            "migrate {id}: guest {guest}, host {host} to host {to}, confirm {confirm}"
        ));
        self.migrates.push(Migrate {
            guest,
            host,
            to,
            qemu: None,
            confirm,
            is_cancelled: false,
            settles: false,
            since: self.now,
            began: false,
            has_committed: false,
            phase: Phase::Connecting,
            driver: None,
            record: None,
            control: None,
            notices: VecDeque::new(),
            is_wanted: false,
            stopped: None,
            has_gone_on: false,
            is_here: false,
            stopping: None,
            without_relay: None,
            sent: vec![0; 8],
            convergence: Convergence::new(Migrate::policy(self.options.timeout)),
            round: 0,
            began_to_move: self.now,
            samples: VecDeque::new(),
            is_warned: false,
            unclear_since: None,
            has_aborted: false,
            is_answered: false,
            report: None,
        });
        self.after(Duration::ZERO, Event::Migrate(id));
        id
    }

    pub(crate) fn kill_migrate(&mut self, id: usize) {
        if !self.migrates[id].is_alive() {
            return;
        }
        self.note(format_args!("migrate {id} is killed"));
        let qemu = self.migrates[id].qemu.filter(|_| self.is_moving(id));
        self.migrates[id].phase = Phase::Over;
        self.migrates[id].driver = None;
        self.counts.restarted += 1;
        for session in self.sessions_of(id) {
            self.forget(session, CLIENT);
        }
        // Its sockets are closed.
        if let Some(qemu) = qemu {
            self.migration_ends(qemu, Status::Failed);
        }
        self.command_ended(id, None);
    }

    /// The command is over.
    fn reports(&mut self, id: usize, guest: GuestLocation) {
        if !self.migrates[id].is_alive() {
            return;
        }
        self.note(format_args!("migrate {id} reports {guest:?}"));
        self.migrates[id].phase = Phase::Over;
        self.migrates[id].report = Some(guest);
        for session in self.sessions_of(id) {
            for stream in 0..self.sessions[session].streams.len() {
                self.drop_stream(session, stream, CLIENT);
            }
        }
        self.check_report(id, guest);
        self.command_ended(id, Some(guest));
    }

    fn sessions_of(&self, id: usize) -> Vec<usize> {
        let all = 0..self.sessions.len();
        all.filter(|it| self.sessions[*it].client == Process::Migrate(id))
            .collect()
    }

    fn is_moving(&self, id: usize) -> bool {
        matches!(self.migrates[id].phase, Phase::Watching)
    }

    /// Time has passed.
    pub(crate) fn advance_migrate(&mut self, id: usize) {
        let now = self.now;
        match self.migrates[id].phase.clone() {
            Phase::Over => return,
            Phase::Connecting => self.find_source(id),
            Phase::Reaching(session) => self.reach(id, session),
            Phase::Notifying(_, session, until) => {
                if now >= until || !self.is_open(session, 0, CLIENT) {
                    self.migrates[id].notices.clear();
                    self.begin_attempt(id);
                }
            }
            Phase::Preparing(until) => {
                if now >= until || self.is_control_lost(id) || self.migrates[id].is_cancelled {
                    self.fails(id, "the server does not answer");
                }
            }
            Phase::Opening => self.open_data(id),
            Phase::Watching => self.look_at_qemu(id),
            Phase::Deciding(wait) => self.wait_on(id, wait),
            Phase::Confirming(until) => {
                if now >= until || self.is_control_lost(id) {
                    self.conclude(id);
                }
            }
            Phase::Settling(session, until) => {
                if now >= until || !self.is_open(session, 0, CLIENT) {
                    self.settled(id, None);
                }
            }
            Phase::Asking(session, until) => {
                if now >= until || !self.is_open(session, 0, CLIENT) {
                    self.reports(id, GuestLocation::Destination);
                }
            }
        }
        if self.migrates[id].is_alive() {
            self.after(ASK_EVERY, Event::Migrate(id));
        }
    }

    fn is_control_lost(&self, id: usize) -> bool {
        let control = self.migrates[id].control;
        control.is_none_or(|it| !self.is_open(it, 0, CLIENT))
    }

    /// Its present attempt.
    fn attempt(&self, id: usize) -> AttemptId {
        let record = self.migrates[id].record.as_ref();
        record.map_or(AttemptId([0; 16]), |it| it.attempt)
    }

    // Earlier attempts.

    /// Connects to the source's monitor.
    fn find_source(&mut self, id: usize) {
        let (host, guest, since) = (
            self.migrates[id].host,
            self.migrates[id].guest,
            self.migrates[id].since,
        );
        let is_driven = (0..self.migrates.len()).any(|other| {
            let it = &self.migrates[other];
            other != id && it.is_alive() && (it.host, it.guest) == (host, guest)
        });
        if is_driven {
            return self.reports(id, self.guest_by_belief(id));
        }
        let Some(qemu) = self.at_path(host, guest) else {
            return self.look_into_journal(id, None);
        };
        match self.monitor(qemu) {
            Ok(_) => {
                self.migrates[id].qemu = Some(qemu);
                self.look_into_journal(id, Some(qemu));
            }
            Err(_) if self.now < since + CONNECT_TIMEOUT => {}
            Err(_) => {
                // Another client holds the monitor. Entries of another QEMU say nothing about this one.
                let known = self.records(id);
                let counts =
                    |record: &&AtSource| record.qemu == qemu || self.has(Mutant::TakesAnyRecord);
                let guest = known
                    .iter()
                    .rfind(counts)
                    .map_or(GuestLocation::Source, |it| it.state.guest());
                self.migrates[id].qemu = Some(qemu);
                self.migrates[id].has_committed = guest == GuestLocation::InDoubt;
                // Another tool may have moved it, over its own monitor.
                self.migrates[id].began = guest != GuestLocation::Source;
                self.reports(id, guest);
            }
        }
    }

    /// A command that cannot do anything says that the guest is where it was.
    fn guest_by_belief(&self, id: usize) -> GuestLocation {
        let host = self.migrates[id].host;
        match self.qemus[self.guests[self.migrates[id].guest].home].host == host {
            true => GuestLocation::Source,
            false => GuestLocation::MovedOn,
        }
    }

    fn records(&self, id: usize) -> Vec<AtSource> {
        let (host, guest) = (self.migrates[id].host, self.migrates[id].guest);
        let mut known = self.journal::<AtSource>(host, Role::Source);
        known.retain(|record| record.guest == guest);
        known.sort_by_key(|record| record.began);
        known
    }

    fn look_into_journal(&mut self, id: usize, qemu: Option<usize>) {
        let known = self.records(id);
        let is_its = |record: &&AtSource| match qemu {
            Some(qemu) => record.qemu == qemu,
            None => !self.qemus[record.qemu].is_alive,
        };
        let of_this: Vec<_> = known.iter().filter(is_its).collect();
        if let Some(open) = of_this.iter().find(|record| !record.state.is_over()) {
            return match self.migrates[id].settles {
                true => self.settle_open(id, (*open).clone()),
                false => self.take_up(id, (*open).clone(), qemu),
            };
        }
        if self.migrates[id].settles {
            let guest = self.guest_by_belief(id);
            return self.reports(id, guest);
        }
        let last = of_this.last().map(|record| (*record).clone());
        if let Some(qemu) = qemu {
            self.look(id, qemu);
            if self.qemus[qemu].status() != Some(Status::Completed)
                || !self.qemus[qemu].state.is_switchover()
            {
                return self.tell_of_earlier(id);
            }
        }
        match last {
            Some(record)
                if record.state.guest() == GuestLocation::Destination
                    && record.to == self.migrates[id].to =>
            {
                self.ask_after(id, record);
            }
            Some(record) => {
                let guest = record.state.guest();
                self.migrates[id].has_committed = true;
                self.migrates[id].qemu = None;
                self.reports(id, guest);
            }
            None => self.reports(
                id,
                if qemu.is_some() {
                    GuestLocation::Gone
                } else {
                    self.guest_by_belief(id)
                },
            ),
        }
    }

    /// Whether a command waits for a migration whose own command is gone.
    pub(crate) fn waits_for_earlier(&self, id: usize) -> bool {
        let it = &self.migrates[id];
        let is_migrating = it.qemu.is_some_and(|qemu| self.qemus[qemu].is_migrating());
        it.phase == Phase::Connecting && is_migrating
    }

    fn take_up(&mut self, id: usize, record: AtSource, qemu: Option<usize>) {
        let completed = match qemu {
            Some(qemu) if self.qemus[qemu].is_migrating() => {
                let has_committed = matches!(record.state, SourceState::Committing { .. });
                if self.migrates[id].is_cancelled && !has_committed {
                    return self.migration_ends(qemu, Status::Cancelled);
                }
                let since = self.migrates[id].since;
                if self.now > since + SETTLING + CONNECT_TIMEOUT {
                    self.migrates[id].has_committed =
                        record.state.guest() == GuestLocation::InDoubt;
                    let guest = record.state.guest();
                    self.reports(id, guest);
                }
                return;
            }
            Some(qemu) => {
                let it = &self.qemus[qemu];
                Some(it.status() == Some(Status::Completed) && it.state.is_switchover())
            }
            None => None,
        };
        let has_sent = qemu.is_some_and(|qemu| self.qemus[qemu].state.is_switchover());
        let confirmed = self.migrates[id].confirm || self.has(Mutant::TakesItForItsOwn);
        let is_committing = matches!(record.state, SourceState::Committing { .. });
        let found = match (completed, is_committing) {
            (None, _) if self.has(Mutant::DoubtsTheDead) => {
                self.migrates[id].has_committed = is_committing;
                return self.reports(id, GuestLocation::InDoubt);
            }
            (None, _) => FoundGuest::Ended,
            (Some(_), true) if has_sent || self.has(Mutant::CommitsWithoutALook) => {
                FoundGuest::Sent { confirmed }
            }
            (Some(true), false) => FoundGuest::Sent { confirmed },
            (Some(_), _) => FoundGuest::Here,
        };
        self.note(format_args!(
            "migrate {id} takes up {:?}, {found:?}",
            record.state
        ));
        let resume = record.resume || self.has(Mutant::AssumesThatItRan);
        let driver = SourceDriver::take_up(record.state.clone(), resume, found);
        let to = match self.has(Mutant::AnswersByName) {
            true => self.migrates[id].to,
            false => record.to,
        };
        let record = AtSource { to, ..record };
        let it = &mut self.migrates[id];
        it.is_here = completed == Some(false);
        (it.to, it.record, it.driver, it.began) = (to, Some(record), Some(driver), true);
        it.phase = Phase::Deciding(Wait::Nothing);
        self.drive(id);
    }

    /// As `settle.rs`: the destination is told that the guest stays here.
    fn settle_open(&mut self, id: usize, record: AtSource) {
        if !matches!(record.state, SourceState::Committing { .. }) {
            return self.reports(id, record.state.guest());
        }
        if !self.qemus[record.qemu].is_alive {
            // The only copy may be the destination's.
            return self.settles(id, record, GuestLocation::Lost);
        }
        let session = self.connect_for(id, record.attempt, record.to);
        let cause = "settled by hand".to_owned();
        self.tell(session, &SourceMessage::Abort { cause });
        (self.migrates[id].has_committed, self.migrates[id].began) = (true, true);
        self.migrates[id].record = Some(record);
        self.migrates[id].phase = Phase::Settling(session, self.now + PREPARED_WITHIN);
    }

    /// Only the destination's proof counts.
    fn settled(&mut self, id: usize, answer: Option<&DestinationMessage>) {
        let Some(record) = self.migrates[id].record.clone() else {
            return;
        };
        let is_proof = match answer {
            Some(DestinationMessage::Aborted { incarnation, .. }) => {
                record.state.accepts_abort_of(*incarnation)
            }
            Some(
                DestinationMessage::Starting
                | DestinationMessage::Receiving
                | DestinationMessage::Loaded,
            ) => return,
            Some(DestinationMessage::Refused { .. } | DestinationMessage::Unknown { .. })
            | None => self.has(Mutant::SettlesOnSilence),
            _ => false,
        };
        if !is_proof
            || self.resume_source(id, self.now, record.resume) != Some(SourceEvent::Resumed)
        {
            return self.reports(id, GuestLocation::InDoubt);
        }
        self.settles(id, record, GuestLocation::Source);
    }

    fn settles(&mut self, id: usize, mut record: AtSource, guest: GuestLocation) {
        let cause = Some("settled by hand".to_owned());
        record.state = SourceState::Over { guest, cause };
        let (host, key) = (self.migrates[id].host, (Role::Source, record.attempt));
        let _ = self.write_journal(host, key, &record);
        self.reports(id, guest);
    }

    fn ask_after(&mut self, id: usize, record: AtSource) {
        let resume = record.resume;
        let session = self.connect_for(id, record.attempt, record.to);
        self.migrates[id].qemu = None;
        self.migrates[id].phase = Phase::Asking(session, self.now + SETTLING);
        self.tell(session, &SourceMessage::Commit { resume });
    }

    /// Destinations that could not be reached are told of attempts that have failed.
    fn tell_of_earlier(&mut self, id: usize) {
        let to = self.migrates[id].to;
        let is_open = |record: &AtSource| {
            let stays = record.state.outcome() == Some(GuestLocation::Source);
            stays && !record.confirmed && record.to == to
        };
        let open = self
            .records(id)
            .into_iter()
            .filter(is_open)
            .map(|record| record.attempt);
        self.migrates[id].notices = open.collect();
        self.begin_attempt(id);
    }

    // A new attempt.

    fn begin_attempt(&mut self, id: usize) {
        if let Some(earlier) = self.migrates[id].notices.pop_front() {
            let to = self.migrates[id].to;
            let session = self.connect_for(id, earlier, to);
            let cause = "it failed".to_owned();
            self.tell(session, &SourceMessage::Abort { cause });
            self.migrates[id].phase = Phase::Notifying(earlier, session, self.now + ABORTED_WITHIN);
            return;
        }
        let attempt = AttemptId(self.random.bytes());
        let (to, guest) = (self.migrates[id].to, self.migrates[id].guest);
        let Some(qemu) = self.migrates[id].qemu else {
            return;
        };
        let session = self.connect_for(id, attempt, to);
        let resume = self.migrates[id].is_wanted;
        let state = SourceState::Moving { incarnation: None };
        let record = AtSource {
            attempt,
            began: u64::try_from(self.now.as_nanos()).unwrap() + id as u64,
            guest,
            qemu,
            to,
            resume,
            confirmed: false,
            state,
        };
        let it = &mut self.migrates[id];
        (it.control, it.record) = (Some(session), Some(record));
        it.phase = Phase::Reaching(session);
    }

    fn reach(&mut self, id: usize, session: usize) {
        if self.sessions[session].failed.is_some() || self.migrates[id].is_cancelled {
            return self.reports(id, GuestLocation::Source);
        }
        if !self.is_attached(session, 0) {
            return;
        }
        let host = self.migrates[id].host;
        let Some(record) = self.migrates[id].record.clone() else {
            return;
        };
        if self
            .write_journal(host, (Role::Source, record.attempt), &record)
            .is_err()
        {
            return self.reports(id, GuestLocation::Source);
        }
        let source = Source::new(record.resume);
        let source = match self.has(Mutant::SilenceIsEvidence) || self.has(Mutant::TrustsRefusals) {
            true => source.direct(),
            false => source,
        };
        let it = &mut self.migrates[id];
        (it.driver, it.began) = (Some(SourceDriver::new(source)), true);
        it.phase = Phase::Preparing(self.now + PREPARED_WITHIN);
        let guest = it.guest;
        let details = to_details(&Request { guest }).unwrap();
        self.tell(session, &SourceMessage::Prepare(Prepare::new(details)));
    }

    fn open_data(&mut self, id: usize) {
        let (Some(session), Some(qemu)) = (self.migrates[id].control, self.migrates[id].qemu)
        else {
            return;
        };
        let streams = 2 + self.options.channels;
        if self.sessions[session].streams.len() < streams {
            let attempt = self.attempt(id);
            while self.sessions[session].streams.len() < streams {
                let stream = self.open_stream(session);
                self.introduce(session, stream, ConnectionKind::Data, attempt);
            }
            return;
        }
        if !(0..streams).all(|it| self.is_open(session, it, CLIENT))
            || self.migrates[id].is_cancelled
        {
            return self.fails(id, "the streams cannot be opened");
        }
        if !(1..streams).all(|it| self.is_attached(session, it)) {
            return;
        }
        match self.monitor(qemu) {
            Ok(state) if !state.is_switchover() => {}
            Ok(_) => return self.fails(id, "another tool has moved the guest"),
            Err(_) => return self.fails(id, "the source QEMU does not answer"),
        }
        let throttles = matches!(self.options.timeout, Some((_, OnTimeout::Throttle)));
        self.begin_migration(qemu, throttles);
        self.migrates[id].is_here = false;
        self.take_events(id, qemu);
        let it = &mut self.migrates[id];
        (it.stopped, it.has_gone_on, it.began_to_move) = (None, false, self.now);
        it.phase = Phase::Watching;
        self.pump(id);
    }

    /// It has failed before the guest was handed over.
    fn fails(&mut self, id: usize, cause: &str) {
        let cause = cause.to_owned();
        self.finish(id, SourceEvent::Failed { cause });
    }

    fn finish(&mut self, id: usize, event: SourceEvent) {
        self.note(format_args!("migrate {id}: {event:?}"));
        self.migrates[id].phase = Phase::Deciding(Wait::Nothing);
        if let Some(driver) = &mut self.migrates[id].driver {
            driver.handle(event);
        }
        self.drive(id);
    }

    // The migration.

    /// Passes packets on, between QEMU and the streams.
    fn pump(&mut self, id: usize) {
        let (Some(session), Some(qemu)) = (self.migrates[id].control, self.migrates[id].qemu)
        else {
            return;
        };
        let streams = self.sessions[session].streams.len();
        let mut has_moved = true;
        while std::mem::take(&mut has_moved) {
            for stream in MAIN..streams {
                // What is ready for the stream is asked for only if there is room.
                let bytes = crate::qemu::PAGE_BYTES;
                if !self.has_room(session, stream, bytes) {
                    continue;
                }
                let packet = match stream {
                    MAIN => self.next_on_main(qemu),
                    _ => self.next_on_channel(qemu, stream - 2),
                };
                let Some(packet) = packet else {
                    continue;
                };
                let number = self.migrates[id].sent[stream];
                self.migrates[id].sent[stream] += 1;
                self.write(session, stream, CLIENT, &packet.encode(number), false);
                has_moved = true;
            }
        }
        while let Some(bytes) = self.read(session, MAIN, CLIENT) {
            if let Some((_, Packet::Loaded)) = Packet::decode(&bytes) {
                self.completes(qemu);
            }
        }
        let is_broken = (MAIN..streams).any(|it| !self.is_open(session, it, CLIENT));
        if is_broken && self.migrates[id].without_relay.is_none() {
            self.note(format_args!("migrate {id}: its relay has ended"));
            self.migrates[id].without_relay = Some(self.now);
            self.hang_up_source(id);
        }
    }

    /// The relay of a QEMU's migration ends.
    pub(crate) fn relay_ends(&mut self, qemu: usize) {
        let is_its = |id: &usize| self.migrates[*id].qemu == Some(qemu) && self.is_moving(*id);
        if let Some(id) = (0..self.migrates.len()).find(is_its) {
            self.migrates[id].without_relay = Some(self.now);
            self.hang_up_source(id);
        }
    }

    fn hang_up_source(&mut self, id: usize) {
        if let Some(session) = self.migrates[id].control {
            for stream in MAIN..self.sessions[session].streams.len() {
                self.hang_up(session, stream, CLIENT);
            }
        }
        if let Some(qemu) = self.migrates[id].qemu
            && !self.qemus[qemu].is_numb
        {
            self.migration_ends(qemu, Status::Failed);
        }
    }

    /// Reads the guest's state before a new attempt begins.
    fn look(&mut self, id: usize, qemu: usize) {
        self.qemus[qemu].events.clear();
        let is_wanted = self.qemus[qemu].state == State::Running;
        let is_here = !self.has(Mutant::ContinuesWhatAnotherSent);
        let it = &mut self.migrates[id];
        (it.is_wanted, it.stopped, it.has_gone_on, it.is_here) = (is_wanted, None, false, is_here);
    }

    fn take_events(&mut self, id: usize, qemu: usize) {
        let mistakes = self.has(Mutant::TakesPausesForTheSwitchover);
        let (now, state) = (self.now, self.qemus[qemu].state);
        while let Some(event) = self.qemus[qemu].events.pop_front() {
            let it = &mut self.migrates[id];
            match event {
                Happened::Stop if state == State::Running => it.stopped = None,
                Happened::Stop if state.is_switchover() || mistakes => {
                    (it.stopped, it.has_gone_on) = (Some(now), false);
                }
                Happened::Stop => (it.stopped, it.is_wanted) = (None, false),
                Happened::Resume => (it.stopped, it.is_wanted, it.has_gone_on) = (None, true, true),
                Happened::MigrationFailed => it.has_gone_on = true,
            }
        }
    }

    /// One look of `watch`.
    fn look_at_qemu(&mut self, id: usize) {
        let Some(qemu) = self.migrates[id].qemu else {
            return;
        };
        self.take_events(id, qemu);
        if !self.qemus[qemu].is_alive {
            let last = self.migrates[id].last_seen();
            return self.finish(id, SourceEvent::GuestDied { last });
        }
        let wanted = self.migrates[id].is_wanted;
        if self.migrates[id]
            .driver
            .as_ref()
            .is_some_and(|it| it.resume() != wanted)
        {
            if let Some(driver) = &mut self.migrates[id].driver {
                driver.handle(SourceEvent::Wanted { running: wanted });
            }
            self.step_once(id);
            if !self.is_moving(id) {
                return;
            }
        }
        self.pump(id);
        self.stop_if_needed(id, qemu);
        if !self.is_moving(id) || self.monitor(qemu).is_err() {
            return;
        }
        match self.qemus[qemu].status() {
            Some(Status::Completed) => match self.qemus[qemu].state.is_switchover() {
                true => self.finish(id, SourceEvent::Stopped),
                false => self.fails(id, "the guest was continued when it had been sent"),
            },
            Some(Status::Active) => self.guide(id, qemu),
            _ => self.fails(id, "the migration has failed"),
        }
    }

    /// A guest that writes far less than a link carries has moved long before a person loses patience.
    pub(crate) fn judge_slowness(&mut self, id: usize) {
        const LONG: Duration = Duration::from_secs(100);
        let it = &self.migrates[id];
        let since = it.began_to_move.max(self.troubled);
        let is_forced = matches!(
            self.options.timeout,
            Some((_, OnTimeout::Force | OnTimeout::Pause | OnTimeout::Throttle))
        );
        // As much as one connection carries on the longest path.
        let trip = self.options.delay.as_micros() * self.options.paths as u128;
        let carried = u128::from(SOCKET) * 1_000_000 / trip;
        let written = u128::from(self.options.writes * CHUNK * 4);
        let is_quiet = is_forced || written < carried.min(self.options.rate.into());
        let is_undisturbed = it.stopping.is_none() && it.without_relay.is_none();
        if self.is_moving(id) && is_quiet && is_undisturbed && self.now > since + LONG {
            self.fail("a guest that writes little does not move");
        }
    }

    fn stop_if_needed(&mut self, id: usize, qemu: usize) {
        let now = self.now;
        let it = &self.migrates[id];
        let downtime_max = match it.convergence.limit() {
            Duration::MAX => Duration::MAX,
            _ => DOWNTIME_MAX,
        };
        let is_late = it.stopped.is_some_and(|since| now - since > downtime_max);
        let without_relay = it
            .without_relay
            .is_some_and(|since| now - since > CANCELLING);
        let without_relay = without_relay && !self.has(Mutant::IgnoresItsRelay);
        if it
            .without_relay
            .is_some_and(|since| now - since > 6 * CANCELLING)
        {
            return self.fail("migrate waits for a QEMU whose relay has ended");
        }
        let it = &self.migrates[id];
        match it.stopping {
            None if it.is_cancelled || is_late || without_relay => self.stop(id, qemu),
            Some((since, false)) if now - since > CANCELLING => {
                self.migrates[id].stopping = Some((since, true));
                self.hang_up_source(id);
            }
            Some((since, true)) if now - since > 4 * CANCELLING => {
                self.fails(id, "QEMU neither cancels nor completes");
            }
            _ => {}
        }
    }

    fn stop(&mut self, id: usize, qemu: usize) {
        self.migrates[id].stopping = Some((self.now, false));
        self.hang_up_source(id);
        if self.monitor(qemu).is_ok() {
            self.migration_ends(qemu, Status::Cancelled);
        }
    }

    /// Guides the migration by the policy, as `policy.rs` and `remainder.rs` do.
    fn guide(&mut self, id: usize, qemu: usize) {
        if self.has(Mutant::GuidesNothing) || self.migrates[id].stopped.is_some() {
            return;
        }
        let (now, trip) = (self.now, 2 * self.options.delay);
        let Some(outgoing) = &self.qemus[qemu].outgoing else {
            return;
        };
        let (round, sent) = (outgoing.round, outgoing.sent * CHUNK);
        let remaining = self.qemus[qemu].remaining() * CHUNK;
        let it = &mut self.migrates[id];
        let elapsed = now - it.began_to_move;
        let is_new = std::mem::replace(&mut it.round, round) < round;
        it.samples.push_back((now, sent));
        while it.samples.len() > 6 {
            it.samples.pop_front();
        }
        let (since, before) = it.samples[0];
        let rate = (sent - before).max(CHUNK) * 1000
            / u64::try_from((now - since).as_millis()).unwrap().max(200);
        let action = it.convergence.action(elapsed);
        let limit = it.convergence.limit();
        let most = limit
            .saturating_sub(Duration::from_millis(50) + trip)
            .max(limit / 4);
        if is_new {
            let rest = Duration::from_millis(remaining * 1000 / rate);
            it.convergence.round_begins(rest, most, elapsed);
        }
        let allowed = it.convergence.allowed(most);
        let bytes = match allowed {
            Duration::MAX => u64::MAX,
            allowed => {
                u64::try_from(allowed.as_millis())
                    .unwrap()
                    .saturating_mul(rate)
                    / 1000
            }
        };
        if let Some(outgoing) = &mut self.qemus[qemu].outgoing {
            outgoing.allowed = bytes / CHUNK;
        }
        if action == Some(OnTimeout::Abort) {
            self.stop(id, qemu);
        }
    }

    // Conversations.

    /// A session for a control connection of an attempt.
    fn connect_for(&mut self, id: usize, attempt: AttemptId, to: usize) -> usize {
        let host = self.migrates[id].host;
        let session = self.open_session(Process::Migrate(id), [host, to]);
        self.introduce(session, 0, ConnectionKind::Control, attempt);
        session
    }

    fn introduce(&mut self, session: usize, stream: usize, kind: ConnectionKind, of: AttemptId) {
        let preamble = Preamble { kind, attempt: of }.to_bytes();
        self.write(session, stream, CLIENT, &preamble, true);
    }

    fn tell(&mut self, session: usize, message: &SourceMessage) -> bool {
        self.write(session, 0, CLIENT, &encode(message).unwrap(), true)
    }

    /// A session has news.
    pub(crate) fn client_looks(&mut self, id: usize, session: usize) {
        if !self.migrates[id].is_alive() {
            return;
        }
        while let Some(bytes) = self.read(session, 0, CLIENT) {
            self.sessions[session].streams[0].lines[CLIENT].push(&bytes);
        }
        loop {
            let message = self.sessions[session].streams[0].lines[CLIENT]
                .next_message::<DestinationMessage>();
            match message {
                Ok(Some(message)) => {
                    let told = format!("hears {message:?}");
                    if !self.migrates[id].is_alive() || self.is_killed(Process::Migrate(id), &told)
                    {
                        return;
                    }
                    self.note(format_args!("migrate {id} {told}"));
                    self.hears(id, session, message);
                }
                Ok(None) => break,
                Err(error) => return self.fail(format!("a destination's message: {error}")),
            }
        }
        if !self.migrates[id].is_alive() {
            return;
        }
        match self.migrates[id].phase.clone() {
            Phase::Watching => {
                self.pump(id);
                let completed = self.migrates[id]
                    .qemu
                    .is_some_and(|it| self.qemus[it].status() != Some(Status::Active));
                if completed && self.is_moving(id) {
                    self.look_at_qemu(id);
                }
            }
            Phase::Opening => self.open_data(id),
            Phase::Reaching(session) => self.reach(id, session),
            Phase::Deciding(wait @ (Wait::Dialling(_) | Wait::Answer(_))) => self.wait_on(id, wait),
            _ => {}
        }
    }

    fn hears(&mut self, id: usize, session: usize, message: DestinationMessage) {
        match self.migrates[id].phase.clone() {
            Phase::Preparing(_) => match message {
                DestinationMessage::Prepared { .. } => {
                    if let Some(driver) = &mut self.migrates[id].driver {
                        driver.handle(SourceEvent::Message(message));
                    }
                    self.step_once(id);
                    if matches!(self.migrates[id].phase, Phase::Preparing(_)) {
                        self.migrates[id].phase = Phase::Opening;
                        self.open_data(id);
                    }
                }
                DestinationMessage::Refused { reason } => self.fails(id, &reason),
                _ => {}
            },
            Phase::Deciding(Wait::Answer(_)) if self.migrates[id].control == Some(session) => {
                self.answered(id, message)
            }
            Phase::Confirming(_) => self.confirmed(id, &message),
            Phase::Notifying(attempt, of, _) if of == session => {
                self.note_confirmation(id, attempt, &message);
                self.begin_attempt(id);
            }
            Phase::Settling(of, _) if of == session => self.settled(id, Some(&message)),
            Phase::Asking(of, _) if of == session => {
                self.tell(session, &SourceMessage::Settled);
                let guest = match message {
                    DestinationMessage::Ended { .. } => GuestLocation::Lost,
                    DestinationMessage::MovedOn => GuestLocation::MovedOn,
                    _ => GuestLocation::Destination,
                };
                self.reports(id, guest);
            }
            _ => {}
        }
    }

    fn answered(&mut self, id: usize, message: DestinationMessage) {
        let mut event = SourceEvent::Message(message.clone());
        let it = &mut self.migrates[id];
        match &message {
            DestinationMessage::Aborted { .. } => it.is_answered = true,
            DestinationMessage::Receiving => event = SourceEvent::AskAgain,
            DestinationMessage::Unclear { reason } | DestinationMessage::Refused { reason } => {
                let since = *it.unclear_since.get_or_insert(self.now);
                if self.now - since <= DOWNTIME_MAX {
                    it.is_warned = true;
                    it.phase = Phase::Deciding(Wait::Question(self.now + ASK_AGAIN));
                    return;
                }
                let cause = reason.clone();
                event = SourceEvent::GaveUp { cause };
            }
            DestinationMessage::Unknown { .. }
                if self.options.mutant == Some(Mutant::UnknownIsAborted) =>
            {
                let accepted = it.record.as_ref().and_then(|it| match &it.state {
                    SourceState::Committing { incarnation, .. } => *incarnation,
                    _ => None,
                });
                let incarnation = accepted.unwrap_or(Incarnation([0; 16]));
                let cause = String::new();
                event = SourceEvent::Message(DestinationMessage::Aborted { incarnation, cause });
            }
            _ => {}
        }
        self.finish(id, event);
    }

    fn confirmed(&mut self, id: usize, message: &DestinationMessage) {
        if self.note_confirmation(id, self.attempt(id), message)
            || matches!(message, DestinationMessage::Unclear { .. })
        {
            self.conclude(id);
        }
    }

    /// Records that the destination knows that an attempt has failed, if it does.
    fn note_confirmation(
        &mut self,
        id: usize,
        attempt: AttemptId,
        message: &DestinationMessage,
    ) -> bool {
        let knows = matches!(
            message,
            DestinationMessage::Aborted { .. }
                | DestinationMessage::Unknown { .. }
                | DestinationMessage::Ended { .. }
                | DestinationMessage::MovedOn
        );
        let (host, key) = (self.migrates[id].host, (Role::Source, attempt));
        if let (true, Some(mut record)) = (knows, self.entry::<AtSource>(host, key)) {
            record.confirmed = true;
            // A later command tells the destination again.
            let _ = self.write_journal(host, key, &record);
        }
        knows
    }

    // The hand-over.

    /// Carries out the action that an event has led to, which only changes the journal.
    fn step_once(&mut self, id: usize) {
        if self.is_source_killed(id) {
            return;
        }
        let Some(mut driver) = self.migrates[id].driver.take() else {
            return;
        };
        let world = &mut *self;
        driver.step(&mut Side { world, id });
        let is_pending = driver.pending().next().is_some();
        self.migrates[id].driver = Some(driver);
        // The journal could not be written.
        if is_pending {
            self.fails(id, "the journal cannot be written");
        }
    }

    fn is_source_killed(&mut self, id: usize) -> bool {
        let told = self.migrates[id]
            .driver
            .as_ref()
            .map_or(String::new(), |driver| {
                format!("{:?} {:?}", driver.pending().next(), driver.state())
            });
        self.is_killed(Process::Migrate(id), &told)
    }

    fn drive(&mut self, id: usize) {
        loop {
            if !self.migrates[id].is_alive() || self.is_source_killed(id) {
                return;
            }
            let Some(mut driver) = self.migrates[id].driver.take() else {
                return;
            };
            let world = &mut *self;
            let step = driver.step(&mut Side { world, id });
            let state = driver.state().clone();
            self.migrates[id].driver = Some(driver);
            let is_committing = matches!(state, SourceState::Committing { .. });
            self.migrates[id].has_committed |= is_committing;
            match step {
                Step::Done => {}
                Step::Decided(decision) => return self.decided(id, &decision),
                Step::Idle if self.migrates[id].phase != Phase::Deciding(Wait::Nothing) => return,
                Step::Idle if is_committing => {
                    self.migrates[id].phase =
                        Phase::Deciding(Wait::Answer(self.now + ANSWER_WITHIN));
                    return;
                }
                Step::Idle => {
                    let (guest, cause) = (state.guest(), None);
                    return self.decided(id, &Decision { guest, cause });
                }
            }
        }
    }

    fn wait_on(&mut self, id: usize, wait: Wait) {
        let (now, it) = (self.now, &self.migrates[id]);
        let gives_up = it.is_warned && it.is_cancelled;
        let cause = "cancelled".to_owned();
        match wait {
            _ if gives_up && !matches!(wait, Wait::Resuming(_) | Wait::Nothing) => {
                self.finish(id, SourceEvent::GaveUp { cause });
            }
            Wait::Answer(until) => {
                let is_open = it.control.is_some_and(|it| self.is_open(it, 0, CLIENT));
                let ended = it
                    .control
                    .and_then(|it| self.sessions[it].streams[0].ends[CLIENT].as_ref());
                let complete = ended.is_some_and(|end| end.state.has_peer_ended());
                if is_open && !complete && now < until {
                    return;
                }
                let trusts =
                    self.has(Mutant::SilenceIsEvidence) || self.has(Mutant::TrustsRefusals);
                self.finish(
                    id,
                    SourceEvent::Closed {
                        complete: complete || trusts,
                    },
                );
            }
            Wait::Question(until) if now >= until => self.finish(id, SourceEvent::AskAgain),
            Wait::Dial(until) if now >= until => self.dial_again(id),
            Wait::Dialling(session) => {
                if self.is_attached(session, 0) {
                    self.finish(id, SourceEvent::Connected);
                } else if let Some(is_refused) = self.sessions[session].failed {
                    self.migrates[id].is_warned = true;
                    match is_refused {
                        true => self.finish(id, SourceEvent::ConnectionRefused),
                        false => {
                            self.migrates[id].phase = Phase::Deciding(Wait::Dial(now + ASK_AGAIN))
                        }
                    }
                }
            }
            Wait::Resuming(since) => {
                let should_run = it.driver.as_ref().is_none_or(|it| it.resume());
                if let Some(event) = self.resume_source(id, since, should_run) {
                    self.finish(id, event);
                }
            }
            _ => {}
        }
    }

    fn dial_again(&mut self, id: usize) {
        let Some((attempt, to)) = self.migrates[id]
            .record
            .as_ref()
            .map(|it| (it.attempt, it.to))
        else {
            return;
        };
        let session = self.connect_for(id, attempt, to);
        self.migrates[id].control = Some(session);
        self.migrates[id].phase = Phase::Deciding(Wait::Dialling(session));
    }

    /// Gives the guest back to its owner here. `None` while QEMU is still in its switchover.
    fn resume_source(
        &mut self,
        id: usize,
        since: Duration,
        should_run: bool,
    ) -> Option<SourceEvent> {
        let not_yet = |reason: &str| SourceEvent::NotResumed {
            reason: reason.to_owned(),
        };
        let it = &self.migrates[id];
        let is_here = it.is_here;
        let Some(qemu) = it.qemu else {
            let last = LastSeen::Stopped;
            return Some(SourceEvent::GuestDied { last });
        };
        if !self.qemus[qemu].is_alive {
            self.take_events(id, qemu);
            let last = self.migrates[id].last_seen();
            return Some(SourceEvent::GuestDied { last });
        }
        let Ok(state) = self.monitor(qemu) else {
            return Some(not_yet("its monitor does not answer"));
        };
        let has_sent = self.qemus[qemu].status() == Some(Status::Completed);
        Some(match state {
            State::FinishMigrate if self.now < since + SETTLING => return None,
            State::FinishMigrate => not_yet("it is in its switchover"),
            State::Postmigrate if has_sent && is_here => SourceEvent::FoundSent,
            State::Postmigrate if has_sent && should_run => match self.continue_guest(qemu) {
                Ok(()) => SourceEvent::Resumed,
                Err(_) => not_yet("its monitor does not answer"),
            },
            State::Postmigrate if has_sent => {
                if !self.has(Mutant::ComesBackWithoutDisks) {
                    self.takes_over(qemu);
                }
                SourceEvent::Resumed
            }
            state if state != State::Running && self.has(Mutant::TakesPausesForTheSwitchover) => {
                not_yet("it does not run")
            }
            _ => SourceEvent::Resumed,
        })
    }

    fn decided(&mut self, id: usize, decision: &Decision) {
        self.note(format_args!("migrate {id}: {decision:?}"));
        let it = &mut self.migrates[id];
        it.report = Some(decision.guest);
        let stays = matches!(decision.guest, GuestLocation::Source | GuestLocation::Lost);
        let is_confirmed = it.record.as_ref().is_none_or(|it| it.confirmed);
        if stays && it.has_aborted && !is_confirmed && it.control.is_some() {
            if it.is_answered {
                let attempt = self.attempt(id);
                let (incarnation, cause) = (Incarnation([0; 16]), String::new());
                self.note_confirmation(
                    id,
                    attempt,
                    &DestinationMessage::Aborted { incarnation, cause },
                );
                return self.conclude(id);
            }
            it.phase = Phase::Confirming(self.now + ABORTED_WITHIN);
            return;
        }
        self.conclude(id);
    }

    fn conclude(&mut self, id: usize) {
        if let Some(guest) = self.migrates[id].report {
            self.reports(id, guest);
        }
    }
}

/// As `migrate/hand_over.rs` of `vamoose-relay`.
struct Side<'w, 'a> {
    world: &'w mut World<'a>,
    id: usize,
}

impl SourceHost for Side<'_, '_> {
    fn persist(&mut self, source: &Source) -> Result<(), String> {
        let (world, id) = (&mut *self.world, self.id);
        let state = source.state();
        world.note(format_args!("migrate {id}: {state:?}"));
        if matches!(state, SourceState::Committing { .. })
            && world.has(Mutant::NoRecordOfCommitting)
        {
            return Ok(());
        }
        let host = world.migrates[id].host;
        let Some(mut record) = world.migrates[id].record.clone() else {
            return Ok(());
        };
        (record.state, record.resume) = (state.clone(), source.resume());
        world.write_journal(host, (Role::Source, record.attempt), &record)?;
        world.migrates[id].record = Some(record);
        Ok(())
    }

    fn has_come_back(&mut self) -> bool {
        let world = &mut *self.world;
        let Some(qemu) = world.migrates[self.id].qemu else {
            return false;
        };
        let state = world.monitor(qemu);
        state.is_ok_and(|state| !state.is_switchover()) && !world.has(Mutant::CommitsWithoutALook)
    }

    fn send(&mut self, message: &SourceMessage) -> Option<SourceEvent> {
        let (world, id) = (&mut *self.world, self.id);
        world.note(format_args!("migrate {id} says {message:?}"));
        if matches!(message, SourceMessage::Abort { .. }) {
            let it = &mut world.migrates[id];
            it.has_aborted = true;
            let record = it.record.as_ref().filter(|it| !it.confirmed);
            if let (None, Some((attempt, to))) = (it.control, record.map(|it| (it.attempt, it.to)))
            {
                let session = world.connect_for(id, attempt, to);
                world.migrates[id].control = Some(session);
            }
        }
        if let Some(session) = world.migrates[id].control
            && !world.tell(session, message)
        {
            world.migrates[id].control = None;
        }
        None
    }

    fn dial(&mut self, _: &Source) -> Option<SourceEvent> {
        let (world, id) = (&mut *self.world, self.id);
        if world.has(Mutant::SilenceIsEvidence)
            && !std::mem::replace(&mut world.migrates[id].is_warned, true)
        {
            return Some(SourceEvent::ConnectionRefused);
        }
        if let Some(session) = world.migrates[id].control.take() {
            world.drop_stream(session, 0, CLIENT);
        }
        let pause = if world.migrates[id].is_warned {
            ASK_AGAIN
        } else {
            Duration::ZERO
        };
        world.migrates[id].is_warned = true;
        // An earlier cancel was not meant to give up the question.
        world.migrates[id].is_cancelled = false;
        world.migrates[id].phase = Phase::Deciding(Wait::Dial(world.now + pause));
        None
    }

    fn resume(&mut self, source: &Source) -> Option<SourceEvent> {
        let (world, id) = (&mut *self.world, self.id);
        let since = world.now;
        match world.resume_source(id, since, source.resume()) {
            Some(event) => Some(event),
            None => {
                world.migrates[id].phase = Phase::Deciding(Wait::Resuming(since));
                None
            }
        }
    }
}
