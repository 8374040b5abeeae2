//! The conversation of two gateways, exposed for the fuzz target alone.

use std::{sync::Arc, time::Duration};

use handover::encode;
use vamoose_link::Stream;

use super::{
    announce::{Conversation, ConversationError, Message, printable},
    endpoint::Target,
};

/// A message that a gateway has sent.
pub struct Heard {
    /// As it would be sent on.
    pub line: Vec<u8>,
    /// What the journal would have of it.
    pub texts: Vec<String>,
}

/// All that a gateway sends on `stream`, up to its end or the first bytes that are no message.
pub fn hear(stream: Arc<Stream>) -> Vec<Heard> {
    const LIMIT: Duration = Duration::from_secs(10);
    let (mut conversation, mut heard) = (Conversation::new(stream), Vec::new());
    loop {
        let message = match conversation.receive(LIMIT) {
            Ok(message) => message,
            Err(ConversationError::Ended(error)) => Message::Ended { error },
            Err(_) => return heard,
        };
        let is_end = matches!(message, Message::Ended { .. });
        heard.extend(encode(&message).map(|line| Heard {
            line,
            texts: texts(message),
        }));
        if is_end {
            return heard;
        }
    }
}

fn texts(message: Message) -> Vec<String> {
    match message {
        Message::Announce {
            port,
            stream,
            guest,
            ..
        } => {
            let target = Target::announced(port, stream.as_deref()).to_string();
            let guest = guest.as_deref().map(printable);
            [target].into_iter().chain(guest).collect()
        }
        Message::Refused { reason } => vec![printable(&reason)],
        Message::Ended { error } => error.into_iter().collect(),
        Message::Accepted | Message::Spoke => Vec::new(),
    }
}
