//! What may happen next, and what it does.

use std::{collections::VecDeque, mem};

use handover::{
    Destination, DestinationAction, DestinationDriver, DestinationEvent, DestinationHost,
    DestinationMessage, DestinationState, Details, Driver as Driven, FoundGuest, GuestLocation,
    Incarnation, LastSeen, Prepare, Source, SourceAction, SourceDriver, SourceEvent, SourceHost,
    SourceMessage, SourceState, VERSION,
};

use crate::world::{
    Attempt, Connection, DiskCopy, Doing, Driver, Engine, Fault, Job, Mutant, Now, Operation,
    Scene, SourceVmm, Vmm, World, Wrong, incarnation, plain,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// A person runs `migrate` to this host.
    Command {
        to: u8,
        /// And vouches that nobody else has moved the guest, which is so.
        confirm: bool,
    },
    /// A person interrupts it.
    GiveUp,
    /// A process carries out its next action.
    Carry(Side),
    /// It cannot: the journal is not written.
    NotWritten(Side),
    KillDriver,
    /// `complete`: its system closes its connections behind all that it has sent.
    KillServer {
        host: u8,
        complete: bool,
    },
    StartServer {
        host: u8,
        /// With an empty journal.
        forget: bool,
    },
    SourceDies,
    CopyDies(usize),
    /// The driver takes what comes next on its connection.
    Hear,
    /// A server takes what comes next on a connection.
    Serve(usize),
    /// The driver's connection breaks. What it has sent is lost, or still under way.
    Cut {
        lost: bool,
        complete: bool,
    },
    /// What a driver that is gone has sent never arrives.
    Lose(usize),
    Dial,
    /// A proxy refuses.
    Refuse,
    AskAgain {
        early: bool,
    },
    StillReceiving(usize),
    /// The driver sees what has become of its VMM.
    Look,
    /// The driver lets the guest go on at the source.
    Resume(Outcome),
    /// The guest is paused, and its migration waits for the copies of its disks.
    Hold(usize),
    /// These are complete.
    Copied(usize),
    AllSent(usize),
    /// The driver writes down that it asks its VMM to switch to post-copy.
    AskToSwitch,
    /// The VMM does.
    Switch(usize),
    /// What the guest needs to run arrives.
    Arrives(usize),
    /// The rest of the memory arrives.
    Supplies(usize),
    Stop,
    MigrationFails {
        by_itself: bool,
    },
    /// A server sees that all has been loaded.
    SeesLoaded(usize),
    /// A server sees that the source has switched to post-copy.
    SeesSwitched(usize),
    SeesDeath(usize),
    Fails {
        attempt: usize,
        by_itself: bool,
    },
    /// A server continues what it does with a VMM.
    Operate(usize, Outcome),
    SendOn(usize),
    /// Another tool moves the guest from the source to a third host.
    MoveByOthers,
    /// A person who sees that the destination does not run the guest continues it at the source.
    ContinueByHand,
    /// The guest's owner pauses it at the source, or lets it go on.
    Owner,
    /// Something stops a guest that was continued at the destination.
    Halts(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Source,
    Destination(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Works,
    Refused,
    /// No answer; with or without effect.
    Mute {
        effect: bool,
    },
}

impl Step {
    pub(crate) fn fault(self) -> Option<Fault> {
        match self {
            Self::KillDriver | Self::KillServer { .. } => Some(Fault::Kill),
            Self::SourceDies | Self::CopyDies(_) => Some(Fault::Death),
            Self::Cut { .. } | Self::Lose(_) | Self::Refuse => Some(Fault::Cut),
            Self::NotWritten(_) => Some(Fault::Journal),
            Self::Resume(outcome) | Self::Operate(_, outcome) if outcome != Outcome::Works => {
                Some(Fault::Monitor)
            }
            Self::AskAgain { early: true } | Self::StillReceiving(_) => Some(Fault::Repeat),
            Self::MigrationFails { by_itself: true }
            | Self::Fails {
                by_itself: true, ..
            }
            | Self::GiveUp => Some(Fault::Failure),
            Self::SendOn(_) => Some(Fault::SentOn),
            Self::MoveByOthers => Some(Fault::Moved),
            Self::ContinueByHand => Some(Fault::Hand),
            Self::Owner => Some(Fault::Owner),
            Self::Halts(_) => Some(Fault::Halt),
            Self::StartServer { forget: true, .. } => Some(Fault::Forget),
            _ => None,
        }
    }
}

impl World {
    /// Everything that may happen next.
    ///
    /// A process that has actions to carry out does so before anything else happens, or is killed: writing its own
    /// journal and handing bytes to its own system depend on no other process, so that no order is lost by that.
    pub(crate) fn steps(&self, scene: &Scene, steps: &mut Vec<Step>) {
        let now = &self.now;
        if now.wrong.is_some() {
            return;
        }
        if let Some(side) = now.busy() {
            steps.push(Step::Carry(side));
            if now.is_writing(side) && scene.engine == Engine::Qemu {
                steps.push(Step::NotWritten(side));
            }
            now.kills(scene, Some(side), steps);
        } else {
            now.person(scene, self.left.commands, steps);
            now.driver(scene, steps);
            now.source_vmm(scene, steps);
            now.network(scene, steps);
            for attempt in 0..now.attempts.len() {
                now.destination(scene, attempt, steps);
            }
            now.kills(scene, None, steps);
            for (host, server) in (0..).zip(&now.servers) {
                if server.is_none() {
                    let forget = false;
                    steps.push(Step::StartServer { host, forget });
                    if scene.engine == Engine::Qemu {
                        let forget = true;
                        steps.push(Step::StartServer { host, forget });
                    }
                }
            }
        }
        steps.retain(|step| step.fault().is_none_or(|fault| self.left.allow(fault)));
    }

    pub(crate) fn apply(&self, scene: &Scene, step: Step) -> Self {
        let mut next = self.clone();
        if let Some(fault) = step.fault() {
            next.left.pay(fault);
        }
        if let Step::Command { .. } = step {
            next.left.commands = next.left.commands.saturating_sub(1);
        }
        next.now.apply(scene, step);
        next
    }
}

/// What may happen next.
impl Now {
    pub(crate) fn busy(&self) -> Option<Side> {
        if self.driver.as_ref().is_some_and(|d| is_busy(&d.machine)) {
            return Some(Side::Source);
        }
        let busy = |a: &Attempt| a.job.as_ref().is_some_and(|job| is_busy(&job.machine));
        self.attempts.iter().position(busy).map(Side::Destination)
    }

    fn is_writing(&self, side: Side) -> bool {
        match side {
            Side::Source => {
                let driver = self.driver.as_ref();
                driver.is_some_and(|d| {
                    let record = &self.attempts[usize::from(d.attempt)];
                    let is_switching = matches!(d.machine.state(), SourceState::Switching { .. });
                    let is_wish = is_switching && d.machine.resume() != record.resume;
                    d.machine.pending().next() == Some(&SourceAction::Persist) && !is_wish
                })
            }
            Side::Destination(attempt) => {
                let job = self.attempts[attempt].job.as_ref();
                job.and_then(|job| job.machine.pending().next())
                    == Some(&DestinationAction::Persist)
            }
        }
    }

    fn kills(&self, scene: &Scene, only: Option<Side>, steps: &mut Vec<Step>) {
        if self.driver.is_some() && !matches!(only, Some(Side::Destination(_))) {
            steps.push(Step::KillDriver);
        }
        for (host, server) in (0..).zip(&self.servers) {
            let concerned = match only {
                None => true,
                Some(Side::Source) => false,
                Some(Side::Destination(attempt)) => self.attempts[attempt].host == host,
            };
            if server.is_some() && concerned {
                let complete = false;
                steps.push(Step::KillServer { host, complete });
                if scene.engine != Engine::Qemu {
                    let complete = true;
                    steps.push(Step::KillServer { host, complete });
                }
            }
        }
    }

    fn person(&self, scene: &Scene, commands: u8, steps: &mut Vec<Step>) {
        match &self.driver {
            Some(driver) if !matches!(driver.machine.state(), SourceState::Returning { .. }) => {
                steps.push(Step::GiveUp);
            }
            Some(_) => {}
            None if commands > 0 && self.takes_commands(scene) => {
                let hosts = 0..scene.hosts;
                let confirm = false;
                steps.extend(hosts.clone().map(|to| Step::Command { to, confirm }));
                if self.may_be_confirmed() {
                    let confirm = true;
                    steps.extend(hosts.map(|to| Step::Command { to, confirm }));
                }
            }
            None => {}
        }
    }

    /// A command can be run, and would do something.
    pub(crate) fn takes_commands(&self, scene: &Scene) -> bool {
        let is_quiet = matches!(
            self.source,
            SourceVmm::Runs
                | SourceVmm::Held(_)
                | SourceVmm::Supplying(_)
                | SourceVmm::Stopped(_)
                | SourceVmm::Dead { .. }
        );
        let is_alive = !matches!(self.source, SourceVmm::Dead { .. });
        match scene.engine {
            Engine::Live { .. } if self.kept.is_some() => is_alive,
            Engine::Live { .. } => self.source == SourceVmm::Runs && self.may_begin(scene),
            Engine::Qemu => is_quiet && (self.unfinished().is_some() || self.may_begin(scene)),
        }
    }

    /// What the source's VMM has sent was sent for the attempt that is not over.
    pub(crate) fn may_be_confirmed(&self) -> bool {
        let unfinished = self.unfinished().map(index);
        unfinished.is_some_and(|attempt| {
            [SourceVmm::Stopped(attempt), SourceVmm::Supplying(attempt)].contains(&self.source)
        })
    }

    fn drives(&self, attempt: usize, is_so: impl Fn(&SourceState) -> bool) -> bool {
        self.driver.as_ref().is_some_and(|driver| {
            usize::from(driver.attempt) == attempt && is_so(driver.machine.state())
        })
    }

    pub(crate) fn may_ask_to_switch(&self, scene: &Scene) -> bool {
        let SourceVmm::Migrating(attempt) = self.source else {
            return false;
        };
        let is_moving = |state: &SourceState| matches!(state, SourceState::Moving { .. });
        scene.post_copy
            && scene.mutant != Some(Mutant::SwitchesWithoutRecord)
            && self.has_data_path(attempt.into())
            && self.drives(attempt.into(), is_moving)
            && !self.has_news_of_owner(scene)
    }

    pub(crate) fn may_switch(&self, scene: &Scene, attempt: usize) -> bool {
        let record = &self.attempts[attempt].record;
        let is_asked = matches!(record, Some(SourceState::Switching { .. }))
            || scene.mutant == Some(Mutant::SwitchesWithoutRecord);
        scene.post_copy && is_asked && self.has_data_path(attempt) && !self.has_news_of_owner(scene)
    }

    /// What was sent after the switch is under way, and both relays are there.
    pub(crate) fn may_arrive(&self, attempt: usize) -> bool {
        let job = self.attempts[attempt].job.as_ref();
        self.source == SourceVmm::Supplying(index(attempt))
            && self.attempts[attempt].vmm == Vmm::Receiving
            && job.is_some_and(|job| *job.machine.state() == DestinationState::Receiving)
            && self.drives(attempt, |_| true)
    }

    /// Both sides have relays, which may be new ones.
    pub(crate) fn may_supply(&self, attempt: usize) -> bool {
        let there = &self.attempts[attempt];
        self.source == SourceVmm::Supplying(index(attempt))
            && matches!(there.vmm, Vmm::Partial | Vmm::RunsPartial)
            && self.servers[usize::from(there.host)].is_some()
            && self.drives(attempt, |state| {
                matches!(
                    state,
                    SourceState::Supplying
                        | SourceState::Committing { .. }
                        | SourceState::Switching { .. }
                )
            })
    }

    fn may_begin(&self, scene: &Scene) -> bool {
        self.source == SourceVmm::Runs && self.attempts.len() < scene.attempts
    }

    /// The attempt of this QEMU that is not over by the source's journal.
    pub(crate) fn unfinished(&self) -> Option<usize> {
        self.attempts
            .iter()
            .rposition(|attempt| !matches!(attempt.record, None | Some(SourceState::Over { .. })))
    }

    fn driver(&self, scene: &Scene, steps: &mut Vec<Step>) {
        let Some(driver) = &self.driver else { return };
        match driver.doing {
            Doing::Dialing => {
                steps.push(Step::Dial);
                if scene.engine == (Engine::Live { direct: false }) {
                    steps.push(Step::Refuse);
                }
            }
            Doing::Resuming => {
                let mute = [true, false].map(|effect| Outcome::Mute { effect });
                let outcomes = [Outcome::Works, Outcome::Refused].into_iter().chain(mute);
                steps.extend(outcomes.map(Step::Resume));
            }
            Doing::Nothing => {}
        }
        if self.sees_source(scene).is_some() {
            steps.push(Step::Look);
        }
        let connection = self.connections.iter().find(|c| c.open);
        let Some(connection) = connection else { return };
        if !connection.down.is_empty() || connection.gone.is_some() {
            steps.push(Step::Hear);
        }
        let asks = matches!(
            driver.machine.state(),
            SourceState::Committing { .. } | SourceState::Supplying
        );
        if asks && driver.doing == Doing::Nothing && connection.gone.is_none() {
            let job = self.attempts[usize::from(driver.attempt)].job.as_ref();
            let early = !connection.up.is_empty()
                || !connection.down.is_empty()
                || job.is_some_and(|job| job.doing.is_some());
            steps.push(Step::AskAgain { early });
        }
    }

    /// What the driver sees of its own VMM.
    pub(crate) fn sees_source(&self, scene: &Scene) -> Option<SourceEvent> {
        let driver = self.driver.as_ref()?;
        let cause = String::new();
        match (driver.machine.state(), self.source) {
            (
                SourceState::Moving { .. } | SourceState::Switching { .. } | SourceState::Supplying,
                SourceVmm::Dead { last },
            ) => Some(SourceEvent::GuestDied { last }),
            (SourceState::Supplying, SourceVmm::Supplying(_))
                if scene.mutant == Some(Mutant::LeavesTheSwitched) =>
            {
                Some(SourceEvent::Supplied)
            }
            (SourceState::Supplying, SourceVmm::Stopped(_)) => Some(SourceEvent::Supplied),
            (SourceState::Switching { .. }, SourceVmm::Supplying(_) | SourceVmm::Stopped(_)) => {
                Some(SourceEvent::Stopped)
            }
            (SourceState::Switching { .. }, SourceVmm::Runs) => Some(SourceEvent::Failed { cause }),
            // Without a record, the driver does not wait for it.
            (
                SourceState::Moving {
                    incarnation: Some(_),
                },
                SourceVmm::Supplying(_),
            ) => Some(SourceEvent::Stopped),
            (
                SourceState::Committing {
                    guest_died: false, ..
                },
                SourceVmm::Dead { last },
            ) => Some(SourceEvent::GuestDied { last }),
            (
                SourceState::Moving { .. } | SourceState::Switching { .. },
                SourceVmm::Runs | SourceVmm::Migrating(_),
            ) if self.has_news_of_owner(scene) => {
                let running = self.wanted;
                Some(match scene.mutant {
                    Some(Mutant::WaitsForRunning) => SourceEvent::Failed { cause },
                    _ => SourceEvent::Wanted { running },
                })
            }
            (
                SourceState::Moving {
                    incarnation: Some(_),
                },
                SourceVmm::Stopped(_),
            ) => Some(SourceEvent::Stopped),
            (
                SourceState::Moving {
                    incarnation: Some(_),
                },
                SourceVmm::Runs,
            ) => Some(SourceEvent::Failed { cause }),
            _ => None,
        }
    }

    /// The driver does not know yet what the guest's owner wants.
    fn has_news_of_owner(&self, scene: &Scene) -> bool {
        let differs = |driver: &Driver| driver.machine.resume() != self.wanted;
        self.driver.as_ref().is_some_and(differs) && scene.mutant != Some(Mutant::ForgetsThePause)
    }

    fn source_vmm(&self, scene: &Scene, steps: &mut Vec<Step>) {
        if !matches!(self.source, SourceVmm::Dead { .. }) {
            steps.push(Step::SourceDies);
        }
        match self.source {
            SourceVmm::Migrating(attempt) => {
                let attempt = usize::from(attempt);
                if self.may_ask_to_switch(scene) {
                    steps.push(Step::AskToSwitch);
                }
                if self.may_switch(scene, attempt) {
                    steps.push(Step::Switch(attempt));
                }
                if self.has_data_path(attempt) {
                    if !self.has_news_of_owner(scene) {
                        steps.push(self.sends_all(attempt));
                    }
                    steps.push(Step::MigrationFails { by_itself: true });
                } else {
                    steps.push(Step::MigrationFails { by_itself: false });
                }
            }
            SourceVmm::Held(attempt) => {
                let attempt = usize::from(attempt);
                let by_itself = self.has_data_path(attempt);
                if by_itself {
                    steps.push(self.sends_all(attempt));
                }
                if by_itself && scene.mutant == Some(Mutant::GoesOnWhenReady) {
                    steps.push(Step::AllSent(attempt));
                }
                // A QEMU without a driver waits.
                if self.driver.is_some() {
                    steps.push(Step::MigrationFails { by_itself });
                }
            }
            SourceVmm::Supplying(attempt) if self.may_arrive(attempt.into()) => {
                steps.push(Step::Arrives(attempt.into()));
            }
            SourceVmm::Supplying(attempt) if self.may_supply(attempt.into()) => {
                steps.push(Step::Supplies(attempt.into()));
            }
            SourceVmm::Switching(_) => {
                steps.push(Step::Stop);
                let by_itself = self.driver.is_some();
                steps.push(Step::MigrationFails { by_itself });
            }
            // Nobody else can migrate a guest under a driver, and a paused one is nobody's to move.
            SourceVmm::Runs
                if scene.engine == Engine::Qemu
                    && self.driver.is_none()
                    && self.wanted
                    && !self.is_committing() =>
            {
                steps.push(Step::MoveByOthers);
            }
            SourceVmm::Stopped(_) if self.looks_unused() => {
                steps.push(Step::ContinueByHand);
            }
            _ => {}
        }
        if matches!(self.source, SourceVmm::Runs | SourceVmm::Migrating(_)) {
            steps.push(Step::Owner);
        }
    }

    /// The next step of a migration that has not failed.
    pub(crate) fn sends_all(&self, attempt: usize) -> Step {
        let is_held = matches!(self.source, SourceVmm::Held(_));
        match self.attempts[attempt].copy {
            DiskCopy::Shared | DiskCopy::Complete => Step::AllSent(attempt),
            DiskCopy::Behind if is_held => Step::Copied(attempt),
            DiskCopy::Behind => Step::Hold(attempt),
        }
    }

    /// By the journal a `commit` may have been sent. If the guest runs at the source, the journal could not be written.
    fn is_committing(&self) -> bool {
        let record = self
            .unfinished()
            .map(|attempt| &self.attempts[attempt].record);
        matches!(record, Some(Some(SourceState::Committing { .. })))
    }

    /// No destination runs the guest, has been requested to, or will be.
    fn looks_unused(&self) -> bool {
        let is_unused = |a: &Attempt| {
            let job = a.job.as_ref().map(|job| job.machine.state());
            matches!(
                job,
                Some(DestinationState::Loaded { .. } | DestinationState::Aborted { .. })
            ) && !a.ran
        };
        let is_committing = self.unfinished().is_some();
        // Of a driver that commits, the request may be under way.
        let is_moving = self
            .driver
            .as_ref()
            .is_some_and(|driver| matches!(driver.machine.state(), SourceState::Moving { .. }));
        let is_quiet = is_moving || self.connections.is_empty();
        is_committing && is_quiet && self.attempts.iter().all(is_unused)
    }

    pub(crate) fn has_data_path(&self, attempt: usize) -> bool {
        let sends = [SourceVmm::Migrating, SourceVmm::Held]
            .map(|state| state(index(attempt)))
            .contains(&self.source)
            && self.driver.as_ref().is_some_and(|driver| {
                usize::from(driver.attempt) == attempt
                    && matches!(
                        driver.machine.state(),
                        SourceState::Moving { .. } | SourceState::Switching { .. }
                    )
            });
        let attempt = &self.attempts[attempt];
        let receiving = Some(&DestinationState::Receiving);
        sends
            && attempt.vmm == Vmm::Receiving
            && attempt.job.as_ref().map(|job| job.machine.state()) == receiving
    }

    fn network(&self, scene: &Scene, steps: &mut Vec<Step>) {
        for (index, connection) in self.connections.iter().enumerate() {
            if self.can_serve(connection) {
                steps.push(Step::Serve(index));
            }
            if !connection.open {
                steps.push(Step::Lose(index));
            } else if connection.gone.is_none() {
                let complete = false;
                let lost = true;
                steps.push(Step::Cut { lost, complete });
                if !connection.up.is_empty() {
                    let lost = false;
                    steps.push(Step::Cut { lost, complete });
                }
                if scene.engine == (Engine::Live { direct: false }) {
                    let complete = true;
                    steps.push(Step::Cut { lost, complete });
                    if !connection.up.is_empty() {
                        let lost = false;
                        steps.push(Step::Cut { lost, complete });
                    }
                }
            }
        }
    }

    pub(crate) fn can_serve(&self, connection: &Connection) -> bool {
        connection.gone.is_none()
            && !connection.up.is_empty()
            && self.servers[usize::from(connection.host)].is_some()
    }

    fn destination(&self, scene: &Scene, index: usize, steps: &mut Vec<Step>) {
        let attempt = &self.attempts[index];
        if scene.engine == Engine::Qemu
            && (matches!(attempt.vmm, Vmm::Receiving | Vmm::Loaded | Vmm::Partial)
                || attempt.vmm.has_guest())
        {
            steps.push(Step::CopyDies(index));
        }
        if attempt.vmm == Vmm::Runs && self.wanted && scene.engine == Engine::Qemu {
            steps.push(Step::Halts(index));
        }
        if attempt.vmm == Vmm::Runs && !self.elsewhere && scene.engine == Engine::Qemu {
            steps.push(Step::SendOn(index));
        }
        let Some(job) = &attempt.job else { return };
        if let Some(doing) = job.doing {
            steps.push(Step::Operate(index, Outcome::Works));
            let may_fail = scene.engine == Engine::Qemu;
            match doing {
                Operation::Run { .. } if may_fail => {
                    let mute = [true, false].map(|effect| Outcome::Mute { effect });
                    steps.push(Step::Operate(index, Outcome::Refused));
                    steps.extend(mute.map(|outcome| Step::Operate(index, outcome)));
                }
                Operation::Watch | Operation::Look | Operation::Check if may_fail => {
                    let effect = false;
                    steps.push(Step::Operate(index, Outcome::Mute { effect }));
                }
                Operation::End if may_fail => {
                    steps.push(Step::Operate(index, Outcome::Refused));
                }
                _ => {}
            }
        }
        let state = job.machine.state();
        match state {
            DestinationState::Receiving if job.doing.is_none() => {
                match attempt.vmm {
                    Vmm::Loaded => steps.push(Step::SeesLoaded(index)),
                    Vmm::Partial | Vmm::Frozen => steps.push(Step::SeesSwitched(index)),
                    _ => {}
                }
                steps.push(Step::StillReceiving(index));
                let attempt = index;
                let by_itself = self.may_still_come(attempt);
                steps.push(Step::Fails { attempt, by_itself });
            }
            // A server keeps a guest that is complete.
            DestinationState::Loaded { .. } if scene.engine != Engine::Qemu => {
                let (attempt, by_itself) = (index, true);
                steps.push(Step::Fails { attempt, by_itself });
            }
            _ => {}
        }
        if attempt.sees_death() {
            steps.push(Step::SeesDeath(index));
        }
    }

    /// The server has no reason to give up on a guest that is coming in.
    pub(crate) fn may_still_come(&self, attempt: usize) -> bool {
        let prepares = self.driver.as_ref().is_some_and(|driver| {
            usize::from(driver.attempt) == attempt
                && *driver.machine.state() == SourceState::Moving { incarnation: None }
        });
        prepares
            || matches!(self.attempts[attempt].vmm, Vmm::Loaded | Vmm::Partial)
            || self.has_data_path(attempt)
            || self.may_arrive(attempt)
    }
}

impl Attempt {
    pub(crate) fn sees_death(&self) -> bool {
        self.vmm == Vmm::Dead
            && self.job.as_ref().is_some_and(|job| {
                job.doing.is_none()
                    && !matches!(
                        job.machine.state(),
                        DestinationState::Ended { .. } | DestinationState::Aborted { .. }
                    )
            })
    }
}

/// What it does.
impl Now {
    fn apply(&mut self, scene: &Scene, step: Step) {
        match step {
            Step::Command { to, confirm } => self.command(scene, to, confirm),
            Step::GiveUp => {
                self.loses_word(scene);
                let cause = String::new();
                self.happens(SourceEvent::GaveUp { cause });
            }
            Step::Carry(side) => self.carry(scene, side, Journal::Writable),
            Step::NotWritten(side) => self.carry(scene, side, Journal::Full),
            Step::KillDriver => self.kill_driver(scene),
            Step::KillServer { host, complete } => self.kill_server(scene, host, complete),
            Step::StartServer { host, forget } => self.start_server(scene, host, forget),
            Step::SourceDies => self.source_dies(scene),
            Step::CopyDies(attempt) => self.dies(attempt),
            Step::Hear => self.hear(scene),
            Step::Serve(connection) => self.serve(scene, connection),
            Step::Cut { lost, complete } => self.cut(lost, complete, scene),
            Step::Lose(connection) => {
                self.connections.remove(connection);
            }
            Step::Dial => self.dial(),
            Step::Refuse => {
                self.take_driver_doing();
                self.happens(SourceEvent::ConnectionRefused);
            }
            Step::AskAgain { .. } => self.happens(SourceEvent::AskAgain),
            Step::StillReceiving(attempt) => {
                self.happens_there(attempt, DestinationEvent::StillReceiving);
            }
            Step::Look => {
                if let Some(event) = self.sees_source(scene) {
                    let unknown = SourceEvent::GuestDied {
                        last: LastSeen::Unknown,
                    };
                    self.unknowable |= event == unknown && !self.really_lost();
                    self.happens(event);
                }
            }
            Step::Resume(outcome) => self.resume(scene, outcome),
            Step::Hold(attempt) => {
                self.source = SourceVmm::Held(index(attempt));
                self.is_paused();
            }
            Step::Copied(attempt) => {
                self.attempts[attempt].copy = DiskCopy::Complete;
                if scene.mutant == Some(Mutant::GoesOverToTheCopies) {
                    self.went_over = Some(index(attempt));
                }
            }
            Step::AllSent(attempt) => {
                self.source = SourceVmm::Switching(index(attempt));
                // Before the end of the stream.
                self.source_disks = false;
                self.is_paused();
                self.attempts[attempt].vmm = Vmm::Loaded;
                self.attempts[attempt].stale = false;
                if scene.mutant == Some(Mutant::TakesDisksEarly) {
                    self.takes_disks(Some(attempt));
                }
            }
            Step::AskToSwitch => self.happens(SourceEvent::SwitchAsked),
            Step::Switch(attempt) => {
                self.source = SourceVmm::Supplying(index(attempt));
                self.source_disks = false;
                let wanted = self.wanted;
                if let Some(driver) = self.driver.as_mut().filter(|_| wanted) {
                    driver.continued = false;
                }
            }
            Step::Arrives(attempt) => {
                self.attempts[attempt].vmm = Vmm::Partial;
                self.attempts[attempt].stale = false;
            }
            Step::Supplies(attempt) => {
                self.source = SourceVmm::Stopped(index(attempt));
                let vmm = &mut self.attempts[attempt].vmm;
                *vmm = match vmm {
                    Vmm::Partial => Vmm::Loaded,
                    _ => Vmm::Runs,
                };
            }
            Step::Stop => {
                if let SourceVmm::Switching(attempt) = self.source {
                    self.source = SourceVmm::Stopped(attempt);
                }
            }
            Step::MigrationFails { .. } => {
                self.runs_here();
                self.takes_disks(None);
            }
            Step::SeesLoaded(attempt) => self.happens_there(attempt, DestinationEvent::Loaded),
            Step::SeesSwitched(attempt) => {
                self.happens_there(attempt, DestinationEvent::Switched);
            }
            Step::SeesDeath(attempt) => self.ended(attempt),
            Step::Fails { attempt, .. } => {
                let cause = String::new();
                self.happens_there(attempt, DestinationEvent::Failed { cause });
            }
            Step::Operate(attempt, outcome) => self.operate(scene, attempt, outcome),
            Step::SendOn(attempt) => {
                self.attempts[attempt].vmm = Vmm::SentOn;
                self.attempts[attempt].disks = false;
                self.attempts[attempt].stale = true;
                self.elsewhere = true;
            }
            Step::ContinueByHand => {
                self.wanted = true;
                self.runs_here();
                self.takes_disks(None);
            }
            Step::Owner => {
                self.wanted = !self.wanted;
                if self.wanted {
                    self.ages();
                }
            }
            Step::Halts(attempt) => self.attempts[attempt].vmm = Vmm::Halted,
            Step::MoveByOthers => {
                self.source = SourceVmm::Stopped(u8::MAX);
                self.source_disks = false;
                self.elsewhere = true;
                self.source_stale = true;
                for attempt in &mut self.attempts {
                    attempt.stale = true;
                }
            }
        }
    }
}

/// The source's side.
impl Now {
    /// The guest has run until now, and that is what has been sent, or will be.
    fn is_paused(&mut self) {
        let wanted = self.wanted;
        if let Some(driver) = self.driver.as_mut().filter(|_| wanted) {
            driver.continued = false;
        }
    }

    fn command(&mut self, scene: &Scene, to: u8, confirm: bool) {
        self.to = to;
        if let Some(mut machine) = self.kept.take() {
            machine.go_on();
            let attempt = index(self.attempts.len() - 1);
            self.drive(attempt, *machine);
            return;
        }
        let Some(attempt) = self.unfinished() else {
            self.begin(scene, to);
            return;
        };
        let Some(state) = self.attempts[attempt].record.clone() else {
            return;
        };
        let assumes = scene.mutant == Some(Mutant::AssumesThatItRan);
        if matches!(self.source, SourceVmm::Held(_)) {
            // Nobody knows how far the copies are: it is cancelled.
            self.runs_here();
        }
        let resume = self.attempts[attempt].resume || assumes;
        let confirmed = confirm || scene.mutant == Some(Mutant::TakesForItsOwn);
        let blind = scene.mutant == Some(Mutant::CommitsWithoutALook);
        let is_committing = matches!(state, SourceState::Committing { .. });
        let found = match self.source {
            SourceVmm::Dead { .. } => FoundGuest::Ended,
            SourceVmm::Stopped(_) | SourceVmm::Supplying(_) => FoundGuest::Sent { confirmed },
            _ if is_committing && blind => FoundGuest::Sent { confirmed },
            _ => FoundGuest::Here,
        };
        if found == FoundGuest::Ended && !is_committing {
            // A complete copy may be at the destination: it was not observed that the guest had stopped.
            self.unknowable |= !self.really_lost();
            if scene.mutant == Some(Mutant::DoubtsTheDead) {
                self.reported(GuestLocation::InDoubt, attempt, false);
                return;
            }
        }
        let machine = match (scene.mutant, found) {
            (Some(Mutant::AbortsForTheDead), FoundGuest::Ended) => {
                let last = LastSeen::Running;
                let mut machine = Driven::new(Source::restore(state, resume));
                machine.handle(SourceEvent::GuestDied { last });
                if !is_busy(&machine) {
                    machine.go_on();
                }
                machine
            }
            _ => SourceDriver::take_up(state, resume, found),
        };
        self.drive(index(attempt), machine);
        if scene.mutant == Some(Mutant::AnswersByName)
            && let Some(driver) = &mut self.driver
        {
            driver.host = to;
        }
    }

    fn drive(&mut self, attempt: u8, machine: SourceDriver) {
        self.driver = Some(Driver {
            attempt,
            host: self.attempts[usize::from(attempt)].host,
            machine,
            doing: Doing::Nothing,
            continued: false,
        });
    }

    fn begin(&mut self, scene: &Scene, to: u8) {
        // Moved, lost, or not in a state to be migrated: the command ends, without success.
        if !self.may_begin(scene) {
            return;
        }
        let attempt = index(self.attempts.len());
        self.attempts.push(Attempt {
            host: to,
            record: None,
            resume: self.wanted,
            journal: None,
            job: None,
            vmm: Vmm::Waiting,
            disks: false,
            copy: match scene.copies {
                true => DiskCopy::Behind,
                false => DiskCopy::Shared,
            },
            stale: false,
            ran: false,
            seen: false,
            fresh: false,
            put_down: false,
            unrecorded: false,
            accepted_by: None,
        });
        let mut machine = Source::new(self.wanted);
        let trusts = scene.mutant == Some(Mutant::TrustsProxies);
        if trusts || scene.engine == (Engine::Live { direct: true }) {
            machine = machine.direct();
        }
        self.drive(attempt, Driven::new(machine));
        if self.servers[usize::from(to)].is_none() {
            let cause = String::new();
            self.happens(SourceEvent::Failed { cause });
            return;
        }
        let prepare = SourceMessage::Prepare(Prepare::new(Details::new()));
        self.connections.push(Connection {
            attempt,
            host: to,
            up: [prepare].into(),
            down: VecDeque::new(),
            open: true,
            gone: None,
        });
    }

    fn happens(&mut self, event: SourceEvent) {
        if let Some(driver) = &mut self.driver {
            driver.machine.handle(event);
        }
    }

    fn carry(&mut self, scene: &Scene, side: Side, journal: Journal) {
        match side {
            Side::Source => self.carry_source(scene, journal),
            Side::Destination(attempt) => self.carry_destination(scene, attempt, journal),
        }
    }

    fn carry_source(&mut self, scene: &Scene, journal: Journal) {
        let Some(driver) = &mut self.driver else {
            return;
        };
        let attempt = usize::from(driver.attempt);
        // While the machine is driven, another one stands in its place.
        let dummy = Driven::new(Source::new(true));
        let mut machine = mem::replace(&mut driver.machine, dummy);
        let step = machine.step(&mut AtSource {
            now: self,
            scene,
            attempt,
            journal,
        });
        let is_over = machine.state().is_over();
        if let Some(driver) = &mut self.driver {
            driver.machine = machine.clone();
        }
        if let handover::Step::Decided(decision) = step {
            self.reported(decision.guest, attempt, is_over);
            self.driver = None;
            self.hang_up();
            if !is_over && scene.engine != Engine::Qemu {
                self.kept = Some(Box::new(machine));
            }
        }
    }

    fn say(&mut self, message: SourceMessage) -> Option<SourceEvent> {
        let message = plain::up(message);
        if matches!(message, SourceMessage::Abort { .. })
            && matches!(self.source, SourceVmm::Dead { .. })
            && let Some(driver) = &self.driver
        {
            let copy = &self.attempts[usize::from(driver.attempt)];
            if copy.vmm == Vmm::Loaded && !copy.stale {
                self.fail(Wrong::OnlyCopyEnded);
            }
        }
        if let Some(connection) = self.connections.iter_mut().find(|c| c.open) {
            if connection.gone.is_none() {
                connection.up.push_back(message);
            }
            return None;
        }
        let dials = self
            .driver
            .as_ref()
            .is_some_and(|driver| driver.doing == Doing::Dialing);
        let complete = false;
        let is_commit = matches!(message, SourceMessage::Commit { .. });
        (is_commit && !dials).then_some(SourceEvent::Closed { complete })
    }

    fn kill_driver(&mut self, scene: &Scene) {
        self.driver = None;
        self.hang_up();
        if scene.engine == Engine::Qemu {
            if let SourceVmm::Dead { last } = &mut self.source {
                *last = LastSeen::Unknown;
            }
        } else {
            self.source_dies(scene);
        }
    }

    fn source_dies(&mut self, scene: &Scene) {
        let ran = matches!(self.source, SourceVmm::Runs | SourceVmm::Migrating(_)) && self.wanted;
        let last = match &self.driver {
            Some(_) if ran => LastSeen::Running,
            Some(driver) if !driver.continued => LastSeen::Stopped,
            _ => LastSeen::Unknown,
        };
        if let SourceVmm::Supplying(attempt) = self.source {
            let there = &mut self.attempts[usize::from(attempt)];
            if matches!(there.vmm, Vmm::Partial | Vmm::RunsPartial) {
                there.vmm = Vmm::Frozen;
            }
        }
        self.source = SourceVmm::Dead { last };
        self.source_disks = false;
        if scene.engine != Engine::Qemu {
            // Nobody is left who could commit.
            self.driver = None;
            self.kept = None;
            self.hang_up();
            self.unknowable |= !self.really_lost();
        }
    }

    fn hear(&mut self, scene: &Scene) {
        let Some(position) = self.connections.iter().position(|c| c.open) else {
            return;
        };
        let Some(message) = self.connections[position].down.pop_front() else {
            let closed = self.connections.remove(position);
            let complete = closed.gone.unwrap_or_default();
            self.closed(scene, complete);
            return;
        };
        let Some(driver) = &mut self.driver else {
            return;
        };
        let was_committing = matches!(driver.machine.state(), SourceState::Committing { .. });
        let accepted_by = self.attempts[usize::from(driver.attempt)].accepted_by;
        let mut event = message.clone();
        if scene.mutant == Some(Mutant::StrangersAbort)
            && let DestinationMessage::Aborted { incarnation, .. } = &mut event
            && let Some(accepted_by) = accepted_by
        {
            *incarnation = accepted_by;
        }
        self.happens(SourceEvent::Message(event));
        if let DestinationMessage::Aborted { incarnation, .. } = message
            && was_committing
            && accepted_by != Some(incarnation)
            && self.driver.as_ref().is_some_and(|driver| {
                !matches!(driver.machine.state(), SourceState::Committing { .. })
            })
            && scene.mutant.is_none()
        {
            self.fail(Wrong::StrangerBelieved);
        }
    }

    /// A connection is closed, as the driver sees it.
    fn closed(&mut self, scene: &Scene, complete: bool) {
        self.happens(SourceEvent::Closed { complete });
        let Some(driver) = &self.driver else { return };
        let fails = match driver.machine.state() {
            SourceState::Moving { incarnation } => {
                incarnation.is_none() || scene.engine != Engine::Qemu
            }
            _ => false,
        };
        if fails {
            let cause = String::new();
            self.happens(SourceEvent::Failed { cause });
        }
    }

    fn cut(&mut self, lost: bool, complete: bool, scene: &Scene) {
        let Some(connection) = self.connections.iter_mut().find(|c| c.open) else {
            return;
        };
        connection.open = false;
        connection.down.clear();
        if lost {
            connection.up.clear();
        }
        self.tidy();
        self.loses_word(scene);
        self.closed(scene, complete);
    }

    /// The end of a process that is its guest proves nothing to a source that may not have received all that it sent.
    fn loses_word(&mut self, scene: &Scene) {
        let committing = self
            .driver
            .as_ref()
            .is_some_and(|driver| matches!(driver.machine.state(), SourceState::Committing { .. }));
        if scene.engine != Engine::Qemu && committing {
            self.word_lost = true;
            let gone = |a: &Attempt| self.servers[usize::from(a.host)].is_none();
            self.unknowable |= self.attempts.iter().any(gone);
        }
    }

    fn take_driver_doing(&mut self) {
        if let Some(driver) = &mut self.driver {
            driver.doing = Doing::Nothing;
        }
    }

    fn dial(&mut self) {
        self.take_driver_doing();
        let Some(driver) = &self.driver else { return };
        let (attempt, host) = (driver.attempt, driver.host);
        if self.servers[usize::from(host)].is_none() {
            self.happens(SourceEvent::ConnectionRefused);
            return;
        }
        self.connections.push(Connection {
            attempt,
            host,
            up: VecDeque::new(),
            down: VecDeque::new(),
            open: true,
            gone: None,
        });
        self.happens(SourceEvent::Connected);
    }

    fn resume(&mut self, scene: &Scene, outcome: Outcome) {
        self.take_driver_doing();
        if let SourceVmm::Dead { last } = self.source {
            self.unknowable |= !self.really_lost();
            self.happens(SourceEvent::GuestDied { last });
            return;
        }
        if let SourceVmm::Supplying(_) = self.source {
            let last = LastSeen::Stopped;
            self.happens(SourceEvent::GuestDied { last });
            return;
        }
        let waits = scene.mutant == Some(Mutant::WaitsForRunning) && !self.wanted;
        if matches!(outcome, Outcome::Works | Outcome::Mute { effect: true }) {
            self.runs_here();
            if scene.mutant != Some(Mutant::ReturnsWithoutDisks) || self.wanted {
                self.takes_disks(None);
            }
        }
        self.happens(if outcome == Outcome::Works && !waits {
            SourceEvent::Resumed
        } else {
            let reason = String::new();
            SourceEvent::NotResumed { reason }
        });
    }
}

/// The destination's side.
impl Now {
    fn happens_there(&mut self, attempt: usize, event: DestinationEvent) {
        if let Some(job) = &mut self.attempts[attempt].job {
            job.machine.handle(event);
        }
    }

    /// The VMM has ended, and the server has seen it.
    fn ended(&mut self, index: usize) {
        let cause = String::new();
        self.happens_there(index, DestinationEvent::Died { cause });
        let attempt = &self.attempts[index];
        if let Some(job) = &attempt.job
            && matches!(job.machine.state(), DestinationState::Ended { .. })
            && !attempt.ran
            && job.unsure
            && !attempt.put_down
        {
            // It has not, but a process that has died since may have started it.
            self.unknowable = true;
        }
    }

    fn carry_destination(&mut self, scene: &Scene, attempt: usize, journal: Journal) {
        let Some(job) = &mut self.attempts[attempt].job else {
            return;
        };
        // While the machine is driven, another one stands in its place.
        let dummy = Driven::new(Destination::new(Incarnation([0; 16])));
        let mut machine = mem::replace(&mut job.machine, dummy);
        machine.step(&mut AtDestination {
            now: self,
            scene,
            attempt,
            journal,
        });
        if let Some(job) = &mut self.attempts[attempt].job {
            job.machine = machine;
        }
    }

    fn say_there(&mut self, scene: &Scene, index: usize, message: DestinationMessage) {
        let attempt = &mut self.attempts[index];
        let wrong = match &message {
            DestinationMessage::Prepared { incarnation, .. } => {
                attempt.accepted_by = Some(*incarnation);
                None
            }
            DestinationMessage::Running { .. } => {
                let fresh = mem::take(&mut attempt.fresh);
                (!fresh).then_some(Wrong::SaidUnseen)
            }
            DestinationMessage::Aborted { .. } | DestinationMessage::Ended { .. } => {
                (attempt.vmm != Vmm::Dead).then_some(Wrong::SaidTooSoon)
            }
            _ => None,
        };
        if let Some(wrong) = wrong
            && scene.mutant != Some(Mutant::RepeatsRunning)
        {
            self.fail(wrong);
        }
        if let Some(connection) = self.connection(index) {
            connection.down.push_back(plain::down(message));
        }
    }

    fn serve(&mut self, scene: &Scene, position: usize) {
        let connection = &mut self.connections[position];
        let (mut attempt, host) = (usize::from(connection.attempt), connection.host);
        let Some(message) = connection.up.pop_front() else {
            return;
        };
        if scene.mutant == Some(Mutant::AnswersByName)
            && matches!(message, SourceMessage::Commit { .. })
            && self.attempts[attempt].host != host
            && let Some(other) = self
                .attempts
                .iter()
                .rposition(|a| a.host == host && a.job.is_some())
        {
            attempt = other;
            connection.attempt = index(other);
        }
        self.tidy();
        if self.attempts[attempt].job.is_none() {
            self.serve_unknown(scene, attempt, host, &message);
            return;
        }
        if scene.mutant == Some(Mutant::RepeatsRunning)
            && let Some(job) = &self.attempts[attempt].job
            && matches!(message, SourceMessage::Commit { .. })
            && matches!(job.machine.state(), DestinationState::Starting { .. })
            && job.doing.is_none()
        {
            let state = String::new();
            self.say_there(scene, attempt, DestinationMessage::Running { state });
            return;
        }
        self.happens_there(attempt, DestinationEvent::Message(message));
    }

    /// A message of an attempt that the server does not know.
    fn serve_unknown(&mut self, scene: &Scene, attempt: usize, host: u8, said: &SourceMessage) {
        let Some(start) = self.servers[usize::from(host)] else {
            return;
        };
        let incarnation = incarnation(host, start);
        let reason = String::new();
        match said {
            SourceMessage::Prepare(_) => self.accept(scene, attempt),
            SourceMessage::Commit { .. } => match scene.mutant {
                Some(Mutant::ContinuesStrangers)
                    if matches!(self.attempts[attempt].vmm, Vmm::Loaded | Vmm::SentOn) =>
                {
                    self.runs_there(attempt);
                    self.takes_disks(Some(attempt));
                    self.attempts[attempt].seen = true;
                    self.attempts[attempt].fresh = true;
                    let state = String::new();
                    self.say_there(scene, attempt, DestinationMessage::Running { state });
                }
                Some(Mutant::StrangersAbort) => {
                    let cause = String::new();
                    let aborted = DestinationMessage::Aborted { incarnation, cause };
                    if let Some(connection) = self.connection(attempt) {
                        connection.down.push_back(aborted);
                    }
                }
                _ => {
                    let unknown = DestinationMessage::Unknown {
                        incarnation,
                        reason,
                    };
                    self.say_there(scene, attempt, unknown);
                }
            },
            _ => {}
        }
    }

    fn accept(&mut self, scene: &Scene, index: usize) {
        let host = self.attempts[index].host;
        let busy = self
            .attempts
            .iter()
            .any(|a| a.host == host && !matches!(a.vmm, Vmm::Waiting | Vmm::Dead));
        let (false, Some(start)) = (busy, self.servers[usize::from(host)]) else {
            let reason = String::new();
            self.say_there(scene, index, DestinationMessage::Refused { reason });
            return;
        };
        let incarnation = incarnation(host, start);
        let prepared = DestinationMessage::Prepared {
            protocol: VERSION,
            incarnation,
            details: Details::new(),
        };
        let attempt = &mut self.attempts[index];
        attempt.vmm = Vmm::Receiving;
        attempt.job = Some(Job {
            machine: DestinationDriver::accept(incarnation, prepared),
            doing: None,
            unsure: false,
        });
    }

    fn kill_server(&mut self, scene: &Scene, host: u8, complete: bool) {
        self.servers[usize::from(host)] = None;
        let committed = matches!(self.source, SourceVmm::Stopped(_) | SourceVmm::Switching(_));
        let proves = scene.engine == (Engine::Live { direct: true }) && complete;
        let mut unknowable = false;
        for attempt in self.attempts.iter_mut().filter(|a| a.host == host) {
            let job = attempt.job.take();
            if scene.engine == Engine::Qemu || attempt.vmm == Vmm::Waiting {
                continue;
            }
            attempt.vmm = Vmm::Dead;
            attempt.disks = false;
            let starting = job.is_some_and(|job| {
                matches!(job.machine.state(), DestinationState::Starting { .. })
                    && !job.machine.pending().any(|action| {
                        *action == DestinationAction::Send(DestinationMessage::Starting)
                    })
            });
            unknowable |= committed && (!proves || starting || self.word_lost);
        }
        self.unknowable |= unknowable;
        let mut connections = self.connections.iter_mut();
        let theirs = |c: &&mut Connection| c.host == host && c.gone.is_none();
        for connection in connections.by_ref().filter(theirs) {
            connection.up.clear();
            connection.gone = Some(complete);
            if !complete {
                connection.down.clear();
            }
        }
        self.tidy();
    }

    fn start_server(&mut self, scene: &Scene, host: u8, forget: bool) {
        let start = &mut self.starts[usize::from(host)];
        self.servers[usize::from(host)] = Some(*start);
        *start += 1;
        if scene.engine != Engine::Qemu {
            // It answers at the address of one that is gone, and knows nothing.
            let committed = matches!(self.source, SourceVmm::Stopped(_) | SourceVmm::Switching(_));
            self.unknowable |= committed;
            return;
        }
        for attempt in self.attempts.iter_mut().filter(|a| a.host == host) {
            if forget {
                self.unknowable |= attempt.accepted_by.is_some();
                attempt.journal = None;
            }
            let Some((incarnation, state)) = attempt.journal.clone() else {
                continue;
            };
            let told = matches!(
                state,
                DestinationState::Starting { .. } | DestinationState::Running
            );
            let forgets = scene.mutant == Some(Mutant::ForgetsThatItTold);
            let mut machine: DestinationDriver =
                Driven::new(Destination::restore(incarnation, state.clone()));
            if let DestinationState::Starting { resume, post_copy } = state
                && forgets
            {
                let loaded =
                    Destination::restore(incarnation, DestinationState::Loaded { post_copy });
                machine = Driven::new(loaded);
                let commit = SourceMessage::Commit { resume };
                machine.handle(DestinationEvent::Message(commit));
            } else {
                machine.go_on();
            }
            attempt.job = Some(Job {
                machine,
                doing: None,
                unsure: told,
            });
        }
    }

    /// What a server does with a VMM, and sees of it.
    fn operate(&mut self, scene: &Scene, index: usize, outcome: Outcome) {
        let attempt = &mut self.attempts[index];
        let vmm = attempt.vmm;
        let Some(job) = &mut attempt.job else { return };
        let Some(doing) = job.doing.take() else {
            return;
        };
        let text = String::new;
        let event = match (doing, vmm, outcome) {
            (
                Operation::Run { resume },
                Vmm::Loaded | Vmm::Partial | Vmm::Runs | Vmm::RunsPartial | Vmm::Halted,
                Outcome::Works,
            ) => {
                job.doing = Some(Operation::Watch);
                if matches!(vmm, Vmm::Loaded | Vmm::Partial) {
                    self.runs_there(index);
                    if resume || scene.mutant != Some(Mutant::PausedWithoutDisks) {
                        self.takes_disks(Some(index));
                    }
                }
                return;
            }
            (Operation::Run { .. }, Vmm::SentOn, _)
                if scene.mutant == Some(Mutant::RunsWhatWasSentOn) =>
            {
                job.doing = Some(Operation::Watch);
                self.runs_there(index);
                self.takes_disks(Some(index));
                return;
            }
            (
                Operation::Run { .. } | Operation::Watch | Operation::Check,
                Vmm::SentOn,
                Outcome::Works,
            ) => DestinationEvent::MovedOn,
            (Operation::Run { .. }, Vmm::Loaded | Vmm::Partial, Outcome::Mute { effect }) => {
                job.unsure = true;
                if effect {
                    self.runs_there(index);
                    self.takes_disks(Some(index));
                }
                DestinationEvent::Unclear { reason: text() }
            }
            // It ended before this request.
            (Operation::Run { .. }, Vmm::Dead, _) => DestinationEvent::NotStarted { cause: text() },
            (Operation::Run { .. }, Vmm::Loaded | Vmm::Partial, Outcome::Refused) => {
                DestinationEvent::NotStarted { cause: text() }
            }
            (Operation::Watch | Operation::Check, Vmm::Halted, Outcome::Works)
                if scene.mutant == Some(Mutant::DoubtsTheHalted) =>
            {
                DestinationEvent::Unclear { reason: text() }
            }
            (Operation::Look, Vmm::Loaded, Outcome::Works)
                if scene.mutant != Some(Mutant::EndsTheLoaded) =>
            {
                DestinationEvent::Loaded
            }
            (Operation::Look, Vmm::Partial | Vmm::Frozen, Outcome::Works)
                if scene.mutant != Some(Mutant::EndsTheSwitched) =>
            {
                DestinationEvent::Switched
            }
            (
                Operation::Look,
                Vmm::Waiting | Vmm::Receiving | Vmm::Loaded | Vmm::Partial | Vmm::Frozen,
                Outcome::Works,
            ) => DestinationEvent::NotStarted { cause: text() },
            (
                Operation::Watch | Operation::Check,
                Vmm::Runs | Vmm::RunsPartial | Vmm::Halted,
                Outcome::Works,
            ) => {
                attempt.seen = true;
                attempt.fresh = true;
                DestinationEvent::Started { state: text() }
            }
            (Operation::Watch | Operation::Look | Operation::Check, Vmm::Dead, Outcome::Works) => {
                self.ended(index);
                return;
            }
            (Operation::End, _, Outcome::Works) => {
                if vmm.has_guest() || vmm == Vmm::SentOn {
                    self.fail(Wrong::EndedRunning);
                }
                if vmm == Vmm::Partial {
                    self.fail(Wrong::OnlyCopyEnded);
                }
                self.dies(index);
                let attempt = &mut self.attempts[index];
                attempt.put_down = !attempt.unrecorded;
                self.ended(index);
                return;
            }
            (Operation::End, _, _) if scene.mutant == Some(Mutant::AbortsWithoutEnd) => {
                DestinationEvent::Died { cause: text() }
            }
            (Operation::End, _, _) => DestinationEvent::NotEnded { reason: text() },
            (Operation::Look, _, _) => DestinationEvent::Unclear { reason: text() },
            _ => {
                job.unsure = true;
                DestinationEvent::Unclear { reason: text() }
            }
        };
        self.happens_there(index, event);
    }
}

/// Attempts are few.
fn index(attempt: usize) -> u8 {
    u8::try_from(attempt).unwrap_or(u8::MAX)
}

/// Whether a driver has actions to carry out.
fn is_busy<M, A>(driver: &Driven<M, A>) -> bool {
    driver.pending().next().is_some()
}

/// What happens to a write of the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Journal {
    Writable,
    Full,
}

/// A process beside the source's VMM, or within it.
struct AtSource<'a> {
    now: &'a mut Now,
    scene: &'a Scene,
    attempt: usize,
    journal: Journal,
}

