//! QEMU's monitor: commands, answers and events as lines of JSON over a unix socket.
//!
//! ```text
//!  QEMU ── greeting ─> client ── qmp_capabilities ─> QEMU      once
//!  client ── {"execute", "arguments", "id"} ─> QEMU ── {"return"|"error", "id"} ─> client
//!  QEMU ── {"event", "data", "timestamp"} ─> client            at any time
//! ```
//!
//! The test crate `lab` has its own client on purpose: tests drive their QEMUs through it, so that a fault of this
//! client cannot hide. Nothing that is shipped may depend on `lab`. This client also does what only a migration
//! needs: it identifies QEMU's process, detects monitors held by other clients, and handles late answers.

use std::{
    collections::{BTreeSet, VecDeque},
    io::{self, IoSlice},
    mem::MaybeUninit,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    fd::{AsFd as _, BorrowedFd, OwnedFd},
    fs::fstat,
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
};
use serde::Deserialize;
use serde_json::{Value, json};
use thiserror::Error;
use tracing::warn;
use vamoose_link::{Address, Socket, SocketError, dial, left};

use crate::process::{Monitor, ProcessError, QemuProcess};

pub(crate) struct Qmp {
    stream: Socket,
    pub(crate) path: PathBuf,
    monitor: Monitor,
    received: Vec<u8>,
    events: VecDeque<Event>,
    next_id: u64,
    /// Commands whose answers have not come. They may come late.
    unanswered: BTreeSet<u64>,
    /// QEMU has the QMP capability `oob`: an out-of-band command overtakes those that wait.
    has_oob: bool,
    /// Another process has used the connection before: answers may be to its commands.
    is_taken_over: bool,
    timeout: Duration,
}

/// An event from QEMU.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Event {
    /// QEMU's name for it, such as `STOP`.
    #[serde(rename = "event")]
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) data: Value,
    /// Time of the event, by the clock of QEMU's host.
    pub(crate) timestamp: Timestamp,
}

/// Time since the Unix epoch, in two parts as QEMU writes it.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Timestamp {
    seconds: i64,
    microseconds: i64,
}

impl Timestamp {
    /// Time since the Unix epoch; zero when QEMU had none.
    pub(crate) fn since_epoch(self) -> Duration {
        let part = |value| u64::try_from(value).unwrap_or(0);
        Duration::from_secs(part(self.seconds)) + Duration::from_micros(part(self.microseconds))
    }
}

/// The monitor could not be used.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum QmpError {
    #[error("cannot connect to the QMP socket {0}")]
    Connect(PathBuf, #[source] io::Error),
    /// No greeting came.
    #[error(
        "{path}: QEMU did not accept a connection to its monitor in {} s: another client (libvirt?) probably holds it, \
         and QEMU serves one at a time; start QEMU with a second -qmp socket, for vamoose alone",
        waited.as_secs_f32()
    )]
    Held { path: PathBuf, waited: Duration },
    /// QEMU does not answer: it may be busy or hang, and may still carry out the command.
    #[error("{path}: QEMU did not answer `{command}` in {} s: it is busy, or hangs", waited.as_secs_f32())]
    NoAnswer {
        path: PathBuf,
        command: String,
        waited: Duration,
    },
    /// The connection broke. That alone does not prove that QEMU has ended.
    #[error("{0}: the connection to QEMU broke")]
    Broken(PathBuf, #[source] io::Error),
    #[error("{path}: QEMU sent invalid QMP: {problem}")]
    Garbage { path: PathBuf, problem: String },
    #[error("{path}: QEMU refused `{command}`: {description}")]
    Refused {
        path: PathBuf,
        command: String,
        description: String,
    },
}

impl QmpError {
    /// Whether QEMU did not answer, so that the outcome is unknown.
    pub(crate) fn is_no_answer(&self) -> bool {
        matches!(self, Self::NoAnswer { .. })
    }
}

/// Longest time for an answer. QEMU answers at once unless its main loop is busy.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(20);
/// QEMU reads nothing more from a client that has eight commands waiting, not even commands that overtake them. A connection that is
/// taken over has those of two processes, and some that nobody waits for.
const MOST_UNANSWERED: usize = 2;
/// QEMU's name for the duplicate that it keeps.
const KEPT: &str = "vamoose-monitor";
/// How long a monitor may take to accept a client before that is reported.
const SOON: Duration = Duration::from_secs(2);
/// Longest line: an answer has tens of KB.
const LONGEST_LINE: usize = 16 << 20;

