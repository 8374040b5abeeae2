//! Carries out the decisions of crate `handover` on a destination's QEMU.

use std::{ops::ControlFlow, time::Duration};

use handover::DestinationEvent;
use serde_json::json;
use tracing::{debug, warn};
use vamoose_link::Address;

use super::{log::Log, setup::PrepareError};
use crate::{
    Instance, chain,
    control::QEMU_FAILED,
    qemu::{EXIT_WITHIN, KILL_WITHIN, MigrationStatus, Qemu, QemuError, recover},
    qmp::{ANSWER_WITHIN, Qmp},
};

/// The QEMU that receives the guest. The monitor serves one client, so it is not always connected to.
pub(crate) struct DestinationQemu {
    instance: Instance,
    qemu: Option<Qemu>,
    /// Its log from the attempt's beginning on.
    log: Option<Log>,
    /// The guest has started, and `tidy_up` is still to be done.
    has_started: bool,
    /// The settings are needed until all memory has come.
    is_under_post_copy: bool,
}

/// Time limit from the last received byte to a loaded guest.
pub(super) const LOAD_WITHIN: Duration = Duration::from_secs(30);
/// How long a QEMU may take to fail after its relay has.
pub(super) const FAIL_WITHIN: Duration = Duration::from_secs(1);
/// How long to wait for the answer of a QEMU that may hang. Meanwhile the attempt is locked, and messages of the source wait.
const BUSY_ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// What QEMU says when its source is gone.
const CONNECTION_LOST: [&str; 4] = [
    "Input/output error",
    "failed: -5",
    "from socket",
    "Not a migration stream",
];
/// What an older QEMU says in the end, whatever the cause.
const NO_CAUSE: &str = "load of migration failed: Invalid argument";
/// States of a loaded guest that has not run yet.
const WAITING: [&str; 2] = ["paused", "prelaunch"];
/// State of a guest that is being received.
const COMING_IN: &str = "inmigrate";
/// States of a guest that has run here. In the last two it is on its way to another host, or has been sent there.
const HAS_RUN: [&str; 4] = ["running", "suspended", "finish-migrate", SENT_ON];
const SENT_ON: &str = "postmigrate";

impl DestinationQemu {
    pub(crate) fn new(instance: Instance, qemu: Option<Qemu>) -> Self {
        Self {
            instance,
            qemu,
            log: None,
            has_started: false,
            is_under_post_copy: false,
        }
    }

    /// Reads its log from now on.
    pub(super) fn follow_log(&mut self, name: &str) {
        let pid = self.instance.process.map(|process| process.pid);
        self.log = pid.and_then(|pid| Log::open(pid, name));
    }

    /// Why QEMU could not load its guest, in its own words. `None` if it has not failed `within` this time, or only because its
    /// connections were lost.
    pub(super) fn failure_cause(&mut self, within: Duration) -> Option<String> {
        let qemu = self.qemu.as_mut()?;
        let (error, has_ended) = match qemu.load_error(within) {
            Ok(error) => (Some(error), false),
            Err(QemuError::State { .. }) => return None,
            Err(_) => (None, qemu.is_dead(within)),
        };
        let mut words = self.log.as_ref().map_or_else(Vec::new, Log::last_lines);
        let error = error.filter(|error| !words.iter().any(|line| line.contains(error)));
        words.extend(error);
        if words.is_empty() && has_ended {
            words.push("it has ended, and its log may tell why".to_owned());
        }
        // After a lost connection NO_CAUSE explains nothing. Without one, it is all that QEMU says.
        let all = words.len();
        words.retain(|line| !CONNECTION_LOST.iter().any(|lost| line.contains(lost)));
        let is_cause = |line: &String| words.len() == all || line != NO_CAUSE;
        words
            .iter()
            .any(is_cause)
            .then(|| format!("{QEMU_FAILED}{}", words.join("; ")))
    }

    /// Whether its source has switched to post-copy, and it has what the guest needs to run. False if it does not answer.
    pub(super) fn has_switched(&mut self) -> bool {
        if self.has_ended() {
            return false;
        }
        let switched = self.with_qemu_within(BUSY_ANSWER_WITHIN, |qemu| {
            Ok(qemu.migration_status()? == MigrationStatus::Switched)
        });
        let switched = switched.unwrap_or_else(|error| {
            debug!("is the guest under post-copy? {}", chain(&error));
            self.let_go(&error, true);
            false
        });
        self.is_under_post_copy |= switched;
        switched
    }

