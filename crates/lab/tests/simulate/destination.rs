//! `serve`: one process a host, with the attempts that it knows.
//!
//! Shipped: [`DestinationDriver`] with its machine, the messages and their framing, the states in the journal. Model: what
//! `vamoose-relay`'s `serve/` does with monitors, sockets and threads, line by line ([`Host`] is `serve/job.rs` and `serve/qemu.rs`).

use std::{collections::BTreeMap, time::Duration};

use handover::{
    AttemptId, ConnectionKind, Destination, DestinationDriver, DestinationEvent, DestinationHost,
    DestinationMessage, DestinationState, Details, Incarnation, PREAMBLE_LEN, Preamble,
    SourceMessage, VERSION, encode, from_details,
};
use serde::{Deserialize, Serialize};

use crate::{
    mutants::Mutant,
    qemu::{Monitor, Packet, State, Status},
    session::SERVER,
    world::{Event, Process, Role, World},
};

pub(crate) struct Serve {
    host: usize,
    pub(crate) is_alive: bool,
    incarnation: Incarnation,
    pub(crate) jobs: BTreeMap<AttemptId, Job>,
}

pub(crate) struct Job {
    driver: Option<DestinationDriver>,
    record: AtDestination,
    /// The sessions with a control connection.
    controls: Vec<usize>,
    /// The session that brings the memory.
    transfer: Option<usize>,
    /// What a QEMU cannot take yet, by stream; and how many packets came.
    held: Vec<Option<Packet>>,
    came: Vec<u64>,
}

#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct AtDestination {
    attempt: AttemptId,
    incarnation: Incarnation,
    pub(crate) guest: usize,
    pub(crate) qemu: usize,
    pub(crate) state: DestinationState,
}

/// What `migrate` tells with `prepare`.
#[derive(Serialize, Deserialize)]
pub(crate) struct Request {
    pub(crate) guest: usize,
}

/// Time limit from the last received byte to a loaded guest.
const LOADING: Duration = Duration::from_secs(30);

