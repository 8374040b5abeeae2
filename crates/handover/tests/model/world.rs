//! What the model is made of: two hosts or three, their processes, what is in flight between them, and what is true.

use std::collections::VecDeque;

use handover::{
    DestinationDriver, DestinationMessage, DestinationState, GuestLocation, Incarnation, LastSeen,
    SourceDriver, SourceMessage, SourceState,
};

/// What is explored.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scene {
    pub(crate) name: &'static str,
    pub(crate) engine: Engine,
    /// Destination hosts.
    pub(crate) hosts: u8,
    /// Attempts that may be begun.
    pub(crate) attempts: usize,
    /// Whether the guest runs at the beginning; its owner has paused it otherwise.
    pub(crate) resume: bool,
    /// Whether each host has disks of its own, to which the guest's are copied.
    pub(crate) copies: bool,
    /// Whether the driver asks for post-copy.
    pub(crate) post_copy: bool,
    /// What may happen, how often.
    pub(crate) bounds: Bounds,
    pub(crate) mutant: Option<Mutant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Engine {
    /// `migrate` and `serve` beside QEMUs: processes die alone, journals stay, no network is trusted.
    Qemu,
    /// VMMs that migrate themselves: a process is its guest, and has no journal. A network that is not `direct` has
    /// proxies, which close and refuse connections at will.
    Live { direct: bool },
}

/// What a harness does wrong, to see that the model notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// A1: `commit` is answered by whatever attempt the host has, and goes where the command points.
    AnswersByName,
    /// A2: a server without a record continues any QEMU that has completed a migration, this way or that.
    ContinuesStrangers,
    /// A3: the second `commit` is answered *running* because the first was carried out.
    RepeatsRunning,
    /// A5: a server without a record sends *aborted*, and the source accepts any incarnation.
    StrangersAbort,
    /// A6: closed and then refused is taken for proof, through proxies.
    TrustsProxies,
    /// A9: a command that is run again assumes that the guest ran.
    AssumesThatItRan,
    /// `commit` is sent without a record of it.
    NoRecordOfCommitting,
    /// A guest is started without a record of it.
    NoRecordOfStarting,
    /// An attempt is accepted without a record of it.
    NoRecordOfReceiving,
    /// The end of a VMM begins without a record of it.
    NoRecordOfAborting,
    /// What is to follow a record is done although it could not be written.
    IgnoresFailedWrites,
    /// *Aborted* is sent of a VMM that could not be ended.
    AbortsWithoutEnd,
    /// A server that was started again believes that a VMM which does not run has never run.
    ForgetsThatItTold,
    /// A QEMU that has sent its guest on is requested to run.
    RunsWhatWasSentOn,
    /// A command that is run again sends `commit` without a look at the source's own VMM.
    CommitsWithoutALook,
    /// A command that asks again sends `commit` without such a look.
    AsksWithoutALook,
    /// H3: every pause is taken for the switchover, after which the guest runs again or cannot be continued.
    WaitsForRunning,
    /// H4: a VMM that has ended while nobody followed leaves the guest in doubt.
    DoubtsTheDead,
    /// H4, the other way: the destination is told to give up what may be the only copy.
    AbortsForTheDead,
    /// H5: a guest that was continued and has stopped since is unclear.
    DoubtsTheHalted,
    /// H1: a guest that is to stay paused does not get its disks at the destination.
    PausedWithoutDisks,
    /// H1, the other way: a destination takes the disks when it has loaded the guest.
    TakesDisksEarly,
    /// H6: a paused guest that comes back does not get its disks.
    ReturnsWithoutDisks,
    /// H8: what a VMM is found to have sent is taken for the attempt's own doing.
    TakesForItsOwn,
    /// The owner's wish of the beginning is what counts at the end.
    ForgetsThePause,
    /// The migration goes on when the copies of the disks have caught up once.
    GoesOnWhenReady,
    /// The guest at the source goes over to the copies when these are complete.
    GoesOverToTheCopies,
    /// A VMM is asked to switch to post-copy without a record of it.
    SwitchesWithoutRecord,
    /// A server ends a VMM that was being received, although the source has switched to post-copy.
    EndsTheSwitched,
    /// A server ends a VMM whose source is gone without a look whether it has loaded everything.
    EndsTheLoaded,
    /// The attempt is over when the guest runs at the destination, whose memory has not come yet.
    LeavesTheSwitched,
}

