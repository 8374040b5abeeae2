//! One QEMU: its identity and abilities, and its settings before, during and after a migration.

mod disks;
mod images;
mod machine;
mod settings;
mod writes;

use std::{
    fmt, io,
    ops::ControlFlow,
    path::Path,
    time::{Duration, Instant},
};

use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use thiserror::Error;
use tracing::debug;
use vamoose_link::Address;

use crate::{
    chain,
    control::PostCopyAbilities,
    process::{ProcessError, ProcessId, QemuProcess},
    qmp::{ANSWER_WITHIN, Event, Qmp, QmpError},
};
pub(crate) use disks::PrivateFolder;
pub(crate) use images::{COPY, Disk, Image, compare_disks, copy_id};
pub use machine::{Fact, Fit};
pub(crate) use machine::{Machine, compare};
use settings::Settings;

/// A connection to one QEMU.
pub(crate) struct Qemu {
    qmp: Qmp,
    /// `None` while the process is not known for certain.
    process: Option<QemuProcess>,
    pub(crate) version: Version,
    /// Capabilities and parameters when it was last checked: all that it has.
    found: Settings,
    /// Capabilities and parameters before the migration, to be restored.
    before: Settings,
}

/// A QEMU's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(
    /// Major.
    pub u64,
    /// Minor.
    pub u64,
    /// Micro.
    pub u64,
);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

/// Why a QEMU cannot take part in this migration.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum QemuError {
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error("this QEMU ({0}) does not have the migration capability `{1}`")]
    NoCapability(Version, &'static str),
    #[error("this QEMU ({0}) does not have the migration parameter `{1}`")]
    NoParameter(Version, &'static str),
    #[error("the guest is in the state `{state}`, expected {expected}")]
    State {
        state: String,
        expected: &'static str,
    },
    #[error("QEMU cannot migrate this guest: {0}")]
    Blocked(String),
    /// A relay cannot read what QEMUs encrypt.
    #[error(
        "the parameter `tls-creds` is set: QEMU would encrypt what the relay has to read; clear the parameter"
    )]
    Tls,
    /// QEMU refuses to send a guest again.
    #[error(
        "QEMU has already sent this guest and will not send it again until the guest has run: if no other tool has moved the guest \
         since, continue it (`cont`), then pause it again (`stop`) if it is to be moved paused"
    )]
    SentBefore,
    #[error("the migration capability `{name}` is on: {why}; switch it off")]
    Capability { name: String, why: &'static str },
    #[error(
        "the parameter `mode` is `{0}`: QEMU would not send the guest as a live migration does; set it to `normal`"
    )]
    Mode(String),
    /// Before 9.0.
    #[error(
        "the guest is suspended (ACPI S3), and QEMU {0} would not carry that along: wake it up (`system_wakeup`) first"
    )]
    Suspended(String),
    #[error("the image of `{0}` cannot be activated: another process probably uses it")]
    Inactive(String),
    #[error("cannot create a socket")]
    Listener(#[source] io::Error),
    /// The monitor's path leads to another QEMU than before, or to one that cannot be identified.
    #[error("the monitor now belongs to a different QEMU")]
    Replaced,
    #[error("QEMU's answer to `{0}` lacks `{1}`")]
    Answer(&'static str, &'static str),
}

impl QemuError {
    /// Whether QEMU has refused a command, so that nothing has changed.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self, Self::Qmp(QmpError::Refused { .. }))
    }

    /// Whether no process listens at the monitor's path.
    pub(crate) fn is_monitor_closed(&self) -> bool {
        let gone = [io::ErrorKind::NotFound, io::ErrorKind::ConnectionRefused];
        matches!(self, Self::Qmp(QmpError::Connect(_, error)) if gone.contains(&error.kind()))
    }
}

/// QEMU may not have ended. Ending it may be tried again.
#[derive(Debug, Error)]
pub(crate) enum EndError {
    /// The process is unknown, so nothing proves its end.
    #[error(
        "it was asked to quit and has {} its monitor, which does not prove that its process has \
         ended", if *.closed { "closed" } else { "not closed" }
    )]
    Unproven {
        /// Whether the monitor was closed. QEMU closes it on exit, when the guest no longer runs. But a
        /// connection may break for other reasons.
        closed: bool,
        source: ProcessError,
    },
    #[error(transparent)]
    Process(#[from] ProcessError),
}

