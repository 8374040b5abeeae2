//! QEMUs: small state machines that keep QEMU's rules, and the truth about the guests in them. All of this is a model.
//!
//! ```text
//!  source   running ── rounds of pages, a SYNC on each channel behind each ── finish-migrate ── device state ── loaded? ── postmigrate
//!              ▲ its own doing after a failure or a cancel ───────────────────────┘  disks inactive from here
//!  target   inmigrate ── pages; at a mark on the main stream it waits for the SYNCs of all channels ── paused ── cont ── running
//! ```
//!
//! The truth is what the guest had when it last ran. A QEMU that continues another memory than that, that of an old copy, of one
//! that is incomplete, or of one with an older page on top of a newer one, is found at once.

use std::{collections::VecDeque, time::Duration};

use crate::{
    mutants::Mutant,
    world::{Event, World},
};

/// What a page stands for on a link, and what is sent of it.
pub(crate) const CHUNK: u64 = 4 << 20;
pub(crate) const PAGE_BYTES: usize = 5_000;

pub(crate) struct Qemu {
    pub(crate) host: usize,
    pub(crate) guest: usize,
    pub(crate) is_alive: bool,
    pub(crate) state: State,
    pub(crate) has_disks: bool,
    pub(crate) has_loaded: bool,
    pub(crate) has_received: bool,
    pub(crate) memory: Vec<u64>,
    /// Part of the device state: how often the guest has written.
    pub(crate) written: u64,
    pub(crate) outgoing: Option<Outgoing>,
    pub(crate) incoming: Option<Incoming>,
    pub(crate) events: VecDeque<Happened>,
    /// Its monitor does not answer.
    pub(crate) busy_until: Duration,
    pub(crate) stuck_until: Duration,
    pub(crate) breaks: Option<bool>,
    pub(crate) is_numb: bool,
    /// It did not answer when it was to run the guest. Its server ends it without knowing of the other copies.
    pub(crate) is_hung: bool,
    /// Its server has written down that it never runs the guest; and has ended it after that.
    pub(crate) is_given_up: bool,
    pub(crate) is_put_down: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Incoming,
    Paused,
    Running,
    FinishMigrate,
    Postmigrate,
    IoError,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Happened {
    Stop,
    Resume,
    MigrationFailed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Active,
    Completed,
    Failed,
    Cancelled,
}

pub(crate) struct Outgoing {
    pub(crate) status: Status,
    pub(crate) round: u64,
    todo: VecDeque<usize>,
    is_dirty: Vec<bool>,
    has_synced: Vec<bool>,
    main: VecDeque<Packet>,
    /// Chunks that may be left when the guest is paused.
    pub(crate) allowed: u64,
    is_finishing: bool,
    was: State,
    pub(crate) sent: u64,
    sent_in_round: u64,
    /// By auto-converge, in percent.
    throttle: u64,
    pub(crate) throttles: bool,
}

pub(crate) struct Incoming {
    /// The SYNC at which a channel waits.
    waits: Vec<Option<u64>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packet {
    Page(usize, u64),
    Sync(u64),
    Mark(u64),
    Device(u64),
    /// The destination has loaded the guest.
    Loaded,
}

/// Why a monitor's command has no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Monitor {
    Dead,
    NoAnswer,
    Broken,
}

impl State {
    pub(crate) fn is_switchover(self) -> bool {
        matches!(self, Self::FinishMigrate | Self::Postmigrate)
    }
}

impl Qemu {
    pub(crate) fn is_running(&self) -> bool {
        self.is_alive && self.state == State::Running
    }

    pub(crate) fn status(&self) -> Option<Status> {
        self.outgoing.as_ref().map(|outgoing| outgoing.status)
    }

    pub(crate) fn is_migrating(&self) -> bool {
        self.status() == Some(Status::Active)
    }

    pub(crate) fn remaining(&self) -> u64 {
        let outgoing = self.outgoing.as_ref();
        outgoing.map_or(0, |it| (it.todo.len() + it.dirty()) as u64)
    }
}

impl Outgoing {
    fn dirty(&self) -> usize {
        self.is_dirty.iter().filter(|it| **it).count()
    }
}

impl Packet {
    pub(crate) fn encode(self, number: u64) -> Vec<u8> {
        let (kind, one, other) = match self {
            Self::Page(chunk, version) => (1_u8, chunk as u64, version),
            Self::Sync(round) => (2, round, 0),
            Self::Mark(round) => (3, round, 0),
            Self::Device(written) => (4, written, 0),
            Self::Loaded => (5, 0, 0),
        };
        let mut bytes = vec![kind];
        for number in [number, one, other] {
            bytes.extend(number.to_be_bytes());
        }
        if kind == 1 {
            // The page's content, which says of which version it is.
            let content = other.to_be_bytes();
            bytes.extend(content.iter().cycle().take(PAGE_BYTES - bytes.len()));
        }
        bytes
    }

