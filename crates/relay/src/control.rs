//! What `migrate` and `serve` say to each other, besides the migration itself.
//!
//! Every connection to a server begins with 24 bytes: `VAMOOSE`, a kind (`C` control, `D` data) and
//! the migration's id. Behind it, on a data connection, is what a QEMU would send. On a control
//! connection each side sends lines of JSON, a request and its answer at a time:
//!
//! ```text
//!  migrate                                              serve
//!     ── prepare (name, uuid, RAM size, channels) ──────>   sets the waiting QEMU up
//!     <───────────────────── prepared (what it can do) ──
//!                 ... data connections, the migration ...
//!     ── commit ────────────────────────────────────────>   waits until it is loaded, continues it
//!     <──────────────────────────────────────── running ──
//!  or ── abort ─────────────────────────────────────────>   ends the half-loaded QEMU
//!     <──────────────────────────────── aborted (cause) ──
//! ```
//!
//! `commit` and `abort` may be repeated, over a new connection too: the answer is the same.

use std::{
    fmt,
    io::{self, Read},
    sync::Arc,
    time::Duration,
};

use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use thiserror::Error;
use transfer::{Address, SocketError, Stream, dial};

/// Names one migration on both hosts.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Id([u8; 16]);

impl Id {
    /// A name that nobody else has, or can guess.
    pub(crate) fn random() -> io::Result<Self> {
        let mut bytes = [0; 16];
        getrandom(&mut bytes, GetRandomFlags::empty())?;
        Ok(Self(bytes))
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// What a connection to a server is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Control,
    Data,
}

/// The first bytes of a connection to a server.
pub(crate) fn preamble(kind: Kind, id: Id) -> [u8; PREAMBLE_LEN] {
    let mut bytes = [0; PREAMBLE_LEN];
    bytes[..7].copy_from_slice(MAGIC);
    bytes[7] = match kind {
        Kind::Control => b'C',
        Kind::Data => b'D',
    };
    bytes[8..].copy_from_slice(&id.0);
    bytes
}

/// Parses the first bytes of a connection to a server; `None` when they are not ours.
pub(crate) fn parse_preamble(bytes: &[u8; PREAMBLE_LEN]) -> Option<(Kind, Id)> {
    let (magic, rest) = bytes.split_at(MAGIC.len());
    let (kind, id) = rest.split_first()?;
    let kind = match kind {
        b'C' => Kind::Control,
        b'D' => Kind::Data,
        _ => return None,
    };
    let id = Id(id.try_into().ok()?);
    (magic == MAGIC).then_some((kind, id))
}

pub(crate) const PREAMBLE_LEN: usize = 24;
const MAGIC: &[u8; 7] = b"VAMOOSE";

/// Version of the conversation. A server refuses any other.
pub(crate) const PROTOCOL: u32 = 1;

/// What `migrate` asks for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "kebab-case")]
pub(crate) enum Request {
    Prepare(Prepare),
    Commit(Commit),
    Abort,
}

impl Request {
    /// How long to wait for an answer.
    fn answer_within(&self) -> Duration {
        Duration::from_secs(match self {
            // A QEMU may be busy, or its monitor held by somebody else.
            Self::Prepare(_) => 60,
            // The guest stands still: a connection that is dead must not be waited for. Asking again
            // does no harm, should the server only be slow.
            Self::Commit(_) => 5,
            Self::Abort => 15,
        })
    }
}

/// Asks for a QEMU to be made ready.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Prepare {
    pub(crate) protocol: u32,
    pub(crate) name: String,
    pub(crate) uuid: String,
    pub(crate) ram_bytes: u64,
    pub(crate) channels: u8,
    pub(crate) page_size: u32,
    /// How the pages will be encoded; empty from a `migrate` that knows the first methods only.
    #[serde(default)]
    pub(crate) method: String,
}

/// Asks for the loaded guest to be made the only one there is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Commit {
    pub(crate) name: String,
    pub(crate) uuid: String,
    /// Whether it shall run; it was paused at the source otherwise.
    pub(crate) resume: bool,
}