/// Status of a QEMU's last migration, as far as it matters to the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MigrationStatus {
    /// A migration is under way, is ending, or is in an unknown state.
    Busy,
    /// Behind post-copy's switch: a source cannot continue its guest, and a destination has what the guest needs to run.
    Switched,
    /// Everything was sent, or loaded.
    Completed,
    /// No migration, or one that failed or was cancelled: the guest has not moved.
    Idle,
}

impl MigrationStatus {
    /// From the answer of [`Qemu::query_migrate`].
    pub(crate) fn of(info: &Value) -> Self {
        match info["status"].as_str() {
            None | Some("none" | "failed" | "cancelled") => Self::Idle,
            Some("completed") => Self::Completed,
            Some(
                "postcopy-active"
                | "postcopy-paused"
                | "postcopy-recover-setup"
                | "postcopy-recover",
            ) => Self::Switched,
            // setup, active, device, pre-switchover, wait-unplug, cancelling, failing, colo and postcopy-device, in which a
            // source can still continue its guest; a newer QEMU may have more.
            Some(_) => Self::Busy,
        }
    }
}

/// Interval for asking a QEMU while no event comes.
const ASK_EVERY: Duration = Duration::from_millis(20);
/// How long to wait for the answer of a QEMU that may be about to exit.
const ANSWER_BEFORE_EXIT_WITHIN: Duration = Duration::from_secs(1);
/// How long a QEMU may take to end when it is asked to.
const QUIT_WITHIN: Duration = Duration::from_secs(3);
/// How long a QEMU that has closed its monitor may take to end, as it frees the guest's memory.
pub(crate) const EXIT_WITHIN: Duration = Duration::from_secs(10);
/// How long a killed QEMU may take to end: its memory is freed and its storage requests complete first.
pub(crate) const KILL_WITHIN: Duration = Duration::from_secs(30);

impl Qemu {
    /// Connects to the monitor at `path` and reads QEMU's version.
    pub(crate) fn connect(path: &Path) -> Result<Self, QemuError> {
        Self::connect_within(path, ANSWER_WITHIN)
    }

    /// As [`Qemu::connect`]. Another client may hold the monitor for at most `timeout`.
    pub(crate) fn connect_within(path: &Path, timeout: Duration) -> Result<Self, QemuError> {
        let mut qmp = Qmp::connect_within(path, timeout)?;
        let process = qmp.process();
        if let Err(error) = &process {
            debug!("{}", chain(error));
        }
        let answer = qmp.execute("query-version", json!({}))?;
        qmp.set_timeout(ANSWER_WITHIN);
        let part = |name| {
            let number = answer["qemu"][name].as_u64();
            number.ok_or(QemuError::Answer("query-version", "qemu"))
        };
        let version = Version(part("major")?, part("minor")?, part("micro")?);
        Ok(Self {
            qmp,
            process: process.ok(),
            version,
            found: Settings::default(),
            before: Settings::default(),
        })
    }

    /// The guest's run state, by QEMU's name (`running`, `paused`, `inmigrate`, ...).
    pub(crate) fn state(&mut self) -> Result<String, QemuError> {
        let answer = self.qmp.execute("query-status", json!({}))?;
        text_field(&answer, "query-status", "status")
    }

    /// The guest's run state. `None` if QEMU takes longer than `timeout`, as it may when it is busy.
    pub(crate) fn state_within(&mut self, timeout: Duration) -> Result<Option<String>, QemuError> {
        match self.with_timeout(timeout, Self::state) {
            Err(QemuError::Qmp(error)) if error.is_no_answer() => Ok(None),
            state => state.map(Some),
        }
    }

    /// Runs `ask`, in which QEMU may take at most `timeout` for each answer.
    pub(crate) fn with_timeout<T>(
        &mut self,
        timeout: Duration,
        ask: impl FnOnce(&mut Self) -> T,
    ) -> T {
        let usual = self.qmp.set_timeout(timeout);
        let answer = ask(self);
        self.qmp.set_timeout(usual);
        answer
    }

    pub(crate) fn uuid(&mut self) -> Result<String, QemuError> {
        let answer = self.qmp.execute("query-uuid", json!({}))?;
        text_field(&answer, "query-uuid", "UUID")
    }

    /// QEMU's answer to `query-migrate`.
    pub(crate) fn query_migrate(&mut self) -> Result<Value, QemuError> {
        Ok(self.qmp.execute("query-migrate", json!({}))?)
    }

