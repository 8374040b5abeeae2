//! The control connection between `migrate` and `serve`, and the fields that both add to `prepare` and `prepared`.

use std::{sync::Arc, time::Duration};

use handover::{
    AttemptId, ConnectionKind, DestinationMessage, FrameError, Preamble, SourceMessage,
};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use vamoose_link::{Conversation, ConversationError, DialError, Remote};

/// The guest that `migrate` wants to send: fields of `prepare`.
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

/// The QEMU that `serve` has for it: fields of `prepared`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Offer {
    /// The waiting QEMU's version.
    pub(crate) qemu: String,
    pub(crate) knows_zero_pages: bool,
    /// A suspended guest arrives suspended, and can be woken.
    pub(crate) keeps_suspended: bool,
}

/// The control connection failed.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ControlError {
    #[error(transparent)]
    Dial(#[from] DialError),
    #[error(transparent)]
    Conversation(#[from] ConversationError),
    #[error(transparent)]
    Frame(#[from] FrameError),
}

/// Begins a session with the server about an attempt.
pub(crate) fn connect(to: &Remote, attempt: AttemptId) -> Result<Conversation, ControlError> {
    connect_for(to, attempt, 0)
}

/// As [`connect`], for a session that is to have this many data connections soon.
pub(crate) fn connect_for(
    to: &Remote,
    attempt: AttemptId,
    data: usize,
) -> Result<Conversation, ControlError> {
    let (_, stream) = to.dial_for(1 + data)?;
    let preamble = preamble(ConnectionKind::Control, attempt);
    stream
        .write_both(&preamble, &[])
        .map_err(ConversationError::from)?;
    Ok(Conversation::new(Arc::new(stream)))
}

/// Sends a message over a new connection, and waits for the answer to it.
pub(crate) fn ask(
    to: &Remote,
    attempt: AttemptId,
    message: &SourceMessage,
    within: Duration,
) -> Result<(DestinationMessage, Conversation), ControlError> {
    let mut control = connect(to, attempt)?;
    control.send(message)?;
    Ok((answer(&mut control, within)?, control))
}

/// The server's next answer that is not about its progress.
pub(crate) fn answer(
    control: &mut Conversation,
    within: Duration,
) -> Result<DestinationMessage, ConversationError> {
    loop {
        match control.receive_within(within)? {
            DestinationMessage::Preparing
            | DestinationMessage::Starting
            | DestinationMessage::Receiving
            | DestinationMessage::Loaded => {}
            answer => return Ok(answer),
        }
    }
}

/// The first bytes of a connection to a server.
pub(crate) fn preamble(kind: ConnectionKind, attempt: AttemptId) -> [u8; handover::PREAMBLE_LEN] {
    Preamble { kind, attempt }.to_bytes()
}