impl SourceHost for AtSource<'_> {
    fn persist(&mut self, source: &Source) -> Result<(), String> {
        let (now, mutant) = (&mut *self.now, self.scene.mutant);
        let is_full = self.journal == Journal::Full;
        if is_full && mutant != Some(Mutant::IgnoresFailedWrites) {
            if matches!(now.source, SourceVmm::Dead { .. }) {
                now.unknowable |= !now.really_lost();
            }
            return Err(String::new());
        }
        let state = source.state().clone();
        let skips = mutant == Some(Mutant::NoRecordOfCommitting)
            && matches!(state, SourceState::Committing { .. });
        if !is_full && !skips && self.scene.engine == Engine::Qemu {
            let attempt = &mut now.attempts[self.attempt];
            attempt.record = Some(plain::record(state.clone()));
            attempt.resume = source.resume();
        }
        let begins = matches!(
            state,
            SourceState::Moving {
                incarnation: Some(_)
            }
        );
        if begins && now.source == SourceVmm::Runs {
            now.source = SourceVmm::Migrating(index(self.attempt));
        }
        Ok(())
    }

    fn has_come_back(&mut self) -> bool {
        let blind = [Mutant::AsksWithoutALook, Mutant::CommitsWithoutALook];
        self.now.source == SourceVmm::Runs
            && self
                .scene
                .mutant
                .is_none_or(|mutant| !blind.contains(&mutant))
    }

    fn send(&mut self, message: &SourceMessage) -> Option<SourceEvent> {
        self.now.say(message.clone())
    }

    fn dial(&mut self, _: &Source) -> Option<SourceEvent> {
        self.does(Doing::Dialing);
        self.now.hang_up();
        None
    }

    fn resume(&mut self, _: &Source) -> Option<SourceEvent> {
        self.does(Doing::Resuming);
        None
    }
}