    /// The packet and its number. `None` if it is none, or its content is damaged.
    pub(crate) fn decode(bytes: &[u8]) -> Option<(u64, Self)> {
        let number = |at: usize| {
            let field = bytes.get(at..at + 8)?;
            Some(u64::from_be_bytes(field.try_into().ok()?))
        };
        let (place, one, other) = (number(1)?, number(9)?, number(17)?);
        let packet = match bytes.first()? {
            1 => {
                let content = other.to_be_bytes();
                let is_whole = bytes[25..]
                    .iter()
                    .zip(content.iter().cycle())
                    .all(|(a, b)| a == b);
                is_whole.then_some(Self::Page(usize::try_from(one).ok()?, other))?
            }
            2 => Self::Sync(one),
            3 => Self::Mark(one),
            4 => Self::Device(one),
            5 => Self::Loaded,
            _ => return None,
        };
        Some((place, packet))
    }
}

impl World<'_> {
    /// A QEMU that waits for a guest, or with a guest that is as its owner wants it.
    pub(crate) fn start_qemu(&mut self, host: usize, guest: usize, waits: bool) -> usize {
        let (chunks, channels) = (self.options.chunks, self.options.channels);
        self.qemus.push(Qemu {
            host,
            guest,
            is_alive: true,
            state: if waits {
                State::Incoming
            } else {
                State::Paused
            },
            has_disks: false,
            has_loaded: false,
            has_received: false,
            memory: vec![0; chunks],
            written: 0,
            outgoing: None,
            incoming: waits.then(|| Incoming {
                waits: vec![None; channels],
            }),
            events: VecDeque::new(),
            busy_until: Duration::ZERO,
            stuck_until: Duration::ZERO,
            breaks: None,
            is_numb: false,
            is_hung: false,
            is_given_up: false,
            is_put_down: false,
        });
        self.qemus.len() - 1
    }

    /// The QEMU of a guest whose monitor is at its path on this host: the last that was started.
    pub(crate) fn at_path(&self, host: usize, guest: usize) -> Option<usize> {
        let is_there = |q: &usize| {
            let qemu = &self.qemus[*q];
            qemu.is_alive && (qemu.host, qemu.guest) == (host, guest)
        };
        (0..self.qemus.len()).rev().find(is_there)
    }

    /// Whether a monitor answers.
    pub(crate) fn monitor(&self, qemu: usize) -> Result<State, Monitor> {
        let qemu = &self.qemus[qemu];
        if !qemu.is_alive {
            return Err(Monitor::Dead);
        }
        match self.now < qemu.busy_until {
            true => Err(Monitor::NoAnswer),
            false => Ok(qemu.state),
        }
    }

    /// `cont`.
    pub(crate) fn continue_guest(&mut self, qemu: usize) -> Result<(), Monitor> {
        self.monitor(qemu)?;
        let broken = self.qemus[qemu].breaks.take();
        if broken != Some(false) {
            self.runs(qemu);
        }
        broken.map_or(Ok(()), |_| Err(Monitor::Broken))
    }

    /// A guest begins to run, or goes on.
    pub(crate) fn runs(&mut self, qemu: usize) {
        if self.qemus[qemu].state == State::Running {
            return;
        }
        self.note(format_args!("QEMU {qemu}: the guest runs"));
        self.takes_over(qemu);
        self.qemus[qemu].state = State::Running;
        self.qemus[qemu].events.push_back(Happened::Resume);
        let guest = self.qemus[qemu].guest;
        let running = self
            .of_guest(guest)
            .filter(|q| self.qemus[*q].is_running())
            .count();
        if running > 1 {
            self.fail("two guests run");
        }
        self.after(Duration::ZERO, Event::Writes(guest));
    }

    /// A QEMU takes the guest's disks: it has the guest from here on.
    pub(crate) fn takes_over(&mut self, qemu: usize) {
        let guest = self.qemus[qemu].guest;
        let of_others = self
            .of_guest(guest)
            .any(|q| q != qemu && self.qemus[q].has_disks);
        if of_others {
            self.fail("two QEMUs have the guest's disks");
        }
        if !self.has_guest(qemu) {
            self.fail("an old or damaged copy of the guest is continued");
        }
        self.qemus[qemu].has_disks = true;
        // From here on the guest is not what any other copy has.
        let of = &mut self.guests[guest];
        (of.home, of.is_lost, of.written) = (qemu, false, of.written + 1);
        self.qemus[qemu].written = of.written;
    }

    /// Whether a QEMU has the guest as it last was.
    pub(crate) fn has_guest(&self, qemu: usize) -> bool {
        let it = &self.qemus[qemu];
        let truth = &self.guests[it.guest];
        it.is_alive
            && it.written == truth.written
            && it.memory == truth.memory
            && it.state != State::Incoming
    }

