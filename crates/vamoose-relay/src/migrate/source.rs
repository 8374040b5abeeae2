//! The source QEMU, through one attempt.

use std::{
    ops::ControlFlow,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use convergence::{AutoConverge, OnTimeout, Policy};
use handover::{GuestLocation, LastSeen, SourceEvent};
use serde_json::{Value, json};
use tracing::{debug, info, warn};
use vamoose_link::{Address, millis};

use super::{
    Cause, Failure,
    post_copy::Pace,
    remainder::{Allowed, Remainder},
};
use crate::{
    Instance, chain,
    control::{Offer, PostCopyAbilities},
    qemu::{EXIT_WITHIN, MigrationStatus, Qemu, QemuError, is_switchover},
    qmp::{QmpError, Timestamp},
};

/// The QEMU that the guest leaves.
pub(crate) struct SourceQemu {
    pub(crate) qemu: Qemu,
    pub(crate) instance: Instance,
    /// Whether the guest is to run, as its owner last left it. Every pause counts except that of the switchover.
    pub(super) is_wanted: bool,
    /// When the guest was stopped for the switchover.
    pub(super) stopped: Option<Stopped>,
    /// QEMU has not answered yet why the guest stopped.
    is_unexplained: bool,
    /// The guest may have run since its migration began to send it.
    may_have_run: bool,
    /// This attempt's migration has not sent the guest: if QEMU has sent the guest, another tool did it.
    pub(super) is_unsent: bool,
    /// Value for `zero-page-detection`, where QEMU knows it.
    pub(super) zero_pages: Option<String>,
    is_suspended: bool,
    /// Version of a QEMU of this migration that does not transfer the state `suspended`.
    loses_suspended: Option<String>,
    /// What both QEMUs have for post-copy, if it is to be prepared.
    pub(super) post_copy: Option<PostCopyAbilities>,
    /// The guest has been paused from here, just before the switch to post-copy.
    pub(super) is_held: bool,
    /// It has been told, or is about to be told, to switch to post-copy.
    pub(super) may_be_switched: bool,
    pub(super) pace: Pace,
    /// The user has been told that it is too late to cancel.
    pub(super) was_cancelled_late: bool,
}

#[derive(Clone, Copy)]
pub(super) struct Stopped {
    /// By QEMU's clock, which differs from the host's if that was set meanwhile.
    pub(super) at: Instant,
    /// When this process noticed it.
    noticed: Instant,
}

/// States of a guest that shall run at the destination. A suspended guest waits to be woken, and some of its clocks run.
const ALIVE: [&str; 2] = ["running", "suspended"];
/// State of a guest that a monitor's `stop` has paused.
const PAUSED: &str = "paused";
/// How long QEMU may take to answer why the guest has stopped. During the switchover it may not answer.
const STOP_REASON_WITHIN: Duration = Duration::from_secs(1);
/// How long a source may take to run again after a failure.
const RESUME_WITHIN: Duration = Duration::from_secs(10);
/// How long to wait for an event before looking at the clock and at a cancel.
pub(super) const EVENT_WAIT: Duration = Duration::from_millis(50);

/// Who has the guest after a failed migration.
enum Continued {
    /// This QEMU, and it runs if it should.
    Here,
    /// The other tool that has sent it.
    SentByAnotherTool,
}

impl SourceQemu {
    /// Connects to the monitor at `path` and changes nothing. Another client may hold the monitor for at most `timeout`.
    pub(crate) fn connect(path: &Path, timeout: Duration) -> Result<Self, QemuError> {
        let mut qemu = Qemu::connect_within(path, timeout)?;
        Ok(Self {
            instance: Instance::of(&mut qemu, path)?,
            is_wanted: false,
            stopped: None,
            is_unexplained: false,
            may_have_run: false,
            is_unsent: false,
            zero_pages: None,
            is_suspended: false,
            loses_suspended: None,
            post_copy: None,
            is_held: false,
            may_be_switched: false,
            pace: Pace::default(),
            was_cancelled_late: false,
            qemu,
        })
    }

    /// Adds to `failure` whether the guest runs: a guest that is still here is as its owner left it.
    pub(super) fn with_guest_kept(&self, failure: Failure) -> Failure {
        let is_at_source = failure.guest == GuestLocation::Source;
        Failure {
            is_running: failure.is_running || is_at_source && self.is_wanted,
            ..failure
        }
    }

    /// Reads the guest's state before a new attempt begins.
    pub(super) fn look(&mut self) -> Result<(), QemuError> {
        // Events from before are in the state.
        while self.qemu.next_event(Duration::ZERO)?.is_some() {}
        let state = self.qemu.state()?;
        self.is_wanted = ALIVE.contains(&state.as_str());
        self.is_suspended = state == "suspended";
        self.is_unsent = true;
        self.forget();
        Ok(())
    }

    /// Takes the events from before the migration. Of these, only the owner's wish counts.
    pub(super) fn begin(&mut self) -> Result<(), QemuError> {
        self.take_events(Duration::ZERO)?;
        self.forget();
        Ok(())
    }

    fn forget(&mut self) {
        self.stopped = None;
        self.is_unexplained = false;
        self.may_have_run = false;
    }

    /// Refuses a suspended guest, unless both QEMUs transfer that state.
    pub(super) fn check_suspended(&mut self, offer: &Offer) -> Result<(), QemuError> {
        self.loses_suspended = match (self.qemu.keeps_suspended(), offer.keeps_suspended) {
            (true, true) => None,
            (false, _) => Some(self.qemu.version.to_string()),
            (true, false) => Some(offer.qemu.clone()),
        };
        self.suspended_error().map_or(Ok(()), Err)
    }

    /// The error for a guest that has suspended itself, unless both QEMUs transfer that state.
    pub(super) fn suspended_error(&self) -> Option<QemuError> {
        let version = self.loses_suspended.as_ref();
        version
            .filter(|_| self.is_suspended)
            .cloned()
            .map(QemuError::Suspended)
    }

    /// Refuses a QEMU that cannot migrate now.
    pub(super) fn check(
        &mut self,
        zero_page_detection: Option<&str>,
        capabilities: &[&'static str],
    ) -> Result<(), QemuError> {
        let state = self.qemu.state()?;
        let info = self.qemu.query_migrate()?;
        let status = MigrationStatus::of(&info);
        if state == "inmigrate"
            || [MigrationStatus::Busy, MigrationStatus::Switched].contains(&status)
        {
            return Err(QemuError::State {
                state: format!("{state}, migration {}", info["status"]),
                expected: "a guest that is not being migrated",
            });
        }
        if is_switchover(&state) {
            return Err(QemuError::SentBefore);
        }
        self.qemu.check(capabilities)?;
        match zero_page_detection {
            Some(_) if !self.qemu.knows_zero_pages() => {
                let parameter = "zero-page-detection";
                Err(QemuError::NoParameter(self.qemu.version, parameter))
            }
            _ => Ok(()),
        }
    }

    /// Waits for the end of a migration whose driving process is gone. Returns whether it completed or is past the switch to post-copy.
    /// Before the switch, a migration that is held for copies of disks is cancelled at once, as only that process could finish them; any
    /// other is cancelled once `cancel` is set.
    pub(super) fn wait_until_ended(
        &mut self,
        cancel: Option<&AtomicBool>,
    ) -> Result<bool, QemuError> {
        let expected = match cancel {
            Some(_) => {
                "a migration that has ended: to cancel it, run the command again and press Ctrl-C while it waits"
            }
            None => "a migration that has ended",
        };
        let is_cancelled = || cancel.is_some_and(|cancel| cancel.load(Ordering::Relaxed));
        let completed = self.qemu.ask_until(expected, RESUME_WITHIN, |qemu| {
            let info = qemu.query_migrate()?;
            Ok(match MigrationStatus::of(&info) {
                MigrationStatus::Busy => {
                    if info["status"] == "pre-switchover" || is_cancelled() {
                        qemu.execute("migrate_cancel", json!({}))?;
                    }
                    ControlFlow::Continue(format!("migration {}", info["status"]))
                }
                MigrationStatus::Completed | MigrationStatus::Switched => {
                    ControlFlow::Break(is_switchover(&qemu.state()?))
                }
                MigrationStatus::Idle => ControlFlow::Break(false),
            })
        })?;
        self.is_unsent = !completed;
        Ok(completed)
    }

    /// Whether a guest that was sent has run here since, or was reset. QEMU has no other way out of the switchover, so a guest
    /// in any other state has run, even if it is paused now. False if QEMU does not answer in time.
    pub(super) fn has_come_back(&mut self) -> Result<bool, QemuError> {
        self.take_events(Duration::ZERO)?;
        let state = self.qemu.state_within(STOP_REASON_WITHIN)?;
        Ok(state.is_some_and(|state| !self.is_of_switchover(&state)))
    }

    /// Whether a guest in this state was stopped for the switchover.
    fn is_of_switchover(&self, state: &str) -> bool {
        is_switchover(state) || self.is_held && state == PAUSED
    }

    /// Pauses the guest before the switch to post-copy, so that QEMU does not pause it itself. If the connection breaks after the last
    /// page, QEMU (10.0, 11.1) fails the migration and continues a guest that it has paused itself, although that guest already runs at
    /// the destination.
    pub(super) fn hold(&mut self) -> Result<(), QemuError> {
        self.is_held = true;
        self.qemu.execute("stop", json!({}))
    }

    /// Whether post-copy's switch may have been made, and QEMU does not answer that it has not.
    pub(super) fn may_have_switched(&mut self) -> bool {
        if !self.may_be_switched {
            return false;
        }
        let status = self.qemu.migration_status().or_else(|_| {
            self.qemu.reconnect()?;
            self.qemu.migration_status()
        });
        !matches!(status, Ok(MigrationStatus::Idle))
    }

    /// Goes on with post-copy over a connection to `address`.
    pub(super) fn resume_migration(&mut self, address: &Address) -> Result<(), QemuError> {
        let expected = "post-copy that is paused";
        self.qemu.ask_until(expected, RESUME_WITHIN, |qemu| {
            let info = qemu.query_migrate()?;
            Ok(match info["status"].as_str() {
                Some("postcopy-paused" | "completed") => ControlFlow::Break(()),
                status => ControlFlow::Continue(status.unwrap_or("none").to_owned()),
            })
        })?;
        let arguments = json!({ "uri": address.to_string(), "resume": true });
        self.qemu.execute("migrate", arguments)?;
        // Before it has connected, it is still paused.
        self.qemu
            .ask_until("a migration that goes on", RESUME_WITHIN, |qemu| {
                let info = qemu.query_migrate()?;
                Ok(match info["status"].as_str() {
                    Some(status @ "postcopy-paused") => ControlFlow::Continue(status.to_owned()),
                    _ => ControlFlow::Break(()),
                })
            })
    }

    /// Waits for an event and takes all there are. Returns whether one is about the migration.
    pub(super) fn take_events(&mut self, mut wait: Duration) -> Result<bool, QemuError> {
        let (mut is_news, mut stopped) = (false, false);
        while let Some(event) = self.qemu.next_event(wait)? {
            wait = Duration::ZERO;
            match event.name.as_str() {
                "STOP" => {
                    self.stopped = Some(Stopped::by(event.timestamp));
                    stopped = true;
                }
                "RESUME" => {
                    self.stopped = None;
                    stopped = false;
                    self.is_unexplained = false;
                    self.is_held = false;
                    self.is_wanted = true;
                    self.may_have_run = true;
                }
                "SUSPEND" => self.is_suspended = true,
                "WAKEUP" => self.is_suspended = false,
                "MIGRATION_PASS" | "JOB_STATUS_CHANGE" => is_news = true,
                "MIGRATION" => {
                    is_news = true;
                    let ends = ["failed", "cancelled"];
                    self.may_have_run |= ends.iter().any(|end| event.data["status"] == *end);
                }
                _ => {}
            }
        }
        if stopped || self.is_unexplained {
            self.find_out_why_it_stopped()?;
        }
        Ok(is_news)
    }

    /// Besides the switchover, another monitor's `stop`, a full disk or a panic can stop a guest. QEMU's state after the event
    /// tells which it was.
    fn find_out_why_it_stopped(&mut self) -> Result<(), QemuError> {
        let state = self.qemu.state_within(STOP_REASON_WITHIN)?;
        self.is_unexplained = state.is_none();
        match state {
            // The guest already runs again. An event will follow.
            Some(state) if ALIVE.contains(&state.as_str()) => self.stopped = None,
            Some(state) if !self.is_of_switchover(&state) => {
                info!(
                    "the guest was paused, but not by the migration: it is `{state}`, and will be at the destination"
                );
                self.stopped = None;
                self.is_wanted = false;
            }
            Some(_) => self.may_have_run = false,
            // QEMU is busy with the switchover, or flushes its disks before another kind of pause. The time counts as downtime, as
            // nothing else ends a switchover that hangs.
            None => {}
        }
        Ok(())
    }

    /// What the guest did last, by the events so far.
    pub(super) fn last_seen(&self) -> LastSeen {
        match (self.is_wanted && self.stopped.is_none(), self.may_have_run) {
            (true, _) => LastSeen::Running,
            (false, false) => LastSeen::Stopped,
            (false, true) => LastSeen::Unknown,
        }
    }

    /// How long the guest has been paused for the switchover.
    pub(super) fn stopped_for(&self) -> Duration {
        self.stopped
            .map_or(Duration::ZERO, |stopped| stopped.noticed.elapsed())
    }

    /// Whether `error` of QEMU's monitor means that QEMU has provably ended. Then all earlier events have been taken.
    pub(super) fn has_ended_by(&mut self, error: &Cause) -> bool {
        let broken = matches!(
            error,
            Cause::Source(QemuError::Qmp(QmpError::Broken(..) | QmpError::Connect(..)))
        );
        if !broken || !self.qemu.is_dead(EXIT_WITHIN) {
            return false;
        }
        // Ends with the connection's error.
        while self.take_events(EVENT_WAIT).is_ok() {}
        true
    }

    /// Gives the guest back to its owner on this host, in whatever state the migration has left it.
    pub(crate) fn resume(&mut self, should_run: bool) -> SourceEvent {
        let resumed = self.continue_guest(should_run).or_else(|error| {
            // QEMU may accept a new connection to its monitor.
            if !matches!(error, QemuError::Qmp(QmpError::Broken(..))) {
                return Err(error);
            }
            self.qemu.reconnect()?;
            self.continue_guest(should_run)
        });
        match resumed {
            Ok(Continued::Here) => {
                self.announce();
                SourceEvent::Resumed
            }
            Ok(Continued::SentByAnotherTool) => SourceEvent::FoundSent,
            // The destination has ended its QEMU, and this one cannot continue the guest: the guest is lost.
            Err(_) if !self.is_unsent && self.is_past_the_switch() => {
                info!(
                    "the source QEMU is past the switch to post-copy, and cannot continue the guest"
                );
                SourceEvent::GuestDied {
                    last: LastSeen::Stopped,
                }
            }
            Err(_) if self.qemu.is_dead(EXIT_WITHIN) => {
                // What it said before its end. The connection's error is no news.
                let _ = self.take_events(EVENT_WAIT);
                let last = match self.last_seen() {
                    // Another tool may have sent it.
                    LastSeen::Stopped if self.is_unsent => LastSeen::Unknown,
                    last => last,
                };
                SourceEvent::GuestDied { last }
            }
            Err(error) => SourceEvent::NotResumed {
                reason: chain(&error),
            },
        }
    }

    fn is_past_the_switch(&mut self) -> bool {
        let status = self.qemu.migration_status();
        status.is_ok_and(|status| status == MigrationStatus::Switched)
    }

    /// Waits until the failed migration has given the guest back, and continues the guest if QEMU does not. QEMU continues it, unless
    /// the guest is held or was paused by its owner. A guest that was sent completely stays paused and without its disks until it is
    /// continued or its disks are activated.
    fn continue_guest(&mut self, should_run: bool) -> Result<Continued, QemuError> {
        let expected = "a guest that its owner can continue";
        let (is_unsent, is_held) = (self.is_unsent, self.is_held);
        self.qemu.ask_until(expected, RESUME_WITHIN, |qemu| {
            let state = qemu.state()?;
            match state.as_str() {
                // The guest either comes back or gets sent. QEMU accepts no `cont` before that.
                "finish-migrate" => return Ok(ControlFlow::Continue(state)),
                "postmigrate" if !qemu.has_sent_its_guest()? => {}
                "postmigrate" if is_unsent => {
                    return Ok(ControlFlow::Break(Continued::SentByAnotherTool));
                }
                PAUSED if is_held && should_run => qemu.execute("cont", json!({}))?,
                "postmigrate" => match should_run {
                    true => qemu.execute("cont", json!({}))?,
                    false => qemu.activate_disks()?,
                },
                _ => {}
            }
            Ok(ControlFlow::Break(Continued::Here))
        })
    }

    /// Announces the guest to the network: the destination has announced it when it had loaded it.
    fn announce(&mut self) {
        if self.stopped.take().is_some()
            && let Err(error) = self.qemu.announce()
        {
            warn!(
                "the guest is not announced to the network again: {}",
                chain(&error)
            );
        }
    }

    /// Ends a QEMU whose guest is at the destination. A failure is only reported.
    pub(super) fn quit(&mut self) {
        let told = self
            .qemu
            .state()
            .and_then(|state| match is_switchover(&state) {
                true => self.qemu.execute("quit", json!({})),
                false => Err(QemuError::State {
                    state,
                    expected: "a guest that was sent",
                }),
            });
        match told {
            Ok(()) if self.instance.process.is_none() || self.qemu.is_dead(EXIT_WITHIN) => {
                info!("the source's QEMU has been ended");
            }
            Ok(()) => warn!("the source's QEMU has been told to quit and has not ended yet"),
            Err(error) => warn!("the source's QEMU was not ended: {}", chain(&error)),
        }
    }

    /// The longest downtime to accept if the user has not said it. Before 8.2 the present limit may be what a killed migration has
    /// left there.
    pub(super) fn downtime_limit(&self) -> Duration {
        let present = self
            .qemu
            .parameter(DOWNTIME_LIMIT)
            .map(Duration::from_millis);
        let present = present.unwrap_or(USUAL_LIMIT);
        match self.qemu.has_parameter(BANDWIDTH) {
            true => present,
            false => present.max(USUAL_LIMIT),
        }
    }

    /// The settings of a migration through a relay.
    pub(super) fn set_up(
        &mut self,
        channels: u8,
        policy: &Policy,
        dirty_limit: Option<u64>,
        capabilities: &[&str],
    ) -> Result<(), QemuError> {
        let mut parameters = json!({
            "multifd-channels": channels,
            "multifd-compression": "none",
            // The relay does the pacing.
            "max-bandwidth": UNLIMITED,
        });
        if self.qemu.has_parameter(BANDWIDTH) {
            parameters[DOWNTIME_LIMIT] = millis(policy.downtime_limit).into();
        }
        match self.post_copy {
            None => {
                let (name, value) = self.parameter_for(Remainder::at_first(policy.downtime_limit));
                parameters[name] = value.into();
            }
            // Without channels, QEMU's own estimate is right.
            Some(_) if self.qemu.has_parameter(BANDWIDTH) => parameters[BANDWIDTH] = 0.into(),
            Some(_) => {}
        }
        if let Some(zero_pages) = &self.zero_pages {
            parameters["zero-page-detection"] = zero_pages.as_str().into();
        }
        match (policy.timeout, policy.auto_converge) {
            // QEMU changes no capability during a migration.
            (Some((_, OnTimeout::Throttle)), _) => throttle(&mut parameters, LEAST_THROTTLE),
            (_, Some(steps)) => throttle(&mut parameters, steps),
            (_, None) => {}
        }
        if let Some(rate) = dirty_limit {
            parameters["vcpu-dirty-limit"] = (rate >> 20).max(1).into();
        }
        self.qemu.set_up(capabilities, &["events"], parameters)
    }

    /// Tells QEMU how much may be left when it stops the guest.
    pub(super) fn allow(&mut self, allowed: Allowed) -> Result<(), QemuError> {
        let (name, value) = self.parameter_for(allowed);
        self.change(json!({ name: value }))
    }

    /// Lets QEMU slow the guest down in these steps. It was set up for that.
    pub(super) fn throttle(&mut self, steps: AutoConverge) -> Result<(), QemuError> {
        let mut parameters = json!({});
        throttle(&mut parameters, steps);
        self.change(parameters)
    }

    fn parameter_for(&self, allowed: Allowed) -> (&'static str, u64) {
        match self.qemu.has_parameter(BANDWIDTH) {
            true => (BANDWIDTH, allowed.bandwidth),
            false => (DOWNTIME_LIMIT, allowed.downtime_limit),
        }
    }

    /// Changes parameters of the migration under way.
    pub(super) fn change(&mut self, parameters: Value) -> Result<(), QemuError> {
        debug!("telling the source {parameters}");
        match self.qemu.execute("migrate-set-parameters", parameters) {
            // The migration continues: QEMU keeps its present parameters, or is busy with the switchover.
            Err(QemuError::Qmp(error @ (QmpError::NoAnswer { .. } | QmpError::Refused { .. }))) => {
                debug!("{}", chain(&error));
                Ok(())
            }
            result => result,
        }
    }
}

/// What a QEMU has to have, and is set up with, for a migration through a relay.
pub(crate) fn capabilities(post_copy: Option<PostCopyAbilities>) -> Vec<&'static str> {
    let mut all = vec!["return-path"];
    match post_copy {
        None => all.push("multifd"),
        // QEMU before 10.1 does not take both.
        Some(PostCopyAbilities { preempt }) => {
            all.push("postcopy-ram");
            all.extend(preempt.then_some("postcopy-preempt"));
        }
    }
    all
}

fn throttle(parameters: &mut Value, steps: AutoConverge) {
    parameters["cpu-throttle-initial"] = steps.initial.into();
    parameters["cpu-throttle-increment"] = steps.increment.into();
    parameters["max-cpu-throttle"] = steps.max.into();
}

impl Stopped {
    fn by(timestamp: Timestamp) -> Self {
        let noticed = Instant::now();
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let age = now.saturating_sub(timestamp.since_epoch());
        let at = noticed.checked_sub(age).unwrap_or(noticed);
        Self { at, noticed }
    }
}

const DOWNTIME_LIMIT: &str = "downtime-limit";
/// QEMU's default of `downtime-limit`.
const USUAL_LIMIT: Duration = Duration::from_millis(300);
/// The least throttle that there is, which no guest feels.
pub(super) const LEAST_THROTTLE: AutoConverge = AutoConverge {
    initial: 1,
    increment: 1,
    max: 1,
};
/// What QEMU assumes when it decides whether to stop the guest, in place of what it measures (from 8.2 on).
const BANDWIDTH: &str = "avail-switchover-bandwidth";

/// A bandwidth beyond every link, bytes per second.
const UNLIMITED: u64 = 1 << 40;

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use lab::{
        qemu::{Binary, Builder, newest_or_skip},
        ram::Fill,
    };

    use super::*;
    use crate::qmp::ANSWER_WITHIN;

    const MIB: u64 = 1 << 20;
    const LIMIT: Duration = Duration::from_secs(60);

    /// A QEMU whose guest runs, and how it is seen here.
    fn running() -> Option<(lab::qemu::Qemu, SourceQemu)> {
        let binary = newest_or_skip().unwrap()?;
        let mut process = Builder::bare(&binary, 16 * MIB).start().unwrap();
        process.qmp.cont().unwrap();
        let source = SourceQemu::connect(&process.qmp_socket(), ANSWER_WITHIN).unwrap();
        Some((process, source))
    }

    /// As another tool does.
    fn send_away(process: &mut lab::qemu::Qemu) {
        process.qmp.migrate("exec:cat > /dev/null").unwrap();
        process.qmp.wait_migration(&["completed"], LIMIT).unwrap();
        process.qmp.wait_status("postmigrate", LIMIT).unwrap();
    }

    #[test]
    fn a_guest_that_another_tool_sent_is_not_lost_with_its_qemu() {
        let Some((mut process, mut source)) = running() else {
            return;
        };
        source.look().unwrap();
        send_away(&mut process);
        drop(process);
        let unknown = SourceEvent::GuestDied {
            last: LastSeen::Unknown,
        };
        assert_eq!(source.resume(true), unknown);
    }

    /// The migration ends without having sent the guest, which then runs.
    fn expect_cancelled(
        process: &mut lab::qemu::Qemu,
        cancel: Option<&AtomicBool>,
        binary: &Binary,
    ) {
        let mut source = SourceQemu::connect(&process.qmp_socket(), ANSWER_WITHIN).unwrap();
        let has_completed = source.wait_until_ended(cancel).unwrap();
        assert!(!has_completed, "{}", binary.version);
        assert_eq!(source.resume(true), SourceEvent::Resumed);
        process.qmp.wait_status("running", LIMIT).unwrap();
    }

    #[test]
    fn sent_guest_that_ran_since_has_come_back() {
        let Some((mut process, mut source)) = running() else {
            return;
        };
        send_away(&mut process);
        assert!(!source.has_come_back().unwrap());
        process.qmp.cont().unwrap();
        assert!(source.has_come_back().unwrap());
        process.qmp.stop().unwrap();
        assert!(source.has_come_back().unwrap());
    }

    #[test]
    fn look_forgets_what_an_earlier_attempt_saw() {
        let Some((mut process, mut source)) = running() else {
            return;
        };
        process.qmp.stop().unwrap();
        source.look().unwrap();
        assert!(!source.is_wanted);
        process.qmp.cont().unwrap();
        source.look().unwrap();
        assert!(source.is_wanted);
        source.begin().unwrap();
        assert!(!source.may_have_run && source.stopped.is_none());
    }

    #[test]
    fn events_during_a_query_are_kept() {
        let Some((mut process, mut source)) = running() else {
            return;
        };
        let mut actions = [lab::qmp::Qmp::stop, lab::qmp::Qmp::cont].into_iter();
        let asked = source.qemu.ask_until("an end", LIMIT, |_| {
            Ok(match actions.next() {
                Some(action) => {
                    action(&mut process.qmp).unwrap();
                    ControlFlow::Continue(String::new())
                }
                None => ControlFlow::Break(()),
            })
        });
        asked.unwrap();
        source.take_events(Duration::ZERO).unwrap();
        assert!(source.may_have_run);
    }

    #[test]
    fn guest_sent_by_another_tool_is_not_continued() {
        let Some((mut process, mut source)) = running() else {
            return;
        };
        assert!(!source.wait_until_ended(None).unwrap());
        send_away(&mut process);
        assert_eq!(source.resume(true), SourceEvent::FoundSent);
        assert_eq!(process.qmp.query_status().unwrap(), "postmigrate");
        // Of this attempt.
        assert!(source.wait_until_ended(None).unwrap());
        assert_eq!(source.resume(true), SourceEvent::Resumed);
        process.qmp.wait_status("running", LIMIT).unwrap();
        assert!(!source.wait_until_ended(None).unwrap());
    }

    /// While `migrate` gets ready, and QEMU has not been told to migrate.
    #[test]
    fn guest_sent_by_another_tool_before_the_attempt_migrates_is_not_continued() {
        let Some((mut process, mut source)) = running() else {
            return;
        };
        source.look().unwrap();
        send_away(&mut process);
        assert_eq!(source.resume(true), SourceEvent::FoundSent);
        assert_eq!(process.qmp.query_status().unwrap(), "postmigrate");
    }

    /// The pause is not its owner's.
    #[test]
    fn a_held_guest_is_continued_here() {
        let Some((mut process, mut source)) = running() else {
            return;
        };
        source.look().unwrap();
        source.hold().unwrap();
        source.take_events(Duration::ZERO).unwrap();
        assert!(source.is_wanted && source.stopped.is_some());
        assert!(!source.has_come_back().unwrap());
        assert_eq!(source.resume(true), SourceEvent::Resumed);
        assert_eq!(process.qmp.query_status().unwrap(), "running");
        assert!(source.has_come_back().unwrap());
        // Nor is every pause that follows.
        process.qmp.stop().unwrap();
        source.take_events(LIMIT).unwrap();
        assert!(!source.is_wanted);
        assert_eq!(source.resume(true), SourceEvent::Resumed);
        assert_eq!(process.qmp.query_status().unwrap(), "paused");
    }

    /// As the killed driver of a migration with copies of disks leaves it.
    #[test]
    fn migration_that_is_held_is_cancelled() {
        if newest_or_skip().unwrap().is_none() {
            return;
        }
        for binary in lab::qemu::available() {
            let mut process = Builder::bare(binary, 16 * MIB).start().unwrap();
            process.qmp.cont().unwrap();
            let held = json!([{ "capability": "pause-before-switchover", "state": true }]);
            let held = json!({ "capabilities": held });
            process
                .qmp
                .execute("migrate-set-capabilities", held)
                .unwrap();
            process.qmp.migrate("exec:cat > /dev/null").unwrap();
            let held = process.qmp.wait_migration(&["pre-switchover"], LIMIT);
            held.unwrap();
            expect_cancelled(&mut process, None, binary);
        }
    }

    /// Its monitor did not answer when its driver wanted to cancel it.
    #[test]
    fn migration_without_its_relay_is_cancelled_on_request() {
        if newest_or_skip().unwrap().is_none() {
            return;
        }
        for binary in lab::qemu::available() {
            let guest = Builder::bare(binary, 16 * MIB).content(Fill::Mixed, 1);
            let mut process = guest.start().unwrap();
            process.qmp.cont().unwrap();
            // It accepts, and reads nothing.
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("relay");
            let _relay = UnixListener::bind(&path).unwrap();
            let uri = format!("unix:{}", path.display());
            process.qmp.migrate(&uri).unwrap();
            process.qmp.wait_migration(&["active"], LIMIT).unwrap();
            expect_cancelled(&mut process, Some(&AtomicBool::new(true)), binary);
        }
    }

    #[test]
    fn reason_for_a_stop_is_queried_until_qemu_answers() {
        let Some((mut process, mut source)) = running() else {
            return;
        };
        process.qmp.stop().unwrap();
        source.look().unwrap();
        // As after a STOP for which QEMU had no time.
        source.is_wanted = true;
        source.is_unexplained = true;
        source.take_events(Duration::ZERO).unwrap();
        assert!(!source.is_unexplained && !source.is_wanted);
    }
}