impl World<'_> {
    pub(crate) fn start_serve(&mut self, host: usize) {
        self.hosts[host].is_up = true;
        if self.hosts[host].serve.is_some() {
            return;
        }
        let id = self.serves.len();
        let incarnation = Incarnation(self.random.bytes());
        self.serves.push(Serve {
            host,
            is_alive: true,
            incarnation,
            jobs: BTreeMap::new(),
        });
        self.hosts[host].serve = Some(id);
        self.note(format_args!("serve {id} on host {host} is there"));
        for record in self.journal::<AtDestination>(host, Role::Destination) {
            if !record.state.is_over() {
                self.restore(id, record);
            }
        }
    }

    pub(crate) fn kill_serve(&mut self, id: usize, back: Duration) {
        if !std::mem::replace(&mut self.serves[id].is_alive, false) {
            return;
        }
        self.counts.restarted += 1;
        let host = self.serves[id].host;
        self.note(format_args!("serve {id} is killed"));
        self.hosts[host].serve = None;
        self.serves[id].jobs.clear();
        for session in 0..self.sessions.len() {
            if self.sessions[session].server == Some(id) {
                self.forget(session, SERVER);
            }
        }
        let back = (self.now + back).min(self.options.calm);
        self.troubles(back);
        self.at(back, Event::Starts(host));
    }

    fn restore(&mut self, id: usize, record: AtDestination) {
        let attempt = record.attempt;
        let state = match (&record.state, self.has(Mutant::ForgetsThatItTold)) {
            (DestinationState::Starting { .. } | DestinationState::Running, true) => {
                DestinationState::Loaded { post_copy: false }
            }
            (state, _) => state.clone(),
        };
        let machine = Destination::restore(record.incarnation, state);
        let mut driver = DestinationDriver::new(machine);
        driver.go_on();
        self.note(format_args!("serve {id} takes up {:?}", driver.state()));
        self.serves[id]
            .jobs
            .insert(attempt, Job::new(driver, record, None));
        self.drive_job(id, attempt);
    }

    /// A QEMU has ended: the relay to it notices.
    pub(crate) fn server_sees_death(&mut self, qemu: usize) {
        let host = self.qemus[qemu].host;
        let Some(id) = self.hosts[host].serve else {
            return;
        };
        let is_its = |job: &&Job| job.record.qemu == qemu && job.transfer.is_some();
        let Some(job) = self.serves[id].jobs.values().find(is_its) else {
            return;
        };
        let attempt = job.record.attempt;
        self.fail_job(id, attempt, "its QEMU has ended");
    }

    /// A stream of a session has news.
    pub(crate) fn server_looks(&mut self, id: usize, session: usize, stream: usize) {
        if !self.serves[id].is_alive {
            return;
        }
        let preamble = match self.sessions[session].streams[stream].preamble {
            Some(preamble) => preamble,
            None => {
                let Some(first) = self.read(session, stream, SERVER) else {
                    return;
                };
                let first: Option<&[u8; PREAMBLE_LEN]> =
                    first.get(..PREAMBLE_LEN).and_then(|it| it.try_into().ok());
                let Some(preamble) = first.and_then(Preamble::parse) else {
                    return self.fail("the first bytes of a stream are not its preamble");
                };
                self.sessions[session].streams[stream].preamble = Some(preamble);
                if preamble.kind == ConnectionKind::Control {
                    self.find_job(id, preamble.attempt);
                    if let Some(job) = self.job(id, preamble.attempt) {
                        job.controls.push(session);
                    }
                }
                preamble
            }
        };
        match preamble.kind {
            ConnectionKind::Control => self.converse(id, session, preamble.attempt),
            _ => self.receive_guest(id, session, stream, preamble.attempt),
        }
    }

    fn job(&mut self, id: usize, attempt: AttemptId) -> Option<&mut Job> {
        self.serves[id].jobs.get_mut(&attempt)
    }

    /// The attempt, from memory or journal.
    fn find_job(&mut self, id: usize, attempt: AttemptId) {
        let host = self.serves[id].host;
        if self.serves[id].jobs.contains_key(&attempt) {
            return;
        }
        if let Some(record) = self.entry(host, (Role::Destination, attempt)) {
            self.restore(id, record);
        }
    }

    fn converse(&mut self, id: usize, session: usize, attempt: AttemptId) {
        while let Some(bytes) = self.read(session, 0, SERVER) {
            self.sessions[session].streams[0].lines[SERVER].push(&bytes);
            loop {
                let message =
                    self.sessions[session].streams[0].lines[SERVER].next_message::<SourceMessage>();
                let message = match message {
                    Ok(Some(message)) => message,
                    Ok(None) => break,
                    Err(error) => return self.fail(format!("a source's message: {error}")),
                };
                let told = format!("hears {message:?}");
                if self.is_killed(Process::Serve(id), &told) {
                    return;
                }
                self.note(format_args!("serve {id} {told}"));
                self.request(id, session, attempt, message);
            }
        }
        let is_over = match &self.sessions[session].streams[0].ends[SERVER] {
            Some(end) => end.state.is_closed() || end.state.has_peer_ended(),
            None => true,
        };
        if is_over && self.serves[id].is_alive {
            self.drop_stream(session, 0, SERVER);
            self.disconnected(id, session, attempt);
        }
    }

    fn request(&mut self, id: usize, session: usize, attempt: AttemptId, message: SourceMessage) {
        if self.has(Mutant::AnswersByName) && !self.serves[id].jobs.contains_key(&attempt) {
            // Whatever attempt there is answers.
            let guest = match self.sessions[session].client {
                Process::Migrate(id) => self.migrates[id].guest,
                Process::Serve(_) => return,
            };
            let host = self.serves[id].host;
            let mut known = self.journal::<AtDestination>(host, Role::Destination);
            known.retain(|record| record.guest == guest);
            let last = known.iter().max_by_key(|record| record.qemu);
            let other = last.map(|record| record.attempt);
            if let (Some(other), SourceMessage::Commit { .. }) = (other, &message) {
                self.find_job(id, other);
                if let Some(job) = self.job(id, other) {
                    job.controls.push(session);
                }
                return self.handle_job(id, other, DestinationEvent::Message(message));
            }
        }
        match (message, self.serves[id].jobs.contains_key(&attempt)) {
            (SourceMessage::Prepare(prepare), false) => {
                let request: Request = from_details(prepare.details).unwrap();
                self.prepare(id, session, attempt, request.guest);
            }
            (SourceMessage::Prepare(_), true) => {
                let reason = "this attempt has been prepared already".to_owned();
                self.answer(session, &DestinationMessage::Refused { reason });
            }
            (message, true) => self.request_job(id, attempt, message),
            (_, false) => {
                let incarnation = self.serves[id].incarnation;
                let reason = "the server does not know this attempt".to_owned();
                self.answer(
                    session,
                    &DestinationMessage::Unknown {
                        incarnation,
                        reason,
                    },
                );
            }
        }
    }

    fn answer(&mut self, session: usize, message: &DestinationMessage) {
        let bytes = encode(message).unwrap();
        self.write(session, 0, SERVER, &bytes, true);
    }

    fn prepare(&mut self, id: usize, session: usize, attempt: AttemptId, guest: usize) {
        let host = self.serves[id].host;
        let refused = |reason: &str| {
            let reason = reason.to_owned();
            DestinationMessage::Refused { reason }
        };
        let of_guest = self.serves[id]
            .jobs
            .values()
            .filter(|job| job.record.guest == guest);
        let others: Vec<_> = of_guest
            .map(|job| (job.record.attempt, job.record.qemu))
            .collect();
        for (other, qemu) in others {
            self.notice_end(id, other);
            let is_over = self.serves[id].jobs.get(&other).is_none_or(Job::is_over);
            if !is_over && self.qemus[qemu].is_alive {
                return self.answer(
                    session,
                    &refused("another migration to this QEMU is under way"),
                );
            }
        }
        let Some(qemu) = self.at_path(host, guest) else {
            return self.answer(session, &refused("no QEMU waits there under this name"));
        };
        match self.monitor(qemu) {
            Ok(State::Incoming) if !self.qemus[qemu].has_received => {}
            Ok(_) => return self.answer(session, &refused("its QEMU does not wait for a guest")),
            Err(_) => return self.answer(session, &refused("its QEMU does not answer")),
        }
        let incarnation = self.serves[id].incarnation;
        let record = AtDestination {
            attempt,
            incarnation,
            guest,
            qemu,
            state: DestinationState::Receiving,
        };
        let is_written = match self.has(Mutant::NoRecordOfReceiving) {
            true => Ok(()),
            false => self.write_journal(host, (Role::Destination, attempt), &record),
        };
        if is_written.is_err() {
            return self.answer(session, &refused("the journal cannot be written"));
        }
        if self.is_killed(Process::Serve(id), "Prepared") {
            return;
        }
        let driver = DestinationDriver::new(Destination::new(incarnation));
        let mut job = Job::new(driver, record, Some(session));
        job.controls.push(session);
        self.serves[id].jobs.insert(attempt, job);
        let prepared = DestinationMessage::Prepared {
            protocol: VERSION,
            incarnation,
            details: Details::new(),
        };
        self.answer(session, &prepared);
    }

    fn request_job(&mut self, id: usize, attempt: AttemptId, message: SourceMessage) {
        let is_commit = matches!(message, SourceMessage::Commit { .. });
        if matches!(message, SourceMessage::Abort { .. }) {
            self.hang_up_job(id, attempt);
        }
        let is_starting = |job: &Job| matches!(job.state(), DestinationState::Starting { .. });
        if is_commit && self.serves[id].jobs.get(&attempt).is_some_and(is_starting) {
            self.notice_end(id, attempt);
        }
        self.handle_job(id, attempt, DestinationEvent::Message(message));
        if is_commit {
            self.after(LOADING, Event::StillReceiving(id, attempt));
        }
    }

    /// As `settle --as running-there`. False if no attempt is open for this QEMU.
    pub(crate) fn settle_there(&mut self, qemu: usize, resume: bool) -> bool {
        let host = self.qemus[qemu].host;
        let records = self.journal::<AtDestination>(host, Role::Destination);
        let mut open = records
            .into_iter()
            .filter(|it| it.qemu == qemu && !it.state.is_over());
        let (Some(record), Some(id)) = (open.next(), self.hosts[host].serve) else {
            return false;
        };
        self.find_job(id, record.attempt);
        self.request_job(id, record.attempt, SourceMessage::Commit { resume });
        true
    }

    /// Whether a QEMU has a part of a guest, and no attempt is there that would end it.
    pub(crate) fn is_half_received(&self, qemu: usize) -> bool {
        let it = &self.qemus[qemu];
        let records = || self.journal::<AtDestination>(it.host, Role::Destination);
        let is_half = it.is_alive && it.has_received && !it.has_loaded;
        is_half
            && !records()
                .iter()
                .any(|record| record.qemu == qemu && !record.state.is_over())
    }

    pub(crate) fn still_receiving(&mut self, id: usize, attempt: AttemptId) {
        if self.serves[id].is_alive {
            self.handle_job(id, attempt, DestinationEvent::StillReceiving);
        }
    }

    fn disconnected(&mut self, id: usize, session: usize, attempt: AttemptId) {
        let Some(job) = self.job(id, attempt) else {
            return;
        };
        job.controls.retain(|it| *it != session);
        if !job.controls.is_empty() {
            return;
        }
        if *job.state() == DestinationState::Receiving {
            self.hang_up_job(id, attempt);
            self.fail_job(id, attempt, "the source is gone");
        } else if job.is_over() {
            // The journal answers for it from here on.
            let host = self.serves[id].host;
            let key = (Role::Destination, attempt);
            let written = self.entry::<AtDestination>(host, key).map(|it| it.state);
            let is_written = self
                .job(id, attempt)
                .is_some_and(|job| Some(job.state()) == written.as_ref());
            if is_written {
                self.serves[id].jobs.remove(&attempt);
            }
        }
    }

    /// What had been loaded when the transfer ended was not told.
    pub(crate) fn looks_at_cut(&mut self, id: usize, attempt: AttemptId) {
        let is_cut = |job: &Job| job.driver.as_ref().is_some_and(|it| it.is_cut());
        if self.serves[id].is_alive && self.serves[id].jobs.get(&attempt).is_some_and(is_cut) {
            self.fail_job(id, attempt, "the transfer has ended");
        }
    }

    fn notice_end(&mut self, id: usize, attempt: AttemptId) {
        let Some(job) = self.serves[id].jobs.get(&attempt) else {
            return;
        };
        if !job.is_over() && !self.qemus[job.record.qemu].is_alive {
            self.handle_job(id, attempt, died());
        }
    }

    fn hang_up_job(&mut self, id: usize, attempt: AttemptId) {
        let Some(session) = self.job(id, attempt).and_then(|job| job.transfer.take()) else {
            return;
        };
        for stream in 1..self.sessions[session].streams.len() {
            self.hang_up(session, stream, SERVER);
        }
    }

    fn fail_job(&mut self, id: usize, attempt: AttemptId, cause: &str) {
        self.hang_up_job(id, attempt);
        let is_receiving = |job: &Job| *job.state() == DestinationState::Receiving;
        if self.serves[id].jobs.get(&attempt).is_some_and(is_receiving) {
            let cause = cause.to_owned();
            self.handle_job(id, attempt, DestinationEvent::Failed { cause });
        }
    }

    fn handle_job(&mut self, id: usize, attempt: AttemptId, event: DestinationEvent) {
        if let Some(driver) = self.job(id, attempt).and_then(|job| job.driver.as_mut()) {
            driver.handle(event);
            self.drive_job(id, attempt);
        }
    }

    /// Carries out what a driver has to do, one action after another.
    fn drive_job(&mut self, id: usize, attempt: AttemptId) {
        loop {
            let next = |job: &Job| {
                let driver = job.driver.as_ref()?;
                let action = driver.pending().next()?;
                Some(format!("{action:?} {:?}", driver.state()))
            };
            let Some(told) = self.serves[id].jobs.get(&attempt).and_then(next) else {
                return;
            };
            if self.is_killed(Process::Serve(id), &told) {
                return;
            }
            let Some(mut driver) = self.job(id, attempt).and_then(|job| job.driver.take()) else {
                return;
            };
            let world = &mut *self;
            driver.step(&mut Host { world, id, attempt });
            if driver.is_cut() && driver.pending().next().is_none() {
                self.after(Duration::from_secs(1), Event::LooksAgain(id, attempt));
            }
            if let Some(job) = self.job(id, attempt) {
                job.driver = Some(driver);
            }
        }
    }

    // The guest.

    fn receive_guest(&mut self, id: usize, session: usize, stream: usize, attempt: AttemptId) {
        let is_its = |job: &Job| job.transfer == Some(session);
        if !self.serves[id].jobs.get(&attempt).is_some_and(is_its) {
            return self.hang_up(session, stream, SERVER);
        }
        while self.pass_on(id, session, attempt) {}
        let is_broken = !self.is_open(session, stream, SERVER);
        if is_broken && self.serves[id].jobs.get(&attempt).is_some_and(is_its) {
            self.fail_job(id, attempt, "a connection was lost");
        }
    }

    /// Passes what has come on to QEMU, as far as that takes it. Returns whether it took anything.
    fn pass_on(&mut self, id: usize, session: usize, attempt: AttemptId) -> bool {
        let mut has_moved = false;
        for stream in 1..self.sessions[session].streams.len() {
            loop {
                let Some(job) = self.serves[id]
                    .jobs
                    .get_mut(&attempt)
                    .filter(|job| job.transfer == Some(session))
                else {
                    return false;
                };
                let qemu = job.record.qemu;
                let packet = match job.held[stream].take() {
                    Some(packet) => packet,
                    // It may not have said yet what it is.
                    None if self.sessions[session].streams[stream].preamble.is_none() => break,
                    None => match self.read(session, stream, SERVER) {
                        Some(bytes) => match self.arrived_packet(id, attempt, stream, &bytes) {
                            Some(packet) => packet,
                            None => return false,
                        },
                        None => break,
                    },
                };
                let is_taken = match stream {
                    1 => self.take_on_main(qemu, packet),
                    _ => self.take_on_channel(qemu, stream - 2, packet),
                };
                if !is_taken {
                    if let Some(job) = self.job(id, attempt) {
                        job.held[stream] = Some(packet);
                    }
                    break;
                }
                has_moved = true;
                if self.qemus[qemu].has_loaded {
                    self.handle_job(id, attempt, DestinationEvent::Loaded);
                    if self.serves[id].is_alive {
                        self.write(session, 1, SERVER, &Packet::Loaded.encode(0), true);
                        if let Some(job) = self.job(id, attempt) {
                            job.transfer = None;
                        }
                    }
                    return false;
                }
            }
        }
        has_moved
    }

    /// All packets come, once each, in their order, as they were sent.
    fn arrived_packet(
        &mut self,
        id: usize,
        attempt: AttemptId,
        stream: usize,
        bytes: &[u8],
    ) -> Option<Packet> {
        let expected = self.job(id, attempt)?.came[stream];
        match Packet::decode(bytes) {
            Some((number, packet)) if number == expected => {
                self.job(id, attempt)?.came[stream] += 1;
                Some(packet)
            }
            Some((number, _)) => {
                self.fail(format!("packet {number} comes where {expected} is next"));
                None
            }
            None => {
                self.fail("a packet is damaged");
                None
            }
        }
    }
}