impl Qmp {
    /// Connects to the monitor at `path` and negotiates, with at most `timeout` for an answer. A monitor that does not answer soon is
    /// reported in the log.
    pub(crate) fn connect_within(path: &Path, timeout: Duration) -> Result<Self, QmpError> {
        let start = Instant::now();
        let soon = timeout.min(SOON);
        let report_held = || {
            warn!(
                "{}: QEMU does not answer: another client (libvirt?) probably holds its monitor; waiting for {} s",
                path.display(),
                timeout.as_secs_f32()
            );
        };
        let failed = |error| QmpError::Connect(path.to_owned(), error);
        let held = || QmpError::Held {
            path: path.to_owned(),
            waited: timeout,
        };
        let monitor = Monitor::open(path).map_err(failed)?;
        let address = Address::Unix(monitor.address());
        // The dial times out while the monitor's queue of waiting clients is full.
        let is_held = |error: &SocketError| error.source.kind() == io::ErrorKind::TimedOut;
        let stream = dial(&address, soon).or_else(|error| match is_held(&error) {
            true => {
                report_held();
                dial(&address, left(start + timeout))
            }
            false => Err(error),
        });
        let stream = stream.map_err(|error| match is_held(&error) {
            true => held(),
            false => failed(error.source),
        })?;
        let mut qmp = Self {
            stream,
            path: path.to_owned(),
            monitor,
            received: Vec::new(),
            events: VecDeque::new(),
            next_id: 0,
            unanswered: BTreeSet::new(),
            has_oob: false,
            is_taken_over: false,
            timeout: timeout.min(ANSWER_WITHIN),
        };
        let mut greeting = qmp.read_message(start + soon)?;
        if greeting.is_none() && start.elapsed() < timeout {
            report_held();
            greeting = qmp.read_message(start + timeout)?;
        }
        let greeting = match greeting {
            Some(mut greeting) if greeting.get("QMP").is_some() => greeting["QMP"].take(),
            Some(_) => return Err(qmp.garbage("no greeting")),
            None => return Err(held()),
        };
        let known = greeting["capabilities"].as_array();
        qmp.has_oob = known.is_some_and(|known| known.iter().any(|name| name == "oob"));
        let arguments = match qmp.has_oob {
            true => json!({ "enable": ["oob"] }),
            false => json!({}),
        };
        qmp.execute("qmp_capabilities", arguments)?;
        Ok(qmp)
    }

    /// The inode of this end's socket.
    pub(crate) fn inode(&self) -> Result<u64, QmpError> {
        let status = fstat(self.stream.as_fd()).map_err(|error| self.broken(error.into()))?;
        Ok(status.st_ino)
    }

    /// Lets QEMU keep a duplicate of this end, so that the connection outlives this process.
    pub(crate) fn keep(&mut self) -> Result<(), QmpError> {
        let end = self.stream.as_fd().try_clone_to_owned();
        let end = end.map_err(|error| self.broken(error))?;
        self.pass_file(KEPT, end.as_fd())
    }

    /// Takes over the end of the connection to the monitor at `path` that a process which has been killed had QEMU keep.
    pub(crate) fn take_over(path: &Path, end: OwnedFd) -> Result<Self, QmpError> {
        let monitor = Monitor::open(path);
        Ok(Self {
            stream: Socket::Unix(end.into()),
            path: path.to_owned(),
            monitor: monitor.map_err(|error| QmpError::Connect(path.to_owned(), error))?,
            received: Vec::new(),
            events: VecDeque::new(),
            // Ids that the earlier process has not used.
            next_id: u64::from(std::process::id()) << 32,
            unanswered: BTreeSet::new(),
            has_oob: true,
            is_taken_over: true,
            timeout: ANSWER_WITHIN,
        })
    }

    /// Tells QEMU to close the duplicate of [`keep`](Self::keep), as soon as it can.
    pub(crate) fn keep_no_longer(&mut self) -> Result<(), QmpError> {
        self.send("closefd", json!({ "fdname": KEPT })).map(drop)
    }

    /// Runs a command of those that QEMU carries out even while it is busy, such as while it waits for a page of the guest.
    pub(crate) fn execute_oob(&mut self, command: &str, arguments: Value) -> Result<(), QmpError> {
        let verb = match self.has_oob {
            true => "exec-oob",
            false => "execute",
        };
        let id = self.send_as(verb, command, arguments)?;
        self.wait_for_answer(id, command).map(drop)
    }

