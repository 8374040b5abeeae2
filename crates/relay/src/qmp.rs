//! QEMU's monitor: commands, answers and events as lines of JSON over a unix socket.
//!
//! ```text
//!  QEMU ── greeting ─> client ── qmp_capabilities ─> QEMU      once
//!  client ── {"execute", "arguments", "id"} ─> QEMU ── {"return"|"error", "id"} ─> client
//!  QEMU ── {"event", "data", "timestamp"} ─> client            at any time
//! ```

use std::{
    collections::VecDeque,
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{net::sockopt, process::Pid};
use serde::Deserialize;
use serde_json::{Value, json};
use thiserror::Error;

/// A connection to one QEMU's monitor.
pub(crate) struct Qmp {
    stream: UnixStream,
    path: PathBuf,
    received: Vec<u8>,
    events: VecDeque<Event>,
    next_id: u64,
}

/// Something that QEMU reported on its own.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Event {
    /// QEMU's name for it, such as `STOP`.
    #[serde(rename = "event")]
    pub(crate) name: String,
    /// When, by the clock of QEMU's host.
    pub(crate) timestamp: Timestamp,
}

/// Time since the Unix epoch, in two parts as QEMU writes it.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Timestamp {
    seconds: i64,
    microseconds: i64,
}

impl Timestamp {
    /// Time since the Unix epoch; zero when QEMU could not tell.
    pub(crate) fn since_epoch(self) -> Duration {
        let part = |value| u64::try_from(value).unwrap_or(0);
        Duration::from_secs(part(self.seconds)) + Duration::from_micros(part(self.microseconds))
    }
}

/// The monitor could not be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum QmpError {
    /// Nobody listens there.
    #[error("cannot connect to the QMP socket {path}: {source}")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// QEMU does not answer.
    #[error(
        "{path}: no answer to `{command}` in {} s; does another client (libvirt?) hold this monitor?",
        ANSWER_WITHIN.as_secs()
    )]
    NoAnswer {
        /// The socket.
        path: PathBuf,
        /// What was asked.
        command: String,
    },
    /// The connection broke: QEMU has probably ended.
    #[error("{path}: the connection to QEMU broke: {source}")]
    Broken {
        /// The socket.
        path: PathBuf,
        /// How.
        source: io::Error,
    },
    /// Not QMP.
    #[error("{path}: QEMU sent what is not QMP: {problem}")]
    Garbage {
        /// The socket.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// QEMU refused a command.
    #[error("{path}: QEMU refused `{command}`: {description}")]
    Refused {
        /// The socket.
        path: PathBuf,
        /// The command.
        command: String,
        /// QEMU's words.
        description: String,
    },
}

/// Longest time for an answer. QEMU answers at once unless its main loop is busy.
const ANSWER_WITHIN: Duration = Duration::from_secs(20);
/// Longest line: the schema has about 400 KB.
const LONGEST_LINE: usize = 16 << 20;