/// What `serve` answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case")]
pub(crate) enum Answer {
    /// The QEMU waits for the migration.
    Prepared {
        qemu: String,
        knows_zero_pages: bool,
    },
    /// The guest is here, and runs if it was asked to.
    Running { state: String },
    /// Nothing of this migration is left here, and its guest has never run here.
    Aborted { cause: Option<String> },
    /// The guest has been here and may have run, but is not to be had any more.
    Unknown { reason: String },
    /// Nothing was done.
    Refused { reason: String },
}

/// The other side could not be talked to.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The server cannot be reached.
    #[error(transparent)]
    Dial(#[from] SocketError),
    /// The connection broke.
    #[error("the control connection broke: {0}")]
    Broken(#[from] io::Error),
    /// The other side does not speak our language.
    #[error("the other side sent what is not a message of ours: {0}")]
    Garbage(String),
    /// No answer in time.
    #[error("no answer from the server in time")]
    NoAnswer,
}

const LONGEST_LINE: usize = 64 * 1024;

/// One end of a control connection.
pub(crate) struct Control {
    stream: Arc<Stream>,
    received: Vec<u8>,
}

impl Control {
    /// Connects to the server at `address` about migration `id`.
    pub(crate) fn connect(
        address: &Address,
        id: Id,
        timeout: Duration,
    ) -> Result<Self, ControlError> {
        let stream = dial(address, timeout)?;
        stream.write_both(&preamble(Kind::Control, id), &[])?;
        Ok(Self::new(Arc::new(stream)))
    }

    /// Goes on with a connection whose preamble has been read.
    pub(crate) fn new(stream: Arc<Stream>) -> Self {
        Self {
            stream,
            received: Vec::new(),
        }
    }

    /// Sends a request and waits for its answer. A connection on which none came in time is of no use
    /// any more: the answer could still come, to a later request.
    pub(crate) fn ask(&mut self, request: &Request) -> Result<Answer, ControlError> {
        self.stream.set_stall_timeout(request.answer_within())?;
        self.send(request)?;
        match self.receive() {
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Err(ControlError::Broken(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                Err(ControlError::NoAnswer)
            }
            Err(error) => Err(error),
        }
    }

    /// Waits for the next request, as long as it takes; `None` when there will be none.
    pub(crate) fn next_request(&mut self) -> Result<Option<Request>, ControlError> {
        loop {
            match self.receive() {
                Err(ControlError::Broken(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
                received => return received,
            }
        }
    }

    /// Sends one message.
    pub(crate) fn send(&mut self, message: &impl Serialize) -> Result<(), ControlError> {
        let mut line = serde_json::to_vec(message)
            .map_err(|error| ControlError::Garbage(error.to_string()))?;
        line.push(b'\n');
        Ok(self.stream.write_both(&line, &[])?)
    }

    fn receive<T: DeserializeOwned>(&mut self) -> Result<Option<T>, ControlError> {
        loop {
            if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                let line = self.received.drain(..=end).collect::<Vec<_>>();
                return serde_json::from_slice(&line)
                    .map(Some)
                    .map_err(|error| ControlError::Garbage(error.to_string()));
            }
            if self.received.len() > LONGEST_LINE {
                return Err(ControlError::Garbage("an endless line".to_owned()));
            }
            let mut piece = [0; 4096];
            match (&*self.stream).read(&mut piece) {
                Ok(0) => return Ok(None),
                Ok(read) => self.received.extend_from_slice(&piece[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preamble_parses_back() {
        let id = Id::random().unwrap();
        for kind in [Kind::Control, Kind::Data] {
            let (parsed, parsed_id) = parse_preamble(&preamble(kind, id)).unwrap();
            assert!(parsed == kind && parsed_id == id);
        }
        assert!(parse_preamble(b"QEVM....................").is_none());
        let mut other_kind = preamble(Kind::Data, id);
        other_kind[7] = b'X';
        assert!(parse_preamble(&other_kind).is_none());
    }

    #[test]
    fn the_words_on_the_wire_stay_as_they_are() {
        let commit = Request::Commit(Commit {
            name: "vm".to_owned(),
            uuid: "u".to_owned(),
            resume: true,
        });
        let text = r#"{"request":"commit","name":"vm","uuid":"u","resume":true}"#;
        assert_eq!(serde_json::to_string(&commit).unwrap(), text);
        let aborted = Answer::Aborted { cause: None };
        let text = r#"{"answer":"aborted","cause":null}"#;
        assert_eq!(serde_json::to_string(&aborted).unwrap(), text);
    }
}