    pub(crate) fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        let deadline = Instant::now() + self.timeout;
        while self.unanswered.len() >= MOST_UNANSWERED {
            match self.read_message(deadline)? {
                Some(message) => self.put_aside(message)?,
                None => return Err(self.no_answer(command)),
            }
        }
        let id = self.send(command, arguments)?;
        self.wait_for_answer(id, command)
    }

    /// Runs commands, which are sent together. The answer is null for each that QEMU refuses.
    pub(crate) fn execute_all<const N: usize>(
        &mut self,
        commands: [(&str, Value); N],
    ) -> Result<[Value; N], QmpError> {
        let mut ids = [0; N];
        for (id, (command, arguments)) in ids.iter_mut().zip(&commands) {
            *id = self.send(command, arguments.clone())?;
        }
        let mut answers = [const { Value::Null }; N];
        for ((answer, id), (command, _)) in answers.iter_mut().zip(ids).zip(&commands) {
            match self.wait_for_answer(id, command) {
                Ok(value) => *answer = value,
                Err(QmpError::Refused { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(answers)
    }

    /// Sets the time for an answer, and returns the previous one.
    pub(crate) fn set_timeout(&mut self, timeout: Duration) -> Duration {
        std::mem::replace(&mut self.timeout, timeout)
    }

    /// Passes a file to QEMU under the name `name`.
    pub(crate) fn pass_file(&mut self, name: &str, file: BorrowedFd<'_>) -> Result<(), QmpError> {
        // The file travels with a byte of data. QEMU skips space between commands.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files = [file];
        control.push(SendAncillaryMessage::ScmRights(&files));
        let flags = SendFlags::NOSIGNAL;
        sendmsg(&self.stream, &[IoSlice::new(b" ")], &mut control, flags)
            .map_err(|error| self.broken(error.into()))?;
        self.execute("getfd", json!({ "fdname": name }))?;
        Ok(())
    }

    fn wait_for_answer(&mut self, id: u64, command: &str) -> Result<Value, QmpError> {
        let deadline = Instant::now() + self.timeout;
        loop {
            let Some(mut message) = self.read_message(deadline)? else {
                return Err(self.no_answer(command));
            };
            if message.get("event").is_some() {
                self.put_aside(message)?;
                continue;
            }
            if self.take_answered(&message)? != id {
                continue;
            }
            if let Some(error) = message.get("error") {
                return Err(QmpError::Refused {
                    path: self.path.clone(),
                    command: command.to_owned(),
                    description: error["desc"].as_str().unwrap_or("no reason").to_owned(),
                });
            }
            return Ok(message["return"].take());
        }
    }

    /// Sends a command and returns its id. The answer is dropped unless it is waited for.
    pub(crate) fn send(&mut self, command: &str, arguments: Value) -> Result<u64, QmpError> {
        self.send_as("execute", command, arguments)
    }

    fn send_as(&mut self, verb: &str, command: &str, arguments: Value) -> Result<u64, QmpError> {
        self.next_id += 1;
        let id = self.next_id;
        let line = json!({ verb: command, "arguments": arguments, "id": id }).to_string();
        let written = self.stream.write_both(line.as_bytes(), b"\n");
        written.map_err(|source| {
            // Part of the line may have been sent, so nothing may follow it.
            self.stream.shut_down();
            self.broken(source)
        })?;
        self.unanswered.insert(id);
        Ok(id)
    }

    /// The id of an answer's command, which is no longer unanswered.
    fn take_answered(&mut self, answer: &Value) -> Result<u64, QmpError> {
        let id = answer.get("id").and_then(Value::as_u64);
        match id.filter(|id| self.unanswered.remove(id)) {
            Some(id) => Ok(id),
            None if self.is_taken_over => Ok(0),
            None => Err(self.garbage("an answer to no command")),
        }
    }

    /// Waits until QEMU closes the connection, as it does on exit. False if that does not happen within
    /// `timeout`.
    pub(crate) fn wait_for_close(&mut self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        loop {
            match self.read_message(deadline) {
                Ok(Some(_)) | Err(QmpError::Garbage { .. }) => {}
                Ok(None) => return false,
                Err(_) => return true,
            }
        }
    }

    pub(crate) fn process(&self) -> Result<QemuProcess, ProcessError> {
        QemuProcess::serving(&self.monitor)
    }

    pub(crate) fn monitor(&self) -> &Monitor {
        &self.monitor
    }

    /// The next event, if one comes within `timeout`.
    pub(crate) fn next_event(&mut self, timeout: Duration) -> Result<Option<Event>, QmpError> {
        if self.events.is_empty() {
            self.wait_for_event(timeout)?;
        }
        Ok(self.events.pop_front())
    }

    /// Waits for another event, for at most `timeout`, and queues it for [`Qmp::next_event`].
    pub(crate) fn wait_for_event(&mut self, timeout: Duration) -> Result<(), QmpError> {
        let deadline = Instant::now() + timeout;
        let queued = self.events.len();
        while self.events.len() == queued
            && let Some(message) = self.read_message(deadline)?
        {
            self.put_aside(message)?;
        }
        Ok(())
    }

    /// Queues an event, and drops a late answer.
    fn put_aside(&mut self, message: Value) -> Result<(), QmpError> {
        if message.get("event").is_none() {
            return self.take_answered(&message).map(drop);
        }
        let event = serde_json::from_value(message).map_err(|e| self.garbage(&e.to_string()))?;
        self.events.push_back(event);
        Ok(())
    }

    /// The next message. `None` if none has come by `deadline`.
    fn read_message(&mut self, deadline: Instant) -> Result<Option<Value>, QmpError> {
        loop {
            if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                let line = self.received.drain(..=end).collect::<Vec<_>>();
                match serde_json::from_slice(&line) {
                    Ok(message) => return Ok(Some(message)),
                    // Its beginning was read before.
                    Err(_) if self.is_taken_over => continue,
                    Err(error) => return Err(self.garbage(&error.to_string())),
                }
            }
            if self.received.len() > LONGEST_LINE {
                return Err(self.garbage("an endless line"));
            }
            if left(deadline).is_zero() {
                return Ok(None);
            }
            let mut piece = [0; 16 * 1024];
            match self.stream.read_until(&mut piece, Some(deadline)) {
                Ok(None) => return Ok(None),
                Ok(Some(0)) => return Err(self.broken(io::ErrorKind::UnexpectedEof.into())),
                Ok(Some(read)) => self.received.extend_from_slice(&piece[..read]),
                Err(error) => return Err(self.broken(error)),
            }
        }
    }

    fn no_answer(&self, command: &str) -> QmpError {
        QmpError::NoAnswer {
            path: self.path.clone(),
            command: command.to_owned(),
            waited: self.timeout,
        }
    }

    fn broken(&self, error: io::Error) -> QmpError {
        QmpError::Broken(self.path.clone(), error)
    }

    fn garbage(&self, problem: &str) -> QmpError {
        QmpError::Garbage {
            path: self.path.clone(),
            problem: problem.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead as _, BufReader, Write as _},
        os::unix::net::{UnixListener, UnixStream},
        thread,
    };

    use rustix::{
        fd::OwnedFd,
        net::{self, AddressFamily, SocketAddrUnix, SocketType},
    };

    use super::*;

    impl Qmp {
        /// Breaks the connection.
        pub(crate) fn cut(&self) {
            self.stream.shut_down();
        }
    }

    /// A monitor that answers each line with the lines that are given for it, after the negotiation.
    struct Fake {
        dir: tempfile::TempDir,
    }

    impl Fake {
        fn start(answers: &'static [&'static [&'static str]]) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let listener = UnixListener::bind(dir.path().join("qmp")).unwrap();
            thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                stream.write_all(b"{\"QMP\": {}}\n").unwrap();
                let mut asked = BufReader::new(stream.try_clone().unwrap()).lines();
                asked.next().unwrap().unwrap();
                stream.write_all(b"{\"return\": {}, \"id\": 1}\n").unwrap();
                for lines in answers {
                    asked.next().unwrap().unwrap();
                    for line in *lines {
                        stream.write_all(line.as_bytes()).unwrap();
                        stream.write_all(b"\n").unwrap();
                    }
                }
                // Stays until the client goes.
                while let Some(Ok(_)) = asked.next() {}
            });
            Self { dir }
        }

        fn path(&self) -> PathBuf {
            self.dir.path().join("qmp")
        }
    }

    const SHORT: Duration = Duration::from_millis(300);

    /// Connects for a test that does not wait for the answers that will not come in time.
    fn connect(fake: &Fake) -> Qmp {
        let mut qmp = Qmp::connect_within(&fake.path(), Duration::from_secs(20)).unwrap();
        qmp.timeout = SHORT;
        qmp
    }

    #[test]
    fn late_answer_is_not_the_next_answer() {
        let fake = Fake::start(&[
            &[],
            &[
                r#"{"return": "late", "id": 2}"#,
                r#"{"return": "timely", "id": 3}"#,
            ],
        ]);
        let mut qmp = connect(&fake);
        let first = qmp.execute("first", json!({}));
        assert!(matches!(first, Err(QmpError::NoAnswer { .. })), "{first:?}");
        assert_eq!(qmp.execute("second", json!({})).unwrap(), "timely");
    }

    #[test]
    fn late_answer_is_not_an_event() {
        let fake = Fake::start(&[
            &[],
            &[
                r#"{"return": "timely", "id": 3}"#,
                r#"{"error": {"desc": "late"}, "id": 2}"#,
                r#"{"event": "STOP", "timestamp": {"seconds": 1, "microseconds": 2}}"#,
            ],
        ]);
        let mut qmp = connect(&fake);
        qmp.execute("first", json!({})).unwrap_err();
        qmp.execute("second", json!({})).unwrap();
        let event = qmp.next_event(Duration::from_secs(20)).unwrap().unwrap();
        assert_eq!(event.name, "STOP");
    }

    /// A busy QEMU still reads a command that overtakes those that it has not carried out.
    #[test]
    fn few_commands_are_left_unanswered() {
        let fake = Fake::start(&[&[], &[]]);
        let mut qmp = connect(&fake);
        qmp.timeout = Duration::from_millis(1);
        for _ in 0..2 * MOST_UNANSWERED {
            assert!(qmp.execute("any", json!({})).unwrap_err().is_no_answer());
        }
        assert_eq!(qmp.unanswered.len(), MOST_UNANSWERED);
    }

    /// A monitor with another client, as libvirt is: QEMU takes no second one.
    fn held(waiting: usize) -> (tempfile::TempDir, Vec<UnixStream>, OwnedFd) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let listener = net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        // As long a queue as QEMU's.
        net::listen(&listener, 1).unwrap();
        let clients = (0..waiting).map(|_| UnixStream::connect(&path).unwrap());
        let clients = clients.collect();
        (dir, clients, listener)
    }

    /// Clients that wait in the queue are connected and are not greeted; the third is not connected.
    #[test]
    fn held_monitor_is_reported_in_time() {
        for waiting in [2, 1, 0] {
            let (dir, _clients, _listener) = held(waiting);
            let start = Instant::now();
            let result = Qmp::connect_within(&dir.path().join("qmp"), SHORT).map(drop);
            assert!(
                matches!(result, Err(QmpError::Held { .. })),
                "{waiting}: {result:?}"
            );
            assert!(start.elapsed() >= SHORT, "{waiting}");
        }
    }

    #[test]
    fn released_monitor_is_used() {
        let (dir, clients, listener) = held(2);
        let path = dir.path().join("qmp");
        thread::scope(|scope| {
            let connecting =
                scope.spawn(|| Qmp::connect_within(&path, Duration::from_secs(20)).map(drop));
            thread::sleep(SHORT);
            let mut served = Vec::new();
            for _ in 0..3 {
                let stream = UnixStream::from(net::accept(&listener).unwrap());
                let lines = b"{\"QMP\": {}}\n{\"return\": {}, \"id\": 1}\n";
                (&stream).write_all(lines).unwrap();
                served.push(stream);
            }
            connecting.join().unwrap().unwrap();
        });
        drop(clients);
    }

    #[test]
    fn connecting_to_a_closed_socket_fails_at_once() {
        let (dir, _, listener) = held(0);
        drop(listener);
        for name in ["qmp", "none"] {
            let result = Qmp::connect_within(&dir.path().join(name), SHORT).map(drop);
            assert!(
                matches!(result, Err(QmpError::Connect(..))),
                "{name}: {result:?}"
            );
        }
    }

    /// Ids that were never given out, or that have been answered, are a fault and no matter of time.
    #[test]
    fn answer_to_no_command_is_an_error() {
        for answer in [
            r#"{"return": {}, "id": 99}"#,
            r#"{"return": {}, "id": 1}"#,
            r#"{"return": {}}"#,
        ] {
            let fake = Fake::start(match answer {
                answer if answer.contains("99") => &[&[r#"{"return": {}, "id": 99}"#]],
                answer if answer.contains('1') => &[&[r#"{"return": {}, "id": 1}"#]],
                _ => &[&[r#"{"return": {}}"#]],
            });
            let result = connect(&fake).execute("any", json!({}));
            assert!(
                matches!(result, Err(QmpError::Garbage { .. })),
                "{answer}: {result:?}"
            );
        }
    }
}
