//! A control connection of a live migration, from either side: its opening and messages, whatever the peer sends.

#![no_main]

use std::{io::Write as _, os::unix::net::UnixStream, thread, time::Duration};

use libfuzzer_sys::fuzz_target;
use live::protocol::{DestinationMessage, Opening, SourceMessage, receive};
use transfer::Stream;

fuzz_target!(|input: &[u8]| {
    let (mut peer, ours) = UnixStream::pair().expect("there are descriptors");
    // The peer always closes, so a wait would be a bug.
    ours.set_read_timeout(Some(Duration::from_secs(20)))
        .expect("a time that is not zero");
    thread::scope(|scope| {
        scope.spawn(move || {
            // Fails when the reader has refused something and left.
            let _ = peer.write_all(input);
        });
        let stream = Stream::Unix(ours);
        hear(&stream, input);
        stream.shut_down();
    });
});

fn hear(stream: &Stream, input: &[u8]) {
    let mut messages = 0;
    // As a destination hears it, or as a source that has dialled.
    if input.starts_with(b"VLIV") {
        if Opening::read(stream).is_ok() {
            while let Ok(Some(SourceMessage::Hello(_) | SourceMessage::State { .. } | SourceMessage::Commit)) =
                receive(stream)
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
    assert!(messages * 18 <= input.len(), "more messages than bytes for them");
}
