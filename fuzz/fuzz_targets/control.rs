//! A control connection, from either side: its preamble, its messages and what `live` puts into them, whatever the
//! peer sends.

#![no_main]

use std::sync::Arc;

use handover::{
    DestinationMessage, FrameError, Lines, PREAMBLE_LEN, Preamble, SourceMessage, encode,
    from_details, to_details,
};
use libfuzzer_sys::fuzz_target;
use serde::{Serialize, de::DeserializeOwned};
use vamoose_fuzz::hear;
use vamoose_link::{Conversation, Stream};
use vamoose_live::protocol::{PrepareDetails, Purpose};

fuzz_target!(|input: &[u8]| {
    if let Some(bytes) = input.first_chunk::<PREAMBLE_LEN>()
        && let Some(preamble) = Preamble::parse(bytes)
    {
        assert_eq!(preamble.to_bytes(), *bytes);
    }
    let conversation = input.get(PREAMBLE_LEN..).unwrap_or_default();
    frame::<SourceMessage>(conversation);
    frame::<DestinationMessage>(conversation);
    hear(input, |stream| receive(&stream, input));
});

/// Whatever the pieces in which it comes, a conversation is the same.
fn frame<T: Serialize + DeserializeOwned>(bytes: &[u8]) {
    let piece = 1 + usize::from(bytes.first().copied().unwrap_or(0));
    let at_once = messages::<T>(bytes, bytes.len().max(1));
    assert_eq!(at_once, messages::<T>(bytes, piece));
    let lines = bytes.iter().filter(|byte| **byte == b'\n').count();
    assert!(at_once.len() <= lines, "more messages than lines for them");
}

/// The messages up to the first bytes that are none, as they would be sent on.
fn messages<T: Serialize + DeserializeOwned>(bytes: &[u8], piece: usize) -> Vec<Vec<u8>> {
    let (mut lines, mut messages) = (Lines::default(), Vec::new());
    for piece in bytes.chunks(piece) {
        lines.push(piece);
        loop {
            match lines.next_message::<T>() {
                Ok(Some(message)) => messages.push(again(&message)),
                Ok(None) => break,
                Err(FrameError::Malformed(_)) => return messages,
                Err(error) => panic!("no input is as long as a line may be: {error}"),
            }
        }
    }
    messages
}

/// What was parsed can be sent.
fn again<T: Serialize + DeserializeOwned>(message: &T) -> Vec<u8> {
    let bytes = encode(message).expect("what came in a line fits into one");
    let mut lines = Lines::default();
    lines.push(&bytes);
    assert!(matches!(lines.next_message::<T>(), Ok(Some(_))));
    assert!(!lines.is_in_message());
    bytes
}

/// As `live` receives it, at the destination, or at a source that has dialled.
fn receive(stream: &Arc<Stream>, input: &[u8]) {
    let mut control = Conversation::new(stream.clone());
    let purpose = Purpose::read(&mut control);
    if !input.starts_with(b"VAMOOSE") {
        while control.receive::<DestinationMessage>().is_ok() {}
        return;
    }
    while purpose.is_ok()
        && let Ok(message) = control.receive::<SourceMessage>()
    {
        if let SourceMessage::Prepare(prepare) = message
            && let Ok(details) = from_details::<PrepareDetails>(prepare.details)
        {
            let sent = to_details(&details).expect("what was read can be written");
            assert_eq!(from_details(sent).ok(), Some(details));
        }
    }
}