    /// What [`recover`](Self::recover) needs to take over the connection to the monitor. The journal has it before
    /// [`keep_monitor`](Self::keep_monitor).
    pub(super) fn monitor_inode(&mut self) -> Option<u64> {
        self.with_qemu(|qemu| qemu.monitor_inode()).ok()
    }

    /// Has QEMU keep the connection to its monitor, should this process be killed: QEMU accepts no other one while it waits for a page
    /// of the guest.
    pub(super) fn keep_monitor(&mut self, inode: u64) {
        let Some(process) = self.instance.process else {
            return;
        };
        if let Err(error) = self.with_qemu(Qemu::keep_monitor) {
            warn!("{}", chain(&error));
            return;
        }
        let is_there = process.socket(inode);
        if let Ok(Some(_)) = is_there {
            return;
        }
        if let Err(error) = is_there {
            warn!(
                "should this server be killed, the guest may be lost: {}",
                chain(&error)
            );
        }
        if let Some(qemu) = &mut self.qemu {
            qemu.keep_monitor_no_longer();
        }
    }

    /// Lets a QEMU whose connections have broken under post-copy wait for its source at `incoming`, unless it has all memory: then it
    /// returns true.
    pub(super) fn recover(
        &mut self,
        incoming: &Address,
        kept: Option<u64>,
    ) -> Result<bool, PrepareError> {
        self.is_under_post_copy = true;
        let complete = if let (None, Some(inode), Some(process)) =
            (&self.qemu, kept, self.instance.process)
            && let Some(end) = process.socket(inode)?
        {
            let mut qmp = Qmp::take_over(&self.instance.monitor, end).map_err(QemuError::from)?;
            let complete = recover(&mut qmp, incoming)?;
            // When QEMU answers again, its monitor is free.
            qmp.keep_no_longer().map_err(QemuError::from)?;
            complete
        } else {
            let recovered = self.with_qemu(|qemu| qemu.recover(incoming));
            recovered.inspect_err(|_| self.qemu = None)?
        };
        if complete {
            self.all_has_come();
        }
        Ok(complete)
    }

    /// Whether QEMU has provably ended.
    pub(super) fn has_ended(&self) -> bool {
        self.instance.has_ended()
    }

    /// Whether the path of the monitor is free for another QEMU.
    pub(super) fn is_gone(&self) -> bool {
        self.instance.is_gone()
    }

    /// Whether all of the guest has been loaded, or what it needs to run under post-copy, now that its connections are gone. What
    /// these still hold is loaded first.
    pub(super) fn look(&mut self) -> DestinationEvent {
        if self.instance.has_ended() {
            return died();
        }
        let looked = self.with_qemu_within(BUSY_ANSWER_WITHIN, |qemu| {
            qemu.ask_until("a guest that is loaded or lost", FAIL_WITHIN, |qemu| {
                let info = qemu.query_migrate()?;
                let (status, state) = (MigrationStatus::of(&info), qemu.state()?);
                let is_coming = state == COMING_IN && info["status"] != "setup";
                Ok(match status {
                    MigrationStatus::Busy if is_coming => ControlFlow::Continue(state),
                    _ => ControlFlow::Break((status, state)),
                })
            })
        });
        match looked {
            Ok((MigrationStatus::Switched, _)) => {
                self.is_under_post_copy = true;
                DestinationEvent::Switched
            }
            Ok((_, state)) if state == COMING_IN => {
                let cause = "the guest is incomplete".to_owned();
                DestinationEvent::NotStarted { cause }
            }
            Ok((_, state)) if HAS_RUN.contains(&&*state) => unclear(format!(
                "the guest is `{state}`, and nobody has requested it to run"
            )),
            Ok(_) => DestinationEvent::Loaded,
            Err(QemuError::State { state, .. }) => {
                unclear(format!("its QEMU is still loading the guest: `{state}`"))
            }
            // Nobody can continue it any more.
            Err(error @ QemuError::Replaced) => {
                let cause = chain(&error);
                DestinationEvent::NotStarted { cause }
            }
            Err(error) if has_not_answered(&error) => unclear(chain(&error)),
            Err(error) => self.connection_lost(&error),
        }
    }