impl Job {
    fn new(driver: DestinationDriver, record: AtDestination, transfer: Option<usize>) -> Self {
        const STREAMS: usize = 8;
        Self {
            driver: Some(driver),
            record,
            controls: Vec::new(),
            transfer,
            held: vec![None; STREAMS],
            came: vec![0; STREAMS],
        }
    }

    fn state(&self) -> &DestinationState {
        self.driver
            .as_ref()
            .map_or(&self.record.state, |driver| driver.state())
    }

    fn is_over(&self) -> bool {
        self.state().is_over()
    }
}

/// As `serve/job.rs` and `serve/qemu.rs` of `vamoose-relay`.
struct Host<'w, 'a> {
    world: &'w mut World<'a>,
    id: usize,
    attempt: AttemptId,
}

impl Host<'_, '_> {
    fn qemu(&mut self) -> usize {
        let job = self.world.job(self.id, self.attempt);
        job.map_or(usize::MAX, |job| job.record.qemu)
    }

    fn started(state: State) -> DestinationEvent {
        match state {
            State::Postmigrate => DestinationEvent::MovedOn,
            state => DestinationEvent::Started {
                state: format!("{state:?}"),
            },
        }
    }

    fn connection_lost(&mut self, qemu: usize) -> DestinationEvent {
        match self.world.qemus[qemu].is_alive {
            false => died(),
            true => DestinationEvent::Unclear {
                reason: "its monitor does not answer".to_owned(),
            },
        }
    }
}