/// What is never to happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Wrong {
    /// I1: two VMMs run the guest.
    TwoRun,
    /// I1: a guest runs that has run elsewhere since.
    StaleRuns,
    /// I2: reported at the destination, where it has not been seen as it shall be, or while it runs at the source.
    NotAtDestination,
    /// I2: reported at the source, which does not have it, or gone from there, and it is there.
    NotAtSource,
    /// I2: reported lost or gone, and it runs at a destination.
    NotLost,
    /// I2: the destination sends *running* without a look since it last did.
    SaidUnseen,
    /// I4: *aborted* is believed from another incarnation than the one that accepted.
    StrangerBelieved,
    /// I5: *aborted* or *ended* is sent of a VMM that is there.
    SaidTooSoon,
    /// I5: a VMM is ended in which the guest runs.
    EndedRunning,
    /// I2: reported in doubt, and no commit was written down.
    DoubtWithoutCommit,
    /// I5: a destination gives up the only copy, or is told to.
    OnlyCopyEnded,
    /// I6: a paused guest is requested to run, or a running one to stay paused.
    RunsUnasked,
    /// I8: an attempt is over, and the destination lacks memory that is at the source.
    NotSupplied,
    /// I7: two VMMs have the disks.
    TwoDisks,
    /// I7: who is reported to have the guest does not have its disks.
    NoDisks,
    /// I8: the guest runs with disks that lack a write, or that are gone.
    OldDisks,
}

/// Events that cost: their number is what bounds an exploration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// `migrate` or `serve` is killed.
    Kill,
    /// A VMM dies.
    Death,
    /// A connection is cut, or its last bytes are lost.
    Cut,
    /// A journal cannot be written.
    Journal,
    /// A monitor refuses, or does not answer.
    Monitor,
    /// A question is repeated although the answer is under way.
    Repeat,
    /// A migration fails or is cancelled; a server waits no longer.
    Failure,
    /// The guest is sent on from the destination.
    SentOn,
    /// A server is started with another, empty journal.
    Forget,
    /// Another tool moves the guest from the source to a third host.
    Moved,
    /// A person continues the guest at the source by hand.
    Hand,
    /// The guest's owner pauses it at the source, or lets it go on; or its VMM does.
    Owner,
    /// A guest that was continued at the destination stops by itself.
    Halt,
}

pub(crate) const FAULTS: [(Fault, &str); 13] = [
    (Fault::Kill, "kills"),
    (Fault::Death, "deaths"),
    (Fault::Cut, "cuts"),
    (Fault::Journal, "failed writes"),
    (Fault::Monitor, "mute monitors"),
    (Fault::Repeat, "repeats"),
    (Fault::Failure, "failures"),
    (Fault::SentOn, "sent on"),
    (Fault::Forget, "lost journals"),
    (Fault::Moved, "moved by others"),
    (Fault::Hand, "continued by hand"),
    (Fault::Owner, "pauses by others"),
    (Fault::Halt, "halts"),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Bounds {
    /// Commands that a person runs.
    pub(crate) commands: u8,
    /// Faults of all kinds together.
    pub(crate) faults: u8,
    /// Faults of each kind, by [`Fault`].
    pub(crate) each: [u8; FAULTS.len()],
}

impl Bounds {
    /// Any `faults`, but what others do to the guest and its VMMs.
    pub(crate) const fn any(commands: u8, faults: u8) -> Self {
        let mut each = [faults; FAULTS.len()];
        each[Fault::Moved as usize] = 0;
        each[Fault::Hand as usize] = 0;
        each[Fault::Owner as usize] = 0;
        each[Fault::Halt as usize] = 0;
        Self {
            commands,
            faults,
            each,
        }
    }

    /// These faults, each so many times.
    pub(crate) fn these<const N: usize>(commands: u8, kinds: [(Fault, u8); N]) -> Self {
        let mut bounds = Self::any(commands, 0);
        for (fault, most) in kinds {
            bounds.each[fault as usize] = most;
            bounds.faults += most;
        }
        bounds
    }

    /// The same, with so many of one kind.
    pub(crate) const fn with(mut self, fault: Fault, most: u8) -> Self {
        self.each[fault as usize] = most;
        self
    }

    pub(crate) fn allow(&self, fault: Fault) -> bool {
        self.faults > 0 && self.each[fault as usize] > 0
    }

    pub(crate) fn pay(&mut self, fault: Fault) {
        self.faults = self.faults.saturating_sub(1);
        let each = &mut self.each[fault as usize];
        *each = each.saturating_sub(1);
    }
}

/// A state of the model.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct World {
    pub(crate) now: Now,
    /// What may still happen.
    pub(crate) left: Bounds,
}