impl AtSource<'_> {
    fn does(&mut self, what: Doing) {
        if let Some(driver) = &mut self.now.driver {
            driver.doing = what;
        }
    }
}

/// A process beside the destination's VMM, or within it.
struct AtDestination<'a> {
    now: &'a mut Now,
    scene: &'a Scene,
    attempt: usize,
    journal: Journal,
}

impl DestinationHost for AtDestination<'_> {
    fn persist(&mut self, destination: &Destination) -> Result<(), String> {
        let (scene, number) = (self.scene, self.attempt);
        let attempt = &mut self.now.attempts[number];
        let state = plain::journal(destination.state().clone());
        // A guest that is to run has run at the source again if that gives the attempt up.
        let was_receiving = matches!(attempt.journal, Some((_, DestinationState::Receiving)));
        let gives_up = matches!(state, DestinationState::Aborting { .. }) && was_receiving;
        if gives_up
            && (attempt.vmm == Vmm::Loaded && !attempt.stale && self.now.wanted)
            && matches!(self.now.source, SourceVmm::Dead { .. })
        {
            self.now.fail(Wrong::OnlyCopyEnded);
        }
        let attempt = &mut self.now.attempts[number];
        if self.journal == Journal::Full {
            if scene.mutant == Some(Mutant::IgnoresFailedWrites) {
                return Ok(());
            }
            if attempt.accepted_by.is_some() {
                attempt.unrecorded |= matches!(state, DestinationState::Aborting { .. });
            } else {
                // It cannot be accepted.
                attempt.job = None;
                attempt.vmm = Vmm::Waiting;
                let reason = String::new();
                let refused = DestinationMessage::Refused { reason };
                self.now.say_there(scene, number, refused);
            }
            return Err(String::new());
        }
        let mutant = match state {
            DestinationState::Starting { .. } => Some(Mutant::NoRecordOfStarting),
            DestinationState::Receiving => Some(Mutant::NoRecordOfReceiving),
            DestinationState::Aborting { .. } => Some(Mutant::NoRecordOfAborting),
            _ => None,
        };
        let skips = mutant.is_some() && scene.mutant == mutant;
        if scene.engine == Engine::Qemu && !skips {
            attempt.journal = Some((destination.incarnation(), state));
        }
        Ok(())
    }

    fn send(&mut self, message: &DestinationMessage) {
        self.now
            .say_there(self.scene, self.attempt, message.clone());
    }

    fn look(&mut self) -> Option<DestinationEvent> {
        let cause = String::new();
        match self.scene.engine {
            Engine::Qemu => {
                self.does(Operation::Look);
                None
            }
            Engine::Live { .. } => Some(DestinationEvent::NotStarted { cause }),
        }
    }

    fn run(&mut self, resume: bool) -> Option<DestinationEvent> {
        self.does(Operation::Run { resume });
        if resume != self.now.wanted {
            self.now.fail(Wrong::RunsUnasked);
        }
        None
    }

    fn check(&mut self, _: bool) -> Option<DestinationEvent> {
        self.does(Operation::Check);
        None
    }

    fn end(&mut self) -> Option<DestinationEvent> {
        self.does(Operation::End);
        None
    }

    fn forget(&mut self) {
        let attempt = &mut self.now.attempts[self.attempt];
        attempt.job = None;
        attempt.journal = None;
    }
}

impl AtDestination<'_> {
    fn does(&mut self, what: Operation) {
        if let Some(job) = &mut self.now.attempts[self.attempt].job {
            job.doing = Some(what);
        }
    }
}