    /// Why it could not load its guest. Fails if it has not failed `within` this time, or does not answer.
    pub(crate) fn load_error(&mut self, within: Duration) -> Result<String, QemuError> {
        self.with_timeout(ANSWER_BEFORE_EXIT_WITHIN, |qemu| {
            qemu.ask_until("a failed migration", within, |qemu| {
                let info = qemu.query_migrate()?;
                let status = info["status"].as_str().unwrap_or("none");
                Ok(match status {
                    "failed" => {
                        let reason = info["error-desc"].as_str().unwrap_or_default();
                        ControlFlow::Break(reason.to_owned())
                    }
                    status => ControlFlow::Continue(status.to_owned()),
                })
            })
        })
    }

    /// Whether its guest was sent away, and has not been continued since.
    pub(crate) fn has_sent_its_guest(&mut self) -> Result<bool, QemuError> {
        // In this order, a migration that completes in between is not overlooked.
        let status = MigrationStatus::of(&self.query_migrate()?);
        Ok(status == MigrationStatus::Completed && is_switchover(&self.state()?))
    }

    /// Calls `ask` at every event and at intervals, until it returns `Break`. Fails with the last state after the timeout.
    /// The events stay queued.
    pub(crate) fn ask_until<T>(
        &mut self,
        expected: &'static str,
        within: Duration,
        mut ask: impl FnMut(&mut Self) -> Result<ControlFlow<T, String>, QemuError>,
    ) -> Result<T, QemuError> {
        let deadline = Instant::now() + within;
        loop {
            match ask(self)? {
                ControlFlow::Break(found) => return Ok(found),
                ControlFlow::Continue(state) if Instant::now() >= deadline => {
                    return Err(QemuError::State { state, expected });
                }
                ControlFlow::Continue(_) => self.qmp.wait_for_event(ASK_EVERY)?,
            }
        }
    }

    /// Whether this QEMU understands zero pages in multifd packets (from 9.0 on).
    pub(crate) fn knows_zero_pages(&self) -> bool {
        self.has_parameter("zero-page-detection")
    }

    /// Whether migrations have this parameter. Known once QEMU has been checked.
    pub(crate) fn has_parameter(&self, name: &str) -> bool {
        self.found.parameters.contains_key(name)
    }

    /// A parameter when it was last checked, if it is a number.
    pub(crate) fn parameter(&self, name: &str) -> Option<u64> {
        self.found.parameters.get(name)?.as_u64()
    }

    /// Whether a suspended guest (ACPI S3) stays suspended when it is migrated, and can be woken (from 9.0 on). An older source
    /// wakes the guest during the migration, and at an older destination its clocks stand still for good.
    pub(crate) fn keeps_suspended(&self) -> bool {
        self.version >= Version(9, 0, 0)
    }

    /// Whether a QEMU that cannot load a guest can be told not to exit, so that it reports why (from 9.1 on).
    pub(crate) fn explains_failures(&self) -> bool {
        self.version >= Version(9, 1, 0)
    }

    /// Whether a source can be cancelled at any time (from 10.0 on). An older source that is cancelled while it stops the guest
    /// continues the guest without its images, and aborts at the guest's next write. When its main stream breaks, an older source
    /// takes the images back.
    pub(crate) fn cancels_safely(&self) -> bool {
        self.version >= Version(10, 0, 0)
    }