impl DestinationHost for Host<'_, '_> {
    fn persist(&mut self, destination: &Destination) -> Result<(), String> {
        let world = &mut *self.world;
        let host = world.serves[self.id].host;
        let state = destination.state();
        world.note(format_args!("serve {}: {state:?}", self.id));
        let forgets = match state {
            DestinationState::Starting { .. } => Some(Mutant::NoRecordOfStarting),
            DestinationState::Aborting { .. } => Some(Mutant::NoRecordOfAborting),
            _ => None,
        };
        let gives_up = matches!(state, DestinationState::Aborting { .. });
        let is_forgotten = forgets.is_some_and(|mutant| world.has(mutant));
        let Some(job) = world.job(self.id, self.attempt) else {
            return Ok(());
        };
        let mut record = job.record.clone();
        record.state = state.clone();
        if !is_forgotten {
            job.record = record.clone();
            world.write_journal(host, (Role::Destination, self.attempt), &record)?;
        }
        if gives_up {
            world.qemus[record.qemu].is_given_up = true;
        }
        Ok(())
    }

    fn send(&mut self, message: &DestinationMessage) {
        let qemu = self.qemu();
        if matches!(message, DestinationMessage::Running { .. }) && !self.world.qemus[qemu].is_alive
        {
            self.world
                .fail("a guest is said to run in a QEMU that has ended");
        }
        if matches!(message, DestinationMessage::Aborted { .. }) && self.world.qemus[qemu].is_alive
        {
            self.world
                .fail("an attempt is said to be aborted whose QEMU is there");
        }
        if matches!(message, DestinationMessage::Ended { .. }) && self.world.qemus[qemu].is_put_down
        {
            self.world
                .fail("a guest is said to have ended that has never run");
        }
        let controls = self
            .world
            .job(self.id, self.attempt)
            .map(|job| job.controls.clone());
        for session in controls.unwrap_or_default() {
            self.world.answer(session, message);
        }
    }

