//! What two gateways say to each other about a migration, whatever the peer sends.

#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use vamoose_fuzz::hear;
use vamoose_link::Stream;
use vamoose_relay::gateway_seam::{self, Heard};

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

fn converse(input: &[u8]) -> Vec<Heard> {
    let mut heard = Vec::new();
    hear(input, |stream: Arc<Stream>| {
        heard = gateway_seam::hear(stream)
    });
    heard
}