    /// Continues the loaded guest unless it has been continued, or activates its disks if it is to stay paused. Returns its state.
    pub(super) fn run(&mut self, resume: bool) -> DestinationEvent {
        let loaded = self.wait_until_loaded();
        let ready = loaded.and_then(|state| self.with_qemu(Qemu::end_copies).map(|()| state));
        let state = match ready {
            Ok(state) => state,
            Err(error) => return self.not_started(&error),
        };
        if HAS_RUN.contains(&state.as_str()) {
            return self.started(state);
        }
        if !resume || !WAITING.contains(&state.as_str()) {
            // The guest stays paused, or has been continued and something has stopped it since.
            return match self.with_qemu(Qemu::activate_disks) {
                Ok(()) => self.started(state),
                Err(error) => self.not_started(&error),
            };
        }
        let told = self.with_qemu(|qemu| qemu.execute("cont", json!({})));
        match told {
            // The guest has run, even if it has stopped since.
            Ok(()) => match self.with_qemu(Qemu::state) {
                Ok(state) => self.started(state),
                Err(error) => self.connection_lost(&error),
            },
            Err(error) if error.is_refusal() => self.not_started(&error),
            Err(error) => self.connection_lost(&error),
        }
    }

    /// Finds out what became of the guest without changing it. Another client may hold the monitor by now.
    pub(super) fn check(&mut self, was_seen: bool) -> DestinationEvent {
        if self.instance.has_ended() {
            return died();
        }
        match self.with_qemu(Qemu::state) {
            // It may never have been continued. The next commit does that.
            Ok(state) if !was_seen && (state == COMING_IN || WAITING.contains(&&*state)) => {
                unclear(format!(
                    "the guest is `{state}`, and has not been seen to run"
                ))
            }
            Ok(state) => {
                // Under post-copy QEMU may accept no other connection when it is to recover.
                if !self.is_under_post_copy {
                    self.qemu = None;
                }
                self.started(state)
            }
            // The process lives, and the guest has run.
            Err(error)
                if was_seen && self.instance.process.is_some() && !self.instance.has_ended() =>
            {
                debug!("{}", chain(&error));
                let state = "alive".to_owned();
                DestinationEvent::Started { state }
            }
            Err(error) => self.connection_lost(&error),
        }
    }

    pub(super) fn end(&mut self) -> DestinationEvent {
        if self.instance.has_ended() {
            return died();
        }
        let ended = match (&self.qemu, self.instance.process) {
            (None, Some(process)) => process.end(KILL_WITHIN).map_err(|error| chain(&error)),
            // The process may be identifiable by now.
            _ => match self.with_qemu(|qemu| Ok(qemu.end())) {
                Ok(ended) => ended.map_err(|error| chain(&error)),
                Err(error) => Err(chain(&error)),
            },
        };
        match ended {
            Ok(()) => {
                self.qemu = None;
                died()
            }
            Err(reason) => DestinationEvent::NotEnded { reason },
        }
    }

    fn started(&mut self, state: String) -> DestinationEvent {
        if state == SENT_ON {
            return DestinationEvent::MovedOn;
        }
        self.has_started = true;
        DestinationEvent::Started { state }
    }

    /// Work that can wait until the source has its answer.
    pub(super) fn tidy_up(&mut self) {
        if !std::mem::take(&mut self.has_started) {
            return;
        }
        if let Some(qemu) = &mut self.qemu {
            // The source's QEMU may have answered the announcement that this one made after loading.
            if let Err(error) = qemu.announce() {
                warn!(
                    "the guest is not announced to the network: {}",
                    chain(&error)
                );
            }
        }
        self.put_back();
    }

    /// Whether no memory is missing by post-copy, as QEMU has it.
    pub(super) fn has_all_memory(&mut self) -> bool {
        if let Some(qemu) = &mut self.qemu
            && self.is_under_post_copy
            && qemu.has_completed()
        {
            self.all_has_come();
        }
        !self.is_under_post_copy
    }

    /// All memory has come by post-copy.
    pub(super) fn all_has_come(&mut self) {
        if std::mem::take(&mut self.is_under_post_copy) {
            self.put_back();
        }
    }