    fn look(&mut self) -> Option<DestinationEvent> {
        let qemu = self.qemu();
        let reason = "somebody else has continued it".to_owned();
        Some(match self.world.monitor(qemu) {
            Ok(State::Paused) if !self.world.has(Mutant::EndsTheLoaded) => DestinationEvent::Loaded,
            Ok(State::Paused | State::Incoming) => {
                let cause = "the guest is incomplete".to_owned();
                DestinationEvent::NotStarted { cause }
            }
            Ok(_) => DestinationEvent::Unclear { reason },
            Err(_) => self.connection_lost(qemu),
        })
    }

    fn run(&mut self, resume: bool) -> Option<DestinationEvent> {
        let qemu = self.qemu();
        let state = match self.world.monitor(qemu) {
            Ok(State::Incoming) | Err(_) => {
                self.world.qemus[qemu].is_hung = true;
                let cause = "it failed when everything had been sent".to_owned();
                return Some(DestinationEvent::NotStarted { cause });
            }
            Ok(state) => state,
        };
        let has_run = match self.world.has(Mutant::RunsWhatWasSentOn) {
            true => state == State::Running,
            false => matches!(
                state,
                State::Running | State::FinishMigrate | State::Postmigrate
            ),
        };
        if has_run {
            return Some(Self::started(state));
        }
        if state == State::IoError && self.world.has(Mutant::DoubtsTheHalted) {
            let reason = "it does not run".to_owned();
            return Some(DestinationEvent::Unclear { reason });
        }
        if !resume || state == State::IoError {
            if !self.world.has(Mutant::PausedWithoutDisks) && !self.world.qemus[qemu].has_disks {
                self.world.takes_over(qemu);
            }
            return Some(Self::started(state));
        }
        Some(match self.world.continue_guest(qemu) {
            Ok(()) => {
                let state = self.world.qemus[qemu].state;
                Self::started(state)
            }
            Err(_) => self.connection_lost(qemu),
        })
    }