#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Now {
    pub(crate) source: SourceVmm,
    /// The guest has run elsewhere since it ran at the source.
    pub(crate) source_stale: bool,
    /// The source's VMM has the guest's disks.
    pub(crate) source_disks: bool,
    /// The attempt to whose copies the guest at the source has gone over.
    pub(crate) went_over: Option<u8>,
    /// The guest's owner wants it to run.
    pub(crate) wanted: bool,
    pub(crate) driver: Option<Driver>,
    /// What a VMM that migrates itself remembers of an attempt that is not over.
    pub(crate) kept: Option<Box<SourceDriver>>,
    /// Where the last command went.
    pub(crate) to: u8,
    pub(crate) attempts: Vec<Attempt>,
    /// By host: the incarnation of the process that is up.
    pub(crate) servers: Vec<Option<u8>>,
    /// By host: the next incarnation.
    pub(crate) starts: Vec<u8>,
    pub(crate) connections: Vec<Connection>,
    /// The guest was sent on, and runs on a third host.
    pub(crate) elsewhere: bool,
    /// Nobody can know where the guest is: a person has to look.
    pub(crate) unknowable: bool,
    pub(crate) declared_lost: bool,
    /// A connection of the commit was cut, so that the source's VMM cannot rely on what it has not received.
    pub(crate) word_lost: bool,
    pub(crate) wrong: Option<Wrong>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum SourceVmm {
    /// Has the guest, as its owner wants it: running, or paused.
    Runs,
    /// Still as its owner wants it.
    Migrating(u8),
    /// Paused until the copies of its disks are complete. It can still be cancelled.
    Held(u8),
    /// All has been sent; may still go back by itself.
    Switching(u8),
    /// Behind post-copy's switch: cannot go back, and has memory that the destination lacks.
    Supplying(u8),
    /// Paused for good.
    Stopped(u8),
    Dead {
        /// What a driver that is there has seen of the guest before.
        last: LastSeen,
    },
}

/// A `migrate`, or the migrating thread of a VMM.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Driver {
    pub(crate) attempt: u8,
    /// Where it dials.
    pub(crate) host: u8,
    pub(crate) machine: SourceDriver,
    pub(crate) doing: Doing,
    /// The guest may have begun to run again since this driver follows it.
    pub(crate) continued: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Doing {
    Nothing,
    Dialing,
    Resuming,
}

/// One attempt: what both sides and the truth know of it.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Attempt {
    pub(crate) host: u8,
    /// The source's journal.
    pub(crate) record: Option<SourceState>,
    /// What that has on whether the guest shall run.
    pub(crate) resume: bool,
    /// The destination's journal, with the incarnation that accepted.
    pub(crate) journal: Option<(Incarnation, DestinationState)>,
    /// The destination's process, while it is up and knows the attempt.
    pub(crate) job: Option<Job>,
    /// The VMM at the destination.
    pub(crate) vmm: Vmm,
    /// It has the guest's disks.
    pub(crate) disks: bool,
    pub(crate) copy: DiskCopy,
    /// The guest has run elsewhere since this copy was made.
    pub(crate) stale: bool,
    /// The guest has run here.
    pub(crate) ran: bool,
    /// It has been seen to.
    pub(crate) seen: bool,
    /// It has been observed to since *running* was last sent.
    pub(crate) fresh: bool,
    /// It was ended by its server, which knew that it had never run.
    pub(crate) put_down: bool,
    /// That this was about to happen could not be written down.
    pub(crate) unrecorded: bool,
    pub(crate) accepted_by: Option<Incarnation>,
}

