//! What two gateways say to each other about a migration, whatever the peer sends.

#![no_main]

use std::{io::Write as _, os::unix::net::UnixStream, sync::Arc};

use libfuzzer_sys::fuzz_target;
use vamoose_link::Stream;
use vamoose_relay::gateway_fuzzing::{self, Heard};

/// More than the longest text of the journal, with what stands before it.
const LONGEST: usize = 1_100;

fuzz_target!(|input: &[u8]| {
    let heard = converse(input);
    for text in heard.iter().flat_map(|it| &it.texts) {
        assert!(!text.contains(char::is_control), "{text:?}");
        assert!(text.chars().count() < LONGEST, "{text:?}");
    }
    // What was understood is understood again.
    let lines: Vec<_> = heard.iter().flat_map(|it| it.line.clone()).collect();
    let again = converse(&lines);
    assert_eq!(again.len(), heard.len());
    for (again, heard) in again.iter().zip(&heard) {
        assert_eq!(again.line, heard.line);
        assert_eq!(again.texts, heard.texts);
    }
});

/// What is understood of a gateway that sends this and closes. No input is longer than the buffer of a socket, so no thread
/// is needed to send it: the sanitizer takes what a thread has not yet freed for a leak.
fn converse(input: &[u8]) -> Vec<Heard> {
    let (mut peer, ours) = UnixStream::pair().expect("there are descriptors");
    peer.write_all(input).expect("there is room for it");
    drop(peer);
    gateway_fuzzing::hear(Arc::new(Stream::from(ours)))
}