    /// Refuses a QEMU that could not migrate `with` these settings.
    pub(crate) fn check(&mut self, with: &[&'static str]) -> Result<(), QemuError> {
        self.found = self.settings()?;
        for capability in with {
            if !self.found.capabilities.contains_key(*capability) {
                return Err(QemuError::NoCapability(self.version, capability));
            }
        }
        let status = self.query_migrate()?;
        let reasons = status["blocked-reasons"].as_array();
        if let Some(reasons) = reasons.filter(|reasons| !reasons.is_empty()) {
            let reasons = reasons.iter().filter_map(Value::as_str);
            return Err(QemuError::Blocked(reasons.collect::<Vec<_>>().join("; ")));
        }
        self.found.check()
    }

    /// What this QEMU has for post-copy. Known once it has been checked.
    pub(crate) fn post_copy_abilities(&self) -> PostCopyAbilities {
        let has = self.found.capabilities.contains_key("postcopy-preempt");
        PostCopyAbilities {
            // In 7.2 it was new, and in another order of connections.
            preempt: has && self.version >= Version(8, 0, 0),
        }
    }

    /// Whether this QEMU misses writes of a guest that may be moved by post-copy: 11.1 does so under TCG (docs/qemu.md).
    pub(crate) fn misses_writes(&mut self) -> Result<bool, QemuError> {
        let is_concerned = self.version >= Version(11, 0, 0);
        Ok(is_concerned && self.qmp.execute("query-kvm", json!({}))?["enabled"] != true)
    }

    /// The migration's status, for the decision whether the guest is past the switch to post-copy.
    pub(crate) fn migration_status(&mut self) -> Result<MigrationStatus, QemuError> {
        Ok(MigrationStatus::of(&self.query_migrate()?))
    }

    /// [`has_completed`] over this connection.
    pub(crate) fn has_completed(&mut self) -> bool {
        has_completed(&mut self.qmp)
    }

    /// The inode of the socket to the monitor.
    pub(crate) fn monitor_inode(&self) -> Result<u64, QemuError> {
        Ok(self.qmp.inode()?)
    }

    /// Lets QEMU keep a duplicate of this end of the connection to the monitor.
    pub(crate) fn keep_monitor(&mut self) -> Result<(), QemuError> {
        Ok(self.qmp.keep()?)
    }

    pub(crate) fn keep_monitor_no_longer(&mut self) {
        if let Err(error) = self.qmp.keep_no_longer() {
            debug!("{}", chain(&error));
        }
    }

    /// [`recover`] over this connection.
    pub(crate) fn recover(&mut self, address: &Address) -> Result<bool, QemuError> {
        recover(&mut self.qmp, address)
    }

    /// Runs a command and drops its answer.
    pub(crate) fn execute(&mut self, command: &str, arguments: Value) -> Result<(), QemuError> {
        self.qmp.execute(command, arguments)?;
        Ok(())
    }

    /// Runs a command that answers with a list.
    pub(crate) fn list<T: DeserializeOwned>(
        &mut self,
        command: &'static str,
        arguments: Value,
    ) -> Result<Vec<T>, QemuError> {
        let answer = self.qmp.execute(command, arguments)?;
        serde_json::from_value(answer).map_err(|error| {
            debug!("{}", chain(&error));
            QemuError::Answer(command, "the expected fields")
        })
    }

    /// QEMU's process, for a journal. Fails if it is not certain: QEMU runs in another
    /// pid namespace, or belongs to a user whose processes are not visible.
    pub(crate) fn identity(&mut self) -> Result<ProcessId, ProcessError> {
        Ok(self.process()?.id)
    }

    /// Refuses a QEMU whose process is not certain, and a monitor created by an untrusted user.
    pub(crate) fn check_owner(&mut self) -> Result<(), ProcessError> {
        known_process(&self.qmp, &mut self.process)?.check_owner(self.qmp.monitor())
    }

    /// Connects anew to the same QEMU's monitor.
    pub(crate) fn reconnect(&mut self) -> Result<(), QemuError> {
        let again = Self::connect(&self.qmp.path)?;
        let id = |qemu: &Self| qemu.process.as_ref().map(|process| process.id);
        if id(self).is_none() || id(self) != id(&again) {
            return Err(QemuError::Replaced);
        }
        self.qmp = again.qmp;
        Ok(())
    }

    /// Announces the guest to the network, as QEMU does at the end of a migration. Does not wait for the answer, which under post-copy
    /// may take as long as a page takes to come.
    pub(crate) fn announce(&mut self) -> Result<(), QemuError> {
        // Five packets in the first second: QEMU's own defaults, in milliseconds.
        let arguments = json!({ "initial": 50, "max": 550, "rounds": 5, "step": 100 });
        self.qmp.send("announce-self", arguments)?;
        Ok(())
    }

    /// Whether this QEMU provably ends `within` this time. Its monitor closes shortly before its end. An
    /// unresponsive or closed monitor proves nothing, and false proves nothing.
    pub(crate) fn is_dead(&self, within: Duration) -> bool {
        let process = self.process.as_ref();
        process.is_some_and(|process| matches!(process.wait_for_end(within), Ok(true)))
    }

    /// Ends this QEMU, which holds half a guest. QEMU is asked to quit, and then killed:
    /// a destination whose main loop waits for a SYNC that will never come does not react.
    /// Returns when the process has provably ended.
    pub(crate) fn end(&mut self) -> Result<(), EndError> {
        // QEMU may be exiting by itself, as it does when loading failed.
        let quit = self.qmp.send("quit", json!({}));
        match self.process() {
            Ok(process) if process.wait_for_end(QUIT_WITHIN)? => Ok(()),
            Ok(process) => Ok(process.end(KILL_WITHIN)?),
            Err(source) => Err(EndError::Unproven {
                closed: quit.is_err() || self.qmp.wait_for_close(QUIT_WITHIN),
                source,
            }),
        }
    }

    fn process(&mut self) -> Result<&QemuProcess, ProcessError> {
        known_process(&self.qmp, &mut self.process)
    }

    pub(crate) fn next_event(&mut self, timeout: Duration) -> Result<Option<Event>, QemuError> {
        Ok(self.qmp.next_event(timeout)?)
    }
}

/// Whether a guest in this state was stopped by a switchover. In every other state it runs, or was paused by its owner, QEMU or
/// itself.
pub(crate) fn is_switchover(state: &str) -> bool {
    ["finish-migrate", "postmigrate"].contains(&state)
}

/// The process; looked up if it was not known before.
fn known_process<'a>(
    qmp: &Qmp,
    process: &'a mut Option<QemuProcess>,
) -> Result<&'a QemuProcess, ProcessError> {
    match process {
        Some(process) => Ok(process),
        unknown => Ok(unknown.insert(qmp.process()?)),
    }
}

