//! The messages of two gateways about a migration, on the first stream of its session.
//!
//! ```text
//!  source's gateway                                       destination's gateway
//!   Announce { port, guest } ──────────────────────────>  dials its QEMU at that port, or what the stream leads to
//!                            <──────────────────────────  Accepted, or Refused { reason }
//!   further streams, each with a byte of its kind first: M = a connection of a migration, O = any other
//!                            <──────────────────────────  Spoke: the QEMU has sent bytes before receiving any
//!   Ended { error }          <─────────────────────────>  Ended { error }
//! ```
//!
//! Messages are lines of JSON, as on the control connections of crate `handover`. Unknown fields are ignored.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use serde::{Deserialize, Serialize};
use thiserror::Error;
use tracing::debug;
use vamoose_link::{DialError, LinkFaults, Session, Stream};

use super::{GatewayPeer, endpoint::Target};

/// A message between gateways.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Message {
    /// A migration to the QEMU that waits at this port, or connections to a stream.
    Announce {
        /// Version of the protocol.
        version: u32,
        /// 0 with a stream, which gateways without support for streams refuse.
        port: u16,
        /// The stream's name.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stream: Option<String>,
        /// The guest's name, if known.
        #[serde(default)]
        guest: Option<String>,
    },
    Accepted,
    Refused {
        reason: String,
    },
    Spoke,
    Ended {
        error: Option<String>,
    },
}

/// Version of the messages and their order.
pub(super) const VERSION: u32 = 1;

/// The first byte of a stream: a relay's connection, or one that is forwarded as bytes.
pub(super) const MIGRATION: u8 = b'M';
pub(super) const OPAQUE: u8 = b'O';

/// Time limit for the answer, in which the gateway dials its QEMU.
const ANSWER: Duration = Duration::from_secs(10);

/// Time limit for the peer's last message.
const GOODBYE: Duration = Duration::from_secs(3);

/// Interval at which the conversation is polled.
pub(super) const TICK: Duration = Duration::from_millis(20);

/// Time limit for the acknowledgement of the last bytes.
pub(super) const DRAIN: Duration = Duration::from_secs(5);

/// Why the peer's gateway has not accepted a migration.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum AnnounceError {
    #[error("the gateway of {peer} cannot be reached")]
    Dial {
        peer: String,
        #[source]
        source: Box<DialError>,
    },
    #[error(
        "the host that answers for {peer} has proved to be {shown}: `to` or `key` of {peer} belongs to another host"
    )]
    OtherHost { peer: String, shown: String },
    #[error("{peer} refuses: {reason}")]
    Refused { peer: String, reason: String },
    #[error("{peer} has as many migrations as its `migrations` allows: {most}")]
    Busy { peer: String, most: usize },
    #[error("no agreement with the gateway of {peer}")]
    Conversation {
        peer: String,
        #[source]
        source: ConversationError,
    },
}

/// The conversation of two gateways has failed.
#[derive(Debug, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ConversationError {
    #[error("it has ended the migration: {}", .0.as_deref().unwrap_or("without an error"))]
    Ended(Option<String>),
    #[error("unexpected message")]
    OutOfTurn,
    #[error(transparent)]
    Failed(#[from] vamoose_link::ConversationError),
}

/// Announces a migration to a peer's gateway, and waits for its answer.
pub(super) fn announce(
    peer: &GatewayPeer,
    target: &Target,
    guest: Option<String>,
) -> Result<(Session, Conversation), AnnounceError> {
    let name = || peer.name.clone();
    let dialled = peer.remote.dial();
    let (session, stream) = dialled.map_err(|source| AnnounceError::Dial {
        peer: name(),
        source: Box::new(source),
    })?;
    if peer.identity.as_deref() != session.identity() {
        let shown = session.peer().to_owned();
        let peer = name();
        return Err(AnnounceError::OtherHost { peer, shown });
    }
    let failed = |source| AnnounceError::Conversation {
        peer: name(),
        source,
    };
    let mut conversation = Conversation::new(Arc::new(stream));
    let (port, stream) = target.to_announce();
    let announcement = Message::Announce {
        version: VERSION,
        port,
        stream,
        guest,
    };
    conversation.send(&announcement).map_err(failed)?;
    match conversation.receive(ANSWER).map_err(failed)? {
        Message::Accepted => Ok((session, conversation)),
        Message::Refused { reason } => Err(AnnounceError::Refused {
            peer: name(),
            reason: printable(&reason),
        }),
        _ => Err(failed(ConversationError::OutOfTurn)),
    }
}

/// One end of the conversation.
pub(super) struct Conversation {
    peer: vamoose_link::Conversation,
    /// The peer's last message: its error, if there was one.
    theirs: Option<Option<String>>,
}

impl Conversation {
    pub(super) fn new(stream: Arc<Stream>) -> Self {
        let peer = vamoose_link::Conversation::new(stream);
        Self { peer, theirs: None }
    }

    pub(super) fn send(&self, message: &Message) -> Result<(), ConversationError> {
        Ok(self.peer.send(message)?)
    }

    /// Waits for the next message. The peer's last message is an error.
    pub(super) fn receive(&mut self, within: Duration) -> Result<Message, ConversationError> {
        let message = self.peer.receive_within(within)?;
        self.note_end(message)
    }

    /// The next message, if one has arrived.
    pub(super) fn poll(&mut self) -> Result<Option<Message>, ConversationError> {
        let message = self.peer.receive_until(Instant::now())?;
        message.map(|message| self.note_end(message)).transpose()
    }

