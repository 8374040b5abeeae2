//! The control connection between `migrate` and `serve`, and the fields that both add to `prepare` and `prepared`.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use handover::{
    AttemptId, ConnectionKind, DestinationMessage, FrameError, Preamble, SourceMessage,
};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tracing::{Span, warn};
use vamoose_link::{Conversation, ConversationError, DialError, Remote, Stream};

use crate::qemu::{Disk, Machine};

/// The guest that `migrate` wants to send: fields of `inspect` and `prepare`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Request {
    /// The waiting QEMU's name.
    pub(crate) name: String,
    pub(crate) channels: u8,
    pub(crate) page_size: u32,
    /// How the pages will be encoded. In `prepare`, method none may stand for auto: the link is fast, and most pages will come raw.
    pub(crate) method: String,
    /// Names of the disks that are to be copied.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) disks: Vec<String>,
    /// Post-copy is to be prepared, with what the source QEMU has for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) post_copy: Option<PostCopyAbilities>,
    /// The guest is there already, and the rest of its memory is to follow.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) resumes: bool,
}

/// The answer to a request that resumes: fields of `prepared`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Resumed {
    /// All memory has come, and nothing is to follow.
    pub(crate) complete: bool,
}

/// What a QEMU has for post-copy, or both.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct PostCopyAbilities {
    /// A connection of its own for pages that the guest waits for.
    pub(crate) preempt: bool,
}

/// The QEMU that `serve` has for it: fields of `inspected`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Offer {
    /// The waiting QEMU's version.
    pub(crate) qemu: String,
    pub(crate) knows_zero_pages: bool,
    /// A suspended guest arrives suspended, and can be woken.
    pub(crate) keeps_suspended: bool,
    /// What both QEMUs have for post-copy, if that was requested. A server that does not know post-copy has no such field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) post_copy: Option<PostCopyAbilities>,
    pub(crate) machine: Machine,
    /// Its writable disks, if some are to be copied. `None` from a server that cannot take copies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) disks: Option<Vec<Disk>>,
    /// The server discards what comes over connections that measure the link. False for one of an older release.
    #[serde(default)]
    pub(crate) measures: bool,
}

/// Beginning of the cause of an abort that QEMU itself has given.
pub(crate) const QEMU_FAILED: &str = "its QEMU could not load the guest: ";

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
    converse(to.dial()?.1, attempt)
}

/// As [`connect`], for a session that is to have this many data connections soon. A server that cannot be reached yet is dialled
/// again within `limit`, until `cancel` is set: then the result is `None`.
pub(crate) fn connect_first(
    to: &Remote,
    attempt: AttemptId,
    data: usize,
    limit: Duration,
    cancel: &AtomicBool,
) -> Result<Option<Conversation>, ControlError> {
    const LOOK: Duration = Duration::from_millis(50);
    let (tell, told) = mpsc::channel();
    let (to, span) = (to.clone(), Span::current());
    // After a cancel, the thread goes on until the program ends.
    let dial = move || span.in_scope(|| tell.send(to.reach(1 + data, limit)));
    thread::Builder::new()
        .spawn(dial)
        .map_err(DialError::System)?;
    loop {
        match told.recv_timeout(LOOK) {
            Ok(reached) => return converse(reached?.1, attempt).map(Some),
            Err(RecvTimeoutError::Timeout) if !cancel.load(Ordering::Relaxed) => {}
            Err(_) => return Ok(None),
        }
    }
}

fn converse(stream: Stream, attempt: AttemptId) -> Result<Conversation, ControlError> {
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

/// The server's next answer that is not about its progress. A slow server is reported in the log.
pub(crate) fn answer(
    control: &mut Conversation,
    within: Duration,
) -> Result<DestinationMessage, ConversationError> {
    const SOON: Duration = Duration::from_secs(2);
    let mut early = control.receive_until(Instant::now() + within.min(SOON))?;
    if early.is_none() {
        warn!("the server does not answer yet; another client may hold its QEMU's monitor");
    }
    loop {
        let message = match early.take() {
            Some(message) => message,
            None => control.receive_within(within)?,
        };
        match message {
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

#[cfg(test)]
mod tests {
    use handover::{from_details, to_details};

    use super::*;

    #[test]
    fn older_server_does_not_measure() {
        let offer = Offer {
            qemu: "11.1.0".to_owned(),
            knows_zero_pages: true,
            keeps_suspended: true,
            machine: Machine::default(),
            post_copy: None,
            disks: None,
            measures: true,
        };
        let mut details = to_details(&offer).unwrap();
        assert_eq!(from_details::<Offer>(details.clone()).unwrap(), offer);
        assert_eq!(details.remove("measures"), Some(true.into()));
        assert!(!from_details::<Offer>(details).unwrap().measures);
    }
}