fn text_field(
    answer: &Value,
    command: &'static str,
    field: &'static str,
) -> Result<String, QemuError> {
    let text = answer[field].as_str();
    text.map(str::to_owned)
        .ok_or(QemuError::Answer(command, field))
}

/// Lets a destination whose connections have broken under post-copy wait for its source at `address`, or returns true if it has all
/// memory. QEMU may be waiting for a page of the guest.
pub(crate) fn recover(qmp: &mut Qmp, address: &Address) -> Result<bool, QemuError> {
    let deadline = Instant::now() + EXIT_WITHIN;
    loop {
        let arguments = json!({ "uri": address.to_string() });
        match qmp.execute_oob("migrate-recover", arguments) {
            Err(QmpError::Refused { .. }) if has_completed(qmp) => return Ok(true),
            // It has not noticed yet that its connections are gone.
            Err(QmpError::Refused { .. }) if Instant::now() < deadline => {
                qmp.wait_for_event(ASK_EVERY)?;
            }
            told => return Ok(told.map(|()| false)?),
        }
    }
}

/// Whether a migration has completed. Not if QEMU does not say so soon: it may be waiting for a page of the guest.
fn has_completed(qmp: &mut Qmp) -> bool {
    let usual = qmp.set_timeout(ASK_EVERY);
    let info = qmp.execute("query-migrate", json!({}));
    qmp.set_timeout(usual);
    info.is_ok_and(|info| MigrationStatus::of(&info) == MigrationStatus::Completed)
}

#[cfg(test)]
mod tests {
    use std::{
        os::{
            fd::OwnedFd,
            unix::{fs::symlink, net::UnixListener},
        },
        process::{Child, Command, Stdio},
        thread,
    };

    use lab::qemu::{Binary, Builder, available, newest_or_skip};
    use rustix::process::{Pid, Signal, kill_process};

    use super::*;

    const MIB: u64 = 1 << 20;

    fn start(binary: &Binary, name: &str) -> lab::qemu::Qemu {
        let bare = Builder::bare(binary, MIB).incoming();
        bare.argument("-name").argument(name).start().unwrap()
    }

    /// Reacts to nothing any more, as a destination that waits for a SYNC.
    fn freeze(pid: u32) {
        let pid = Pid::from_raw(pid.try_into().unwrap()).unwrap();
        kill_process(pid, Signal::STOP).unwrap();
    }

    #[test]
    fn a_qemu_that_hangs_is_ended_whatever_its_process_is_called() {
        if newest_or_skip().unwrap().is_none() {
            return;
        }
        let hangs = |binary: &Binary, name: &str| {
            let mut process = start(binary, name);
            let mut qemu = Qemu::connect(&process.qmp_socket()).unwrap();
            freeze(process.pid());
            let ended = qemu.end();
            assert!(ended.is_ok(), "{}, {name}: {ended:?}", binary.version);
            process.wait_exit(Duration::ZERO).unwrap();
        };
        thread::scope(|scope| {
            for binary in available() {
                for name in ["x", "x,process=web1", "x,process=a) (b"] {
                    scope.spawn(move || hangs(binary, name));
                }
            }
        });
    }