/// The content of a destination's disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum DiskCopy {
    /// Both hosts have the same disks.
    Shared,
    /// It lacks some that the guest has written, or may lack it.
    Behind,
    Complete,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Vmm {
    Waiting,
    Receiving,
    Loaded,
    /// All that the guest needs to run under post-copy.
    Partial,
    /// Has the guest, whose memory is at the source in part.
    RunsPartial,
    /// The rest of the memory is lost.
    Frozen,
    /// Has the guest, as it was at the source: running, or paused.
    Runs,
    /// Has the guest, which was continued and has been stopped by something.
    Halted,
    SentOn,
    Dead,
}

impl Vmm {
    pub(crate) fn has_guest(self) -> bool {
        matches!(self, Self::Runs | Self::RunsPartial | Self::Halted)
    }
}

#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Job {
    pub(crate) machine: DestinationDriver,
    pub(crate) doing: Option<Operation>,
    /// A process may have requested the VMM to run and died before it ran.
    pub(crate) unsure: bool,
}

/// What a server does with a VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Operation {
    Run {
        resume: bool,
    },
    /// The second half of it: `cont` was accepted, now look.
    Watch,
    /// Whether everything has been loaded.
    Look,
    Check,
    End,
}

#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Connection {
    pub(crate) attempt: u8,
    pub(crate) host: u8,
    pub(crate) up: VecDeque<SourceMessage>,
    pub(crate) down: VecDeque<DestinationMessage>,
    /// The driver has it open; without it only `up` is still under way.
    pub(crate) open: bool,
    /// The server has ended, and its system has closed this; whether behind all that it had sent.
    pub(crate) gone: Option<bool>,
}

impl World {
    pub(crate) fn new(scene: &Scene) -> Self {
        let hosts = usize::from(scene.hosts);
        Self {
            now: Now {
                source: SourceVmm::Runs,
                source_stale: false,
                source_disks: true,
                went_over: None,
                wanted: scene.resume,
                driver: None,
                kept: None,
                to: 0,
                attempts: Vec::new(),
                servers: vec![Some(0); hosts],
                starts: vec![1; hosts],
                connections: Vec::new(),
                elsewhere: false,
                unknowable: false,
                declared_lost: false,
                word_lost: false,
                wrong: None,
            },
            left: scene.bounds,
        }
    }
}

/// The name of the process that was started on `host` as number `start`.
pub(crate) fn incarnation(host: u8, start: u8) -> Incarnation {
    let mut bytes = [0; 16];
    bytes[14] = host + 1;
    bytes[15] = start;
    Incarnation(bytes)
}

impl Now {
    /// How many VMMs have the guest as it shall be.
    pub(crate) fn running(&self) -> usize {
        let here = matches!(self.source, SourceVmm::Runs | SourceVmm::Migrating(_));
        let there = self.attempts.iter().filter(|a| a.vmm.has_guest()).count();
        usize::from(here) + there + usize::from(self.elsewhere)
    }

    /// No VMM that lives has a complete copy of the guest.
    pub(crate) fn really_lost(&self) -> bool {
        let gone = matches!(
            self.source,
            SourceVmm::Dead { .. } | SourceVmm::Supplying(_)
        );
        let here = !gone && !self.source_stale;
        let there = self.attempts.iter().any(|a| {
            (matches!(a.vmm, Vmm::Loaded | Vmm::Partial) || a.vmm.has_guest()) && !a.stale
        });
        !here && !there && !self.elsewhere
    }

    pub(crate) fn fail(&mut self, wrong: Wrong) {
        self.wrong.get_or_insert(wrong);
    }

    /// The guest begins to run in the VMM of an attempt.
    pub(crate) fn runs_there(&mut self, attempt: usize) {
        let was_stale = self.attempts[attempt].stale;
        self.attempts[attempt].vmm = match self.attempts[attempt].vmm {
            Vmm::Partial => Vmm::RunsPartial,
            _ => Vmm::Runs,
        };
        self.attempts[attempt].ran = true;
        self.source_stale = true;
        for (index, other) in self.attempts.iter_mut().enumerate() {
            other.stale |= index != attempt && other.vmm != Vmm::Waiting;
        }
        if self.attempts[attempt].copy == DiskCopy::Behind {
            self.fail(Wrong::OldDisks);
        }
        self.begins(was_stale);
    }

    /// The guest is the source's again, and runs if its owner wants that.
    pub(crate) fn runs_here(&mut self) {
        self.source = SourceVmm::Runs;
        self.ages();
        self.begins(self.source_stale);
        self.looks_for_disks();
    }