    /// Restores the settings, and lets go of the monitor.
    fn put_back(&mut self) {
        if let Some(mut qemu) = self.qemu.take_if(|_| !self.is_under_post_copy) {
            qemu.put_back();
            qemu.keep_monitor_no_longer();
        }
    }

    /// `cont` was not sent, or was refused.
    fn not_started(&mut self, error: &QemuError) -> DestinationEvent {
        DestinationEvent::NotStarted {
            cause: format!("it failed when everything had been sent: {}", chain(error)),
        }
    }

    /// The guest may run or not. Only the end of the process would be proof.
    fn connection_lost(&mut self, error: &QemuError) -> DestinationEvent {
        let dead = self
            .qemu
            .as_ref()
            .is_some_and(|qemu| qemu.is_dead(EXIT_WITHIN));
        if dead || self.instance.has_ended() {
            return died();
        }
        self.let_go(error, self.is_under_post_copy);
        unclear(chain(error))
    }

    /// A QEMU that may wait for a page answers later. Any other connection is useless now, and a new one may work.
    fn let_go(&mut self, error: &QemuError, may_wait: bool) {
        if !(may_wait && has_not_answered(error)) {
            self.qemu = None;
        }
    }

    fn wait_until_loaded(&mut self) -> Result<String, QemuError> {
        self.with_qemu(|qemu| {
            qemu.ask_until("a loaded guest", LOAD_WITHIN, |qemu| {
                let state = qemu.state()?;
                Ok(match state.as_str() {
                    COMING_IN => ControlFlow::Continue(state),
                    _ => ControlFlow::Break(state),
                })
            })
        })
    }

    /// Uses the connection to the monitor, or opens one, to the very same QEMU.
    fn with_qemu<T>(
        &mut self,
        work: impl FnOnce(&mut Qemu) -> Result<T, QemuError>,
    ) -> Result<T, QemuError> {
        self.with_qemu_within(ANSWER_WITHIN, work)
    }

    /// As [`with_qemu`](Self::with_qemu), and waits at most this long for each answer.
    fn with_qemu_within<T>(
        &mut self,
        patience: Duration,
        work: impl FnOnce(&mut Qemu) -> Result<T, QemuError>,
    ) -> Result<T, QemuError> {
        if let Some(qemu) = &mut self.qemu {
            return qemu.with_timeout(patience, work);
        }
        let Instance {
            monitor, process, ..
        } = &self.instance;
        // Another QEMU there is none of this job's business.
        if process.is_none() && self.instance.is_gone() {
            return Err(QemuError::Replaced);
        }
        let mut qemu = Qemu::connect_within(monitor, patience)?;
        let found = qemu.with_timeout(patience, |qemu| Instance::of(qemu, monitor))?;
        if !found.is_same(&self.instance) {
            return Err(QemuError::Replaced);
        }
        self.qemu.insert(qemu).with_timeout(patience, work)
    }
}

fn has_not_answered(error: &QemuError) -> bool {
    matches!(error, QemuError::Qmp(error) if error.is_no_answer())
}

fn died() -> DestinationEvent {
    DestinationEvent::Died {
        cause: "its QEMU has ended".to_owned(),
    }
}