    /// Ends the session after an exchange of errors. Returns the peer's error, and the faults of the session.
    pub(super) fn end_session(
        &mut self,
        session: &Session,
        error: Option<String>,
    ) -> (Option<String>, LinkFaults) {
        let theirs = self.end(error);
        if !session.drain(DRAIN) {
            debug!("the other gateway has not acknowledged the end");
        }
        let faults = session.faults();
        session.shut_down();
        (theirs, faults)
    }

    /// Sends this side's error, and waits for the peer's.
    fn end(&mut self, error: Option<String>) -> Option<String> {
        // The peer may be gone.
        if self.send(&Message::Ended { error }).is_ok() {
            self.peer.stream().finish();
        }
        let deadline = Instant::now() + GOODBYE;
        while self.theirs.is_none()
            && let Ok(Some(message)) = self.peer.receive_until(deadline)
        {
            // All other messages are obsolete.
            let _ = self.note_end(message);
        }
        self.theirs.take().flatten()
    }

    fn note_end(&mut self, message: Message) -> Result<Message, ConversationError> {
        let Message::Ended { error } = message else {
            return Ok(message);
        };
        let error = error.as_deref().map(printable);
        self.theirs = Some(error.clone());
        Err(ConversationError::Ended(error))
    }
}

/// A peer's text for the log: short, and without control characters.
pub(super) fn printable(text: &str) -> String {
    let printable = text
        .chars()
        .map(|it| if it.is_control() { '?' } else { it });
    printable.take(MOST_CHARACTERS).collect()
}

const MOST_CHARACTERS: usize = 1000;

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixStream, thread};

    use handover::{Lines, encode};
    use proptest::{collection::vec, option, prelude::*};

    use super::*;

    fn any_message() -> impl Strategy<Value = Message> {
        let text = any::<String>;
        let announced = (
            any::<u32>(),
            any::<u16>(),
            option::of(text()),
            option::of(text()),
        );
        prop_oneof![
            announced.prop_map(|(version, port, stream, guest)| Message::Announce {
                version,
                port,
                stream,
                guest,
            }),
            Just(Message::Accepted),
            text().prop_map(|reason| Message::Refused { reason }),
            Just(Message::Spoke),
            option::of(text()).prop_map(|error| Message::Ended { error }),
        ]
    }

    proptest! {
        #[test]
        fn messages_arrive_in_any_pieces(
            sent in vec(any_message(), 0..5),
            pieces in vec(1_usize..50, 1..10),
        ) {
            let bytes: Vec<_> = sent.iter().flat_map(|it| encode(it).unwrap()).collect();
            let (mut lines, mut received, mut left) = (Lines::default(), Vec::new(), &bytes[..]);
            for size in pieces.iter().cycle() {
                if left.is_empty() {
                    break;
                }
                let (piece, rest) = left.split_at(left.len().min(*size));
                lines.push(piece);
                left = rest;
                while let Some(message) = lines.next_message::<Message>().unwrap() {
                    received.push(message);
                }
            }
            prop_assert_eq!(received, sent);
            prop_assert!(!lines.is_in_message());
        }

        #[test]
        fn any_text_becomes_printable(text in any::<String>()) {
            let shown = printable(&text);
            prop_assert!(!shown.contains(char::is_control));
            prop_assert!(shown.chars().count() <= MOST_CHARACTERS);
        }
    }

    fn pair() -> [Conversation; 2] {
        let (near, far) = UnixStream::pair().unwrap();
        [near, far].map(|end| Conversation::new(Arc::new(end.into())))
    }

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn messages_arrive_whole_and_in_order() {
        let [mut near, mut far] = pair();
        let call = Message::Announce {
            version: VERSION,
            port: 49_152,
            stream: None,
            guest: Some("web1".to_owned()),
        };
        assert!(far.poll().unwrap().is_none());
        near.send(&call).unwrap();
        assert_eq!(far.receive(LIMIT).unwrap(), call);
        let ends = thread::spawn(move || near.end(Some("why".to_owned())));
        let ended = far.receive(LIMIT).unwrap_err();
        assert_eq!(ended.to_string(), "it has ended the migration: why");
        assert_eq!(far.end(None).as_deref(), Some("why"));
        assert_eq!(ends.join().unwrap(), None);
    }

    /// The wire format, which older and newer gateways have to understand.
    #[test]
    fn wire_format_is_stable() {
        let (version, port, guest) = (1, 7, None);
        let stream = Some("s".to_owned());
        let reason = "r".to_owned();
        for (text, message) in [
            (
                r#"{"announce":{"version":1,"port":7,"guest":null}}"#,
                Message::Announce {
                    version,
                    port,
                    stream: None,
                    guest: guest.clone(),
                },
            ),
            (
                r#"{"announce":{"version":1,"port":0,"stream":"s","guest":null}}"#,
                Message::Announce {
                    version,
                    port: 0,
                    stream,
                    guest,
                },
            ),
            (r#""accepted""#, Message::Accepted),
            (r#"{"refused":{"reason":"r"}}"#, Message::Refused { reason }),
            (r#""spoke""#, Message::Spoke),
            (
                r#"{"ended":{"error":null}}"#,
                Message::Ended { error: None },
            ),
        ] {
            assert_eq!(serde_json::to_string(&message).unwrap(), text);
            assert_eq!(serde_json::from_str::<Message>(text).unwrap(), message);
        }
        let newer = r#"{"announce":{"version":2,"port":7,"colour":"red"}}"#;
        assert!(serde_json::from_str::<Message>(newer).is_ok());
    }

    #[test]
    fn printable_text_is_short_and_has_no_control_characters() {
        assert_eq!(printable("a\nb\x1b[31m"), "a?b?[31m");
        assert_eq!(printable(&"x".repeat(5000)).len(), MOST_CHARACTERS);
    }
}