    /// The guest may run at the source: no copy counts any more.
    pub(crate) fn ages(&mut self) {
        for copy in &mut self.attempts {
            copy.stale |= copy.vmm != Vmm::Waiting;
            if copy.copy == DiskCopy::Complete {
                copy.copy = DiskCopy::Behind;
            }
        }
        if let Some(driver) = &mut self.driver {
            driver.continued = true;
        }
    }

    /// The source's VMM takes the guest's disks, or that of an attempt.
    pub(crate) fn takes_disks(&mut self, attempt: Option<usize>) {
        match attempt {
            None => self.source_disks = true,
            Some(attempt) => self.attempts[attempt].disks = true,
        }
        let there = self.attempts.iter().filter(|a| a.disks).count();
        if usize::from(self.source_disks) + there + usize::from(self.elsewhere) > 1 {
            self.fail(Wrong::TwoDisks);
        }
    }

    /// The VMM of an attempt ends.
    pub(crate) fn dies(&mut self, attempt: usize) {
        self.attempts[attempt].vmm = Vmm::Dead;
        self.attempts[attempt].disks = false;
        self.looks_for_disks();
    }

    /// Disks that the guest at the source has gone over to end with the VMM that has them.
    fn looks_for_disks(&mut self) {
        let of_dead = |attempt: u8| self.attempts[usize::from(attempt)].vmm == Vmm::Dead;
        if self.source == SourceVmm::Runs && self.went_over.is_some_and(of_dead) {
            self.fail(Wrong::OldDisks);
        }
    }

    fn begins(&mut self, stale: bool) {
        if self.running() > 1 {
            self.fail(Wrong::TwoRun);
        }
        if stale {
            self.fail(Wrong::StaleRuns);
        }
        if self.declared_lost {
            self.fail(Wrong::NotLost);
        }
    }

    /// What a run of the source reports at its end; `over`: and it has nothing left to do.
    pub(crate) fn reported(&mut self, guest: GuestLocation, attempt: usize, over: bool) {
        let attempt = &self.attempts[attempt];
        match guest {
            GuestLocation::Destination => {
                let here = matches!(self.source, SourceVmm::Runs | SourceVmm::Migrating(_));
                let no_disks = attempt.vmm.has_guest() && !attempt.disks;
                if !attempt.seen || here {
                    self.fail(Wrong::NotAtDestination);
                }
                if no_disks {
                    self.fail(Wrong::NoDisks);
                }
                if over && matches!(self.source, SourceVmm::Supplying(_)) {
                    self.fail(Wrong::NotSupplied);
                }
            }
            GuestLocation::Source => {
                // It may have died since. One that could not be continued stays to be.
                let is_there = match self.source {
                    SourceVmm::Runs | SourceVmm::Dead { .. } => true,
                    _ => !over,
                };
                if !is_there || self.source_stale {
                    self.fail(Wrong::NotAtSource);
                }
                if over && self.source == SourceVmm::Runs && !self.source_disks {
                    self.fail(Wrong::NoDisks);
                }
            }
            GuestLocation::Lost => {
                self.declared_lost = true;
                if self.running() > 0 {
                    self.fail(Wrong::NotLost);
                }
            }
            GuestLocation::MovedOn => {
                if !attempt.ran || attempt.vmm.has_guest() {
                    self.fail(Wrong::NotAtDestination);
                }
            }
            GuestLocation::InDoubt => {
                // A VMM that migrates itself has no journal.
                let record = attempt.record.as_ref();
                if record.is_some_and(|record| record.guest() != GuestLocation::InDoubt) {
                    self.fail(Wrong::DoubtWithoutCommit);
                }
            }
            // Not lost for sure, but no destination of these attempts has it, or will have it.
            GuestLocation::Gone => {
                self.declared_lost = true;
                // Or another tool has moved it.
                if !matches!(
                    self.source,
                    SourceVmm::Dead { .. } | SourceVmm::Stopped(u8::MAX)
                ) {
                    self.fail(Wrong::NotAtSource);
                }
                if self.attempts.iter().any(|a| a.vmm.has_guest()) {
                    self.fail(Wrong::NotLost);
                }
            }
            GuestLocation::Unconfirmed => {}
        }
    }

    pub(crate) fn connection(&mut self, attempt: usize) -> Option<&mut Connection> {
        let mut all = self.connections.iter_mut();
        all.find(|c| c.open && usize::from(c.attempt) == attempt)
    }

