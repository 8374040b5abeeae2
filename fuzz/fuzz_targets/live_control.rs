//! A control connection of a live migration, from either side: its opening and messages, whatever the peer sends.

#![no_main]

use libfuzzer_sys::fuzz_target;
use live::protocol::{DestinationMessage, Opening, SourceMessage, receive};
use transfer::Stream;
use vamoose_fuzz::hear;

fuzz_target!(|input: &[u8]| hear(input, |stream| read(&stream, input)));

fn read(stream: &Stream, input: &[u8]) {
    let mut messages = 0;
    // As a destination hears it, or as a source that has dialled.
    if input.starts_with(b"VLIV") {
        if Opening::read(stream).is_ok() {
            while let Ok(Some(
                SourceMessage::Hello(_) | SourceMessage::State { .. } | SourceMessage::Commit,
            )) = receive(stream)
            {
                messages += 1;
            }
        }
    } else {
        while let Ok(Some(said)) = receive::<DestinationMessage>(stream) {
            drop(said);
            messages += 1;
        }
    }
    // A length and the shortest message there is.
    assert!(
        messages * 18 <= input.len(),
        "more messages than bytes for them"
    );
}