    fn check(&mut self, was_seen: bool) -> Option<DestinationEvent> {
        let qemu = self.qemu();
        if self.world.has(Mutant::RepeatsRunning) && was_seen {
            return Some(Self::started(State::Running));
        }
        Some(match self.world.monitor(qemu) {
            Ok(State::Incoming | State::Paused) if !was_seen => DestinationEvent::Unclear {
                reason: "the guest has not been seen to run".to_owned(),
            },
            Ok(state) => Self::started(state),
            Err(Monitor::NoAnswer) if was_seen => Self::started(State::Running),
            Err(_) => self.connection_lost(qemu),
        })
    }

    fn end(&mut self) -> Option<DestinationEvent> {
        let qemu = self.qemu();
        let world = &mut *self.world;
        if !world.qemus[qemu].is_alive {
            return Some(died());
        }
        let is_stuck = world.now < world.qemus[qemu].stuck_until && !world.is_calm();
        if is_stuck && world.has(Mutant::AbortsWithoutEnd) {
            return Some(died());
        }
        if is_stuck {
            let reason = "it does not end".to_owned();
            return Some(DestinationEvent::NotEnded { reason });
        }
        let guest = world.qemus[qemu].guest;
        let was_lost = world.guests[guest].is_lost;
        let was_sent = world.qemus[qemu].status() == Some(Status::Completed);
        world.kill_qemu(qemu, "serve has ended it");
        world.qemus[qemu].is_put_down = world.qemus[qemu].is_given_up;
        if world.guests[guest].home == qemu && !was_sent {
            world.fail("a QEMU is ended that has the guest");
        }
        let has_copy = world.of_guest(guest).any(|q| world.has_guest(q));
        let is_known = !was_lost && !world.qemus[qemu].is_hung;
        if is_known && !has_copy && world.qemus[qemu].memory == world.guests[guest].memory {
            world.fail("the last copy of the guest is ended");
        }
        Some(died())
    }

    fn forget(&mut self) {}
}

fn died() -> DestinationEvent {
    DestinationEvent::Died {
        cause: "its QEMU has ended".to_owned(),
    }
}