    /// The driver's end is closed: what it has sent is still under way.
    pub(crate) fn hang_up(&mut self) {
        for connection in &mut self.connections {
            connection.open = false;
            connection.down.clear();
        }
        self.tidy();
    }

    pub(crate) fn tidy(&mut self) {
        self.connections
            .retain(|c| c.open || (c.gone.is_none() && !c.up.is_empty()));
    }
}

impl Now {
    /// What a reader of a trace wants to see: each thing with its state.
    pub(crate) fn tell(&self) -> Vec<String> {
        let stale = |stale: bool| if stale { ", stale" } else { "" };
        let disks = |disks: bool| if disks { ", with the disks" } else { "" };
        let mut told = vec![format!(
            "source: {:?}{}{}{}",
            self.source,
            stale(self.source_stale),
            disks(self.source_disks),
            if self.wanted { "" } else { ", to be paused" },
        )];
        if let Some(driver) = &self.driver {
            let (attempt, state) = (driver.attempt, driver.machine.state());
            told.push(format!("migrate #{attempt}: {state:?}, {:?}", driver.doing));
        }
        for (host, server) in self.servers.iter().enumerate() {
            if server.is_none() {
                told.push(format!("serve on host {host}: not there"));
            }
        }
        for (number, attempt) in self.attempts.iter().enumerate() {
            let (host, vmm) = (attempt.host, attempt.vmm);
            told.push(format!(
                "#{number} on host {host}: {vmm:?}{}{}",
                stale(attempt.stale),
                disks(attempt.disks)
            ));
            if let Some(job) = &attempt.job {
                let state = job.machine.state();
                told.push(format!("serve #{number}: {state:?}, {:?}", job.doing));
            }
            if let Some(record) = &attempt.record {
                told.push(format!("journal of migrate #{number}: {record:?}"));
            }
            if let Some((_, record)) = &attempt.journal {
                told.push(format!("journal of serve #{number}: {record:?}"));
            }
        }
        for c in &self.connections {
            let (attempt, up, down) = (c.attempt, &c.up, &c.down);
            let end = match (c.open, c.gone) {
                (false, _) => ", closed by migrate",
                (true, Some(_)) => ", closed by serve",
                (true, None) => "",
            };
            told.push(format!("connection #{attempt}: {up:?} {down:?}{end}"));
        }
        if self.elsewhere {
            told.push("the guest runs on a third host".to_owned());
        }
        if self.unknowable {
            told.push("nobody can know any more".to_owned());
        }
        if let Some(wrong) = self.wrong {
            told.push(format!("WRONG: {wrong:?}"));
        }
        told
    }
}

/// States differ only by what matters: texts are left out.
pub(crate) mod plain {
    use super::{DestinationMessage, DestinationState, SourceMessage, SourceState};

    pub(crate) fn record(mut state: SourceState) -> SourceState {
        match &mut state {
            SourceState::Returning { cause } => cause.clear(),
            SourceState::Over { cause, .. } => *cause = None,
            SourceState::Moving { .. }
            | SourceState::Switching { .. }
            | SourceState::Supplying
            | SourceState::Committing { .. } => {}
        }
        state
    }

    pub(crate) fn journal(mut state: DestinationState) -> DestinationState {
        match &mut state {
            DestinationState::Ended { cause }
            | DestinationState::Aborting { cause }
            | DestinationState::Aborted { cause } => cause.clear(),
            DestinationState::Receiving
            | DestinationState::Loaded { .. }
            | DestinationState::Starting { .. }
            | DestinationState::Running => {}
        }
        state
    }

    pub(crate) fn up(mut message: SourceMessage) -> SourceMessage {
        if let SourceMessage::Abort { cause } = &mut message {
            cause.clear();
        }
        message
    }

    pub(crate) fn down(mut message: DestinationMessage) -> DestinationMessage {
        match &mut message {
            DestinationMessage::Refused { reason: text }
            | DestinationMessage::Running { state: text }
            | DestinationMessage::Aborted { cause: text, .. }
            | DestinationMessage::Ended { cause: text }
            | DestinationMessage::Unclear { reason: text }
            | DestinationMessage::Unknown { reason: text, .. } => text.clear(),
            _ => {}
        }
        message
    }
}