impl Qmp {
    /// Connects to the monitor at `path` and negotiates.
    ///
    /// # Errors
    /// When nobody listens there, or somebody else is connected already: QEMU serves one client.
    pub(crate) fn connect(path: &Path) -> Result<Self, QmpError> {
        let stream = UnixStream::connect(path).map_err(|source| QmpError::Connect {
            path: path.to_owned(),
            source,
        })?;
        let mut qmp = Self {
            stream,
            path: path.to_owned(),
            received: Vec::new(),
            events: VecDeque::new(),
            next_id: 0,
        };
        let deadline = Instant::now() + ANSWER_WITHIN;
        match qmp.read_message(deadline)? {
            Some(greeting) if greeting.get("QMP").is_some() => {}
            Some(_) => return Err(qmp.garbage("no greeting")),
            None => return Err(qmp.no_answer("connect")),
        }
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Runs a command and returns its answer.
    ///
    /// # Errors
    /// When QEMU refuses, does not answer, or is gone.
    pub(crate) fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, QmpError> {
        self.next_id += 1;
        let id = self.next_id;
        let mut line = json!({ "execute": command, "arguments": arguments, "id": id }).to_string();
        line.push('\n');
        self.stream
            .write_all(line.as_bytes())
            .map_err(|source| self.broken(source))?;
        let deadline = Instant::now() + ANSWER_WITHIN;
        loop {
            let Some(mut message) = self.read_message(deadline)? else {
                return Err(self.no_answer(command));
            };
            if message.get("event").is_some() {
                self.queue_event(message)?;
            } else if message.get("id").and_then(Value::as_u64) != Some(id) {
                return Err(self.garbage("an answer to nothing that was asked"));
            } else if let Some(error) = message.get("error") {
                return Err(QmpError::Refused {
                    path: self.path.clone(),
                    command: command.to_owned(),
                    description: error["desc"].as_str().unwrap_or("no reason").to_owned(),
                });
            } else {
                return Ok(message["return"].take());
            }
        }
    }

    /// Sends a command whose answer nobody waits for: QEMU may end upon it, or hang before it. The
    /// connection is good for [`Qmp::wait_for_end`] only from then on.
    ///
    /// # Errors
    /// When QEMU is gone.
    pub(crate) fn send_last(&mut self, command: &str) -> Result<(), QmpError> {
        let line = format!("{}\n", json!({ "execute": command }));
        self.stream
            .write_all(line.as_bytes())
            .map_err(|source| self.broken(source))
    }

    /// Waits until QEMU has closed the connection, which it does when it ends; false when it has
    /// not within `timeout`.
    pub(crate) fn wait_for_end(&mut self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        loop {
            match self.read_message(deadline) {
                Ok(Some(_)) | Err(QmpError::Garbage { .. }) => {}
                Ok(None) => return false,
                Err(_) => return true,
            }
        }
    }

    /// The process at the other end: the one that listens on the socket.
    ///
    /// # Errors
    /// When the system does not say.
    pub(crate) fn peer(&self) -> io::Result<Pid> {
        Ok(sockopt::socket_peercred(&self.stream)?.pid)
    }

    /// The next event, if one comes within `timeout`.
    ///
    /// # Errors
    /// When QEMU is gone.
    pub(crate) fn next_event(&mut self, timeout: Duration) -> Result<Option<Event>, QmpError> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(Some(event));
            }
            match self.read_message(deadline)? {
                None => return Ok(None),
                Some(message) if message.get("event").is_some() => self.queue_event(message)?,
                Some(_) => return Err(self.garbage("an answer to nothing that was asked")),
            }
        }
    }

    fn queue_event(&mut self, message: Value) -> Result<(), QmpError> {
        let event = serde_json::from_value(message).map_err(|e| self.garbage(&e.to_string()))?;
        self.events.push_back(event);
        Ok(())
    }

    /// The next line; `None` when it has not come by `deadline`.
    fn read_message(&mut self, deadline: Instant) -> Result<Option<Value>, QmpError> {
        loop {
            if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                let line = self.received.drain(..=end).collect::<Vec<_>>();
                return serde_json::from_slice(&line)
                    .map(Some)
                    .map_err(|error| self.garbage(&error.to_string()));
            }
            if self.received.len() > LONGEST_LINE {
                return Err(self.garbage("an endless line"));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            self.stream
                .set_read_timeout(Some(left))
                .map_err(|source| self.broken(source))?;
            let mut piece = [0; 16 * 1024];
            match self.stream.read(&mut piece) {
                Ok(0) => return Err(self.broken(io::ErrorKind::UnexpectedEof.into())),
                Ok(read) => self.received.extend_from_slice(&piece[..read]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.broken(error)),
            }
        }
    }

    fn no_answer(&self, command: &str) -> QmpError {
        QmpError::NoAnswer {
            path: self.path.clone(),
            command: command.to_owned(),
        }
    }

    fn broken(&self, source: io::Error) -> QmpError {
        QmpError::Broken {
            path: self.path.clone(),
            source,
        }
    }

    fn garbage(&self, problem: &str) -> QmpError {
        QmpError::Garbage {
            path: self.path.clone(),
            problem: problem.to_owned(),
        }
    }
}
