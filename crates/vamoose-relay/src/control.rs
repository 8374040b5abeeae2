//! The control connection between `migrate` and `serve`: crate `handover`'s messages over a socket, and what these two
//! add to `prepare` and `prepared`.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use handover::{
    AttemptId, ConnectionKind, DestinationMessage, FrameError, Lines, Preamble, SourceMessage,
    encode,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use thiserror::Error;
use vamoose_link::{DialError, Remote, Session, Stream};

/// What `migrate` asks for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Request {
    /// The waiting QEMU's name.
    pub(crate) name: String,
    pub(crate) uuid: String,
    pub(crate) ram_bytes: u64,
    pub(crate) channels: u8,
    pub(crate) page_size: u32,
    /// How the pages will be encoded.
    pub(crate) method: String,
}

/// What `serve` has for it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Offer {
    /// The waiting QEMU's version.
    pub(crate) qemu: String,
    pub(crate) knows_zero_pages: bool,
    /// A suspended guest arrives suspended, and can be woken; false where an older release does not say so.
    #[serde(default)]
    pub(crate) keeps_suspended: bool,
}

/// The control connection failed.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ControlError {
    #[error(transparent)]
    Dial(#[from] DialError),
    #[error("the control connection broke")]
    Broken(#[from] io::Error),
    #[error("the control connection was closed by the peer")]
    Closed,
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("no answer from the server in {} s", .0.as_secs())]
    NoAnswer(Duration),
}

/// One end of a control connection.
pub(crate) struct Control {
    /// The source's session; the destination has it from who accepts.
    session: Option<Session>,
    stream: Arc<Stream>,
    lines: Lines,
}

impl Control {
    /// Begins a session with the server about an attempt.
    pub(crate) fn connect(to: &Remote, attempt: AttemptId) -> Result<Self, ControlError> {
        let (session, stream) = to.dial()?;
        stream.write_both(&preamble(ConnectionKind::Control, attempt), &[])?;
        Ok(Self {
            session: Some(session),
            ..Self::new(Arc::new(stream))
        })
    }

    /// Goes on with a connection whose preamble has been read.
    pub(crate) fn new(stream: Arc<Stream>) -> Self {
        Self {
            session: None,
            stream,
            lines: Lines::default(),
        }
    }

    /// The session, at the source.
    pub(crate) fn session(&self) -> Option<&Session> {
        self.session.as_ref()
    }

    pub(crate) fn send(&self, message: &SourceMessage) -> Result<(), ControlError> {
        Ok(self.stream.write_both(&encode(message)?, &[])?)
    }

    /// Waits for the destination's next message.
    pub(crate) fn receive(&mut self, within: Duration) -> Result<DestinationMessage, ControlError> {
        self.next_message(Some(within))
    }

    /// Waits for the source's next message, as long as it takes.
    pub(crate) fn next_request(&mut self) -> Result<SourceMessage, ControlError> {
        self.next_message(None)
    }

    fn next_message<T: DeserializeOwned>(
        &mut self,
        within: Option<Duration>,
    ) -> Result<T, ControlError> {
        let deadline = within.map(|within| Instant::now() + within);
        loop {
            if let Some(message) = self.lines.next_message()? {
                return Ok(message);
            }
            let mut piece = [0; 4096];
            match self.stream.read_until(&mut piece, deadline)? {
                Some(0) => return Err(ControlError::Closed),
                Some(read) => self.lines.push(&piece[..read]),
                None => return Err(ControlError::NoAnswer(within.unwrap_or_default())),
            }
        }
    }
}

pub(crate) fn reply(stream: &Stream, message: &DestinationMessage) -> Result<(), ControlError> {
    Ok(stream.write_both(&encode(message)?, &[])?)
}

/// The first bytes of a connection to a server.
pub(crate) fn preamble(kind: ConnectionKind, attempt: AttemptId) -> [u8; handover::PREAMBLE_LEN] {
    Preamble { kind, attempt }.to_bytes()
}

/// Bytes that are not used again and cannot be guessed.
pub(crate) fn random() -> io::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(bytes)
}