fn unclear(reason: String) -> DestinationEvent {
    DestinationEvent::Unclear { reason }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead as _, BufReader, Write as _},
        os::unix::net::UnixListener,
        thread::{self, JoinHandle},
    };

    use serde_json::Value;

    use super::*;

    /// A monitor of a guest that is in a state, paused at first, until `cont`, and then in the state `after`, or gone.
    struct Fake {
        dir: tempfile::TempDir,
        server: JoinHandle<Vec<String>>,
    }

    impl Fake {
        fn start(after: Option<&'static str>) -> (Self, DestinationQemu) {
            Self::of_incoming("paused", "completed", after)
        }

        fn of_incoming(
            state: &'static str,
            migration: &'static str,
            after: Option<&'static str>,
        ) -> (Self, DestinationQemu) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("qmp");
            let listener = UnixListener::bind(&path).unwrap();
            let server = thread::spawn(move || serve(&listener, state, migration, after));
            let guest = DestinationQemu::new(
                Instance::unknown(&path),
                Some(Qemu::connect(&path).unwrap()),
            );
            (Self { dir, server }, guest)
        }

        /// The commands that it received, in this order.
        fn told(self) -> Vec<String> {
            drop(self.dir);
            self.server.join().unwrap()
        }
    }

    fn serve<'a>(
        listener: &UnixListener,
        mut state: &'a str,
        migration: &str,
        after: Option<&'a str>,
    ) -> Vec<String> {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"{\"QMP\": {}}\n").unwrap();
        let mut told = Vec::new();
        for line in BufReader::new(stream.try_clone().unwrap()).lines() {
            let Ok(line) = line else { break };
            let request: Value = serde_json::from_str(&line).unwrap();
            let command = request["execute"].as_str().unwrap().to_owned();
            let answer = match command.as_str() {
                "query-version" => json!({ "qemu": { "major": 10, "minor": 0, "micro": 0 } }),
                "query-commands" => json!([{ "name": "blockdev-set-active" }]),
                "query-status" => json!({ "status": state }),
                "query-migrate" => json!({ "status": migration }),
                "cont" => match after {
                    Some(after) => {
                        state = after;
                        json!({})
                    }
                    None => return told,
                },
                _ => json!([]),
            };
            told.push(command);
            let answer = json!({ "return": answer, "id": request["id"] });
            if writeln!(stream, "{answer}").is_err() {
                break;
            }
        }
        told
    }

    #[test]
    fn running_guest_has_started() {
        let (fake, mut guest) = Fake::start(Some("running"));
        let state = "running".to_owned();
        assert_eq!(guest.run(true), DestinationEvent::Started { state });
        drop(guest);
        assert!(fake.told().contains(&"cont".to_owned()));
    }

    #[test]
    fn guest_that_stays_paused_is_not_continued() {
        let (fake, mut guest) = Fake::start(Some("running"));
        let state = "paused".to_owned();
        assert_eq!(guest.run(false), DestinationEvent::Started { state });
        drop(guest);
        let told = fake.told();
        assert!(!told.contains(&"cont".to_owned()));
        assert!(told.contains(&"blockdev-set-active".to_owned()));
    }

    #[test]
    fn continued_guest_has_started_even_if_stopped_since() {
        for after in ["internal-error", "guest-panicked", "io-error", "shutdown"] {
            let (_fake, mut guest) = Fake::start(Some(after));
            for _ in 0..3 {
                let state = after.to_owned();
                assert_eq!(guest.run(true), DestinationEvent::Started { state });
            }
        }
    }

    /// A check changes nothing, so a later `commit` still continues the guest.
    #[test]
    fn guest_that_was_never_continued_is_unclear() {
        let (fake, mut guest) = Fake::start(Some("running"));
        let event = guest.check(false);
        assert!(
            matches!(event, DestinationEvent::Unclear { .. }),
            "{event:?}"
        );
        let state = "running".to_owned();
        assert_eq!(guest.run(true), DestinationEvent::Started { state });
        drop(guest);
        assert!(fake.told().contains(&"cont".to_owned()));
        // Paused since.
        let (_fake, mut guest) = Fake::start(None);
        let state = "paused".to_owned();
        assert_eq!(guest.check(true), DestinationEvent::Started { state });
    }

    #[test]
    fn guest_whose_connections_are_gone_is_looked_at() {
        let look = |state, migration| {
            let (_fake, mut guest) = Fake::of_incoming(state, migration, None);
            guest.look()
        };
        for state in ["paused", "prelaunch"] {
            assert_eq!(look(state, "completed"), DestinationEvent::Loaded);
        }
        for migration in ["setup", "failed", "none"] {
            let event = look(COMING_IN, migration);
            let is_lost = matches!(event, DestinationEvent::NotStarted { .. });
            assert!(is_lost, "{migration}: {event:?}");
        }
        // It may have the rest in its sockets; or somebody else has continued it.
        for (state, migration) in [(COMING_IN, "active"), ("running", "completed")] {
            let event = look(state, migration);
            let is_unclear = matches!(event, DestinationEvent::Unclear { .. });
            assert!(is_unclear, "{state}: {event:?}");
        }
    }

    #[test]
    fn closed_monitor_leaves_guest_unclear() {
        let (_fake, mut guest) = Fake::start(None);
        let event = guest.run(true);
        assert!(
            matches!(event, DestinationEvent::Unclear { .. }),
            "{event:?}"
        );
    }
}