    pub(crate) fn of_guest(&self, guest: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.qemus.len())
            .filter(move |q| self.qemus[*q].guest == guest && self.qemus[*q].is_alive)
    }

    pub(crate) fn kill_qemu(&mut self, qemu: usize, why: &str) {
        if !self.qemus[qemu].is_alive {
            return;
        }
        self.note(format_args!("QEMU {qemu} ends: {why}"));
        let it = &mut self.qemus[qemu];
        (it.is_alive, it.has_disks) = (false, false);
        if let Some(outgoing) = it
            .outgoing
            .as_mut()
            .filter(|it| it.status == Status::Active)
        {
            outgoing.status = Status::Failed;
        }
        let guest = it.guest;
        let has_copy = self.of_guest(guest).any(|q| self.has_guest(q));
        let is_at_home = self.qemus[self.guests[guest].home].is_alive;
        self.guests[guest].is_lost |= !is_at_home && !has_copy;
        self.server_sees_death(qemu);
    }

    pub(crate) fn pause_guest(&mut self, qemu: usize, state: State) {
        let it = &mut self.qemus[qemu];
        if it.is_running() {
            it.state = state;
            it.events.push_back(Happened::Stop);
            self.note(format_args!("QEMU {qemu}: the guest is stopped: {state:?}"));
        }
    }

    /// The guest writes for as long as it has not.
    pub(crate) fn writes(&mut self, guest: usize) {
        let home = self.guests[guest].home;
        let (chunks, rate) = (self.options.chunks, self.options.writes);
        let it = &mut self.qemus[home];
        let of = &mut self.guests[guest];
        let passed = self.now - std::mem::replace(&mut of.wrote_at, self.now);
        if !it.is_running() {
            return;
        }
        let throttle = it.outgoing.as_ref().map_or(0, |it| it.throttle);
        let passed = u64::try_from(passed.as_millis()).unwrap().min(60_000);
        of.owed += passed * rate * (100 - throttle);
        let number = usize::try_from(of.owed / 100_000).unwrap().min(4 * chunks);
        of.owed %= 100_000;
        for _ in 0..number {
            // Half of the memory gets most of the writes.
            let among = if self.random.percent(90) {
                chunks.div_ceil(2)
            } else {
                chunks
            };
            let chunk = self.random.below(among);
            of.written += 1;
            of.memory[chunk] = of.written;
            it.memory[chunk] = of.written;
            it.written = of.written;
            if let Some(outgoing) = &mut it.outgoing {
                outgoing.is_dirty[chunk] = true;
            }
        }
        let again = if it.is_migrating() { 100 } else { 5_000 };
        // One such event waits at a time, or the first that comes finds nothing to do.
        if of.writes_at <= self.now || of.writes_at > self.now + Duration::from_millis(again) {
            let at = self.now + Duration::from_millis(again);
            of.writes_at = at;
            // When nothing fails any more, people need not watch it write.
            if rate > 0 && (again < 5_000 || self.now < self.options.calm) {
                self.at(at, Event::Writes(guest));
            }
        }
    }

    // Sending.

    pub(crate) fn begin_migration(&mut self, qemu: usize, throttles: bool) {
        let (chunks, channels) = (self.options.chunks, self.options.channels);
        let it = &mut self.qemus[qemu];
        // In `bdrv_inactivate_recurse`, before 10.0.
        if !it.has_disks {
            return self.kill_qemu(qemu, "a failed assertion: its disks are inactive");
        }
        it.outgoing = Some(Outgoing {
            status: Status::Active,
            round: 1,
            todo: (0..chunks).collect(),
            is_dirty: vec![false; chunks],
            has_synced: vec![false; channels],
            main: VecDeque::new(),
            allowed: 0,
            is_finishing: false,
            was: it.state,
            sent: 0,
            sent_in_round: 0,
            throttle: 0,
            throttles,
        });
        let guest = it.guest;
        self.after(Duration::ZERO, Event::Writes(guest));
    }

    /// The next packet for a channel.
    pub(crate) fn next_on_channel(&mut self, qemu: usize, channel: usize) -> Option<Packet> {
        let it = &mut self.qemus[qemu];
        let outgoing = it
            .outgoing
            .as_mut()
            .filter(|it| it.status == Status::Active)?;
        if outgoing.has_synced[channel] {
            return None;
        }
        if let Some(chunk) = outgoing.todo.pop_front() {
            outgoing.sent += 1;
            outgoing.sent_in_round += 1;
            return Some(Packet::Page(chunk, it.memory[chunk]));
        }
        outgoing.has_synced[channel] = true;
        let sync = Packet::Sync(outgoing.round);
        if outgoing.has_synced.iter().all(|it| *it) {
            self.end_round(qemu);
        }
        Some(sync)
    }

    pub(crate) fn next_on_main(&mut self, qemu: usize) -> Option<Packet> {
        let outgoing = self.qemus[qemu].outgoing.as_mut();
        outgoing
            .filter(|it| it.status == Status::Active)?
            .main
            .pop_front()
    }

    fn end_round(&mut self, qemu: usize) {
        let it = &mut self.qemus[qemu];
        let Some(outgoing) = &mut it.outgoing else {
            return;
        };
        outgoing.main.push_back(Packet::Mark(outgoing.round));
        if outgoing.is_finishing {
            outgoing.main.push_back(Packet::Device(it.written));
            return;
        }
        let dirty = outgoing.dirty() as u64;
        if outgoing.throttles && dirty > outgoing.sent_in_round / 2 {
            outgoing.throttle = (outgoing.throttle + 20).min(99);
        }
        (outgoing.round, outgoing.sent_in_round) = (outgoing.round + 1, 0);
        outgoing.has_synced.fill(false);
        outgoing.is_finishing = dirty <= outgoing.allowed;
        outgoing.was = it.state;
        let is_finishing = outgoing.is_finishing;
        if is_finishing {
            if it.state == State::Running {
                it.events.push_back(Happened::Stop);
            }
            it.state = State::FinishMigrate;
            it.has_disks = false;
            self.note(format_args!(
                "QEMU {qemu}: switchover with {dirty} chunks left"
            ));
        }
        if let Some(outgoing) = &mut self.qemus[qemu].outgoing {
            let dirty = outgoing.is_dirty.iter_mut().enumerate();
            let dirty =
                dirty.filter_map(|(chunk, is_dirty)| std::mem::take(is_dirty).then_some(chunk));
            outgoing.todo = dirty.collect();
        }
    }

    /// The destination has loaded the guest.
    pub(crate) fn completes(&mut self, qemu: usize) {
        let it = &mut self.qemus[qemu];
        if let Some(outgoing) = it
            .outgoing
            .as_mut()
            .filter(|it| it.status == Status::Active)
        {
            outgoing.status = Status::Completed;
            it.state = State::Postmigrate;
            self.note(format_args!("QEMU {qemu}: completed"));
        }
    }

    /// A migration fails or is cancelled: QEMU takes the disks back, and the guest goes on as before.
    pub(crate) fn migration_ends(&mut self, qemu: usize, status: Status) {
        let it = &mut self.qemus[qemu];
        let Some(outgoing) = it
            .outgoing
            .as_mut()
            .filter(|it| it.status == Status::Active)
        else {
            return;
        };
        outgoing.status = status;
        outgoing.throttle = 0;
        let was = outgoing.was;
        if !it.is_alive {
            return;
        }
        it.events.push_back(Happened::MigrationFailed);
        let is_switchover = it.state == State::FinishMigrate;
        self.note(format_args!("QEMU {qemu}: {status:?}"));
        if is_switchover && was == State::Running {
            self.runs(qemu);
        } else if is_switchover {
            self.qemus[qemu].state = was;
            self.takes_over(qemu);
        }
    }

    // Receiving.

    /// A channel's packet; false if the channel waits for the main stream.
    pub(crate) fn take_on_channel(&mut self, qemu: usize, channel: usize, packet: Packet) -> bool {
        let is_hasty = self.has(Mutant::SyncOvertakes);
        let it = &mut self.qemus[qemu];
        let Some(incoming) = it
            .incoming
            .as_mut()
            .filter(|it| it.waits[channel].is_none() || is_hasty)
        else {
            return !it.is_alive;
        };
        match packet {
            Packet::Page(chunk, version) => (it.memory[chunk], it.has_received) = (version, true),
            Packet::Sync(round) => incoming.waits[channel] = Some(round),
            _ => {}
        }
        true
    }

    /// A packet of the main stream; false if it has to wait for the channels.
    pub(crate) fn take_on_main(&mut self, qemu: usize, packet: Packet) -> bool {
        let is_hasty = self.has(Mutant::SyncOvertakes);
        let takes_disks = self.has(Mutant::TakesDisksEarly);
        let it = &mut self.qemus[qemu];
        let Some(incoming) = it.incoming.as_mut() else {
            return true;
        };
        match packet {
            Packet::Mark(round) => {
                let is_there = |at: &Option<u64>| at.is_some_and(|at| at >= round) || is_hasty;
                if !incoming.waits.iter().all(is_there) {
                    return false;
                }
                incoming.waits.fill(None);
            }
            Packet::Device(written) => {
                it.written = written;
                it.state = State::Paused;
                it.has_loaded = true;
                it.incoming = None;
                self.note(format_args!("QEMU {qemu}: loaded"));
                if takes_disks {
                    self.takes_over(qemu);
                }
            }
            _ => {}
        }
        true
    }
}