    #[test]
    fn a_qemu_is_ended_through_a_link_to_its_monitor() {
        let Some(binary) = newest_or_skip().unwrap() else {
            return;
        };
        let mut process = start(&binary, "x,process=web1");
        let link = process.socket("link");
        symlink(process.qmp_socket(), &link).unwrap();
        let mut qemu = Qemu::connect(&link).unwrap();
        freeze(process.pid());
        qemu.end().unwrap();
        process.wait_exit(Duration::ZERO).unwrap();
    }

    /// A QEMU whose monitor was opened by another program, as libvirt does.
    struct Handed {
        child: Child,
        dir: tempfile::TempDir,
    }

    impl Handed {
        fn start(binary: &Binary) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let listener = UnixListener::bind(dir.path().join("qmp")).unwrap();
            // As standard input, so that no other child of this process gets it, too.
            let child = Command::new(&binary.path)
                .args(["-machine", "none", "-nodefaults", "-display", "none", "-S"])
                .args(["-chardev", "socket,id=m,fd=0,server=on,wait=off"])
                .args(["-qmp", "chardev:m", "-name", "x,process=web1"])
                .stdin(Stdio::from(OwnedFd::from(listener)))
                .spawn()
                .unwrap();
            Self { child, dir }
        }
    }

    impl Drop for Handed {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    #[test]
    fn a_qemu_that_was_handed_its_monitor_is_ended_and_not_who_opened_it() {
        let Some(binary) = newest_or_skip().unwrap() else {
            return;
        };
        let mut handed = Handed::start(&binary);
        let mut qemu = Qemu::connect(&handed.dir.path().join("qmp")).unwrap();
        freeze(handed.child.id());
        qemu.end().unwrap();
        assert!(handed.child.try_wait().unwrap().is_some());
    }

    /// A connection that breaks proves nothing about the process.
    #[test]
    fn a_qemu_is_ended_over_a_connection_that_is_broken() {
        let Some(binary) = newest_or_skip().unwrap() else {
            return;
        };
        let mut process = start(&binary, "x");
        let mut qemu = Qemu::connect(&process.qmp_socket()).unwrap();
        qemu.qmp.cut();
        qemu.end().unwrap();
        process.wait_exit(Duration::ZERO).unwrap();
    }

    #[test]
    fn a_silent_monitor_is_not_a_dead_qemu() {
        let Some(binary) = newest_or_skip().unwrap() else {
            return;
        };
        let mut process = start(&binary, "x");
        let qemu = Qemu::connect(&process.qmp_socket()).unwrap();
        freeze(process.pid());
        qemu.qmp.cut();
        assert!(!qemu.is_dead(Duration::ZERO));
        process.kill().unwrap();
        assert!(qemu.is_dead(Duration::ZERO));
    }

    #[test]
    fn the_identity_is_that_of_the_process() {
        let Some(binary) = newest_or_skip().unwrap() else {
            return;
        };
        let mut process = start(&binary, "x");
        let mut qemu = Qemu::connect(&process.qmp_socket()).unwrap();
        let identity = qemu.identity().unwrap();
        assert_eq!(identity.pid, process.pid());
        assert!(identity.is_alive().unwrap());
        process.kill().unwrap();
        assert!(!identity.is_alive().unwrap());
    }

    #[test]
    fn every_word_for_a_migrations_state_is_classified() {
        use MigrationStatus::{Busy, Completed, Idle, Switched};
        for (word, status) in [
            ("none", Idle),
            ("setup", Busy),
            ("cancelling", Busy),
            ("cancelled", Idle),
            ("active", Busy),
            ("postcopy-device", Busy),
            ("postcopy-active", Switched),
            ("postcopy-paused", Switched),
            ("postcopy-recover-setup", Switched),
            ("postcopy-recover", Switched),
            ("completed", Completed),
            ("failing", Busy),
            ("failed", Idle),
            ("colo", Busy),
            ("pre-switchover", Busy),
            ("device", Busy),
            ("wait-unplug", Busy),
            ("of-a-later-qemu", Busy),
        ] {
            let info = json!({ "status": word });
            assert_eq!(MigrationStatus::of(&info), status, "{word}");
        }
        assert_eq!(MigrationStatus::of(&json!({})), Idle);
    }
}
